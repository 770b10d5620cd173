// Gradient of a bias or float mask that is broadcast over queries, keys, heads or the batch, in its own shape. A block
// owns one tile of it and visits every tile of scores that it was added to, in a fixed order; the sum stays in registers
// and is written once. It needs S and dP once more, two products.
//
// Axes of size 1 are summed over: batch and heads by the walk alone, queries and keys by the walk over tiles and then
// over the rows and columns of the tile. Tiles in which a block mask hides everything are not visited.
#pragma once

#include "../tile/block_mask.cuh"
#include "backward_logits.cuh"
#include "backward_tile.cuh"

namespace attn_ext::cuda {

template <class Half, int kDim>
struct BackwardBias {
  static constexpr int kThreads = kBiasThreads, kQueries = kBiasRows, kKeys = bias_keys(kDim);
  static constexpr int kRowBytes = shared_row_bytes(kDim);
  using Lanes = RowLanes<kDim, kThreads>;
  using QueryLoader = RowLoader<kDim, kQueries, kThreads>;
  using KeyLoader = RowLoader<kDim, kKeys, kThreads>;

  static __device__ __forceinline__ void run(const BackwardParams& params) {
    extern __shared__ __align__(128) char shared[];
    const AttentionParams& p = params.problem;
    const BackwardIO& io = params.io;
    const StridedView& grad = params.of_float_mask ? io.grad_float_mask : io.grad_bias;
    const int64_t (&size)[4] = params.of_float_mask ? io.float_mask_size : io.bias_size;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

    // The block's tile, and the ranges of batch, heads, queries and keys that it is a sum over.
    const int64_t key_tiles = (size[3] + kKeys - 1) / kKeys,
                  query_tiles = (size[2] + kQueries - 1) / kQueries;
    const int64_t head_of_all = blockIdx.x / (key_tiles * query_tiles);
    const int bias_b = int(head_of_all / size[1]), bias_h = int(head_of_all % size[1]);
    const int bias_query = int(blockIdx.x / key_tiles % query_tiles) * kQueries,
              bias_key = int(blockIdx.x % key_tiles) * kKeys;
    const int b_end = size[0] == 1 ? int(p.batch) : bias_b + 1,
              h_end = size[1] == 1 ? int(p.heads_q) : bias_h + 1;
    const int query_end = size[2] == 1 ? int(p.len_q) : min(bias_query + kQueries, int(p.len_q));
    const int key_end = size[3] == 1 ? int(p.len_k) : min(bias_key + kKeys, int(p.len_k));

    const uint32_t queries_shared = shared_address(shared),
                   grads_shared = queries_shared + kQueries * kRowBytes;
    const uint32_t keys_shared = grads_shared + kQueries * kRowBytes,
                   values_shared = keys_shared + kKeys * kRowBytes;
    const uint32_t lane_destination = Lanes::row() * kRowBytes + Lanes::byte();
    const uint32_t offset_b = lane_offset_b_pair<kRowBytes>();
    OwnOperand<kDim, 16, false> own_queries, own_grads;
    own_queries.set(queries_shared + warp * 16 * kRowBytes + lane_offset_a<kRowBytes>());
    own_grads.set(grads_shared + warp * 16 * kRowBytes + lane_offset_a<kRowBytes>());

    FragmentC sum[1][kKeys / 8];
    clear(sum);
    const float keep_scale = float(p.dropout.scale());

    // Tiles in which a block mask hides everything are not visited: the walk along each axis leaves them out, where the
    // place on the axes after it is known, which is the block's own if they are not summed over.
    const bool over_queries = size[2] == 1, over_keys = size[3] == 1, masked = p.block_mask.present();
    static_assert(kQueries == BlockMask::kSize && BlockMask::kSize % kKeys == 0);
    const auto entry_at = [&](int b, int h, int query, int key) {
      return p.block_mask.block(b, h, query / BlockMask::kSize, key / BlockMask::kSize);
    };
    const auto next = [&](int n, int end, auto is_filled) {
      return masked ? next_filled<1>(n, end, is_filled) : n;
    };

    const int heads = h_end - bias_h, all_heads = (b_end - bias_b) * heads;
    const auto next_head = [&](int n) {
      return next(n, all_heads, [&](int n) {
        return over_queries || over_keys ||
               entry_at(bias_b + n / heads, bias_h + n % heads, bias_query, bias_key) != 0;
      });
    };
    for (int n = next_head(0); n < all_heads; n = next_head(n + 1)) {
      const int b = bias_b + n / heads, h = bias_h + n % heads;
      const BackwardLogits<Half> logits(p, b, h);
      const Visibility& visibility = logits.visibility;
      const int query_tiles_end = (min(query_end, visibility.queries) + kQueries - 1) / kQueries;
      const auto next_queries = [&](int tile) {
        return next(tile, query_tiles_end,
                    [&](int tile) { return over_keys || entry_at(b, h, tile * kQueries, bias_key) != 0; });
      };
      for (int query_tile = next_queries(bias_query / kQueries); query_tile < query_tiles_end;
           query_tile = next_queries(query_tile + 1)) {
        const int query0 = query_tile * kQueries;
        const KeyRange seen = visibility.of_queries(query0, min(query0 + kQueries, query_end) - 1);
        const int64_t row = (b * p.heads_q + h) * params.row_stride;
        float4 terms[2];  // max, -log, -delta of the lane's rows; rows past the last one repeat it
#pragma unroll
        for (int r = 0; r < 2; r++) {
          const int query = min(query0 + warp * 16 + r * 8 + lane / 4, int(p.len_q) - 1);
          terms[r] = reinterpret_cast<const float4*>(params.row_terms)[row + query];
        }
        const int key_tiles_end = (min(key_end, seen.end) + kKeys - 1) / kKeys;
        const auto next_keys = [&](int tile) {
          return next(tile, key_tiles_end,
                      [&](int tile) { return entry_at(b, h, query0, tile * kKeys) != 0; });
        };
        for (int key_tile = next_keys(max(bias_key, seen.begin) / kKeys); key_tile < key_tiles_end;
             key_tile = next_keys(key_tile + 1)) {
          const int key0 = key_tile * kKeys;
          const int32_t entry = masked ? entry_at(b, h, query0, key0) : 1;
          __syncthreads();  // all are done with the tiles before
          const QueryLoader queries(p.q, b, h, query0, int(p.dim_qk)),
              grads(io.grad_out, b, h, query0, int(p.dim_v));
          const KeyLoader keys(p.k, b, h / p.group(), key0, int(p.dim_qk)),
              values(p.v, b, h / p.group(), key0, int(p.dim_v));
          queries.load(queries_shared + lane_destination, visibility.queries - query0, p.q.data);
          grads.load(grads_shared + lane_destination, visibility.queries - query0, p.q.data);
          keys.load(keys_shared + lane_destination, visibility.keys - key0, p.q.data);
          values.load(values_shared + lane_destination, visibility.keys - key0, p.q.data);
          commit_copies();
          wait_for_copies<0>();
          __syncthreads();  // all threads' copies have arrived
#pragma unroll
          for (int first = 0; first < kKeys; first += 16) {
            FragmentC score[1][2], grad_prob[1][2], slope[2];
            clear(score);
            clear(grad_prob);
            multiply_rows<Half, kDim, 1, 16>(score, own_queries, keys_shared + offset_b + first * kRowBytes);
            multiply_rows<Half, kDim, 1, 16>(grad_prob, own_grads,
                                             values_shared + offset_b + first * kRowBytes);
            const ScoreBlock<false> block{query0 + warp * 16, key0 + first};
            const uint32_t visible = logits.visible(block, entry), kept = logits.kept(block);
            logits.finish(score[0], slope, visible, block);
#pragma unroll
            for (int n = 0; n < 2; n++) {
#pragma unroll
              for (int e = 0; e < 4; e++) {
                const float4 row = terms[e / 2];
                const float dropped = test(kept, n, e) ? grad_prob[0][n].reg[e] * keep_scale : 0.0f;
                sum[0][first / 8 + n].reg[e] +=
                    test(visible, n, e) ? probability(score[0][n].reg[e], row.x, row.y) * (dropped + row.z)
                                        : 0.0f;
              }
            }
          }
        }
      }
    }
    store(grad, size, bias_b, bias_h, bias_query, bias_key, sum[0], shared);
  }

