// The products of the forward and of the backward on tiles of T, by matmul.h. amx_products.h has others of the same
// interface for half types in AMX tiles.
namespace attn_ext {
namespace ATTN_ISA {

// `keys` from the first of a panel on, since products begin with one, and of a group of dropout.
template <class T>
inline KeyRange from_panel(const KeyRange& keys) {
  constexpr int64_t step = max(kPanel<T>, 8);
  return {keys.begin / step * step, keys.end};
}

template <class T>
class ForwardProducts {
 public:
  // Packing a key block costs about as much as 12 rows of its products (24 at AVX-512), so 1056 rows keep it at 1 to 2.5%,
  // and 1024 queries are one unit. Scores come in strips of fewer rows, to stay in cache.
  static constexpr int64_t kUnitRows = 1056, kStripRows = 48, kKeyStep = 1;

  // For units of up to `rows` queries. The flag is for products that cannot do with every number.
  ForwardProducts(const AttentionParams& p, int64_t rows, bool* /* in_range */)
      : ld_out(padded<T>(p.dim_v)), p_(p), ld_q_(padded<T>(p.dim_qk)) {
    q_ = scratch<T>(kQuery, rows * ld_q_);
    key_ = scratch<T>(kKey, kBlockKeys * p.dim_qk);
    // For few rows a copy in panels does not pay: V is then read where it lies, if its rows are whole vectors of T.
    const bool in_place = rows <= kStripRows && size_of(p.v.dtype) == int64_t(sizeof(T)) &&
                          p.dim_v % kLanes<T> == 0 && p.v.stride[2] > 0;
    value_pitch_ = in_place ? p.v.stride[2] : 0;
    if (!in_place) packed_value_ = scratch<T>(kValue, kBlockKeys * ld_out);
  }

  void set_queries(int64_t b, int64_t h, int64_t i0, int64_t rows) {
    pack_rows<T>(p_.q, b, h, i0, rows, p_.dim_qk, T(p_.scale), q_, ld_q_);
  }

  void set_keys(int64_t b, int64_t h_kv, int64_t j0, int64_t n) {
    n_ = n;
    pack_transposed<T>(p_.k, b, h_kv, j0, n, p_.dim_qk, key_);
    if (value_pitch_ > 0) {
      value_ = reinterpret_cast<const T*>(p_.v.at(b, h_kv, j0, 0));
    } else {
      pack_panels<T>(p_.v, b, h_kv, j0, n, p_.dim_v, false, packed_value_);
      value_ = packed_value_;
    }
  }

  // The keys of the block, counted from its first, that a strip has to meet which sees `visible` of them.
  KeyRange meet(const KeyRange& visible) const { return from_panel<T>(visible); }

  // scale * Q K^T of rows r0 .. r0+rows and these keys, to [rows][kBlockKeys]. `term` is what will be added to them.
  void scores(int64_t r0, int64_t rows, const KeyRange& keys, T* score, const Companion& term) const {
    const Panels<T> key = {key_ + keys.begin * p_.dim_qk, n_ - keys.begin, p_.dim_qk};
    matmul<T, false>(rows, keys.end - keys.begin, p_.dim_qk, q_ + r0 * ld_q_, ld_q_, key, false, score,
                     kBlockKeys, term);
  }

  // out[rows][ld_out] = P V, or += where it is not the first.
  void add_values(int64_t rows, const KeyRange& keys, const T* prob, bool first, T* out) const {
    matmul<T, false>(rows, p_.dim_v, keys.end - keys.begin, prob, kBlockKeys,
                     Panels<T>{value_, p_.dim_v, n_, keys.begin, value_pitch_}, !first, out, ld_out);
  }

  const int64_t ld_out;

 private:
  const AttentionParams& p_;
  const int64_t ld_q_;
  int64_t n_ = 0, value_pitch_;
  T *q_, *key_, *packed_value_ = nullptr;
  const T* value_ = nullptr;
};

// The backward's tiles have up to kRows queries and kKeys keys. Smaller key blocks than the forward's: three packed
// copies of the keys and values, two score tiles and two gradient blocks share the L2 cache here (350 KiB at D 64 in
// float). Scores come in strips [kStripRows][kStripKeys] of the tile, which leave out keys that none of their rows sees.
template <class T>
class GradProducts {
 public:
  static constexpr int64_t kRows = 96, kKeys = 128;
  static constexpr int64_t kStripRows = 48, kStripKeys = kKeys;
  static constexpr bool kPlainStrips = false;  // see amx_products.h
  static constexpr int kExpDegree = SimdTypes<T>::kExpDegree;

