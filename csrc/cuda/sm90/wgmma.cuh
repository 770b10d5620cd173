// wgmma: products of a warpgroup (four warps), 64 rows by N columns, whose operands B, and A if wanted, are read from
// shared memory while the warps go on (PTX ISA, "Asynchronous warpgroup level matrix instructions").
//
//   fence_operands();  multiply<Half>(...) ...;  commit_products();  ...;  wait_for_products<Pending>();
//
// Until it has been waited for, a product's accumulators (and A registers) may not be touched: if the source does, the
// assembler waits after every single product of the function and says so in an "info" C75xx, which the gates of
// benchmarks/sass_report.py look for.
#pragma once

#include "../tile/fragment.cuh"
#include "params.h"

namespace attn_ext::cuda::sm90 {

// The accumulators of a product, 64 x N floats, are FragmentC[N / 8]: warp w of the warpgroup has rows 16 w .. 16 w + 15,
// as fragments of mma (../tile/fragment.cuh) side by side. An A operand in registers, 64 x K, is FragmentA[K / 16]: two
// neighbouring C fragments, packed to halves.

// Keeps the compiler from moving anything that reads or writes these registers across this line: it does not know that
// an asm statement's operands are in use after it.
template <int N>
__device__ __forceinline__ void pin(FragmentC (&x)[N]) {
#pragma unroll
  for (int i = 0; i < 4 * N; i++) asm volatile("" : "+f"(x[i / 4].reg[i % 4])::"memory");
}

template <int N>
__device__ __forceinline__ void pin(FragmentA (&x)[N]) {
#pragma unroll
  for (int i = 0; i < 4 * N; i++) asm volatile("" : "+r"(x[i / 4].reg[i % 4])::"memory");
}

// Orders this warp's earlier writes of accumulators and A registers before the products that follow.
__device__ __forceinline__ void fence_operands() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// The products since the last commit become a group.
__device__ __forceinline__ void commit_products() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most `Pending` of the latest groups are still under way. By all warps of the warpgroup: never in a
// branch that they could take differently.
template <int Pending>
__device__ __forceinline__ void wait_for_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}

// Matrix descriptors (PTX ISA, "Matrix descriptor format") of tiles in the layout of tensor_copy.cuh. Their low word
// has the address and the leading offset, both in units of 16 bytes; the high word is the same for all: 1024 bytes from
// eight rows to the next eight, 128-byte swizzle. Made of 32-bit halves, since 64-bit additions would cost a kernel
// 10 to 20 cycles a tile.
__device__ __forceinline__ uint64_t descriptor(uint32_t low) {
  constexpr uint32_t kHigh = 1u << 30 | 1024 / 16;
  uint64_t both;
  asm("mov.b64 %0, {%1, %2};" : "=l"(both) : "r"(low), "r"(kHigh));
  return both;
}

__device__ __forceinline__ uint32_t descriptor_low(uint32_t address, uint32_t leading_bytes) {
  return (address & 0x3ffff) >> 4 | leading_bytes >> 4 << 16;
}

// A tile whose columns are the k of the product: Q and K in S = Q K^T. `Rows`: of the whole tile.
template <int Rows>
struct RowsByK {
  static constexpr int kTransposed = 0;
  uint32_t low;

  // The leading offset is not used in this layout.
  __device__ __forceinline__ explicit RowsByK(uint32_t address) : low(descriptor_low(address, 16)) {}
  // The same tile, or the rows from there on, so many bytes further.
  __device__ __forceinline__ RowsByK operator+(uint32_t bytes) const {
    RowsByK moved = *this;
    moved.low += bytes >> 4;
    return moved;
  }
  // Columns 16 k .. 16 k + 15.
  __device__ __forceinline__ uint64_t step(int k) const {
    return descriptor(low + (k / 4 * panel_bytes(Rows) + k % 4 * 32) / 16);
  }
};

