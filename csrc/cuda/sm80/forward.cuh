// Forward on tensor cores, lean variant: causal, window, key and query lengths, grouped heads.
//
// A block owns a tile of query rows and walks the keys its rows see, in tiles from the last to the first. One pass of
// the main loop is a single run of code without a branch, so that the assembler overlaps all of
//
//   S = Q K(j)^T,   P(j) = exp2(scale * S - maximum),   O += P(j+1) V(j+1)
//
// and the copies of V(j) and K(j-1). It has no row maximum, no rescaling and no mask. The maximum is the one known from
// earlier tiles, which is as good as any as long as P stays in range. When a thread's sum over the tile says that it
// did not (or is NaN), nothing of the tile has reached O or the sums yet: the warp leaves the loop and does the tile
// again in the exact body, which masks, raises the maximum to the tile's own, and rescales. Tiles at the edges of the
// visible band, the first one among them, always take the exact body.
#pragma once

#include "../tile/block_order.h"
#include "../tile/visibility.cuh"
#include "forward_block.cuh"
#include "key_value_ring.cuh"

namespace attn_ext::cuda {

// Sums of a thread's probabilities of one tile above this send the tile to the exact body.
#ifndef ATTN_OPTIMISTIC_LIMIT
#define ATTN_OPTIMISTIC_LIMIT Half::kOptimisticLimit
#endif

template <class Half, int HeadDim, ForwardVariant Variant>
struct LeanForward : ForwardBlock<Half, HeadDim, Variant> {
  using Block = ForwardBlock<Half, HeadDim, Variant>;
  using Block::Block, Block::kM, Block::kN;
  using typename Block::Probabilities, typename Block::Scores;

  // P of the tile's keys 16 n .. 16 n + 15; adds to the thread's sums.
  __device__ __forceinline__ static void exponentials(FragmentA (&p)[kM], float (&sum)[kM][2],
                                                      const Scores& s, int n, float scale_log2,
                                                      const float (&minus_max)[kM][2]) {
#pragma unroll
    for (int m = 0; m < kM; m++) {
#pragma unroll
      for (int e = 0; e < 4; e++) {  // pairs in the order of an A fragment
        const float* score = s[m][2 * n + e / 2].reg + e % 2 * 2;
        const float low = exp2_fast(fmaf(score[0], scale_log2, minus_max[m][e % 2]));
        const float high = exp2_fast(fmaf(score[1], scale_log2, minus_max[m][e % 2]));
        sum[m][e % 2] += low;
        sum[m][e % 2] += high;
        p[m].reg[e] = pack<Half>(low, high);
      }
    }
  }

