// Backward in float16 with head dims above 256.
#include "../registry.h"
#include "../simt/backward_bias.cuh"
#include "../simt/backward_dkdv.cuh"
#include "../simt/backward_dq.cuh"

using Params = attn_ext::cuda::BackwardParams;
using attn_ext::cuda::simt::kBlocksPerMultiprocessor;
using attn_ext::cuda::simt::kThreads;

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    attn_bwd_dkdv_simt_f16(const __grid_constant__ Params params) {
  attn_ext::cuda::simt::backward_dkdv<attn_ext::cuda::f16>(params);
}

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    attn_bwd_dq_simt_f16(const __grid_constant__ Params params) {
  attn_ext::cuda::simt::backward_dq<attn_ext::cuda::f16>(params);
}

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    attn_bwd_bias_simt_f16(const __grid_constant__ Params params) {
  attn_ext::cuda::simt::backward_bias<attn_ext::cuda::f16>(params);
}

ATTN_REGISTER_KERNEL(attn_bwd_dkdv_simt_f16)
ATTN_REGISTER_KERNEL(attn_bwd_dq_simt_f16)
ATTN_REGISTER_KERNEL(attn_bwd_bias_simt_f16)
