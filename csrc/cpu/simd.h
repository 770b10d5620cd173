// The thin SIMD layer: vectors of T through the compiler's vector extensions, in the width of this build.
//
// This header and those after it are compiled once per instruction set, inside the namespace ATTN_ISA, under that
// set's target pragma (see isa_avx2.cpp). They include no standard header themselves: a standard inline function
// compiled here for AVX-512 could be picked by the linker for the code that runs everywhere.
namespace attn_ext {
namespace ATTN_ISA {

#define ATTN_INLINE inline __attribute__((always_inline))
// One copy of the machine code for all callers. Where a * b + c becomes one instruction is the compiler's choice, and two
// copies of one source may round differently.
#if defined(__clang__)
#define ATTN_ONE_COPY __attribute__((noinline))
#else
#define ATTN_ONE_COPY __attribute__((noinline, noclone))
#endif

template <class T>
struct SimdTypes;
template <>
struct SimdTypes<float> {
  typedef float Vec __attribute__((vector_size(ATTN_VECTOR_BYTES)));
  typedef float Unaligned __attribute__((vector_size(ATTN_VECTOR_BYTES), aligned(4), may_alias));
  typedef int32_t Int __attribute__((vector_size(ATTN_VECTOR_BYTES)));
  typedef uint32_t Bits __attribute__((vector_size(ATTN_VECTOR_BYTES)));
  static constexpr int kMantissa = 23, kExpDegree = 6;
  // For exp2 below: 1.5 * 2^23, to which adding rounds to an integer, and the bias; the exponent whose field is 0.
  static constexpr float kMagic = 12582912.0f + 127.0f, kZeroExponent = -127.0f;
};
template <>
struct SimdTypes<double> {
  typedef double Vec __attribute__((vector_size(ATTN_VECTOR_BYTES)));
  typedef double Unaligned __attribute__((vector_size(ATTN_VECTOR_BYTES), aligned(8), may_alias));
  typedef int64_t Int __attribute__((vector_size(ATTN_VECTOR_BYTES)));
  typedef uint64_t Bits __attribute__((vector_size(ATTN_VECTOR_BYTES)));
  static constexpr int kMantissa = 52, kExpDegree = 13;
  static constexpr double kMagic = 6755399441055744.0 + 1023.0, kZeroExponent = -1023.0;  // 1.5 * 2^52
};

template <class T>
using Vec = typename SimdTypes<T>::Vec;
template <class T>
using IntVec = typename SimdTypes<T>::Int;

// Lanes of a vector: int, since it is used in template arguments and small loops.
template <class T>
constexpr int kLanes = ATTN_VECTOR_BYTES / int(sizeof(T));

template <class T>
ATTN_INLINE Vec<T> splat(T x) {
  return x - Vec<T>{};  // x - 0 keeps -0.0, which x + 0 would not
}
template <class T>
ATTN_INLINE Vec<T> load(const T* p) {
  return *reinterpret_cast<const typename SimdTypes<T>::Unaligned*>(p);
}
template <class T>
ATTN_INLINE void store(T* p, Vec<T> x) {
  *reinterpret_cast<typename SimdTypes<T>::Unaligned*>(p) = x;
}

// A NaN in a is dropped, one in b stays.
template <class T>
ATTN_INLINE Vec<T> max(Vec<T> a, Vec<T> b) {
#if ATTN_VECTOR_BYTES == 64
  if constexpr (sizeof(T) == 4) return (Vec<T>)_mm512_max_ps((__m512)a, (__m512)b);
#endif
  return a > b ? a : b;
}
template <class T>
ATTN_INLINE Vec<T> min(Vec<T> a, Vec<T> b) {
#if ATTN_VECTOR_BYTES == 64
  if constexpr (sizeof(T) == 4) return (Vec<T>)_mm512_min_ps((__m512)a, (__m512)b);
#endif
  return a < b ? a : b;
}

// x in the lanes whose byte of a bool tensor is true, `other` in the others.
template <class T>
ATTN_INLINE Vec<T> where(const char* bytes, Vec<T> x, T other) {
#if ATTN_VECTOR_BYTES == 64
  if constexpr (sizeof(T) == 4) {
    const __m128i seen = _mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes));
    return (Vec<T>)_mm512_mask_blend_ps(_mm_test_epi8_mask(seen, seen), _mm512_set1_ps(other), (__m512)x);
  }
#elif ATTN_VECTOR_BYTES == 32
  if constexpr (sizeof(T) == 4) {
    const __m256i seen = _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes)));
    const __m256i hidden = _mm256_cmpeq_epi32(seen, _mm256_setzero_si256());
    return (Vec<T>)_mm256_blendv_ps((__m256)x, _mm256_set1_ps(other), (__m256)hidden);
  }
#endif
  for (int l = 0; l < kLanes<T>; l++) x[l] = bytes[l] ? x[l] : other;
  return x;
}

