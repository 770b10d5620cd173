// What the instantiation files of the forward consist of: the kernels of one half type and head-dim bucket.
#pragma once

#include "../registry.h"
#include "forward.cuh"
#include "forward_full.cuh"

namespace attn_ext::cuda {

template <class Half, int HeadDim, ForwardVariant Variant>
__device__ __forceinline__ void forward_variant(const ForwardParams& params) {
  if constexpr (Variant == ForwardVariant::kFull) {
    attn_forward_full<Half, HeadDim>(params);
  } else {
    attn_forward<Half, HeadDim, Variant>(params);
  }
}

}  // namespace attn_ext::cuda

#define ATTN_FORWARD_KERNEL(name, half, head_dim, variant)                                           \
  extern "C" __global__ void __launch_bounds__(                                                      \
      attn_ext::cuda::forward_tile(head_dim, attn_ext::cuda::ForwardVariant::variant).threads(),     \
      attn_ext::cuda::forward_tile(head_dim, attn_ext::cuda::ForwardVariant::variant).blocks_per_sm) \
      name(const __grid_constant__ attn_ext::cuda::ForwardParams params) {                           \
    attn_ext::cuda::forward_variant<attn_ext::cuda::half, head_dim,                                  \
                                    attn_ext::cuda::ForwardVariant::variant>(params);                \
  }                                                                                                  \
  ATTN_REGISTER_KERNEL(name)
