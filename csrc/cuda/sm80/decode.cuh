// Forward for few queries and long keys (decoding), f16 and bf16.
//
// The rows of one KV head, query heads of its group x queries, are packed into tiles of 16 for the tensor cores, so that
// each key and value is read once for all of them. The keys that a block's rows see are cut into p.splits pieces, a block
// each; with more than one, attn_decode_combine_* joins what they leave in p.partial_out and p.partial_parts.
//
//   for each tile of the split's keys:             K and V arrive through a ring of asynchronous copies
//     for each 16 keys of the tile that are the warp's:
//       S = scale Q K^T, capped, biased, hidden    16 rows x 16 keys
//       m' = max(m, rowmax S),  P = exp(S - m')
//       l = l exp(m - m') + rowsum P,  O = O exp(m - m') + P V
//   the warps' m, l, O are joined, in the order of the warps
//
// Warps with the same rows take keys of their own and each keep a softmax of them, since a common maximum would cost a
// barrier a tile; what they do cost, one exchange through shared memory at the end, is a small part of a split's time.
// One kernel for every option: the time goes into waiting for memory, and the branches are the same for a whole block.
// Of a block mask, tiles of keys in which it hides everything from all rows are neither copied nor visited.
#pragma once

#include "../kernel_params.h"
#include "../registry.h"
#include "../tile/async_copy.cuh"
#include "../tile/fragment.cuh"
#include "decode_terms.cuh"
#include "decode_sizes.h"

namespace attn_ext::cuda {

template <class Half, int kBucket>
class Decode {
  static constexpr DecodeSizes kSizes = decode_sizes(kBucket);
  static constexpr int kWarps = kSizes.key_warps(), kRing = kSizes.ring_groups();
  static constexpr int kTileKeys = kSizes.tile_keys(), kGroupKeys = kSizes.group_keys();
  static constexpr int kRowBytes = kBucket * 2;
  static constexpr int kChunks = kBucket / 8;                          // of 16 bytes, 8 columns, in a row
  static constexpr int kWarpChunks = kChunks / kSizes.column_parts();  // of the output that a warp holds
  static constexpr int kPassKeys = kSizes.threads() / kChunks;  // rows copied at once, a chunk a thread
  // Floats of a row where warps merge: 8 more than there are columns keep the float2 stores of the four rows that a
  // half-warp writes on different banks.
  static constexpr int kMergePitch = kBucket + 8;
  static_assert(kGroupKeys % kPassKeys == 0 && kGroupKeys % 16 == 0);
  static_assert(kWarps * 16 * kMergePitch * 4 <= kSizes.shared_bytes());
  static_assert(kWarps * 16 * kRowBytes <= 2 * kSizes.group_bytes());  // the queries fit into two groups

 public:
  __device__ __forceinline__ explicit Decode(const ForwardParams& p)
      : p_(p), problem_(p.problem), lane_(threadIdx.x % 32), warp_(threadIdx.x / 32 % kWarps),
        first_chunk_(threadIdx.x / 32 / kWarps * kWarpChunks), scale_(float(p.problem.scale)),
        lane_rows_(lane_offset_a<kRowBytes>() ^ swizzle(lane_)),
        lane_pair_(lane_offset_b_pair<kRowBytes>() ^ swizzle(lane_)), terms_{p.problem} {
    const unsigned heads_kv = unsigned(problem_.heads_kv), splits = p.splits;
    group_ = unsigned(problem_.heads_q) / heads_kv;
    rows_ = group_ * int(problem_.len_q);
    row_tiles_ = decode_row_tiles(rows_, kSizes);
    row_tile_ = warp_ % row_tiles_;
    // Blocks that read the same keys are neighbours, so that all but the first find them in L2.
    const unsigned block_rows = 16 * row_tiles_, row_blocks = (rows_ + block_rows - 1) / block_rows;
    const unsigned pair = blockIdx.x / row_blocks / splits;
    split_ = blockIdx.x / row_blocks % splits;
    block_row_ = blockIdx.x % row_blocks * block_rows;
    b_ = pair / heads_kv;
    h_kv_ = pair % heads_kv;
    terms_.b = b_;
    has_terms_ = terms_.any();
    find_keys();
    find_copies();
  }

  __device__ __forceinline__ void run() {
    DecodeRow row[2];  // rows lane / 4 and lane / 4 + 8 of the warp's row tile
    FragmentC out[kWarpChunks] = {};
    for (int r = 0; r < 2; r++) row[r] = start_row(block_row_ + 16 * row_tile_ + 8 * r + lane_ / 4);
    if (begin_ < end_) attend_tiles(row, out);
    finish(row, out);
  }

