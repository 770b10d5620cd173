// Forward mode on tensor cores: the tangents (written with a dot) of out and lse along tangents of the inputs, with
// every option, each behind a branch that the whole grid takes alike. A block owns a tile of queries of one head and
// walks over the keys they see, from the last tile to the first, but for tiles in which a block mask hides everything:
//
//   P    = exp(S - lse)                       lse as the forward saved it: no maximum to keep, nothing to rescale
//   S.   = scale (Q. K^T + Q K.^T) * slope of the cap + bias. + float_mask. - slope. |i + Nk - Nq - j|
//   lse. = sum_j P S. + exp(sink - lse) sink.
//   out. = sum_j factor P S. V + sum_j factor P V. - lse. out           factor: dropout's 0 or 1 / (1 - p)
//
// Five products at most; one whose tangent is absent is left out, and so are the copies of what only it reads.
//
// Shared memory holds K and K., V and V. of one tile. While P and S. are made of the first pair the second is under
// way, and while they meet the second, the first pair of the next tile.
#pragma once

#include "../tile/block_mask.cuh"
#include "../tile/block_order.h"
#include "backward_logits.cuh"
#include "backward_tile.cuh"
#include "jvp_sizes.h"

namespace attn_ext::cuda {

// One warp's part: 16 queries.
template <class Half, int kDim>
struct Jvp {
  static constexpr BackwardTile kTile = jvp_tile(kDim);
  static constexpr int kThreads = kTile.threads(), kQueries = kTile.rows(), kKeys = kTile.stream;
  static constexpr int kRowBytes = shared_row_bytes(kDim);
  static constexpr int kOwnBytes = kQueries * kRowBytes, kStreamBytes = kKeys * kRowBytes;
  static_assert(kTile.warp_rows == 16 && kTile.held >= 1);
  using Scores = FragmentC[1][kKeys / 8];
  using Weights = FragmentA[kKeys / 16][1];

  const AttentionParams& p;
  const JvpIO& io;
  int b, h, block_query, warp_query;  // first queries of the block and of the warp
  bool moves_scores;                  // there may be an S.

  FragmentC sum[1][kDim / 8];  // of factor P S. V + factor P V., but for the factor 1 / (1 - p)
  // Of rows lane / 4 and lane / 4 + 8: the LSE in two parts, the maximum +inf where nothing is seen, so that P = 0;
  // and this lane's share of sum_j P S., exact and of P S. as rounded to halves for the product with V. out. takes away
  // the latter times out: what a rounding moves is then times V - out, which is small where the weight is large. With
  // the exact sum it would be times V, and a row of one single weight, whose out cannot move, would seem to.
  float max[2], minus_log2[2], tangent_lse[2], rounded_lse[2];
  uint32_t has_weight = 0;  // bit r: one of this lane's P in row r is not 0

  static __device__ __forceinline__ void run(const JvpParams& params) {
    extern __shared__ __align__(128) char shared[];
    Jvp block(params);
    block.walk(shared);
    // In the place of the warp's own rows or, with all of these in registers, of keys, which all warps have left.
    static_assert(kTile.held < 2 || 2 * kKeys >= kQueries);
    block.finish(shared + threadIdx.x / 32 * 16 * kRowBytes);
  }

 private:
  __device__ __forceinline__ explicit Jvp(const JvpParams& params) : p(params.problem), io(params.io) {
    const BlockPlace place = place_of_block(p, blockIdx.x, kQueries);
    b = place.batch;
    h = place.head;
    block_query = place.row;
    warp_query = block_query + warp_uniform(threadIdx.x / 32) * 16;
    moves_scores = io.tangent_q.present || io.tangent_k.present || io.tangent_bias.present ||
                   io.tangent_float_mask.present || io.tangent_alibi_slopes.present;
    clear(sum);
#pragma unroll
    for (int r = 0; r < 2; r++) {
      max[r] = ATTN_INFINITY;
      minus_log2[r] = tangent_lse[r] = rounded_lse[r] = 0.0f;
      if (query(r) >= p.valid_queries(b)) continue;
      const float top = lse_part(r, 0);
      if (top != -ATTN_INFINITY) max[r] = top;
      minus_log2[r] = -kLog2E * lse_part(r, 1);
    }
  }

