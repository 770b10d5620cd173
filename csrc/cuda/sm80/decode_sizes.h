// Sizes of the split-KV kernels, and how many splits a problem gets. Plain C++17, for kernels and planner alike; pure
// functions of sizes and of the GPU's, never of tensor contents, so that the same call gives the same bits every time.
#pragma once

#include "../../attention_params.h"

namespace attn_ext::cuda {

// A block owns 16, 32 or 64 packed rows (query heads of one KV head x queries) and walks the keys of its split in tiles
// of 16 keys a warp (d256: two warps). K and V come through a ring of groups, half a tile each.
//
// The kernel lives by memory bandwidth, so the ring is sized by the bytes that must be under way on each SM, bandwidth x
// latency (Little's law):
//
//   A100 80 GB   2039 GB/s x 0.6 us / 108 SMs = 11 KiB        H100 SXM   3352 GB/s x 0.7 us / 132 SMs = 17 KiB
//   H200         4800 GB/s x 0.8 us / 132 SMs = 28 KiB        RTX 4090   1008 GB/s x 0.7 us / 128 SMs =  5 KiB
//
// A ring of 80 KiB leaves room for two blocks on an SM of A100 (164 KiB) and H100 (228 KiB), and for one on sm_86 and
// sm_89 (100 KiB). When a tile of 32 KiB (d64: 16) has arrived and the place of the one before it is not yet taken
// again, the other 16 KiB (d64: 48) are under way, then 48 KiB (64): 32 to 96 KiB on an SM with two blocks.
struct DecodeSizes {
  int bucket;  // columns of K and V in shared memory; dim_qk and dim_v are at most this

