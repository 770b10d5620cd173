// The score modifiers of the full variants, for a warp's blocks of 16 x 16 scores in either orientation. Rules and their
// order are those of csrc/cpu/scores.h.
#pragma once

#include "../tile/logits.cuh"
#include "../tile/philox.cuh"

namespace attn_ext::cuda {

// A 16 x 16 block of S (queries down) or, kTransposed, of S^T (keys down): two C fragments side by side. The lane's
// element (n, e) is in fragment n, register e.
template <bool kTransposed>
struct ScoreBlock {
  int query0, key0;  // of the block's corner

  __device__ __forceinline__ static int row(int e) { return threadIdx.x % 32 / 4 + e / 2 * 8; }
  __device__ __forceinline__ static int column(int n, int e) { return n * 8 + threadIdx.x % 4 * 2 + e % 2; }
  __device__ __forceinline__ int query(int n, int e) const {
    return query0 + (kTransposed ? column(n, e) : row(e));
  }
  __device__ __forceinline__ int key(int n, int e) const {
    return key0 + (kTransposed ? row(e) : column(n, e));
  }
};

// Where a tensor of the scores' shape (or broadcast to it) has the lane's elements of a block.
template <bool kTransposed>
struct BlockAddresses {
  char* corner;                   // element (0, 0)
  int64_t row_step, column_step;  // bytes

  __device__ __forceinline__ BlockAddresses(const StridedView& view, int64_t b, int64_t h,
                                            const ScoreBlock<kTransposed>& block)
      : corner(view.at(b, h, block.query(0, 0), block.key(0, 0))) {
    const int64_t size = size_of(view.dtype);
    row_step = view.stride[kTransposed ? 3 : 2] * size;
    column_step = view.stride[kTransposed ? 2 : 3] * size;
  }

  __device__ __forceinline__ char* at(int n, int e) const {
    return corner + (e / 2 * 8) * row_step + (n * 8 + e % 2) * column_step;
  }
};

// The visibility rules for tiles that need a mask. Element (row, column) of a lane's fragments lies at a distance
// key - query that differs from element (0, 0)'s by a number known at compile time, so one subtraction and one unsigned
// comparison tell whether it lies in [reach_left, reach_right].
struct TileMask {
  uint32_t from_left, width;  // distance of element (0, 0) to the left end; length of the interval
  int left;                   // rows of the stream that exist, from element (0, 0) on

  __device__ __forceinline__ TileMask(uint32_t from_left, uint32_t width, int left)
      : from_left(from_left), width(width), left(left) {}

  // `key` and `query` of element (0, 0).
  __device__ __forceinline__ TileMask(const Visibility& visible, int key, int query, int left) : left(left) {
    // No two positions are farther apart than an int says, so clamped reaches mean the same.
    const int64_t most = 2147483647;
    const int64_t begin = min(max(visible.reach_left, -most - 1), most),
                  end = min(max(visible.reach_right, -most - 1), most);
    from_left = uint32_t(key) - uint32_t(query) - uint32_t(begin);
    width = uint32_t(end - begin);
    if (end < begin) this->left = 0;  // nothing is visible, here and in later tiles
  }

  // The mask of a tile whose keys (queries) come `rows` later in the stream.
  __device__ __forceinline__ TileMask later_keys(int rows) const {
    return {from_left + uint32_t(rows), width, left - rows};
  }
  __device__ __forceinline__ TileMask later_queries(int rows) const {
    return {from_left - uint32_t(rows), width, left - rows};
  }

  // For the element that lies `distance` farther to the right of the diagonal, in row `streamed` of the stream after
  // element (0, 0)'s.
  __device__ __forceinline__ bool visible(int distance, int streamed) const {
    return from_left + uint32_t(distance) <= width && streamed < left;
  }
};

// Bit 4 n + e of a mask over a lane's elements of a block.
__device__ __forceinline__ bool test(uint32_t bits, int n, int e) { return bits >> (4 * n + e) & 1; }

// What turns products into logits for one (batch, query head).
template <class Half>
struct BackwardLogits {
  const AttentionParams& p;
  int b, h;
  Visibility visibility;
  TileMask first_mask;  // for element (0, 0) of all scores
  float scale, cap, inverse_cap, alibi_slope;

  __device__ BackwardLogits(const AttentionParams& p, int b, int h)
      : p(p), b(b), h(h), visibility(p, b), first_mask(visibility, 0, 0, visibility.queries) {
    // Else what follows from 64-bit lengths is computed anew for each block.
    keep_in_register(first_mask.from_left);
    keep_in_register(first_mask.width);
    keep_in_register(first_mask.left);
    scale = float(p.scale);
    cap = float(p.softcap);
    // Finite also for a tiny cap, which leaves only the sign of a logit: 0 * inf would be NaN.
    inverse_cap = cap > 2.938736e-39f ? 1.0f / cap : 3.4028234e38f;
    alibi_slope = 0.0f;
    if (p.alibi_slopes.present)
      alibi_slope = load_element<Half>(p.alibi_slopes.at(b, h, 0, 0), p.alibi_slopes.dtype);
  }

  __device__ __forceinline__ float distance(int query, int key) const {
    return float(abs(query - int(p.len_q) + int(p.len_k) - key));
  }

