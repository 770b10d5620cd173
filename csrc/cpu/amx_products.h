// The products of the forward and of the backward for half types in AMX tiles (amx.h), with the interface of
// products.h. The scores are float32 tiles as there. `parts` is 1 for bfloat16 and 2 for float16.
//
//   S  = Q K^T      left Q rows,    right K^T pairs       dP = dO V^T     left dO rows,    right V^T pairs
//   O += P V        left P rows,    right V pairs         dQ += dS K      left dS rows,    right K pairs
//   dV^T += dO^T P  left dO^T rows, right P pairs         dK^T += Q^T dS  left Q^T rows,   right dS pairs
//
// dV and dK are summed transposed: P and dS then need only pairs of rows, which is cheaper than transposing them.
//
// Not in range (the float32 kernels then do the call again): operands too large for tiles, see amx.h; and delta not
// finite, of which dS becomes infinite: rounding splits that into infinity and NaN.
namespace attn_ext {
namespace ATTN_ISA {

// The scale is applied to the products: in Q it would cost its exactness.
inline void scale_rows(float* score, int64_t ld, int64_t rows, int64_t n, float scale) {
  for (int64_t r = 0; r < rows; r++) {
    for (int64_t j = 0; j < n; j += kLanes<float>) {
      store<float>(score + r * ld + j, load(score + r * ld + j) * scale);
    }
  }
}

// Zeros beyond `rows` and n, up to whole tiles: an infinity has made NaN of the padding of its other operand.
inline void clear_padding(float* x, int64_t ld, int64_t rows, int64_t n) {
  for (int64_t r = 0; r < round_up(rows, kTile); r++) {
    for (int64_t j = r < rows ? padded<float>(n) : 0; j < round_up(n, kTile); j += kLanes<float>) {
      store<float>(x + r * ld + j, Vec<float>{});
    }
  }
}

// pack_tile_rows; whether all is finite. Clears *in_range, which threads share, where tiles cannot hold the numbers.
template <int parts>
inline bool pack_in_range(const StridedView& m, int64_t b, int64_t h, int64_t i0, int64_t n, int64_t width,
                          const Rows& dst, bool* in_range) {
  const Packed packed = pack_tile_rows<parts>(m, b, h, i0, n, width, dst);
  if (!packed.in_range) __atomic_store_n(in_range, false, __ATOMIC_RELAXED);
  return packed.finite;
}

template <int parts>
class AmxForwardProducts {
 public:
  static constexpr int64_t kUnitRows = 384, kStripRows = kTile, kKeyStep = kTile;

  AmxForwardProducts(const AttentionParams& p, int64_t rows, bool* in_range)
      : ld_out(round_up(p.dim_v, kTile)), p_(p), in_range_(in_range), depth_(round_up(p.dim_qk, kTile)),
        q_(scratch_rows<parts>(kQuery, round_up(rows, kTile), depth_)),
        prob_(scratch_rows<parts>(kProbRows, kTile, kBlockKeys)),
        key_(scratch_pairs<parts>(kKey, depth_, kBlockKeys)),
        value_(scratch_pairs<parts>(kValue, kBlockKeys, ld_out)) {}

  void set_queries(int64_t b, int64_t h, int64_t i0, int64_t rows) {
    pack_in_range<parts>(p_.q, b, h, i0, rows, p_.dim_qk, q_, in_range_);
  }

  void set_keys(int64_t b, int64_t h_kv, int64_t j0, int64_t n) {
    n_ = n;
    const Rows key = scratch_rows<parts>(kStrip, kBlockKeys, depth_);
    pack_in_range<parts>(p_.k, b, h_kv, j0, n, p_.dim_qk, key, in_range_);
    transpose_to_pairs<parts>(round_up(n, kTile), depth_, key, key_);
    const Rows value = scratch_rows<parts>(kStrip, kBlockKeys, ld_out);
    pack_in_range<parts>(p_.v, b, h_kv, j0, n, p_.dim_v, value, in_range_);
    interleave_rows<parts>(round_up(n, kTile), ld_out, value, value_);
  }

  // Whole tiles: keys beyond n have to be 0 up to the end of the last one.
  KeyRange meet(const KeyRange& visible) const {
    return {visible.begin / kTile * kTile, min(n_, round_up(visible.end, kTile))};
  }

  void scores(int64_t r0, int64_t rows, const KeyRange& keys, float* score,
              const Companion& /* term */) const {
    const int64_t n = keys.end - keys.begin;
    tile_product<parts, true>(kTile, round_up(n, kTile), depth_, q_.from(r0, 0), key_.from(0, keys.begin),
                              false, score, kBlockKeys);
    scale_rows(score, kBlockKeys, rows, n, float(p_.scale));
    clear_padding(score, kBlockKeys, rows, n);
  }

