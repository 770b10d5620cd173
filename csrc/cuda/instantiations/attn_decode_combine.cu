#include "../registry.h"
#include "../sm80/decode_combine.cuh"

namespace cuda = attn_ext::cuda;

extern "C" __global__ void __launch_bounds__(cuda::kCombineThreads)
    attn_decode_combine_f16(const __grid_constant__ cuda::ForwardParams params) {
  cuda::combine_splits<cuda::f16>(params);
}
ATTN_REGISTER_KERNEL(attn_decode_combine_f16)

extern "C" __global__ void __launch_bounds__(cuda::kCombineThreads)
    attn_decode_combine_bf16(const __grid_constant__ cuda::ForwardParams params) {
  cuda::combine_splits<cuda::bf16>(params);
}
ATTN_REGISTER_KERNEL(attn_decode_combine_bf16)
