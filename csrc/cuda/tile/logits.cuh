// From raw products to logits, for the variants with score modifiers: scale, softcap, bias, float mask, ALiBi, bool and
// block mask and visibility, on C fragments in natural units. The rules are those of csrc/cpu/scores.h. Which of them
// apply is the same for the whole grid, so each is one branch.
#pragma once

#include "../../attention_params.h"
#include "block_mask.cuh"
#include "fragment.cuh"
#include "math.cuh"
#include "visibility.cuh"

namespace attn_ext::cuda {

// A cap this large changes no logit that a float can tell apart, and its reciprocal would lose its last bits.
__device__ __forceinline__ bool has_softcap(const AttentionParams& p) {
  return p.softcap > 0 && p.softcap < 1e30;
}

// One element of a bias, mask, slope or sink: float32 or of the queries' type.
template <class Half>
__device__ __forceinline__ float load_element(const char* element, DType dtype) {
  if (dtype == DType::kFloat32) return *reinterpret_cast<const float*>(element);
  return to_float<Half>(*reinterpret_cast<const uint16_t*>(element));
}

// The logits of one (batch, query head). N key fragments a row, a multiple of 4; `key` is a tile's first key.
template <class Half>
struct Logits {
  const AttentionParams& p;
  int b, h;
  float scale, slope;

  __device__ __forceinline__ Logits(const AttentionParams& params, int batch, int head)
      : p(params), b(batch), h(head), scale(float(params.scale)) {
    slope = p.alibi_slopes.present ? load_element<Half>(p.alibi_slopes.at(b, h, 0, 0), p.alibi_slopes.dtype)
                                   : 0.0f;
  }

  // Turns the products of two query rows, row[0] (registers 0, 1 of each fragment) and row[1] (2, 3), into logits.
  // seen[r]: the keys row[r] may see by causal, window and length rules; the others become -inf, and those that the block
  // mask hides, whose entry for the tile's block is `block`, unless the caller knows (`whole`) that there are neither.
  template <int N>
  __device__ __forceinline__ void apply(FragmentC (&s)[N], const int (&row)[2], int key,
                                        const KeyRange (&seen)[2], bool whole, int32_t block) const {
    for_each(s, [&](float& x, int, int, int) { x *= scale; });
    if (has_softcap(p)) {
      constexpr float kLargest = 3.4028234663852886e38f;
      const float cap = float(p.softcap);
      // Finite also for a tiny cap, which leaves only the sign of a logit: 0 * inf would be NaN.
      const float inverse = cap > 1.0f / kLargest ? 1.0f / cap : kLargest;
      for_each(s, [&](float& x, int, int, int) { x = cap * tanhf(x * inverse); });
    }
#pragma unroll 1  // one body for both, or code and compile time would double
    for (int t = 0; t < 2; t++) {
      const StridedView& term = t == 0 ? p.bias : p.float_mask;
      if (term.present) add(s, term, row, key, seen);
    }
    const int first = key + threadIdx.x % 4 * 2;  // this lane's first key
    if (p.alibi_slopes.present) {
      const int diagonal = int(p.len_k) - first - int(p.len_q);
      for_each(
          s, [&](float& x, int n, int r, int e) { x -= slope * float(abs(row[r] + diagonal - n * 8 - e)); });
    }
    if (p.bool_mask.present) hide(s, row, key, seen);
    if (!whole) {
      for_each(s, [&](float& x, int n, int r, int e) {
        if (!sees(seen[r], first + n * 8 + e)) x = -ATTN_INFINITY;
      });
      if (block != 1) hide_in_block(s, row, key, block);
    }
  }

 private:
  // Calls f(element, n, r, e) for column e of row r of fragment n.
  template <int N, class F>
  __device__ __forceinline__ static void for_each(FragmentC (&s)[N], F f) {
#pragma unroll
    for (int n = 0; n < N; n++) {
#pragma unroll
      for (int i = 0; i < 4; i++) f(s[n].reg[i], n, i / 2, i % 2);
    }
  }

  __device__ __forceinline__ static bool sees(const KeyRange& seen, int key) {
    return key >= seen.begin && key < seen.end;
  }

  // A term of -inf hides the key also where the product is NaN.
  __device__ __forceinline__ static void add_term(float& x, float term) {
    x = term == -ATTN_INFINITY ? term : x + term;
  }

  // Whether rows can be read in pieces of `bytes` or twice that, one for the eight keys of a fragment, without leaving
  // the tensor.
  template <int N>
  __device__ __forceinline__ bool in_pieces(const StridedView& view, int key, int bytes) const {
    const int64_t steps = view.stride[0] | view.stride[1] | view.stride[2];
    return view.stride[3] == 1 && steps % 8 == 0 && reinterpret_cast<uintptr_t>(view.data) % bytes == 0 &&
           key + 8 * N <= p.len_k;
  }

  // An existing row, for rows past the end, whose logits do not matter.
  __device__ __forceinline__ int existing(int row) const { return min(row, int(p.len_q) - 1); }

