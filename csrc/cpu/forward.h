// Forward: online softmax over key blocks (Milakov and Gimelshein 2018; Dao et al., FlashAttention, 2022).
//
//   for each query tile:   m = -inf, l = 0, O = 0
//     for each key block:  S = logits(Q K^T);  m' = max(m, rowmax S);  P = exp(S - m');  a = exp(m - m')
//                          l = a l + rowsum P;  O = a O + dropout(P) V;  m = m'
//     a sink joins m and l;  out = O / l,  lse = m + log l
namespace attn_ext {
namespace ATTN_ISA {

template <class T, class Products>
class ForwardUnit {
 public:
  ForwardUnit(const AttentionParams& p, const ForwardOutput& o, int64_t b, int64_t h, int64_t i0,
              int64_t rows, bool* in_range)
      : p_(p), o_(o), b_(b), h_(h), i0_(i0), rows_(rows), scores_(p, b, h), products_(p, rows, in_range),
        ld_o_(products_.ld_out) {}

  void run() {
    const int64_t h_kv = h_ / p_.group();
    out_ = scratch<T>(kOutput, round_up(rows_, Products::kStripRows) * ld_o_);
    max_ = scratch<T>(kState, 2 * rows_);
    sum_ = max_ + rows_;
    score_ = scratch<T>(kScore, Products::kStripRows * kBlockKeys);

    const int64_t valid =
        max(0, min(rows_, scores_.valid_queries() - i0_));  // rows past query_lengths are not read
    products_.set_queries(b_, h_, i0_, valid);
    start();
    const KeyRange range = scores_.visible(i0_, valid);
    for (int64_t j0 = range.begin / kBlockKeys * kBlockKeys; j0 < range.end; j0 += kBlockKeys) {
      const KeyRange keys = scores_.narrowed(i0_, valid, {j0, min(j0 + kBlockKeys, range.end)});
      if (keys.begin >= keys.end) continue;
      products_.set_keys(b_, h_kv, keys.begin, keys.end - keys.begin);
      for (int64_t r0 = 0; r0 < valid; r0 += Products::kStripRows) {
        const int64_t rows = min(Products::kStripRows, valid - r0);
        const KeyRange tile = scores_.visible(i0_ + r0, rows);
        if (tile.end <= keys.begin || tile.begin >= keys.end) continue;
        attend(r0, rows, keys.begin, products_.keys_until(tile.end));
      }
    }
    finish();
  }

 private:
  void start() {
    for (int64_t r = 0; r < rows_; r++) {
      max_[r] = -infinity<T>();
      sum_[r] = T(0);
    }
    for (int64_t x = 0; x < rows_ * ld_o_; x++) out_[x] = T(0);
  }

  // Rows r0 .. r0+rows of the unit meet keys j0 .. j0+n.
  void attend(int64_t r0, int64_t rows, int64_t j0, int64_t n) {
    products_.scores(r0, rows, n, score_);
    scores_.finish(score_, kBlockKeys, i0_ + r0, rows, j0, n, nullptr);
    for (int64_t r = 0; r < rows; r++) {
      softmax_row(score_ + r * kBlockKeys, padded<T>(n), r0 + r);
      if (p_.dropout.threshold != 0) drop_row(score_ + r * kBlockKeys, i0_ + r0 + r, j0, n);
    }
    products_.add_values(rows, n, score_, out_ + r0 * ld_o_);
  }

  void softmax_row(T* s, int64_t n, int64_t r) {
    constexpr int lanes = kLanes<T>;
    Vec<T> largest = load(s);
    for (int64_t j = lanes; j < n; j += lanes) largest = max<T>(largest, load(s + j));
    const T before = max_[r], block_max = reduce_max<T>(largest);
    const T now = block_max > before ? block_max : before;
    const T reference =
        now == -infinity<T>() ? T(0) : now;  // nothing visible yet: exp(-inf - 0) = 0, not NaN
    Vec<T> total = {};
    for (int64_t j = 0; j < n; j += lanes) {
      const Vec<T> p = exp<T>(load(s + j) - reference);
      store<T>(s + j, p);
      total += p;
    }
    const T rescale = exp<T>(splat<T>(before - reference))[0];
    max_[r] = now;
    sum_[r] = sum_[r] * rescale + reduce_add<T>(total);
    if (rescale != T(1)) {
      T* o = out_ + r * ld_o_;
      for (int64_t d = 0; d < ld_o_; d += lanes) store<T>(o + d, load(o + d) * rescale);
    }
  }

  void drop_row(T* p, int64_t i, int64_t j0, int64_t n) {
    T factor[kBlockKeys];
    dropout_factors<T>(p_.dropout, b_, h_, i, j0, n, factor);
    for (int64_t j = 0; j < n; j++) p[j] *= factor[j];
  }

  void finish() {
    const T sink = p_.sinks.present ? read_one<T>(p_.sinks.at(0, h_, 0, 0), p_.sinks.dtype) : -infinity<T>();
    for (int64_t r = 0; r < rows_; r++) {
      const bool empty = sum_[r] == T(0);
      T top = empty ? -infinity<T>() : max_[r], sum = sum_[r], rescale = T(1);
      if (sink != -infinity<T>()) {  // one more logit in the sum, without a key
        const T now = sink > top ? sink : top;
        rescale = exp<T>(splat<T>(top - now))[0];
        sum = sum * rescale + exp<T>(splat<T>(sink - now))[0];
        top = now;
      }
      T* o = out_ + r * ld_o_;
      const T factor = rescale / sum;
      // No key took part: 0, whatever hidden values were multiplied by 0.
      for (int64_t d = 0; d < ld_o_; d += kLanes<T>) store<T>(o + d, empty ? Vec<T>{} : load(o + d) * factor);
      write_row<T>(o_.out.at(b_, h_, i0_ + r, 0), o_.out.dtype, p_.dim_v, o);
      const double log_sum = sum == T(0) ? 0.0 : __builtin_log(double(sum));
      T* parts = reinterpret_cast<T*>(o_.lse_parts.at(b_, h_, i0_ + r, 0));
      parts[0] = top;
      parts[1] = T(log_sum);
      *reinterpret_cast<T*>(o_.lse.at(b_, h_, i0_ + r, 0)) = T(double(top) + log_sum);
    }
  }

  const AttentionParams& p_;
  const ForwardOutput& o_;
  const int64_t b_, h_, i0_, rows_;
  const Scores<T> scores_;
  Products products_;
  const int64_t ld_o_;
  T *out_ = nullptr, *max_ = nullptr, *sum_ = nullptr, *score_ = nullptr;
};

// False if some number is out of the products' range: the results are then worth nothing.
template <class T, class Products>
bool forward(const AttentionParams& p, const ForwardOutput& o, const Threads& threads) {
  bool in_range = true;
  const int64_t rows = unit_rows(p, Products::kUnitRows, Products::kUnits);
  const int64_t tiles = ceil_div(p.len_q, rows), heads = p.batch * p.heads_q;
  for_each_unit(threads, tiles * heads, score_products(p), [&](int64_t unit) {
    // Head after head, whose keys then stay in the cache. Last query tiles first: under a causal mask they are the
    // longest, and the short ones fill the gaps.
    const int64_t tile = tiles - 1 - unit % tiles, bh = unit / tiles, i0 = tile * rows;
    ForwardUnit<T, Products>(p, o, bh / p.heads_q, bh % p.heads_q, i0, min(rows, p.len_q - i0), &in_range)
        .run();
  });
  return in_range;
}

}  // namespace ATTN_ISA
}  // namespace attn_ext
