// Tiles of keys and values of one block on their way through shared memory, from the last tile to the first: two stages
// of K and two of V. While tile j is worked on, K(j) and V(j + 1) are read, V(j) and K(j - 1) are under way.
#pragma once

#include "../tile/load_rows.cuh"
#include "tile_sizes.h"

namespace attn_ext::cuda {

template <int HeadDim, ForwardVariant Variant>
struct KeyValueRing {
  static constexpr ForwardTile kTile = forward_tile(HeadDim, Variant);
  static constexpr uint32_t kStage = kTile.key_bytes(), kValues = 2 * kStage;  // offsets in shared memory
  using Loader = RowLoader<HeadDim, kTile.keys, kTile.threads()>;

  Loader keys, values;
  uint32_t key_target;  // where this thread's chunks go in the first stage
  uint32_t stage = 0;   // offset of the stage of K(j), which is the one of V(j) too
  int first, last;      // tiles
  int tail;             // keys that exist of the last one
  const void *any_key, *any_value;

  __device__ __forceinline__ KeyValueRing(uint32_t shared, const AttentionParams& p, int64_t b, int64_t h_kv,
                                          int first_tile, int last_tile, int num_keys)
      : keys(p.k, b, h_kv, int64_t(last_tile) * kTile.keys, int(p.dim_qk)),
        values(p.v, b, h_kv, int64_t(last_tile) * kTile.keys, int(p.dim_v)),
        key_target(Loader::target(shared)), first(first_tile), last(last_tile),
        tail(num_keys - last_tile * kTile.keys), any_key(p.k.data), any_value(p.v.data) {}

  __device__ __forceinline__ uint32_t other_stage() const { return stage ^ kStage; }

  // K of the last tile.
  __device__ __forceinline__ void start() {
    keys.load(key_target, tail, any_key);
    keys.step_back(last > first);
  }

  // Every thread's K(j) and V(j + 1) have landed, and nobody reads K(j + 1) and V(j + 2) any more, whose stages the
  // next copies take.
  __device__ __forceinline__ static void arrive() {
    wait_for_copies<0>();
    __syncthreads();
  }

  __device__ __forceinline__ void fetch(int j) {
    fetch_values(j);
    fetch_keys_before(j);
  }

  // The two halves of it. Where tiles are left out, skip() comes in between.
  __device__ __forceinline__ void fetch_values(int j) {
    if (j == last) {
      int rows = tail;
      keep_in_register(rows);  // else the tests of start() would be kept for here
      values.load(key_target + kValues + stage, rows, any_value);
    } else {
      values.load(key_target + kValues + stage);
    }
    values.step_back();
  }
  __device__ __forceinline__ void fetch_keys_before(int j) {
    if (j > first) keys.load(key_target + other_stage());
    keys.step_back(j - 2 >= first);
    commit_copies();
  }
  __device__ __forceinline__ void skip(int tiles) {
    keys.step_back_by(tiles);
    values.step_back_by(tiles);
  }

  // fetch() without a branch, for tiles before the last. The first tile's K is fetched twice rather than not.
  __device__ __forceinline__ void fetch_whole(int j) {
    values.load(key_target + kValues + stage);
    keys.load(key_target + other_stage());
    commit_copies();
    values.step_back();
    keys.step_back(j - 2 >= first);
  }
};

}  // namespace attn_ext::cuda
