// Tensors as TMA, Hopper's copy engine, reads them: described by the planner as plain data, encoded by launch.cu.
#pragma once

#include <algorithm>

#include "../attention_params.h"

namespace attn_ext::cuda {

// A tensor of halves in the order TMA counts, (column, row, head, batch), read in boxes of 64 columns (128 bytes, the
// swizzle's width) and `box_rows` rows.
struct TensorMap {
  int64_t params_offset = 0;  // where the encoded map belongs in the launch's params
  DType dtype = DType::kFloat16;
  const void* data = nullptr;
  int64_t size[4] = {};
  int64_t stride_bytes[3] = {};  // of row, head and batch
  int32_t box_rows = 0;
};

inline TensorMap tensor_map(int64_t params_offset, const StridedView& view, int64_t batch, int64_t heads,
                            int64_t rows, int64_t columns, int box_rows) {
  TensorMap map{params_offset, view.dtype, view.data, {columns, rows, heads, batch}, {}, box_rows};
  for (int axis = 0; axis < 3; axis++) {
    // The stride of an axis of size 1 means nothing, but must be legal.
    map.stride_bytes[axis] = map.size[axis + 1] == 1 ? 16 : view.stride[2 - axis] * size_of(view.dtype);
  }
  return map;
}

// What cuTensorMapEncodeTiled demands (CUDA driver API, "Tensor Map Object Management"). Strides of 0 it does not speak
// of, so they are left to kernels that compute their own addresses.
inline bool is_encodable(const TensorMap& map) {
  const auto legal_size = [](int64_t size) { return size > 0 && size < int64_t(1) << 32; };
  const auto legal_stride = [](int64_t bytes) {
    return bytes > 0 && bytes < int64_t(1) << 40 && bytes % 16 == 0;
  };
  return reinterpret_cast<uintptr_t>(map.data) % 16 == 0 && std::all_of(map.size, map.size + 4, legal_size) &&
         std::all_of(map.stride_bytes, map.stride_bytes + 3, legal_stride);
}

}  // namespace attn_ext::cuda
