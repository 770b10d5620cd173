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

// Copies a tile whose rows all exist and have no piece of 16 bytes that lies half in them: one predicated instruction a
// piece, where any number of bytes takes several. The pieces that lie outside are left alone: clear_outside() has made
// them zero.
template <int kDim, int kRows, int kThreads>
__device__ __forceinline__ void copy_whole_pieces(const RowLoader<kDim, kRows, kThreads>& loader,
                                                  uint32_t shared) {
  using Lanes = RowLanes<kDim, kThreads>;
  const char* from = loader.source;
#pragma unroll
  for (int i = 0; i < kRows / Lanes::kRowsAtOnce; i++) {
#pragma unroll
    for (int c = 0; c < Lanes::kColumns; c++) {
      if (loader.chunk_bytes[c] > 0) {
        copy_async_16(shared + i * Lanes::kRowsAtOnce * Lanes::kRowBytes + c * Lanes::kLanes * 16,
                      from + c * Lanes::kLanes * 16);
      }
    }
    from += Lanes::kRowsAtOnce * loader.row_bytes;
  }
}

template <int kDim, int kRows, int kThreads>
__device__ __forceinline__ void clear_outside(const RowLoader<kDim, kRows, kThreads>& loader,
                                              uint32_t shared) {
  using Lanes = RowLanes<kDim, kThreads>;
#pragma unroll 1
  for (int i = 0; i < kRows / Lanes::kRowsAtOnce; i++) {
#pragma unroll
    for (int c = 0; c < Lanes::kColumns; c++) {
      if (loader.chunk_bytes[c] == 0) {
        asm volatile("st.shared.v4.u32 [%0], {%1,%1,%1,%1};" ::"r"(
                         shared + i * Lanes::kRowsAtOnce * Lanes::kRowBytes + c * Lanes::kLanes * 16),
                     "r"(0));
      }
    }
  }
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

// Two such products at once. With 16 rows a warp, one alone would be too few independent sums to hide the latency of mma.
template <class Half, int kDim, int kM, int kN, class Own, class OtherOwn>
__device__ __forceinline__ void multiply_rows(FragmentC (&c)[kM][kN / 8], const Own& own, uint32_t stream,
                                              FragmentC (&other_c)[kM][kN / 8], const OtherOwn& other_own,
                                              uint32_t other_stream) {
#pragma unroll
  for (int k = 0; k < kDim / 16; k++) {
    FragmentA a[kM], other_a[kM];
    own.get(a, k);
    other_own.get(other_a, k);
#pragma unroll
    for (int n = 0; n < kN / 16; n++) {
      const int offset = n * 16 * shared_row_bytes(kDim) + k * 32;
      uint32_t b[4], other_b[4];
      ldmatrix_x4(b, stream + offset);
      ldmatrix_x4(other_b, other_stream + offset);
#pragma unroll
      for (int m = 0; m < kM; m++) {
        mma<Half>(c[m][2 * n], a[m], b[0], b[1]);
        mma<Half>(c[m][2 * n + 1], a[m], b[2], b[3]);
        mma<Half>(other_c[m][2 * n], other_a[m], other_b[0], other_b[1]);
        mma<Half>(other_c[m][2 * n + 1], other_a[m], other_b[2], other_b[3]);
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

}  // namespace attn_ext::cuda
