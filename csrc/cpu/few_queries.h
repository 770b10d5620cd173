// The two products for one to four query rows, of one head or of several that share their keys. Every key and value is used
// so few times that packing it would cost more than the arithmetic, so both products read them where they lie, in their
// own dtype.
namespace attn_ext {
namespace ATTN_ISA {

// Asks for rows begin .. end, soon to be read. The hardware sees them coming, but not as far ahead as memory is away: decoding
// in float32 reads at 1.3 to 1.4 times the rate with this.
ATTN_INLINE void prefetch_rows(const StridedView& m, int64_t b, int64_t h, int64_t begin, int64_t end,
                               int64_t width) {
  constexpr int64_t kLine = 64;
  for (int64_t i = begin; i < end; i++) {
    const char* row = m.at(b, h, i, 0);
    for (int64_t x = 0; x < width * size_of(m.dtype); x += kLine) __builtin_prefetch(row + x);
  }
}

// score[r][j] = q[r] . k[j0 + j] for query rows q [rows][ld]. kLanes keys at a time: one sum a key and row, then a
// transpose turns the sum over each one's lanes into a sum of vectors. The order of a row's sum does not depend on the
// other rows.
template <class T, class Reader, int rows>
inline void few_scores(const StridedView& k, int64_t b, int64_t h, int64_t j0, int64_t n, int64_t depth,
                       const T* q, int64_t ld, T* score, int64_t ld_score) {
  using Element = typename Reader::Element;
  constexpr int lanes = kLanes<T>;
  const int64_t paired = depth / (2 * lanes) * (2 * lanes);
  for (int64_t j = 0; j < n; j += lanes) {
    prefetch_rows(k, b, h, j0 + j + lanes, j0 + min(j + 2 * lanes, n), depth);
    Vec<T> sum[rows][lanes];
    for (int l = 0; l < lanes; l++) {
      const Element* key =  // past the end: the last key again, unused
          reinterpret_cast<const Element*>(k.at(b, h, j0 + min(j + l, n - 1), 0));
      VecPair<T> x[rows] = {};
      int64_t d = 0;
      for (; d < paired; d += 2 * lanes) {
        const VecPair<T> element = Reader::pair(key + d);
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) {
          x[r].a += element.a * load(q + r * ld + d);
          x[r].b += element.b * load(q + r * ld + d + lanes);
        }
      }
      for (; d < depth; d += lanes) {
        const Vec<T> element = read_vector<T, Reader>(key, k.dtype, d, depth);
        for (int r = 0; r < rows; r++) x[r].a += element * load(q + r * ld + d);
      }
      for (int r = 0; r < rows; r++) sum[r][l] = x[r].a + x[r].b;
    }
    for (int r = 0; r < rows; r++) {
      transpose<T>(sum[r]);
      Vec<T> total = sum[r][0];
      for (int l = 1; l < lanes; l++) total += sum[r][l];
      store<T>(score + r * ld_score + j, total);
    }
  }
}

// Rows [rows][ld] in the order in which pairs of their columns are read, or back from it.
template <class T, bool back>
inline void reorder_pairs(const T* from, int64_t ld, int64_t rows, int64_t width, T* to) {
  constexpr int lanes = kLanes<T>;
  for (int64_t r = 0; r < rows; r++, from += ld, to += ld) {
    int64_t d = 0;
    for (; d + 2 * lanes <= width; d += 2 * lanes) {
      const VecPair<T> x = {load(from + d), load(from + d + lanes)};
      const VecPair<T> moved = back ? merged<T>(x) : even_and_odd<T>(x);
      store<T>(to + d, moved.a);
      store<T>(to + d + lanes, moved.b);
    }
    for (; d < ld; d += lanes) store<T>(to + d, load(from + d));
  }
}

// out[r] += sum_j p[r][j] v[j] for 2 * pairs vectors of columns, which stay in registers; v rows of `step` elements. Columns
// of out are in the reader's order.
template <class T, class Reader, int rows, int pairs>
inline void few_columns(const typename Reader::Element* v, int64_t step, int64_t n, const T* p, int64_t ld_p,
                        T* out, int64_t ld) {
  constexpr int lanes = kLanes<T>;
  VecPair<T> sum[rows][pairs];
  for (int r = 0; r < rows; r++) {
    for (int x = 0; x < pairs; x++) {
      const T* o = out + r * ld + 2 * x * lanes;
      sum[r][x] = {load(o), load(o + lanes)};
    }
  }
#pragma GCC unroll 2
  for (int64_t j = 0; j < n; j++, v += step) {
#pragma GCC unroll 4
    for (int x = 0; x < pairs; x++) {
      const VecPair<T> element = Reader::pair(v + 2 * x * lanes);
#pragma GCC unroll 4
      for (int r = 0; r < rows; r++) {
        sum[r][x].a += p[r * ld_p + j] * element.a;
        sum[r][x].b += p[r * ld_p + j] * element.b;
      }
    }
  }
  for (int r = 0; r < rows; r++) {
    for (int x = 0; x < pairs; x++) {
      T* o = out + r * ld + 2 * x * lanes;
      store<T>(o, sum[r][x].a);
      store<T>(o + lanes, sum[r][x].b);
    }
  }
}

// out[r] += sum_j p[r][j] v[j0 + j], some rows of v at a time: where not all columns fit into registers, the others
// come from the L1 cache.
constexpr int64_t kRowsAtOnce = 16;
template <class T, class Reader, int rows>
inline void few_values(const StridedView& v, int64_t b, int64_t h, int64_t j0, int64_t n, int64_t width,
                       const T* p, int64_t ld_p, T* out, int64_t ld) {
  using Element = typename Reader::Element;
  // Pairs of sums that fit into half of the registers, but enough of them to hide the latency of an addition.
  constexpr int lanes = kLanes<T>, registers = kPanelVectors == 4 ? 32 : 16;
  constexpr int pairs = rows == 1 ? 4 : registers / 4 / (rows == 3 ? 4 : rows);
  if constexpr (Reader::kEvenAndOdd) reorder_pairs<T, false>(out, ld, rows, width, out);
  for (int64_t j1 = 0; j1 < n; j1 += kRowsAtOnce) {
    const int64_t most = min(kRowsAtOnce, n - j1);
    prefetch_rows(v, b, h, j0 + j1 + most, j0 + min(j1 + most + kRowsAtOnce, n), width);
    const Element* value = reinterpret_cast<const Element*>(v.at(b, h, j0 + j1, 0));
    const T* weight = p + j1;
    int64_t d = 0;
    for (; d + 2 * pairs * lanes <= width; d += 2 * pairs * lanes)
      few_columns<T, Reader, rows, pairs>(value + d, v.stride[2], most, weight, ld_p, out + d, ld);
    for (; d + 2 * lanes <= width; d += 2 * lanes)
      few_columns<T, Reader, rows, 1>(value + d, v.stride[2], most, weight, ld_p, out + d, ld);
    for (; d < width; d += lanes) {
      Vec<T> sum[rows];
      for (int r = 0; r < rows; r++) sum[r] = load(out + r * ld + d);
      for (int64_t j = 0; j < most; j++) {
        const Vec<T> element = read_vector<T, Reader>(value + j * v.stride[2], v.dtype, d, width);
        for (int r = 0; r < rows; r++) sum[r] += weight[r * ld_p + j] * element;
      }
      for (int r = 0; r < rows; r++) store<T>(out + r * ld + d, sum[r]);
    }
  }
  if constexpr (Reader::kEvenAndOdd) reorder_pairs<T, true>(out, ld, rows, width, out);
}

// The two products of a key block, for any dtype and up to kFewQueries rows.
template <class T>
struct FewQueries {
  template <int rows = kFewQueries>
  static void scores(const StridedView& k, int64_t b, int64_t h, int64_t j0, int64_t n, int64_t depth,
                     const T* q, int64_t ld, int64_t m, T* score, int64_t ld_score) {
    if constexpr (rows > 1) {
      if (m < rows) return scores<rows - 1>(k, b, h, j0, n, depth, q, ld, m, score, ld_score);
    }
    with_reader<T>(k.dtype, [&](auto reader) {
      using Reader = decltype(reader);
      if constexpr (Reader::kEvenAndOdd) q = even_and_odd_rows(q, ld, rows, depth);
      few_scores<T, Reader, rows>(k, b, h, j0, n, depth, q, ld, score, ld_score);
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

 private:
  // q in the order in which pairs of its keys are read.
  static const T* even_and_odd_rows(const T* q, int64_t ld, int64_t rows, int64_t depth) {
    T* moved = scratch<T>(kStrip, rows * ld);
    reorder_pairs<T, false>(q, ld, rows, depth, moved);
    return moved;
  }
};

}  // namespace ATTN_ISA
}  // namespace attn_ext
