// Register fragments of mma.m16n8k16 (PTX ISA, "Matrix fragments for mma.m16n8k16 with floating point type"), and how
// they come from shared memory. With lane = threadIdx.x % 32, row = lane / 4 and column = 2 * (lane % 4):
//
//   FragmentA  16 x 16 halves   {(row, column), (row + 8, column), (row, column + 8), (row + 8, column + 8)}, pairs
//   B          16 x 8 halves    k runs down: {(k = column, n = row), (k = column + 8, n = row)}, pairs along k
//   FragmentC  16 x 8 floats    {(row, column), (row, column + 1), (row + 8, column), (row + 8, column + 1)}
//
// Two C fragments side by side, packed to halves, are one A fragment: so P goes from the first product into the second
// without leaving the registers.
#pragma once

#include "half.cuh"

namespace attn_ext::cuda {

struct FragmentA {
  uint32_t reg[4];
};

struct FragmentC {
  float reg[4];
};

// c += a * b
template <class Half>
__device__ __forceinline__ void mma(FragmentC& c, const FragmentA& a, uint32_t b0, uint32_t b1);

template <>
__device__ __forceinline__ void mma<f16>(FragmentC& c, const FragmentA& a, uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c.reg[0]), "+f"(c.reg[1]), "+f"(c.reg[2]), "+f"(c.reg[3])
      : "r"(a.reg[0]), "r"(a.reg[1]), "r"(a.reg[2]), "r"(a.reg[3]), "r"(b0), "r"(b1));
}

template <>
__device__ __forceinline__ void mma<bf16>(FragmentC& c, const FragmentA& a, uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c.reg[0]), "+f"(c.reg[1]), "+f"(c.reg[2]), "+f"(c.reg[3])
      : "r"(a.reg[0]), "r"(a.reg[1]), "r"(a.reg[2]), "r"(a.reg[3]), "r"(b0), "r"(b1));
}

// An operand of mma_tf32. The tensor cores ignore the last 13 bits of a float, so with half of the last place that they
// read (2^-11 of x's power of two) added, x is rounded to 10 bits of mantissa, ties away from zero. Infinities and NaN
// stay what they are; numbers beyond TF32's largest become infinite. cvt.rna.tf32.f32 does the same, but the assembler
// makes of it an addition under one and the same predicate for every number, 14 cycles each; this takes 2.
__device__ __forceinline__ float round_to_tf32(float x) {
  return fmaf(__uint_as_float(__float_as_uint(x) & 0xff800000u), 0x1p-11f, x);
}

// c += a * b by mma.m16n8k8 on TF32. c is as in FragmentC; with row = lane / 4 and k = lane % 4, a is {(row, k),
// (row + 8, k), (row, k + 4), (row + 8, k + 4)}, and b0 and b1 are (k, n = row) and (k + 4, n = row).
__device__ __forceinline__ void mma_tf32(float& c0, float& c1, float& c2, float& c3, const float (&a)[4],
                                         float b0, float b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c0), "+f"(c1), "+f"(c2), "+f"(c3)
      : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])),
        "r"(__float_as_uint(a[3])), "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)));
}

// The address of shared memory as ldmatrix and cp.async take it.
__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return uint32_t(__cvta_generic_to_shared(pointer));
}

// Four 8 x 8 matrices of halves; lanes 8m .. 8m + 7 give the row addresses (16 bytes each) of matrix m. Thread `lane`
// receives the pair (lane / 4, 2 * (lane % 4)) of each matrix.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&reg)[4], uint32_t row_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(reg[0]), "=r"(reg[1]), "=r"(reg[2]), "=r"(reg[3])
               : "r"(row_address));
}

// The same with each matrix transposed: the pair (2 * (lane % 4), lane / 4) and the row below it.
__device__ __forceinline__ void ldmatrix_x4_transposed(uint32_t (&reg)[4], uint32_t row_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(reg[0]), "=r"(reg[1]), "=r"(reg[2]), "=r"(reg[3])
               : "r"(row_address));
}

// Where this lane's row address lies for the fragments of a tile of rows, `RowBytes` apart, in shared memory:
// A fragment (16 rows x 16 columns) by ldmatrix_x4; two B fragments side by side (16 rows of k, 8 + 8 columns of n) by
// ldmatrix_x4_transposed, as V gives them: {reg 0, 1} and {reg 2, 3}.
template <int RowBytes>
__device__ __forceinline__ uint32_t lane_offset_a() {
  const uint32_t lane = threadIdx.x % 32;
  return lane % 16 * RowBytes + lane / 16 * 16;
}

// Two B fragments below each other (8 + 8 rows of n, 16 columns of k) by ldmatrix_x4, as K gives them.
template <int RowBytes>
__device__ __forceinline__ uint32_t lane_offset_b_pair() {
  const uint32_t lane = threadIdx.x % 32;
  return (lane % 8 + lane / 16 * 8) * RowBytes + lane / 8 % 2 * 16;
}

// Transposes the 4 x 4 words of a quad: word n of the result is word `lane % 4` of the quad's lane n. With it, a lane
// can fetch (or draw) what a whole row of one fragment needs, eight columns at once, for fragment lane % 4 of four,
// and ends up with its own two columns of all four.
__device__ __forceinline__ void quad_transpose(uint32_t (&word)[4]) {
  const bool odd = threadIdx.x & 1, upper = threadIdx.x & 2;
  // The off-diagonal words of the 2 x 2 blocks change places, then the off-diagonal blocks.
  const uint32_t a = __shfl_xor_sync(0xffffffffu, odd ? word[0] : word[1], 1);
  const uint32_t b = __shfl_xor_sync(0xffffffffu, odd ? word[2] : word[3], 1);
  const uint32_t half[4] = {odd ? a : word[0], odd ? word[1] : a, odd ? b : word[2], odd ? word[3] : b};
  const uint32_t c = __shfl_xor_sync(0xffffffffu, upper ? half[0] : half[2], 2);
  const uint32_t d = __shfl_xor_sync(0xffffffffu, upper ? half[1] : half[3], 2);
  word[0] = upper ? c : half[0];
  word[1] = upper ? d : half[1];
  word[2] = upper ? half[2] : c;
  word[3] = upper ? half[3] : d;
}

}  // namespace attn_ext::cuda
