// From raw products to logits: scale, softcap, bias, float mask, ALiBi, visibility; and dropout's choice. The rules are
// those of csrc/cpu/scores.h. Which of them apply is the same for all threads: branches, not variants of the kernels.
#pragma once

#include "../tile/visibility.cuh"
#include "products.cuh"

namespace attn_ext::cuda::simt {

// A set of a thread's scores, one bit each.
using ScoreSet = uint32_t;
template <class Z>
__device__ constexpr ScoreSet score_bit(int r, int c) {
  return ScoreSet(1) << (Z::kRowScores * r + c);
}

// A number of a bias, mask, slope or sink: of q's dtype, or float32 beside half types.
template <class In>
__device__ __forceinline__ Math<In> read_term(const StridedView& term, int b, int h, int i, int j) {
  using Stored = typename Element<In>::Stored;
  if (sizeof(Stored) < sizeof(float) && term.dtype == DType::kFloat32)
    return element<const float>(term, b, h, i, j);
  return Element<In>::widen(element<const Stored>(term, b, h, i, j));
}

__device__ __forceinline__ float tanh_of(float x) { return tanhf(x); }
__device__ __forceinline__ double tanh_of(double x) { return tanh(x); }

// What a block mask says of a tile of scores, all of which lie in one block of it: an entry of its map.
constexpr int kHidden = 0, kAllVisible = 1;
template <class Z>
__device__ __forceinline__ int block_of(const AttentionParams& p, int b, int h, int i0, int j0) {
  constexpr int kSize = BlockMask::kSize;
  static_assert(kSize % Z::kQueries == 0 && kSize % Z::kKeys == 0, "a tile of scores lies in one block");
  return p.block_mask.present() ? p.block_mask.block(b, h, i0 / kSize, j0 / kSize) : kAllVisible;
}

// The first n from `begin` on with visible(n), or `end`. A warp asks for 32 at a time, so that a row of hidden blocks
// costs little; all warps get the same answer.
template <class Visible>
__device__ __forceinline__ int first_visible(int begin, int end, const Visible& visible) {
#pragma unroll 1
  for (int n = begin; n < end; n += 32) {
    const int own = n + int(threadIdx.x % 32);
    const uint32_t found = __ballot_sync(0xffffffffu, own < end && visible(own));
    if (found != 0) return n + __ffs(found) - 1;
  }
  return end;
}

// Of the tiles of queries i0 .. and keys j0 .., j0 + kKeys .. and so on, the first that the block mask does not hide: its
// j0. At least `end` if none begins before it.
template <class Z>
__device__ __forceinline__ int next_key_tile(const AttentionParams& p, int b, int h, int i0, int j0,
                                             int end) {
  if (!p.block_mask.present()) return j0;
  return Z::kKeys * first_visible(j0 / Z::kKeys, int(pieces(end, Z::kKeys)),
                                  [&](int n) { return block_of<Z>(p, b, h, i0, n * Z::kKeys) != kHidden; });
}

// The same along the queries.
template <class Z>
__device__ __forceinline__ int next_query_tile(const AttentionParams& p, int b, int h, int i0, int j0,
                                               int end) {
  if (!p.block_mask.present()) return i0;
  return Z::kQueries * first_visible(i0 / Z::kQueries, int(pieces(end, Z::kQueries)), [&](int n) {
           return block_of<Z>(p, b, h, n * Z::kQueries, j0) != kHidden;
         });
}

// The scores of one head.
template <class In>
class Scores {
 public:
  using T = Math<In>;
  using Z = Cores<In>;

  __device__ __forceinline__ Scores(const AttentionParams& p, int b, int h)
      : visible(p, b), p_(p), b_(b), h_(h),
        has_options_(has_cap() || p.bias.present || p.float_mask.present || p.bool_mask.present ||
                     p.alibi_slopes.present) {}

  const Visibility visible;

  // A cap this large changes no logit that a kernel can tell apart, and its reciprocal would lose its last bits.
  __device__ __forceinline__ bool has_cap() const {
    return p_.softcap > 0 && p_.softcap < (sizeof(T) == 4 ? 1e30 : 1e300);
  }