  void add_values(int64_t rows, const KeyRange& keys, const float* prob, bool first, float* out) const {
    const int64_t n = round_up(keys.end - keys.begin, kTile);
    round_rows<parts>(prob, kBlockKeys, round_up(rows, kTile), n, prob_);
    tile_product<parts>(kTile, ld_out, n, prob_, value_.from(keys.begin, 0), !first, out, ld_out);
  }

  const int64_t ld_out;

 private:
  const TileShapes shapes_;
  const AttentionParams& p_;
  bool* const in_range_;
  const int64_t depth_;
  int64_t n_ = 0;
  const Rows q_, prob_;
  const Pairs key_, value_;
};

template <int parts>
class AmxGradProducts {
 public:
  // Larger than in products.h: each tile loads and stores blocks of dK and dV, which costs more than some of its
  // products. Found by trying, as the strips.
  static constexpr int64_t kRows = 192, kKeys = 256;
  static constexpr int64_t kStripRows = kTile, kStripKeys = kKeys;

  AmxGradProducts(const AttentionParams& p, const BackwardIO& io, bool* in_range)
      : ld_q(round_up(p.dim_qk, kTile)), ld_v(round_up(p.dim_v, kTile)), p_(p), io_(io), in_range_(in_range),
        q_(scratch_rows<parts>(kQuery, kRows, ld_q)),
        q_transposed_(scratch_rows<parts>(kQueryPanel, ld_q, kRows)),
        grad_out_(scratch_rows<parts>(kGradOut, kRows, ld_v)),
        grad_out_transposed_(scratch_rows<parts>(kGradOutPanel, ld_v, kRows)),
        grad_scores_(scratch_rows<parts>(kProbRows, kStripRows, kKeys)),
        key_transposed_(scratch_pairs<parts>(kKey, ld_q, kKeys)),
        key_(scratch_pairs<parts>(kKeyPanel, kKeys, ld_q)),
        value_transposed_(scratch_pairs<parts>(kValue, ld_v, kKeys)),
        prob_pairs_(scratch_pairs<parts>(kProbPairs, kRows, kKeys)),
        grad_pairs_(scratch_pairs<parts>(kGradPairs, kRows, kKeys)),
        prob_(scratch<float>(kScore, kStripRows * kStripKeys)),
        grad_(scratch<float>(kGradScore, kStripRows * kStripKeys)) {}

  void set_keys(int64_t b, int64_t h_kv, int64_t j0, int64_t n, bool want_grad_q) {
    n_ = round_up(n, kTile);
    const Rows key = scratch_rows<parts>(kStrip, kKeys, ld_q);
    keys_finite_ = pack_in_range<parts>(p_.k, b, h_kv, j0, n, p_.dim_qk, key, in_range_);
    transpose_to_pairs<parts>(n_, ld_q, key, key_transposed_);
    if (!keys_finite_) drop_non_finite<parts>(n_, key);
    if (want_grad_q) interleave_rows<parts>(n_, ld_q, key, key_);
    const Rows value = scratch_rows<parts>(kStrip, kKeys, ld_v);
    if (!pack_in_range<parts>(p_.v, b, h_kv, j0, n, p_.dim_v, value, in_range_)) keys_finite_ = false;
    transpose_to_pairs<parts>(n_, ld_v, value, value_transposed_);
  }

  void set_queries(int64_t b, int64_t h, int64_t i0, int64_t rows, bool want_grad_kv) {
    rows_ = round_up(rows, kTile);
    want_grad_kv_ = want_grad_kv;
    queries_finite_ = pack_in_range<parts>(p_.q, b, h, i0, rows, p_.dim_qk, q_, in_range_);
    grad_out_finite_ = pack_in_range<parts>(io_.grad_out, b, h, i0, rows, p_.dim_v, grad_out_, in_range_);
    if (want_grad_kv) {
      transpose_rows<parts>(rows_, ld_q, q_, q_transposed_);
      if (!queries_finite_) drop_non_finite<parts>(ld_q, q_transposed_);
      transpose_rows<parts>(rows_, ld_v, grad_out_, grad_out_transposed_);
    }
  }

  // Its P is 0: that is enough, unless it is NaN or infinity.
  void drop_grad_out(int64_t r) {
    for (int p = 0; p < parts && !grad_out_finite_; p++) {
      for (int64_t d = 0; d < ld_v; d++) *grad_out_transposed_.at(p, d, r) = 0;
    }
  }

  // The rows of the strips from `row` on see these keys of the tile, or some of them. The products leave out the rest,
  // in whole tiles.
  KeyRange meet(int64_t row, const KeyRange& visible) {
    return seen_[row / kStripRows] = {visible.begin / kTile * kTile, round_up(visible.end, kTile)};
  }

  void scores(const Strip& s, float* score) const {
    multiply_scores(s, score);
    scale_rows(score, kStripKeys, s.rows, s.keys, float(p_.scale));
    clear_padding(score, kStripKeys, s.rows, s.keys);
  }
  void grad_probs(const Strip& s, float* grad) const {
    multiply_grad_probs(s, grad);
    clear_padding(grad, kStripKeys, s.rows, s.keys);
  }

