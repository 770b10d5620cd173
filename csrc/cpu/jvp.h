// Forward mode: the tangents of out and lse along tangents of the inputs (written with a dot). As in the backward, P comes
// from the saved LSE, so there is no online softmax:
//
//   P    = exp(S - lse)
//   S.   = scale (q. k + q k.) * slope of the cap + bias. + float_mask. - slope. |i + Nk - Nq - j|
//   lse. = sum_j P S. + exp(sink - lse) sink.
//   out. = sum_j factor P S. v + sum_j factor P v. - lse. out           factor: dropout's 0 or 1 / (1 - p)
//
// One pass over the keys: up to five products a tile, none for a tangent that is not there.
namespace attn_ext {
namespace ATTN_ISA {

template <class T>
class TangentUnit {
 public:
  static constexpr int64_t kUnitRows = 384, kStripRows = 48;  // see ForwardProducts; there are more sums here

  TangentUnit(const AttentionParams& p, const JvpIO& io, int64_t b, int64_t h, int64_t i0, int64_t rows)
      : p_(p), io_(io), b_(b), h_(h), i0_(i0), rows_(rows), scores_(p, b, h), few_(p.len_q <= kFewQueries),
        ld_q_(padded<T>(p.dim_qk)), ld_v_(padded<T>(p.dim_v)),
        moves_scores_(io.tangent_q.present || io.tangent_k.present || io.tangent_bias.present ||
                      io.tangent_float_mask.present || io.tangent_alibi_slopes.present) {
    q_ = scratch<T>(kQuery, 2 * rows * ld_q_);
    tangent_q_ = q_ + rows * ld_q_;
    out_ = scratch<T>(kOutput, rows * ld_v_);
    max_ = scratch<T>(kState, 4 * rows);
    minus_log2_ = max_ + rows;
    tangent_lse_ = minus_log2_ + rows;
    prob_sum_ = tangent_lse_ + rows;
    prob_ = scratch<T>(kScore, kStripRows * kBlockKeys);
    moved_ = scratch<T>(kGradScore, 2 * kStripRows * kBlockKeys);
    if (has_cap<T>(p)) cap_slope_ = scratch<T>(kCapSlope, kStripRows * kBlockKeys);
    if (few_) return;
    key_ = scratch<T>(kKey, 2 * kBlockKeys * p.dim_qk);
    tangent_key_ = key_ + kBlockKeys * p.dim_qk;
    value_ = scratch<T>(kValue, 2 * kBlockKeys * ld_v_);
    tangent_value_ = value_ + kBlockKeys * ld_v_;
  }

  void run() {
    const int64_t valid = max(0, min(rows_, scores_.valid_queries() - i0_));
    start(valid);
    const KeyRange range = scores_.visible(i0_, valid);
    for (int64_t j0 = range.begin / kBlockKeys * kBlockKeys; j0 < range.end; j0 += kBlockKeys) {
      const KeyRange keys = scores_.narrowed(i0_, valid, {j0, min(j0 + kBlockKeys, range.end)});
      if (keys.begin >= keys.end) continue;
      packed_ = keys.end - keys.begin;
      set_keys(keys.begin, packed_);
      for (int64_t r0 = 0; r0 < valid; r0 += kStripRows) {
        const int64_t rows = min(kStripRows, valid - r0);
        const KeyRange strip = scores_.visible(i0_ + r0, rows);
        if (strip.end <= keys.begin || strip.begin >= keys.end) continue;
        attend(r0, rows, keys.begin, min(packed_, strip.end - keys.begin));
      }
    }
    finish();
  }

 private:
  void start(int64_t valid) {
    pack_rows<T>(p_.q, b_, h_, i0_, valid, p_.dim_qk, T(p_.scale), q_, ld_q_);
    if (io_.tangent_q.present) {
      pack_rows<T>(io_.tangent_q, b_, h_, i0_, valid, p_.dim_qk, T(p_.scale), tangent_q_, ld_q_);
    }
    for (int64_t r = 0; r < rows_; r++) {
      const T* parts = lse_parts(r);
      max_[r] = parts[0] == -infinity<T>() ? infinity<T>() : parts[0];  // then P is 0
      minus_log2_[r] = parts[1] * T(-kLog2E);
      tangent_lse_[r] = prob_sum_[r] = T(0);
    }
    for (int64_t x = 0; x < rows_ * ld_v_; x++) out_[x] = T(0);
    tangent_slope_ = io_.tangent_alibi_slopes.present ? read_one<T>(io_.tangent_alibi_slopes.at(b_, h_, 0, 0),
                                                                    io_.tangent_alibi_slopes.dtype)
                                                      : T(0);
  }

