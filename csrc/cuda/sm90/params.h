// What the planner passes to the Hopper kernels, by value, and how tiles lie in shared memory. Plain C++.
#pragma once

#include "../../attention_params.h"

namespace attn_ext::cuda::sm90 {

// A CUtensorMap, which launch.cu writes from the plan's description (../tensor_map.h). TMA wants it at a multiple of 64
// bytes.
struct alignas(64) TensorMapBytes {
  char byte[128] = {};
};

struct ForwardParams {
  TensorMapBytes q, k, v;
  AttentionParams problem;
  ForwardOutput output;
};

// Rows of a tile are cut into panels of 64 halves: 128 bytes, the widest swizzle.
constexpr int kPanelColumns = 64, kPanelRowBytes = 128;

ATTN_HOST_DEVICE constexpr int panels(int head_dim) { return (head_dim + kPanelColumns - 1) / kPanelColumns; }
ATTN_HOST_DEVICE constexpr int panel_bytes(int rows) { return rows * kPanelRowBytes; }
ATTN_HOST_DEVICE constexpr int tile_bytes(int rows, int head_dim) {
  return panels(head_dim) * panel_bytes(rows);
}

}  // namespace attn_ext::cuda::sm90
