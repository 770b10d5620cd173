// The backward's softmax between two AMX products, where nothing but visibility modifies the logits: from the sums
// S = Q K^T and dP = dO V^T of a strip to P and dS as operands, in one pass through registers. grad_tile.h has the
// formulas, and the way through memory for everything else.
namespace attn_ext {
namespace ATTN_ISA {

template <int parts>
struct PlainStrip {
  const Scores<float>& scores;
  const PlainRows& rows;
  const float *products, *grad_probs;  // S without scale, and dP: [rows][ld]
  int64_t ld;
  float scale;
  Rows grad_rows;                // dS, for dQ
  Pairs prob_pairs, grad_pairs;  // P and dS, for dV and dK, if `want_pairs`
  bool want_pairs;

  // 2^x is good to 3e-6 then; P is rounded to 8 or 16 bits.
  static constexpr int kExpDegree = 4;

  void compute() const {
    // Both ends of what a row sees grow with the row: all see all keys if the first and the last one do. Keys that only
    // fill the last tile are seen by none.
    const KeyRange first = scores.visible(rows.i0), last = scores.visible(rows.i0 + rows.rows - 1);
    const int64_t end = rows.j0 + round_up(rows.keys, kTile);
    const bool all = last.begin <= rows.j0 && min(first.end, last.end) >= end;
    if (all && rows.mask == nullptr && rows.rows % kTile == 0) {
      pass<false>();
    } else {
      pass<true>();
    }
  }

 private:
  struct Row {
    float max, minus_log2, delta;
    KeyRange visible;  // from the first key of the strip
    const char* mask;
  };

  // Rows that only fill the last tile see nothing.
  template <bool masked>
  ATTN_INLINE Row row(int64_t r) const {
    if (masked && r >= rows.rows) return {0.0f, 0.0f, 0.0f, {0, 0}, rows.mask};
    Row row = {rows.max[r], rows.log_sum[r] * float(-kLog2E), rows.delta[r], {0, 0}, nullptr};
    if (masked) {
      const KeyRange visible = scores.visible(rows.i0 + r);
      row.visible = {visible.begin - rows.j0, visible.end - rows.j0};
      if (rows.mask != nullptr) row.mask = rows.mask + r * rows.mask_stride;
    }
    return row;
  }

  // Which of the keys j .. j+16 the row sees. Of the mask nothing is read beyond them.
  static ATTN_INLINE __mmask16 seen(const Row& row, int64_t j) {
    const int64_t begin = max(0, min(row.visible.begin - j, 16)), end = max(0, min(row.visible.end - j, 16));
    const __mmask16 in_range = __mmask16((1u << end) - 1) & ~__mmask16((1u << begin) - 1);
    if (row.mask == nullptr) return in_range;
    const __m128i mask = _mm_maskz_loadu_epi8(in_range, row.mask + j);
    return _mm_test_epi8_mask(mask, mask);
  }

  template <bool masked>
  void pass() const {
    for (int64_t r = 0; r < round_up(rows.rows, kTile); r += 2) {
      const Row row_pair[2] = {row<masked>(r), row<masked>(r + 1)};
      for (int64_t j = 0; j < rows.keys; j += kTile) {
        Vec<float> prob[2][2], grad[2][2];
#pragma GCC unroll 2
        for (int a = 0; a < 2; a++) {
#pragma GCC unroll 2
          for (int c = 0; c < 2; c++) {
            const int64_t x = (r + a) * ld + j + 16 * c;
            Vec<float> logit = load(products + x) * scale;
            asm("" : "+v"(logit));  // rounded, as the forward had it
            Vec<float> p = recomputed_prob<float, kExpDegree>(logit, row_pair[a].max, row_pair[a].minus_log2);
            if (masked) p = (Vec<float>)_mm512_maskz_mov_ps(seen(row_pair[a], j + 16 * c), (__m512)p);
            prob[a][c] = p;
            grad[a][c] = p * (load(grad_probs + x) - row_pair[a].delta);
          }
        }
        const auto grad0 = round_to_parts<parts>((__m512)grad[0][0], (__m512)grad[0][1]);
        const auto grad1 = round_to_parts<parts>((__m512)grad[1][0], (__m512)grad[1][1]);
        for (int p = 0; p < parts; p++) {
          _mm512_storeu_si512(grad_rows.at(p, r, j), grad0.part[p]);
          _mm512_storeu_si512(grad_rows.at(p, r + 1, j), grad1.part[p]);
        }
        if (want_pairs) {
          for (int p = 0; p < parts; p++) interleave(grad0.part[p], grad1.part[p], grad_pairs, p, r, j);
          store_pairs<parts>(prob[0][0], prob[1][0], prob_pairs, r, j);
          store_pairs<parts>(prob[0][1], prob[1][1], prob_pairs, r, j + 16);
        }
      }
    }
  }
};

}  // namespace ATTN_ISA
}  // namespace attn_ext
