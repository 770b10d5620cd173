// One tile of the backward: queries i0 .. i0+rows of head h meet keys j0 .. j0+n of its KV head. From the saved LSE
//
//   P  = exp(S - lse)                     (recomputed, never stored for the whole matrix)
//   dP = factor * (dO V^T)                factor: dropout's 0 or 1 / (1 - p)
//   dS = P * (dP - delta)                 delta = rowsum(dO * O) - dLSE
//
// Every pass of the backward is a loop over such tiles; what they add up differs.
namespace attn_ext {
namespace ATTN_ISA {

// Per query row, for all heads: the two parts of the LSE (the maximum of an empty row is +inf here, so that P is 0)
// and delta.
template <class T>
struct RowState {
  T *max, *log_sum, *delta;  // (B, Hq, Nq)
  bool* in_range;  // becomes false where the products cannot do with some number, see amx_products.h
};

template <class T, class Products>
class GradTile {
 public:
  GradTile(const AttentionParams& p, const BackwardIO& io, const RowState<T>& state)
      : products(p, io, state.in_range), p_(p), state_(state) {
    static_assert(Products::kStripKeys <= kBlockKeys, "row buffers are sized by kBlockKeys");
    if (has_cap<T>(p)) cap_slope_ = scratch<T>(kCapSlope, Products::kStripRows * Products::kStripKeys);
  }

  void set_keys(int64_t b, int64_t h_kv, int64_t j0_, int64_t n_, bool want_grad_q) {
    j0 = j0_;
    n = n_;
    products.set_keys(b, h_kv, j0, n, want_grad_q);
  }

  void set_queries(int64_t b, int64_t h, int64_t i0_, int64_t rows_, bool want_grad_kv) {
    i0 = i0_;
    rows = rows_;
    b_ = b;
    h_ = h;
    const int64_t first = (b * p_.heads_q + h) * p_.len_q + i0;
    max_ = state_.max + first;
    log_sum_ = state_.log_sum + first;
    delta_ = state_.delta + first;
    want_grad_kv_ = want_grad_kv;
    products.set_queries(b, h, i0, rows, want_grad_kv);
  }

  // Hands P and dS to the products, in strips of the size these like. use(strip) is called when `prob` has factor * P
  // and `grad` has dS, the gradient of the logits, of that strip. Adds to dQ [rows][ld] where it is not null.
  template <class Use>
  void compute(const Scores<T>& scores, const Use& use, T* grad_q, int64_t ld) {
    const bool is_plain = plain(scores);
    for (int64_t r = 0; r < rows; r++) prob_sum_[r] = T(0);
    for (int64_t r0 = 0; r0 < rows; r0 += Products::kStripRows) {
      const int64_t strip_rows = min(Products::kStripRows, rows - r0);
      const KeyRange visible = scores.visible(i0 + r0, strip_rows);
      const KeyRange range =
          scores.narrowed(i0 + r0, strip_rows, {max(visible.begin, j0), min(visible.end, j0 + n)});
      const int64_t begin = max(0, min(range.begin - j0, n)), end = max(begin, min(range.end - j0, n));
      const KeyRange keys = products.meet(r0, {begin, end});
      for (int64_t c0 = keys.begin; c0 < min(keys.end, n); c0 += Products::kStripKeys) {
        const Strip strip = {r0, strip_rows, c0, min(Products::kStripKeys, min(keys.end, n) - c0)};
        prob = products.prob_of(strip);
        grad = products.grad_of(strip);
        if constexpr (Products::kPlainStrips) {
          if (is_plain) {
            products.plain_strip(scores, strip, plain_rows(strip), prob, grad);
            continue;
          }
        }
        compute_strip(scores, strip);
        use(strip);
        if (cap_slope_ != nullptr) pass_cap(strip);
        products.set_strip(strip, prob, grad);
      }
      if (grad_q != nullptr) products.add_grad_q(r0, strip_rows, grad_q + r0 * ld, ld);
    }
    if (is_plain) return;
    for (int64_t r = 0; want_grad_kv_ && r < rows; r++) {
      if (prob_sum_[r] == T(0)) products.drop_grad_out(r);
    }
  }

 private:
  static constexpr int64_t kLd = Products::kStripKeys;

