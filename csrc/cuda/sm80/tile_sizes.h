// Tile sizes of the sm_80 forward kernels. Plain C++: the planner and the kernels read the same numbers.
#pragma once

#include "../tile/shared_layout.h"

namespace attn_ext::cuda {

// One block: `warps` warps of `warp_rows` query rows each, against tiles of `keys` keys.
struct ForwardTile {
  int head_dim;          // the bucket
  int warps, warp_rows;  // 16 or 32 rows a warp
  int keys;              // a multiple of 32
  // For all of the block's life; else their fragments are reread from shared memory for each tile of keys.
  bool queries_in_registers;
  int blocks_per_sm;  // what the registers are budgeted for
  // In the main loop, the group of 16 keys before whose P V the next copies start. Later leaves the assembler more
  // freedom before, and the copies less time; found by trying.
  int copies_at;

  ATTN_HOST_DEVICE constexpr int rows() const { return warps * warp_rows; }
  ATTN_HOST_DEVICE constexpr int threads() const { return 32 * warps; }
  // Two stages of K, two of V, and the queries. Queries that move to registers come through V's stages.
  ATTN_HOST_DEVICE constexpr int key_bytes() const { return keys * shared_row_bytes(head_dim); }
  ATTN_HOST_DEVICE constexpr int query_bytes() const {
    return queries_in_registers ? 0 : rows() * shared_row_bytes(head_dim);
  }
  ATTN_HOST_DEVICE constexpr int shared_bytes() const { return 4 * key_bytes() + query_bytes(); }
};

enum class ForwardVariant {
  // Causal, window, lengths, grouped heads.
  kLean,
  // The same in 99 KiB of shared memory: for D 192 and 256 on GPUs whose blocks get no more (sm_86, 89, 120).
  kCompact,
  // And bias, masks, ALiBi, softcap, sinks, dropout. Fits in 99 KiB.
  kFull
};

// 32 rows a warp keep shared memory below the tensor cores' time (each warp reads all of K and V: with 16 rows that
// takes 1.1 to 1.4 times as long as the products on an A100), as far as a thread's 255 registers hold O, S and P:
//   D 64: O 64, S 64, P 32, Q 32;  D 128: O 128, S 32, P 16;  D 256: O 128, S 16, P 8.
// What limits the full variant is the arithmetic and the loads around the logits, so it has 16 rows a warp and two
// or three blocks to hide them.
ATTN_HOST_DEVICE constexpr ForwardTile forward_tile(int head_dim, ForwardVariant variant) {
  if (head_dim > 128 && variant != ForwardVariant::kLean) return {head_dim, 4, 16, 32, false, 1, 0};
  if (variant == ForwardVariant::kFull)
    return {head_dim, 4, 16, head_dim <= 64 ? 64 : 32, true, head_dim == 128 ? 2 : 3, 0};
  if (head_dim <= 64) return {head_dim, 4, 32, 64, true, 2, head_dim == 64};
  if (head_dim <= 128) return {head_dim, 4, 32, 32, false, 2, 0};
  return {head_dim, 8, 16, 32, false, 1, 0};
}

}  // namespace attn_ext::cuda
