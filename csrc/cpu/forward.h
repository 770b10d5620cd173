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
    const int64_t padded_rows = round_up(rows_, Products::kStripRows);
    out_ = scratch<T>(kOutput, padded_rows * ld_o_);
    max_ = scratch<T>(kState, 2 * padded_rows);
    sum_ = max_ + padded_rows;
    score_ = scratch<T>(kScore, Products::kStripRows * kBlockKeys);

    const int64_t valid =
        max(0, min(rows_, scores_.valid_queries() - i0_));  // rows past query_lengths are not read
    products_.set_queries(b_, h_, i0_, valid);
    for (int64_t r = 0; r < padded_rows; r++) {
      max_[r] = -infinity<T>();
      sum_[r] = T(0);
    }
    const KeyRange range = scores_.visible(i0_, valid);
    for (int64_t j0 = range.begin / kBlockKeys * kBlockKeys; j0 < range.end; j0 += kBlockKeys) {
      const KeyRange keys = scores_.narrowed(i0_, valid, {j0, min(j0 + kBlockKeys, range.end)});
      if (keys.begin >= keys.end) continue;
      products_.set_keys(b_, h_kv, keys.begin, keys.end - keys.begin);
      for (int64_t r0 = 0; r0 < valid; r0 += Products::kStripRows) {
        const int64_t rows = min(Products::kStripRows, valid - r0);
        const KeyRange visible = scores_.visible(i0_ + r0, rows);
        if (visible.end <= keys.begin || visible.begin >= keys.end) continue;
        attend(r0, rows, keys.begin,
               products_.meet(
                   {max(visible.begin, keys.begin) - keys.begin, min(visible.end, keys.end) - keys.begin}));
      }
    }
    finish();
  }

 private:
  // Rows r0 .. r0+rows of the unit meet some keys of the block that begins with key `block`.
  void attend(int64_t r0, int64_t rows, int64_t block, const KeyRange& keys) {
    const int64_t j0 = block + keys.begin, n = keys.end - keys.begin;
    products_.scores(r0, rows, keys, score_);
    scores_.finish(score_, kBlockKeys, i0_ + r0, rows, j0, n, nullptr);
    softmax(r0, rows, padded<T>(n));
    for (int64_t r = 0; p_.dropout.threshold != 0 && r < rows; r++)
      drop_row(score_ + r * kBlockKeys, i0_ + r0 + r, j0, n);
    bool& started = started_[r0 / Products::kStripRows];
    products_.add_values(rows, keys, score_, !started, out_ + r0 * ld_o_);
    started = true;
  }

  // S to P, with the rows' maxima and sums; brings the output so far to the new maxima. The maxima of all rows come first:
  // each needs a chain of instructions through one vector, and those of different rows overlap.
  void softmax(int64_t r0, int64_t rows, int64_t n) {
    constexpr int lanes = kLanes<T>;
    static_assert(Products::kStripRows % lanes == 0,
                  "the vectors of a strip's rows do not reach into the next one");
    T reference[Products::kStripRows], rescale[Products::kStripRows];
    for (int64_t r = 0; r < rows; r++) {
      const T* s = score_ + r * kBlockKeys;
      Vec<T> largest = load(s);
#pragma GCC unroll 4
      for (int64_t j = lanes; j < n; j += lanes) largest = max<T>(largest, load(s + j));
      reference[r] = reduce_max<T>(largest);
    }
    for (int64_t r = rows; r < round_up(rows, lanes); r++) reference[r] = -infinity<T>();
    for (int64_t r = 0; r < rows; r += lanes) {
      const Vec<T> before = load(max_ + r0 + r), now = max<T>(load(reference + r), before);
      // Nothing visible yet: exp(-inf - 0) = 0, not NaN.
      const Vec<T> from = now == -infinity<T>() ? Vec<T>{} : now;
      store<T>(max_ + r0 + r, now);
      store<T>(reference + r, from);
      store<T>(rescale + r, exp<T>(before - from));
    }
    const bool started = started_[r0 / Products::kStripRows];
    for (int64_t r = 0; r < rows; r++) {
      T* s = score_ + r * kBlockKeys;
      const T from = reference[r];
      Vec<T> total = {};
#pragma GCC unroll 4
      for (int64_t j = 0; j < n; j += lanes) {
        const Vec<T> p = exp<T>(load(s + j) - from);
        store<T>(s + j, p);
        total += p;
      }
      sum_[r0 + r] = sum_[r0 + r] * rescale[r] + reduce_add<T>(total);
      if (!started || rescale[r] == T(1)) continue;
      T* o = out_ + (r0 + r) * ld_o_;
      for (int64_t d = 0; d < ld_o_; d += lanes) store<T>(o + d, load(o + d) * rescale[r]);
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
  bool started_[Products::kUnitRows / Products::kStripRows] = {};  // strips that have met keys
};

// False if some number is out of the products' range: the results are then worth nothing.
template <class T, class Products>
bool forward(const AttentionParams& p, const ForwardOutput& o, const Threads& threads) {
  bool in_range = true;
  const int64_t rows = unit_rows(p, Products::kUnitRows, Products::kStripRows, threads.count);
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
