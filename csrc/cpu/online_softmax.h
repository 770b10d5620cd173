// The online softmax of some query rows (Milakov and Gimelshein 2018): what is known of each after the keys so far.
//
//   m' = max(m, rowmax S);  P = exp(S - m');  a = exp(m - m');  l = a l + rowsum P;  O = a O + dropout(P) V
//
// At the end a sink joins m and l;  out = O / l,  lse = m + log l.
namespace attn_ext {
namespace ATTN_ISA {

template <class T>
struct OnlineSoftmax {
  T *top, *sum;  // of each row; with room up to a whole vector
  T* out;        // [rows][ld]
  int64_t ld;

  void start(int64_t rows) const {
    for (int64_t r = 0; r < rows; r++) {
      top[r] = -infinity<T>();
      sum[r] = T(0);
    }
  }

  // score [rows][kBlockKeys], n columns of it whole vectors: S to P for rows r0 .. r0+rows, and O to the new maxima where
  // the rows have one (`started`). The maxima of all rows come first: each needs a chain of instructions through one
  // vector, and those of different rows overlap.
  template <int most_rows>
  void add(int64_t r0, int64_t rows, int64_t n, bool started, T* score) const {
    constexpr int lanes = kLanes<T>, room = int(round_up(most_rows, lanes));
    T reference[room], rescale[room];
    for (int64_t r = 0; r < rows; r++) {
      const T* s = score + r * kBlockKeys;
      Vec<T> largest = load(s);
#pragma GCC unroll 4
      for (int64_t j = lanes; j < n; j += lanes) largest = max<T>(largest, load(s + j));
      reference[r] = reduce_max<T>(largest);
    }
    // Rows that only fill the last vector keep what they have.
    for (int64_t r = rows; r < round_up(rows, lanes); r++) reference[r] = -infinity<T>();
    for (int64_t r = 0; r < rows; r += lanes) {
      const Vec<T> before = load(top + r0 + r), now = max<T>(load(reference + r), before);
      // Nothing visible yet: exp(-inf - 0) = 0, not NaN.
      const Vec<T> from = now == -infinity<T>() ? Vec<T>{} : now;
      store<T>(top + r0 + r, now);
      store<T>(reference + r, from);
      store<T>(rescale + r, exp<T>(before - from));
    }
    for (int64_t r = 0; r < rows; r++) {
      T* s = score + r * kBlockKeys;
      const T from = reference[r];
      Vec<T> total = {};
#pragma GCC unroll 4
      for (int64_t j = 0; j < n; j += lanes) {
        const Vec<T> p = exp<T>(load(s + j) - from);
        store<T>(s + j, p);
        total += p;
      }
      sum[r0 + r] = sum[r0 + r] * rescale[r] + reduce_add<T>(total);
      if (!started || rescale[r] == T(1)) continue;
      T* o = out + (r0 + r) * ld;
      for (int64_t d = 0; d < ld; d += lanes) store<T>(o + d, load(o + d) * rescale[r]);
    }
  }

  // Writes the results of rows r0 .. r0+rows, the queries from i0 on of head h.
  void write(const AttentionParams& p, const ForwardOutput& to, int64_t b, int64_t h, int64_t i0, int64_t r0,
             int64_t rows) const {
    constexpr int lanes = kLanes<T>;
    const T sink = p.sinks.present ? read_one<T>(p.sinks.at(0, h, 0, 0), p.sinks.dtype) : -infinity<T>();
    for (int64_t r = 0; r < rows; r += lanes) {
      const Vec<T> keys = load(sum + r0 + r);
      Vec<T> largest = keys == T(0) ? splat<T>(-infinity<T>()) : load(top + r0 + r);
      Vec<T> total = keys, factor = splat<T>(T(1));
      if (sink != -infinity<T>()) {  // one more logit in the sum, without a key
        const Vec<T> now = max<T>(splat<T>(sink), largest);
        factor = exp<T>(largest - now);
        total = total * factor + exp<T>(sink - now);
        largest = now;
      }
      factor /= total;
      const Vec<T> log_sum = total == T(0) ? Vec<T>{} : log<T>(total);
      for (int64_t l = 0; l < min(lanes, rows - r); l++) {
        const int64_t i = i0 + r + l;
        T* o = out + (r0 + r + l) * ld;
        // No key took part: 0, whatever hidden values were multiplied by 0.
        const bool empty = keys[l] == T(0);
        for (int64_t d = 0; d < ld; d += lanes) store<T>(o + d, empty ? Vec<T>{} : load(o + d) * factor[l]);
        write_row<T>(to.out.at(b, h, i, 0), to.out.dtype, p.dim_v, o);
        T* parts = reinterpret_cast<T*>(to.lse_parts.at(b, h, i, 0));
        parts[0] = largest[l];
        parts[1] = log_sum[l];
        if (to.lse.present)
          *reinterpret_cast<T*>(to.lse.at(b, h, i, 0)) = T(double(largest[l]) + double(log_sum[l]));
      }
    }
  }
};

}  // namespace ATTN_ISA
}  // namespace attn_ext