 private:
  static __device__ __forceinline__ void store(const StridedView& grad, const int64_t (&size)[4], int b,
                                               int h, int query0, int key0, FragmentC (&sum)[kKeys / 8],
                                               char* shared) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const bool over_queries = size[2] == 1, over_keys = size[3] == 1;
    if (over_keys) {  // into the first column of each row
#pragma unroll
      for (int r = 0; r < 2; r++) {
        float x = 0.0f;
#pragma unroll
        for (int n = 0; n < kKeys / 8; n++) x += sum[n].reg[2 * r] + sum[n].reg[2 * r + 1];
        sum[0].reg[2 * r] = quad_sum(x);
      }
    }
    if (over_queries) {  // into the first row of each warp, then of the block
      float* rows = reinterpret_cast<float*>(shared);
      __syncthreads();  // all are done with the last tiles, whose memory this takes
#pragma unroll
      for (int n = 0; n < kKeys / 8; n++) {
#pragma unroll
        for (int e = 0; e < 2; e++) {
          float x = sum[n].reg[e] + sum[n].reg[2 + e];
#pragma unroll
          for (int step = 4; step < 32; step *= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
          if (lane < 4) rows[warp * kKeys + n * 8 + lane * 2 + e] = x;
        }
      }
      __syncthreads();  // the warps' rows are there
      const int key = threadIdx.x;
      if (key < (over_keys ? 1 : min(kKeys, int(size[3]) - key0))) {
        float x = 0.0f;
#pragma unroll
        for (int w = 0; w < kBiasWarps; w++) x += rows[w * kKeys + key];
        *reinterpret_cast<float*>(grad.at(b, h, 0, key0 + key)) = x;
      }
      return;
    }
#pragma unroll
    for (int n = 0; n < kKeys / 8; n++) {
#pragma unroll
      for (int e = 0; e < 4; e++) {
        const int query = query0 + warp * 16 + e / 2 * 8 + lane / 4,
                  key = key0 + n * 8 + lane % 4 * 2 + e % 2;
        if (query < size[2] && key < size[3])
          *reinterpret_cast<float*>(grad.at(b, h, query, key)) = sum[n].reg[e];
      }
    }
  }
};

}  // namespace attn_ext::cuda
