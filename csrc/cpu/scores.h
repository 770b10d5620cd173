// From raw products to logits: softcap, bias, float mask, ALiBi, and which keys each query may see. Tiles that nobody
// sees are left out of the loops by meet() and narrowed(); finish() hides what is hidden in the others.
namespace attn_ext {
namespace ATTN_ISA {

// A cap this large changes no logit that a kernel can tell apart, and its reciprocal would lose its last bits.
template <class T>
inline bool has_cap(const AttentionParams& p) {
  return p.softcap > 0 && p.softcap < (sizeof(T) == 4 ? 1e30 : 1e300);
}

// Keys a block of the inner loop. At D 64 in float, K^T and V of a block and 48 rows of scores, which are used again and
// again, take 176 KiB, inside the L2 cache of common machines; queries and output stream past. A multiple of 8, for
// dropout's groups of keys.
constexpr int64_t kBlockKeys = 256;

struct KeyRange {
  int64_t begin, end;
};

template <class T>
class Scores {
 public:
  Scores(const AttentionParams& p, int64_t b, int64_t h)
      : p_(p), b_(b), h_(h), keys_(p.valid_keys(b)), queries_(p.valid_queries(b)),
        only_intervals_(!has_cap<T>(p) && !p.bias.present && !p.float_mask.present &&
                        !p.alibi_slopes.present && !p.bool_mask.present && !p.block_mask.present()) {
    if (p.alibi_slopes.present) slope_ = read_one<T>(p.alibi_slopes.at(b, h, 0, 0), p.alibi_slopes.dtype);
  }

  // Keys that the causal, window and length rules let query i see: always one interval.
  KeyRange visible(int64_t i) const {
    if (i >= queries_) return {0, 0};
    int64_t begin = 0, end = keys_;
    const int64_t center = i + p_.offset();
    if (p_.causal != Causal::kNone) end = min(end, center + 1);
    if (p_.window_right >= 0 && p_.window_right < p_.len_q + p_.len_k)
      end = min(end, center + p_.window_right + 1);
    if (p_.window_left >= 0 && p_.window_left < p_.len_q + p_.len_k)
      begin = max(begin, center - p_.window_left);
    if (end <= begin) return {0, 0};
    return {begin, end};
  }

  // The smallest interval that holds what rows i0 .. i0+rows see. Both ends grow with i, so the first and the last
  // valid row decide.
  KeyRange visible(int64_t i0, int64_t rows) const {
    const int64_t last = min(i0 + rows, queries_) - 1;
    int64_t begin = p_.len_k, end = 0;
    if (i0 <= last) {
      for (int64_t i = i0; i <= last && begin == p_.len_k; i++) {  // leading rows may see nothing
        const KeyRange r = visible(i);
        if (r.end > r.begin) begin = r.begin;
      }
      for (int64_t i = last; i >= i0 && end == 0; i--) end = visible(i).end;
    }
    return end > begin ? KeyRange{begin, end} : KeyRange{0, 0};
  }

  // Whether rows i0 .. i0+rows see all of the keys j0 .. j0+n, as far as intervals tell. What a row sees grows at both ends
  // from row to row, unless it is nothing.
  bool all_visible(int64_t i0, int64_t rows, int64_t j0, int64_t n) const {
    const KeyRange first = visible(i0), last = visible(i0 + rows - 1);
    return first.end >= j0 + n && last.begin <= j0 && last.end >= j0 + n;
  }

  // Whether rows i0 .. i0+rows see any of the keys j0 .. j0+n, as far as intervals and the block mask tell.
  bool meet(int64_t i0, int64_t rows, int64_t j0, int64_t n) const {
    const KeyRange range = visible(i0, rows);
    const KeyRange keys = narrowed(i0, rows, {max(range.begin, j0), min(range.end, j0 + n)});
    return keys.begin < keys.end;
  }

  // `keys` without the blocks at either end of which the block mask shows these rows no key.
  KeyRange narrowed(int64_t i0, int64_t rows, KeyRange keys) const {
    if (!p_.block_mask.present()) return keys;
    constexpr int64_t size = BlockMask::kSize;
    while (keys.begin < keys.end && !any_block(i0, rows, keys.begin / size))
      keys.begin = (keys.begin / size + 1) * size;
    while (keys.begin < keys.end && !any_block(i0, rows, (keys.end - 1) / size))
      keys.end = (keys.end - 1) / size * size;
    return keys;
  }

