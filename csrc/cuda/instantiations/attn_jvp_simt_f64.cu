// Forward mode in float64.
#include "../registry.h"
#include "../simt/jvp.cuh"

using attn_ext::cuda::simt::kBlocksPerMultiprocessor;
using attn_ext::cuda::simt::kThreads;

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    attn_jvp_simt_f64(const __grid_constant__ attn_ext::cuda::JvpParams params) {
  attn_ext::cuda::simt::jvp<double>(params);
}

ATTN_REGISTER_KERNEL(attn_jvp_simt_f64)
