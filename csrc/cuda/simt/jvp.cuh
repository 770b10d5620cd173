// Forward mode: the tangents of out and LSE (written with a dot) along tangents of the inputs. As in the backward, P comes
// from the saved LSE:
//
//   P    = exp(S - max - log)
//   S.   = scale (Q. K^T + Q K.^T) * slope of the cap + bias. + float_mask. - slope. |i + Nk - Nq - j|
//   lse. = rowsum(P S.) + exp(sink - lse) sink.
//   out. = dropout(P S.) V + dropout(P) V. - lse. out
//
// A block owns a tile of queries of one head and a chunk of the columns of out., and loops over key tiles. Products of
// tangents that are not there are left out.
#pragma once

#include "gradients.cuh"

namespace attn_ext::cuda::simt {

// Whether S. has terms that are no products.
__device__ __forceinline__ bool moves_terms(const JvpIO& io) {
  return io.tangent_bias.present || io.tangent_float_mask.present || io.tangent_alibi_slopes.present;
}

// The products of a key tile in their order: Q K^T, Q. K^T, Q K.^T, P S. V, P V. Then comes the next tile's first.
enum Product { kScores, kMovedQueries, kMovedKeys, kValues, kMovedValues, kNextTile };

// Products with tangents become S. The tile holds the cap's slopes if there is one; the thread uses its own places.
template <class In>
__device__ __forceinline__ void finish_moved_scores(ScoreTile<Cores<In>>& g, const JvpParams& params,
                                                    const Scores<In>& scores, int b, int h, int i0, int j0,
                                                    Math<In>* tile) {
  using T = Math<In>;
  using Z = Cores<In>;
  const JvpIO& io = params.io;
  const T scale = T(params.problem.scale);
  const bool has_cap = scores.has_cap();
#pragma unroll
  for (int r = 0; r < Z::kRows; r++) {
#pragma unroll
    for (int c = 0; c < Z::kRowScores; c++) {
      T& own = own_score<Z>(tile, r, c);
      g[r][c] *= has_cap ? scale * own : scale;
      own = g[r][c];
    }
  }
  if (!moves_terms(io)) return;
  const T slope = io.tangent_alibi_slopes.present ? read_term<In>(io.tangent_alibi_slopes, b, h, 0, 0) : T(0);
#pragma unroll 1
  for (int r = 0; r < Z::kRows; r++) {
    const int i = i0 + own_row<Z>(r);
    const KeyRange keys = scores.visible.of_query(i);
#pragma unroll
    for (int c = 0; c < Z::kRowScores; c++) {
      const int j = j0 + own_column<Z>(c);
      if (j < keys.begin || j >= keys.end) continue;
      T x = own_score<Z>(tile, r, c) - slope * scores.distance(i, j);
      if (io.tangent_bias.present) x += read_term<In>(io.tangent_bias, b, h, i, j);
      if (io.tangent_float_mask.present) x += read_term<In>(io.tangent_float_mask, b, h, i, j);
      own_score<Z>(tile, r, c) = x;
    }
  }
#pragma unroll
  for (int r = 0; r < Z::kRows; r++) {
#pragma unroll
    for (int c = 0; c < Z::kRowScores; c++) g[r][c] = own_score<Z>(tile, r, c);
  }
}

template <class In>
__device__ __forceinline__ void jvp(const JvpParams& params) {
  using T = Math<In>;
  using Z = Cores<In>;
  const AttentionParams& p = params.problem;
  const JvpIO& io = params.io;

  // blockIdx.x: the order of forward_blocks, the last query tiles first.
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
  T* const tile = stages + 2 * Z::kStage;  // slopes of the cap, P S., P (queries, keys)
  const RowState<Z> rows{tile + Z::kTileSize};

  const Visibility visible(p, b);
  const int queries = visible.queries, keys = visible.keys;
  const int score_slices = int(pieces_or_one(p.dim_qk, Z::kSlice));
  const bool two_halves = p.dim_v - column0 > Z::kHalf;
  const bool drops = p.dropout.threshold != 0;
  const T factor = drops ? T(p.dropout.scale()) : T(1);

  const bool moves_scores = io.tangent_q.present || io.tangent_k.present || moves_terms(io);
  const uint32_t wanted = uint32_t(io.tangent_q.present) << kMovedQueries |
                          uint32_t(io.tangent_k.present) << kMovedKeys | uint32_t(moves_scores) << kValues |
                          uint32_t(io.tangent_v.present) << kMovedValues | 1u << kNextTile;
  // Where only sinks move, no key matters.
  const bool needs_keys = moves_scores || io.tangent_v.present;
  const KeyRange range = needs_keys ? visible.of_queries(i0, i0 + Z::kQueries - 1) : KeyRange{0, 0};
  const auto next_tile = [&](int j0) { return next_key_tile<Z>(p, b, h, i0, j0, range.end); };
  const int first = next_tile(range.begin / Z::kKeys * Z::kKeys);

  const auto query_slices = [&](int product) {
    return QuerySlices<In>(product == kMovedQueries ? io.tangent_q : p.q, b, h, p.dim_qk);
  };
  const auto key_slices = [&](int product) {
    return KeySlices<In>(product == kMovedKeys ? io.tangent_k : p.k, b, h_kv, p.dim_qk);
  };
  const auto value_slices = [&](int product) {
    return KeyRowSlices<In>(product == kMovedValues ? io.tangent_v : p.v, b, h_kv, p.dim_v);
  };
  const auto copy_scores = [&](const QuerySlices<In>& q, const KeySlices<In>& k, int j0, int slice,
                               T* stage) {
    q(stage, q.rows(i0, queries), slice * Z::kSlice);
    k(stage + Z::kQueries * Z::kSlicePitch, k.rows(j0, keys), slice * Z::kSlice);
  };
  const auto copy_values = [&](const KeyRowSlices<In>& v, int j0, int slice, T* stage) {
    v(stage, v.rows(j0 + slice * Z::kSlice, keys), column0);
  };
  const auto copy_first = [&](int product, int j0, T* stage) {
    if (product == kValues || product == kMovedValues) {
      copy_values(value_slices(product), j0, 0, stage);
    } else {
      copy_scores(query_slices(product), key_slices(product), j0, 0, stage);
    }
  };
  // The first slice of whatever comes after a product of tile j0. After the last it is tile `next`.
  const auto copy_following = [&](int product, int j0, int next, T* stage) {
    int following = __ffs(wanted & ~0u << (product + 1)) - 1;
    if (following == kNextTile) {
      following = kScores;
      j0 = next;
    }
    if (j0 < range.end) copy_first(following, j0, stage);
  };

  OutputChunk<Z, Z::kRows> o;
  clear(o);
  uint32_t attends = 0;  // bit r: row r gives some of this thread's keys a probability

  // rowsum(P S.) stays in shared memory, where the first thread of each row adds it up: 8 registers fewer.
  T* const moved_lse = rows.shared + 2 * Z::kQueries;
  if (leads_row<Z>()) {
#pragma unroll
    for (int r = 0; r < Z::kRows; r++) moved_lse[own_row<Z>(r)] = T(0);
  }
  __syncwarp();  // a row's threads are of one warp; no other barrier comes where there is no key

  SliceRing<Z> ring(stages);
  if (first < range.end) {
    static_assert(2 * Z::kQueries <= kThreads, "a thread for each");
    if (threadIdx.x < 2 * Z::kQueries) {
      const int part = threadIdx.x / Z::kQueries, i = i0 + threadIdx.x % Z::kQueries;
      const T x = i < queries ? element<const T>(io.lse_parts, b, h, i, part) : T(0);
      const bool empty = i >= queries || x == -infinity<T>();
      rows.shared[threadIdx.x] = part == 0 && empty ? infinity<T>() : x;  // then P = 0
    }
    ring.start([&](T* stage) { copy_first(kScores, first, stage); });
  }
#pragma unroll 1
  for (int j0 = first, next; j0 < range.end; j0 = next) {
    next = next_tile(j0 + Z::kKeys);
    const Scores<In> scores(p, anew(b), anew(h));
    const QuerySlices<In> q = query_slices(kScores);
    const KeySlices<In> k = key_slices(kScores);

    ScoreTile<Z> s, g;
    clear(s);
    ring.run(
        score_slices, [&](int n, T* stage) { copy_scores(q, k, j0, n, stage); },
        [&](T* stage) { copy_following(kScores, j0, next, stage); },
        [&](int, const T* stage) { Z::multiply_rows(s, stage); });
    scores.finish(s, i0, j0, tile);  // with a cap, its slopes are in the tile now
    to_probabilities<Z>(s, rows);

    clear(g);
#pragma unroll 1
    for (int product = kMovedQueries; product <= kMovedKeys; product++) {
      if (!(wanted >> product & 1)) continue;
      const QuerySlices<In> moved_q = query_slices(product);
      const KeySlices<In> moved_k = key_slices(product);
      ring.run(
          score_slices, [&](int n, T* stage) { copy_scores(moved_q, moved_k, j0, n, stage); },
          [&](T* stage) { copy_following(product, j0, next, stage); },
          [&](int, const T* stage) { Z::multiply_rows(g, stage); });
    }
    if (moves_scores) finish_moved_scores<In>(g, params, scores, b, h, i0, j0, tile);

    // S. becomes dropout(P S.), P dropout(P).
    const ScoreSet kept = drops ? scores.kept(i0, j0) : ~ScoreSet(0);
#pragma unroll
    for (int r = 0; r < Z::kRows; r++) {
      T sum = T(0);
#pragma unroll
      for (int c = 0; c < Z::kRowScores; c++) {
        // A key without probability has no part in it, whatever K and the tangents hold there.
        const bool attended = s[r][c] != T(0);
        const T moved = attended ? s[r][c] * g[r][c] : T(0);
        attends |= uint32_t(attended) << r;
        const T keep = kept & score_bit<Z>(r, c) ? factor : T(0);
        sum += moved;
        g[r][c] = moved * keep;
        s[r][c] *= keep;
      }
      sum = row_sum<Z>(sum);
      if (leads_row<Z>()) moved_lse[own_row<Z>(r)] += sum;
    }

    const int row_slices = int(pieces(min(keys - j0, Z::kKeys), Z::kSlice));
#pragma unroll 1
    for (int product = kValues; product <= kMovedValues; product++) {
      if (!(wanted >> product & 1)) continue;
      const KeyRowSlices<In> v = value_slices(product);
      __syncwarp();  // the threads that share rows, which are of one warp, have read what the tile held before
#pragma unroll
      for (int r = 0; r < Z::kRows; r++) {
#pragma unroll
        for (int c = 0; c < Z::kRowScores; c++)
          own_score<Z>(tile, r, c) = product == kValues ? g[r][c] : s[r][c];
      }
      ring.run(
          row_slices, [&](int n, T* stage) { copy_values(v, j0, n, stage); },
          [&](T* stage) { copy_following(product, j0, next, stage); },
          [&](int n, const T* stage) {
            if (two_halves) {
              Z::template multiply_tile<0, 2>(o, tile, n * Z::kSlice, stage);
            } else {
              Z::template multiply_tile<0, 1>(o, tile, n * Z::kSlice, stage);
            }
          });
    }
  }

  const bool moves_sink = p.sinks.present && io.tangent_sinks.present;
  const T sink = moves_sink ? read_term<In>(p.sinks, 0, h, 0, 0) : -infinity<T>();
  const T moved_sink = moves_sink ? read_term<In>(io.tangent_sinks, 0, h, 0, 0) : T(0);
#pragma unroll
  for (int r = 0; r < Z::kRows; r++) {
    const int i = i0 + own_row<Z>(r);
    T moved = moved_lse[own_row<Z>(r)];
    const bool empty = row_max<Z>(T(attends >> r & 1)) == T(0);
    if (i >= p.len_q) continue;
    if (sink != -infinity<T>()) {
      const T lse_max = element<const T>(io.lse_parts, b, h, i, 0),
              lse_log = element<const T>(io.lse_parts, b, h, i, 1);
      moved += exponential(sink - lse_max - lse_log) * moved_sink;
    }
    const auto* out = &element<const typename Element<In>::Stored>(io.out, b, h, i, 0);
#pragma unroll
    for (int half = 0; half < 2; half++) {
#pragma unroll
      for (int n = 0; n < Z::kOutputColumns / Z::kVector; n++) {
        const int column = column0 + Z::output_column(half, n);
        T* const own = o[half][r] + n * Z::kVector;
#pragma unroll
        for (int e = 0; e < Z::kVector; e++) {
          if (empty) own[e] = T(0);  // V may be NaN
          if (moved != T(0) && column + e < p.dim_v) own[e] -= moved * Element<In>::widen(out[column + e]);
        }
        store_vector<In>(io.tangent_out, b, h, i, column, own, int(p.dim_v) - column);
      }
    }
    if (column0 == 0 && leads_row<Z>()) element<T>(io.tangent_lse, b, h, i, 0) = moved;
  }
}

}  // namespace attn_ext::cuda::simt