  // Whether the block mask hides none of the keys j0 .. j0+n from rows i0 .. i0+rows.
  bool whole_blocks(int64_t i0, int64_t rows, int64_t j0, int64_t n) const {
    if (!p_.block_mask.present()) return true;
    constexpr int64_t size = BlockMask::kSize;
    for (int64_t i = i0 / size; i * size < i0 + rows; i++) {
      for (int64_t j = j0 / size; j * size < j0 + n; j++) {
        if (p_.block_mask.block(b_, h_, i, j) != 1) return false;
      }
    }
    return true;
  }

  // Turns the products s (rows i0 .. i0+rows, keys j0 .. j0+n; scale already inside) into logits in place.
  // Hidden keys, and the columns from n up to padded(n), become -inf. With softcap and `slope_of_cap` given, writes
  // the derivative d(capped)/d(raw) there, which the backward needs.
  void finish(T* s, int64_t ld, int64_t i0, int64_t rows, int64_t j0, int64_t n, T* slope_of_cap) const {
    if (only_intervals_ && n == padded<T>(n) && all_visible(i0, rows, j0, n)) return;  // most tiles
    for (int64_t r = 0; r < rows; r++) {
      T* row = s + r * ld;
      const int64_t i = i0 + r;
      const KeyRange range = visible(i);
      if (range.end > range.begin) {
        if (has_cap<T>(p_)) cap(row, padded<T>(n), slope_of_cap ? slope_of_cap + r * ld : nullptr);
        if (p_.bias.present) add(p_.bias, row, i, j0, n);
        if (p_.float_mask.present) add(p_.float_mask, row, i, j0, n);
        if (p_.alibi_slopes.present) {
          const int64_t center = i + p_.len_k - p_.len_q - j0;
          for (int64_t j = 0; j < n; j++) row[j] -= slope_ * distance(center - j);
        }
        if (p_.bool_mask.present) hide(row, i, j0, n);
        if (p_.block_mask.present()) hide_blocks(row, i, j0, n);
      }
      const int64_t begin = max(0, min(range.begin - j0, padded<T>(n))),
                    end = max(begin, min(range.end - j0, n));
      for (int64_t j = 0; j < begin; j++) row[j] = -infinity<T>();
      for (int64_t j = end; j < padded<T>(n); j++) row[j] = -infinity<T>();
    }
  }

  // What finish() is going to read for these rows and keys: the first bias or mask whose keys are side by side.
  Companion term(int64_t i0, int64_t j0) const {
    const StridedView* const terms[] = {&p_.bias, &p_.float_mask, &p_.bool_mask};
    for (const StridedView* term : terms) {
      if (!term->present || term->stride[3] != 1) continue;
      const int64_t size = size_of(term->dtype);
      return {term->at(b_, h_, i0, j0), term->stride[2] * size, size};
    }
    return {};
  }

  // |i + Nk - Nq - j|, what ALiBi multiplies its slope with.
  static ATTN_INLINE T distance(int64_t x) { return T(x < 0 ? -x : x); }

  int64_t valid_queries() const { return queries_; }
  int64_t valid_keys() const { return keys_; }

 private:
  void cap(T* row, int64_t n, T* slope) const {
    constexpr T kLargest = sizeof(T) == 4 ? T(3.4028234663852886e38) : T(1.7976931348623157e308);
    // Finite also for a tiny cap, which leaves only the sign of a logit: 0 * inf would be NaN.
    const T limit = T(p_.softcap), inverse = limit > T(1) / kLargest ? T(1) / limit : kLargest;
    for (int64_t j = 0; j < n; j += kLanes<T>) {
      const Vec<T> t = tanh<T>(load(row + j) * inverse);
      store<T>(row + j, t * limit);
      if (slope != nullptr) store<T>(slope + j, T(1) - t * t);
    }
  }

  // A bias of -inf hides the key whatever its product is, NaN included.
  static ATTN_INLINE Vec<T> with_term(Vec<T> logit, Vec<T> term) {
    return term == -infinity<T>() ? term : logit + term;
  }

  // Rows of a bias lie far apart, so that no stream of addresses announces the next ones: they are asked for early.
  static constexpr int64_t kRowsAhead = 4;

  void add(const StridedView& term, T* row, int64_t i, int64_t j0, int64_t n) const {
    constexpr int lanes = kLanes<T>;
    if (term.stride[3] != 1) {
      T values[kBlockKeys] = {};
      read_strided<T>(term.at(b_, h_, i, j0), term.dtype, term.stride[3], n, values);
      for (int64_t j = 0; j < n; j += lanes) store<T>(row + j, with_term(load(row + j), load(values + j)));
      return;
    }
    with_reader<T>(term.dtype, [&](auto reader) {
      using Reader = decltype(reader);
      const auto* values = reinterpret_cast<const typename Reader::Element*>(term.at(b_, h_, i, j0));
      const int64_t ahead = kRowsAhead * term.stride[2];
      for (int64_t j = 0; j < n; j += lanes) {
        __builtin_prefetch(values + ahead + j);
        store<T>(row + j, with_term(load(row + j), read_vector<T, Reader>(values + j, term.dtype, 0, n - j)));
      }
    });
  }

