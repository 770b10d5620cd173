// Finished rows on their way from C fragments to global memory: gathered as halves in shared memory, so that
// neighbouring lanes store neighbouring 16 bytes.
#pragma once

#include "../../attention_params.h"
#include "fragment.cuh"
#include "shared_layout.h"
#include "view.cuh"

namespace attn_ext::cuda {

// Whether rows can be stored 16 bytes at a time.
__device__ __forceinline__ bool wide_rows(const StridedView& view, int64_t columns) {
  const int64_t steps = view.stride[0] | view.stride[1] | view.stride[2] | columns;
  return (reinterpret_cast<uintptr_t>(view.data) % 16 == 0) && steps % 8 == 0;
}

// One warp's 16 rows from fragments to shared memory. Row lane / 4 (+ 8) of the fragments is row lane / 4 (+ 8) there;
// rows 16 bytes off a multiple of 128 apart make the 8 x 4 lanes' words fall into 32 different banks.
template <class Half, int HeadDim>
__device__ __forceinline__ void gather_rows(char* shared, const FragmentC (&rows)[HeadDim / 8]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    char* row = shared + (lane / 4 + 8 * r) * shared_row_bytes(HeadDim) + lane % 4 * 4;
#pragma unroll
    for (int d = 0; d < HeadDim / 8; d++) {
      *reinterpret_cast<uint32_t*>(row + d * 16) = pack<Half>(rows[d].reg[2 * r], rows[d].reg[2 * r + 1]);
    }
  }
}

// The warp's `count` rows (at most Rows) from shared memory to rows `first`, ... of (batch b, head h) of the view.
template <int HeadDim, int Rows>
__device__ __forceinline__ void store_rows(const char* shared, const StridedView& view, int64_t b, int64_t h,
                                           int64_t first, int count, int columns) {
  const int lane = threadIdx.x % 32;
  char* rows = element<2>(view, b, h, first, 0);
  const int64_t row_bytes = view.stride[2] * 2;
  if (wide_rows(view, columns)) {
    constexpr int kChunks = HeadDim / 8;
#pragma unroll
    for (int i = 0; i < Rows * kChunks / 32; i++) {
      const int row = (i * 32 + lane) / kChunks, chunk = (i * 32 + lane) % kChunks;
      if (row < count && chunk * 8 < columns) {
        *reinterpret_cast<uint4*>(rows + row * row_bytes + chunk * 16) =
            *reinterpret_cast<const uint4*>(shared + row * shared_row_bytes(HeadDim) + chunk * 16);
      }
    }
  } else {
    for (int row = 0; row < count; row++) {
#pragma unroll 1  // rare: no reason for more code
      for (int column = lane; column < columns; column += 32) {
        *reinterpret_cast<uint16_t*>(rows + row * row_bytes + column * 2) =
            *reinterpret_cast<const uint16_t*>(shared + row * shared_row_bytes(HeadDim) + column * 2);
      }
    }
  }
}

}  // namespace attn_ext::cuda
