// Matrix products of half types in AMX tiles: C += A B, operands in bfloat16, sums in float32.
//
// tdpbf16ps multiplies tiles, registers of 16 rows of 64 bytes: C[16][16] += A[16][32] B[32][16]. A lies as tensors
// do; B as words of two elements that are neighbours along the depth k:
//
//   Rows    left operands    [m][k]                    row i holds elements k, k + 1, ...
//   Pairs   right operands   [n / 16][k / 2][16][2]    word (k / 2, j) holds B[k][j] and B[k + 1][j]
//
// float16 has 11 significant bits and bfloat16 8, so a float16 number is the sum of two bfloat16 numbers, exactly.
// Such operands have two `parts`, one matrix after the other, and a product multiplies parts with parts. P and dS,
// float32 by origin, are rounded to one part where the tensors are bfloat16 and to two, 16 bits, where they are float16.
//
// Tiles read subnormal numbers as 0, and so make subnormal results. Operands must therefore be 0 or normal, and below
// 2^32 in magnitude: what P, dS and sums lose is then below 2^-94 a product. Whoever packs another finite number says
// so, and the float32 kernels do the call again. (float16's subnormals are normal in bfloat16.)
//
// All sizes are multiples of kTile = 32: two tiles of A, two of B and four of C are the eight tile registers.
namespace attn_ext {
namespace ATTN_ISA {

constexpr int64_t kTile = 32;
constexpr double kTileLimit = 4294967296.0;  // 2^32, see above

struct Rows {
  uint16_t* data;
  int64_t ld, part;  // elements from row to row, from part to part
  uint16_t* at(int p, int64_t i, int64_t k) const { return data + p * part + i * ld + k; }
  Rows from(int64_t i, int64_t k) const { return {at(0, i, k), ld, part}; }
};

struct Pairs {
  static constexpr int64_t kLd = 32;  // elements from word row to word row
  uint16_t* data;
  int64_t depth, part;  // depth there is room for; elements from part to part
  uint16_t* at(int p, int64_t k, int64_t j) const { return data + p * part + j * depth + k / 2 * kLd; }
  Pairs from(int64_t k, int64_t j) const { return {at(0, k, j), depth, part}; }
};

template <int parts>
inline Rows scratch_rows(Slot slot, int64_t rows, int64_t ld) {
  return {scratch<uint16_t>(slot, parts * rows * ld), ld, rows * ld};
}
template <int parts>
inline Pairs scratch_pairs(Slot slot, int64_t depth, int64_t n) {
  return {scratch<uint16_t>(slot, parts * depth * n), depth, depth * n};
}

// While this lives, the thread's tile registers have 16 rows of 64 bytes each.
class TileShapes {
 public:
  TileShapes() { _tile_loadconfig(&kShapes); }
  ~TileShapes() { _tile_release(); }  // or every thread switch would save 8 KiB
  TileShapes(const TileShapes&) = delete;
  TileShapes& operator=(const TileShapes&) = delete;

