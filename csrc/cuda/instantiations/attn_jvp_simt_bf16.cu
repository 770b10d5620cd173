// Forward mode in bfloat16 with head dims above 256.
#include "../registry.h"
#include "../simt/jvp.cuh"

using attn_ext::cuda::simt::kBlocksPerMultiprocessor;
using attn_ext::cuda::simt::kThreads;

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    attn_jvp_simt_bf16(const __grid_constant__ attn_ext::cuda::JvpParams params) {
  attn_ext::cuda::simt::jvp<attn_ext::cuda::bf16>(params);
}

ATTN_REGISTER_KERNEL(attn_jvp_simt_bf16)