  // The exact body: P of a whole tile, with masks, against a maximum raised to the tile's own.
  __device__ __forceinline__ void exact_tile(Probabilities& p, uint32_t stage, int row0, int key0,
                                             const Visibility& visible, float scale_log2) {
    Scores s;
    this->multiply_qk(s, stage);
    const int first_key = key0 + this->lane() % 4 * 2;
    keep_in_register(row0);  // else what follows from it would be held in registers all through the main loop
    float minus_max[kM][2];
#pragma unroll
    for (int m = 0; m < kM; m++) {
#pragma unroll
      for (int r = 0; r < 2; r++) {
        // Rows that do not exist see what the last one sees: without a maximum, they would fail every tile.
        const KeyRange range = visible.of_query(min(row0 + this->row(m, r), visible.queries - 1));
        float top = -ATTN_INFINITY;
#pragma unroll
        for (int n = 0; n < kN; n++) {
#pragma unroll
          for (int e = 0; e < 2; e++) {
            float& score = s[m][n].reg[2 * r + e];
            const int key = first_key + n * 8 + e;
            score = key >= range.begin && key < range.end ? score * scale_log2 : -ATTN_INFINITY;
            top = fmaxf(top, score);
          }
        }
        const float before = -this->minus_max[m][r], now = fmaxf(before, quad_max(top));
        this->minus_max[m][r] = -now;
        minus_max[m][r] = now == -ATTN_INFINITY ? 0.0f : -now;  // no key yet: exp2(-inf + 0) = 0, not NaN
        this->rescale(m, r, exp2_fast(before + minus_max[m][r]));
      }
    }
#pragma unroll
    for (int n = 0; n < kN / 2; n++) exponentials(p[n], this->sum, s, n, 1.0f, minus_max);
  }
};

template <class Half, int HeadDim, ForwardVariant Variant>
__device__ __forceinline__ void attn_forward(const ForwardParams& params) {
  using Block = LeanForward<Half, HeadDim, Variant>;
  using Ring = KeyValueRing<HeadDim, Variant>;
  constexpr ForwardTile kTile = Block::kTile;
  constexpr int kM = Block::kM, kN = Block::kN;
  extern __shared__ __align__(16) char shared_memory[];
  const uint32_t shared = shared_address(shared_memory);
  const AttentionParams& p = params.problem;

  const BlockPlace place = place_of_block(p, blockIdx.x, kTile.rows());
  const int b = place.batch, h = place.head, row0 = place.row;
  const Visibility visible(p, b);
  const KeyTiles tiles(visible, row0, kTile.rows(), kTile.keys);
  KeyTiles own(visible, row0 + warp_uniform(Block::warp_row()), kTile.warp_rows, kTile.keys);  // the warp's
  const float scale_log2 = float(p.scale) * kLog2E;
  Block block(shared);

  if (tiles.last >= tiles.first) {
    keep_in_register(own.whole_first);
    keep_in_register(own.whole_last);
    Ring ring(shared, p, b, h / (int(p.heads_q) / int(p.heads_kv)), tiles.first, tiles.last, visible.keys);
    block.load_queries(shared, p, b, h, row0, visible.queries);
    ring.start();
    commit_copies();
    block.take_queries();

    typename Block::Probabilities prob;
    bool pending = false;  // prob holds P(j + 1), which has not met V(j + 1)
    bool again = false;  // tile j failed in the main loop: its copies are done, and P(j + 1) V(j + 1) is in O
    for (int j = tiles.last; j >= tiles.first;) {
      if (!again) {
        ring.arrive();
        ring.fetch(j);
        if (pending) block.multiply_pv(prob, ring.other_stage());
      }
      again = false;
      pending = j >= own.first && j <= own.last;
      if (pending) block.exact_tile(prob, ring.stage, row0, j * kTile.keys, visible, scale_log2);
      ring.stage = ring.other_stage();
      j--;
      if (j > own.whole_last) continue;

      while (j >= own.whole_first) {
        ring.arrive();
        typename Block::Scores s;
        block.multiply_qk(s, ring.stage);
        typename Block::Probabilities next;
        float sum[kM][2] = {};
#pragma unroll
        for (int n = 0; n < kN / 2; n++) {
          // Below the first product, since ldmatrix is never moved up across copies.
          if (n == kTile.copies_at) ring.fetch_whole(j);
          block.multiply_pv(prob, n, ring.other_stage());
          block.exponentials(next[n], sum, s, n, scale_log2, block.minus_max);
        }
        float total = 0.0f;
#pragma unroll
        for (int m = 0; m < kM; m++) total += sum[m][0] + sum[m][1];
        again = __any_sync(0xffffffffu, !(total <= ATTN_OPTIMISTIC_LIMIT));
#pragma unroll
        for (int n = 0; n < kN / 2; n++) {
#pragma unroll
          for (int m = 0; m < kM; m++) prob[n][m] = next[n][m];
        }
        if (again) break;
#pragma unroll
        for (int m = 0; m < kM; m++) {
          block.sum[m][0] += sum[m][0];
          block.sum[m][1] += sum[m][1];
        }
        ring.stage = ring.other_stage();
        j--;
      }
    }
    ring.arrive();  // V of the first tile
    if (pending) block.multiply_pv(prob, ring.other_stage());
  }

#pragma unroll
  for (int m = 0; m < kM; m++) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int row = row0 + block.row(m, r);
      const float sum = quad_sum(block.sum[m][r]);
      const bool empty = row >= visible.queries || sum == 0.0f;
      if (row < p.len_q) {
        block.finish_row(params.output, b, h, row, m, r, empty, 1.0f / sum,
                         empty ? -ATTN_INFINITY : -block.minus_max[m][r] * kLn2,
                         empty ? 0.0f : log2f(sum) * kLn2);
      }
    }
  }
  block.store(params.output.out, shared_memory, b, h, row0, p.len_q - row0, int(p.dim_v));
}

}  // namespace attn_ext::cuda
