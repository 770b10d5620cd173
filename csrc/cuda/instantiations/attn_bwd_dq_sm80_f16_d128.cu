#include "../registry.h"
#include "../sm80/backward_dq.cuh"

namespace cuda = attn_ext::cuda;

extern "C" __global__ void __launch_bounds__(cuda::dq_tile(128, false).threads(),
                                             cuda::dq_tile(128, false).blocks)
    attn_bwd_dq_sm80_f16_d128(const __grid_constant__ cuda::BackwardParams params) {
  cuda::BackwardDq<cuda::f16, 128, false>::run(params);
}

extern "C" __global__ void __launch_bounds__(cuda::dq_tile(128, true).threads(),
                                             cuda::dq_tile(128, true).blocks)
    attn_bwd_dq_sm80_f16_d128_full(const __grid_constant__ cuda::BackwardParams params) {
  cuda::BackwardDq<cuda::f16, 128, true>::run(params);
}

ATTN_REGISTER_KERNEL(attn_bwd_dq_sm80_f16_d128)
ATTN_REGISTER_KERNEL(attn_bwd_dq_sm80_f16_d128_full)
