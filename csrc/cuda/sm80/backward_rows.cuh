// The first step of every backward: what the other kernels need to know of each query row.
//   delta = rowsum(dO * O) - dLSE, so that dS = P * (dP - delta)
// and the row's LSE, in two parts or joined (BackwardParams says in which arrays). dO is taken as the products see it, in
// TF32 rounded: of a row that attends to one key alone, dP is delta then, and dS is 0.
#pragma once

#include "../kernel_params.h"
#include "../simt/elements.cuh"
#include "../sm90/backward_sizes.h"
#include "backward_sizes.h"

namespace attn_ext::cuda {

template <class In>
struct BackwardRows {
  using Element = simt::Element<In>;
  using Stored = typename Element::Stored;
  using T = typename Element::Math;
  static constexpr int kVector = 16 / sizeof(Stored);
  // Only kernels of half types read row_terms or take turns.
  static constexpr bool kIsHalf = sizeof(Stored) == 2;

  // This lane's share of sum(x * y), eight lanes a row; `nonzero` tells whether any x is.
  static __device__ __forceinline__ T dot(const Stored* x, const Stored* y, int size, bool wide,
                                          bool& nonzero) {
    const int lane = threadIdx.x % kBackwardRowLanes;
    T sum = 0;
    if (wide) {
      for (int d = lane * kVector; d < size; d += kBackwardRowLanes * kVector) {
        struct alignas(16) Vector {
          Stored at[kVector];
        };
        const Vector a = *reinterpret_cast<const Vector*>(x + d), c = *reinterpret_cast<const Vector*>(y + d);
#pragma unroll
        for (int e = 0; e < kVector; e++) add(sum, a.at[e], c.at[e], nonzero);
      }
    } else {
      for (int d = lane; d < size; d += kBackwardRowLanes) add(sum, x[d], y[d], nonzero);
    }
    return sum;
  }

  static __device__ __forceinline__ void add(T& sum, Stored x, Stored y, bool& nonzero) {
    const T a = Element::widen(x);
    nonzero |= a != T(0);
    sum += a * Element::operand(Element::widen(y));
  }

  static __device__ __forceinline__ bool wide(const StridedView& view, int64_t columns) {
    const int64_t steps = view.stride[0] | view.stride[1] | view.stride[2] | columns;
    return reinterpret_cast<uintptr_t>(view.data) % 16 == 0 && steps % kVector == 0;
  }

  static __device__ __forceinline__ void run(const BackwardParams& params) {
    const AttentionParams& p = params.problem;
    const BackwardIO& io = params.io;
    const int64_t thread = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (kIsHalf && thread < params.turn_count) params.turns[thread] = 0;  // fewer than rows
    const int64_t rows = params.row_terms != nullptr ? params.row_stride : p.len_q;
    const int64_t tiles = (rows + kBackwardRowsPerBlock - 1) / kBackwardRowsPerBlock;
    const int64_t head_of_all = blockIdx.x / tiles, b = head_of_all / p.heads_q, h = head_of_all % p.heads_q;
    const int64_t i = blockIdx.x % tiles * kBackwardRowsPerBlock + threadIdx.x / kBackwardRowLanes;

    T maximum = simt::infinity<T>(), log = 0, delta = 0;  // of an empty row: exp(s - maximum) = 0
    bool nonzero = false;
    if (i < p.len_q) {
      const T* parts = reinterpret_cast<const T*>(io.lse_parts.at(b, h, i, 0));
      const T first = parts[0];
      log = parts[1];
      if (first != -simt::infinity<T>()) maximum = first;
      if (first != -simt::infinity<T>() && i < p.valid_queries(b)) {
        delta = dot(reinterpret_cast<const Stored*>(io.out.at(b, h, i, 0)),
                    reinterpret_cast<const Stored*>(io.grad_out.at(b, h, i, 0)), int(p.dim_v),
                    wide(io.out, p.dim_v) && wide(io.grad_out, p.dim_v), nonzero);
      }
    }
#pragma unroll
    for (int step = 1; step < kBackwardRowLanes; step *= 2)
      delta += __shfl_xor_sync(0xffffffffu, delta, step);
    // With out 0 (a sink and no key, say) the row's dO does not matter, not even NaN.
    const uint32_t row_lanes = ((1u << kBackwardRowLanes) - 1)
                               << (threadIdx.x % 32 / kBackwardRowLanes * kBackwardRowLanes);
    if ((__ballot_sync(0xffffffffu, nonzero) & row_lanes) == 0) delta = 0;
    if (threadIdx.x % kBackwardRowLanes != 0) return;

    const bool empty = maximum == simt::infinity<T>();
    if (i < p.len_q) {
      if (io.grad_lse.present) delta -= *reinterpret_cast<const T*>(io.grad_lse.at(b, h, i, 0));
      const int64_t row = head_of_all * p.len_q + i;
      if (params.row_max != nullptr) {
        static_cast<T*>(params.row_max)[row] = maximum;
        static_cast<T*>(params.row_log)[row] = log;
        static_cast<T*>(params.row_delta)[row] = delta;
      }
    }
    if (kIsHalf && params.row_terms != nullptr && i < rows) {
      float* terms = params.row_terms + (head_of_all * params.row_stride + i) * params.row_term_size;
      const float minus_delta = empty ? 0.0f : -float(delta);
      const float minus_lse = -float(maximum + log) * kLog2E;
      if (params.row_term_size == sm90::kTermSize) {
        const int row = int(i % params.row_tile);
        float* tile = terms - row * sm90::kTermSize;
        tile[sm90::lse_place(row)] = minus_lse;
        float* deltas = tile + params.row_tile + sm90::delta_place(row);
        deltas[0] = deltas[2] = minus_delta;
      } else if (params.row_term_size == 2) {
        *reinterpret_cast<float2*>(terms) = {minus_lse, minus_delta};
      } else {
        *reinterpret_cast<float4*>(terms) = {float(maximum), -float(log) * kLog2E, minus_delta, 0.0f};
      }
    }
  }
};

}  // namespace attn_ext::cuda
