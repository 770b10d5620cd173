// What the three kernels of the backward share: from scores and the saved LSE
//
//   P  = exp(S - max - log)               recomputed, never stored for the whole matrix
//   dP = dO V^T                           with dropout: factor * dO V^T, factor 0 or 1 / (1 - p)
//   dS = P * (dP - delta)                 delta = rowsum(dO * O) - dLSE
//
// Each adds up dS, or P, over an axis of its own, in a fixed order and without atomics.
#pragma once

#include "../kernel_params.h"
#include "scores.cuh"

namespace attn_ext::cuda::simt {

// The rows' max, log and delta that attn_bwd_rows wrote, of a tile of queries, in shared memory.
template <class Z>
struct RowState {
  using T = typename Z::T;

  T* shared;  // [3][kQueries]

  __device__ T max(int row) const { return shared[row]; }
  __device__ T log(int row) const { return shared[Z::kQueries + row]; }
  __device__ T delta(int row) const { return shared[2 * Z::kQueries + row]; }

  // Rows that do not exist become 0. So are their queries and gradients: they add nothing to any sum.
  __device__ __forceinline__ void copy(const BackwardParams& params, int b, int h, int i0) const {
    const AttentionParams& p = params.problem;
    const int64_t first = (int64_t(b) * p.heads_q + h) * p.len_q + i0;
#pragma unroll 1  // twice at most: no reason for more code
    for (int n = threadIdx.x; n < Z::kRowState; n += kThreads) {
      const int part = n / Z::kQueries, row = n % Z::kQueries;
      const void* from = part == 0 ? params.row_max : part == 1 ? params.row_log : params.row_delta;
      copy_async_element(shared + n, static_cast<const T*>(from) + first + row, i0 + row < p.len_q);
    }
  }
};

// Logits become probabilities.
template <class Z>
__device__ __forceinline__ void to_probabilities(ScoreTile<Z>& s, const RowState<Z>& rows) {
  using T = typename Z::T;
#pragma unroll
  for (int r = 0; r < Z::kRows; r++) {
    const int row = own_row<Z>(r);
    const T row_max = rows.max(row), row_log = rows.log(row);
#pragma unroll
    for (int c = 0; c < Z::kRowScores; c++) {
      const T exponent =
          s[r][c] - row_max - row_log;  // at most 0 but for rounding, which grows with the logits
      s[r][c] = exponential(exponent > T(0) ? T(0) : exponent);
    }
  }
}

// g: dO V^T becomes dS. `factor` is 1, or with dropout 1 / (1 - p) for the probabilities `kept`.
template <class Z>
__device__ __forceinline__ void to_score_gradients(ScoreTile<Z>& g, const ScoreTile<Z>& p,
                                                   const RowState<Z>& rows, ScoreSet kept,
                                                   typename Z::T factor) {
  using T = typename Z::T;
#pragma unroll
  for (int r = 0; r < Z::kRows; r++) {
    const T delta = rows.delta(own_row<Z>(r));
#pragma unroll
    for (int c = 0; c < Z::kRowScores; c++) {
      const T dp = kept & score_bit<Z>(r, c) ? g[r][c] * factor : T(0);
      g[r][c] =
          p[r][c] == T(0) ? T(0) : p[r][c] * (dp - delta);  // hidden keys have none, whatever V holds there
    }
  }
}

}  // namespace attn_ext::cuda::simt
