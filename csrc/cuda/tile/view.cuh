// Addresses in strided tensors whose element size is known when the kernel is compiled.
#pragma once

#include "../../attention_params.h"

namespace attn_ext::cuda {

template <int ElementBytes>
__device__ __forceinline__ char* element(const StridedView& view, int64_t b, int64_t h, int64_t row,
                                         int64_t column) {
  return static_cast<char*>(view.data) + ElementBytes * (b * view.stride[0] + h * view.stride[1] +
                                                         row * view.stride[2] + column * view.stride[3]);
}

}  // namespace attn_ext::cuda
