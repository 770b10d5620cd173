// What computes the products (CUDA cores or tensor cores) decides which numbers a thread owns; the algorithms around them
// are the same. Here: how they find a thread's numbers, and the ring of buffers that feeds the products.
#pragma once

#include "ffma.cuh"
#include "tf32.cuh"

namespace attn_ext::cuda::simt {

template <class In>
struct CoresFor {
  using Type = Ffma<Math<In>>;
};
template <>
struct CoresFor<tf32> {
  using Type = Tf32;
};
template <class In>
using Cores = typename CoresFor<In>::Type;

// A thread's part of a tile of scores: rows own_row(r), columns own_column(c).
template <class Z>
using ScoreTile = typename Z::T[Z::kRows][Z::kRowScores];

// Its part of an output chunk, of which it has `Rows` rows.
template <class Z, int Rows>
using OutputChunk = typename Z::T[2][Rows][Z::kOutputColumns];

template <class Z>
__device__ __forceinline__ int own_row(int r) {
  return Z::first_row() + Z::kRowStep * r;
}

template <class Z>
__device__ __forceinline__ int own_column(int c) {
  return Z::first_column() + Z::column_step(c);
}

// The threads that share rows of scores, counted through the block; the first of them does what is done once a row.
template <class Z>
__device__ __forceinline__ int row_group() {
  return threadIdx.x / Z::kRowThreads;
}

template <class Z>
__device__ __forceinline__ bool leads_row() {
  return threadIdx.x % Z::kRowThreads == 0;
}

// Where score (r, c) of this thread lies in a tile in shared memory.
template <class Z>
__device__ __forceinline__ typename Z::T& own_score(typename Z::T* tile, int r, int c) {
  return tile[own_row<Z>(r) * Z::kTilePitch + Z::tile_column(c)];
}

// Two stages in shared memory: while the block computes with one slice, the next is on its way into the other.
template <class Z>
class SliceRing {
 public:
  using T = typename Z::T;

  __device__ explicit SliceRing(T* stages) : stages_(stages) {}

  // The very first slice.
  template <class Copy>
  __device__ __forceinline__ void start(const Copy& copy_first) {
    copy_first(stages_ + current_ * Z::kStage);
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
      T* arrived = stages_ + current_ * Z::kStage;
      current_ ^= 1;
      T* free = stages_ + current_ * Z::kStage;
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

// Over the threads that share the rows of a score tile.
template <class Z>
__device__ __forceinline__ typename Z::T row_max(typename Z::T x) {
#pragma unroll
  for (int mask = 1; mask < Z::kRowThreads; mask *= 2) x = max(x, __shfl_xor_sync(0xffffffffu, x, mask));
  return x;
}

template <class Z>
__device__ __forceinline__ typename Z::T row_sum(typename Z::T x) {
#pragma unroll
  for (int mask = 1; mask < Z::kRowThreads; mask *= 2) x += __shfl_xor_sync(0xffffffffu, x, mask);
  return x;
}

}  // namespace attn_ext::cuda::simt
