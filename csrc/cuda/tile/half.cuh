// The two half types as tags, and the conversions kernels need. 16 bits travel as uint16_t, pairs as uint32_t with the
// element of the lower column in the lower half, as tensor-core fragments want them.
#pragma once

#include <cstdint>

namespace attn_ext::cuda {

struct f16 {
  // How far the sum of a thread's probabilities of one tile may grow above a maximum that is out of date. Beyond 65504
  // one of them would turn into infinity when packed.
  static constexpr float kOptimisticLimit = 32768.0f;
};
struct bf16 {
  // 2^30: hardly ever passed, and values up to 1e29 still sum up without overflow.
  static constexpr float kOptimisticLimit = 1073741824.0f;
};

template <class Half>
__device__ __forceinline__ uint32_t pack(float low, float high);

template <>
__device__ __forceinline__ uint32_t pack<f16>(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

template <>
__device__ __forceinline__ uint32_t pack<bf16>(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

template <class Half>
__device__ __forceinline__ float to_float(uint16_t bits);

template <>
__device__ __forceinline__ float to_float<f16>(uint16_t bits) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
  return x;
}

template <>
__device__ __forceinline__ float to_float<bf16>(uint16_t bits) {
  return __uint_as_float(uint32_t(bits) << 16);
}

template <class Half>
__device__ __forceinline__ uint16_t to_half(float x) {
  return uint16_t(pack<Half>(x, 0.0f));
}

}  // namespace attn_ext::cuda
