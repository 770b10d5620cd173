// The products on CUDA cores, from shared memory into registers. Thread (y, x) of the block:
//
//   scores   s[r][c]      query y + 8 r, key x + 16 c
//   output   o[h][r][e]   row y + 8 r (queries) or 8 y + r (keys), column h * kHalf + kVector * x + e of the chunk
//
// The threads of a half warp have one y: they read the same vector of the left operand (a broadcast), and neighbouring
// vectors, or rows an odd number of vectors apart, of the right one. No access has a bank conflict.
#pragma once

#include "../tile/philox.cuh"
#include "elements.cuh"

namespace attn_ext::cuda::simt {

template <class Number>
struct Ffma : CudaCoreTile<Number> {
  using T = Number;
  using Z = CudaCoreTile<T>;

  static constexpr int kRowThreads = Z::kThreadColumns;  // that share a row of scores
  static constexpr int kRowScores = 4;                   // of a thread
  static constexpr int kRowStep = Z::kThreadRows;
  static constexpr int kOutputColumns = Z::kVector;  // of a thread in half a chunk

  static __device__ __forceinline__ int thread_row() { return threadIdx.x / Z::kThreadColumns; }
  static __device__ __forceinline__ int thread_column() { return threadIdx.x % Z::kThreadColumns; }

  static __device__ __forceinline__ int first_row() { return thread_row(); }
  static __device__ __forceinline__ int first_column() { return thread_column(); }
  static __device__ constexpr int column_step(int c) { return Z::kThreadColumns * c; }
  static __device__ __forceinline__ int tile_column(int c) { return first_column() + column_step(c); }
  static __device__ __forceinline__ int key_row(int r) { return Z::kKeyRows * thread_row() + r; }
  static __device__ __forceinline__ int output_column(int half, int) {
    return half * Z::kHalf + Z::kVector * thread_column();
  }

  // s += A B^T over a slice of columns: A (queries, slice), then B (keys, slice), in one stage.
  static __device__ __forceinline__ void multiply_rows(T (&s)[Z::kRows][4], const T* stage) {
    const T* a = stage + thread_row() * Z::kSlicePitch;
    const T* b = stage + (Z::kQueries + thread_column()) * Z::kSlicePitch;
#pragma unroll 1
    for (int k = 0; k < Z::kSlice; k += Z::kVector) {
      Vector<T> right[4];
#pragma unroll
      for (int c = 0; c < 4; c++) right[c] = load_vector(b + Z::kThreadColumns * c * Z::kSlicePitch + k);
#pragma unroll
      for (int r = 0; r < Z::kRows; r++) {
        const Vector<T> left = load_vector(a + Z::kThreadRows * r * Z::kSlicePitch + k);
#pragma unroll
        for (int e = 0; e < Z::kVector; e++) {
#pragma unroll
          for (int c = 0; c < 4; c++) s[r][c] += left.at[e] * right[c].at[e];
        }
      }
    }
  }

  // Halves First .. First + Count of o += A B: A (queries, slice of keys) of the score tile, B (slice of keys, columns).
  template <int First, int Count>
  static __device__ __forceinline__ void multiply_tile(T (&o)[2][Z::kRows][Z::kVector], const T* tile,
                                                       int key, const T* stage) {
    const T* a = tile + thread_row() * Z::kTilePitch + key;
    const T* b = stage + Z::kVector * thread_column();
#pragma unroll 2
    for (int k = 0; k < Z::kSlice; k += Z::kVector) {
      Vector<T> right[Z::kVector][Count];
#pragma unroll
      for (int e = 0; e < Z::kVector; e++) {
#pragma unroll
        for (int h = 0; h < Count; h++)
          right[e][h] = load_vector(b + (k + e) * Z::kKeyRowPitch + h * Z::kHalf);
      }
#pragma unroll
      for (int r = 0; r < Z::kRows; r++) {
        const Vector<T> left = load_vector(a + Z::kThreadRows * r * Z::kTilePitch + k);
#pragma unroll
        for (int e = 0; e < Z::kVector; e++) {
#pragma unroll
          for (int h = 0; h < Count; h++) {
#pragma unroll
            for (int d = 0; d < Z::kVector; d++) o[First + h][r][d] += left.at[e] * right[e][h].at[d];
          }
        }
      }
    }
  }

  // Halves First .. First + Count of o += A^T B: A (slice of queries, keys) of the score tile, B (slice of queries,
  // columns).
  template <int First, int Count>
  static __device__ __forceinline__ void multiply_transposed_tile(T (&o)[2][Z::kKeyRows][Z::kVector],
                                                                  const T* tile, int query, const T* stage) {
    const T* a = tile + query * Z::kTilePitch + Z::kKeyRows * thread_row();
    const T* b = stage + Z::kVector * thread_column();
#pragma unroll 8
    for (int k = 0; k < Z::kSlice; k++) {
      Vector<T> left[Z::kKeyRows / Z::kVector], right[Count];
#pragma unroll
      for (int n = 0; n < Z::kKeyRows / Z::kVector; n++)
        left[n] = load_vector(a + k * Z::kTilePitch + n * Z::kVector);
#pragma unroll
      for (int h = 0; h < Count; h++) right[h] = load_vector(b + k * Z::kQueryRowPitch + h * Z::kHalf);
#pragma unroll
      for (int r = 0; r < Z::kKeyRows; r++) {
#pragma unroll
        for (int h = 0; h < Count; h++) {
#pragma unroll
          for (int d = 0; d < Z::kVector; d++)
            o[First + h][r][d] += left[r / Z::kVector].at[r % Z::kVector] * right[h].at[d];
        }
      }
    }
  }

  // The scores that dropout keeps. One Philox call serves 8 neighbouring keys of a row: half of the 16 threads of a row
  // draw for it, the other half for the next row, and the bits change hands.
  static __device__ __forceinline__ uint32_t kept(const Dropout& dropout, int i0, int j0, int h, int b) {
    static_assert(Z::kKeys == 8 * 8 && kRowThreads == 2 * 8, "8 groups of 8 keys for two rows at a time");
    const uint64_t key = dropout.key();
    const int x = anew(threadIdx.x) % kRowThreads;
    uint32_t result = 0;
#pragma unroll 1
    for (int r = 0; r < Z::kRows; r += 2) {
      const int i = i0 + thread_row() + Z::kThreadRows * (r + x / 8);
      const Philox4 random = philox(key, uint32_t(j0 / 8 + x % 8), uint32_t(i), uint32_t(h), uint32_t(b));
      uint32_t bits = 0;
#pragma unroll
      for (int n = 0; n < 8; n++) {
        const uint32_t number = random.word[n / 2] >> (16 * (n % 2)) & 0xffffu;
        bits |= uint32_t(number >= dropout.threshold) << n;
      }
#pragma unroll
      for (int half = 0; half < 2; half++) {
#pragma unroll
        for (int c = 0; c < 4; c++) {  // key x + 16 c is number x % 8 of group 2 c + x / 8
          const uint32_t group = __shfl_sync(0xffffffffu, bits, 8 * half + 2 * c + x / 8, kRowThreads);
          result |= (group >> (x % 8) & 1) << (4 * (r + half) + c);
        }
      }
    }
    return result;
  }
};

}  // namespace attn_ext::cuda::simt
