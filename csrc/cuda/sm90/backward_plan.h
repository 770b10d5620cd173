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

// Tensor maps for boxes of `query_rows` queries and `key_rows` keys.
inline std::vector<TensorMap> backward_maps(const AttentionParams& p, const BackwardIO& io, int query_rows,
                                            int key_rows) {
  return {
      tensor_map(offsetof(BackwardParams, q), p.q, p.batch, p.heads_q, p.len_q, p.dim_qk, query_rows),
      tensor_map(offsetof(BackwardParams, k), p.k, p.batch, p.heads_kv, p.len_k, p.dim_qk, key_rows),
      tensor_map(offsetof(BackwardParams, v), p.v, p.batch, p.heads_kv, p.len_k, p.dim_v, key_rows),
      tensor_map(offsetof(BackwardParams, grad_out), io.grad_out, p.batch, p.heads_q, p.len_q, p.dim_v,
                 query_rows),
  };
}

struct BackwardLaunch {
  int64_t grid;
  int shared_bytes;
  std::vector<TensorMap> maps;
};

inline BackwardLaunch dkdv_launch(const AttentionParams& p, const BackwardIO& io) {
  const int head_dim = backward_bucket(p);
  return {p.batch * p.heads_kv * backward_tiles(p.len_k, kBackwardRows), dkdv_shared_bytes(head_dim),
          backward_maps(p, io, dkdv_queries(head_dim), kBackwardRows)};
}

inline BackwardLaunch dq_launch(const AttentionParams& p, const BackwardIO& io) {
  const int head_dim = backward_bucket(p);
  return {p.batch * p.heads_q * backward_tiles(p.len_q, kBackwardRows), dq_shared_bytes(head_dim),
          backward_maps(p, io, kBackwardRows, dq_keys(head_dim))};
}

// For a problem of half types without options of the full variants.
inline bool backward_possible(const AttentionParams& p, const BackwardIO& io) {
  if (backward_bucket(p) == 0) return false;
  const std::vector<TensorMap> maps = dkdv_launch(p, io).maps;  // dQ's differ in the boxes only
  return std::all_of(maps.begin(), maps.end(), is_encodable);
}

}  // namespace attn_ext::cuda::sm90
