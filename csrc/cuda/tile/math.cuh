// Small arithmetic of the softmax.
#pragma once

#include <cstdint>

namespace attn_ext::cuda {

constexpr float kLog2E = 1.4426950408889634f;  // log2(e)
constexpr float kLn2 = 0.6931471805599453f;    // ln(2)
#define ATTN_INFINITY __int_as_float(0x7f800000)
#define ATTN_NAN __int_as_float(0x7fffffff)

// 2^x, relative error 2^-22.5, results below 2^-126 become 0. One MUFU instruction; exp2f() would add range code.
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Over the four lanes that share the rows of a C fragment.
__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// Hides from the assembler how a value came about, so that it is kept in a register across a loop and not computed anew
// in each pass. (An empty asm would be gone before it.)
__device__ __forceinline__ void keep_in_register(uint32_t& x) { asm volatile("mov.b32 %0, %0;" : "+r"(x)); }
__device__ __forceinline__ void keep_in_register(int& x) { asm volatile("mov.b32 %0, %0;" : "+r"(x)); }
__device__ __forceinline__ void keep_in_register(int64_t& x) { asm volatile("mov.b64 %0, %0;" : "+l"(x)); }
__device__ __forceinline__ void keep_in_register(const char*& x) {
  asm volatile("mov.b64 %0, %0;" : "+l"(x));
}

// The same value in all lanes of a warp. Said this way, the assembler knows it, and loops that it bounds are counted in
// uniform registers.
__device__ __forceinline__ int warp_uniform(int x) { return __shfl_sync(0xffffffffu, x, 0); }

}  // namespace attn_ext::cuda