  template <int N>
  __device__ __forceinline__ void add(FragmentC (&s)[N], const StridedView& term, const int (&row)[2],
                                      int key, const KeyRange (&seen)[2]) const {
    if (in_pieces<N>(term, key, 16)) {
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const char* own = term.at(b, h, existing(row[r]), key + threadIdx.x % 4 * 8);
#pragma unroll
        for (int n = 0; n < N; n += 4) {
          if (term.dtype == DType::kFloat32) {
            add_floats(s, n, r, reinterpret_cast<const float4*>(own + n * 32));
          } else {
            add_halves(s, n, r, *reinterpret_cast<const uint4*>(own + n * 16));
          }
        }
      }
    } else {  // any strides: nothing is read but what is seen
      const int64_t step = term.stride[3] * size_of(term.dtype);
      const int first = key + threadIdx.x % 4 * 2;
      const char* element[2] = {term.at(b, h, row[0], first), term.at(b, h, row[1], first)};
      for_each(s, [&](float& x, int n, int r, int e) {
        if (sees(seen[r], first + n * 8 + e))
          add_term(x, load_element<Half>(element[r] + (n * 8 + e) * step, term.dtype));
      });
    }
  }

  // Adds eight halves that each lane of the quad has for fragment n + lane % 4.
  template <int N>
  __device__ __forceinline__ static void add_halves(FragmentC (&s)[N], int n, int r, uint4 eight) {
    uint32_t pair[4] = {eight.x, eight.y, eight.z, eight.w};
    quad_transpose(pair);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      add_term(s[n + i].reg[2 * r], to_float<Half>(uint16_t(pair[i])));
      add_term(s[n + i].reg[2 * r + 1], to_float<Half>(uint16_t(pair[i] >> 16)));
    }
  }

  template <int N>
  __device__ __forceinline__ static void add_floats(FragmentC (&s)[N], int n, int r, const float4* eight) {
    const float4 a = eight[0], b = eight[1];
    uint32_t even[4] = {__float_as_uint(a.x), __float_as_uint(a.z), __float_as_uint(b.x),
                        __float_as_uint(b.z)};
    uint32_t odd[4] = {__float_as_uint(a.y), __float_as_uint(a.w), __float_as_uint(b.y),
                       __float_as_uint(b.w)};
    quad_transpose(even);
    quad_transpose(odd);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      add_term(s[n + i].reg[2 * r], __uint_as_float(even[i]));
      add_term(s[n + i].reg[2 * r + 1], __uint_as_float(odd[i]));
    }
  }

  // Hides those of 32 keys from fragment n on whose bit is 0.
  template <int N>
  __device__ __forceinline__ static void hide_keys(FragmentC (&s)[N], int n, int r, uint32_t bits) {
    bits >>= threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < 4; i++) {
#pragma unroll
      for (int e = 0; e < 2; e++) {
        float& x = s[n + i].reg[2 * r + e];
        x = (bits >> (8 * i + e) & 1) != 0 ? x : -ATTN_INFINITY;
      }
    }
  }

  // Hides what the tile of bits of a block does not show.
  template <int N>
  __device__ __forceinline__ void hide_in_block(FragmentC (&s)[N], const int (&row)[2], int key,
                                                int32_t block) const {
#pragma unroll
    for (int r = 0; r < 2; r++) {
#pragma unroll
      for (int n = 0; n < N; n += 4) hide_keys(s, n, r, keys_seen(p.block_mask, block, row[r], key + n * 8));
    }
  }

  // Hides keys where the bool mask is 0.
  template <int N>
  __device__ __forceinline__ void hide(FragmentC (&s)[N], const int (&row)[2], int key,
                                       const KeyRange (&seen)[2]) const {
    const StridedView& mask = p.bool_mask;
    if (in_pieces<N>(mask, key, 8)) {
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const char* own = mask.at(b, h, existing(row[r]), key + threadIdx.x % 4 * 8);
#pragma unroll
        for (int n = 0; n < N; n += 4) {
          // Bytes of 0 and 1 to bits: the product brings bit 8 i to bit 28 + i. One word holds the quad's 32 keys.
          const uint2 eight = *reinterpret_cast<const uint2*>(own + n * 8);
          uint32_t bits = (eight.x * 0x10204080u >> 28 | eight.y * 0x10204080u >> 28 << 4)
                          << threadIdx.x % 4 * 8;
          bits |= __shfl_xor_sync(0xffffffffu, bits, 1);
          bits |= __shfl_xor_sync(0xffffffffu, bits, 2);
          hide_keys(s, n, r, bits);
        }
      }
    } else {
      const int64_t step = mask.stride[3];
      const int first = key + threadIdx.x % 4 * 2;
      const char* allowed[2] = {mask.at(b, h, row[0], first), mask.at(b, h, row[1], first)};
      for_each(s, [&](float& x, int n, int r, int e) {
        if (sees(seen[r], first + n * 8 + e) && allowed[r][(n * 8 + e) * step] == 0) x = -ATTN_INFINITY;
      });
    }
  }
};

}  // namespace attn_ext::cuda
