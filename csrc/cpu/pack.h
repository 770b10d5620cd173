// Reading rows of any dtype and stride into tiles of T (float or double), and writing them back.
//
// Two tile layouts:
//   rows    [n][ld]           left operands and results; columns beyond the width are zero
//   panels  [panel][n][w]     right operands of matmul.h: column panels of kPanel<T> columns (the last one narrower,
//                             a multiple of kLanes), so that the inner loop reads memory in order
namespace attn_ext {
namespace ATTN_ISA {

template <class T>
constexpr int kPanel = kPanelVectors * kLanes<T>;  // columns of a full panel

template <class T>
ATTN_INLINE int64_t padded(int64_t width) {
  return round_up(width, kLanes<T>);
}

// kLanes<float> halves to floats.
ATTN_INLINE Vec<float> load_float16(const uint16_t* p) {
#if ATTN_VECTOR_BYTES == 64
  return (Vec<float>)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif ATTN_VECTOR_BYTES == 32
  return (Vec<float>)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  Vec<float> x;
  for (int l = 0; l < kLanes<float>; l++) x[l] = float_from_float16(p[l]);
  return x;
#endif
}
ATTN_INLINE void store_float16(uint16_t* p, Vec<float> x) {
#if ATTN_VECTOR_BYTES == 64
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph((__m512)x, 0));
#elif ATTN_VECTOR_BYTES == 32
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph((__m256)x, 0));
#else
  for (int l = 0; l < kLanes<float>; l++) p[l] = float16_from_float(x[l]);
#endif
}

typedef uint16_t HalfVec __attribute__((vector_size(ATTN_VECTOR_BYTES / 2)));
typedef uint16_t HalfVecUnaligned __attribute__((vector_size(ATTN_VECTOR_BYTES / 2), aligned(2), may_alias));
typedef uint32_t WordVec __attribute__((vector_size(ATTN_VECTOR_BYTES)));
typedef uint32_t WordVecUnaligned __attribute__((vector_size(ATTN_VECTOR_BYTES), aligned(2), may_alias));

ATTN_INLINE Vec<float> load_bfloat16(const uint16_t* p) {
  const HalfVec half = *reinterpret_cast<const HalfVecUnaligned*>(p);
  return (Vec<float>)(__builtin_convertvector(half, WordVec) << 16);
}
ATTN_INLINE void store_bfloat16(uint16_t* p, Vec<float> x) {
  const WordVec bits = (WordVec)x;
  const WordVec rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  const WordVec nan = bits >> 16 | 0x40;
  const WordVec result = x == x ? rounded : nan;
  *reinterpret_cast<HalfVecUnaligned*>(p) = __builtin_convertvector(result, HalfVec);
}

// n contiguous elements to T. double tiles only ever meet float64 memory.
template <class T>
inline void read_row(const void* src, DType dtype, int64_t n, T* dst) {
  constexpr int lanes = kLanes<T>;
  if constexpr (sizeof(T) == 8) {
    const double* p = static_cast<const double*>(src);
    for (int64_t i = 0; i < n; i++) dst[i] = p[i];
  } else if (dtype == DType::kFloat32) {
    const float* p = static_cast<const float*>(src);
    int64_t i = 0;
    for (; i + lanes <= n; i += lanes) store<T>(dst + i, load(p + i));
    for (; i < n; i++) dst[i] = p[i];
  } else if (dtype == DType::kBFloat16) {
    const uint16_t* p = static_cast<const uint16_t*>(src);
    int64_t i = 0;
    for (; i + lanes <= n; i += lanes) store<T>(dst + i, load_bfloat16(p + i));
    for (; i < n; i++) dst[i] = float_from_bfloat16(p[i]);
  } else {
    const uint16_t* p = static_cast<const uint16_t*>(src);
    int64_t i = 0;
    for (; i + lanes <= n; i += lanes) store<T>(dst + i, load_float16(p + i));
    for (; i < n; i++) dst[i] = float_from_float16(p[i]);
  }
}

