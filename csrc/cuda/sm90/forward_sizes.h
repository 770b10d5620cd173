// Tile sizes of the Hopper forward. Plain C++: the planner and the kernels read the same numbers.
#pragma once

#include "params.h"

namespace attn_ext::cuda::sm90 {

enum class ForwardVariant {
  kWide,
  // For causal and window rules at D 128: smaller tiles of keys waste less where the band cuts through them.
  kBanded
};

// One block an SM: a producer warpgroup, which only starts copies, and `consumers` warpgroups of 64 query rows each,
// against tiles of `keys` keys.
struct ForwardTile {
  int head_dim;  // the bucket
  int consumers;
  int keys;  // a multiple of 16
  // Of a thread. 65536 registers an SM are launched in equal parts and then shared out anew, in steps of 8.
  int producer_registers, consumer_registers;

  // Of K and of V. The producer is a tile ahead; more stages do not fit beside tiles of this size.
  static constexpr int kStages = 2;
  static constexpr int kBarrierBytes = 16 + 4 * kStages * 8;  // Q's two, and two for each stage of K and of V
  static constexpr int kAlignment = 1024;                     // of tiles: see tensor_copy.cuh

  ATTN_HOST_DEVICE constexpr int rows() const { return 64 * consumers; }
  ATTN_HOST_DEVICE constexpr int threads() const { return 128 * (consumers + 1); }
  ATTN_HOST_DEVICE constexpr int query_bytes() const { return tile_bytes(rows(), head_dim); }
  ATTN_HOST_DEVICE constexpr int key_bytes() const { return tile_bytes(keys, head_dim); }
  ATTN_HOST_DEVICE constexpr int shared_bytes() const {
    return kAlignment + query_bytes() + 2 * kStages * key_bytes() + kBarrierBytes;
  }
};

// The registers of a consumer hold S (keys / 2), P (keys / 4) and O (D / 2), besides some 60 others: 240 with two
// consumers, 160 with three. At D 64 three pay: 64 + 32 + 32 fit, and the exponentials, which bind there, have more warps
// to hide in. Above D 64 as many keys as fit, so that fewer tiles pay for barriers and row maxima; at D 192 and 256 the
// 227 KiB of shared memory end sooner.
ATTN_HOST_DEVICE constexpr ForwardTile forward_tile(int head_dim, ForwardVariant variant) {
  if (head_dim <= 64) return {head_dim, 3, 128, 32, 160};
  if (head_dim <= 128) return {head_dim, 2, variant == ForwardVariant::kBanded ? 128 : 176, 24, 240};
  return {head_dim, 2, head_dim <= 192 ? 112 : 80, 24, 240};
}

}  // namespace attn_ext::cuda::sm90