  // The query of this lane's row r of C fragments.
  __device__ __forceinline__ int query(int r) const { return warp_query + r * 8 + int(threadIdx.x) % 32 / 4; }

  __device__ __forceinline__ float lse_part(int r, int part) const {
    return *reinterpret_cast<const float*>(element<4>(io.lse_parts, b, h, query(r), part));
  }

  __device__ __forceinline__ void walk(char* shared) {
    const Visibility visibility(p, b);
    const KeyTiles tiles(visibility, block_query, kQueries, kKeys);
    const KeyTiles own(visibility, warp_query, 16, kKeys);  // the warp's
    const bool terms = p.bias.present || p.float_mask.present || p.bool_mask.present ||
                       p.alibi_slopes.present || has_softcap(p) || p.dropout.threshold != 0;
    const TileWalk<kKeys> walk{p.block_mask, tiles.first};
    static_assert(kQueries == BlockMask::kSize);
    const auto entry_at = [&](int k) { return p.block_mask.block(b, h, warp_query / BlockMask::kSize, k); };
    MaskedTile now = walk.last(tiles.last, entry_at);
    if (now.tile < tiles.first) return;

    const uint32_t keys = shared_address(shared) + (2 - kTile.held) * kOwnBytes,
                   values = keys + 2 * kStreamBytes;
    // Queries that go on to registers land where keys and values will be.
    const uint32_t tangent_queries = kTile.held == 2 ? keys + kOwnBytes : shared_address(shared);

    copy_queries(p.q, keys, visibility);
    copy_queries(io.tangent_q, tangent_queries, visibility);
    commit_copies();
    wait_for_copies<0>();
    __syncthreads();  // all threads' copies have arrived
    const uint32_t own_offset = threadIdx.x / 32 * 16 * kRowBytes + lane_offset_a<kRowBytes>();
    OwnOperand<kDim, 16, true> query;
    OwnOperand<kDim, 16, kTile.held == 2> tangent_query;
    query.set(keys + own_offset);
    if (io.tangent_q.present) tangent_query.set(tangent_queries + own_offset);
    __syncthreads();  // all have read them before keys and values take their memory

    const uint32_t lane_keys = keys + lane_offset_b_pair<kRowBytes>();
    const uint32_t lane_values = values + lane_offset_a<kRowBytes>();
    const int head_kv = h / (int(p.heads_q) / int(p.heads_kv));
    auto copy_keys = [&](int tile) {
      copy(p.k, head_kv, int(p.dim_qk), tile, visibility.keys, keys);
      copy(io.tangent_k, head_kv, int(p.dim_qk), tile, visibility.keys, keys + kStreamBytes);
      commit_copies();
    };
    copy_keys(now.tile);
#pragma unroll 1
    while (now.tile >= tiles.first) {
      const int tile = now.tile;
      const bool seen = tile >= own.first && tile <= own.last;
      const bool whole = tile >= own.whole_first && tile <= own.whole_last && now.entry == 1;
      Weights prob, moved;  // factor P, factor P S.

      wait_for_copies<0>();
      __syncthreads();  // the keys have arrived for all; all are done with the values before, whose memory is taken now
      if (moves_scores) copy(p.v, head_kv, int(p.dim_v), tile, visibility.keys, values);
      copy(io.tangent_v, head_kv, int(p.dim_v), tile, visibility.keys, values + kStreamBytes);
      commit_copies();
      if (seen) {
        Scores score, move;
        clear(score);
        clear(move);
        if (io.tangent_q.present) {
          multiply_keys(score, move, query, tangent_query, lane_keys);
        } else {
          multiply_rows<Half, kDim, 1, kKeys>(score, query, lane_keys);
        }
        if (io.tangent_k.present) multiply_rows<Half, kDim, 1, kKeys>(move, query, lane_keys + kStreamBytes);
        if (terms || !whole) {
          weigh<true>(prob, moved, score, move, tile * kKeys, now.entry);
        } else {
          weigh<false>(prob, moved, score, move, tile * kKeys, now.entry);
        }
      }

      const MaskedTile next = walk.before(now, entry_at);
      wait_for_copies<0>();
      __syncthreads();  // the values have arrived for all; all are done with the keys, whose memory is taken now
      if (next.tile >= tiles.first) copy_keys(next.tile);
      if (seen) {
#pragma unroll
        for (int n = 0; n < kKeys / 16; n++) {
          const uint32_t rows = lane_values + n * 16 * kRowBytes;
          if (moves_scores) multiply_columns<Half, kDim>(sum, moved[n], rows);
          if (io.tangent_v.present) multiply_columns<Half, kDim>(sum, prob[n], rows + kStreamBytes);
        }
      }
      now = next;
    }
  }