template <class T>
inline void write_row(void* dst, DType dtype, int64_t n, const T* src) {
  constexpr int lanes = kLanes<T>;
  if constexpr (sizeof(T) == 8) {
    double* p = static_cast<double*>(dst);
    for (int64_t i = 0; i < n; i++) p[i] = src[i];
  } else if (dtype == DType::kFloat32) {
    float* p = static_cast<float*>(dst);
    for (int64_t i = 0; i < n; i++) p[i] = src[i];
  } else if (dtype == DType::kBFloat16) {
    uint16_t* p = static_cast<uint16_t*>(dst);
    int64_t i = 0;
    for (; i + lanes <= n; i += lanes) store_bfloat16(p + i, load<T>(src + i));
    for (; i < n; i++) p[i] = bfloat16_from_float(src[i]);
  } else {
    uint16_t* p = static_cast<uint16_t*>(dst);
    int64_t i = 0;
    for (; i + lanes <= n; i += lanes) store_float16(p + i, load<T>(src + i));
    for (; i < n; i++) p[i] = float16_from_float(src[i]);
  }
}

// Two vectors of 2 * kLanes elements: the first and the second half of them, or those at even and at odd places.
template <class T>
struct VecPair {
  Vec<T> a, b;
};

// The ways to read kLanes<T> elements of a row in memory as T, and 2 * kLanes in the order that costs least.
template <class T>
struct ReadAsIs {
  using Element = T;
  static constexpr bool kEvenAndOdd = false;
  static ATTN_INLINE Vec<T> vector(const T* p) { return load(p); }
  static ATTN_INLINE VecPair<T> pair(const T* p) { return {load(p), load(p + kLanes<T>)}; }
};
struct ReadFloat16 {
  using Element = uint16_t;
  static constexpr bool kEvenAndOdd = false;
  static ATTN_INLINE Vec<float> vector(const uint16_t* p) { return load_float16(p); }
  static ATTN_INLINE VecPair<float> pair(const uint16_t* p) { return {vector(p), vector(p + kLanes<float>)}; }
};
struct ReadBFloat16 {
  using Element = uint16_t;
  static constexpr bool kEvenAndOdd = true;  // a word holds two: one shift, one mask
  static ATTN_INLINE Vec<float> vector(const uint16_t* p) { return load_bfloat16(p); }
  static ATTN_INLINE VecPair<float> pair(const uint16_t* p) {
    const WordVec words = *reinterpret_cast<const WordVecUnaligned*>(p);
    return {(Vec<float>)(words << 16), (Vec<float>)(words & 0xffff0000u)};
  }
};

// From halves to even and odd places, and back.
struct EvenIndex {
  static constexpr int at(int lane) { return 2 * lane; }
};
struct OddIndex {
  static constexpr int at(int lane) { return 2 * lane + 1; }
};
template <int n, int first>
struct MergeIndex {
  static constexpr int at(int lane) { return (first + lane) / 2 + (lane % 2) * n; }
};
template <class T>
ATTN_INLINE VecPair<T> even_and_odd(const VecPair<T>& x) {
  return {shuffle<T>(x.a, x.b, EvenIndex{}), shuffle<T>(x.a, x.b, OddIndex{})};
}
template <class T>
ATTN_INLINE VecPair<T> merged(const VecPair<T>& x) {
  constexpr int n = kLanes<T>;
  return {shuffle<T>(x.a, x.b, MergeIndex<n, 0>{}), shuffle<T>(x.a, x.b, MergeIndex<n, n>{})};
}

// use(reader) with the reader of dtype, so that loops over rows do not ask for it.
template <class T, class Use>
ATTN_INLINE void with_reader(DType dtype, const Use& use) {
  if constexpr (sizeof(T) == 4) {
    if (dtype == DType::kFloat16) return use(ReadFloat16{});
    if (dtype == DType::kBFloat16) return use(ReadBFloat16{});
  }
  use(ReadAsIs<T>{});
}

// The last, partial vector of a row whose width is no multiple of kLanes; the missing lanes are 0.
template <class T>
ATTN_INLINE Vec<T> read_tail(const void* p, DType dtype, int64_t n) {
  T lanes[kLanes<T>] = {};
  read_row<T>(p, dtype, n, lanes);
  return load<T>(lanes);
}

// n elements at any stride (a bias row, say); stride 0 repeats one element.
template <class T>
inline void read_strided(const char* src, DType dtype, int64_t stride, int64_t n, T* dst) {
  if (stride == 1) return read_row<T>(src, dtype, n, dst);
  if (stride == 0) {
    T value;
    read_row<T>(src, dtype, 1, &value);
    for (int64_t i = 0; i < n; i++) dst[i] = value;
    return;
  }
  const int64_t step = stride * size_of(dtype);
  for (int64_t i = 0; i < n; i++) read_row<T>(src + i * step, dtype, 1, dst + i);
}