  // Where P and dS of a strip are to be made.
  float* prob_of(const Strip& /* any */) const { return prob_; }
  float* grad_of(const Strip& /* any */) const { return grad_; }

  void set_strip(const Strip& s, const float* prob, const float* grad) const {
    const int64_t keys = round_up(s.keys, kTile);
    round_rows<parts>(grad, kStripKeys, round_up(s.rows, kTile), keys, grad_scores_.from(0, s.key));
    if (want_grad_kv_) {
      round_pairs<parts>(prob, kStripKeys, round_up(s.rows, kTile), keys, prob_pairs_.from(s.row, s.key));
      round_pairs<parts>(grad, kStripKeys, round_up(s.rows, kTile), keys, grad_pairs_.from(s.row, s.key));
    }
  }

  // Where nothing modifies the logits and all operands are finite, the strip needs one pass from the products of the
  // first kind to the operands of the second.
  static constexpr bool kPlainStrips = true;
  static constexpr int kExpDegree = PlainStrip<parts>::kExpDegree;
  bool finite() const { return keys_finite_ && queries_finite_ && grad_out_finite_; }
  void plain_strip(const Scores<float>& scores, const Strip& s, const PlainRows& rows, float* prob,
                   float* grad) const {
    multiply_scores(s, prob);
    multiply_grad_probs(s, grad);
    const Pairs prob_pairs = prob_pairs_.from(s.row, s.key), grad_pairs = grad_pairs_.from(s.row, s.key);
    PlainStrip<parts>{
        scores,     rows,       prob,         grad, kStripKeys, float(p_.scale), grad_scores_.from(0, s.key),
        prob_pairs, grad_pairs, want_grad_kv_}
        .compute();
  }

  void add_grad_v(float* grad_v) const {
    tile_product<parts>(ld_v, n_, rows_that_see(), grad_out_transposed_, prob_pairs_, true, grad_v, kKeys);
  }
  void add_grad_k(float* grad_k) const {
    tile_product<parts>(ld_q, n_, rows_that_see(), q_transposed_, grad_pairs_, true, grad_k, kKeys);
  }
  void add_grad_q(int64_t row, int64_t rows, float* grad_q, int64_t ld) const {
    const auto seen = [this, row](int64_t, int64_t) { return seen_[row / kStripRows]; };
    tile_product<parts>(round_up(rows, kTile), ld_q, seen, grad_scores_, key_, true, grad_q, ld);
  }

  // dK and dV add up transposed: however few the keys, all columns are used. Rows j on, kKeysWritten of them: as many as
  // one transposition makes.
  static int64_t sums_of_keys(int64_t /* keys */) { return kKeys; }
  static constexpr int64_t kKeysWritten = 16;
  float* key_rows(const float* grad, int64_t ld, int64_t j) const {
    float* rows = scratch<float>(kStrip, kKeysWritten * ld);
    for (int64_t d = 0; d < ld; d += 16) transpose_words(grad + d * kKeys + j, kKeys, rows + d, ld);
    return rows;
  }

  const int64_t ld_q, ld_v;

 private:
  void multiply_scores(const Strip& s, float* score) const {
    tile_product<parts, true>(round_up(s.rows, kTile), round_up(s.keys, kTile), ld_q, q_.from(s.row, 0),
                              key_transposed_.from(0, s.key), false, score, kStripKeys);
  }
  void multiply_grad_probs(const Strip& s, float* grad) const {
    tile_product<parts>(round_up(s.rows, kTile), round_up(s.keys, kTile), ld_v, grad_out_.from(s.row, 0),
                        value_transposed_.from(0, s.key), false, grad, kStripKeys);
  }

  // The rows that see keys j .. j+kTile: one interval, since both ends of what a row sees grow with the row.
  auto rows_that_see() const {
    return [this](int64_t, int64_t j) {
      KeyRange rows = {0, 0};
      for (int64_t i = 0; i < rows_; i += kStripRows) {
        const KeyRange seen = seen_[i / kStripRows];
        if (j < seen.begin || j >= seen.end) continue;
        if (rows.end == 0) rows.begin = i;
        rows.end = min(i + kStripRows, rows_);
      }
      return rows;
    };
  }

  const TileShapes shapes_;
  const AttentionParams& p_;
  const BackwardIO& io_;
  bool* const in_range_;
  int64_t n_ = 0, rows_ = 0;
  bool want_grad_kv_ = false, keys_finite_ = true, queries_finite_ = true, grad_out_finite_ = true;
  KeyRange seen_[kRows / kStripRows] = {};
  const Rows q_, q_transposed_, grad_out_, grad_out_transposed_, grad_scores_;
  const Pairs key_transposed_, key_, value_transposed_, prob_pairs_, grad_pairs_;
  float *const prob_, *const grad_;
};

}  // namespace ATTN_ISA
}  // namespace attn_ext
