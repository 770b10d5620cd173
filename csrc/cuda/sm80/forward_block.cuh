// What one block of the forward kernels holds, and its steps: the two products and the store of finished rows.
//
// Shared memory: two stages of K, two of V, and Q, unless Q lives in registers.
#pragma once

#include "../kernel_params.h"
#include "../tile/fragment.cuh"
#include "../tile/load_rows.cuh"
#include "../tile/math.cuh"
#include "../tile/store_rows.cuh"
#include "../tile/view.cuh"
#include "tile_sizes.h"

namespace attn_ext::cuda {

template <class Half, int HeadDim, ForwardVariant Variant>
struct ForwardBlock {
  static constexpr ForwardTile kTile = forward_tile(HeadDim, Variant);
  static constexpr int kRowBytes = shared_row_bytes(HeadDim);
  static constexpr int kM = kTile.warp_rows / 16;  // row fragments a warp
  static constexpr int kN = kTile.keys / 8;        // key fragments of S
  static constexpr int kSteps = HeadDim / 16;      // k steps of Q K^T, pairs of column fragments of O
  using QueryLoader = RowLoader<HeadDim, kTile.rows(), kTile.threads()>;
  using Scores = FragmentC[kM][kN];
  using Probabilities = FragmentA[kN / 2][kM];

  FragmentC out[kM][HeadDim / 8];  // sum of exp(s - maximum) v, this warp's rows
  float minus_max[kM][2];  // minus the maximum, of rows lane / 4 and lane / 4 + 8 of each row fragment
  float sum[kM][2];        // this thread's share of the sum of exp(s - maximum)
  FragmentA query[kTile.queries_in_registers ? kSteps : 1][kM];
  uint32_t query_shared, key_shared, value_shared;  // this lane's ldmatrix addresses in the first stage

  static constexpr uint32_t kKeyStage = kTile.key_bytes();
  static constexpr uint32_t kValueOffset = 2 * kKeyStage, kQueryOffset = 4 * kKeyStage;
  // Queries on their way to registers fit in V's stages, which are not in use before.
  static constexpr uint32_t kQueryLanding = kTile.queries_in_registers ? kValueOffset : kQueryOffset;
  static_assert(!kTile.queries_in_registers || kTile.rows() <= 2 * kTile.keys);
  // Where finished rows are gathered for wide stores: over the queries, which only the same warp reads, or, with
  // these in registers, over K, which nobody reads any more after the last barrier.
  static constexpr uint32_t kOutOffset = kTile.queries_in_registers ? 0 : kQueryOffset;

  __device__ __forceinline__ static int warp() { return threadIdx.x / 32; }
  __device__ __forceinline__ static int lane() { return threadIdx.x % 32; }
  // First row of the warp within the block, and this thread's row r (0, 1) of row fragment m within the block.
  __device__ __forceinline__ static int warp_row() { return warp() * kTile.warp_rows; }
  __device__ __forceinline__ static int row(int m, int r) { return warp_row() + m * 16 + r * 8 + lane() / 4; }

  __device__ __forceinline__ explicit ForwardBlock(uint32_t shared) {
#pragma unroll
    for (int m = 0; m < kM; m++) {
#pragma unroll
      for (int d = 0; d < HeadDim / 8; d++) out[m][d] = {};
#pragma unroll
      for (int r = 0; r < 2; r++) minus_max[m][r] = ATTN_INFINITY, sum[m][r] = 0.0f;
    }
    query_shared = shared + kQueryLanding + warp_row() * kRowBytes + lane_offset_a<kRowBytes>();
    key_shared = shared + lane_offset_b_pair<kRowBytes>();
    value_shared = shared + kValueOffset + lane_offset_a<kRowBytes>();
    keep_in_register(query_shared);
    keep_in_register(key_shared);
    keep_in_register(value_shared);
  }

  // Starts the copy of the queries. Rows from `queries` on become zero.
  __device__ __forceinline__ static void load_queries(uint32_t shared, const AttentionParams& p, int64_t b,
                                                      int64_t h, int row0, int queries) {
    QueryLoader(p.q, b, h, row0, int(p.dim_qk))
        .load(QueryLoader::target(shared) + kQueryLanding, queries - row0, p.q.data);
  }

  // To registers, where they live there. The next barrier keeps V from overwriting what others still read.
  __device__ __forceinline__ void take_queries() {
    if constexpr (kTile.queries_in_registers) {
      wait_for_copies<0>();
      __syncthreads();  // everybody's copies have landed
#pragma unroll
      for (int k = 0; k < kSteps; k++) {
#pragma unroll
        for (int m = 0; m < kM; m++) ldmatrix_x4(query[k][m].reg, query_shared + m * 16 * kRowBytes + k * 32);
      }
    }
  }

