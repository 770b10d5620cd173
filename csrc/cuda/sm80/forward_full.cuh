// Forward on tensor cores, full variant: what the lean one has (forward.cuh), and bias, masks, ALiBi, softcap,
// sinks and dropout, each behind a branch that the whole grid takes alike. Of a block mask, tiles in which it hides
// everything are not visited, and only where it hides something are its bits looked at.
//
// Every tile takes the exact body: logits in natural units, the tile's maximum, P = exp2((s - maximum) * log2(e)). The
// subtraction comes first, because s * log2(e) of a mask of finfo.min would overflow to -inf, and such a mask absorbs
// the score but does not hide the key.
#pragma once

#include "../tile/block_mask.cuh"
#include "../tile/block_order.h"
#include "../tile/dropout.cuh"
#include "../tile/logits.cuh"
#include "../tile/visibility.cuh"
#include "forward_block.cuh"
#include "key_value_ring.cuh"

namespace attn_ext::cuda {

template <class Half, int HeadDim>
struct FullForward : ForwardBlock<Half, HeadDim, ForwardVariant::kFull> {
  using Block = ForwardBlock<Half, HeadDim, ForwardVariant::kFull>;
  using Block::Block, Block::kM, Block::kN;
  using typename Block::Probabilities, typename Block::Scores;