 private:
  // A row's head is row % group, so that neighbouring rows see nearly the same keys.
  __device__ __forceinline__ DecodeRow start_row(int packed_row) const {
    const int row = min(packed_row, rows_ - 1), i = row / group_;
    const KeyRange visible = packed_row < rows_ ? Visibility(problem_, b_).of_query(i) : KeyRange{0, 0};
    return {h_kv_ * group_ + row % group_, i, visible, {-ATTN_INFINITY, 0.0f}};
  }

  // The keys of this split: whole tiles of those that the block's rows see. Tiles begin at a multiple of 8, so that the
  // eight keys that share a call of Philox lie together.
  __device__ __forceinline__ void find_keys() {
    const int last_row = min(block_row_ + 16 * row_tiles_, rows_) - 1;
    const KeyRange seen = Visibility(problem_, b_).of_queries(block_row_ / group_, last_row / group_);
    const unsigned start = seen.begin & ~7, tiles = (seen.end - start + kTileKeys - 1) / kTileKeys;
    // The first `longer` splits have a tile more than the others.
    const unsigned splits = p_.splits, shorter = tiles / splits, longer = tiles % splits;
    const unsigned first = split_ * shorter + min(split_, longer), last = first + shorter + (split_ < longer);
    begin_ = max(start + first * kTileKeys, unsigned(seen.begin));
    end_ = min(start + last * kTileKeys, unsigned(seen.end));
  }

  // Which 16 bytes of each row of K and V this thread copies, and how many of them the tensors have.
  __device__ __forceinline__ void find_copies() {
    const int column = threadIdx.x % kChunks * 8;
    key_bytes_ = min(max(int(problem_.dim_qk) - column, 0) * 2, 16);
    value_bytes_ = min(max(int(problem_.dim_v) - column, 0) * 2, 16);
    key_ = element<uint16_t>(problem_.k, b_, h_kv_, 0, key_bytes_ > 0 ? column : 0);
    value_ = element<uint16_t>(problem_.v, b_, h_kv_, 0, value_bytes_ > 0 ? column : 0);
  }

  __device__ __forceinline__ void attend_tiles(DecodeRow (&row)[2], FragmentC (&out)[kWarpChunks]) {
    extern __shared__ __align__(1024) char ring[];
    ring_ = shared_address(ring);
    const uint32_t queries = group_address(kRing - 2);  // not needed for keys before the first tile
    load_queries(queries);
    int copy_tile = next_tile(0);
    const auto load_next = [&](bool second, int slot) {  // the first or the second of the tile's two groups
      load_group(tile_key(copy_tile) + (second ? kGroupKeys : 0), slot);
      if (second) copy_tile = next_tile(copy_tile + 1);
    };
#pragma unroll
    for (int g = 0; g < kRing - 2; g++) load_next(g % 2 == 1, g);
    constexpr bool kBegun = (kRing - 2) % 2 == 1;  // the last tile: one of its groups is under way
    wait_for_copies<kRing - 2>();
    __syncthreads();  // the queries that other threads copied have arrived
    FragmentA q[kBucket / 16];
#pragma unroll
    for (int k = 0; k < kBucket / 16; k++)
      ldmatrix_x4(q[k].reg, (queries + 16 * row_tile_ * kRowBytes + lane_rows_) ^ (32 * k));

    const bool idle = block_row_ + 16 * row_tile_ >= rows_;  // a row tile without rows
    const int first_key = idle ? kTileKeys : 16 * (warp_ / row_tiles_);
    int slot = 0;  // where the tile's first group lies
    for (int n = next_tile(0); tile_key(n) < end_; n = next_tile(n + 1)) {
      const int tile = tile_key(n);
      wait_for_copies<kRing - 4>();  // of the groups asked for, all but those after this tile have arrived
      // So they have for the other threads. And all warps have done the tile before this one (at first: have read the
      // queries): its place is free for new keys.
      __syncthreads();
      load_next(kBegun, wrap(slot + kRing - 2));
      load_next(!kBegun, wrap(slot + kRing - 1));
      // The warps of a row tile take turns at 16 keys.
      for (int key = first_key; key < min(kTileKeys, end_ - tile); key += 16 * (kWarps / row_tiles_)) {
        const uint32_t keys = group_address(wrap(slot + key / kGroupKeys)) + key % kGroupKeys * kRowBytes;
        attend(q, keys, tile + key, row, out);
      }
      slot = wrap(slot + 2);
    }
  }

