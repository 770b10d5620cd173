// The score modifiers of the full variants, for a warp's blocks of 16 x 16 scores in either orientation. Rules and their
// order are those of csrc/cpu/scores.h.
#pragma once

#include "../tile/fragment.cuh"
#include "../tile/math.cuh"
#include "../tile/philox.cuh"
#include "../tile/visibility.cuh"

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

// Bit 4 n + e of a mask over a lane's elements of a block.
__device__ __forceinline__ bool test(uint32_t bits, int n, int e) { return bits >> (4 * n + e) & 1; }

template <class Half>
__device__ __forceinline__ float load_term(const char* address, DType dtype) {
  if (dtype == DType::kFloat32) return *reinterpret_cast<const float*>(address);
  return to_float<Half>(*reinterpret_cast<const uint16_t*>(address));
}

// What turns products into logits for one (batch, query head).
template <class Half>
struct BackwardLogits {
  const AttentionParams& p;
  int64_t b, h;
  Visibility visibility;
  float scale, cap, inverse_cap, alibi_slope;
  bool has_cap;

  __device__ BackwardLogits(const AttentionParams& p, int64_t b, int64_t h)
      : p(p), b(b), h(h), visibility(p, b) {
    scale = float(p.scale);
    // A cap this large changes no logit that float can tell apart.
    has_cap = p.softcap > 0 && p.softcap < 1e30;
    cap = float(p.softcap);
    // Finite also for a tiny cap, which leaves only the sign of a logit: 0 * inf would be NaN.
    inverse_cap = cap > 2.938736e-39f ? 1.0f / cap : 3.4028234e38f;
    set_head(h);
  }

  __device__ __forceinline__ void set_head(int64_t head) {
    h = head;
    alibi_slope = 0.0f;
    if (p.alibi_slopes.present)
      alibi_slope = load_term<Half>(p.alibi_slopes.at(b, h, 0, 0), p.alibi_slopes.dtype);
  }

  __device__ __forceinline__ float distance(int query, int key) const {
    const int64_t d = int64_t(query) + p.len_k - p.len_q - key;
    return float(d < 0 ? -d : d);
  }

  // Which of the lane's elements are visible. Only these have an address in bias and masks.
  template <bool kTransposed>
  __device__ __forceinline__ uint32_t visible(const ScoreBlock<kTransposed>& block) const {
    uint32_t bits = 0;
#pragma unroll
    for (int n = 0; n < 2; n++) {
#pragma unroll
      for (int e = 0; e < 4; e++) {
        const int i = block.query(n, e), j = block.key(n, e);
        const int64_t d = int64_t(j) - i;
        bool see = i < visibility.queries && j < visibility.keys && d >= visibility.reach_left &&
                   d <= visibility.reach_right;
        if (p.bool_mask.present && see) see = *p.bool_mask.at(b, h, i, j) != 0;
        bits |= uint32_t(see) << (4 * n + e);
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
    if (has_cap) {
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
#pragma unroll
    for (int n = 0; n < 2; n++) {
#pragma unroll
      for (int e = 0; e < 4; e++) {
        if (!test(visible, n, e)) continue;
        const float x = load_term<Half>(term.at(b, h, block.query(n, e), block.key(n, e)), term.dtype);
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