  // Which of the lane's elements are visible. Only these have an address in bias and masks. entry: the block mask's, of
  // the block that these scores lie in; 1 without one.
  template <bool kTransposed>
  __device__ __forceinline__ uint32_t visible(const ScoreBlock<kTransposed>& block, int32_t entry) const {
    const int query0 = block.query(0, 0), key0 = block.key(0, 0);
    const TileMask mask(first_mask.from_left + uint32_t(key0 - query0), first_mask.width,
                        first_mask.left - query0);
    const int keys_left = visibility.keys - key0;
    uint32_t bits = 0;
#pragma unroll
    for (int n = 0; n < 2; n++) {
#pragma unroll
      for (int e = 0; e < 4; e++) {
        const int query = block.query(n, e) - query0, key = block.key(n, e) - key0;
        bits |= uint32_t(mask.visible(key - query, query) && key < keys_left) << (4 * n + e);
      }
    }
    if (p.bool_mask.present || entry != 1) {  // one branch: the bits are held as predicates, and it ends that
      if (entry != 1) {
#pragma unroll
        for (int n = 0; n < 2; n++) {
#pragma unroll
          for (int e = 0; e < 4; e++) {
            const uint32_t keys = keys_seen(p.block_mask, entry, block.query(n, e), key0) >> key0 % 32;
            bits &= ~((~keys >> (block.key(n, e) - key0) & 1) << (4 * n + e));
          }
        }
      }
      if (p.bool_mask.present) {
        const BlockAddresses<kTransposed> allowed(p.bool_mask, b, h, block);
#pragma unroll
        for (int n = 0; n < 2; n++) {
#pragma unroll
          for (int e = 0; e < 4; e++) {
            if (test(bits, n, e) && *allowed.at(n, e) == 0) bits &= ~(1u << (4 * n + e));
          }
        }
      }
    }
    return bits;
  }

  // Products to logits, in place; hidden ones are left as they are. `slope` becomes d(capped)/d(raw).
  template <bool kTransposed>
  __device__ __forceinline__ void finish(FragmentC (&s)[2], FragmentC (&slope)[2], uint32_t visible,
                                         const ScoreBlock<kTransposed>& block) const {
#pragma unroll
    for (int n = 0; n < 2; n++) {
#pragma unroll
      for (int e = 0; e < 4; e++) {
        s[n].reg[e] *= scale;
        slope[n].reg[e] = 1.0f;
      }
    }
    if (has_softcap(p)) {
#pragma unroll
      for (int n = 0; n < 2; n++) {
#pragma unroll
        for (int e = 0; e < 4; e++) {
          // tanh(x) = 1 - 2 / (exp(2 x) + 1), absolute error 2^-22
          const float t = 1.0f - __fdividef(2.0f, exp2_fast(s[n].reg[e] * inverse_cap * (2 * kLog2E)) + 1.0f);
          s[n].reg[e] = t * cap;
          slope[n].reg[e] = 1.0f - t * t;
        }
      }
    }
    if (p.bias.present) add(p.bias, s, visible, block);
    if (p.float_mask.present) add(p.float_mask, s, visible, block);
    if (p.alibi_slopes.present) {
#pragma unroll
      for (int n = 0; n < 2; n++) {
#pragma unroll
        for (int e = 0; e < 4; e++) s[n].reg[e] -= alibi_slope * distance(block.query(n, e), block.key(n, e));
      }
    }
  }

  // Which of the lane's elements dropout keeps. One generator call gives the numbers of one query and eight keys: the
  // block's 32 of them are made by one lane each and handed out as bits.
  template <bool kTransposed>
  __device__ __forceinline__ uint32_t kept(const ScoreBlock<kTransposed>& block) const {
    if (p.dropout.threshold == 0) return 0xff;
    const int lane = threadIdx.x % 32;
    const Philox4 numbers = philox(p.dropout.key(), uint32_t(block.key0 / 8 + lane / 16),
                                   uint32_t(block.query0 + lane % 16), uint32_t(h), uint32_t(b));
    uint32_t eight = 0;
#pragma unroll
    for (int j = 0; j < 8; j++)
      eight |= uint32_t((numbers.word[j / 2] >> j % 2 * 16 & 0xffff) >= p.dropout.threshold) << j;
    uint32_t bits = 0;
#pragma unroll
    for (int n = 0; n < 2; n++) {
#pragma unroll
      for (int e = 0; e < 4; e++) {
        const int key = block.key(n, e) - block.key0, query = block.query(n, e) - block.query0;
        bits |= (__shfl_sync(0xffffffffu, eight, key / 8 * 16 + query) >> key % 8 & 1) << (4 * n + e);
      }
    }
    return bits;
  }

 private:
  // A term of -inf hides the key whatever its product is, NaN included.
  template <bool kTransposed>
  __device__ __forceinline__ void add(const StridedView& term, FragmentC (&s)[2], uint32_t visible,
                                      const ScoreBlock<kTransposed>& block) const {
    const BlockAddresses<kTransposed> addresses(term, b, h, block);
#pragma unroll
    for (int n = 0; n < 2; n++) {
#pragma unroll
      for (int e = 0; e < 4; e++) {
        if (!test(visible, n, e)) continue;
        const float x = load_element<Half>(addresses.at(n, e), term.dtype);
        s[n].reg[e] = x == -ATTN_INFINITY ? x : s[n].reg[e] + x;
      }
    }
  }
};

// A row's terms in the full variants: P = exp(logit - maximum) / exp(log of the sum).
__device__ __forceinline__ float probability(float logit, float maximum, float minus_log2) {
  // The subtraction comes first: a logit near the largest float must not overflow on its way to base 2.
  return exp2_fast(fmaf(logit - maximum, kLog2E, minus_log2));
}

}  // namespace attn_ext::cuda
