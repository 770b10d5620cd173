// Tile sizes, shared memory and grids of the Hopper backward kernels. Plain C++ that kernels and planner share.
#pragma once

#include "../kernel_params.h"
#include "params.h"

namespace attn_ext::cuda::sm90 {

struct BackwardParams {
  TensorMapBytes q, k, v, grad_out;
  cuda::BackwardParams given;
};

// A block: one warpgroup that starts copies, and two that multiply, with 64 rows of the block's own operands each (the M
// of wgmma).
constexpr int kBackwardConsumers = 2;
constexpr int kBackwardThreads = 128 * (1 + kBackwardConsumers), kBackwardRows = 64 * kBackwardConsumers;
// 128 * 24 + 256 * 240 of the 65,536 an SM has.
constexpr int kBackwardProducerRegisters = 24, kBackwardConsumerRegisters = 240;
// A stage is a tile of both streamed operands. It is in use until well into the next one's products, so with two the
// copy of the one after that, a microsecond or so, would be waited for.
constexpr int kBackwardStages = 3;

// Queries in a tile that the dK/dV kernel streams. A consumer's thread holds D / 2 floats of dK and of dV, and of a tile
// S, dP (half a register a query, each) and P and dS packed (a quarter): 208, 192 and 224 of 240 registers at D 64, 96
// and 128. More spills (128 queries at D 64, 80 at D 96).
ATTN_HOST_DEVICE constexpr int dkdv_queries(int head_dim) { return head_dim <= 64 ? 96 : 64; }
// Keys in a tile that the dQ kernel streams: as many as leave room for three stages in 227 KiB; at D 64 the registers end
// sooner (dQ, S, dP and packed dS: 32 + 64 + 64 + 32).
ATTN_HOST_DEVICE constexpr int dq_keys(int head_dim) { return head_dim <= 64 ? 128 : 96; }

// Bytes of a row of BackwardParams::row_terms.
constexpr int kTermSize = 8;

constexpr int kTileAlignment = 1024;  // of tiles: see tensor_copy.cuh
// The full barrier of the own operands, and the pairs of the stages.
constexpr int kBackwardBarrierBytes = 8 + kBackwardStages * 16;

// `row_bytes`: what comes with each row of the stream.
ATTN_HOST_DEVICE constexpr int backward_shared_bytes(int head_dim, int stream_rows, int row_bytes) {
  return kTileAlignment + 2 * tile_bytes(kBackwardRows, head_dim) +
         kBackwardStages * (2 * tile_bytes(stream_rows, head_dim) + stream_rows * row_bytes) +
         kBackwardBarrierBytes;
}
ATTN_HOST_DEVICE constexpr int dkdv_shared_bytes(int head_dim) {
  return backward_shared_bytes(head_dim, dkdv_queries(head_dim), kTermSize);
}
ATTN_HOST_DEVICE constexpr int dq_shared_bytes(int head_dim) {
  return backward_shared_bytes(head_dim, dq_keys(head_dim), 0);
}

inline int64_t backward_tiles(int64_t rows, int64_t tile) { return (rows + tile - 1) / tile; }
// Rows a head in row_terms: whole tiles of queries.
inline int64_t backward_row_stride(const AttentionParams& p, int head_dim) {
  return backward_tiles(p.len_q, dkdv_queries(head_dim)) * dkdv_queries(head_dim);
}

}  // namespace attn_ext::cuda::sm90
