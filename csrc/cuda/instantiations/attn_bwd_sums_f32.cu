#include "../registry.h"
#include "../sm80/backward_sums.cuh"

namespace cuda = attn_ext::cuda;

extern "C" __global__ void __launch_bounds__(cuda::kBackwardSumThreads)
    attn_bwd_sums_f32(const __grid_constant__ cuda::BackwardParams params) {
  cuda::BackwardSums<float>::run(params);
}

ATTN_REGISTER_KERNEL(attn_bwd_sums_f32)
