// dQ = scale * dS K. A block owns a tile of queries of one head and a chunk of the columns of dQ, and loops over key
// tiles. The blocks of the first chunk also write dS where a bias or float mask has the full size (it is their gradient
// then), and their sum of -dS * distance for the gradient of ALiBi's slopes.
#pragma once

#include "gradients.cuh"

namespace attn_ext::cuda::simt {

template <class In>
__device__ __forceinline__ void backward_dq(const BackwardParams& params) {
  using T = Math<In>;
  using Z = Cores<In>;
  const AttentionParams& p = params.problem;
  const BackwardIO& io = params.io;

  // blockIdx.x: the order of dq_blocks. The last query tiles first, as in the forward.
  const uint32_t tiles = uint32_t(pieces(p.len_q, Z::kQueries));
  const uint32_t chunks = io.grad_q.present ? uint32_t(pieces_or_one(p.dim_qk, Z::kColumns)) : 1;
  uint32_t index = blockIdx.x;
  const int query_tile = int(tiles - 1 - index % tiles), i0 = query_tile * Z::kQueries;
  index /= tiles;
  const int column0 = int(index % chunks) * Z::kColumns;
  index /= chunks;
  const int h = int(index % uint32_t(p.heads_q)), b = int(index / uint32_t(p.heads_q));
  const int h_kv = h / int(p.group());

  T* const stages = reinterpret_cast<T*>(shared_memory);
  T* const tile = stages + 2 * Z::kStage;  // dS (queries, keys)
  const RowState<Z> rows{tile + Z::kTileSize};

  const Visibility visible(p, b);
  const int queries = visible.queries, keys = visible.keys;
  const int score_slices = int(pieces_or_one(p.dim_qk, Z::kSlice));
  const int value_slices = int(pieces_or_one(p.dim_v, Z::kSlice));
  const bool two_halves = p.dim_qk - column0 > Z::kHalf;
  const bool drops = p.dropout.threshold != 0;
  const T factor = drops ? T(p.dropout.scale()) : T(1);
  const bool writes_bias = column0 == 0 && takes_scores(p, io.grad_bias, io.bias_size);
  const bool writes_mask = column0 == 0 && takes_scores(p, io.grad_float_mask, io.float_mask_size);
  const bool wants_alibi = io.grad_alibi_slopes.present && column0 == 0;
  T alibi_sum = T(0);

  const KeyRange range = visible.of_queries(i0, i0 + Z::kQueries - 1);
  const auto next_tile = [&](int j0) { return next_key_tile<Z>(p, b, h, i0, j0, range.end); };
  const int first = next_tile(range.begin / Z::kKeys * Z::kKeys);
  if (writes_bias || writes_mask) {  // no query of the tile sees the keys of tiles that are not visited
    const int last = int(pieces(range.end, Z::kKeys)) * Z::kKeys;
    for (int j = threadIdx.x; j < p.len_k; j += kThreads) {
      if (first <= j && j < last && block_of<Z>(p, b, h, i0, j) != kHidden) continue;
      for (int i = i0; i < min(i0 + Z::kQueries, int(p.len_q)); i++) {
        if (writes_bias) element<T>(io.grad_bias, b, h, i, j) = T(0);
        if (writes_mask) element<T>(io.grad_float_mask, b, h, i, j) = T(0);
      }
    }
  }

  const auto copy_scores = [&](const QuerySlices<In>& q, const KeySlices<In>& k, int j0, int slice,
                               T* stage) {
    q(stage, q.rows(i0, queries), slice * Z::kSlice);
    k(stage + Z::kQueries * Z::kSlicePitch, k.rows(j0, keys), slice * Z::kSlice);
  };
  const auto copy_tile = [&](int j0, T* stage) {
    if (j0 >= range.end) return;
    copy_scores(QuerySlices<In>(p.q, b, h, p.dim_qk), KeySlices<In>(p.k, b, h_kv, p.dim_qk), j0, 0, stage);
  };

  OutputChunk<Z, Z::kRows> o;
  clear(o);

  SliceRing<Z> ring(stages);
  if (first < range.end) {
    ring.start([&](T* stage) {
      rows.copy(params, b, h, i0);
      copy_tile(first, stage);
    });
  }
#pragma unroll 1
  for (int j0 = first, next; j0 < range.end; j0 = next) {
    next = next_tile(j0 + Z::kKeys);
    const QuerySlices<In> q(p.q, b, h, p.dim_qk), grad_out(io.grad_out, b, h, p.dim_v);
    const KeySlices<In> k(p.k, b, h_kv, p.dim_qk), v(p.v, b, h_kv, p.dim_v);
    const KeyRowSlices<In> key_rows(p.k, b, h_kv, p.dim_qk);
    const Scores<In> scores(p, anew(b), anew(h));
    const bool has_cap = scores.has_cap();
    const auto copy_values = [&](int slice, T* stage) {
      grad_out(stage, grad_out.rows(i0, queries), slice * Z::kSlice);
      v(stage + Z::kQueries * Z::kSlicePitch, v.rows(j0, keys), slice * Z::kSlice);
    };
    const auto copy_keys = [&](int slice, T* stage) {
      key_rows(stage, key_rows.rows(j0 + slice * Z::kSlice, keys), column0);
    };
    const auto copy_next_tile = [&](T* stage) { copy_tile(next, stage); };

    ScoreTile<Z> s, g;
    clear(s);
    ring.run(
        score_slices, [&](int n, T* stage) { copy_scores(q, k, j0, n, stage); },
        [&](T* stage) { copy_values(0, stage); }, [&](int, const T* stage) { Z::multiply_rows(s, stage); });
    // The cap's derivative waits in the tile until dS needs it.
    scores.finish(s, i0, j0, tile);
    to_probabilities<Z>(s, rows);

    clear(g);
    ring.run(
        value_slices, copy_values,
        [&](T* stage) {
          if (io.grad_q.present) {
            copy_keys(0, stage);
          } else {
            copy_next_tile(stage);
          }
        },
        [&](int, const T* stage) { Z::multiply_rows(g, stage); });
    to_score_gradients<Z>(g, s, rows, drops ? scores.kept(i0, j0) : ~ScoreSet(0), factor);

    // dS of the capped scores goes to the tile, and the cap's derivative from there to dS of the raw ones.
#pragma unroll
    for (int r = 0; r < Z::kRows; r++) {
#pragma unroll
      for (int c = 0; c < Z::kRowScores; c++) {
        T& own = own_score<Z>(tile, r, c);
        s[r][c] = has_cap && g[r][c] != T(0) ? g[r][c] * own : g[r][c];
        own = g[r][c];
      }
    }
    if (writes_bias || writes_mask || wants_alibi) {
#pragma unroll 1
      for (int r = 0; r < Z::kRows; r++) {
        const int i = i0 + own_row<Z>(r);
#pragma unroll
        for (int c = 0; c < Z::kRowScores; c++) {
          const int j = j0 + own_column<Z>(c);
          if (i >= p.len_q || j >= p.len_k) continue;
          const T ds = own_score<Z>(tile, r, c);
          if (writes_bias) element<T>(io.grad_bias, b, h, i, j) = ds;
          if (writes_mask) element<T>(io.grad_float_mask, b, h, i, j) = ds;
          if (wants_alibi) alibi_sum -= ds * scores.distance(i, j);
        }
      }
    }
    if (has_cap) {
#pragma unroll
      for (int r = 0; r < Z::kRows; r++) {
#pragma unroll
        for (int c = 0; c < Z::kRowScores; c++) own_score<Z>(tile, r, c) = s[r][c];
      }
    }
    if (!io.grad_q.present) continue;

    const int key_slices = int(pieces(min(keys - j0, Z::kKeys), Z::kSlice));
    ring.run(
        key_slices, copy_keys, copy_next_tile,
        [&](int n, const T* stage) {
          if (two_halves) {
            Z::template multiply_tile<0, 2>(o, tile, n * Z::kSlice, stage);
          } else {
            Z::template multiply_tile<0, 1>(o, tile, n * Z::kSlice, stage);
          }
        },
        [&](T* stage) { key_rows.drop_non_finite(stage); });
  }

  if (wants_alibi) {
    alibi_sum = row_sum<Z>(alibi_sum);
    T* const partial = rows.shared + Z::kRowState;  // one for each group of threads
    if (leads_row<Z>()) partial[row_group<Z>()] = alibi_sum;
    __syncthreads();  // the sums of all warps are there
    if (threadIdx.x == 0) {
      for (int n = 1; n < kThreads / Z::kRowThreads; n++) alibi_sum += partial[n];
      static_cast<T*>(params.alibi_sums)[(int64_t(b) * p.heads_q + h) * tiles + query_tile] = alibi_sum;
    }
  }
  if (!io.grad_q.present) return;
#pragma unroll
  for (int r = 0; r < Z::kRows; r++) {
    const int i = i0 + own_row<Z>(r);
    if (i >= p.len_q) continue;
#pragma unroll
    for (int half = 0; half < 2; half++) {
#pragma unroll
      for (int e = 0; e < Z::kOutputColumns; e++) o[half][r][e] *= T(p.scale);
#pragma unroll
      for (int n = 0; n < Z::kOutputColumns / Z::kVector; n++) {
        const int column = column0 + Z::output_column(half, n);
        store_vector<In>(io.grad_q, b, h, i, column, o[half][r] + n * Z::kVector, int(p.dim_qk) - column);
      }
    }
  }
}

}  // namespace attn_ext::cuda::simt