  // One step of the online softmax: 16 keys from number `key` on, which lie at `keys`, their values behind the group's
  // keys.
  __device__ __forceinline__ void attend(const FragmentA (&q)[kBucket / 16], uint32_t keys, int key,
                                         DecodeRow (&row)[2], FragmentC (&out)[kWarpChunks]) const {
    // Sums over even and over odd k: half as long a chain of products that wait for each other.
    FragmentC s[2] = {}, odd[2] = {};
#pragma unroll
    for (int k = 0; k < kBucket / 16; k++) {
      uint32_t b[4];
      ldmatrix_x4(b, (keys + lane_pair_) ^ (32 * k));
      mma<Half>(k % 2 == 0 ? s[0] : odd[0], q[k], b[0], b[1]);
      mma<Half>(k % 2 == 0 ? s[1] : odd[1], q[k], b[2], b[3]);
    }
    for_each_score([&](int n, int e, int, int) { s[n].reg[e] = (s[n].reg[e] + odd[n].reg[e]) * scale_; });
    const int lane_key = key + 2 * (lane_ % 4);  // the thread's first
    if (has_terms_) terms_.add_to(s, row, lane_key);
    for_each_score([&](int n, int e, int r, int j) {
      if (!row[r].sees(lane_key + j)) s[n].reg[e] = -ATTN_INFINITY;
    });

    float rescale[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
      float (&a)[4] = s[0].reg, (&b)[4] = s[1].reg;
      const float largest = fmaxf(fmaxf(a[2 * r], a[2 * r + 1]), fmaxf(b[2 * r], b[2 * r + 1]));
      const float before = row[r].sum.max;
      row[r].sum.max = fmaxf(before, quad_max(largest));
      const float shift = exponent_shift(row[r].sum.max);
      rescale[r] = exp_fast(before - shift);
#pragma unroll
      for (int e = 2 * r; e < 2 * r + 2; e++) {
        a[e] = exp_fast(a[e] - shift);
        b[e] = exp_fast(b[e] - shift);
      }
      row[r].sum.sum = row[r].sum.sum * rescale[r] + ((a[2 * r] + a[2 * r + 1]) + (b[2 * r] + b[2 * r + 1]));
    }
    if (__any_sync(0xffffffffu, rescale[0] != 1.0f || rescale[1] != 1.0f)) {  // soon the maxima have been met
#pragma unroll
      for (int c = 0; c < kWarpChunks; c++) {
#pragma unroll
        for (int e = 0; e < 4; e++) out[c].reg[e] *= rescale[e / 2];
      }
    }
    if (problem_.dropout.threshold != 0) terms_.drop(s, row, key);

    const FragmentA weights = {{pack<Half>(s[0].reg[0], s[0].reg[1]), pack<Half>(s[0].reg[2], s[0].reg[3]),
                                pack<Half>(s[1].reg[0], s[1].reg[1]), pack<Half>(s[1].reg[2], s[1].reg[3])}};
    const uint32_t values = keys + kGroupKeys * kRowBytes + 16 * first_chunk_;
#pragma unroll
    for (int c = 0; c < kWarpChunks; c += 2) {
      uint32_t b[4];
      ldmatrix_x4_transposed(b, (values + lane_rows_) ^ (16 * c));
      mma<Half>(out[c], weights, b[0], b[1]);
      mma<Half>(out[c + 1], weights, b[2], b[3]);
    }
  }

  // Joins the warps of each row tile and writes the rows: finished, or this split's part of them.
  __device__ __forceinline__ void finish(DecodeRow (&row)[2], FragmentC (&out)[kWarpChunks]) const {
    extern __shared__ __align__(1024) char ring[];
    float* merge = reinterpret_cast<float*>(ring);  // (warps, 16, kMergePitch)
    __shared__ RowSum parts[kWarps][16], joined[16 * kWarps];
    for (int r = 0; r < 2; r++) {
      row[r].sum.sum = quad_sum(row[r].sum.sum);
      if (first_chunk_ == 0 && lane_ % 4 == 0) parts[warp_][8 * r + lane_ / 4] = row[r].sum;
    }
    __syncthreads();  // the sums of all warps are there, and nobody reads keys from the ring any more

#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int at = 8 * r + lane_ / 4;
      RowSum total = {-ATTN_INFINITY, 0.0f};
      for (int w = row_tile_; w < kWarps; w += row_tiles_) total.join(parts[w][at]);
      if (first_chunk_ == 0 && warp_ == row_tile_ && lane_ % 4 == 0) joined[16 * row_tile_ + at] = total;
      const float rescale = total.rescale(row[r].sum.max);
      float2* to =
          reinterpret_cast<float2*>(merge + (16 * warp_ + at) * kMergePitch + 8 * first_chunk_) + lane_ % 4;
#pragma unroll
      for (int c = 0; c < kWarpChunks; c++)
        to[4 * c] = {out[c].reg[2 * r] * rescale, out[c].reg[2 * r + 1] * rescale};
    }
    __syncthreads();  // everything that is to be added up is in shared memory

