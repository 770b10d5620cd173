// The products of the forward and of the backward on tiles of T, by matmul.h. amx_products.h has others of the same
// interface for half types in AMX tiles.
namespace attn_ext {
namespace ATTN_ISA {

template <class T>
class ForwardProducts {
 public:
  // Packing a key block costs about as much as 8 rows of its products, so 384 rows keep it near 2%. Scores come in
  // strips of fewer rows, to stay in cache.
  static constexpr int64_t kUnitRows = 384, kStripRows = 48;

  // For units of up to `rows` queries. The flag is for products that cannot do with every number.
  ForwardProducts(const AttentionParams& p, int64_t rows, bool* /* in_range */)
      : ld_out(padded<T>(p.dim_v)), p_(p), few_(p.len_q <= kFewQueries), ld_q_(padded<T>(p.dim_qk)) {
    q_ = scratch<T>(kQuery, rows * ld_q_);
    if (few_) return;
    key_ = scratch<T>(kKey, kBlockKeys * p.dim_qk);
    value_ = scratch<T>(kValue, kBlockKeys * ld_out);
  }

  void set_queries(int64_t b, int64_t h, int64_t i0, int64_t rows) {
    pack_rows<T>(p_.q, b, h, i0, rows, p_.dim_qk, T(p_.scale), q_, ld_q_);
  }

  void set_keys(int64_t b, int64_t h_kv, int64_t j0, int64_t n) {
    b_ = b;
    h_kv_ = h_kv;
    j0_ = j0;
    n_ = n;
    if (few_) return;
    pack_transposed<T>(p_.k, b, h_kv, j0, n, p_.dim_qk, key_);
    pack_panels<T>(p_.v, b, h_kv, j0, n, p_.dim_v, false, value_);
  }

  // The keys of the block, counted from its first, that a strip has to meet which sees `visible` of them: whole panels,
  // and whole groups for dropout.
  KeyRange meet(const KeyRange& visible) const {
    constexpr int64_t step = max(kPanel<T>, 8);
    return {visible.begin / step * step, min(n_, round_up(visible.end, step))};
  }

  // scale * Q K^T of rows r0 .. r0+rows and these keys, to [rows][kBlockKeys].
  void scores(int64_t r0, int64_t rows, const KeyRange& keys, T* score) const {
    const T* q = q_ + r0 * ld_q_;
    const int64_t n = keys.end - keys.begin;
    if (few_) {
      FewQueries<T>::scores(p_.k, b_, h_kv_, j0_ + keys.begin, n, p_.dim_qk, q, ld_q_, rows, score,
                            kBlockKeys);
    } else {
      const Panels<T> key = {key_ + keys.begin * p_.dim_qk, p_.dim_qk};
      matmul<T, false>(rows, n, p_.dim_qk, q, ld_q_, key, false, score, kBlockKeys);
    }
  }

  // out[rows][ld_out] = P V, or += where it is not the first.
  void add_values(int64_t rows, const KeyRange& keys, const T* prob, bool first, T* out) const {
    const int64_t n = keys.end - keys.begin;
    if (few_) {
      for (int64_t x = 0; first && x < rows * ld_out; x++) out[x] = T(0);
      FewQueries<T>::values(p_.v, b_, h_kv_, j0_ + keys.begin, n, p_.dim_v, prob, kBlockKeys, rows, out,
                            ld_out);
    } else {
      matmul<T, false>(rows, p_.dim_v, n, prob, kBlockKeys, Panels<T>{value_, n_, keys.begin}, !first, out,
                       ld_out);
    }
  }

  const int64_t ld_out;

 private:
  const AttentionParams& p_;
  const bool few_;
  const int64_t ld_q_;
  int64_t b_ = 0, h_kv_ = 0, j0_ = 0, n_ = 0;
  T *q_, *key_ = nullptr, *value_ = nullptr;
};

// The backward's tiles have up to kRows queries and kKeys keys. Smaller key blocks than the forward's: three packed
// copies of the keys and values, two score tiles and two gradient blocks share the L2 cache here (350 KiB at D 64 in
// float). Scores come in strips [kStripRows][kStripKeys] of the tile: here all at once.
template <class T>
class GradProducts {
 public:
  static constexpr int64_t kRows = 96, kKeys = 128;
  static constexpr int64_t kStripRows = kRows, kStripKeys = kKeys;
  static constexpr bool kPlainStrips = false;  // see amx_products.h
  static constexpr int kExpDegree = SimdTypes<T>::kExpDegree;

  GradProducts(const AttentionParams& p, const BackwardIO& io, bool* /* in_range */)
      : ld_q(padded<T>(p.dim_qk)), ld_v(padded<T>(p.dim_v)), p_(p), io_(io), few_(p.len_q <= kFewQueries) {
    q_rows_ = scratch<T>(kQuery, kRows * ld_q);
    q_panels_ = scratch<T>(kQueryPanel, kRows * ld_q);
    grad_out_rows_ = scratch<T>(kGradOut, kRows * ld_v);
    grad_out_panels_ = scratch<T>(kGradOutPanel, kRows * ld_v);
    key_transposed_ = scratch<T>(kKey, kKeys * p.dim_qk);
    key_panels_ = scratch<T>(kKeyPanel, kKeys * ld_q);
    value_transposed_ = scratch<T>(kValue, kKeys * p.dim_v);
  }