  void set_keys(int64_t j0, int64_t n) {
    if (few_) return;
    const int64_t h_kv = h_ / p_.group();
    pack_transposed<T>(p_.k, b_, h_kv, j0, n, p_.dim_qk, key_);
    if (io_.tangent_k.present) pack_transposed<T>(io_.tangent_k, b_, h_kv, j0, n, p_.dim_qk, tangent_key_);
    if (moves_scores_) pack_panels<T>(p_.v, b_, h_kv, j0, n, p_.dim_v, false, value_);
    if (io_.tangent_v.present)
      pack_panels<T>(io_.tangent_v, b_, h_kv, j0, n, p_.dim_v, false, tangent_value_);
  }

  // Rows r0 .. r0+rows of the unit meet keys j0 .. j0+n.
  void attend(int64_t r0, int64_t rows, int64_t j0, int64_t n) {
    product(q_ + r0 * ld_q_, rows, p_.k, key_, j0, n, false, prob_);
    scores_.finish(prob_, kBlockKeys, i0_ + r0, rows, j0, n, cap_slope_);
    if (moves_scores_) move_scores(r0, rows, j0, n);
    for (int64_t r = 0; r < rows; r++)
      weigh_row(r0 + r, prob_ + r * kBlockKeys, moved_ + r * kBlockKeys, j0, n);
    T* out = out_ + r0 * ld_v_;
    if (moves_scores_) add_values(moved_, rows, p_.v, value_, j0, n, out);
    if (io_.tangent_v.present) add_values(prob_, rows, io_.tangent_v, tangent_value_, j0, n, out);
  }

  // S. to moved_. Of hidden keys it may be anything.
  void move_scores(int64_t r0, int64_t rows, int64_t j0, int64_t n) {
    const bool from_q = io_.tangent_q.present, from_k = io_.tangent_k.present;
    if (from_q) product(tangent_q_ + r0 * ld_q_, rows, p_.k, key_, j0, n, false, moved_);
    if (from_k) product(q_ + r0 * ld_q_, rows, io_.tangent_k, tangent_key_, j0, n, from_q, moved_);
    for (int64_t r = 0; r < rows; r++) {
      T* row = moved_ + r * kBlockKeys;
      if (!from_q && !from_k) {
        for (int64_t j = 0; j < padded<T>(n); j++) row[j] = T(0);
      } else if (cap_slope_ != nullptr) {
        // The slope of a row that sees nothing was never written.
        const T* slope = cap_slope_ + r * kBlockKeys;
        for (int64_t j = 0; j < padded<T>(n); j++) row[j] *= slope[j];
      }
      const int64_t i = i0_ + r0 + r;
      add(io_.tangent_bias, row, i, j0, n);
      add(io_.tangent_float_mask, row, i, j0, n);
      if (tangent_slope_ != T(0)) {
        const int64_t center = i + p_.len_k - p_.len_q - j0;
        for (int64_t j = 0; j < n; j++) row[j] -= tangent_slope_ * Scores<T>::distance(center - j);
      }
    }
  }

  void add(const StridedView& term, T* row, int64_t i, int64_t j0, int64_t n) const {
    if (!term.present) return;
    T values[kBlockKeys];
    read_strided<T>(term.at(b_, h_, i, j0), term.dtype, term.stride[3], n, values);
    for (int64_t j = 0; j < n; j++) row[j] += values[j];
  }

  // S to factor P, S. to factor P S., whose sum without the factor is the tangent of the LSE.
  void weigh_row(int64_t r, T* prob, T* moved, int64_t j0, int64_t n) {
    T factor[kBlockKeys];
    const bool drops = p_.dropout.threshold != 0;
    if (drops) {
      dropout_factors<T>(p_.dropout, b_, h_, i0_ + r, j0, n, factor);
      for (int64_t j = n; j < padded<T>(n); j++) factor[j] = T(0);
    }
    Vec<T> total = {}, prob_sum = {};
    for (int64_t j = 0; j < padded<T>(n); j += kLanes<T>) {
      Vec<T> p = recomputed_prob<T, SimdTypes<T>::kExpDegree>(load(prob + j), max_[r], minus_log2_[r]);
      prob_sum += p;
      if (moves_scores_) {
        // A key with P = 0 has no part in it, whatever K and the tangents hold there.
        Vec<T> ps = p == Vec<T>{} ? Vec<T>{} : p * load(moved + j);
        total += ps;
        store<T>(moved + j, drops ? ps * load(factor + j) : ps);
      }
      store<T>(prob + j, drops ? p * load(factor + j) : p);
    }
    tangent_lse_[r] += reduce_add<T>(total);
    prob_sum_[r] += reduce_add<T>(prob_sum);
  }

