// The last step of the backward, for the gradients that are sums over many rows: one block a query head, fixed order.
//   d(slope) = sum of the partial sums that the dQ kernel left for each tile of queries
//   d(sink)  = -sum_i exp(sink - lse_i) * delta_i, since the sink's own value is 0
#pragma once

#include "../simt/elements.cuh"
#include "../kernel_params.h"
#include "backward_sizes.h"

namespace attn_ext::cuda {

template <class T>
struct BackwardSums {
  // Sum over the block's threads, in every thread.
  static __device__ __forceinline__ T over_block(T x) {
    __shared__ T sums[kBackwardSumThreads];
    __syncthreads();  // all have read the sum before
    sums[threadIdx.x] = x;
#pragma unroll 1
    for (int half = kBackwardSumThreads / 2; half > 0; half /= 2) {
      __syncthreads();  // the shares to be added are there
      if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
    }
    __syncthreads();  // and the total
    return sums[0];
  }

  static __device__ __forceinline__ void run(const BackwardParams& params) {
    const AttentionParams& p = params.problem;
    const BackwardIO& io = params.io;
    const int64_t h = blockIdx.x;
    if (io.grad_alibi_slopes.present) {
      for (int64_t first = 0; first < io.alibi_batch; first++) {
        T sum = 0;
        for (int64_t b = first; b < p.batch; b += io.alibi_batch) {
          const T* parts =
              static_cast<const T*>(params.alibi_sums) + (b * p.heads_q + h) * params.alibi_tiles;
#pragma unroll 1  // once, unless there are more than 8192 queries
          for (int64_t t = threadIdx.x; t < params.alibi_tiles; t += kBackwardSumThreads) sum += parts[t];
        }
        sum = over_block(sum);
        if (threadIdx.x == 0) write(io.grad_alibi_slopes.at(first, h, 0, 0), io.grad_alibi_slopes.dtype, sum);
      }
    }
    if (io.grad_sinks.present) {
      const T sink = read(p.sinks.at(0, h, 0, 0), p.sinks.dtype);
      T sum = 0;
      for (int64_t b = 0; b < p.batch; b++) {
        const int64_t row0 = (b * p.heads_q + h) * p.len_q;
        for (int64_t i = threadIdx.x; i < p.len_q; i += kBackwardSumThreads) {
          // Two parts one after the other: sink - (max + log) would lose the low bits of a large maximum.
          const T maximum = static_cast<const T*>(params.row_max)[row0 + i],
                  log = static_cast<const T*>(params.row_log)[row0 + i];
          const T prob = sink == -simt::infinity<T>() ? T(0) : simt::exponential(sink - maximum - log);
          if (prob != T(0)) sum -= prob * static_cast<const T*>(params.row_delta)[row0 + i];
        }
      }
      sum = over_block(sum);
      if (threadIdx.x == 0) write(io.grad_sinks.at(0, h, 0, 0), io.grad_sinks.dtype, sum);
    }
  }

 private:
  // Slopes and sinks are float64 where q is; beside other types they are float32 or of q's type.
  static __device__ __forceinline__ T read(const char* address, DType dtype) {
    if constexpr (sizeof(T) == 8) {
      return *reinterpret_cast<const T*>(address);
    } else {
      switch (dtype) {
        case DType::kFloat32: return *reinterpret_cast<const float*>(address);
        case DType::kBFloat16: return to_float<bf16>(*reinterpret_cast<const uint16_t*>(address));
        default: return to_float<f16>(*reinterpret_cast<const uint16_t*>(address));
      }
    }
  }

  static __device__ __forceinline__ void write(char* address, DType dtype, T x) {
    if constexpr (sizeof(T) == 8) {
      *reinterpret_cast<T*>(address) = x;
    } else {
      switch (dtype) {
        case DType::kFloat32: *reinterpret_cast<float*>(address) = x; break;
        case DType::kBFloat16: *reinterpret_cast<uint16_t*>(address) = to_half<bf16>(x); break;
        default: *reinterpret_cast<uint16_t*>(address) = to_half<f16>(x);
      }
    }
  }
};

}  // namespace attn_ext::cuda