    const int column = 4 * threadIdx.x % kBucket, columns = int(problem_.dim_v) - column;
    if (columns <= 0 && column > 0) return;  // column 0 has the sums to write, even if there is no value
    const int rows = min(16 * row_tiles_, rows_ - block_row_);
    for (int at = 4 * threadIdx.x / kBucket; at < rows; at += 4 * kSizes.threads() / kBucket) {
      float sum[4] = {};
      for (int w = at / 16; w < kWarps; w += row_tiles_) {
        const float4 x = *reinterpret_cast<const float4*>(merge + (16 * w + at % 16) * kMergePitch + column);
        sum[0] += x.x, sum[1] += x.y, sum[2] += x.z, sum[3] += x.w;
      }
      write_row(start_row(block_row_ + at), joined[at], sum, column, columns);
    }
  }

  // Four columns of a row, of which `columns` exist.
  __device__ __forceinline__ void write_row(const DecodeRow& row, RowSum total, float (&sum)[4], int column,
                                            int columns) const {
    if (p_.splits > 1) {
      const int64_t rows = problem_.batch * problem_.heads_q * problem_.len_q;
      const int64_t at = split_ * rows + (b_ * problem_.heads_q + row.h) * problem_.len_q + row.i;
      store(p_.partial_out + at * problem_.dim_v + column, sum, columns);
      if (column == 0) {
        p_.partial_parts[2 * at] = total.max;
        p_.partial_parts[2 * at + 1] = total.sum;
      }
    } else {
      const bool empty = total.sum == 0.0f;  // out is 0 then, whatever hidden values were multiplied by 0
      const float factor = finish_row<Half>(problem_, row.h, total);
#pragma unroll
      for (int c = 0; c < 4; c++) sum[c] = empty ? 0.0f : sum[c] * factor;
      store(element<uint16_t>(p_.output.out, b_, row.h, row.i, column), sum, columns);
      if (column == 0) write_lse(p_.output, b_, row.h, row.i, total);
    }
  }

  __device__ __forceinline__ static void store(float* to, const float (&x)[4], int columns) {
    if (columns >= 4 && reinterpret_cast<uintptr_t>(to) % 16 == 0) {
      *reinterpret_cast<float4*>(to) = {x[0], x[1], x[2], x[3]};
    } else {
#pragma unroll
      for (int c = 0; c < 4; c++)
        if (c < columns) to[c] = x[c];
    }
  }

  __device__ __forceinline__ static void store(uint16_t* to, const float (&x)[4], int columns) {
    if (columns >= 4 && reinterpret_cast<uintptr_t>(to) % 8 == 0) {
      *reinterpret_cast<uint2*>(to) = {pack<Half>(x[0], x[1]), pack<Half>(x[2], x[3])};
    } else {
#pragma unroll
      for (int c = 0; c < 4; c++)
        if (c < columns) to[c] = to_half<Half>(x[c]);
    }
  }

  // The 16-byte chunk c of row r lies at c ^ (r % 8), so that the eight rows that ldmatrix reads at one chunk, multiples
  // of 128 bytes apart, fall on different banks. Padding rows instead would take a tenth of the ring.
  __device__ __forceinline__ static uint32_t swizzle(int row) { return row % 8 << 4; }

  // Where this thread copies its chunk of a row to.
  __device__ __forceinline__ static uint32_t copy_address(uint32_t rows, int row) {
    return rows + row * kRowBytes + (threadIdx.x % kChunks << 4 ^ swizzle(row));
  }

  __device__ __forceinline__ uint32_t group_address(int slot) const {
    return ring_ + slot * kSizes.group_bytes();
  }

