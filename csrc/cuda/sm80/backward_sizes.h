// Tile sizes, shared memory and grids of the tensor-core backward kernels. Plain C++ that kernels and planner share.
#pragma once

#include "../tile/shared_layout.h"

namespace attn_ext::cuda {

// attn_bwd_rows_*: lanes that share a row, rows a block.
constexpr int kBackwardRowLanes = 8, kBackwardRowsPerBlock = 32;
constexpr int kBackwardRowThreads = kBackwardRowLanes * kBackwardRowsPerBlock;
// Rows a head in BackwardParams::row_terms are a multiple of this, the largest tile of queries that dK/dV copies.
constexpr int kBackwardRowPad = 64;
// Floats a row there: {-lse * log2(e), -delta}, or {max, -log * log2(e), -delta, 0} for the full variants.
ATTN_HOST_DEVICE constexpr int row_term_size(bool full) { return full ? 4 : 2; }
// attn_bwd_sums_*: one block a head.
constexpr int kBackwardSumThreads = 256;

// A block's own operands (K and V, or Q and dO) against a stream of tiles of the two others.
struct BackwardTile {
  int warps;
  int warp_rows;  // of the block's own operands that a warp holds: 16 or 32
  int stream;     // rows of the streamed operands in a tile
  int chunk;      // of them, how many a warp has scores of at a time
  int held;       // how many of the two own operands stay in registers: 0, 1 (Q or K) or 2
  int blocks;     // blocks a multiprocessor that registers are budgeted for
  ATTN_HOST_DEVICE constexpr int threads() const { return warps * 32; }
  ATTN_HOST_DEVICE constexpr int rows() const { return warps * warp_rows; }
};

ATTN_HOST_DEVICE constexpr BackwardTile dkdv_tile(int head_dim, bool full) {
  if (full) {
    if (head_dim <= 128) return {4, 16, 32, 16, 0, head_dim <= 64 ? 3 : 2};
    if (head_dim <= 192) return {4, 16, 16, 16, 1, 1};
    return {2, 16, 16, 16, 0, 2};
  }
  if (head_dim <= 32) return {4, 32, 32, 32, 2, 2};
  if (head_dim <= 64) return {4, 32, 32, 32, 0, 2};
  if (head_dim <= 96) return {8, 16, 64, 32, 1, 1};
  if (head_dim <= 128) return {8, 16, 32, 32, 1, 1};
  if (head_dim <= 192) return {2, 16, 32, 32, 1, 2};
  return {4, 16, 16, 16, 1, 1};
}

// Above head dim 128 a thread cannot hold dK and dV: two blocks share a tile of keys, one for each, and S is computed
// by both.
ATTN_HOST_DEVICE constexpr bool dkdv_split(int head_dim) { return head_dim > 128; }

ATTN_HOST_DEVICE constexpr BackwardTile dq_tile(int head_dim, bool full) {
  if (full) {
    if (head_dim <= 192) return {4, 16, 32, 16, 1, head_dim <= 64 ? 3 : 2};
    return {4, 16, 16, 16, 0, 1};
  }
  if (head_dim <= 32) return {4, 32, 64, 32, 2, 2};
  if (head_dim <= 64) return {4, 32, 32, 32, 1, 2};
  if (head_dim <= 96) return {8, 16, 64, 32, 2, 1};
  if (head_dim <= 128) return {8, 16, 64, 64, 2, 1};
  if (head_dim <= 192) return {4, 16, 32, 32, 1, 1};
  return {4, 16, 16, 16, 1, 1};
}

ATTN_HOST_DEVICE constexpr int dkdv_stage_bytes(int head_dim, bool full) {
  return dkdv_tile(head_dim, full).stream * (2 * shared_row_bytes(head_dim) + row_term_size(full) * 4);
}
ATTN_HOST_DEVICE constexpr int dq_stage_bytes(int head_dim, bool full) {
  return dq_tile(head_dim, full).stream * 2 * shared_row_bytes(head_dim);
}

// A ring of two stages. Operands held in registers pass through its memory first, the others keep their place beside it.
ATTN_HOST_DEVICE constexpr int backward_shared_bytes(const BackwardTile& tile, int head_dim,
                                                     int stage_bytes) {
  const int own = tile.rows() * shared_row_bytes(head_dim);
  return (2 - tile.held) * own + (2 * stage_bytes > tile.held * own ? 2 * stage_bytes : tile.held * own);
}
ATTN_HOST_DEVICE constexpr int dkdv_shared_bytes(int head_dim, bool full) {
  return backward_shared_bytes(dkdv_tile(head_dim, full), head_dim, dkdv_stage_bytes(head_dim, full));
}
ATTN_HOST_DEVICE constexpr int dq_shared_bytes(int head_dim, bool full) {
  return backward_shared_bytes(dq_tile(head_dim, full), head_dim, dq_stage_bytes(head_dim, full));
}

// The gradient of a broadcast bias: tiles of kBiasRows queries and as many keys as shared memory allows (99 KiB of a
// block on sm_86 and sm_89).
constexpr int kBiasWarps = 4, kBiasRows = kBiasWarps * 16, kBiasThreads = kBiasWarps * 32;
// Blocks a multiprocessor that registers are budgeted for: the compiler, left alone, wants more and spills for them.
constexpr int kBiasBlocks = 2;
ATTN_HOST_DEVICE constexpr int bias_keys(int head_dim) {
  return head_dim <= 128 ? 64 : head_dim <= 192 ? 32 : 16;
}
ATTN_HOST_DEVICE constexpr int bias_shared_bytes(int head_dim) {
  return 2 * (kBiasRows + bias_keys(head_dim)) * shared_row_bytes(head_dim);
}

// Blocks of the one-dimensional grids.
inline int64_t ceil_tiles(int64_t n, int64_t tile) { return (n + tile - 1) / tile; }
// Rows a head in row_terms.
inline int64_t backward_row_stride(const AttentionParams& p) {
  return ceil_tiles(p.len_q, kBackwardRowPad) * kBackwardRowPad;
}
// `row_stride`: that of row_terms, or len_q where only row_max, row_log and row_delta are wanted.
inline int64_t rows_blocks(const AttentionParams& p, int64_t row_stride) {
  return p.batch * p.heads_q * ceil_tiles(row_stride, kBackwardRowsPerBlock);
}
inline int64_t dkdv_blocks(const AttentionParams& p, int head_dim, bool full) {
  return p.batch * p.heads_kv * ceil_tiles(p.len_k, dkdv_tile(head_dim, full).rows()) *
         (dkdv_split(head_dim) ? 2 : 1);
}
inline int64_t dq_blocks(const AttentionParams& p, int head_dim, bool full) {
  return p.batch * p.heads_q * ceil_tiles(p.len_q, dq_tile(head_dim, full).rows());
}
// `size`: the bias's own shape (B or 1, H or 1, Nq or 1, Nk or 1).
inline int64_t bias_blocks(const int64_t (&size)[4], int head_dim) {
  return size[0] * size[1] * ceil_tiles(size[2], kBiasRows) * ceil_tiles(size[3], bias_keys(head_dim));
}

}  // namespace attn_ext::cuda