  // Whether P and dS need no more than the products, the rows' LSE and delta, and one mask: no term of the logits, no
  // dropout, no part of a block to hide, and no NaN or infinity to be kept from rows that do not see it.
  bool plain(const Scores<T>& scores) const {
    if constexpr (Products::kPlainStrips) {
      const bool terms =
          p_.bias.present || p_.float_mask.present || p_.alibi_slopes.present || has_cap<T>(p_);
      const bool mask = !p_.bool_mask.present || p_.bool_mask.stride[3] == 1;
      return !terms && mask && p_.dropout.threshold == 0 && products.finite() &&
             scores.whole_blocks(i0, rows, j0, n);
    }
    return false;
  }

  PlainRows plain_rows(const Strip& s) const {
    const int64_t i = i0 + s.row, j = j0 + s.key;
    const char* mask = p_.bool_mask.present ? p_.bool_mask.at(b_, h_, i, j) : nullptr;
    return {
        i, s.rows, j, s.keys, max_ + s.row, log_sum_ + s.row, delta_ + s.row, mask, p_.bool_mask.stride[2]};
  }

  // Both routes of the backward (backward.h) must have the same bits.
  ATTN_ONE_COPY void compute_strip(const Scores<T>& scores, const Strip& s) {
    products.scores(s, prob);
    scores.finish(prob, kLd, i0 + s.row, s.rows, j0 + s.key, s.keys, cap_slope_);
    products.grad_probs(s, grad);
    for (int64_t r = 0; r < s.rows; r++) gradient_row(s, r);
  }

  // dS of the capped logits to dS of the raw ones, for dQ and dK. The slope of a row that sees nothing was never written;
  // there dS is 0 and must stay so.
  void pass_cap(const Strip& s) {
    for (int64_t r = 0; r < s.rows; r++) {
      for (int64_t j = r * kLd; j < r * kLd + padded<T>(s.keys); j += kLanes<T>) {
        const Vec<T> g = load(grad + j);
        store<T>(grad + j, g == Vec<T>{} ? Vec<T>{} : g * load(cap_slope_ + j));
      }
    }
  }

  void gradient_row(const Strip& s, int64_t row) {
    const int64_t r = s.row + row;
    T factor[kLd];
    const bool drops = p_.dropout.threshold != 0;
    if (drops) {
      dropout_factors<T>(p_.dropout, b_, h_, i0 + r, j0 + s.key, s.keys, factor);
      for (int64_t j = s.keys; j < padded<T>(s.keys); j++) factor[j] = T(0);
    }
    T *p_row = prob + row * kLd, *g_row = grad + row * kLd;
    const T row_max = max_[r], minus_log2 = log_sum_[r] * T(-kLog2E), delta = delta_[r];
    const bool is_nan = minus_log2 != minus_log2;  // then hidden keys must be told from others
    Vec<T> total = {};
    for (int64_t j = 0; j < padded<T>(s.keys); j += kLanes<T>) {
      const Vec<T> logit = load(p_row + j);
      Vec<T> p = recomputed_prob<T, Products::kExpDegree>(logit, row_max, minus_log2);
      if (is_nan) p = logit == -infinity<T>() ? Vec<T>{} : p;
      total += p;
      Vec<T> dp = load(g_row + j), dropped = p;
      if (drops) {
        dp *= load(factor + j);
        dropped *= load(factor + j);
      }
      const Vec<T> ds = p * (dp - delta);
      store<T>(g_row + j,
               p == Vec<T>{} ? Vec<T>{} : ds);  // hidden keys have no gradient, whatever V holds there
      store<T>(p_row + j, dropped);
    }
    prob_sum_[r] += reduce_add<T>(total);
  }

 public:
  Products products;
  int64_t i0 = 0, rows = 0, j0 = 0, n = 0;
  T *prob = nullptr, *grad = nullptr;  // of a strip, rows of kStripKeys

 private:
  const AttentionParams& p_;
  const RowState<T>& state_;
  int64_t b_ = 0, h_ = 0;
  bool want_grad_kv_ = false;
  T* cap_slope_ = nullptr;
  T prob_sum_[Products::kRows];  // over the tile's keys
  const T *max_ = nullptr, *log_sum_ = nullptr, *delta_ = nullptr;
};

}  // namespace ATTN_ISA
}  // namespace attn_ext