// A tile whose rows are the k of the product: V in O = P V. Panels lie the leading offset apart.
template <int Rows>
struct KByColumns {
  static constexpr int kTransposed = 1;
  uint32_t low;

  __device__ __forceinline__ explicit KByColumns(uint32_t address)
      : low(descriptor_low(address, panel_bytes(Rows))) {}
  __device__ __forceinline__ KByColumns operator+(uint32_t bytes) const {
    KByColumns moved = *this;
    moved.low += bytes >> 4;
    return moved;
  }
  // Rows 16 k .. 16 k + 15.
  __device__ __forceinline__ uint64_t step(int k) const {
    return descriptor(low + k * 16 * kPanelRowBytes / 16);
  }
};

// One k step of 16 by the instruction: see multiply() below. `Add` = 0 starts from zero.
template <class Half, int N, int Add, int TransposedA, int TransposedB>
struct Wgmma;

// The instruction spells out every register. Strings of ten names, and the operands of whole fragments.
#define ATTN_TEN(t) \
  "%" #t "0, %" #t "1, %" #t "2, %" #t "3, %" #t "4, %" #t "5, %" #t "6, %" #t "7, %" #t "8, %" #t "9"
#define ATTN_30 ATTN_TEN() ", " ATTN_TEN(1) ", " ATTN_TEN(2)
#define ATTN_60 ATTN_30 ", " ATTN_TEN(3) ", " ATTN_TEN(4) ", " ATTN_TEN(5)
#define ATTN_90 ATTN_60 ", " ATTN_TEN(6) ", " ATTN_TEN(7) ", " ATTN_TEN(8)
#define ATTN_4(i) "+f"(c[i].reg[0]), "+f"(c[i].reg[1]), "+f"(c[i].reg[2]), "+f"(c[i].reg[3])
#define ATTN_8(i) ATTN_4(i), ATTN_4(i + 1)
#define ATTN_32(i) ATTN_8(i), ATTN_8(i + 2), ATTN_8(i + 4), ATTN_8(i + 6)

#define ATTN_WGMMA_OF(half, n, names, i0, i1, i2, i3, i4, i5, i6, ...)                                      \
  template <int Add, int TransposedA, int TransposedB>                                                      \
  struct Wgmma<half, n, Add, TransposedA, TransposedB> {                                                    \
    __device__ __forceinline__ static void run(FragmentC (&c)[n / 8], uint64_t a, uint64_t b) {             \
      asm volatile("{\n\t.reg .pred add;\n\tsetp.ne.b32 add, %" #i2                                         \
                   ", 0;\n\t"                                                                               \
                   "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." #half "." #half " {" names "}, %" #i0  \
                   ", %" #i1 ", add, 1, 1, %" #i3 ", %" #i4 ";\n\t}"                                        \
                   : __VA_ARGS__                                                                            \
                   : "l"(a), "l"(b), "n"(Add), "n"(TransposedA), "n"(TransposedB));                         \
    }                                                                                                       \
    __device__ __forceinline__ static void run(FragmentC (&c)[n / 8], const FragmentA& a, uint64_t b) {     \
      asm volatile("{\n\t.reg .pred add;\n\tsetp.ne.b32 add, %" #i5                                         \
                   ", 0;\n\t"                                                                               \
                   "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." #half "." #half " {" names "}, {%" #i0 \
                   ", %" #i1 ", %" #i2 ", %" #i3 "}, %" #i4 ", add, 1, 1, %" #i6 ";\n\t}"                   \
                   : __VA_ARGS__                                                                            \
                   : "r"(a.reg[0]), "r"(a.reg[1]), "r"(a.reg[2]), "r"(a.reg[3]), "l"(b), "n"(Add),          \
                     "n"(TransposedB));                                                                     \
    }                                                                                                       \
  };
#define ATTN_WGMMA(...) ATTN_WGMMA_OF(f16, __VA_ARGS__) ATTN_WGMMA_OF(bf16, __VA_ARGS__)

