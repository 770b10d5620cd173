// dV = P^T dO and dK = scale * dS^T Q. A block owns a tile of keys of one KV head and, of the columns of dV and dK, the
// part that key_parts() gives it; it loops over the query heads of the group and over their query tiles.
#pragma once

#include "gradients.cuh"

namespace attn_ext::cuda::simt {

// A row with a sink has a maximum even if it sees no key: those that have no probability in this tile get max = inf.
template <class Z>
__device__ __forceinline__ void mark_idle_rows(const ScoreTile<Z>& p, const RowState<Z>& rows) {
  using T = typename Z::T;
#pragma unroll
  for (int r = 0; r < Z::kRows; r++) {
    bool any = false;
#pragma unroll
    for (int c = 0; c < Z::kRowScores; c++) any = any || p[r][c] != T(0);
    const uint32_t warp = __ballot_sync(0xffffffffu, any);
    const uint32_t of_row =
        (warp >> threadIdx.x % 32) & ((1u << Z::kRowThreads) - 1);  // as the first thread has it
    if (leads_row<Z>() && of_row == 0) rows.shared[own_row<Z>(r)] = infinity<T>();
  }
}

template <class In>
__device__ __forceinline__ void backward_dkdv(const BackwardParams& params) {
  using T = Math<In>;
  using Z = Cores<In>;
  const AttentionParams& p = params.problem;
  const BackwardIO& io = params.io;

  // blockIdx.x: the order of dkdv_blocks. The first key tiles first: under a causal mask they are the longest.
  const KeyParts parts = key_parts(p, io, Z::kColumns);
  const uint32_t tiles = uint32_t(pieces(p.len_k, Z::kKeys));
  uint32_t index = blockIdx.x;
  const int j0 = int(index % tiles) * Z::kKeys;
  index /= tiles;
  const int part = int(index % uint32_t(parts.count()));
  index /= uint32_t(parts.count());
  const int h_kv = int(index % uint32_t(p.heads_kv)), b = int(index / uint32_t(p.heads_kv));

  const bool does_v = anew(parts.fused || part < parts.value_chunks), does_k = parts.fused || !does_v;
  const int chunk = parts.fused ? 0 : does_v ? part : part - parts.value_chunks;
  const int column0 = chunk * Z::kColumns;
  const bool two_halves = !parts.fused && (does_v ? p.dim_v : p.dim_qk) - column0 > Z::kHalf;

  T* const stages = reinterpret_cast<T*>(shared_memory);
  T* const tile = stages + 2 * Z::kStage;  // P, then dS (queries, keys)
  T* const states = tile + Z::kTileSize;   // two: of this query tile and of the next

  const Visibility visible(p, b);
  const int queries = visible.queries, keys = visible.keys;
  const int score_slices = int(pieces_or_one(p.dim_qk, Z::kSlice));
  const int value_slices = int(pieces_or_one(p.dim_v, Z::kSlice));
  const bool drops = p.dropout.threshold != 0;
  const T factor = drops ? T(p.dropout.scale()) : T(1);

  // Steps: query tiles of the group's first head, then of the second, and so on.
  const KeyRange range = visible.queries_of_keys(j0, j0 + Z::kKeys - 1);
  const int first_tile = range.begin / Z::kQueries;
  const int head_steps = range.end > range.begin ? int(pieces(range.end, Z::kQueries)) - first_tile : 0;
  const int group = int(p.group()), steps = head_steps * group;
  const auto head_of = [&](int step) { return h_kv * group + step / head_steps; };
  const auto query_of = [&](int step) { return (first_tile + step % head_steps) * Z::kQueries; };
  const auto rows_of = [&](int turn) { return RowState<Z>{states + turn * Z::kRowState}; };
  // The first step, from this one on, that the block mask does not hide.
  const auto next_step = [&](int step) {
    if (!p.block_mask.present()) return step;
    return first_visible(step, steps,
                         [&](int n) { return block_of<Z>(p, b, head_of(n), query_of(n), j0) != kHidden; });
  };

  const auto copy_scores = [&](const QuerySlices<In>& q, const KeySlices<In>& k, int i0, int slice,
                               T* stage) {
    q(stage, q.rows(i0, queries), slice * Z::kSlice);
    k(stage + Z::kQueries * Z::kSlicePitch, k.rows(j0, keys), slice * Z::kSlice);
  };
  const auto copy_step = [&](int step, int turn, T* stage) {
    if (step >= steps) return;
    rows_of(turn).copy(params, b, head_of(step), query_of(step));
    copy_scores(QuerySlices<In>(p.q, b, head_of(step), p.dim_qk), KeySlices<In>(p.k, b, h_kv, p.dim_qk),
                query_of(step), 0, stage);
  };

  OutputChunk<Z, Z::kKeyRows> o;  // fused: half 0 is dV, half 1 dK
  clear(o);
  SliceRing<Z> ring(stages);
  const int first = next_step(0);
  ring.start([&](T* stage) { copy_step(first, 0, stage); });
#pragma unroll 1
  for (int step = first, next, turn = 0; step < steps; step = next, turn ^= 1) {
    next = next_step(step + 1);
    const int h = head_of(step), i0 = query_of(step);
    const int row_slices = int(pieces(min(queries - i0, Z::kQueries), Z::kSlice));
    const Scores<In> scores(p, anew(b), h);
    const RowState<Z> rows = rows_of(turn);
    const QuerySlices<In> q(p.q, b, h, p.dim_qk), grad_out(io.grad_out, b, h, p.dim_v);
    const KeySlices<In> k(p.k, b, h_kv, p.dim_qk), v(p.v, b, h_kv, p.dim_v);
    const QueryRowSlices<In> query_rows(p.q, b, h, p.dim_qk), grad_out_rows(io.grad_out, b, h, p.dim_v);
    const auto copy_next_step = [&](T* stage) { copy_step(next, turn ^ 1, stage); };
    const auto copy_values = [&](int slice, T* stage) {
      grad_out(stage, grad_out.rows(i0, queries), slice * Z::kSlice);
      v(stage + Z::kQueries * Z::kSlicePitch, v.rows(j0, keys), slice * Z::kSlice);
    };
    // The gradient of a row that attends to nothing (max = inf) must not reach dV, not even where it is NaN.
    const auto copy_grad_out = [&](int slice, T* stage) {
      grad_out_rows(stage, grad_out_rows.rows(i0 + slice * Z::kSlice, queries), column0,
                    [&](int row) { return rows.max(slice * Z::kSlice + row) != infinity<T>(); });
    };
    const auto copy_queries = [&](int slice, T* stage) {
      query_rows(stage, query_rows.rows(i0 + slice * Z::kSlice, queries), column0);
    };

    ScoreTile<Z> s;
    clear(s);
    ring.run(
        score_slices, [&](int n, T* stage) { copy_scores(q, k, i0, n, stage); },
        [&](T* stage) {
          if (!does_v) {
            copy_values(0, stage);
          } else if (!p.sinks.present) {
            copy_grad_out(0, stage);
          }
        },
        [&](int, const T* stage) { Z::multiply_rows(s, stage); });
    scores.finish(s, i0, j0, tile);
    to_probabilities<Z>(s, rows);
    if (does_v && p.sinks.present) {
      mark_idle_rows<Z>(s, rows);
      __syncthreads();  // the rows that others marked
      ring.start([&](T* stage) { copy_grad_out(0, stage); });
    }
    const ScoreSet kept = drops ? scores.kept(i0, j0) : ~ScoreSet(0);
    const bool has_cap = scores.has_cap();
#pragma unroll
    for (int r = 0; r < Z::kRows; r++) {
#pragma unroll
      for (int c = 0; c < Z::kRowScores; c++) {
        T& own = own_score<Z>(tile, r, c);
        const T probability = s[r][c];
        // The cap's derivative belongs to dS of the raw scores. That of a hidden one may be NaN.
        if (has_cap && probability != T(0)) s[r][c] *= own;
        if (does_v) own = kept & score_bit<Z>(r, c) ? probability * factor : T(0);
      }
    }

    if (does_v) {
      ring.run(
          row_slices, copy_grad_out,
          [&](T* stage) {
            if (does_k) {
              copy_values(0, stage);
            } else {
              copy_next_step(stage);
            }
          },
          [&](int n, const T* stage) {
            if (two_halves) {
              Z::template multiply_transposed_tile<0, 2>(o, tile, n * Z::kSlice, stage);
            } else {
              Z::template multiply_transposed_tile<0, 1>(o, tile, n * Z::kSlice, stage);
            }
          });
    }
    if (does_k) {
      ScoreTile<Z> g;
      clear(g);
      ring.run(
          value_slices, copy_values, [&](T* stage) { copy_queries(0, stage); },
          [&](int, const T* stage) { Z::multiply_rows(g, stage); });
      to_score_gradients<Z>(g, s, rows, kept, factor);
#pragma unroll
      for (int r = 0; r < Z::kRows; r++) {
#pragma unroll
        for (int c = 0; c < Z::kRowScores; c++) own_score<Z>(tile, r, c) = g[r][c];
      }
      ring.run(
          row_slices, copy_queries, copy_next_step,
          [&](int n, const T* stage) {
            if (parts.fused) {
              Z::template multiply_transposed_tile<1, 1>(o, tile, n * Z::kSlice, stage);
            } else if (two_halves) {
              Z::template multiply_transposed_tile<0, 2>(o, tile, n * Z::kSlice, stage);
            } else {
              Z::template multiply_transposed_tile<0, 1>(o, tile, n * Z::kSlice, stage);
            }
          },
          [&](T* stage) { query_rows.drop_non_finite(stage); });
    }
  }

#pragma unroll
  for (int half = 0; half < 2; half++) {
    const bool is_k = parts.fused ? half == 1 : does_k;
    const StridedView& grad = is_k ? io.grad_k : io.grad_v;
    const int columns = int(is_k ? p.dim_qk : p.dim_v);
#pragma unroll
    for (int r = 0; r < Z::kKeyRows; r++) {
      const int j = j0 + Z::key_row(r);
      if (j >= p.len_k) continue;
#pragma unroll
      for (int e = 0; e < Z::kOutputColumns; e++) o[half][r][e] *= is_k ? T(p.scale) : T(1);
#pragma unroll
      for (int n = 0; n < Z::kOutputColumns / Z::kVector; n++) {
        const int column = column0 + Z::output_column(parts.fused ? 0 : half, n);
        store_vector<In>(grad, b, h_kv, j, column, o[half][r] + n * Z::kVector, columns - column);
      }
    }
  }
}

}  // namespace attn_ext::cuda::simt
