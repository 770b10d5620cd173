// A row's softmax that is still in pieces: what the warps of a block, the splits of a row and the sink contribute.
#pragma once

#include "../../attention_params.h"
#include "../tile/half.cuh"
#include "../tile/math.cuh"

namespace attn_ext::cuda {

constexpr float kLargestFloat = 3.4028234663852886e38f;

// e^x for x <= 0 and NaN. The subtraction of the maximum comes before, in natural units: finfo.min * log2(e) would be
// -inf, and a mask of finfo.min hides nothing from a row that has only that.
__device__ __forceinline__ float exp_fast(float x) { return exp2_fast(x * kLog2E); }

// What to subtract from scores whose maximum is `max`: while nothing is visible, exp(-inf - 0) = 0 and not NaN.
__device__ __forceinline__ float exponent_shift(float max) { return max == -ATTN_INFINITY ? 0.0f : max; }

// Some of a row's scores: their maximum, natural units, and the sum of exp(s - max); -inf and 0 if all are -inf.
struct RowSum {
  float max, sum;

  // Adds other scores to these. fmaxf drops NaN, but then a sum is NaN.
  __device__ __forceinline__ void join(RowSum other) {
    const float both = fmaxf(max, other.max), shift = exponent_shift(both);
    sum = sum * exp_fast(max - shift) + other.sum * exp_fast(other.max - shift);
    max = both;
  }

  // The factor that brings values summed under `before` to this maximum.
  __device__ __forceinline__ float rescale(float before) const {
    return exp_fast(before - exponent_shift(max));
  }
};

// Where an element lies whose type is known; view.at() would look at dtype.
template <class T>
__device__ __forceinline__ T* element(const StridedView& view, int64_t b, int64_t h, int64_t row,
                                      int64_t column) {
  return static_cast<T*>(view.data) + b * view.stride[0] + h * view.stride[1] + row * view.stride[2] +
         column * view.stride[3];
}

// An element of a tensor of q's dtype or float32.
template <class Half>
__device__ __forceinline__ float read_float(const StridedView& view, int64_t b, int64_t h, int64_t row,
                                            int64_t column) {
  if (view.dtype == DType::kFloat32) return *element<float>(view, b, h, row, column);
  return to_float<Half>(*element<uint16_t>(view, b, h, row, column));
}

// The sink joins the sum, but it has no value: returns the factor that turns sum_j exp(s - max) v into the output.
// `row` becomes the whole sum, sink included.
template <class Half>
__device__ __forceinline__ float finish_row(const AttentionParams& p, int64_t h, RowSum& row) {
  const RowSum keys = row;
  if (p.sinks.present) row.join({read_float<Half>(p.sinks, 0, h, 0, 0), 1.0f});
  return row.rescale(keys.max) / row.sum * float(p.dropout.threshold == 0 ? 1.0 : p.dropout.scale());
}

__device__ __forceinline__ void write_lse(const ForwardOutput& output, int64_t b, int64_t h, int64_t i,
                                          RowSum row) {
  const bool empty = row.sum == 0.0f;
  const float max = empty ? -ATTN_INFINITY : row.max, log_sum = empty ? 0.0f : logf(row.sum);
  if (output.lse.present) *element<float>(output.lse, b, h, i, 0) = max + log_sum;
  if (output.lse_parts.present) {
    *element<float>(output.lse_parts, b, h, i, 0) = max;
    *element<float>(output.lse_parts, b, h, i, 1) = log_sum;
  }
}

}  // namespace attn_ext::cuda