  void hide(T* row, int64_t i, int64_t j0, int64_t n) const {
    const char* mask = p_.bool_mask.at(b_, h_, i, j0);
    const int64_t step = p_.bool_mask.stride[3], ahead = kRowsAhead * p_.bool_mask.stride[2];
    int64_t j = 0;
    for (; step == 1 && j + kLanes<T> <= n; j += kLanes<T>) {
      __builtin_prefetch(mask + ahead + j);
      store<T>(row + j, where<T>(mask + j, load(row + j), -infinity<T>()));
    }
    for (; j < n; j++) row[j] = mask[j * step] ? row[j] : -infinity<T>();
  }

  bool any_block(int64_t i0, int64_t rows, int64_t key_block) const {
    for (int64_t i = i0 / BlockMask::kSize; i * BlockMask::kSize < i0 + rows; i++) {
      if (p_.block_mask.block(b_, h_, i, key_block) != 0) return true;
    }
    return false;
  }

  void hide_blocks(T* row, int64_t i, int64_t j0, int64_t n) const {
    constexpr int64_t size = BlockMask::kSize;
    for (int64_t j = j0, end; j < j0 + n; j = end) {
      end = min(j0 + n, (j / size + 1) * size);
      const int32_t block = p_.block_mask.block(b_, h_, i / size, j / size);
      if (block == 1) continue;
      const uint64_t seen = p_.block_mask.keys(block, i) >> j % size;
      for (int64_t x = 0; x < end - j; x++) {
        T& logit = row[j - j0 + x];
        logit = seen >> x & 1 ? logit : -infinity<T>();
      }
    }
  }

  const AttentionParams& p_;
  int64_t b_, h_, keys_, queries_;
  bool only_intervals_;  // nothing else changes or hides logits
  T slope_ = 0;
};

// exp(logit - LSE), the LSE as a row's maximum and -log2 of the rest. The exponent is at most 0 but for rounding, which
// grows with the logits. NaN stays.
template <class T, int degree>
ATTN_INLINE Vec<T> recomputed_prob(Vec<T> logit, T max, T minus_log2) {
  return exp2<T, degree>(min<T>(Vec<T>{}, (logit - max) * T(kLog2E) + minus_log2));
}

// Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) for groups of eight keys:
// counter (j / 8, i, h, b), key from the generator; four 32-bit words give eight 16-bit numbers. Writes the factor
// of each probability, 0 or 1 / (1 - p), for keys j0 .. j0+n of query i. j0 is a multiple of 8.
template <class T>
inline void dropout_factors(const Dropout& dropout, int64_t b, int64_t h, int64_t i, int64_t j0, int64_t n,
                            T* factor) {
  constexpr int kGroups = kBlockKeys / 8;
  uint32_t c[4][kGroups];
  const int groups = int((n + 7) / 8);
  for (int g = 0; g < groups; g++) {
    c[0][g] = uint32_t(j0 / 8 + g);
    c[1][g] = uint32_t(i);
    c[2][g] = uint32_t(h);
    c[3][g] = uint32_t(b);
  }
  const uint64_t key = dropout.key();
  uint32_t key0 = uint32_t(key), key1 = uint32_t(key >> 32);
  for (int round = 0; round < 10; round++) {
    for (int g = 0; g < groups; g++) {
      const uint64_t product0 = uint64_t(c[0][g]) * 0xD2511F53u, product1 = uint64_t(c[2][g]) * 0xCD9E8D57u;
      c[0][g] = uint32_t(product1 >> 32) ^ c[1][g] ^ key0;
      c[1][g] = uint32_t(product1);
      c[2][g] = uint32_t(product0 >> 32) ^ c[3][g] ^ key1;
      c[3][g] = uint32_t(product0);
    }
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  const T kept = T(dropout.scale());
  for (int64_t j = 0; j < n; j++) {
    const uint32_t number = c[(j % 8) / 2][j / 8] >> (16 * (j % 2)) & 0xffffu;
    factor[j] = number >= dropout.threshold ? kept : T(0);
  }
}
template <class T>
inline void drop(const Dropout& dropout, int64_t b, int64_t h, int64_t i, int64_t j0, int64_t n, T* prob) {
  T factor[kBlockKeys];
  dropout_factors<T>(dropout, b, h, i, j0, n, factor);
  for (int64_t j = 0; j < n; j++) prob[j] *= factor[j];
}

}  // namespace ATTN_ISA
}  // namespace attn_ext
