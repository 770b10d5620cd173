#include "../registry.h"
#include "../sm80/backward_dq.cuh"

namespace cuda = attn_ext::cuda;

extern "C" __global__ void __launch_bounds__(cuda::dq_tile(32, false).threads(),
                                             cuda::dq_tile(32, false).blocks)
    attn_bwd_dq_sm80_bf16_d32(const __grid_constant__ cuda::BackwardParams params) {
  cuda::BackwardDq<cuda::bf16, 32, false>::run(params);
}

extern "C" __global__ void __launch_bounds__(cuda::dq_tile(32, true).threads(),
                                             cuda::dq_tile(32, true).blocks)
    attn_bwd_dq_sm80_bf16_d32_full(const __grid_constant__ cuda::BackwardParams params) {
  cuda::BackwardDq<cuda::bf16, 32, true>::run(params);
}

ATTN_REGISTER_KERNEL(attn_bwd_dq_sm80_bf16_d32)
ATTN_REGISTER_KERNEL(attn_bwd_dq_sm80_bf16_d32_full)
