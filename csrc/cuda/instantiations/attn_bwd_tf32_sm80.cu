// Backward in float32 with products in TF32.
#include "../registry.h"
#include "../simt/backward_bias.cuh"
#include "../simt/backward_dkdv.cuh"
#include "../simt/backward_dq.cuh"

using Params = attn_ext::cuda::BackwardParams;
using attn_ext::cuda::simt::kBlocksPerMultiprocessor;
using attn_ext::cuda::simt::kThreads;

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    attn_bwd_dkdv_tf32_sm80(const __grid_constant__ Params params) {
  attn_ext::cuda::simt::backward_dkdv<attn_ext::cuda::simt::tf32>(params);
}

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    attn_bwd_dq_tf32_sm80(const __grid_constant__ Params params) {
  attn_ext::cuda::simt::backward_dq<attn_ext::cuda::simt::tf32>(params);
}

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    attn_bwd_bias_tf32_sm80(const __grid_constant__ Params params) {
  attn_ext::cuda::simt::backward_bias<attn_ext::cuda::simt::tf32>(params);
}

ATTN_REGISTER_KERNEL(attn_bwd_dkdv_tf32_sm80)
ATTN_REGISTER_KERNEL(attn_bwd_dq_tf32_sm80)
ATTN_REGISTER_KERNEL(attn_bwd_bias_tf32_sm80)
