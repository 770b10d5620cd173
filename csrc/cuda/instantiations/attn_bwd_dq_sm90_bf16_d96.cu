#include "../registry.h"
#include "../sm90/backward_dq.cuh"

namespace sm90 = attn_ext::cuda::sm90;

extern "C" __global__ void __launch_bounds__(sm90::kBackwardThreads, 1)
    attn_bwd_dq_sm90_bf16_d96(const __grid_constant__ sm90::BackwardParams params) {
  sm90::run_backward<sm90::BackwardDq<attn_ext::cuda::bf16, 96>>(params);
}

ATTN_REGISTER_KERNEL(attn_bwd_dq_sm90_bf16_d96)
