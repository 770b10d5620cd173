#include "../registry.h"
#include "../sm80/backward_dkdv.cuh"

namespace cuda = attn_ext::cuda;

extern "C" __global__ void __launch_bounds__(cuda::dkdv_tile(64, false).threads(),
                                             cuda::dkdv_tile(64, false).blocks)
    attn_bwd_dkdv_sm80_bf16_d64(const __grid_constant__ cuda::BackwardParams params) {
  cuda::BackwardDkDv<cuda::bf16, 64, false>::run(params);
}

extern "C" __global__ void __launch_bounds__(cuda::dkdv_tile(64, true).threads(),
                                             cuda::dkdv_tile(64, true).blocks)
    attn_bwd_dkdv_sm80_bf16_d64_full(const __grid_constant__ cuda::BackwardParams params) {
  cuda::BackwardDkDv<cuda::bf16, 64, true>::run(params);
}

ATTN_REGISTER_KERNEL(attn_bwd_dkdv_sm80_bf16_d64)
ATTN_REGISTER_KERNEL(attn_bwd_dkdv_sm80_bf16_d64_full)
