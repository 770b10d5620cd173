// Which keys a block of the Hopper backward owns, which tiles of queries it visits, and after how many others it adds to dQ
// of one (backward_sums.cuh). Host and device.
#pragma once

#include "../tile/visibility.cuh"

namespace attn_ext::cuda::sm90 {

struct KeyBlock {
  int batch, head_kv, first_key;
};

// What a block works on, by the number that it takes when it starts. In a head the numbers grow with the keys, since blocks
// wait for those with smaller keys. Numbers that follow each other belong to different heads: blocks of one head would all
// start at once, and each wait for the one before. But only as many heads take turns as have Q, dO and the float32 dQ of
// their group in about 32 MiB of L2 (an H100 has 50 MB), where all blocks of a head find them.
ATTN_HOST_DEVICE inline KeyBlock key_block_of_number(const AttentionParams& p, uint32_t number, int keys) {
  constexpr int64_t kCache = 32 << 20;
  const uint32_t blocks = uint32_t((p.len_k + keys - 1) / keys), heads = uint32_t(p.batch * p.heads_kv);
  const int64_t cached = kCache / (p.group() * p.len_q * (6 * p.dim_qk + 2 * p.dim_v));
  const uint32_t section = cached < 1 ? 1 : cached < heads ? uint32_t(cached) : heads;
  const uint32_t first_head = number / (section * blocks) * section;
  const uint32_t members = heads - first_head < section ? heads - first_head : section;
  const uint32_t rank = number - first_head * blocks, head = first_head + rank % members;
  return {int(head / uint32_t(p.heads_kv)), int(head % uint32_t(p.heads_kv)), int(rank / members) * keys};
}

// Tiles begin .. end - 1 of the queries see some of a block's keys, tiles whole_begin .. whole_end - 1 see all of them and
// need no mask.
struct QueryTiles {
  int begin = 0, end = 0, whole_begin = 0, whole_end = 0;

  // For keys first_key .. first_key + keys - 1 and tiles of `queries`.
  ATTN_HOST_DEVICE QueryTiles(const Visibility& visible, int first_key, int keys, int queries) {
    const KeyRange any = visible.queries_of_keys(first_key, first_key + keys - 1),
                   all = visible.queries_of_all_keys(first_key, first_key + keys - 1);
    begin = any.begin / queries;
    end = (any.end + queries - 1) / queries;
    whole_begin = (all.begin + queries - 1) / queries;
    whole_end = all.end / queries > whole_begin ? all.end / queries : whole_begin;
  }

  ATTN_HOST_DEVICE bool whole(int tile) const {
    return uint32_t(tile - whole_begin) < uint32_t(whole_end - whole_begin);
  }
};

// How many blocks with smaller keys visit a tile that the block of keys first_key .. visits, too. There is no gap between
// those that do: the rules hide keys at both ends only.
ATTN_HOST_DEVICE inline int turn_of_block(const Visibility& visible, int first_key, int keys, int tile,
                                          int queries) {
  const int first_query = tile * queries;
  return first_key / keys - visible.of_queries(first_query, first_query + queries - 1).begin / keys;
}

}  // namespace attn_ext::cuda::sm90
