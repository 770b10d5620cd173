// Tile sizes, shared memory and grids of the Hopper backward. Plain C++ that kernels and planner share.
#pragma once

#include "../kernel_params.h"
#include "params.h"

namespace attn_ext::cuda::sm90 {

struct BackwardParams {
  TensorMapBytes q, k, v, grad_out;
  cuda::BackwardParams given;
};

// A block: one warpgroup that starts copies, and two that multiply, with 64 of the block's keys each (the M of wgmma).
constexpr int kBackwardConsumers = 2;
constexpr int kBackwardThreads = 128 * (1 + kBackwardConsumers), kBackwardKeys = 64 * kBackwardConsumers;
// 128 * 32 + 256 * 240: the 65,536 an SM has.
constexpr int kBackwardProducerRegisters = 32, kBackwardConsumerRegisters = 240;
// Of Q and dO. One is in use until well into the next one's products; more do not fit.
constexpr int kBackwardStages = 2;

// Queries in a tile. A consumer's thread holds D / 2 floats of dK and of dV, and of a tile S and dP (half a register a
// query, each), or P and dS packed (a quarter) and dQ (half): 208 and 192 of 240 registers at D 128 and 64. D 96 would
// have registers for 96 queries, but not the shared memory.
ATTN_HOST_DEVICE constexpr int backward_queries(int head_dim) { return head_dim <= 64 ? 128 : 80; }

// Floats of a row in BackwardParams::row_terms, which are in the order in which the lanes of a warp load them: of each tile
// first -lse * log2(e), 16 queries at a time, four for each lane of a quad; then -delta, two queries for each lane of a
// quad, twice, as the two rows of an accumulator (see ../tile/fragment.cuh) start.
constexpr int kTermSize = 3;
ATTN_HOST_DEVICE constexpr int lse_place(int query) {
  return query / 16 * 16 + query % 8 / 2 * 4 + query % 16 / 8 * 2 + query % 2;
}
// The first of the two.
ATTN_HOST_DEVICE constexpr int delta_place(int query) { return query / 2 * 4 + query % 2; }

// dQ of a tile in float32, as it lies in shared memory and in BackwardParams::query_sums: in whole panels of columns.
// Each consumer has a half of it, all queries of one panel, or half of the queries where there is one panel only; its
// threads' C fragments of dQ^T follow each other, [fragment][thread], so that both the stores here and the loads of who
// puts them in order are of neighbouring 16 bytes.
ATTN_HOST_DEVICE constexpr int sums_elements(int head_dim) {
  return backward_queries(head_dim) * panels(head_dim) * kPanelColumns;
}
ATTN_HOST_DEVICE constexpr int sums_fragments(int head_dim) {
  return sums_elements(head_dim) / (kBackwardConsumers * 128 * 4);
}

constexpr int kTileAlignment = 1024;  // of tiles, which come first: see tensor_copy.cuh
constexpr int kWorkBytes = 48;        // of what a block works on
// The full barrier of K and V, the pairs of the stages, that of dQ; a number a stage.
constexpr int kBackwardBarrierBytes = 8 + kBackwardStages * 16 + 16 + kBackwardStages * 4;

ATTN_HOST_DEVICE constexpr int backward_shared_bytes(int head_dim) {
  const int queries = backward_queries(head_dim);
  return 2 * tile_bytes(kBackwardKeys, head_dim) +
         kBackwardStages * (2 * tile_bytes(queries, head_dim) + queries * kTermSize * 4) +
         2 * tile_bytes(queries, kBackwardKeys) + 4 * sums_elements(head_dim) + kWorkBytes +
         kBackwardBarrierBytes;
}
static_assert(backward_shared_bytes(128) <= 227 << 10);  // what a block may have

// Threads of a block that puts a tile of dQ in order: each takes 16 columns of 2 rows.
ATTN_HOST_DEVICE constexpr int sums_threads(int head_dim) { return sums_elements(head_dim) / 32; }

}  // namespace attn_ext::cuda::sm90