  void finish() {
    T* primal = scratch<T>(kStrip, ld_v_);
    const bool has_sink = p_.sinks.present && io_.tangent_sinks.present;
    const T sink = has_sink ? read_one<T>(p_.sinks.at(0, h_, 0, 0), p_.sinks.dtype) : T(0);
    const T tangent_sink =
        has_sink ? read_one<T>(io_.tangent_sinks.at(0, h_, 0, 0), io_.tangent_sinks.dtype) : T(0);
    for (int64_t r = 0; r < rows_; r++) {
      const int64_t i = i0_ + r;
      if (has_sink && sink != -infinity<T>()) {
        tangent_lse_[r] += exp<T>(splat<T>(sink - lse_parts(r)[0] - lse_parts(r)[1]))[0] * tangent_sink;
      }
      T* out = out_ + r * ld_v_;
      if (prob_sum_[r] == T(0)) {  // no key took part, whatever hidden values were multiplied by 0
        for (int64_t d = 0; d < ld_v_; d++) out[d] = T(0);
      }
      if (tangent_lse_[r] != T(0)) {
        read_row<T>(io_.out.at(b_, h_, i, 0), io_.out.dtype, p_.dim_v, primal);
        for (int64_t d = 0; d < p_.dim_v; d++) out[d] -= tangent_lse_[r] * primal[d];
      }
      write_row<T>(io_.tangent_out.at(b_, h_, i, 0), io_.tangent_out.dtype, p_.dim_v, out);
      *reinterpret_cast<T*>(io_.tangent_lse.at(b_, h_, i, 0)) = tangent_lse_[r];
    }
  }

  // score[rows][kBlockKeys] (+)= query K^T, in the order of the forward, whose LSE belongs to it.
  void product(const T* query, int64_t rows, const StridedView& k, const T* panels, int64_t j0, int64_t n,
               bool accumulate, T* score) const {
    if (!few_) {
      matmul<T, false>(rows, n, p_.dim_qk, query, ld_q_, Panels<T>{panels, packed_, p_.dim_qk}, accumulate,
                       score, kBlockKeys);
      return;
    }
    T* target = accumulate ? moved_ + kStripRows * kBlockKeys : score;
    FewQueries<T>::scores(k, b_, h_ / p_.group(), j0, n, p_.dim_qk, query, ld_q_, rows, target, kBlockKeys);
    for (int64_t x = 0; accumulate && x < rows * kBlockKeys; x++) score[x] += target[x];
  }

  void add_values(const T* weight, int64_t rows, const StridedView& v, const T* panels, int64_t j0, int64_t n,
                  T* out) const {
    if (few_) {
      FewQueries<T>::values(v, b_, h_ / p_.group(), j0, n, p_.dim_v, weight, kBlockKeys, rows, out, ld_v_);
    } else {
      matmul<T, false>(rows, p_.dim_v, n, weight, kBlockKeys, Panels<T>{panels, p_.dim_v, packed_}, true, out,
                       ld_v_);
    }
  }

  const T* lse_parts(int64_t r) const {
    return reinterpret_cast<const T*>(io_.lse_parts.at(b_, h_, i0_ + r, 0));
  }

  const AttentionParams& p_;
  const JvpIO& io_;
  const int64_t b_, h_, i0_, rows_;
  const Scores<T> scores_;
  const bool few_;
  const int64_t ld_q_, ld_v_;
  const bool moves_scores_;
  T *q_, *tangent_q_, *out_, *max_, *minus_log2_, *tangent_lse_, *prob_sum_, *prob_, *moved_,
      *cap_slope_ = nullptr;
  T *key_ = nullptr, *tangent_key_ = nullptr, *value_ = nullptr, *tangent_value_ = nullptr;
  T tangent_slope_ = T(0);
  int64_t packed_ = 0;  // keys of the block
};

template <class T>
void jvp(const AttentionParams& p, const JvpIO& io, const Threads& threads) {
  const int64_t rows = unit_rows(p, TangentUnit<T>::kUnitRows, TangentUnit<T>::kStripRows, threads.count);
  const int64_t tiles = ceil_div(p.len_q, rows), heads = p.batch * p.heads_q;
  for_each_unit(threads, tiles * heads, 2 * score_products(p), [&](int64_t unit) {
    const int64_t tile = tiles - 1 - unit % tiles, bh = unit / tiles, i0 = tile * rows;
    TangentUnit<T>(p, io, bh / p.heads_q, bh % p.heads_q, i0, min(rows, p.len_q - i0)).run();
  });
}

}  // namespace ATTN_ISA
}  // namespace attn_ext