  // Products of queries i0 .. and keys j0 .. become logits, -inf where hidden. `tile` is scratch: the thread uses its
  // own places. With softcap they hold the derivative d(capped)/d(raw) afterwards.
  __device__ __forceinline__ void finish(ScoreTile<Z>& s, int i0, int j0, T* tile) const {
    const T scale = T(p_.scale);
#pragma unroll
    for (int r = 0; r < Z::kRows; r++) {
#pragma unroll
      for (int c = 0; c < Z::kRowScores; c++) s[r][c] *= scale;
    }
    const int block = block_of<Z>(p_, b_, h_, i0, j0);
    const KeyRange inner = visible.of_all_queries(i0, i0 + Z::kQueries - 1);
    if (!has_options_ && block == kAllVisible && inner.begin <= j0 && j0 + Z::kKeys <= inner.end) return;

    // Four scores of a row after another, to have the code of the options once. Registers cannot be indexed by a loop
    // variable: the way in goes through shared memory, the way out through predicated moves.
#pragma unroll
    for (int r = 0; r < Z::kRows; r++) {
#pragma unroll
      for (int c = 0; c < Z::kRowScores; c++) own_score<Z>(tile, r, c) = s[r][c];
    }
    constexpr int kRowParts = Z::kRowScores / 4;
#pragma unroll 1
    for (int part = 0; part < Z::kRows * kRowParts; part++) {
      const int row = part / kRowParts, first = part % kRowParts * 4;
      T x[4];
#pragma unroll
      for (int c = 0; c < 4; c++) x[c] = own_score<Z>(tile, row, first + c);
      if (has_cap()) {
        T slopes[4];
        cap(x, slopes);
#pragma unroll
        for (int c = 0; c < 4; c++) own_score<Z>(tile, row, first + c) = slopes[c];
      }
      finish_four(x, i0 + own_row<Z>(row), j0 + own_column<Z>(first), block);
#pragma unroll
      for (int r = 0; r < Z::kRows; r++) {
#pragma unroll
        for (int c = 0; c < Z::kRowScores; c++) s[r][c] = part == r * kRowParts + c / 4 ? x[c % 4] : s[r][c];
      }
    }
  }

  // |i + Nk - Nq - j|, what ALiBi multiplies its slope with.
  __device__ __forceinline__ T distance(int i, int j) const {
    const int64_t d = i + p_.len_k - p_.len_q - j;
    return T(d < 0 ? -d : d);
  }

  // The probabilities that survive dropout.
  __device__ __forceinline__ ScoreSet kept(int i0, int j0) const {
    return Z::kept(p_.dropout, i0, j0, h_, b_);
  }

 private:
  // Four scores of query i, the first of key j.
  __device__ __forceinline__ void finish_four(T (&x)[4], int i, int j, int block) const {
    const KeyRange keys = visible.of_query(i);
    bool seen[4];
#pragma unroll
    for (int c = 0; c < 4; c++) {
      const int key = j + Z::column_step(c);
      seen[c] = keys.begin <= key && key < keys.end;
    }
    if (block != kAllVisible) {
      const uint64_t own = p_.block_mask.keys(block, i) >> j % BlockMask::kSize;
#pragma unroll
      for (int c = 0; c < 4; c++) seen[c] = seen[c] && (own >> Z::column_step(c) & 1);
    }
    if (p_.bias.present) add(p_.bias, x, i, j, seen);
    if (p_.float_mask.present) add(p_.float_mask, x, i, j, seen);
    if (p_.alibi_slopes.present) {
      const T slope = read_term<In>(p_.alibi_slopes, b_, h_, 0, 0);
#pragma unroll
      for (int c = 0; c < 4; c++) x[c] -= slope * distance(i, j + Z::column_step(c));
    }
    if (p_.bool_mask.present) {
#pragma unroll
      for (int c = 0; c < 4; c++) {
        if (seen[c]) seen[c] = element<const uint8_t>(p_.bool_mask, b_, h_, i, j + Z::column_step(c)) != 0;
      }
    }
#pragma unroll
    for (int c = 0; c < 4; c++) x[c] = seen[c] ? x[c] : -infinity<T>();
  }

  __device__ __forceinline__ void cap(T (&x)[4], T (&slopes)[4]) const {
    constexpr T kLargest = sizeof(T) == 4 ? T(3.4028234663852886e38) : T(1.7976931348623157e308);
    // Finite also for a tiny cap, which leaves only the sign of a logit: 0 * inf would be NaN.
    const T limit = T(p_.softcap), inverse = limit > T(1) / kLargest ? T(1) / limit : kLargest;
#pragma unroll
    for (int c = 0; c < 4; c++) {
      const T t = tanh_of(x[c] * inverse);
      x[c] = t * limit;
      slopes[c] = T(1) - t * t;
    }
  }

  // A term of -inf hides the key whatever its product is, NaN included.
  __device__ __forceinline__ void add(const StridedView& term, T (&x)[4], int i, int j,
                                      bool (&seen)[4]) const {
#pragma unroll
    for (int c = 0; c < 4; c++) {
      if (!seen[c]) continue;
      const T value = read_term<In>(term, b_, h_, i, j + Z::column_step(c));
      seen[c] = value != -infinity<T>();
      x[c] += value;
    }
  }

  const AttentionParams& p_;
  const int b_, h_;
  const bool has_options_;
};

}  // namespace attn_ext::cuda::simt
