// How rows of a head-dim bucket lie in shared memory. Plain C++: the planner counts bytes with the same function.
#pragma once

#include "../../attention_params.h"

namespace attn_ext::cuda {

// The buckets: D and Dv up to 256 run in the smallest that holds both, the rest of a row is zero.
constexpr int kHeadDimBuckets[] = {32, 64, 96, 128, 192, 256};

// Sixteen bytes more than the row's halves. For every bucket that is an odd multiple of 16, so eight rows below each
// other start in eight different 16-byte groups of banks: ldmatrix reads 8 x 16 bytes without a conflict, and every
// address is a lane's constant plus an immediate, which a swizzle would not give.
ATTN_HOST_DEVICE constexpr int shared_row_bytes(int head_dim) { return 2 * head_dim + 16; }

}  // namespace attn_ext::cuda