template <class T>
ATTN_INLINE T read_one(const char* src, DType dtype) {
  T value;
  read_row<T>(src, dtype, 1, &value);
  return value;
}

// Elements d .. d+kLanes of a row that has `width`; 0 beyond.
template <class T, class Reader>
ATTN_INLINE Vec<T> read_vector(const typename Reader::Element* row, DType dtype, int64_t d, int64_t width) {
  return d + kLanes<T> <= width ? Reader::vector(row + d) : read_tail<T>(row + d, dtype, width - d);
}

// Rows i0 .. i0+n of head (b, h), times factor, to rows [n][ld].
template <class T>
inline void pack_rows(const StridedView& m, int64_t b, int64_t h, int64_t i0, int64_t n, int64_t width,
                      T factor, T* dst, int64_t ld) {
  with_reader<T>(m.dtype, [&](auto reader) {
    using Reader = decltype(reader);
    for (int64_t i = 0; i < n; i++) {
      const auto* row = reinterpret_cast<const typename Reader::Element*>(m.at(b, h, i0 + i, 0));
      T* to = dst + i * ld;
      int64_t d = 0;
#pragma GCC unroll 4
      for (; d + kLanes<T> <= width; d += kLanes<T>) store<T>(to + d, Reader::vector(row + d) * factor);
      if (d < width) store<T>(to + d, read_tail<T>(row + d, m.dtype, width - d) * factor);
    }
  });
}

// 0 in place of what is not finite. A gradient product 0 * inf or 0 * NaN must not let a key (or query) that is
// hidden reach the other side; where it is visible the NaN arrives through the score anyway.
template <class T>
ATTN_INLINE Vec<T> finite_or_0(Vec<T> x) {
  return x - x == Vec<T>{} ? x : Vec<T>{};
}

// Rows i0 .. i0+n of head (b, h) to panels [panel][n][w].
template <class T>
inline void pack_panels(const StridedView& m, int64_t b, int64_t h, int64_t i0, int64_t n, int64_t width,
                        bool finite_only, T* dst) {
  with_reader<T>(m.dtype, [&](auto reader) {
    using Reader = decltype(reader);
    for (int64_t i = 0; i < n; i++) {
      const auto* row = reinterpret_cast<const typename Reader::Element*>(m.at(b, h, i0 + i, 0));
      for (int64_t d0 = 0; d0 < width; d0 += kPanel<T>) {
        const int64_t w = padded<T>(min(kPanel<T>, width - d0));
        T* to = dst + d0 * n + i * w;
        for (int64_t d = 0; d < w; d += kLanes<T>) {
          const Vec<T> x = read_vector<T, Reader>(row, m.dtype, d0 + d, width);
          store<T>(to + d, finite_only ? finite_or_0<T>(x) : x);
        }
      }
    }
  });
}

// Rows i0 .. i0+n of head (b, h), transposed: keys become the columns of panels [panel][depth][w]. Columns beyond n are
// zero.
template <class T>
inline void pack_transposed(const StridedView& m, int64_t b, int64_t h, int64_t i0, int64_t n, int64_t depth,
                            T* dst) {
  constexpr int lanes = kLanes<T>;
  with_reader<T>(m.dtype, [&](auto reader) {
    using Reader = decltype(reader);
    for (int64_t j = 0; j < n; j += lanes) {
      const int64_t j0 = j / kPanel<T> * kPanel<T>, w = padded<T>(min(kPanel<T>, n - j0));
      T* to = dst + j0 * depth + j - j0;
      const typename Reader::Element* row[lanes];
      for (int l = 0; l < lanes; l++) {
        row[l] = reinterpret_cast<const typename Reader::Element*>(m.at(b, h, i0 + min(j + l, n - 1), 0));
      }
      for (int64_t d = 0; d < depth; d += lanes) {
        Vec<T> block[lanes];
        for (int l = 0; l < lanes; l++) {
          block[l] = j + l < n ? read_vector<T, Reader>(row[l], m.dtype, d, depth) : Vec<T>{};
        }
        transpose<T>(block);
        for (int64_t l = 0; l < min(lanes, depth - d); l++) store<T>(to + (d + l) * w, block[l]);
      }
    }
  });
}

}  // namespace ATTN_ISA
}  // namespace attn_ext
