// Numbers as tensors store them, as kernels compute with them, and how slices of tensors come into shared memory.
#pragma once

#include "../tile/async_copy.cuh"
#include "../tile/fragment.cuh"
#include "../tile/math.cuh"
#include "tile_sizes.h"

namespace attn_ext::cuda::simt {

extern __shared__ __align__(16) char shared_memory[];

template <class In>
struct Element {  // half types
  using Stored = uint16_t;
  using Math = float;
  using Tile = CudaCoreTile<float>;
  static __device__ __forceinline__ float widen(uint16_t x) { return to_float<In>(x); }
  static __device__ __forceinline__ uint16_t narrow(float x) { return to_half<In>(x); }
  static __device__ __forceinline__ float operand(float x) { return x; }
};

template <class T>
struct SameElement {
  using Stored = T;
  using Math = T;
  using Tile = CudaCoreTile<T>;
  static __device__ __forceinline__ T widen(T x) { return x; }
  static __device__ __forceinline__ T narrow(T x) { return x; }
  static __device__ __forceinline__ T operand(T x) { return x; }  // what a product makes of it
};
template <>
struct Element<float> : SameElement<float> {};
template <>
struct Element<double> : SameElement<double> {};

// float32 whose products are computed in TF32.
struct tf32;
template <>
struct Element<tf32> : SameElement<float> {
  using Tile = Tf32Tile;
  static __device__ __forceinline__ float operand(float x) {
    return __uint_as_float(__float_as_uint(round_to_tf32(x)) & 0xffffe000u);
  }
};

template <class In>
using Math = typename Element<In>::Math;
template <class In>
using TileOf = typename Element<In>::Tile;

// Element (b, h, row, column) of a tensor of numbers that are known to be of type T.
template <class T>
__device__ __forceinline__ T& element(const StridedView& view, int64_t b, int64_t h, int64_t row,
                                      int64_t column) {
  return static_cast<T*>(
      view.data)[b * view.stride[0] + h * view.stride[1] + row * view.stride[2] + column * view.stride[3]];
}

template <class T>
struct alignas(16) Vector {
  T at[16 / sizeof(T)];
};

template <class T>
__device__ __forceinline__ Vector<T> load_vector(const T* shared) {
  return *reinterpret_cast<const Vector<T>*>(shared);
}

__device__ __forceinline__ float exponential(float x) { return exp2_fast(x * kLog2E); }
__device__ __forceinline__ double exponential(double x) { return exp(x); }

template <class T>
__device__ __forceinline__ T infinity() {
  return T(ATTN_INFINITY);
}

// One number of 4 or 8 bytes; zero where it is not `wanted`.
template <class T>
__device__ __forceinline__ void copy_async_element(T* shared, const T* global, bool wanted) {
  asm volatile(
      "cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(uint32_t(__cvta_generic_to_shared(shared))),
      "l"(global), "n"(sizeof(T)), "r"(wanted ? int(sizeof(T)) : 0));
}

// 16 bytes; zero where they are not `wanted`. A predicate is cheaper than a number of bytes.
template <class T>
__device__ __forceinline__ void copy_async_vector(T* shared, const T* global, bool wanted) {
  asm volatile(
      "{\n .reg .pred ignore;\n setp.eq.u32 ignore, %2, 0;\n"
      " cp.async.cg.shared.global [%0], [%1], 16, ignore;\n}" ::"r"(
          uint32_t(__cvta_generic_to_shared(shared))),
      "l"(global), "r"(uint32_t(wanted)));
}

// The same number, as far as the compiler can tell a new one: what is computed from it is computed where that is
// written, and does not occupy registers through loops around it.
__device__ __forceinline__ int anew(int x) {
  int y;
  asm volatile("mov.b32 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

// This thread's part in copying slices of Rows x Columns of one head of a tensor into shared memory, as numbers of type
// Math, rows `Pitch` apart: a vector of every kPass-th row.
template <class In, int Rows, int Columns, int Pitch>
class SliceCopy {
 public:
  using Stored = typename Element<In>::Stored;
  using T = Math<In>;
  static constexpr int kVector = TileOf<In>::kVector;
  static constexpr int kVectors = Columns / kVector, kPass = kThreads / kVectors;
  static_assert(Rows % kPass == 0, "whole passes of the block");

  // Where the thread reads; rows are counted from its own first one.
  struct Start {
    const Stored* from;
    int rows;  // that exist
  };

  __device__ __forceinline__ SliceCopy(const StridedView& view, int b, int h, int64_t width)
      : thread_(anew(threadIdx.x)), stride_(view.stride[2]), columns_(int(width) - own_column()) {
    const Stored* head = &element<const Stored>(view, anew(b), anew(h), 0, 0);
    own_ = head + own_row() * stride_ + own_column();
    constexpr uint32_t kBytes = kVector * sizeof(Stored);
    whole_ = (uint32_t(uintptr_t(head)) | uint32_t(stride_ * sizeof(Stored))) % kBytes == 0 &&
             width % kVector == 0;
  }

  // Slices that begin at this row, of which those before `end` are read.
  __device__ __forceinline__ Start rows(int begin, int end) const {
    return {own_ + begin * stride_, end - begin - own_row()};
  }

  // What lies outside (rows and columns), and rows that are not wanted(row of the slice), become zero and are not read.
  template <class Wanted>
  __device__ __forceinline__ void operator()(T* stage, const Start& start, int column0,
                                             const Wanted& wanted) const {
    T* to = stage + own_row() * Pitch + own_column();
    const Stored* from = start.from + column0;
    if (whole_) {
#pragma unroll
      for (int pass = 0; pass < Rows; pass += kPass) {
        const bool inside = pass < start.rows && column0 < columns_ && wanted(own_row() + pass);
        copy_vector(to + pass * Pitch, from + pass * stride_, inside);
      }
    } else {
      // Element by element, lane beside lane: every kVectors-th column.
#pragma unroll 1
      for (int pass = 0; pass < Rows; pass += kPass) {
        const bool inside = pass < start.rows && wanted(own_row() + pass);
#pragma unroll 1
        for (int e = 0; e < kVector; e++) {
          const int n = own_element(e);
          copy_element(to + pass * Pitch + n, from + pass * stride_ + n, inside && column0 + n < columns_);
        }
      }
    }
  }

  __device__ __forceinline__ void operator()(T* stage, const Start& start, int column0) const {
    (*this)(stage, start, column0, [](int) { return true; });
  }

  // Numbers that this thread copied and that are infinite or NaN, or become so as operands, are replaced by zero. A row
  // without a partner has dS = 0, and what stands in it must not matter: 0 * NaN. To be called when the thread's copies
  // have arrived.
  __device__ __forceinline__ void drop_non_finite(T* stage) const {
    T* own = stage + own_row() * Pitch + own_column();
#pragma unroll
    for (int pass = 0; pass < Rows; pass += kPass) {
      if (whole_) {
        const Vector<T> x = load_vector(own + pass * Pitch);
        T zero = T(0);
#pragma unroll
        for (int e = 0; e < kVector; e++) zero += Element<In>::operand(x.at[e]) * T(0);
        if (zero == T(0)) continue;
      }
#pragma unroll 1
      for (int e = 0; e < kVector; e++) {
        T& x = own[pass * Pitch + (whole_ ? e : own_element(e))];
        if (Element<In>::operand(x) * T(0) != T(0)) x = T(0);
      }
    }
  }

 private:
  // Rows of four vectors, of which eight neighbouring threads write two: half the banks each. Where neighbouring rows are
  // not 16 banks apart, rows 4 apart are (4 * 20 = 16 mod 32), and row g of the threads' eight takes row
  // (g % 2) * 4 + g / 2. Where they are, only single elements need care, which eight rows write at a time: every second
  // row begins with another vector. Rows of eight vectors of float64 have all banks each; single elements, half of
  // them, need rows 16 banks apart, which those 4 apart are again (4 * 36 = 16 mod 32).
  static constexpr bool kHalfBanks = kVectors == 4 && Pitch % 32 == 16;
  static constexpr bool kSpreadRows = (kVectors == 4 && !kHalfBanks) || (kVectors == 8 && Pitch % 8 == 2);
  __device__ __forceinline__ int own_row() const {
    const int g = thread_ / kVectors;
    return kSpreadRows ? (g & ~7) + (g % 2) * 4 + g % 8 / 2 : g;
  }
  __device__ __forceinline__ int own_column() const { return thread_ % kVectors * kVector; }
  // The thread's columns where it copies single elements, from own_column() on.
  __device__ __forceinline__ int own_element(int e) const {
    const int turned = kHalfBanks ? (e + thread_ / kVectors / 2) % kVector : e;
    return thread_ % kVectors + kVectors * turned - own_column();
  }

  // float and double do not pass through registers; halves must, to become floats.
  static __device__ __forceinline__ void copy_vector(T* to, const Stored* from, bool inside) {
    if constexpr (sizeof(Stored) == sizeof(T)) {
      copy_async_vector(to, from, inside);
    } else {
      const uint2 four = inside ? *reinterpret_cast<const uint2*>(from) : uint2{0, 0};
      *reinterpret_cast<Vector<T>*>(to) = {
          {Element<In>::widen(uint16_t(four.x)), Element<In>::widen(uint16_t(four.x >> 16)),
           Element<In>::widen(uint16_t(four.y)), Element<In>::widen(uint16_t(four.y >> 16))}};
    }
  }

  static __device__ __forceinline__ void copy_element(T* to, const Stored* from, bool inside) {
    if constexpr (sizeof(Stored) == sizeof(T)) {
      copy_async_element(to, from, inside);
    } else {
      *to = inside ? Element<In>::widen(*from) : T(0);
    }
  }

  int thread_;
  const Stored* own_;
  int64_t stride_;
  int columns_;  // from the thread's own first one
  bool whole_;   // vectors are aligned, and lie wholly inside or outside
};

// Slices of columns, operands of the scores (tiles of queries or of keys), and slices of rows, for products with a
// score tile: rows of V or K with its rows, rows of Q or dO with its columns.
template <class In>
using QuerySlices = SliceCopy<In, TileOf<In>::kQueries, TileOf<In>::kSlice, TileOf<In>::kSlicePitch>;
template <class In>
using KeySlices = SliceCopy<In, TileOf<In>::kKeys, TileOf<In>::kSlice, TileOf<In>::kSlicePitch>;
template <class In>
using KeyRowSlices = SliceCopy<In, TileOf<In>::kSlice, TileOf<In>::kColumns, TileOf<In>::kKeyRowPitch>;
template <class In>
using QueryRowSlices = SliceCopy<In, TileOf<In>::kSlice, TileOf<In>::kColumns, TileOf<In>::kQueryRowPitch>;

// A thread's kVector neighbours of an output row; `left` of them exist.
template <class In>
__device__ __forceinline__ void store_vector(const StridedView& to, int b, int h, int row, int column,
                                             const Math<In>* x, int left) {
  using Stored = typename Element<In>::Stored;
  constexpr int kVector = 16 / sizeof(Math<In>);
  struct alignas(kVector * sizeof(Stored)) Packed {
    Stored at[kVector];
  } packed;
#pragma unroll
  for (int e = 0; e < kVector; e++) packed.at[e] = Element<In>::narrow(x[e]);
  Stored* first = &element<Stored>(to, b, h, row, 0) + column;  // last stride 1
  if (left >= kVector && uintptr_t(first) % sizeof(Packed) == 0) {
    *reinterpret_cast<Packed*>(first) = packed;
  } else {
#pragma unroll
    for (int e = 0; e < kVector; e++) {
      if (e < left) first[e] = packed.at[e];
    }
  }
}

}  // namespace attn_ext::cuda::simt
