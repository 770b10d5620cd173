// Backward in float64.
#include "../registry.h"
#include "../simt/backward_bias.cuh"
#include "../simt/backward_dkdv.cuh"
#include "../simt/backward_dq.cuh"

using Params = attn_ext::cuda::BackwardParams;
using attn_ext::cuda::simt::kBlocksPerMultiprocessor;
using attn_ext::cuda::simt::kThreads;

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    attn_bwd_dkdv_simt_f64(const __grid_constant__ Params params) {
  attn_ext::cuda::simt::backward_dkdv<double>(params);
}

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    attn_bwd_dq_simt_f64(const __grid_constant__ Params params) {
  attn_ext::cuda::simt::backward_dq<double>(params);
}

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    attn_bwd_bias_simt_f64(const __grid_constant__ Params params) {
  attn_ext::cuda::simt::backward_bias<double>(params);
}

ATTN_REGISTER_KERNEL(attn_bwd_dkdv_simt_f64)
ATTN_REGISTER_KERNEL(attn_bwd_dq_simt_f64)
ATTN_REGISTER_KERNEL(attn_bwd_bias_simt_f64)