 private:
  struct alignas(64) Shapes {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
  };
  static constexpr Shapes kShapes = {
      1, 0, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};
};

// Tiles 0 to 3 are a block of C, [2][2]; 4 and 5 rows of A, 6 and 7 columns of B.
ATTN_INLINE void load_left(const Rows& a, int part, int64_t i, int64_t k) {
  _tile_loadd(4, a.at(part, i, k), 2 * a.ld);
  _tile_loadd(5, a.at(part, i + 16, k), 2 * a.ld);
}
ATTN_INLINE void load_right(const Pairs& b, int part, int64_t k, int64_t j) {
  _tile_loadd(6, b.at(part, k, j), 2 * Pairs::kLd);
  _tile_loadd(7, b.at(part, k, j + 16), 2 * Pairs::kLd);
}
ATTN_INLINE void multiply_tiles() {
  _tile_dpbf16ps(0, 4, 6);
  _tile_dpbf16ps(1, 4, 7);
  _tile_dpbf16ps(2, 5, 6);
  _tile_dpbf16ps(3, 5, 7);
}

// C[m][n] (+)= A[m][k] B[k][n], for each block of C summed over the k of depths(i, j). With two parts the product of the
// second ones, 2^-16 of the whole, is left out unless `exact`: the logits need it, for the LSE is a float32 result.
template <int parts, bool exact = false, class Depths>
inline void tile_product(int64_t m, int64_t n, const Depths& depths, const Rows& a, const Pairs& b,
                         bool accumulate, float* c, int64_t ldc) {
  asm volatile("" ::: "memory");  // GCC's tile loads do not say that they read memory: finish earlier stores
  for (int64_t j = 0; j < n; j += kTile) {
    for (int64_t i = 0; i < m; i += kTile) {
      const KeyRange depth = depths(i, j);
      if (accumulate && depth.begin >= depth.end) continue;
      float* block = c + i * ldc + j;
      if (accumulate) {
        _tile_loadd(0, block, 4 * ldc);
        _tile_loadd(1, block + 16, 4 * ldc);
        _tile_loadd(2, block + 16 * ldc, 4 * ldc);
        _tile_loadd(3, block + 16 * ldc + 16, 4 * ldc);
      } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
      }
      for (int64_t k = depth.begin; k < depth.end; k += kTile) {
        if constexpr (parts == 2) {
          load_left(a, 1, i, k);
          if constexpr (exact) {
            load_right(b, 1, k, j);
            multiply_tiles();
          }
          load_right(b, 0, k, j);
          multiply_tiles();
          load_left(a, 0, i, k);
          multiply_tiles();
          load_right(b, 1, k, j);
          multiply_tiles();
        } else {
          load_left(a, 0, i, k);
          load_right(b, 0, k, j);
          multiply_tiles();
        }
      }
      _tile_stored(0, block, 4 * ldc);
      _tile_stored(1, block + 16, 4 * ldc);
      _tile_stored(2, block + 16 * ldc, 4 * ldc);
      _tile_stored(3, block + 16 * ldc + 16, 4 * ldc);
    }
  }
}

// The same over the whole depth.
template <int parts, bool exact = false>
inline void tile_product(int64_t m, int64_t n, int64_t depth, const Rows& a, const Pairs& b, bool accumulate,
                         float* c, int64_t ldc) {
  const auto all = [depth](int64_t, int64_t) { return KeyRange{0, depth}; };
  tile_product<parts, exact>(m, n, all, a, b, accumulate, c, ldc);
}

// 2 x 16 floats to bfloat16. Two parts: the upper half of the bits, then what is left, rounded.
template <int parts>
struct Rounded {
  __m512i part[parts];
};
template <int parts>
ATTN_INLINE Rounded<parts> round_to_parts(__m512 x0, __m512 x1) {
  if constexpr (parts == 1) {
    return {{(__m512i)_mm512_cvtne2ps_pbh(x1, x0)}};
  } else {
    const __m512i upper = _mm512_set1_epi32(int(0xffff0000));
    const __m512 high0 = (__m512)((__m512i)x0 & upper), high1 = (__m512)((__m512i)x1 & upper);
    return {
        {(__m512i)_mm512_cvtne2ps_pbh(high1, high0), (__m512i)_mm512_cvtne2ps_pbh(x1 - high1, x0 - high0)}};
  }
}

// The upper part of 16 float16 numbers, a little below the upper half of the bits: both parts then have the sign of
// the number and neither is 0 unless it is, so that a product with infinity is infinity and not infinity * 0.
ATTN_INLINE __m512 upper_part(__m512 x) {
  const __m512i bits = (__m512i)x, upper = _mm512_set1_epi32(int(0xffff0000));
  const __mmask16 nonzero = _mm512_test_epi32_mask(bits, _mm512_set1_epi32(0x7fffffff));
  return (__m512)(_mm512_mask_sub_epi32(bits, nonzero, bits, _mm512_set1_epi32(1)) & upper);
}

struct Packed {
  bool finite;    // no infinity, no NaN
  bool in_range;  // finite numbers are 0 or normal, and below 2^32
};

// Bits of infinity in bfloat16 and float16; of bfloat16's 2^-126 and 2^32 (all of float16 is in range).
template <int parts>
constexpr int16_t kInfiniteBits = parts == 1 ? 0x7f80 : 0x7c00;
constexpr int16_t kNormalBits = 0x0080, kLimitBits = 0x4f80;

// What tiles must know of n rows of half numbers.
template <int parts>
inline Packed classify(const uint16_t* src, int64_t step, int64_t n, int64_t width) {
  const __m512i without_sign = _mm512_set1_epi16(0x7fff);
  const __m512i infinite = _mm512_set1_epi16(kInfiniteBits<parts>);
  const __m512i normal = _mm512_set1_epi16(kNormalBits), limit = _mm512_set1_epi16(kLimitBits);
  __mmask32 not_finite = 0, out_of_range = 0;
  for (int64_t i = 0; i < n; i++, src += step) {
    for (int64_t k = 0; k < width; k += kTile) {
      const __mmask32 columns = __mmask32((uint64_t{1} << min(kTile, width - k)) - 1);
      const __m512i magnitude = _mm512_maskz_loadu_epi16(columns, src + k) & without_sign;
      const __mmask32 special = _mm512_cmpge_epu16_mask(magnitude, infinite);
      not_finite |= special;
      if constexpr (parts == 1) {
        out_of_range |= _mm512_cmpge_epu16_mask(magnitude, limit) & ~special;
        out_of_range |=
            _mm512_mask_cmplt_epu16_mask(_mm512_test_epi16_mask(magnitude, magnitude), magnitude, normal);
      }
    }
  }
  return {not_finite == 0, out_of_range == 0};
}

// Rows i0 .. i0+n of head (b, h); rows up to the next multiple of kTile and columns up to ld are 0. bfloat16 has one
// part, float16 two.
template <int parts>
inline Packed pack_tile_rows(const StridedView& m, int64_t b, int64_t h, int64_t i0, int64_t n, int64_t width,
                             const Rows& dst) {
  const __m512i zero = _mm512_setzero_si512(), one = _mm512_set1_epi16(1);
  const uint16_t* const first = reinterpret_cast<const uint16_t*>(m.at(b, h, i0, 0));
  const int64_t step = m.stride[2];
  // Of all numbers without their sign. Of these less one, where 0 wraps around to the largest.
  __m512i largest = zero, smallest = _mm512_set1_epi16(-1);
  for (int64_t i = 0; i < n; i++) {
    for (int64_t k = 0; k < dst.ld; k += kTile) {
      const __mmask32 columns = __mmask32((uint64_t{1} << min(kTile, width - k)) - 1);
      const __m512i x = _mm512_maskz_loadu_epi16(columns, first + i * step + k);
      const __m512i magnitude = x & _mm512_set1_epi16(0x7fff);
      largest = _mm512_max_epu16(largest, magnitude);
      if constexpr (parts == 1) {
        smallest = _mm512_min_epu16(smallest, _mm512_sub_epi16(magnitude, one));
        _mm512_storeu_si512(dst.at(0, i, k), x);
      } else {
        const __m512 x0 = _mm512_cvtph_ps(_mm512_castsi512_si256(x));
        const __m512 x1 = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(x, 1));
        const __m512 high0 = upper_part(x0), high1 = upper_part(x1);
        _mm512_storeu_si512(dst.at(0, i, k), (__m512i)_mm512_cvtne2ps_pbh(high1, high0));
        _mm512_storeu_si512(dst.at(1, i, k), (__m512i)_mm512_cvtne2ps_pbh(x1 - high1, x0 - high0));
      }
    }
  }
  for (int p = 0; p < parts; p++) {
    for (int64_t i = n; i < round_up(n, kTile); i++) {
      for (int64_t k = 0; k < dst.ld; k += kTile) _mm512_storeu_si512(dst.at(p, i, k), zero);
    }
  }
  const bool ordinary =
      _mm512_cmpge_epu16_mask(largest, _mm512_set1_epi16(parts == 1 ? kLimitBits : kInfiniteBits<2>)) == 0 &&
      _mm512_cmplt_epu16_mask(smallest, _mm512_set1_epi16(kNormalBits - 1)) == 0;
  return ordinary ? Packed{true, true} : classify<parts>(first, step, n, width);
}

