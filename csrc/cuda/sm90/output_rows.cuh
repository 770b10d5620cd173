// Finished rows on their way from a warpgroup's accumulators to global memory: gathered as halves in shared memory, in
// the layout of tensor_copy.cuh, so that neighbouring lanes store neighbouring 16 bytes.
#pragma once

#include "../tile/fragment.cuh"
#include "../tile/store_rows.cuh"
#include "../tile/view.cuh"
#include "tensor_copy.cuh"
#include "wgmma.cuh"

namespace attn_ext::cuda::sm90 {

// A warp's 16 rows to shared memory; `rows`: where they are in the first panel of a tile of TileRows rows.
template <class Half, int TileRows, int N>
__device__ __forceinline__ void gather_rows(uint32_t rows, const FragmentC (&c)[N]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int k = 0; k < N / 2; k++) {  // 16 x 16 elements: the four matrices of an A fragment
    const float *x = c[2 * k].reg, *y = c[2 * k + 1].reg;
    stmatrix_x4(rows + k / 4 * panel_bytes(TileRows) + swizzled(lane % 16, 2 * (k % 4) + lane / 16),
                pack<Half>(x[0], x[1]), pack<Half>(x[2], x[3]), pack<Half>(y[0], y[1]),
                pack<Half>(y[2], y[3]));
  }
}

// The first `count` of the warp's 16 rows from there to rows `first`, ... of (batch b, head h) of the view.
template <int TileRows, int HeadDim>
__device__ __forceinline__ void store_rows(uint32_t rows, const StridedView& view, int64_t b, int64_t h,
                                           int64_t first, int count, int columns) {
  const int lane = threadIdx.x % 32;
  char* target = element<2>(view, b, h, first, 0);
  const int64_t row_bytes = view.stride[2] * 2;
  constexpr int kPieces = HeadDim / 8;
  const auto place = [&](int row, int piece) {
    return rows + piece / 8 * panel_bytes(TileRows) + swizzled(row, piece % 8);
  };
  if (wide_rows(view, columns)) {
#pragma unroll
    for (int i = 0; i < 16 * kPieces / 32; i++) {
      const int row = (i * 32 + lane) / kPieces, piece = (i * 32 + lane) % kPieces;
      if (row < count && piece * 8 < columns) {
        uint4 x;
        asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                     : "r"(place(row, piece)));
        *reinterpret_cast<uint4*>(target + row * row_bytes + piece * 16) = x;
      }
    }
  } else {
    for (int row = 0; row < count; row++) {
#pragma unroll 1  // rare: no reason for more code
      for (int column = lane; column < columns; column += 32) {
        uint16_t x;
        asm volatile("ld.shared.b16 %0, [%1];" : "=h"(x) : "r"(place(row, column / 8) + column % 8 * 2));
        *reinterpret_cast<uint16_t*>(target + row * row_bytes + column * 2) = x;
      }
    }
  }
}

// The two parts of a row's LSE, and their sum.
__device__ __forceinline__ void store_lse(const ForwardOutput& output, int64_t b, int64_t h, int64_t row,
                                          float top, float log_sum) {
  if (output.lse.present) *reinterpret_cast<float*>(element<4>(output.lse, b, h, row, 0)) = top + log_sum;
  if (output.lse_parts.present) {
    *reinterpret_cast<float*>(element<4>(output.lse_parts, b, h, row, 0)) = top;
    *reinterpret_cast<float*>(element<4>(output.lse_parts, b, h, row, 1)) = log_sum;
  }
}

}  // namespace attn_ext::cuda::sm90
