// Tile sizes, shared memory and grid of the tensor-core forward-mode kernels. Plain C++ that kernels and planner share.
#pragma once

#include "backward_sizes.h"

namespace attn_ext::cuda {

// A block's own Q and Q. against tiles of K and K., V and V. (a dot: the tangent). A thread's 255 registers (168 for three
// blocks) hold its parts of out., of S and S., and of Q and Q., or of Q alone where Q. has to stay in shared memory:
//   D 64: 32, 32, 32    D 128: 64, 32, 64    D 192: 96, 32, 48    D 256: 128, 16, 64
ATTN_HOST_DEVICE constexpr BackwardTile jvp_tile(int head_dim) {
  if (head_dim <= 64) return {4, 16, 32, 32, 2, 3};
  if (head_dim <= 128) return {4, 16, 32, 32, 2, 2};
  if (head_dim <= 192) return {4, 16, 32, 32, 1, 2};
  return {4, 16, 16, 16, 1, 1};
}

// K and K., or V and V.: one stage of each.
ATTN_HOST_DEVICE constexpr int jvp_pair_bytes(int head_dim) {
  return 2 * jvp_tile(head_dim).stream * shared_row_bytes(head_dim);
}

// At most 75 KiB: all GPUs can launch it (99 KiB on sm_86 and sm_89), two or three blocks fit on an A100.
ATTN_HOST_DEVICE constexpr int jvp_shared_bytes(int head_dim) {
  return backward_shared_bytes(jvp_tile(head_dim), head_dim, jvp_pair_bytes(head_dim));
}

inline int64_t jvp_blocks(const AttentionParams& p, int head_dim) {
  return p.batch * p.heads_q * ceil_tiles(p.len_q, jvp_tile(head_dim).rows());
}

}  // namespace attn_ext::cuda