// Replaces what is not finite by 0, see pack.h. The last part tells.
template <int parts>
inline void drop_non_finite(int64_t rows, const Rows& x) {
  const __m512i infinite = _mm512_set1_epi16(0x7f80);
  for (int64_t i = 0; i < rows; i++) {
    for (int64_t k = 0; k < x.ld; k += kTile) {
      const __m512i last = _mm512_loadu_si512(x.at(parts - 1, i, k));
      const __mmask32 finite = _mm512_cmpneq_epi16_mask(last & infinite, infinite);
      for (int p = 0; p < parts; p++) {
        _mm512_storeu_si512(x.at(p, i, k), _mm512_maskz_loadu_epi16(finite, x.at(p, i, k)));
      }
    }
  }
}

// Two vectors of 16 side by side to 16 pairs.
ATTN_INLINE __m512i pair_up(__m512i x) {
  alignas(64) static constexpr uint16_t kInterleave[32] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,
                                                           21, 6,  22, 7,  23, 8,  24, 9,  25, 10, 26,
                                                           11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  return _mm512_permutexvar_epi16(_mm512_load_si512(kInterleave), x);
}

// 16 columns, j on, of rows k and k + 1 to parts in pairs.
template <int parts>
ATTN_INLINE void store_pairs(Vec<float> x0, Vec<float> x1, const Pairs& dst, int64_t k, int64_t j) {
  const auto rounded = round_to_parts<parts>((__m512)x0, (__m512)x1);
  for (int p = 0; p < parts; p++) _mm512_storeu_si512(dst.at(p, k, j), pair_up(rounded.part[p]));
}

