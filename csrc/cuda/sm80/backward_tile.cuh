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

// blockIdx.x, read anew: what follows from it is then computed a second time at the kernel's end and not held in
// registers all through its loops.
__device__ __forceinline__ uint32_t block_index() {
  uint32_t x;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(x));
  return x;
}

// A thread's share of a tile of both streamed operands, which lie one after the other in a stage.
template <int kDim, int kRows, int kThreads>
struct PairLoader {
  using Lanes = RowLanes<kDim, kThreads>;
  using Loader = RowLoader<kDim, kRows, kThreads>;
  static constexpr int kStreamBytes = kRows * Lanes::kRowBytes;
  static constexpr int kOperandPieces = kRows / Lanes::kRowsAtOnce * Lanes::kColumns;

  Loader first, second;

  // `shared`: the thread's first piece in the stage. Only the first `exist` rows are copied, the others become zero.
  __device__ __forceinline__ void load(uint32_t shared, int exist, const void* valid) const {
    first.load(shared, exist, valid);
    second.load(shared + kStreamBytes, exist, valid);
  }

  // A tile whose rows all exist and have no piece of 16 bytes that lies half in them: one instruction a piece, where any
  // number of bytes takes several. Pieces that lie outside are left alone: clear_outside() has made them zero. To be
  // called in every step k of a product over the head dimension: a part of the copy in each of kDim / 32 of them. The
  // assembler moves no ldmatrix across a copy; small parts hold up few. (The steps were found by trial.)
  __device__ __forceinline__ void copy_whole(uint32_t shared, int k) const {
    constexpr int kParts = kDim / 32, kFirst = kDim == 32 ? 1 : 2;
#pragma unroll
    for (int n = 0; n < 2 * kOperandPieces; n++) {
      if (n * kParts / (2 * kOperandPieces) != k - kFirst) continue;
      const Loader& loader = n < kOperandPieces ? first : second;
      const int i = n % kOperandPieces / Lanes::kColumns, c = n % kOperandPieces % Lanes::kColumns;
      copy_async_16_if(loader.chunk_bytes[c],
                       shared + n / kOperandPieces * kStreamBytes +
                           i * Lanes::kRowsAtOnce * Lanes::kRowBytes + c * Lanes::kLanes * 16,
                       loader.source + i * Lanes::kRowsAtOnce * loader.row_bytes + c * Lanes::kLanes * 16);
    }
  }

  // Zeros in the pieces of two stages, `stage_bytes` apart, that lie outside the rows: no copy writes them.
  __device__ __forceinline__ void clear_outside(uint32_t shared, int stage_bytes) const {
    for (int s = 0; s < 2; s++) {
      clear_outside(first, shared + s * stage_bytes);
      clear_outside(second, shared + s * stage_bytes + kStreamBytes);
    }
  }

  __device__ __forceinline__ void step_back() {
    first.step_back();
    second.step_back();
  }

 private:
  static __device__ __forceinline__ void clear_outside(const Loader& loader, uint32_t shared) {
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
};

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

struct Nothing {
  __device__ __forceinline__ void operator()(int) const {}
};

// c += own * stream^T for kN rows of the stream that start at `stream`, a lane's address of a B fragment, in columns of c
// from fragment `column` on. between(k) is called for each 16 of the head dimension, between its loads and its products.
template <class Half, int kDim, int kM, int kN, class Own, int kColumns, class Between = Nothing>
__device__ __forceinline__ void multiply_rows(FragmentC (&c)[kM][kColumns], const Own& own, uint32_t stream,
                                              int column = 0, Between&& between = {}) {
#pragma unroll
  for (int k = 0; k < kDim / 16; k++) {
    FragmentA a[kM];
    uint32_t b[kN / 16][4];
    own.get(a, k);
#pragma unroll
    for (int n = 0; n < kN / 16; n++) ldmatrix_x4(b[n], stream + n * 16 * shared_row_bytes(kDim) + k * 32);
    between(k);
#pragma unroll
    for (int n = 0; n < kN / 16; n++) {
#pragma unroll
      for (int m = 0; m < kM; m++) {
        mma<Half>(c[m][column + 2 * n], a[m], b[n][0], b[n][1]);
        mma<Half>(c[m][column + 2 * n + 1], a[m], b[n][2], b[n][3]);
      }
    }
  }
}

// The last products of a tile, put off until the next tile's first fragments are on their way: else the tensor core
// would wait for these.
template <class Half, int kDim, int kM>
struct LateProducts {
  // Of kDim / 16: eight mma; four at head dim 256, where registers are scarce.
  static constexpr int kCount = kM == 1 && kDim < 256 ? 4 : 2;
  FragmentA a[kM];
  uint32_t b[kCount][4];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < 4; i++) {
#pragma unroll
      for (int m = 0; m < kM; m++) a[m].reg[i] = 0;
#pragma unroll
      for (int d = 0; d < kCount; d++) b[d][i] = 0;
    }
  }

  __device__ __forceinline__ void add_to(FragmentC (&sum)[kM][kDim / 8]) const {
#pragma unroll
    for (int d = 0; d < kCount; d++) {
#pragma unroll
      for (int m = 0; m < kM; m++) {
        mma<Half>(sum[m][kDim / 8 - 2 * kCount + 2 * d], a[m], b[d][0], b[d][1]);
        mma<Half>(sum[m][kDim / 8 - 2 * kCount + 2 * d + 1], a[m], b[d][2], b[d][3]);
      }
    }
  }
};

// sum += a * stream for 16 rows of the stream, a lane's address of a transposed B fragment; all but the last 16 kLate
// columns of the sum.
template <class Half, int kDim, int kM, int kLate = 0>
__device__ __forceinline__ void multiply_columns(FragmentC (&sum)[kM][kDim / 8], const FragmentA (&a)[kM],
                                                 uint32_t stream) {
#pragma unroll
  for (int d = 0; d < kDim / 16 - kLate; d++) {
    uint32_t b[4];
    ldmatrix_x4_transposed(b, stream + d * 32);
#pragma unroll
    for (int m = 0; m < kM; m++) {
      mma<Half>(sum[m][2 * d], a[m], b[0], b[1]);
      mma<Half>(sum[m][2 * d + 1], a[m], b[2], b[3]);
    }
  }
}

// The same, with the last products left to `late`.
template <class Half, int kDim, int kM>
__device__ __forceinline__ void multiply_columns(FragmentC (&sum)[kM][kDim / 8], const FragmentA (&a)[kM],
                                                 uint32_t stream, LateProducts<Half, kDim, kM>& late) {
  using Late = LateProducts<Half, kDim, kM>;
  multiply_columns<Half, kDim, kM, Late::kCount>(sum, a, stream);
#pragma unroll
  for (int m = 0; m < kM; m++) late.a[m] = a[m];
#pragma unroll
  for (int d = 0; d < Late::kCount; d++)
    ldmatrix_x4_transposed(late.b[d], stream + (kDim / 16 - Late::kCount + d) * 32);
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
}

}  // namespace attn_ext::cuda