  __device__ __forceinline__ void copy_queries(const StridedView& view, uint32_t to,
                                               const Visibility& visibility) const {
    using Loader = RowLoader<kDim, kQueries, kThreads>;
    if (!view.present) return;
    Loader(view, b, h, block_query, int(p.dim_qk))
        .load(Loader::target(to), visibility.queries - block_query, view.data);
  }

  // Addresses are made anew for each tile: registers are scarcer here than instructions.
  __device__ __forceinline__ void copy(const StridedView& view, int head, int dim, int tile, int num_keys,
                                       uint32_t to) const {
    using Loader = RowLoader<kDim, kKeys, kThreads>;
    if (!view.present) return;
    Loader(view, b, head, tile * kKeys, dim).load(Loader::target(to), num_keys - tile * kKeys, view.data);
  }

  // score += Q K^T and move += Q. K^T, in one pass over the keys.
  template <class Query, class TangentQuery>
  __device__ __forceinline__ static void multiply_keys(Scores& score, Scores& move, const Query& query,
                                                       const TangentQuery& tangent_query, uint32_t keys) {
#pragma unroll
    for (int k = 0; k < kDim / 16; k++) {
      FragmentA q[1], t[1];
      query.get(q, k);
      tangent_query.get(t, k);
#pragma unroll
      for (int n = 0; n < kKeys / 8; n += 2) {
        uint32_t key[4];
        ldmatrix_x4(key, keys + n * 8 * kRowBytes + k * 32);
        mma<Half>(score[0][n], q[0], key[0], key[1]);
        mma<Half>(score[0][n + 1], q[0], key[2], key[3]);
        mma<Half>(move[0][n], t[0], key[0], key[1]);
        mma<Half>(move[0][n + 1], t[0], key[2], key[3]);
      }
    }
  }

  // The products of a tile, score and move, to factor P and factor P S. kEvery: with every option; else there is
  // nothing beside the products, and all rows see all of the tile. entry: as in BackwardLogits::visible.
  template <bool kEvery>
  __device__ __forceinline__ void weigh(Weights& prob, Weights& moved, const Scores& score,
                                        const Scores& move, int first_key, int32_t entry) {
    // Made here, and not held in registers all along.
    const BackwardLogits<Half> logits(p, b, h);
#pragma unroll
    for (int n = 0; n < kKeys / 16; n++) {
      const ScoreBlock<false> block{warp_query, first_key + n * 16};
      FragmentC s[2] = {score[0][2 * n], score[0][2 * n + 1]}, t[2] = {move[0][2 * n], move[0][2 * n + 1]};
      uint32_t visible = 0xff, kept = 0xff;
      for_each(t, [&](float& x, int, int) { x *= logits.scale; });
      if constexpr (kEvery) {
        FragmentC slope[2];
        visible = logits.visible(block, entry);
        kept = logits.kept(block);
        logits.finish(s, slope, visible, block);
        if (moves_scores) add_tangents(t, slope, visible, block, logits);
      } else {
        for_each(s, [&](float& x, int, int) { x *= logits.scale; });
      }
      for_each(s, [&](float& x, int i, int e) {
        float& y = t[i].reg[e];
        const int r = e / 2;
        const float weight = test(visible, i, e) ? probability(x, max[r], minus_log2[r]) : 0.0f;
        // A key with P = 0 has no part in it, whatever K and the tangents hold there.
        y = weight == 0.0f ? 0.0f : weight * y;
        tangent_lse[r] += y;
        if (weight != 0.0f) has_weight |= 1u << r;
        x = weight;
        if (!test(kept, i, e)) {
          rounded_lse[r] += y;
          x = y = 0.0f;
        }
      });
      prob[n][0] = pack<Half>(s[0], s[1]);
      moved[n][0] = pack<Half>(t[0], t[1]);
      for_each(t, [&](float&, int i, int e) {
        const uint32_t pair = moved[n][0].reg[2 * i + e / 2];
        rounded_lse[e / 2] += to_float<Half>(uint16_t(pair >> e % 2 * 16));
      });
    }
  }