// 32 columns, k on, of row i to parts.
template <int parts>
ATTN_INLINE void store_row(Vec<float> x0, Vec<float> x1, const Rows& dst, int64_t i, int64_t k) {
  const auto rounded = round_to_parts<parts>((__m512)x0, (__m512)x1);
  for (int p = 0; p < parts; p++) _mm512_storeu_si512(dst.at(p, i, k), rounded.part[p]);
}

// [rows][n] floats to parts.
template <int parts>
inline void round_rows(const float* src, int64_t ld, int64_t rows, int64_t n, const Rows& dst) {
  for (int64_t i = 0; i < rows; i++) {
    for (int64_t k = 0; k < n; k += kTile) {
      store_row<parts>(load(src + i * ld + k), load(src + i * ld + k + 16), dst, i, k);
    }
  }
}

// [depth][n] floats to parts in pairs.
template <int parts>
inline void round_pairs(const float* src, int64_t ld, int64_t depth, int64_t n, const Pairs& dst) {
  for (int64_t k = 0; k < depth; k += 2) {
    for (int64_t j = 0; j < n; j += 16) {
      const float* x = src + k * ld + j;
      store_pairs<parts>(load(x), load(x + ld), dst, k, j);
    }
  }
}

// 32 columns, j on, of rows k and k + 1 to pairs.
ATTN_INLINE void interleave(__m512i even, __m512i odd, const Pairs& dst, int part, int64_t k, int64_t j) {
  // unpack interleaves within lanes of 16 bytes; these put the lanes of both results in order.
  const __m512i first = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
  const __m512i second = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
  const __m512i low = _mm512_unpacklo_epi16(even, odd), high = _mm512_unpackhi_epi16(even, odd);
  _mm512_storeu_si512(dst.at(part, k, j), _mm512_permutex2var_epi64(low, first, high));
  _mm512_storeu_si512(dst.at(part, k, j + 16), _mm512_permutex2var_epi64(low, second, high));
}

// Rows [depth][n] to pairs.
template <int parts>
inline void interleave_rows(int64_t depth, int64_t n, const Rows& src, const Pairs& dst) {
  for (int p = 0; p < parts; p++) {
    for (int64_t j = 0; j < n; j += kTile) {
      for (int64_t k = 0; k < depth; k += 2) {
        interleave(_mm512_loadu_si512(src.at(p, k, j)), _mm512_loadu_si512(src.at(p, k + 1, j)), dst, p, k,
                   j);
      }
    }
  }
}

// A block of 16 x 16 words (4 bytes); strides in words.
ATTN_INLINE void transpose_words(const void* src, int64_t src_stride, void* dst, int64_t dst_stride) {
  Vec<float> block[16];
#pragma GCC unroll 16
  for (int r = 0; r < 16; r++) block[r] = load(static_cast<const float*>(src) + r * src_stride);
  transpose<float>(block);
#pragma GCC unroll 16
  for (int r = 0; r < 16; r++) store<float>(static_cast<float*>(dst) + r * dst_stride, block[r]);
}

// Rows [n][depth] to pairs of the transpose [depth][n]: the words are there, only their order changes.
template <int parts>
inline void transpose_to_pairs(int64_t n, int64_t depth, const Rows& src, const Pairs& dst) {
  for (int p = 0; p < parts; p++) {
    for (int64_t j = 0; j < n; j += 16) {
      for (int64_t k = 0; k < depth; k += kTile)
        transpose_words(src.at(p, j, k), src.ld / 2, dst.at(p, k, j), Pairs::kLd / 2);
    }
  }
}

// Rows [n][depth] to rows of the transpose [depth][n]: neighbours of a column become words, then these are transposed.
template <int parts>
inline void transpose_rows(int64_t n, int64_t depth, const Rows& src, const Rows& dst) {
  for (int p = 0; p < parts; p++) {
    for (int64_t i = 0; i < n; i += kTile) {
      for (int64_t k = 0; k < depth; k += 16) {
        Vec<float> block[16];
#pragma GCC unroll 16
        for (int r = 0; r < 16; r++) {
          const __m256i even = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src.at(p, i + 2 * r, k)));
          const __m256i odd =
              _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src.at(p, i + 2 * r + 1, k)));
          block[r] =
              (Vec<float>)(_mm512_cvtepu16_epi32(even) | _mm512_slli_epi32(_mm512_cvtepu16_epi32(odd), 16));
        }
        transpose<float>(block);
#pragma GCC unroll 16
        for (int r = 0; r < 16; r++) store<float>(reinterpret_cast<float*>(dst.at(p, k + r, i)), block[r]);
      }
    }
  }
}

}  // namespace ATTN_ISA
}  // namespace attn_ext