  // P of a whole tile against a maximum raised to the tile's own. Adds to the thread's sums, which dropout leaves
  // alone.
  __device__ __forceinline__ void tile(Probabilities& p, uint32_t stage, int row0, int key0,
                                       const Visibility& visible, bool whole, int32_t block_entry,
                                       const Logits<Half>& logits, const DropoutNumbers& dropout) {
    Scores s;
    this->multiply_qk(s, stage);
    // Else the rows' limits and their addresses in every mask would be held in registers all along.
    keep_in_register(row0);
#pragma unroll
    for (int m = 0; m < kM; m++) {
      const int row[2] = {row0 + this->row(m, 0), row0 + this->row(m, 1)};
      const KeyRange seen[2] = {visible.of_query(row[0]), visible.of_query(row[1])};
      logits.apply(s[m], row, key0, seen, whole, block_entry);

#pragma unroll
      for (int r = 0; r < 2; r++) {
        float top = -ATTN_INFINITY;
#pragma unroll
        for (int n = 0; n < kN; n++) top = fmaxf(top, fmaxf(s[m][n].reg[2 * r], s[m][n].reg[2 * r + 1]));
        const float before = -this->minus_max[m][r], now = fmaxf(before, quad_max(top));
        this->minus_max[m][r] = -now;
        // No key yet: exp2(-inf + 0) = 0, not NaN.
        const float minus_max = now == -ATTN_INFINITY ? 0.0f : -now;
        // Mostly nothing has grown, and the factor is 1.
        if (__any_sync(0xffffffffu, now > before))
          this->rescale(m, r, exp2_fast((before + minus_max) * kLog2E));
#pragma unroll
        for (int n = 0; n < kN; n++) {
#pragma unroll
          for (int e = 0; e < 2; e++) {
            float& x = s[m][n].reg[2 * r + e];
            x = exp2_fast((x + minus_max) * kLog2E);
            this->sum[m][r] += x;
          }
        }
        if (dropout.threshold != 0) {
#pragma unroll
          for (int n = 0; n < kN; n += 4) {
            uint32_t word[4];
            dropout.quad_numbers(word, row[r], key0 + n * 8);
#pragma unroll
            for (int i = 0; i < 4; i++) {
              float* x = s[m][n + i].reg + 2 * r;
              if (!dropout.keep_low(word[i])) x[0] = 0.0f;
              if (!dropout.keep_high(word[i])) x[1] = 0.0f;
            }
          }
        }
      }
#pragma unroll
      for (int n = 0; n < kN / 2; n++) {
#pragma unroll
        for (int e = 0; e < 4; e++) {  // pairs in the order of an A fragment
          const float* x = s[m][2 * n + e / 2].reg + e % 2 * 2;
          p[n][m].reg[e] = pack<Half>(x[0], x[1]);
        }
      }
    }
  }
};

template <class Half, int HeadDim>
__device__ __forceinline__ void attn_forward_full(const ForwardParams& params) {
  using Block = FullForward<Half, HeadDim>;
  using Ring = KeyValueRing<HeadDim, ForwardVariant::kFull>;
  constexpr ForwardTile kTile = Block::kTile;
  extern __shared__ __align__(16) char shared_memory[];
  const uint32_t shared = shared_address(shared_memory);
  const AttentionParams& p = params.problem;

  const BlockPlace place = place_of_block(p, blockIdx.x, kTile.rows());
  const int b = place.batch, h = place.head, row0 = place.row;
  const Visibility visible(p, b);
  const KeyTiles tiles(visible, row0, kTile.rows(), kTile.keys);
  // Those of the warp's own rows.
  const KeyTiles own(visible, row0 + warp_uniform(Block::warp_row()), kTile.warp_rows, kTile.keys);
  const Logits<Half> logits(p, b, h);
  const DropoutNumbers dropout(p.dropout, b, h);
  Block block(shared);
  const TileWalk<kTile.keys> walk{p.block_mask, tiles.first};
  static_assert(kTile.rows() == BlockMask::kSize);
  const auto entry_at = [&](int k) { return p.block_mask.block(b, h, row0 / BlockMask::kSize, k); };

  MaskedTile now = walk.last(tiles.last, entry_at);
  if (now.tile >= tiles.first) {
    Ring ring(shared, p, b, h / (int(p.heads_q) / int(p.heads_kv)), tiles.first, now.tile, visible.keys);
    block.load_queries(shared, p, b, h, row0, visible.queries);
    ring.start();
    commit_copies();
    block.take_queries();

    typename Block::Probabilities prob;
    bool pending = false;  // prob holds P of the tile before, which has not met its V
    while (now.tile >= tiles.first) {
      int j = now.tile;
      keep_in_register(j);  // not a uniform one: comparing those and computing with them takes longer
      ring.arrive();
      ring.fetch_values(j);
      const MaskedTile next = walk.before(now, entry_at);
      if (p.block_mask.present() && next.tile >= tiles.first) ring.skip(j - 1 - next.tile);
      ring.fetch_keys_before(next.tile + 1);
      if (pending) block.multiply_pv(prob, ring.other_stage());
      pending = j >= own.first && j <= own.last;
      if (pending) {
        const bool whole = j >= own.whole_first && j <= own.whole_last && now.entry == 1;
        block.tile(prob, ring.stage, row0, j * kTile.keys, visible, whole, now.entry, logits, dropout);
      }
      ring.stage = ring.other_stage();
      now = next;
    }
    ring.arrive();
    if (pending) block.multiply_pv(prob, ring.other_stage());
  }

  const float kept = p.dropout.threshold != 0 ? float(p.dropout.scale()) : 1.0f;
  const float sink =
      p.sinks.present ? load_element<Half>(p.sinks.at(0, h, 0, 0), p.sinks.dtype) : -ATTN_INFINITY;
#pragma unroll
  for (int m = 0; m < Block::kM; m++) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int row = row0 + block.row(m, r);
      float sum = quad_sum(block.sum[m][r]), top = -block.minus_max[m][r];
      const bool empty = row >= visible.queries || sum == 0.0f;
      if (empty) sum = 0.0f, top = -ATTN_INFINITY;
      float factor = kept;
      if (sink != -ATTN_INFINITY) {  // one more logit in the sum, without a key
        const float now = fmaxf(top, sink), shrink = exp2_fast((top - now) * kLog2E);
        sum = sum * shrink + exp2_fast((sink - now) * kLog2E);
        factor *= shrink;
        top = now;
      }
      if (row < p.len_q) {
        block.finish_row(params.output, b, h, row, m, r, empty, factor / sum, top,
                         sum == 0.0f ? 0.0f : log2f(sum) * kLn2);
      }
    }
  }
  block.store(params.output.out, shared_memory, b, h, row0, p.len_q - row0, int(p.dim_v));
}

}  // namespace attn_ext::cuda
