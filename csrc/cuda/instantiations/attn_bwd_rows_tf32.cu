#include "../registry.h"
#include "../sm80/backward_rows.cuh"

namespace cuda = attn_ext::cuda;

extern "C" __global__ void __launch_bounds__(cuda::kBackwardRowThreads)
    attn_bwd_rows_tf32(const __grid_constant__ cuda::BackwardParams params) {
  cuda::BackwardRows<cuda::simt::tf32>::run(params);
}

ATTN_REGISTER_KERNEL(attn_bwd_rows_tf32)
