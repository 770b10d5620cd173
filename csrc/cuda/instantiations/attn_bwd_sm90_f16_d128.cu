#include "../registry.h"
#include "../sm90/backward.cuh"

namespace sm90 = attn_ext::cuda::sm90;

extern "C" __global__ void __launch_bounds__(sm90::kBackwardThreads, 1)
    attn_bwd_sm90_f16_d128(const __grid_constant__ sm90::BackwardParams params) {
  sm90::run_backward<attn_ext::cuda::f16, 128>(params);
}

extern "C" __global__ void __launch_bounds__(sm90::sums_threads(128))
    attn_bwd_dq_sm90_f16_d128(const __grid_constant__ attn_ext::cuda::BackwardParams params) {
  sm90::store_query_gradients<attn_ext::cuda::f16, 128>(params);
}

ATTN_REGISTER_KERNEL(attn_bwd_sm90_f16_d128)
ATTN_REGISTER_KERNEL(attn_bwd_dq_sm90_f16_d128)
