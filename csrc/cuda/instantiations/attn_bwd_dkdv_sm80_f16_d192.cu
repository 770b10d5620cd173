#include "../registry.h"
#include "../sm80/backward_dkdv.cuh"

namespace cuda = attn_ext::cuda;

extern "C" __global__ void __launch_bounds__(cuda::dkdv_tile(192, false).threads(),
                                             cuda::dkdv_tile(192, false).blocks)
    attn_bwd_dkdv_sm80_f16_d192(const __grid_constant__ cuda::BackwardParams params) {
  cuda::BackwardDkDv<cuda::f16, 192, false>::run(params);
}

extern "C" __global__ void __launch_bounds__(cuda::dkdv_tile(192, true).threads(),
                                             cuda::dkdv_tile(192, true).blocks)
    attn_bwd_dkdv_sm80_f16_d192_full(const __grid_constant__ cuda::BackwardParams params) {
  cuda::BackwardDkDv<cuda::f16, 192, true>::run(params);
}

ATTN_REGISTER_KERNEL(attn_bwd_dkdv_sm80_f16_d192)
ATTN_REGISTER_KERNEL(attn_bwd_dkdv_sm80_f16_d192_full)
