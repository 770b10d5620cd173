// Forward, any head dim: online softmax over key tiles (Milakov and Gimelshein 2018; Dao et al., FlashAttention, 2022).
// A block owns a tile of queries of one head and a chunk of the columns of the output.
//
//   m = -inf, l = 0, O = 0
//   for each key tile:  S = 0;  for each slice of D:  S += Q K^T
//                       S = logits(S);  m' = max(m, rowmax S);  P = exp(S - m');  a = exp(m - m')
//                       l = a l + rowsum P;  O = a O;  for each slice of keys:  O += dropout(P) V
//   the sink joins m and l;  out = O / l,  lse = m + log l
#pragma once

#include "../kernel_params.h"
#include "scores.cuh"

namespace attn_ext::cuda::simt {

template <class In>
__device__ __forceinline__ void forward(const ForwardParams& params) {
  using T = Math<In>;
  using Z = Cores<In>;
  const AttentionParams& p = params.problem;

  // blockIdx.x: the order of forward_blocks. The last query tiles first: under a causal mask they are the longest, and
  // the short ones fill the gaps.
  const uint32_t tiles = uint32_t(pieces(p.len_q, Z::kQueries));
  const uint32_t chunks = uint32_t(pieces_or_one(p.dim_v, Z::kColumns));
  uint32_t index = blockIdx.x;
  const int i0 = int(tiles - 1 - index % tiles) * Z::kQueries;
  index /= tiles;
  const int column0 = int(index % chunks) * Z::kColumns;
  index /= chunks;
  const int h = int(index % uint32_t(p.heads_q)), b = int(index / uint32_t(p.heads_q));
  const int h_kv = h / int(p.group());

  T* const stages = reinterpret_cast<T*>(shared_memory);
  T* const tile = stages + 2 * Z::kStage;  // P (queries, keys)

  const Scores<In> scores(p, b, h);
  const QuerySlices<In> q(p.q, b, h, p.dim_qk);
  const KeySlices<In> k(p.k, b, h_kv, p.dim_qk);
  const KeyRowSlices<In> v(p.v, b, h_kv, p.dim_v);
  const int queries = scores.visible.queries, keys = scores.visible.keys;
  const int score_slices = int(pieces_or_one(p.dim_qk, Z::kSlice));
  const bool two_halves = p.dim_v - column0 > Z::kHalf;
  const bool drops = p.dropout.threshold != 0;
  const T factor = drops ? T(p.dropout.scale()) : T(1);

  const KeyRange range = scores.visible.of_queries(i0, i0 + Z::kQueries - 1);
  const auto next_tile = [&](int j0) { return next_key_tile<Z>(p, b, h, i0, j0, range.end); };
  const int first = next_tile(range.begin / Z::kKeys * Z::kKeys);

  const auto q_rows = q.rows(i0, queries);
  const auto copy_scores = [&](const auto& k_rows, int slice, T* stage) {
    q(stage, q_rows, slice * Z::kSlice);
    k(stage + Z::kQueries * Z::kSlicePitch, k_rows, slice * Z::kSlice);
  };
  const auto copy_values = [&](int j0, int slice, T* stage) {
    v(stage, v.rows(j0 + slice * Z::kSlice, keys), column0);
  };

  OutputChunk<Z, Z::kRows> o;
  clear(o);
  // The running maximum and sum of the rows stay in shared memory: 16 registers fewer. The first thread of each row
  // writes them, after the shuffles of row_max() in which all have read.
  T* const maxima = tile + Z::kTileSize;
  T* const sums = maxima + Z::kQueries;
  if (leads_row<Z>()) {
#pragma unroll
    for (int r = 0; r < Z::kRows; r++) {
      maxima[own_row<Z>(r)] = -infinity<T>();
      sums[own_row<Z>(r)] = T(0);
    }
  }
  __syncwarp();  // a row's threads are of one warp; no other barrier comes where there is no key

  SliceRing<Z> ring(stages);
  if (first < range.end) ring.start([&](T* stage) { copy_scores(k.rows(first, keys), 0, stage); });
#pragma unroll 1
  for (int j0 = first, next; j0 < range.end; j0 = next) {
    next = next_tile(j0 + Z::kKeys);
    const auto k_rows = k.rows(j0, keys);
    ScoreTile<Z> s;
    clear(s);
    ring.run(
        score_slices, [&](int n, T* stage) { copy_scores(k_rows, n, stage); },
        [&](T* stage) { copy_values(j0, 0, stage); },
        [&](int, const T* stage) { Z::multiply_rows(s, stage); });
    scores.finish(s, i0, j0, tile);

    const ScoreSet kept = drops ? scores.kept(i0, j0) : ~ScoreSet(0);
#pragma unroll
    for (int r = 0; r < Z::kRows; r++) {
      const int row = own_row<Z>(r);
      const T before = maxima[row];
      T most = s[r][0];
#pragma unroll
      for (int c = 1; c < Z::kRowScores; c++) most = max(most, s[r][c]);
      const T now = max(before, row_max<Z>(most));
      const T reference =
          now == -infinity<T>() ? T(0) : now;  // nothing visible yet: exp(-inf - 0) = 0, not NaN
      const T rescale = exponential(before - reference);
      T sum = T(0);
#pragma unroll
      for (int c = 0; c < Z::kRowScores; c++) {
        const T probability = exponential(s[r][c] - reference);
        sum += probability;
        own_score<Z>(tile, r, c) = kept & score_bit<Z>(r, c) ? probability * factor : T(0);
      }
      sum = row_sum<Z>(sum);
      if (leads_row<Z>()) {
        maxima[row] = now;
        sums[row] = sums[row] * rescale + sum;
      }
#pragma unroll
      for (int half = 0; half < 2; half++) {
#pragma unroll
        for (int e = 0; e < Z::kOutputColumns; e++) o[half][r][e] *= rescale;
      }
    }

    const int value_slices = int(pieces(min(keys - j0, Z::kKeys), Z::kSlice));
    ring.run(
        value_slices, [&](int n, T* stage) { copy_values(j0, n, stage); },
        [&](T* stage) {
          if (next < range.end) copy_scores(k.rows(next, keys), 0, stage);
        },
        [&](int n, const T* stage) {
          if (two_halves) {
            Z::template multiply_tile<0, 2>(o, tile, n * Z::kSlice, stage);
          } else {
            Z::template multiply_tile<0, 1>(o, tile, n * Z::kSlice, stage);
          }
        });
  }

  const T sink = p.sinks.present ? read_term<In>(p.sinks, 0, h, 0, 0) : -infinity<T>();
#pragma unroll
  for (int r = 0; r < Z::kRows; r++) {
    const int i = i0 + own_row<Z>(r);
    const int row = own_row<Z>(r);
    T row_max = maxima[row], total = sums[row];
    const bool empty = total == T(0) || i >= queries;  // no key took part; a sink does not count
    if (empty) {
      row_max = -infinity<T>();
      total = T(0);
    }
    const T with_sink = max(row_max, sink);
    const T reference = with_sink == -infinity<T>() ? T(0) : with_sink;
    const T rescale = exponential(row_max - reference);
    total = total * rescale + exponential(sink - reference);
    if (i >= p.len_q) continue;
#pragma unroll
    for (int half = 0; half < 2; half++) {
#pragma unroll
      for (int e = 0; e < Z::kOutputColumns; e++)
        o[half][r][e] = empty ? T(0) : o[half][r][e] * (rescale / total);
#pragma unroll
      for (int n = 0; n < Z::kOutputColumns / Z::kVector; n++) {
        const int column = column0 + Z::output_column(half, n);
        store_vector<In>(params.output.out, b, h, i, column, o[half][r] + n * Z::kVector,
                         int(p.dim_v) - column);
      }
    }
    if (column0 == 0 && leads_row<Z>()) {
      const T log_sum = total == T(0) ? T(0) : log(total);
      element<T>(params.output.lse, b, h, i, 0) = with_sink + log_sum;
      element<T>(params.output.lse_parts, b, h, i, 0) = with_sink;
      element<T>(params.output.lse_parts, b, h, i, 1) = log_sum;
    }
  }
}

}  // namespace attn_ext::cuda::simt
