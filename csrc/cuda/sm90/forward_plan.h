// How the Hopper forward is launched. Host code of launch_plan.cpp.
#pragma once

#include <cmath>
#include <cstddef>
#include <vector>

#include "../tensor_map.h"
#include "forward_sizes.h"

namespace attn_ext::cuda::sm90 {

struct ForwardPlan {
  int head_dim;  // the bucket
  ForwardVariant variant;
  ForwardTile tile;
  ForwardParams params;
  std::vector<TensorMap> maps;
  int64_t tiles;  // of query rows, all heads

  // For a problem of half types with D and Dv up to 256, without options of the full variant.
  ForwardPlan(const AttentionParams& p, const ForwardOutput& output)
      : head_dim(bucket(std::max(p.dim_qk, p.dim_v))),
        variant(head_dim == 128 && has_band(p) ? ForwardVariant::kBanded : ForwardVariant::kWide),
        tile(forward_tile(head_dim, variant)), params{{}, {}, {}, p, output},
        tiles(p.batch * p.heads_q * ((p.len_q + tile.rows() - 1) / tile.rows())) {
    maps = {
        tensor_map(offsetof(ForwardParams, q), p.q, p.batch, p.heads_q, p.len_q, p.dim_qk, tile.rows()),
        tensor_map(offsetof(ForwardParams, k), p.k, p.batch, p.heads_kv, p.len_k, p.dim_qk, tile.keys),
        tensor_map(offsetof(ForwardParams, v), p.v, p.batch, p.heads_kv, p.len_k, p.dim_v, tile.keys),
    };
  }

  // Blocks count tiles in 32 bits, up to a round past the end. The maximum of the scores is that of the scaled scores
  // only if the scale is positive, as a float.
  bool possible(int blocks) const {
    const float scale = float(params.problem.scale);
    return tiles + 2 * int64_t(blocks) < int64_t(1) << 31 && scale > 0 && std::isfinite(scale) &&
           std::all_of(maps.begin(), maps.end(), is_encodable);
  }

 private:
  static int bucket(int64_t dim) {
    for (const int size : {64, 96, 128, 192}) {
      if (dim <= size) return size;
    }
    return 256;
  }
  static bool has_band(const AttentionParams& p) {
    return p.causal != Causal::kNone || p.window_left >= 0 || p.window_right >= 0;
  }
};

}  // namespace attn_ext::cuda::sm90