  // Calls f(element, n, e) for the lane's elements of a block.
  template <class F>
  __device__ __forceinline__ static void for_each(FragmentC (&x)[2], F f) {
#pragma unroll
    for (int n = 0; n < 2; n++) {
#pragma unroll
      for (int e = 0; e < 4; e++) f(x[n].reg[e], n, e);
    }
  }

  // scale (Q. K^T + Q K.^T) to S., in place. What it is where a key is hidden does not matter.
  __device__ __forceinline__ void add_tangents(FragmentC (&x)[2], const FragmentC (&slope)[2],
                                               uint32_t visible, const ScoreBlock<false>& block,
                                               const BackwardLogits<Half>& logits) const {
    for_each(x, [&](float& y, int n, int e) { y *= slope[n].reg[e]; });
    if (io.tangent_bias.present) add(io.tangent_bias, x, visible, block);
    if (io.tangent_float_mask.present) add(io.tangent_float_mask, x, visible, block);
    const StridedView& slopes = io.tangent_alibi_slopes;
    if (slopes.present) {
      const float tangent = load_element<Half>(slopes.at(b, h, 0, 0), slopes.dtype);
      for_each(x, [&](float& y, int n, int e) {
        y -= tangent * logits.distance(block.query(n, e), block.key(n, e));
      });
    }
  }

  __device__ __forceinline__ void add(const StridedView& term, FragmentC (&x)[2], uint32_t visible,
                                      const ScoreBlock<false>& block) const {
    const BlockAddresses<false> addresses(term, b, h, block);
    for_each(x, [&](float& y, int n, int e) {
      if (test(visible, n, e)) y += load_element<Half>(addresses.at(n, e), term.dtype);
    });
  }

  // The sums become the tangents of out and lse. Rows pass through `shared`, memory of the warp's own for 16 of them.
  __device__ __forceinline__ void finish(char* shared) {
    keep_in_register(warp_query);  // else what follows from it would be held in registers all along
    const int lane = threadIdx.x % 32, dim = int(p.dim_v);
    const float keep_scale = float(p.dropout.scale());
    has_weight |= __shfl_xor_sync(0xffffffffu, has_weight, 1);
    has_weight |= __shfl_xor_sync(0xffffffffu, has_weight, 2);
#pragma unroll
    for (int r = 0; r < 2; r++) {
      float total = quad_sum(tangent_lse[r]);
      float rounded = quad_sum(rounded_lse[r]);
      if (query(r) >= p.len_q) continue;
      if (io.tangent_sinks.present) {
        const float part = sink_part(r);
        total += part;
        rounded += part;
      }
      const auto* out = reinterpret_cast<const uint16_t*>(element<2>(io.out, b, h, query(r), 0));
#pragma unroll
      for (int d = 0; d < kDim / 8; d++) {
#pragma unroll
        for (int e = 0; e < 2; e++) {
          const int column = d * 8 + lane % 4 * 2 + e;
          float& x = sum[0][d].reg[2 * r + e];
          // Of an empty row, 0 times NaN may have left NaN in x.
          x = (has_weight >> r & 1) == 0 || column >= dim
                  ? 0.0f
                  : keep_scale * x - rounded * to_float<Half>(out[column]);
        }
      }
      if (lane % 4 == 0) *reinterpret_cast<float*>(element<4>(io.tangent_lse, b, h, query(r), 0)) = total;
    }
    gather_rows<Half, kDim>(shared, sum[0]);
    __syncwarp();  // the rows are complete before other lanes read them
    store_rows<kDim, 16>(shared, io.tangent_out, b, h, warp_query, min(int(p.len_q) - warp_query, 16), dim);
  }

  // exp(sink - lse) sink.
  __device__ __forceinline__ float sink_part(int r) const {
    const float sink = load_element<Half>(p.sinks.at(0, h, 0, 0), p.sinks.dtype);
    if (sink == -ATTN_INFINITY) return 0.0f;
    return probability(sink, lse_part(r, 0), -kLog2E * lse_part(r, 1)) *
           load_element<Half>(io.tangent_sinks.at(0, h, 0, 0), io.tangent_sinks.dtype);
  }
};

}  // namespace attn_ext::cuda