// N, its N / 2 registers, the numbers of the operands after them, and the fragments, named by their first.
ATTN_WGMMA(64, ATTN_30 ", %30, %31", 32, 33, 34, 35, 36, 37, 38, ATTN_32(0))
ATTN_WGMMA(80, ATTN_30 ", " ATTN_TEN(3), 40, 41, 42, 43, 44, 45, 46, ATTN_32(0), ATTN_8(8))
ATTN_WGMMA(96, ATTN_30 ", " ATTN_TEN(3) ", %40, %41, %42, %43, %44, %45, %46, %47", 48, 49, 50, 51, 52, 53,
           54, ATTN_32(0), ATTN_8(8), ATTN_8(10))
ATTN_WGMMA(112, ATTN_30 ", " ATTN_TEN(3) ", " ATTN_TEN(4) ", %50, %51, %52, %53, %54, %55", 56, 57, 58, 59,
           60, 61, 62, ATTN_32(0), ATTN_8(8), ATTN_8(10), ATTN_8(12))
ATTN_WGMMA(128, ATTN_60 ", %60, %61, %62, %63", 64, 65, 66, 67, 68, 69, 70, ATTN_32(0), ATTN_32(8))
ATTN_WGMMA(176, ATTN_60 ", " ATTN_TEN(6) ", " ATTN_TEN(7) ", %80, %81, %82, %83, %84, %85, %86, %87", 88, 89,
           90, 91, 92, 93, 94, ATTN_32(0), ATTN_32(8), ATTN_8(16), ATTN_8(18), ATTN_8(20))
ATTN_WGMMA(192, ATTN_90 ", %90, %91, %92, %93, %94, %95", 96, 97, 98, 99, 100, 101, 102, ATTN_32(0),
           ATTN_32(8), ATTN_32(16))
ATTN_WGMMA(256,
           ATTN_90 ", " ATTN_TEN(9) ", " ATTN_TEN(10) ", " ATTN_TEN(11) ", %120, %121, %122, %123, %124, "
                                                                         "%125, %126, %127",
           128, 129, 130, 131, 132, 133, 134, ATTN_32(0), ATTN_32(8), ATTN_32(16), ATTN_32(24))

#undef ATTN_TEN
#undef ATTN_30
#undef ATTN_60
#undef ATTN_90
#undef ATTN_4
#undef ATTN_8
#undef ATTN_32
#undef ATTN_WGMMA_OF
#undef ATTN_WGMMA

// c (+)= A B over 16 * Steps of k, both operands tiles in shared memory. Without Add the first step starts from zero.
template <class Half, int Steps, bool Add, int N, class TileA, class TileB>
__device__ __forceinline__ void multiply(FragmentC (&c)[N], TileA a, TileB b) {
#pragma unroll
  for (int k = 0; k < Steps; k++) {
    if (Add || k > 0) {
      Wgmma<Half, 8 * N, 1, TileA::kTransposed, TileB::kTransposed>::run(c, a.step(k), b.step(k));
    } else {
      Wgmma<Half, 8 * N, 0, TileA::kTransposed, TileB::kTransposed>::run(c, a.step(k), b.step(k));
    }
  }
}

// The same with A in registers.
template <class Half, bool Add, int N, int Steps, class TileB>
__device__ __forceinline__ void multiply(FragmentC (&c)[N], const FragmentA (&a)[Steps], TileB b) {
#pragma unroll
  for (int k = 0; k < Steps; k++) {
    if (Add || k > 0) {
      Wgmma<Half, 8 * N, 1, 0, TileB::kTransposed>::run(c, a[k], b.step(k));
    } else {
      Wgmma<Half, 8 * N, 0, 0, TileB::kTransposed>::run(c, a[k], b.step(k));
    }
  }
}

}  // namespace attn_ext::cuda::sm90