template <class T>
constexpr T infinity() {
  return T(__builtin_inf());
}

constexpr int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }
constexpr int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
constexpr int64_t max(int64_t a, int64_t b) { return a > b ? a : b; }

// Lane l of the result is lane index(l) of the 2 * kLanes lanes (a, b). Index is a constexpr function of l.
template <int... kLane>
struct Lanes {};
template <int n, int... kLane>
struct MakeLanes : MakeLanes<n - 1, n - 1, kLane...> {};
template <int... kLane>
struct MakeLanes<0, kLane...> {
  using type = Lanes<kLane...>;
};

template <class T, class Index, int... kLane>
ATTN_INLINE Vec<T> shuffle(Vec<T> a, Vec<T> b, Index, Lanes<kLane...>) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, Index::at(kLane)...);
#else
  return __builtin_shuffle(a, b, IntVec<T>{Index::at(kLane)...});
#endif
}
template <class T, class Index>
ATTN_INLINE Vec<T> shuffle(Vec<T> a, Vec<T> b, Index index) {
  return shuffle<T>(a, b, index, typename MakeLanes<kLanes<T>>::type{});
}

// Horizontal reductions: fold the upper half onto the lower until one lane is left (butterfly over lane ^ distance).
template <int distance>
struct ButterflyIndex {
  static constexpr int at(int lane) { return lane ^ distance; }
};
template <class T, int distance = kLanes<T> / 2>
ATTN_INLINE T reduce_max(Vec<T> x) {
  if constexpr (distance == 0) {
    return x[0];
  } else {
    return reduce_max<T, distance / 2>(max<T>(x, shuffle<T>(x, x, ButterflyIndex<distance>{})));
  }
}
template <class T, int distance = kLanes<T> / 2>
ATTN_INLINE T reduce_add(Vec<T> x) {
  if constexpr (distance == 0) {
    return x[0];
  } else {
    return reduce_add<T, distance / 2>(x + shuffle<T>(x, x, ButterflyIndex<distance>{}));
  }
}

// In-place transpose of a kLanes x kLanes block: at each distance 1, 2, 4, ... swap the off-diagonal squares of
// that size between rows r and r + distance.
template <int distance, int n>
struct SwapLowIndex {
  static constexpr int at(int lane) { return lane & distance ? n + lane - distance : lane; }
};
template <int distance, int n>
struct SwapHighIndex {
  static constexpr int at(int lane) { return lane & distance ? n + lane : lane + distance; }
};
template <class T, int distance = 1>
ATTN_INLINE void transpose(Vec<T> (&rows)[kLanes<T>]) {
  constexpr int n = kLanes<T>;
  if constexpr (distance < n) {
#pragma GCC unroll 16
    for (int r = 0; r < n; r++) {
      if (r & distance) continue;
      const Vec<T> low = rows[r], high = rows[r + distance];
      rows[r] = shuffle<T>(low, high, SwapLowIndex<distance, n>{});
      rows[r + distance] = shuffle<T>(low, high, SwapHighIndex<distance, n>{});
    }
    transpose<T, distance * 2>(rows);
  }
}

// 2^x = 2^n 2^f with n an integer and |f| <= 1/2. Adding kMagic rounds x to n, and leaves n + bias in the lowest bits, from
// where a shift brings it into the exponent field of 2^n.
// For x <= 0. Below the smallest normal number, and at -inf, n is held at -127 (double: -1023), whose 2^n is 0: hidden
// keys get exactly 0. NaN stays NaN.
//
// 2^f = 1 + c1 f + c2 f^2 + ...: of least relative error on |f| <= 1/2 for a leading 1 (by Lawson's algorithm), so that
// the largest logit of a row has weight 1: degree 4 is within 2.9e-6, degree 6 within 2.0e-9, a thirtieth of float's
// half ulp. For double the Taylor series (f ln 2)^k / k!: the first term left out, of degree 14, is 4e-18.
template <class T, int degree>
constexpr T exp2_coefficient(int k) {
  static_assert(degree == 4 || degree == 6 || degree == 13, "no other series");
  constexpr double kDegree4[] = {1, 0.6931241933554524, 0.2402409861165376, 0.05590642514458485,
                                 0.00958285318370313};
  constexpr double kDegree6[] = {1,
                                 0.6931472028551117,
                                 0.2402264791362633,
                                 0.055503324710078523,
                                 0.009618437357679283,
                                 0.0013398874466595463,
                                 0.0001535336201786785};
  if (degree == 4) return T(kDegree4[k]);
  if (degree == 6) return T(kDegree6[k]);
  double c = 1.0;
  for (int i = 1; i <= k; i++) c *= 0.69314718055994530942 / i;
  return T(c);
}
// The terms from degree k on, over f^k.
template <class T, int k, int degree = SimdTypes<T>::kExpDegree>
ATTN_INLINE Vec<T> exp2_series(Vec<T> f) {
  constexpr T c = exp2_coefficient<T, degree>(k);
  if constexpr (k == degree) {
    return splat<T>(c);
  } else {
    return exp2_series<T, k + 1, degree>(f) * f + c;
  }
}
template <class T, int degree>
ATTN_INLINE Vec<T> exp2_of_parts(Vec<T> shifted, Vec<T> f) {
  using Bits = typename SimdTypes<T>::Bits;
  return exp2_series<T, 0, degree>(f) * (Vec<T>)((Bits)shifted << SimdTypes<T>::kMantissa);
}
template <class T, int degree = SimdTypes<T>::kExpDegree>
ATTN_INLINE Vec<T> exp2(Vec<T> x) {
  using S = SimdTypes<T>;
#if ATTN_VECTOR_BYTES == 64
  // With instructions for f and for the product by 2^n it takes 6.6 instead of 7.9 cycles. The lanes that become 0 take no
  // part: a result below the normal numbers would cost a hundred cycles.
  if constexpr (sizeof(T) == 4) {
    const __mmask16 normal = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
    const Vec<T> f = (Vec<T>)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    return (Vec<T>)_mm512_maskz_scalef_ps(normal, (__m512)exp2_series<T, 0, degree>(f), (__m512)(x - f));
  }
#endif
  x = max<T>(splat<T>(S::kZeroExponent), x);
  const Vec<T> shifted = x + S::kMagic;
  return exp2_of_parts<T, degree>(shifted, x - (shifted - S::kMagic));
}

