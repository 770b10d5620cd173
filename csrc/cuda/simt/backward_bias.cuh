// Gradient of a bias (or float mask) that is broadcast over queries, keys, heads or the batch, in its own shape: dS
// summed over the axes along which the bias has size 1. A block owns a tile of the bias and visits every tile of scores
// it was added to, in a fixed order: nothing of the full size is stored, nothing is added by two blocks. It costs two
// products a tile on top of the other gradients.
#pragma once

#include "gradients.cuh"

namespace attn_ext::cuda::simt {

template <class In>
__device__ __forceinline__ void backward_bias(const BackwardParams& params) {
  using T = Math<In>;
  using Z = Cores<In>;
  const AttentionParams& p = params.problem;
  const BackwardIO& io = params.io;
  const StridedView& grad = params.of_float_mask ? io.grad_float_mask : io.grad_bias;
  const int64_t (&sizes)[4] = params.of_float_mask ? io.float_mask_size : io.bias_size;
  const int size[4] = {int(sizes[0]), int(sizes[1]), int(sizes[2]), int(sizes[3])};

  // blockIdx.x: the order of bias_blocks.
  const bool over_rows = size[2] == 1, over_columns = size[3] == 1;
  const uint32_t column_tiles = over_columns ? 1 : uint32_t(pieces(size[3], Z::kKeys));
  const uint32_t row_tiles = over_rows ? 1 : uint32_t(pieces(size[2], Z::kQueries));
  uint32_t index = blockIdx.x;
  const int j_begin = int(index % column_tiles) * Z::kKeys;
  index /= column_tiles;
  const int i_begin = int(index % row_tiles) * Z::kQueries;
  index /= row_tiles;
  const int h_bias = int(index % uint32_t(size[1])), b_bias = int(index / uint32_t(size[1]));

  T* const stages = reinterpret_cast<T*>(shared_memory);
  T* const tile = stages + 2 * Z::kStage;
  T* const states = tile + Z::kTileSize;  // two, used in turn
  const int score_slices = int(pieces_or_one(p.dim_qk, Z::kSlice));
  const int value_slices = int(pieces_or_one(p.dim_v, Z::kSlice));
  const bool drops = p.dropout.threshold != 0;
  const T factor = drops ? T(p.dropout.scale()) : T(1);

  ScoreTile<Z> sum;
  clear(sum);
  SliceRing<Z> ring(stages);
  int step = 0;

  const auto add_tile = [&](int b, int h, int i0, int j0, const Scores<In>& scores) {
    const int h_kv = h / int(p.group());
    const QuerySlices<In> q(p.q, b, h, p.dim_qk), grad_out(io.grad_out, b, h, p.dim_v);
    const KeySlices<In> k(p.k, b, h_kv, p.dim_qk), v(p.v, b, h_kv, p.dim_v);
    const int queries = scores.visible.queries, keys = scores.visible.keys;
    const RowState<Z> rows{states + step++ % 2 * Z::kRowState};
    const auto copy = [&](const QuerySlices<In>& left, const KeySlices<In>& right, int slice, T* stage) {
      left(stage, left.rows(i0, queries), slice * Z::kSlice);
      right(stage + Z::kQueries * Z::kSlicePitch, right.rows(j0, keys), slice * Z::kSlice);
    };
    // The stage that start() fills was last read before the latest barrier, and so were the rows.
    ring.start([&](T* stage) {
      rows.copy(params, b, h, i0);
      copy(q, k, 0, stage);
    });
    ScoreTile<Z> s, g;
    clear(s);
    ring.run(
        score_slices, [&](int n, T* stage) { copy(q, k, n, stage); },
        [&](T* stage) { copy(grad_out, v, 0, stage); },
        [&](int, const T* stage) { Z::multiply_rows(s, stage); });
    scores.finish(s, i0, j0, tile);  // the bias is added after the cap: its gradient does not pass it
    to_probabilities<Z>(s, rows);
    clear(g);
    ring.run(
        value_slices, [&](int n, T* stage) { copy(grad_out, v, n, stage); }, [](T*) {},
        [&](int, const T* stage) { Z::multiply_rows(g, stage); });
    to_score_gradients<Z>(g, s, rows, drops ? scores.kept(i0, j0) : ~ScoreSet(0), factor);
#pragma unroll
    for (int r = 0; r < Z::kRows; r++) {
#pragma unroll
      for (int c = 0; c < Z::kRowScores; c++) sum[r][c] += g[r][c];
    }
  };

  const int b_end = size[0] == 1 ? int(p.batch) : b_bias + 1,
            h_end = size[1] == 1 ? int(p.heads_q) : h_bias + 1;
  const int i_end = over_rows ? int(p.len_q) : min(int(p.len_q), i_begin + Z::kQueries);
  const int j_end = over_columns ? int(p.len_k) : min(int(p.len_k), j_begin + Z::kKeys);
#pragma unroll 1
  for (int b = size[0] == 1 ? 0 : b_bias; b < b_end; b++) {
#pragma unroll 1
    for (int h = size[1] == 1 ? 0 : h_bias; h < h_end; h++) {
      const Scores<In> scores(p, b, h);
#pragma unroll 1
      for (int i0 = i_begin; i0 < i_end; i0 += Z::kQueries) {
        if (!over_columns) i0 = next_query_tile<Z>(p, b, h, i0, j_begin, i_end);
        const KeyRange seen = scores.visible.of_queries(i0, i0 + Z::kQueries - 1);
        const int last = min(j_end, seen.end);
        int j0 = max(j_begin, seen.begin / Z::kKeys * Z::kKeys);
#pragma unroll 1
        for (; (j0 = next_key_tile<Z>(p, b, h, i0, j0, last)) < last; j0 += Z::kKeys)
          add_tile(b, h, i0, j0, scores);
      }
    }
  }

  // Within the tile: over the columns of a row, then over the rows of a column.
  const auto write = [&](int row, int column, T x) {
    const int64_t i = i_begin + row, j = j_begin + column;
    if (i < size[2] && j < size[3]) element<T>(grad, b_bias, h_bias, i, j) = x;
  };
  if (over_columns) {
#pragma unroll
    for (int r = 0; r < Z::kRows; r++) {
#pragma unroll
      for (int c = 1; c < Z::kRowScores; c++) {
        sum[r][0] += sum[r][c];
        sum[r][c] = T(0);
      }
      sum[r][0] = row_sum<Z>(sum[r][0]);
    }
  }
  if (!over_rows) {
    const int columns = over_columns ? 1 : Z::kRowScores;
    if (over_columns && !leads_row<Z>()) return;
#pragma unroll
    for (int r = 0; r < Z::kRows; r++) {
#pragma unroll
      for (int c = 0; c < Z::kRowScores; c++) {
        if (c < columns) write(own_row<Z>(r), own_column<Z>(c), sum[r][c]);
      }
    }
    return;
  }
#pragma unroll
  for (int c = 0; c < Z::kRowScores; c++) {
    T column_sum = T(0);
#pragma unroll
    for (int r = 0; r < Z::kRows; r++) column_sum += sum[r][c];
    tile[row_group<Z>() * Z::kTilePitch + own_column<Z>(c)] = column_sum;
  }
  __syncthreads();  // the sums of all groups of threads are there
  if (threadIdx.x < Z::kKeys) {
    T column_sum = T(0);
    for (int n = 0; n < kThreads / Z::kRowThreads; n++) column_sum += tile[n * Z::kTilePitch + threadIdx.x];
    write(0, threadIdx.x, column_sum);
  }
}

}  // namespace attn_ext::cuda::simt
