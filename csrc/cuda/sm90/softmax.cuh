// The online softmax of a consumer warpgroup's scores, in pieces, so that products can run between them.
#pragma once

#include "../tile/math.cuh"
#include "wgmma.cuh"

namespace attn_ext::cuda::sm90 {

// Of this thread's two rows, lane / 4 and lane / 4 + 8 of its warp's sixteen.
struct RowSoftmax {
  float top[2];      // maximum of the scores so far, not yet scaled
  float shift[2];    // the same scaled, in base 2, or 0 without any: exp2(-inf - 0) = 0, not NaN
  float sum[2];      // this thread's share of the sum of exp2(score * scale - shift)
  float part[2][2];  // the same of the current tile, even and odd columns

  __device__ __forceinline__ void reset() {
#pragma unroll
    for (int r = 0; r < 2; r++) top[r] = -ATTN_INFINITY, shift[r] = sum[r] = 0.0f;
  }

  // Raises the maximum to the tile's. `factor`: what O and the sums so far must be multiplied with. The scale is
  // positive, so the largest score is the largest scaled one.
  template <int N>
  __device__ __forceinline__ void begin(const FragmentC (&s)[N], float scale_log2, float (&factor)[2]) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      float even = s[0].reg[2 * r], odd = s[0].reg[2 * r + 1];
#pragma unroll
      for (int n = 1; n < N; n++) {
        even = fmaxf(even, s[n].reg[2 * r]);
        odd = fmaxf(odd, s[n].reg[2 * r + 1]);
      }
      const float now = fmaxf(quad_max(fmaxf(even, odd)), top[r]);
      shift[r] = now == -ATTN_INFINITY ? 0.0f : now * scale_log2;
      factor[r] = exp2_fast(fmaf(top[r], scale_log2, -shift[r]));
      top[r] = now;
      part[r][0] = part[r][1] = 0.0f;
    }
  }

  // The scores of fragments First .. Last - 1 become probabilities.
  template <int First, int Last, int N>
  __device__ __forceinline__ void exponentials(FragmentC (&s)[N], float scale_log2) {
#pragma unroll
    for (int n = First; n < Last; n++) {
#pragma unroll
      for (int i = 0; i < 4; i++) {
        float& x = s[n].reg[i];
        x = exp2_fast(fmaf(x, scale_log2, -shift[i / 2]));
        part[i / 2][i % 2] += x;
      }
    }
  }

  // A wait for products below this line stays below the exponentials above it: the assembler would move it up, and
  // nothing would run beside the products. It does not move it across a store, and this one, which never happens (a sum
  // of exponentials is not below -scale), needs their sums. A comparison with a constant it would see through.
  __device__ __forceinline__ void hold_wait(uint32_t shared, float scale_log2) const {
    asm volatile(
        "{\n\t.reg .pred never;\n\tsetp.lt.f32 never, %0, %2;\n\t@never st.shared.b32 [%1], %0;\n\t}" ::"f"(
            (part[0][0] + part[0][1]) + (part[1][0] + part[1][1])),
        "r"(shared), "f"(-scale_log2)
        : "memory");
  }

  __device__ __forceinline__ void end(const float (&factor)[2]) {
#pragma unroll
    for (int r = 0; r < 2; r++) sum[r] = fmaf(sum[r], factor[r], part[r][0] + part[r][1]);
  }
};

}  // namespace attn_ext::cuda::sm90
