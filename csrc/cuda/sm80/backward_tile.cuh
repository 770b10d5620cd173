// What the backward kernels of the tensor cores share: copies of tiles into shared memory, products of a warp's rows
// with a streamed tile, and the store of gradients.
#pragma once

#include "../kernel_params.h"
#include "../tile/load_rows.cuh"
#include "../tile/store_rows.cuh"
#include "../tile/visibility.cuh"
#include "backward_sizes.h"

namespace attn_ext::cuda {

template <bool kValue>
struct Bool {
  static constexpr bool value = kValue;
};

__device__ __forceinline__ float4 load_shared(uint32_t address) {
  float4 x;
  asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "r"(address));
  return x;
}

// A warp's own rows of one operand: kRows x kDim halves as A fragments, in registers or loaded at each use.
template <int kDim, int kRows, bool kHeld>
struct OwnOperand {
  static constexpr int kM = kRows / 16, kK = kDim / 16;
  FragmentA held[kHeld ? kK : 1][kM];
  uint32_t address;

  __device__ __forceinline__ void set(uint32_t shared_rows) {
    address = shared_rows;
    if constexpr (kHeld) {
#pragma unroll
      for (int k = 0; k < kK; k++) {
#pragma unroll
        for (int m = 0; m < kM; m++)
          ldmatrix_x4(held[k][m].reg, address + m * 16 * shared_row_bytes(kDim) + k * 32);
      }
    }
  }

  __device__ __forceinline__ void get(FragmentA (&a)[kM], int k) const {
#pragma unroll
    for (int m = 0; m < kM; m++) {
      if constexpr (kHeld) {
        a[m] = held[k][m];
      } else {
        ldmatrix_x4(a[m].reg, address + m * 16 * shared_row_bytes(kDim) + k * 32);
      }
    }
  }
};

// c += own * stream^T for kN rows of the stream that start at `stream`, a lane's address of a B fragment.
template <class Half, int kDim, int kM, int kN, class Own>
__device__ __forceinline__ void multiply_rows(FragmentC (&c)[kM][kN / 8], const Own& own, uint32_t stream) {
#pragma unroll
  for (int k = 0; k < kDim / 16; k++) {
    FragmentA a[kM];
    own.get(a, k);
#pragma unroll
    for (int n = 0; n < kN / 16; n++) {
      uint32_t b[4];
      ldmatrix_x4(b, stream + n * 16 * shared_row_bytes(kDim) + k * 32);
#pragma unroll
      for (int m = 0; m < kM; m++) {
        mma<Half>(c[m][2 * n], a[m], b[0], b[1]);
        mma<Half>(c[m][2 * n + 1], a[m], b[2], b[3]);
      }
    }
  }
}

// sum += a * stream for 16 rows of the stream, a lane's address of a transposed B fragment.
template <class Half, int kDim, int kM>
__device__ __forceinline__ void multiply_columns(FragmentC (&sum)[kM][kDim / 8], const FragmentA (&a)[kM],
                                                 uint32_t stream) {
#pragma unroll
  for (int d = 0; d < kDim / 16; d++) {
    uint32_t b[4];
    ldmatrix_x4_transposed(b, stream + d * 32);
#pragma unroll
    for (int m = 0; m < kM; m++) {
      mma<Half>(sum[m][2 * d], a[m], b[0], b[1]);
      mma<Half>(sum[m][2 * d + 1], a[m], b[2], b[3]);
    }
  }
}

// Two C fragments side by side as one A fragment.
template <class Half>
__device__ __forceinline__ FragmentA pack(const FragmentC& left, const FragmentC& right) {
  return {{pack<Half>(left.reg[0], left.reg[1]), pack<Half>(left.reg[2], left.reg[3]),
           pack<Half>(right.reg[0], right.reg[1]), pack<Half>(right.reg[2], right.reg[3])}};
}

template <int kM, int kN>
__device__ __forceinline__ void clear(FragmentC (&c)[kM][kN]) {
#pragma unroll
  for (int m = 0; m < kM; m++) {
#pragma unroll
    for (int n = 0; n < kN; n++) {
#pragma unroll
      for (int e = 0; e < 4; e++) c[m][n].reg[e] = 0.0f;
    }
  }
}

// Writes a warp's rows of a gradient: factor * sum in rows first_row .. of (b, h), zero from row `valid` on, nothing
// from row `rows` on. They pass through `shared`, memory of the warp's own for its 16 kM rows.
template <class Half, int kDim, int kM>
__device__ void store_gradient(FragmentC (&sum)[kM][kDim / 8], float factor, const StridedView& view,
                               int64_t b, int64_t h, int first_row, int valid, int rows, int dim,
                               char* shared) {
#pragma unroll
  for (int m = 0; m < kM; m++) {
#pragma unroll
    for (int n = 0; n < kDim / 8; n++) {
#pragma unroll
      for (int e = 0; e < 4; e++) {
        const int row = first_row + m * 16 + e / 2 * 8 + int(threadIdx.x) % 32 / 4;
        sum[m][n].reg[e] = row < valid ? sum[m][n].reg[e] * factor : 0.0f;
      }
    }
    gather_rows<Half, kDim>(shared + m * 16 * shared_row_bytes(kDim), sum[m]);
  }
  __syncwarp();  // the rows are complete before other lanes read them
  store_rows<kDim, 16 * kM>(shared, view, b, h, first_row, min(rows - first_row, 16 * kM), dim);
  __syncwarp();  // all are read before another gradient takes the memory
}

// The visibility rules for tiles that need a mask. Element (row, column) of a lane's fragments lies at a distance
// key - query that differs from element (0, 0)'s by a number known at compile time, so one subtraction and one unsigned
// comparison tell whether it lies in [reach_left, reach_right].
struct TileMask {
  uint32_t from_left, width;  // distance of element (0, 0) to the left end; length of the interval
  int left;                   // rows of the stream that exist, from element (0, 0) on

  // `key` and `query` of element (0, 0).
  __device__ __forceinline__ TileMask(const Visibility& visible, int key, int query, int left) : left(left) {
    // No two positions are farther apart than an int says, so clamped reaches mean the same.
    const int64_t most = 2147483647;
    const int64_t begin = min(max(visible.reach_left, -most - 1), most),
                  end = min(max(visible.reach_right, -most - 1), most);
    from_left = uint32_t(key) - uint32_t(query) - uint32_t(begin);
    width = uint32_t(end - begin);
    if (end < begin) this->left = 0;
  }

  // For the element that lies `distance` farther to the right of the diagonal, in row `streamed` of the stream after
  // element (0, 0)'s.
  __device__ __forceinline__ bool visible(int distance, int streamed) const {
    return from_left + uint32_t(distance) <= width && streamed < left;
  }
};

}  // namespace attn_ext::cuda
