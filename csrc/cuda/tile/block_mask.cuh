// Block masks (attention_params.h) in the kernels: which tiles of scores a block of threads visits. A tile is as large as
// a block of the mask or smaller and does not cross its border: it lies in one block (decode.cuh alone has others).
//
// The map is read by whole warps, 32 entries at once: one after the other, each would cost the latency of a load. Every
// warp does it for itself. All come to the same tiles, so barriers and copies stay in step.
#pragma once

#include "../../attention_params.h"
#include "math.cuh"

namespace attn_ext::cuda {

// A warp's walk along numbered things, upwards (kStep 1) or downwards (-1): the first from number n on that is_filled says
// yes to; `end` if there is none before it. No lane keeps anything, and there is one ballot in one loop: so the assembler
// sees that the result is the same in all lanes, and need not guard every shuffle in a loop that it leads through.
template <int kStep, class IsFilled>
__device__ __forceinline__ int next_filled(int n, int end, IsFilled is_filled) {
  for (;; n += 32 * kStep) {
    const int own = n + kStep * (int(threadIdx.x) % 32);
    const uint32_t filled = __ballot_sync(0xffffffffu, (end - own) * kStep <= 0 || is_filled(own));
    if (filled != 0) return n + kStep * (__ffs(filled) - 1);
  }
}

// The keys that a query sees by the bits of a block's entry, 32 of the block: bit j is key number key / 32 * 32 + j.
__device__ __forceinline__ uint32_t keys_seen(const BlockMask& mask, int32_t entry, int query, int key) {
  const int64_t word = int64_t(entry) * BlockMask::kSize + query % BlockMask::kSize;
  return reinterpret_cast<const uint32_t*>(mask.tiles)[2 * word + key % BlockMask::kSize / 32];
}

// A tile to visit, and the entry of the block that it lies in: 1 if nothing is hidden.
struct MaskedTile {
  int tile;
  int32_t entry;
};

// The walk over tiles of kRows keys (queries) in a row (column) of blocks, from the last to the first; without a block
// mask over all of them.
template <int kRows>
struct TileWalk {
  static constexpr int kTiles = BlockMask::kSize / kRows;  // in a block
  static_assert(BlockMask::kSize % kRows == 0);

  const BlockMask& mask;
  int first;  // tile

  // The last tile up to number `tile` where anything is visible; one below `first` if there is none from that on.
  // entry_at(block): the map's entry of the row's (column's) block.
  template <class EntryAt>
  __device__ __forceinline__ MaskedTile last(int tile, EntryAt entry_at) const {
    if (!mask.present() || tile < first) return {tile, 1};
    int end = first;
    keep_in_register(end);  // else what follows from it would be held in registers all along
    end = end / kTiles - 1;
    const int block = next_filled<-1>(tile / kTiles, end, [&](int n) { return entry_at(n) != 0; });
    return {min(tile, block * kTiles + kTiles - 1), block > end ? entry_at(block) : 0};
  }

  // The one to visit after `now`.
  template <class EntryAt>
  __device__ __forceinline__ MaskedTile before(MaskedTile now, EntryAt entry_at) const {
    if (now.tile % kTiles != 0) return {now.tile - 1, now.entry};  // in the same block
    return last(now.tile - 1, entry_at);
  }

  // The entry of the block that a tile lies in, once more: for a kernel without a register to keep it in.
  template <class EntryAt>
  __device__ __forceinline__ int32_t entry(int tile, EntryAt entry_at) const {
    if (!mask.present()) return 1;
    keep_in_register(tile);  // else the address would be made without a block mask, too
    return entry_at(tile / kTiles);
  }
};

}  // namespace attn_ext::cuda
