// One tile of the backward: queries i0 .. i0+rows of head h meet keys j0 .. j0+n of its KV head. From the saved LSE
//
//   P  = exp(S - lse)                     (recomputed, never stored for the whole matrix)
//   dP = factor * (dO V^T)                factor: dropout's 0 or 1 / (1 - p)
//   dS = P * (dP - delta)                 delta = rowsum(dO * O) - dLSE
//
// Every pass of the backward is a loop over such tiles; what they add up differs.
namespace attn_ext {
namespace ATTN_ISA {

// Smaller key blocks than the forward: three packed copies of the keys and values, two score tiles and two gradient
// blocks share the L2 cache here (350 KiB at D 64 in float).
constexpr int64_t kGradRows = 96;
constexpr int64_t kGradKeys = 128;
static_assert(kGradKeys <= kBlockKeys, "row buffers are sized by kBlockKeys");

// Per query row, for all heads: the two parts of the LSE (the maximum of an empty row is +inf here, so that P is 0)
// and delta.
template <class T>
struct RowState {
  T *max, *log_sum, *delta;  // (B, Hq, Nq)
};

template <class T>
class GradTile {
 public:
  GradTile(const AttentionParams& p, const BackwardIO& io, const RowState<T>& state)
      : p_(p), io_(io), state_(state), few_(p.len_q <= kFewQueries), ld_q(padded<T>(p.dim_qk)),
        ld_v(padded<T>(p.dim_v)) {
    const int64_t score_size = kGradRows * kGradKeys;
    prob = scratch<T>(kScore, score_size);
    grad = scratch<T>(kGradScore, score_size);
    if (has_cap<T>(p)) cap_slope_ = scratch<T>(kCapSlope, score_size);
    q_rows_ = scratch<T>(kQuery, kGradRows * ld_q);
    q_panels = scratch<T>(kQueryPanel, kGradRows * ld_q);
    grad_out_rows_ = scratch<T>(kGradOut, kGradRows * ld_v);
    grad_out_panels = scratch<T>(kGradOutPanel, kGradRows * ld_v);
    key_transposed_ = scratch<T>(kKey, kGradKeys * p.dim_qk);
    key_panels = scratch<T>(kKeyPanel, kGradKeys * ld_q);
    value_transposed_ = scratch<T>(kValue, kGradKeys * p.dim_v);
    strip_ = scratch<T>(kStrip, kLanes<T> * max(ld_q, ld_v));
  }

  void set_keys(int64_t b, int64_t h_kv, int64_t j0_, int64_t n_, bool want_grad_q) {
    j0 = j0_;
    n = n_;
    h_kv_ = h_kv;
    if (!few_) pack_transposed<T>(p_.k, b, h_kv, j0, n, p_.dim_qk, strip_, key_transposed_);
    pack_transposed<T>(p_.v, b, h_kv, j0, n, p_.dim_v, strip_, value_transposed_);
    if (want_grad_q) pack_panels<T>(p_.k, b, h_kv, j0, n, p_.dim_qk, true, key_panels);
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
    pack_rows<T>(p_.q, b, h, i0, rows, p_.dim_qk, T(p_.scale), q_rows_, ld_q);
    pack_rows<T>(io_.grad_out, b, h, i0, rows, p_.dim_v, T(1), grad_out_rows_, ld_v);
    has_panels_ = want_grad_kv;
    if (want_grad_kv) {
      pack_panels<T>(p_.q, b, h, i0, rows, p_.dim_qk, true, q_panels);
      pack_panels<T>(io_.grad_out, b, h, i0, rows, p_.dim_v, false, grad_out_panels);
    }
  }

  // Fills `prob` with factor * P and `grad` with dS.
  void compute(const Scores<T>& scores) {
    if (few_) {
      FewQueries<T>::scores(p_.k, b_, h_kv_, j0, n, p_.dim_qk, q_rows_, ld_q, rows, prob, kGradKeys);
    } else {
      matmul<T, false>(rows, n, p_.dim_qk, q_rows_, ld_q, key_transposed_, false, prob, kGradKeys);
    }
    scores.finish(prob, kGradKeys, i0, rows, j0, n, cap_slope_);
    matmul<T, false>(rows, n, p_.dim_v, grad_out_rows_, ld_v, value_transposed_, false, grad, kGradKeys);
    for (int64_t r = 0; r < rows; r++) gradient_row(r);
  }

  // dS of the capped logits to dS of the raw ones. After this `grad` serves dQ and dK.
  void pass_cap() {
    if (cap_slope_ == nullptr) return;
    for (int64_t x = 0; x < rows * kGradKeys; x += kLanes<T>) {
      // Beyond the valid keys the slope was never written; there dS is 0 and must stay so.
      const Vec<T> g = load(grad + x);
      store<T>(grad + x, g == Vec<T>{} ? Vec<T>{} : g * load(cap_slope_ + x));
    }
  }

 private:
  void gradient_row(int64_t r) {
    T factor[kGradKeys];
    const bool drops = p_.dropout.threshold != 0;
    if (drops) {
      dropout_factors<T>(p_.dropout, b_, h_, i0 + r, j0, n, factor);
      for (int64_t j = n; j < padded<T>(n); j++) factor[j] = T(0);
    }
    T *p_row = prob + r * kGradKeys, *g_row = grad + r * kGradKeys;
    const T row_max = max_[r], log_sum = log_sum_[r], delta = delta_[r];
    Vec<T> total = {};
    for (int64_t j = 0; j < padded<T>(n); j += kLanes<T>) {
      // At most 0 but for rounding, which grows with the logits.
      const Vec<T> exponent = load(p_row + j) - row_max - log_sum;
      const Vec<T> p = exp<T>(exponent > T(0) ? Vec<T>{} : exponent);
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
    if (has_panels_ && reduce_add<T>(total) == T(0)) clear_grad_out_panel_row(r);
  }

  // The gradient of a row that attends to nothing here must not reach dV, even where it is NaN (0 * NaN).
  void clear_grad_out_panel_row(int64_t r) {
    T* panel = grad_out_panels;
    for (int64_t d0 = 0; d0 < p_.dim_v; d0 += kPanel<T>) {
      const int64_t w = padded<T>(min(kPanel<T>, p_.dim_v - d0));
      for (int64_t d = 0; d < w; d++) panel[r * w + d] = T(0);
      panel += rows * w;
    }
  }

  const AttentionParams& p_;
  const BackwardIO& io_;
  const RowState<T>& state_;
  int64_t b_ = 0, h_ = 0, h_kv_ = 0;
  bool has_panels_ = false;
  const bool few_;
  T *q_rows_, *grad_out_rows_, *key_transposed_, *value_transposed_, *strip_, *cap_slope_ = nullptr;
  const T *max_ = nullptr, *log_sum_ = nullptr, *delta_ = nullptr;

 public:
  const int64_t ld_q, ld_v;
  int64_t i0 = 0, rows = 0, j0 = 0, n = 0;
  T *prob, *grad;  // [kGradRows][kGradKeys]
  T *q_panels, *grad_out_panels, *key_panels;
};

}  // namespace ATTN_ISA
}  // namespace attn_ext