  // Warps that share a row's columns of V. A warp holds 16 rows of Q and of its part of the output: at 256 columns that
  // were 192 registers a thread and too few left for the rest; two warps, which both compute the scores, need 128.
  ATTN_HOST_DEVICE constexpr int column_parts() const { return bucket <= 128 ? 1 : 2; }
  // Warps with keys or rows of their own.
  ATTN_HOST_DEVICE constexpr int key_warps() const { return 4 / column_parts(); }
  ATTN_HOST_DEVICE constexpr int threads() const { return 128; }
  ATTN_HOST_DEVICE constexpr int tile_keys() const { return 16 * key_warps(); }  // 16: what an mma sums over
  ATTN_HOST_DEVICE constexpr int group_keys() const { return tile_keys() / 2; }
  // K and V, elements of two bytes.
  ATTN_HOST_DEVICE constexpr int tile_bytes() const { return 2 * tile_keys() * bucket * 2; }
  ATTN_HOST_DEVICE constexpr int group_bytes() const { return tile_bytes() / 2; }
  ATTN_HOST_DEVICE constexpr int ring_groups() const { return 80 * 1024 / group_bytes(); }  // 10 (d64) or 5
  ATTN_HOST_DEVICE constexpr int shared_bytes() const { return ring_groups() * group_bytes(); }
};

ATTN_HOST_DEVICE constexpr DecodeSizes decode_sizes(int bucket) { return {bucket}; }

// The bucket of a problem; 0 if no decode kernel takes it.
inline int decode_bucket(const AttentionParams& p) {
  const int64_t dim = p.dim_qk > p.dim_v ? p.dim_qk : p.dim_v;
  return dim <= 64 ? 64 : dim <= 128 ? 128 : dim <= 256 ? 256 : 0;
}

// Packed rows of one KV head; kernels count them in 32 bits.
inline int64_t decode_rows(const AttentionParams& p) { return p.group() * p.len_q; }

// Tiles of 16 rows that a block works on: 1, 2, or 4, at most one a warp (d256: two warps), so that up to 64 rows share
// each read of K and V. With one, all warps take keys of their own; with four, every warp takes all keys of the tile.
ATTN_HOST_DEVICE inline int decode_row_tiles(int64_t rows, DecodeSizes sizes) {
  const int tiles = rows <= 16 ? 1 : rows <= 32 ? 2 : 4;
  return tiles < sizes.key_warps() ? tiles : sizes.key_warps();
}

// Whether these kernels are the better ones: few queries leave the forward kernels' tiles of 128 rows empty; few tiles
// leave SMs idle, which splitting the keys cures where a piece of them is worth a block of its own.
inline bool decode_pays(const AttentionParams& p, int multiprocessors) {
  // Numbers of rows and keys, and of those of a tile after the last, fit into 32 bits.
  constexpr int64_t kMost = (int64_t(1) << 31) - 1024, kLongKeys = 1024;
  if (decode_bucket(p) == 0 || decode_rows(p) > kMost || p.len_k > kMost) return false;
  const int64_t tiles = p.batch * p.heads_q * ((p.len_q + 127) / 128);
  return p.len_q <= 16 || (tiles < multiprocessors && p.len_k >= kLongKeys);
}

inline int64_t decode_grid(const AttentionParams& p, DecodeSizes sizes, int splits) {
  const int64_t block_rows = 16 * decode_row_tiles(decode_rows(p), sizes);
  return p.batch * p.heads_kv * ((decode_rows(p) + block_rows - 1) / block_rows) * splits;
}

// More would make the combine kernel the longer part; it keeps a row's parts in shared memory.
constexpr int kMaxSplits = 128;
constexpr int kCombineThreads = 128;  // one block a row; 256 columns are two a thread

// How many blocks fit on an SM: by shared memory (each block takes 1 KiB more for the system), sm_86, 89 and 12x have
// 100 KiB an SM, the others 164 and more. Registers allow two: launch_bounds.
constexpr int decode_blocks_per_sm(int architecture) {
  return architecture == 86 || architecture == 89 || architecture / 10 == 12 ? 1 : 2;
}

// Keys that a block can meet at most, by causal and window rules. Lengths lie in device memory, where a planner does not
// look.
inline int64_t decode_keys(const AttentionParams& p, DecodeSizes sizes) {
  const int64_t right = p.causal != Causal::kNone ? 0 : p.window_right;
  if (p.window_left < 0 || p.window_left >= p.len_k || right < 0 || right >= p.len_k) return p.len_k;
  // Queries of one block; it may begin and end within one.
  const int64_t queries = 16 * decode_row_tiles(decode_rows(p), sizes) / p.group() + 2;
  const int64_t keys = p.window_left + right + queries;
  return keys < p.len_k ? keys : p.len_k;
}

// The number of splits with the least modelled time. Unit: an SM's part of the bandwidth moving one tile (32 KiB on an
// A100: 1.7 us). A block alone on an SM is taken to be no faster than that, and two halve it between them. Each
// block starts up and ends in one unit (latency of the first bytes, merging of its warps), writes its part and has the
// combine kernel read it, whose launch behind the first takes two units (about 4 us).
inline int decode_splits(const AttentionParams& p, DecodeSizes sizes, int multiprocessors,
                         int blocks_per_sm) {
  const int64_t units = decode_grid(p, sizes, 1), slots = int64_t(multiprocessors) * blocks_per_sm;
  const int64_t tiles = (decode_keys(p, sizes) + sizes.tile_keys() - 1) / sizes.tile_keys();
  const int64_t block_rows = 16 * decode_row_tiles(decode_rows(p), sizes);
  const int64_t rows = decode_rows(p) < block_rows ? decode_rows(p) : block_rows;
  const double partial = double(2 * 4 * rows * p.dim_v) / sizes.tile_bytes();  // float32, written and read
  int best = 1;
  double least = 0;
  for (int splits = 1; splits <= kMaxSplits && (splits == 1 || splits <= tiles); splits++) {
    // Of the longest block.
    const double length = double((tiles + splits - 1) / splits) + (splits > 1 ? partial : 0);
    const int64_t waves = units * splits / slots, rest = units * splits % slots;
    double time = double(waves) * (length * blocks_per_sm + 1) + (splits > 1 ? 2 : 0);
    if (rest > 0) time += length * double((rest + multiprocessors - 1) / multiprocessors) + 1;
    if (splits == 1 || time < least) {
      least = time;
      best = splits;
    }
  }
  return best;
}

// Workspace of the partial results: partial_out from the start, partial_parts after it at a multiple of 256 bytes.
inline int64_t decode_parts_offset(const AttentionParams& p, int splits) {
  const int64_t bytes = 4 * splits * p.batch * p.heads_q * p.len_q * p.dim_v;
  return (bytes + 255) / 256 * 256;
}

inline int64_t decode_workspace_bytes(const AttentionParams& p, int splits) {
  if (splits == 1) return 0;
  return decode_parts_offset(p, splits) + (8 * splits * p.batch * p.heads_q * p.len_q + 255) / 256 * 256;
}

}  // namespace attn_ext::cuda
