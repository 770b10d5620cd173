// Which tile of rows a block of the one-dimensional grid works on. Host and device.
#pragma once

#include "../../attention_params.h"

namespace attn_ext::cuda {

struct BlockPlace {
  int batch, head, row;  // the tile's first row
};

// How many heads, of all batch elements, have their K and V together in so many bytes of cache.
ATTN_HOST_DEVICE inline uint32_t heads_in_cache(const AttentionParams& p, uint32_t cache) {
  const int64_t bytes = 2 * p.len_k * (p.dim_qk + p.dim_v);  // K and V of one head, which serves a group
  const uint32_t heads = uint32_t(p.batch * p.heads_q), group = uint32_t(p.heads_q) / uint32_t(p.heads_kv);
  const uint64_t cached = uint64_t(group) * (bytes > cache || bytes == 0 ? 1 : cache / uint32_t(bytes));
  return cached < heads ? uint32_t(cached) : heads;
}

// Without causal rule, neighbouring blocks take neighbouring tiles of one head, which share K and V in the L2 cache.
// With it, rows differ in length, and the longest go first so that the short ones fill the gaps at the end; among as
// many heads as have their K and V in about 16 MiB of L2 (an A100 has 40), which keeps sharing alive.
ATTN_HOST_DEVICE inline BlockPlace place_of_block(const AttentionParams& p, uint32_t block, int rows) {
  const uint32_t tiles = uint32_t((p.len_q + rows - 1) / rows);
  const uint32_t heads = uint32_t(p.batch * p.heads_q);
  const uint32_t section = p.causal == Causal::kNone ? 1 : heads_in_cache(p, 16 << 20);
  const uint32_t first_head = block / (section * tiles) * section;
  const uint32_t rank = block - first_head * tiles;
  const uint32_t members = heads - first_head < section ? heads - first_head : section;
  const uint32_t head = first_head + rank % members;
  return {int(head / uint32_t(p.heads_q)), int(head % uint32_t(p.heads_q)),
          int(tiles - 1 - rank / members) * rows};
}

}  // namespace attn_ext::cuda