  __device__ __forceinline__ static int wrap(int slot) { return slot < kRing ? slot : slot - kRing; }

  // The first key of a tile of the split.
  __device__ __forceinline__ int tile_key(int tile) const { return (begin_ & ~7) + tile * kTileKeys; }

  // The first of the split's tiles from `tile` on in which a row of the block may see a key.
  __device__ __forceinline__ int next_tile(int tile) const {
    if (!problem_.block_mask.present()) return tile;
    const int tiles = (end_ - tile_key(0) + kTileKeys - 1) / kTileKeys;
    return next_filled<1>(tile, tiles, [&](int tile) { return shows(tile); });
  }

  // Whether the block mask lets a row of the block see a key of the tile.
  __device__ __forceinline__ bool shows(int tile) const {
    constexpr int kSize = BlockMask::kSize;
    const BlockMask& mask = problem_.block_mask;
    const int last_row = min(block_row_ + 16 * row_tiles_, rows_) - 1;
    const int last_key = min(tile_key(tile + 1), end_) - 1;
    for (int g = 0; g < (mask.stride[1] == 0 ? 1 : group_); g++) {
      for (int i = block_row_ / group_ / kSize; i <= last_row / group_ / kSize; i++) {
        for (int k = max(tile_key(tile), begin_) / kSize; k <= last_key / kSize; k++) {
          if (mask.block(b_, h_kv_ * group_ + g, i, k) != 0) return true;
        }
      }
    }
    return false;
  }

  // Starts the copies of a group of keys and values, key `first` the first. Keys outside the split are not read; their
  // places are filled with zeros as far as the group is used at all.
  __device__ __forceinline__ void load_group(int first, int slot) const {
    if (first < end_) {
      const uint32_t keys = group_address(slot), values = keys + kGroupKeys * kRowBytes;
#pragma unroll
      for (int pass = 0; pass < kGroupKeys / kPassKeys; pass++) {
        const int r = pass * kPassKeys + threadIdx.x / kChunks;
        const bool inside = first + r >= begin_ && first + r < end_;
        const int64_t key = inside ? first + r : begin_;
        copy_async_16(copy_address(keys, r), key_ + key * problem_.k.stride[2], inside ? key_bytes_ : 0);
        copy_async_16(copy_address(values, r), value_ + key * problem_.v.stride[2],
                      inside ? value_bytes_ : 0);
      }
    }
    commit_copies();  // also when there was nothing to copy, so that groups can be counted
  }

  // The block's rows of Q, one group of copies.
  __device__ __forceinline__ void load_queries(uint32_t queries) const {
    const int column = key_bytes_ > 0 ? threadIdx.x % kChunks * 8 : 0;
    for (int r = threadIdx.x / kChunks; r < 16 * row_tiles_; r += kPassKeys) {
      const DecodeRow row = start_row(block_row_ + r);
      const uint16_t* from = element<uint16_t>(problem_.q, b_, row.h, row.i, column);
      copy_async_16(copy_address(queries, r), from, block_row_ + r < rows_ ? key_bytes_ : 0);
    }
    commit_copies();
  }

  const ForwardParams& p_;
  const AttentionParams& problem_;
  const int lane_, warp_, first_chunk_;  // warps of other columns have the same number
  const float scale_;
  // The lane's row address for ldmatrix. Rows lie at multiples of their size, a power of two: so adding a chunk to the
  // lane's own is XOR.
  const uint32_t lane_rows_, lane_pair_;
  int b_, h_kv_, rows_, group_;
  unsigned split_;
  int block_row_, row_tiles_, row_tile_;  // the block's first row, its row tiles, the warp's one
  int begin_, end_;                       // keys of the split
  const uint16_t *key_, *value_;          // this thread's chunk of the head's first row
  int key_bytes_, value_bytes_;
  DecodeTerms<Half> terms_;
  bool has_terms_;
  uint32_t ring_ = 0;
};

}  // namespace attn_ext::cuda

// Two blocks an SM: what shared memory allows on A100 and H100 (decode_sizes.h).
#define ATTN_DECODE_KERNEL(name, Half, bucket)                                                    \
  extern "C" __global__ void __launch_bounds__(attn_ext::cuda::decode_sizes(bucket).threads(), 2) \
      name(const __grid_constant__ attn_ext::cuda::ForwardParams params) {                        \
    attn_ext::cuda::Decode<attn_ext::cuda::Half, bucket>(params).run();                           \
  }                                                                                               \
  ATTN_REGISTER_KERNEL(name)
