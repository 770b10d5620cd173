// dQ on Hopper: a sum over the blocks that own keys, each of which has its part of it for a whole tile of queries.
//
// The parts are added in float32 in global memory, always in the order of the keys, so that the result has the same bits in
// every run. BackwardParams::turns counts, for each tile, the blocks that have added theirs; a block waits until all those
// with smaller keys have. The first one stores: nobody has to make zeros before.
//
// No block waits in vain: numbers (key_block_of_number) are given to blocks that have started, and a block waits for smaller
// ones only. And none waits long: all walk over their tiles from the last one down, all heads of the group at each, so that
// in a causal problem all are at the same tile at a time, and drop out at theirs; under a window blocks with smaller keys
// come to a tile earlier. So whoever comes first is next in turn, and a block falls behind the one before it only once, at
// the start.
#pragma once

#include "backward_tile.cuh"

namespace attn_ext::cuda::sm90 {

// A number for this block: how many have taken one before.
__device__ __forceinline__ uint32_t take_number(const cuda::BackwardParams& params) {
  return atomicAdd(params.turns + params.turn_count - 1, 1u);
}

// What others have written before they raised the counter is there for this thread once it reads it. (PTX ISA, "Memory
// consistency model": release and acquire.)
__device__ __forceinline__ uint32_t read_turn(const uint32_t* turn) {
  uint32_t x;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(turn) : "memory");
  return x;
}

__device__ __forceinline__ void write_turn(uint32_t* turn, uint32_t x) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(turn), "r"(x) : "memory");
}

// What the thread does that adds up dQ.
template <int kDim>
__device__ __forceinline__ void add_up(const cuda::BackwardParams& params, const BackwardShared<kDim>& shared,
                                       const BackwardWork& work) {
  constexpr int kQueries = backward_queries(kDim);
  const AttentionParams& p = params.problem;
  const Visibility visibility(p, work.batch);
  const int64_t tiles = params.row_stride / kQueries;
  const bool wanted = params.query_sums != nullptr;
  RingPosition<1> ring;
  work.for_each_tile([&](int head, int tile) {
    const int64_t place = (int64_t(work.batch) * p.heads_q + head) * tiles + tile;
    shared.sum_stage().full(0).wait(ring.parity);  // both warpgroups' parts are there
    const uint32_t turn = turn_of_block(visibility, work.first_key, kBackwardKeys, tile, kQueries);
    if (wanted) {
      while (read_turn(params.turns + place) != turn) {
      }
      fence_async_proxy_global();  // bulk stores of others, then this one
      bulk_store(params.query_sums + place * sums_elements(kDim), shared.sums(),
                 BackwardShared<kDim>::kSumBytes, turn > 0);
      commit_bulk_stores();
      wait_for_bulk_reads();
    }
    shared.sum_stage().empty(0).arrive_if(true);
    if (wanted) {
      wait_for_bulk_stores();
      fence_async_proxy_global();  // this bulk store, then those of others
      write_turn(params.turns + place, turn + 1);
    }
    ring.advance();
  });
}

// A block of the kernel after that: the sums of a tile, scaled and rounded, go where dQ belongs. Zeros where no block has
// added anything. A thread takes 16 columns of 2 queries: eight float4 in which a quad of the wgmma fragment's lanes left
// columns r and r + 8 (see ../tile/fragment.cuh). Neighbouring threads: neighbouring queries, then columns.
template <class Half, int kDim>
__device__ __forceinline__ void store_query_gradients(const cuda::BackwardParams& params) {
  constexpr int kQueries = backward_queries(kDim), kColumnGroups = panels(kDim) * kPanelColumns / 16;
  constexpr int kHalf = sums_fragments(kDim) * 128;  // float4 of a warpgroup
  const AttentionParams& p = params.problem;
  const int64_t tiles = params.row_stride / kQueries, place = blockIdx.x;
  const int64_t head = place / tiles, tile = place % tiles;
  const int pair = threadIdx.x % 4, columns = threadIdx.x / 4 % kColumnGroups;
  const int eight = threadIdx.x / (4 * kColumnGroups);  // of queries
  const int group = panels(kDim) == 2 ? columns / 4 : eight / sums_fragments(kDim);
  const float4* source = reinterpret_cast<const float4*>(params.query_sums + place * sums_elements(kDim)) +
                         group * kHalf + eight % sums_fragments(kDim) * 128 + columns % 4 * 32 + pair;
  const bool any = params.turns[place] > 0;
  float sum[2][16];
#pragma unroll
  for (int r = 0; r < 8; r++) {
    const float4 x = any ? source[r * 4] : float4{};
    sum[0][r] = x.x, sum[1][r] = x.y, sum[0][r + 8] = x.z, sum[1][r + 8] = x.w;
  }
  const float scale = float(p.scale);
  const StridedView& view = params.io.grad_q;
  const bool wide = wide_rows(view, int(p.dim_qk));
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int64_t query = tile * kQueries + eight * 8 + pair * 2 + i;
    if (query >= p.len_q) continue;
    uint32_t half[8];
#pragma unroll
    for (int e = 0; e < 8; e++) half[e] = pack<Half>(sum[i][2 * e] * scale, sum[i][2 * e + 1] * scale);
    char* row = view.at(head / p.heads_q, head % p.heads_q, query, columns * 16);
    const int left = int(p.dim_qk) - columns * 16;
    if (wide) {
      if (left > 0) *reinterpret_cast<uint4*>(row) = {half[0], half[1], half[2], half[3]};
      if (left > 8) *reinterpret_cast<uint4*>(row + 16) = {half[4], half[5], half[6], half[7]};
    } else {
#pragma unroll
      for (int e = 0; e < 16; e++) {
        if (e < left) reinterpret_cast<uint16_t*>(row)[e] = uint16_t(half[e / 2] >> e % 2 * 16);
      }
    }
  }
}

}  // namespace attn_ext::cuda::sm90
