// Joins the splits of each row, in their order: one block a row.
//
//   m = max_s m_s,  l = sum_s exp(m_s - m) l_s,  out = sum_s exp(m_s - m) acc_s / l
#pragma once

#include "../kernel_params.h"
#include "decode_row.cuh"
#include "decode_sizes.h"

namespace attn_ext::cuda {

template <class Half>
__device__ __forceinline__ void combine_splits(const ForwardParams& p) {
  const AttentionParams& problem = p.problem;
  const unsigned len_q = unsigned(problem.len_q), heads_q = unsigned(problem.heads_q), row = blockIdx.x;
  const unsigned i = row % len_q, h = row / len_q % heads_q, b = row / len_q / heads_q;
  const int64_t rows = gridDim.x;

  static_assert(kMaxSplits <= kCombineThreads);
  __shared__ RowSum part[kMaxSplits];
  __shared__ float weight[kMaxSplits];
  const bool has_split = threadIdx.x < p.splits;  // to bring
  if (has_split) {
    const float* parts = p.partial_parts + (threadIdx.x * rows + row) * 2;
    part[threadIdx.x] = {parts[0], parts[1]};
  }
  __syncthreads();  // every part is there
  RowSum total = {-ATTN_INFINITY, 0.0f};
  for (int s = 0; s < p.splits; s++) total.max = fmaxf(total.max, part[s].max);
  if (has_split) weight[threadIdx.x] = total.rescale(part[threadIdx.x].max);
  __syncthreads();  // and every weight
  for (int s = 0; s < p.splits; s++) total.sum += weight[s] * part[s].sum;

  const bool empty = total.sum == 0.0f;  // out is 0 then, whatever hidden values were multiplied by 0
  const float factor = finish_row<Half>(problem, h, total);
  uint16_t* out_row = element<uint16_t>(p.output.out, b, h, i, 0);
  for (int64_t column = threadIdx.x; column < problem.dim_v; column += kCombineThreads) {
    const float* partial = p.partial_out + row * problem.dim_v + column;
    float sum = 0.0f;
#pragma unroll 8  // loads under way at once
    for (int s = 0; s < p.splits; s++) sum += weight[s] * partial[s * rows * problem.dim_v];
    out_row[column] = to_half<Half>(empty ? 0.0f : sum * factor);
  }
  if (threadIdx.x == 0) write_lse(p.output, b, h, i, total);
}

}  // namespace attn_ext::cuda
