// How the Hopper backward is launched. Host code of launch_plan.cpp.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include "../tensor_map.h"
#include "backward_sizes.h"

namespace attn_ext::cuda::sm90 {

// The kernels' bucket for a head dim, 0 where there is none.
inline int backward_bucket(const AttentionParams& p) {
  for (const int size : {64, 96, 128}) {
    if (std::max(p.dim_qk, p.dim_v) <= size) return size;
  }
  return 0;
}

inline int64_t query_tiles(const AttentionParams& p) {
  const int rows = backward_queries(backward_bucket(p));
  return (p.len_q + rows - 1) / rows;
}

// Blocks of the kernel that multiplies, and of that which puts dQ in order.
inline int64_t key_blocks(const AttentionParams& p) {
  return p.batch * p.heads_kv * ((p.len_k + kBackwardKeys - 1) / kBackwardKeys);
}
inline int64_t query_blocks(const AttentionParams& p) { return p.batch * p.heads_q * query_tiles(p); }

inline std::vector<TensorMap> backward_maps(const AttentionParams& p, const BackwardIO& io) {
  const int queries = backward_queries(backward_bucket(p));
  return {
      tensor_map(offsetof(BackwardParams, q), p.q, p.batch, p.heads_q, p.len_q, p.dim_qk, queries),
      tensor_map(offsetof(BackwardParams, k), p.k, p.batch, p.heads_kv, p.len_k, p.dim_qk, kBackwardKeys),
      tensor_map(offsetof(BackwardParams, v), p.v, p.batch, p.heads_kv, p.len_k, p.dim_v, kBackwardKeys),
      tensor_map(offsetof(BackwardParams, grad_out), io.grad_out, p.batch, p.heads_q, p.len_q, p.dim_v,
                 queries),
  };
}

// For a problem of half types without options of the full variants.
inline bool backward_possible(const AttentionParams& p, const BackwardIO& io) {
  if (backward_bucket(p) == 0 || std::max(key_blocks(p), query_blocks(p)) > INT32_MAX) return false;
  const std::vector<TensorMap> maps = backward_maps(p, io);
  return std::all_of(maps.begin(), maps.end(), is_encodable);
}

}  // namespace attn_ext::cuda::sm90