  GradProducts(const AttentionParams& p, const BackwardIO& io, bool* /* in_range */)
      : ld_q(padded<T>(p.dim_qk)), ld_v(padded<T>(p.dim_v)), p_(p), io_(io), few_(p.len_q <= kFewQueries) {
    q_rows_ = scratch<T>(kQuery, kRows * ld_q);
    q_panels_ = scratch<T>(kQueryPanel, kRows * ld_q);
    grad_out_panels_ = scratch<T>(kGradOutPanel, kRows * ld_v);
    prob_ = scratch<T>(kScore, kRows * kKeys);
    grad_scores_ = scratch<T>(kGradScore, kRows * kKeys);
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
    const StridedView& grad_out = io_.grad_out;
    if (size_of(grad_out.dtype) == int64_t(sizeof(T)) && grad_out.stride[2] == ld_v) {  // as if packed
      grad_out_rows_ = reinterpret_cast<const T*>(grad_out.at(b, h, i0, 0));
    } else {
      T* packed = scratch<T>(kGradOut, kRows * ld_v);
      pack_rows<T>(grad_out, b, h, i0, rows, p_.dim_v, T(1), packed, ld_v);
      grad_out_rows_ = packed;
    }
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
  KeyRange meet(int64_t row, const KeyRange& visible) {
    const bool none = visible.begin >= visible.end;
    return seen_[row / kStripRows] = none ? KeyRange{0, 0} : from_panel<T>(visible);
  }

  // Where P and dS of a strip are to be made: in the tile, [kRows][kKeys].
  T* prob_of(const Strip& s) const { return prob_ + s.row * kKeys + s.key; }
  T* grad_of(const Strip& s) const { return grad_scores_ + s.row * kKeys + s.key; }

  // scale * Q K^T and dO V^T of a strip.
  void scores(const Strip& s, T* score) const {
    const T* q = q_rows_ + s.row * ld_q;
    if (few_) {
      FewQueries<T>::scores(p_.k, b_, h_kv_, j0_ + s.key, s.keys, p_.dim_qk, q, ld_q, s.rows, score, kKeys);
    } else {
      const Panels<T> key = {key_transposed_ + s.key * p_.dim_qk, n_ - s.key, p_.dim_qk};
      matmul<T, false>(s.rows, s.keys, p_.dim_qk, q, ld_q, key, false, score, kKeys);
    }
  }
  void grad_probs(const Strip& s, T* grad) const {
    const Panels<T> value = {value_transposed_ + s.key * p_.dim_v, n_ - s.key, p_.dim_v};
    matmul<T, false>(s.rows, s.keys, p_.dim_v, grad_out_rows_ + s.row * ld_v, ld_v, value, false, grad,
                     kKeys);
  }

  // The products below take P and dS from where they are. Blocks of keys that are partly in the strip meet it whole.
  void set_strip(const Strip& s, T* prob, T* grad) const {
    for (int64_t r = 0; r < s.rows; r++) {
      for (int64_t j = block_begin(s.key) - s.key; j < 0; j++)
        prob[r * kKeys + j] = grad[r * kKeys + j] = T(0);
      for (int64_t j = s.keys; j < block_end(s.key + s.keys) - s.key; j++)
        prob[r * kKeys + j] = grad[r * kKeys + j] = T(0);
    }
  }

  void add_grad_v(T* grad_v) const { add_over_rows(p_.dim_v, prob_, grad_out_panels_, grad_v, ld_v); }
  void add_grad_k(T* grad_k) const { add_over_rows(p_.dim_qk, grad_scores_, q_panels_, grad_k, ld_q); }
  // grad_q[rows][ld] += dS K, for the rows of the tile from `row` on.
  void add_grad_q(int64_t row, int64_t rows, T* grad_q, int64_t ld) const {
    const KeyRange keys = seen_[row / kStripRows];
    matmul<T, false>(rows, p_.dim_qk, keys.end - keys.begin, grad_scores_ + row * kKeys + keys.begin, kKeys,
                     Panels<T>{key_panels_, p_.dim_qk, n_, keys.begin}, true, grad_q, ld);
  }

  // What grad_k or grad_v holds, as rows [kKeys][ld], of which so many keys use as many.
  static int64_t sums_of_keys(int64_t keys) { return keys; }
  static constexpr int64_t kKeysWritten = kKeys;
  T* key_rows(T* grad, int64_t /* ld */, int64_t /* j: 0 */) const { return grad; }

  const int64_t ld_q, ld_v;

 private:
  // Keys in blocks as matmul takes them.
  static int64_t block_begin(int64_t j) { return j / kBlockRows * kBlockRows; }
  int64_t block_end(int64_t j) const { return min(n_, round_up(j, kBlockRows)); }

  // The rows that meet the block with key j: one interval, since both ends of what a row sees grow with the row.
  KeyRange rows_that_meet(int64_t j) const {
    KeyRange rows = {0, 0};
    for (int64_t i = 0; i < rows_; i += kStripRows) {
      const KeyRange& seen = seen_[i / kStripRows];
      if (j < block_begin(seen.begin) || j >= block_end(seen.end)) continue;
      if (rows.end == 0) rows.begin = i;
      rows.end = min(i + kStripRows, rows_);
    }
    return rows;
  }

  // c[keys][ldc] += a^T panels, over the rows that meet each block of keys.
  void add_over_rows(int64_t width, const T* a, const T* panels, T* c, int64_t ldc) const {
    for (int64_t j = 0, end; j < n_; j = end) {
      const KeyRange rows = rows_that_meet(j);
      for (end = block_end(j + 1); end < n_; end = block_end(end + 1)) {
        const KeyRange next = rows_that_meet(end);
        if (next.begin != rows.begin || next.end != rows.end) break;
      }
      if (rows.begin >= rows.end) continue;
      matmul<T, true>(end - j, width, rows.end - rows.begin, a + rows.begin * kKeys + j, kKeys,
                      Panels<T>{panels, width, rows_, rows.begin}, true, c + j * ldc, ldc);
    }
  }

  const AttentionParams& p_;
  const BackwardIO& io_;
  const bool few_;
  int64_t b_ = 0, h_kv_ = 0, j0_ = 0, n_ = 0, rows_ = 0;
  T *q_rows_, *q_panels_, *grad_out_panels_;
  const T* grad_out_rows_ = nullptr;  // [rows][ld_v], for reading dim_v columns
  T *prob_, *grad_scores_, *key_transposed_, *key_panels_, *value_transposed_;
  KeyRange seen_[kRows / kStripRows] = {};  // by each strip
};

}  // namespace ATTN_ISA
}  // namespace attn_ext
