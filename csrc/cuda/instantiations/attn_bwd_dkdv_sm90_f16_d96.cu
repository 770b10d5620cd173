#include "../registry.h"
#include "../sm90/backward_dkdv.cuh"

namespace sm90 = attn_ext::cuda::sm90;

extern "C" __global__ void __launch_bounds__(sm90::kBackwardThreads, 1)
    attn_bwd_dkdv_sm90_f16_d96(const __grid_constant__ sm90::BackwardParams params) {
  sm90::run_backward<sm90::BackwardDkDv<attn_ext::cuda::f16, 96>>(params);
}

ATTN_REGISTER_KERNEL(attn_bwd_dkdv_sm90_f16_d96)