  void set_keys(int64_t b, int64_t h_kv, int64_t j0, int64_t n, bool want_grad_q) {
    h_kv_ = h_kv;
    j0_ = j0;
    n_ = n;
    if (!few_) pack_transposed<T>(p_.k, b, h_kv, j0, n, p_.dim_qk, key_transposed_);
    pack_transposed<T>(p_.v, b, h_kv, j0, n, p_.dim_v, value_transposed_);
    if (want_grad_q) pack_panels<T>(p_.k, b, h_kv, j0, n, p_.dim_qk, true, key_panels_);
  }

  void set_queries(int64_t b, int64_t h, int64_t i0, int64_t rows, bool want_grad_kv) {
    b_ = b;
    rows_ = rows;
    pack_rows<T>(p_.q, b, h, i0, rows, p_.dim_qk, T(p_.scale), q_rows_, ld_q);
    pack_rows<T>(io_.grad_out, b, h, i0, rows, p_.dim_v, T(1), grad_out_rows_, ld_v);
    if (want_grad_kv) {
      pack_panels<T>(p_.q, b, h, i0, rows, p_.dim_qk, true, q_panels_);
      pack_panels<T>(io_.grad_out, b, h, i0, rows, p_.dim_v, false, grad_out_panels_);
    }
  }

  // The gradient of a row that attends to nothing here must not reach dV, even where it is NaN (0 * NaN).
  void drop_grad_out(int64_t r) {
    T* panel = grad_out_panels_;
    for (int64_t d0 = 0; d0 < p_.dim_v; d0 += kPanel<T>) {
      const int64_t w = padded<T>(min(kPanel<T>, p_.dim_v - d0));
      for (int64_t d = 0; d < w; d++) panel[r * w + d] = T(0);
      panel += rows_ * w;
    }
  }

  // The keys of the tile that the rows from `row` on have to meet, when they see some of these.
  KeyRange meet(int64_t /* row */, const KeyRange& /* visible */) const { return {0, n_}; }

  // scale * Q K^T and dO V^T of a strip.
  void scores(const Strip& /* all */, T* score) const {
    if (few_) {
      FewQueries<T>::scores(p_.k, b_, h_kv_, j0_, n_, p_.dim_qk, q_rows_, ld_q, rows_, score, kKeys);
    } else {
      matmul<T, false>(rows_, n_, p_.dim_qk, q_rows_, ld_q, Panels<T>{key_transposed_, p_.dim_qk}, false,
                       score, kKeys);
    }
  }
  void grad_probs(const Strip& /* all */, T* grad) const {
    matmul<T, false>(rows_, n_, p_.dim_v, grad_out_rows_, ld_v, Panels<T>{value_transposed_, p_.dim_v}, false,
                     grad, kKeys);
  }

  // P and dS of a strip, for the products below.
  void set_strip(const Strip& /* all */, const T* prob, const T* grad) {
    prob_ = prob;
    grad_scores_ = grad;
  }

  // grad_v += P^T dO
  void add_grad_v(T* grad_v) const {
    matmul<T, true>(n_, p_.dim_v, rows_, prob_, kKeys, Panels<T>{grad_out_panels_, rows_}, true, grad_v,
                    ld_v);
  }

  // grad_k += dS^T Q
  void add_grad_k(T* grad_k) const {
    matmul<T, true>(n_, p_.dim_qk, rows_, grad_scores_, kKeys, Panels<T>{q_panels_, rows_}, true, grad_k,
                    ld_q);
  }
  // grad_q[rows][ld] += dS K, for the rows of the strips that came last.
  void add_grad_q(int64_t /* row */, int64_t rows, T* grad_q, int64_t ld) const {
    matmul<T, false>(rows, p_.dim_qk, n_, grad_scores_, kKeys, Panels<T>{key_panels_, n_}, true, grad_q, ld);
  }

  // What grad_k or grad_v holds, as rows [kKeys][ld].
  static constexpr int64_t kKeysWritten = kKeys;
  T* key_rows(T* grad, int64_t /* ld */, int64_t /* j: 0 */) const { return grad; }

  const int64_t ld_q, ld_v;

 private:
  const AttentionParams& p_;
  const BackwardIO& io_;
  const bool few_;
  int64_t b_ = 0, h_kv_ = 0, j0_ = 0, n_ = 0, rows_ = 0;
  T *q_rows_, *q_panels_, *grad_out_rows_, *grad_out_panels_;
  T *key_transposed_, *key_panels_, *value_transposed_;
  const T *prob_ = nullptr, *grad_scores_ = nullptr;
};

}  // namespace ATTN_ISA
}  // namespace attn_ext