// e^x for x <= 0. The factor log2 e comes last, on the difference to a row's maximum, and not into the logits: those may
// be as large as finfo.max, and would overflow.
constexpr double kLog2E = 1.44269504088896340736;
template <class T>
ATTN_INLINE Vec<T> exp(Vec<T> x) {
  using S = SimdTypes<T>;
  if constexpr (ATTN_VECTOR_BYTES == 64 && sizeof(T) == 4) return exp2<T>(x * T(kLog2E));
  x = max<T>(splat<T>(S::kZeroExponent / T(kLog2E)), x);
  const Vec<T> shifted = x * T(kLog2E) + S::kMagic;
  return exp2_of_parts<T, S::kExpDegree>(shifted, x * T(kLog2E) - (shifted - S::kMagic));
}

// log x for x >= 1 (or NaN), within 2 units in the last place: with x = 2^e m, m between sqrt(1/2) and sqrt(2), and
// s = (m - 1) / (m + 1), log x = e log 2 + 2 (s + s^3 / 3 + s^5 / 5 + ...). |s| < 0.172: the first term left out is below
// 3e-10 of the sum in float, 3e-18 in double. log 2 comes in two parts, of which e times the first is exact.
template <class T, int k = 0>
ATTN_INLINE Vec<T> log_series(Vec<T> s_squared) {
  if constexpr (k == (sizeof(T) == 4 ? 5 : 11)) {
    return splat<T>(T(1) / T(2 * k + 1));
  } else {
    return log_series<T, k + 1>(s_squared) * s_squared + T(1) / T(2 * k + 1);
  }
}
template <class T>
ATTN_INLINE Vec<T> log(Vec<T> x) {
  using Bits = typename SimdTypes<T>::Bits;
  constexpr int mantissa = SimdTypes<T>::kMantissa;
  constexpr T high = sizeof(T) == 4 ? T(0.693359375) : T(0.69314718036912381649);
  constexpr T low = T(0.69314718055994530942 - (sizeof(T) == 4 ? 0.693359375 : 0.69314718036912381649));
  const Bits least = (Bits)splat<T>(T(0.70710678118654752440));
  const Bits exponent = ((Bits)x - least) >> mantissa;
  const Vec<T> m = (Vec<T>)((Bits)x - (exponent << mantissa));
  const Vec<T> e = __builtin_convertvector((IntVec<T>)exponent, Vec<T>);
  const Vec<T> s = (m - T(1)) / (m + T(1));
  const Vec<T> result = (log_series<T>(s * s) * s * T(2) + e * low) + e * high;
  return x == x ? result : x;
}

// tanh(x) = -sign(x) e / (2 + e) with e = exp(-2 |x|) - 1. Where the exponent needs no whole power of 2, e comes from
// the series without its leading 1, so that small x keep their relative accuracy: the result is multiplied by a cap
// that may be huge.
template <class T>
ATTN_INLINE Vec<T> tanh(Vec<T> x) {
  const Vec<T> magnitude = x < T(0) ? -x : x;
  const Vec<T> y = magnitude * T(-2 * kLog2E);
  const Vec<T> e = y > T(-0.5) ? exp2_series<T, 1>(y) * y : exp2<T>(y) - T(1);
  const Vec<T> t = e / (T(2) + e);
  return x < T(0) ? t : -t;
}

}  // namespace ATTN_ISA
}  // namespace attn_ext
