// The options of the decode kernels: what happens to a thread's scores between the two products, after scaling. The rules
// are those of csrc/cpu/scores.h, natural units.
#pragma once

#include "../tile/block_mask.cuh"
#include "../tile/fragment.cuh"
#include "../tile/philox.cuh"
#include "../tile/visibility.cuh"
#include "decode_row.cuh"

namespace attn_ext::cuda {

// One of a thread's two rows.
struct DecodeRow {
  int h, i;  // query head and query; those of the last row if there is no such row
  KeyRange visible;
  RowSum sum;  // over this thread's columns only

  __device__ __forceinline__ bool sees(int key) const { return key >= visible.begin && key < visible.end; }
};

// f(n, e, r, j) for each of the eight scores of a thread in two C fragments s: s[n].reg[e] belongs to row r (0, 1) of the
// thread's two, and to the key j after the thread's first.
template <class F>
__device__ __forceinline__ void for_each_score(F f) {
#pragma unroll
  for (int n = 0; n < 2; n++) {
#pragma unroll
    for (int e = 0; e < 4; e++) f(n, e, e / 2, 8 * n + e % 2);
  }
}

template <class Half>
struct DecodeTerms {
  const AttentionParams& problem;
  int b = 0;

  // Whether add_to() has anything to do.
  __device__ __forceinline__ bool any() const {
    return has_cap() || problem.bias.present || problem.float_mask.present || problem.bool_mask.present ||
           problem.block_mask.present() || problem.alibi_slopes.present;
  }

  // Softcap, bias, float mask, ALiBi, bool mask and block mask. `key`: the thread's first. Pairs that do not see
  // each other by their position are left to the caller, since most calls have no other reason to hide.
  __device__ __forceinline__ void add_to(FragmentC (&s)[2], const DecodeRow (&row)[2], int key) const {
    if (has_cap()) {
      const float cap = float(problem.softcap);
      // Finite also for a tiny cap, which leaves only the sign of a logit: 0 * inf would be NaN.
      const float inverse = cap > 1 / kLargestFloat ? 1 / cap : kLargestFloat;
      for_each_score([&](int n, int e, int, int) { s[n].reg[e] = cap * tanhf(s[n].reg[e] * inverse); });
    }
    bool visible[2][4];
    for_each_score([&](int n, int e, int r, int j) { visible[n][e] = row[r].sees(key + j); });
    if (problem.bias.present) add(problem.bias, s, visible, row, key);
    if (problem.float_mask.present) add(problem.float_mask, s, visible, row, key);
    if (problem.alibi_slopes.present) {
      const int offset = int(problem.len_k - problem.len_q);
      float slope[2];
      for (int r = 0; r < 2; r++) slope[r] = read_float<Half>(problem.alibi_slopes, b, row[r].h, 0, 0);
      for_each_score([&](int n, int e, int r, int j) {
        s[n].reg[e] -= slope[r] * float(abs(row[r].i + offset - (key + j)));
      });
    }
    if (problem.bool_mask.present) {
      for_each_score([&](int n, int e, int r, int j) {
        if (visible[n][e])
          visible[n][e] = *element<uint8_t>(problem.bool_mask, b, row[r].h, row[r].i, key + j) != 0;
      });
    }
    if (problem.block_mask.present()) hide_in_blocks(visible, row, key);
    for_each_score([&](int n, int e, int, int) {
      if (!visible[n][e]) s[n].reg[e] = -ATTN_INFINITY;
    });
  }

  // Blocks that are not partial have bits too: these 16 keys may lie in two blocks, and each row in others.
  __device__ __forceinline__ void hide_in_blocks(bool (&visible)[2][4], const DecodeRow (&row)[2],
                                                 int key) const {
    const BlockMask& mask = problem.block_mask;
#pragma unroll
    for (int n = 0; n < 2; n++) {
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const int pair =
            min(key + 8 * n, int(problem.len_k) - 1);  // the map has no block for keys after that
        const int32_t block = mask.block(b, row[r].h, row[r].i / BlockMask::kSize, pair / BlockMask::kSize);
        const uint32_t bits = keys_seen(mask, block, row[r].i, pair) >> pair % 32;
        if ((bits & 1) == 0) visible[n][2 * r] = false;
        if ((bits & 2) == 0) visible[n][2 * r + 1] = false;
      }
    }
  }

  // A larger cap changes nothing in float.
  __device__ __forceinline__ bool has_cap() const { return problem.softcap > 0 && problem.softcap < 1e30; }

  // A term of -inf hides the key whatever the product is, NaN included. Pairs that do not see each other are not read:
  // they may have no element.
  __device__ __forceinline__ void add(const StridedView& term, FragmentC (&s)[2], bool (&visible)[2][4],
                                      const DecodeRow (&row)[2], int key) const {
    for_each_score([&](int n, int e, int r, int j) {
      if (!visible[n][e]) return;
      const float value = read_float<Half>(term, b, row[r].h, row[r].i, key + j);
      if (value == -ATTN_INFINITY) visible[n][e] = false;
      s[n].reg[e] += value;
    });
  }

  // Zeroes what dropout drops; what it keeps is scaled at the end, since 1 / (1 - p) may be too large for f16.
  __device__ __forceinline__ void drop(FragmentC (&s)[2], const DecodeRow (&row)[2], int key) const {
    const uint64_t seed = problem.dropout.key();
    const uint32_t threshold = problem.dropout.threshold, lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < 2; n++) {
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const Philox4 random = philox(seed, key / 8 + n, row[r].i, row[r].h, b);
        const uint32_t low = lane % 2 == 0 ? random.word[0] : random.word[1],
                       high = lane % 2 == 0 ? random.word[2] : random.word[3],
                       word = lane % 4 < 2 ? low : high;  // of keys 2 (lane % 4) and the next
        if ((word & 0xffff) < threshold) s[n].reg[2 * r] = 0.0f;
        if (word >> 16 < threshold) s[n].reg[2 * r + 1] = 0.0f;
      }
    }
  }
};

}  // namespace attn_ext::cuda
