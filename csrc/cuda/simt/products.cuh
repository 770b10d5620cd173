// The products, from shared memory into registers, and the ring of buffers that feeds them. Thread (y, x) of the block:
//
//   scores   s[r][c]      query y + 8 r, key x + 16 c
//   output   o[h][r][e]   row y + 8 r (queries) or 8 y + r (keys), column h * kHalf + kVector * x + e of the chunk
//
// The threads of a half warp have one y: they read the same vector of the left operand (a broadcast), and neighbouring
// vectors, or rows an odd number of vectors apart, of the right one. No access has a bank conflict.
#pragma once

#include "elements.cuh"

namespace attn_ext::cuda::simt {

__device__ __forceinline__ int thread_row() { return threadIdx.x / kThreadColumns; }
__device__ __forceinline__ int thread_column() { return threadIdx.x % kThreadColumns; }

template <class T>
using ScoreTile = T[Tile<T>::kRows][4];

template <class T, int Rows>
using OutputChunk = T[2][Rows][Tile<T>::kVector];

// Where score (r, c) of this thread lies in a tile in shared memory.
template <class T>
__device__ __forceinline__ T& own_score(T* tile, int r, int c) {
  return tile[(thread_row() + kThreadRows * r) * Tile<T>::kTilePitch + thread_column() + kThreadColumns * c];
}

// s += A B^T over a slice of columns: A (queries, slice), then B (keys, slice), in one stage.
template <class T>
__device__ __forceinline__ void multiply_rows(ScoreTile<T>& s, const T* stage) {
  using Z = Tile<T>;
  const T* a = stage + thread_row() * Z::kSlicePitch;
  const T* b = stage + (Z::kQueries + thread_column()) * Z::kSlicePitch;
#pragma unroll 1
  for (int k = 0; k < Z::kSlice; k += Z::kVector) {
    Vector<T> right[4];
#pragma unroll
    for (int c = 0; c < 4; c++) right[c] = load_vector(b + kThreadColumns * c * Z::kSlicePitch + k);
#pragma unroll
    for (int r = 0; r < Z::kRows; r++) {
      const Vector<T> left = load_vector(a + kThreadRows * r * Z::kSlicePitch + k);
#pragma unroll
      for (int e = 0; e < Z::kVector; e++) {
#pragma unroll
        for (int c = 0; c < 4; c++) s[r][c] += left.at[e] * right[c].at[e];
      }
    }
  }
}

// Halves First .. First + Count of o += A B: A (queries, slice of keys) of the score tile, B (slice of keys, columns).
template <int First, int Count, class T>
__device__ __forceinline__ void multiply_tile(OutputChunk<T, Tile<T>::kRows>& o, const T* tile, int key,
                                              const T* stage) {
  using Z = Tile<T>;
  const T* a = tile + thread_row() * Z::kTilePitch + key;
  const T* b = stage + Z::kVector * thread_column();
#pragma unroll 2
  for (int k = 0; k < Z::kSlice; k += Z::kVector) {
    Vector<T> right[Z::kVector][Count];
#pragma unroll
    for (int e = 0; e < Z::kVector; e++) {
#pragma unroll
      for (int h = 0; h < Count; h++) right[e][h] = load_vector(b + (k + e) * Z::kColumns + h * Z::kHalf);
    }
#pragma unroll
    for (int r = 0; r < Z::kRows; r++) {
      const Vector<T> left = load_vector(a + kThreadRows * r * Z::kTilePitch + k);
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
template <int First, int Count, class T>
__device__ __forceinline__ void multiply_transposed_tile(OutputChunk<T, Tile<T>::kKeyRows>& o, const T* tile,
                                                         int query, const T* stage) {
  using Z = Tile<T>;
  const T* a = tile + query * Z::kTilePitch + Z::kKeyRows * thread_row();
  const T* b = stage + Z::kVector * thread_column();
#pragma unroll 8
  for (int k = 0; k < Z::kSlice; k++) {
    Vector<T> left[Z::kKeyRows / Z::kVector], right[Count];
#pragma unroll
    for (int n = 0; n < Z::kKeyRows / Z::kVector; n++)
      left[n] = load_vector(a + k * Z::kTilePitch + n * Z::kVector);
#pragma unroll
    for (int h = 0; h < Count; h++) right[h] = load_vector(b + k * Z::kColumns + h * Z::kHalf);
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

// Two stages in shared memory: while the block computes with one slice, the next is on its way into the other.
template <class T>
class SliceRing {
 public:
  __device__ explicit SliceRing(T* stages) : stages_(stages) {}

  // The very first slice.
  template <class Copy>
  __device__ __forceinline__ void start(const Copy& copy_first) {
    copy_first(stages_ + current_ * Tile<T>::kStage);
    commit_copies();
  }

  // multiply(n, stage) for n = 0 .. slices-1 (at least one); slice 0 was copied by start() or by the call before. After
  // the last slice, `copy_following` fetches the first slice of whatever comes then. `mend` may change what this thread
  // copied before others see it.
  template <class Copy, class CopyFollowing, class Multiply, class Mend>
  __device__ __forceinline__ void run(int slices, const Copy& copy, const CopyFollowing& copy_following,
                                      const Multiply& multiply, const Mend& mend) {
#pragma unroll 1
    for (int n = 0; n < slices; n++) {
      T* arrived = stages_ + current_ * Tile<T>::kStage;
      current_ ^= 1;
      T* free = stages_ + current_ * Tile<T>::kStage;
      wait_for_copies<0>();
      mend(arrived);
      // Everyone's part of slice n is there, as is the score tile that was written before the first slice, and no one
      // reads the other stage any more.
      __syncthreads();
      if (n + 1 < slices) {
        copy(n + 1, free);
      } else {
        copy_following(free);
      }
      commit_copies();
      multiply(n, arrived);
    }
  }

  template <class Copy, class CopyFollowing, class Multiply>
  __device__ __forceinline__ void run(int slices, const Copy& copy, const CopyFollowing& copy_following,
                                      const Multiply& multiply) {
    run(slices, copy, copy_following, multiply, [](T*) {});
  }

 private:
  T* stages_;
  int current_ = 0;
};

template <class T, int M, int N>
__device__ __forceinline__ void clear(T (&x)[M][N]) {
#pragma unroll
  for (int m = 0; m < M; m++) {
#pragma unroll
    for (int n = 0; n < N; n++) x[m][n] = T(0);
  }
}

template <class T, int L, int M, int N>
__device__ __forceinline__ void clear(T (&x)[L][M][N]) {
#pragma unroll
  for (int l = 0; l < L; l++) clear(x[l]);
}

// Over the 16 threads that share the rows of a score tile.
template <class T>
__device__ __forceinline__ T row_max(T x) {
#pragma unroll
  for (int mask = 1; mask < kThreadColumns; mask *= 2) x = max(x, __shfl_xor_sync(0xffffffffu, x, mask));
  return x;
}

template <class T>
__device__ __forceinline__ T row_sum(T x) {
#pragma unroll
  for (int mask = 1; mask < kThreadColumns; mask *= 2) x += __shfl_xor_sync(0xffffffffu, x, mask);
  return x;
}

}  // namespace attn_ext::cuda::simt
