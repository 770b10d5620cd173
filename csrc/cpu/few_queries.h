// Decoding: one to four queries meet a long row of keys. Every key and value is used so few times that packing it
// would cost more than the arithmetic, so both products read them where they lie, in their own dtype.
namespace attn_ext {
namespace ATTN_ISA {

// score[r][j] = q[r] . k[j0 + j] for `rows` query rows q [rows][ld]. kLanes keys at a time: one accumulator a key,
// then a transpose turns the sum over each accumulator's lanes into a sum of vectors.
template <class T, class Reader>
inline void few_scores(const StridedView& k, int64_t b, int64_t h, int64_t j0, int64_t n, int64_t depth,
                       const T* q, int64_t ld, int64_t rows, T* score, int64_t ld_score) {
  using Element = typename Reader::Element;
  constexpr int lanes = kLanes<T>;
  const int64_t whole = depth / lanes * lanes;
  for (int64_t j = 0; j < n; j += lanes) {
    for (int64_t r = 0; r < rows; r++) {
      const T* query = q + r * ld;
      Vec<T> sum[lanes];
      for (int l = 0; l < lanes; l++) {
        const char* row = k.at(b, h, j0 + min(j + l, n - 1), 0);  // past the end: the last key again, unused
        const Element* key = reinterpret_cast<const Element*>(row);
        Vec<T> even = {}, odd = {};
        int64_t d = 0;
        for (; d + 2 * lanes <= whole; d += 2 * lanes) {
          even += Reader::vector(key + d) * load(query + d);
          odd += Reader::vector(key + d + lanes) * load(query + d + lanes);
        }
        if (d < whole) even += Reader::vector(key + d) * load(query + d);
        if (whole < depth)
          odd += read_tail<T>(row + whole * size_of(k.dtype), k.dtype, depth - whole) * load(query + whole);
        sum[l] = even + odd;
      }
      transpose<T>(sum);
      Vec<T> total = sum[0];
      for (int l = 1; l < lanes; l++) total += sum[l];
      store<T>(score + r * ld_score + j, total);
    }
  }
}

// out[r] += sum_j p[r][j] v[j0 + j], kPanel columns of the output in registers at a time.
template <class T, class Reader, int rows>
inline void few_values(const StridedView& v, int64_t b, int64_t h, int64_t j0, int64_t n, int64_t width,
                       const T* p, int64_t ld_p, T* out, int64_t ld) {
  using Element = typename Reader::Element;
  constexpr int lanes = kLanes<T>;
  const int64_t step = v.stride[2];
  int64_t d = 0;
  for (; d + kPanel<T> <= width; d += kPanel<T>) {
    Vec<T> sum[rows][kPanelVectors];
    for (int r = 0; r < rows; r++) {
      for (int x = 0; x < kPanelVectors; x++) sum[r][x] = load(out + r * ld + d + x * lanes);
    }
    const Element* value = reinterpret_cast<const Element*>(v.at(b, h, j0, d));
    for (int64_t j = 0; j < n; j++, value += step) {
#pragma GCC unroll 4
      for (int x = 0; x < kPanelVectors; x++) {
        const Vec<T> element = Reader::vector(value + x * lanes);
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) sum[r][x] += p[r * ld_p + j] * element;
      }
    }
    for (int r = 0; r < rows; r++) {
      for (int x = 0; x < kPanelVectors; x++) store<T>(out + r * ld + d + x * lanes, sum[r][x]);
    }
  }
  for (; d < width; d += lanes) {  // what is left, a vector at a time
    Vec<T> sum[rows];
    for (int r = 0; r < rows; r++) sum[r] = load(out + r * ld + d);
    for (int64_t j = 0; j < n; j++) {
      const char* value = v.at(b, h, j0 + j, d);
      const Vec<T> element = d + lanes <= width ? Reader::vector(reinterpret_cast<const Element*>(value))
                                                : read_tail<T>(value, v.dtype, width - d);
      for (int r = 0; r < rows; r++) sum[r] += p[r * ld_p + j] * element;
    }
    for (int r = 0; r < rows; r++) store<T>(out + r * ld + d, sum[r]);
  }
}

// The two products of a key block, for any dtype and up to kFewQueries rows.
template <class T>
struct FewQueries {
  static void scores(const StridedView& k, int64_t b, int64_t h, int64_t j0, int64_t n, int64_t depth,
                     const T* q, int64_t ld, int64_t rows, T* score, int64_t ld_score) {
    with_reader<T>(k.dtype, [&](auto reader) {
      few_scores<T, decltype(reader)>(k, b, h, j0, n, depth, q, ld, rows, score, ld_score);
    });
  }

  template <int rows = kFewQueries>
  static void values(const StridedView& v, int64_t b, int64_t h, int64_t j0, int64_t n, int64_t width,
                     const T* p, int64_t ld_p, int64_t m, T* out, int64_t ld) {
    if constexpr (rows > 1) {
      if (m < rows) return values<rows - 1>(v, b, h, j0, n, width, p, ld_p, m, out, ld);
    }
    with_reader<T>(v.dtype, [&](auto reader) {
      few_values<T, decltype(reader), rows>(v, b, h, j0, n, width, p, ld_p, out, ld);
    });
  }
};

}  // namespace ATTN_ISA
}  // namespace attn_ext
