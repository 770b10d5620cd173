// Gradient of a bias (or float mask) that is broadcast over queries, keys or heads, in its own shape: dBias = dS summed
// over the axes along which the bias has size 1. A unit owns one tile of the bias, visits every tile of scores that it was added to, in a fixed order,
// and writes its sum once: nothing of the full size is stored, nothing is added by two threads. It costs two products
// a tile on top of the other gradients. Sums are in double.
namespace attn_ext {
namespace ATTN_ISA {

template <class T, class Products>
void bias_backward(const AttentionParams& p, const BackwardIO& io, const RowState<T>& state,
                   const StridedView& out, const int64_t (&size)[4], const Threads& threads) {
  const bool over_rows = size[2] == 1, over_columns = size[3] == 1;
  const int64_t row_tiles = over_rows ? 1 : ceil_div(size[2], Products::kRows);
  const int64_t column_tiles = over_columns ? 1 : ceil_div(size[3], Products::kKeys);
  const int64_t units = size[0] * size[1] * row_tiles * column_tiles;

  for_each_unit(threads, units, score_products(p), [&](int64_t unit) {
    const int64_t column_tile = unit % column_tiles, row_tile = unit / column_tiles % row_tiles;
    const int64_t h_bias = unit / (column_tiles * row_tiles) % size[1],
                  b_bias = unit / (column_tiles * row_tiles * size[1]);
    const int64_t i_begin = row_tile * Products::kRows,
                  i_end = over_rows ? p.len_q : min(p.len_q, i_begin + Products::kRows);
    const int64_t j_begin = column_tile * Products::kKeys,
                  j_end = over_columns ? p.len_k : min(p.len_k, j_begin + Products::kKeys);
    const int64_t rows_out = over_rows ? 1 : i_end - i_begin,
                  columns_out = over_columns ? 1 : j_end - j_begin;

    GradTile<T, Products> tile(p, io, state);
    double* sum = scratch<double>(kOutput, max(1, rows_out * columns_out));
    for (int64_t x = 0; x < rows_out * columns_out; x++) sum[x] = 0;

    for (int64_t b = size[0] == 1 ? 0 : b_bias; b < (size[0] == 1 ? p.batch : b_bias + 1); b++) {
      for (int64_t h = size[1] == 1 ? 0 : h_bias; h < (size[1] == 1 ? p.heads_q : h_bias + 1); h++) {
        const Scores<T> scores(p, b, h);
        for (int64_t j0 = j_begin; j0 < min(j_end, p.valid_keys(b)); j0 += Products::kKeys) {
          tile.set_keys(b, h / p.group(), j0, min(Products::kKeys, min(j_end, p.valid_keys(b)) - j0), false);
          for (int64_t i0 = i_begin; i0 < min(i_end, scores.valid_queries()); i0 += Products::kRows) {
            const int64_t rows = min(Products::kRows, min(i_end, scores.valid_queries()) - i0);
            if (!scores.meet(i0, rows, j0, tile.n)) continue;
            tile.set_queries(b, h, i0, rows, false);
            const auto use = [&](const Strip& s) {
              for (int64_t r = 0; r < s.rows; r++) {
                const T* grad = tile.grad + r * Products::kStripKeys;
                double* target = sum + (over_rows ? 0 : i0 - i_begin + s.row + r) * columns_out;
                if (over_columns) {
                  for (int64_t j = 0; j < s.keys; j++) target[0] += double(grad[j]);
                } else {
                  for (int64_t j = 0; j < s.keys; j++) target[j0 - j_begin + s.key + j] += double(grad[j]);
                }
              }
            };
            tile.compute(scores, use, nullptr, 0);
          }
        }
      }
    }
    for (int64_t r = 0; r < rows_out; r++) {
      for (int64_t c = 0; c < columns_out; c++) {
        *reinterpret_cast<T*>(out.at(b_bias, h_bias, i_begin + r, j_begin + c)) = T(sum[r * columns_out + c]);
      }
    }
  });
}

}  // namespace ATTN_ISA
}  // namespace attn_ext