  // S = Q K^T of one tile of keys, unscaled; `stage`: byte offset of K's stage.
  __device__ __forceinline__ void multiply_qk(Scores& s, uint32_t stage) const {
#pragma unroll
    for (int m = 0; m < kM; m++) {
#pragma unroll
      for (int n = 0; n < kN; n++) s[m][n] = {};
    }
#pragma unroll
    for (int k = 0; k < kSteps; k++) {
      FragmentA q[kM];
#pragma unroll
      for (int m = 0; m < kM; m++) {
        if constexpr (kTile.queries_in_registers) {
          q[m] = query[k][m];
        } else {
          ldmatrix_x4(q[m].reg, query_shared + m * 16 * kRowBytes + k * 32);
        }
      }
#pragma unroll
      for (int n = 0; n < kN; n += 2) {
        uint32_t key[4];
        ldmatrix_x4(key, key_shared + stage + n * 8 * kRowBytes + k * 32);
#pragma unroll
        for (int m = 0; m < kM; m++) {
          mma<Half>(s[m][n], q[m], key[0], key[1]);
          mma<Half>(s[m][n + 1], q[m], key[2], key[3]);
        }
      }
    }
  }

  // O += P V over the tile's keys 16 n .. 16 n + 15; `stage`: byte offset of V's stage.
  __device__ __forceinline__ void multiply_pv(const Probabilities& p, int n, uint32_t stage) {
#pragma unroll
    for (int d = 0; d < kSteps; d++) {
      uint32_t value[4];
      ldmatrix_x4_transposed(value, value_shared + stage + n * 16 * kRowBytes + d * 32);
#pragma unroll
      for (int m = 0; m < kM; m++) {
        mma<Half>(out[m][2 * d], p[n][m], value[0], value[1]);
        mma<Half>(out[m][2 * d + 1], p[n][m], value[2], value[3]);
      }
    }
  }

  __device__ __forceinline__ void multiply_pv(const Probabilities& p, uint32_t stage) {
#pragma unroll
    for (int n = 0; n < kN / 2; n++) multiply_pv(p, n, stage);
  }

  // O and the sums are relative to the maximum: both shrink when it grows.
  __device__ __forceinline__ void rescale(int m, int r, float factor) {
    sum[m][r] *= factor;
#pragma unroll
    for (int d = 0; d < HeadDim / 8; d++) {
      out[m][d].reg[2 * r] *= factor;
      out[m][d].reg[2 * r + 1] *= factor;
    }
  }

  // The end of row (m, r): O becomes the output; the LSE is written, and the two parts it is the sum of.
  // `inverse`: one over the row's sum. An empty row's output is 0 whatever NaN times 0 has left in O.
  __device__ __forceinline__ void finish_row(const ForwardOutput& output, int64_t b, int64_t h, int64_t row,
                                             int m, int r, bool empty, float inverse, float top,
                                             float log_sum) {
#pragma unroll
    for (int d = 0; d < HeadDim / 8; d++) {
#pragma unroll
      for (int e = 0; e < 2; e++) {
        float& x = out[m][d].reg[2 * r + e];
        x = empty ? 0.0f : x * inverse;
      }
    }
    if (lane() % 4 != 0) return;  // all four lanes of the row know the same
    if (output.lse.present) *reinterpret_cast<float*>(element<4>(output.lse, b, h, row, 0)) = top + log_sum;
    if (output.lse_parts.present) {
      *reinterpret_cast<float*>(element<4>(output.lse_parts, b, h, row, 0)) = top;
      *reinterpret_cast<float*>(element<4>(output.lse_parts, b, h, row, 1)) = log_sum;
    }
  }

  // The warp's rows of the output, `rows` of which exist from the block's first on.
  __device__ __forceinline__ void store(const StridedView& view, char* shared, int64_t b, int64_t h,
                                        int64_t row0, int64_t rows, int columns) {
    char* gathered = shared + kOutOffset + warp_row() * kRowBytes;
#pragma unroll
    for (int m = 0; m < kM; m++) gather_rows<Half, HeadDim>(gathered + m * 16 * kRowBytes, out[m]);
    __syncwarp();  // the rows are complete; only this warp's
    const int64_t count = rows - warp_row();
    store_rows<HeadDim, kTile.warp_rows>(gathered, view, b, h, row0 + warp_row(),
                                         int(count < kTile.warp_rows ? count : kTile.warp_rows), columns);
  }
};

}  // namespace attn_ext::cuda
