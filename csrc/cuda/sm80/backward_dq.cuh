// dQ. A block owns a tile of queries of one head, keeps their gradient in registers and walks over the keys they see:
//   S = Q K^T, dP = dO V^T             (queries x keys; Q and dO are the A fragments)
//   dS = exp2(scale * S - lse) * (dP - delta)
//   dQ += dS K                         (dS turns from a C into an A fragment within a thread)
// S and dP are those of backward_dkdv.cuh once more: two products of seven, paid for having no atomics, no float32 dQ in
// memory, and the same bits in every run. The full variant does not visit tiles in which a block mask hides everything.
#pragma once

#include "../tile/block_mask.cuh"
#include "backward_logits.cuh"
#include "backward_tile.cuh"

namespace attn_ext::cuda {

template <class Half, int kDim, bool kFull>
struct BackwardDq {
  static constexpr BackwardTile kTile = dq_tile(kDim, kFull);
  static constexpr int kThreads = kTile.threads(), kQueries = kTile.rows(), kKeys = kTile.stream;
  static constexpr int kChunk = kTile.chunk, kM = kTile.warp_rows / 16;
  static constexpr int kRowBytes = shared_row_bytes(kDim), kStreamBytes = kKeys * kRowBytes;
  static constexpr int kStageBytes = dq_stage_bytes(kDim, kFull);
  static_assert(!kFull || (kM == 1 && kChunk == 16));
  using Lanes = RowLanes<kDim, kThreads>;
  using OwnLoader = RowLoader<kDim, kTile.rows(), kThreads>;
  using Stream = PairLoader<kDim, kTile.stream, kThreads>;

  // What a block works on. Blocks of one head follow each other, so that they find its keys in the L2 cache; last queries
  // first, which see most keys under a causal mask.
  struct Place {
    int b, head, head_of_all, first_query;

    __device__ __forceinline__ explicit Place(const AttentionParams& p) {
      const uint32_t block = block_index(), tiles = uint32_t((p.len_q + kQueries - 1) / kQueries);
      head_of_all = int(block / tiles);
      b = head_of_all / int(p.heads_q);
      head = head_of_all % int(p.heads_q);
      first_query = int(tiles - 1 - block % tiles) * kQueries;
    }
    __device__ __forceinline__ int warp_query() const {
      return first_query + int(threadIdx.x) / 32 * kTile.warp_rows;
    }
  };

  static __device__ __forceinline__ void run(const BackwardParams& params) {
    extern __shared__ __align__(128) char shared[];
    FragmentC grad_q[kM][kDim / 8];
    clear(grad_q);
    const float alibi_sum = walk(params, grad_q, shared);  // this lane's share of the slope's gradient

    const AttentionParams& p = params.problem;
    const Place place(p);
    if (!kFull || params.io.grad_q.present) {  // else only gradients of a bias or of slopes are wanted
      store_gradient<Half, kDim>(grad_q, float(p.scale), params.io.grad_q, place.b, place.head,
                                 place.warp_query(), int(p.valid_queries(place.b)), int(p.len_q),
                                 int(p.dim_qk), shared + threadIdx.x / 32 * kTile.warp_rows * kRowBytes);
    }
    if constexpr (kFull) {
      if (params.io.grad_alibi_slopes.present)
        store_alibi_sum(params, place.head_of_all, place.first_query / kQueries, alibi_sum, shared);
    }
  }

 private:
  // Adds up grad_q, not yet scaled, over the keys.
  static __device__ __forceinline__ float walk(const BackwardParams& params,
                                               FragmentC (&grad_q)[kM][kDim / 8], char* shared) {
    const AttentionParams& p = params.problem;
    const int lane = threadIdx.x % 32;
    const Place place(p);
    const int b = place.b, head = place.head, head_kv = head / int(p.group());
    const int first_query = place.first_query, warp_query = place.warp_query();

    const Visibility visibility(p, b);
    const KeyRange seen = visibility.of_queries(first_query, first_query + kQueries - 1);
    const KeyRange whole = visibility.of_all_queries(first_query, first_query + kQueries - 1);
    // Key tiles begin .. end - 1 are seen by some of the queries; those from whole_begin to whole_end - 1 are seen by
    // all and need no mask.
    const int begin = seen.begin / kKeys, end = (seen.end + kKeys - 1) / kKeys;
    // The loop without mask leaves out the first tile, so that there always is a next one to copy.
    const bool whole_pieces = (p.dim_qk | p.dim_v) % 8 == 0;
    const int whole_begin = max((whole.begin + kKeys - 1) / kKeys, begin + 1);
    const int whole_end = whole_pieces ? whole.end / kKeys : 0;

    [[maybe_unused]] const TileWalk<kKeys> tiles{p.block_mask, begin};
    [[maybe_unused]] int tile;
    [[maybe_unused]] const auto entry_at = [&](int block) {
      int query = first_query;
      keep_in_register(query);  // else the row's address would be held in registers all along
      return p.block_mask.block(b, head, query / BlockMask::kSize, block);
    };
    if constexpr (kFull) {
      static_assert(kQueries == BlockMask::kSize);
      ScoreGradients(params, b, head).clear_unseen(first_query, begin * kKeys, end * kKeys);
      tile = tiles.last(end - 1, entry_at).tile;
      if (tile < begin) return 0.0f;
    }
    if (begin >= end) return 0.0f;

    const uint32_t ring = shared_address(shared) + (2 - kTile.held) * kQueries * kRowBytes;
    uint32_t lane_destination = Lanes::row() * kRowBytes + Lanes::byte();
    keep_in_register(lane_destination);

    // The block's own queries and rows of dO.
    const uint32_t queries_shared = kTile.held >= 1 ? ring : ring - kQueries * kRowBytes;
    const uint32_t grads_shared = kTile.held == 2 ? ring + kQueries * kRowBytes : shared_address(shared);
    {
      const OwnLoader queries(p.q, b, head, first_query, int(p.dim_qk));
      const OwnLoader grads(params.io.grad_out, b, head, first_query, int(p.dim_v));
      queries.load(queries_shared + lane_destination, visibility.queries - first_query, p.q.data);
      grads.load(grads_shared + lane_destination, visibility.queries - first_query, p.q.data);
    }
    if constexpr (kTile.held > 0) {  // else they arrive with the first tile of keys
      commit_copies();
      wait_for_copies<0>();
      __syncthreads();  // all threads' copies have arrived
    }
    const uint32_t own_offset = threadIdx.x / 32 * kTile.warp_rows * kRowBytes + lane_offset_a<kRowBytes>();
    OwnOperand<kDim, kTile.warp_rows, kTile.held >= 1> own_queries;
    OwnOperand<kDim, kTile.warp_rows, kTile.held == 2> own_grads;
    own_queries.set(queries_shared + own_offset);
    own_grads.set(grads_shared + own_offset);
    if (kTile.held < 2) keep_in_register(own_grads.address);
    if (kTile.held < 1) keep_in_register(own_queries.address);
    if (kTile.held > 0) __syncthreads();  // all warps have read them before the ring takes their memory

    // Where a tile of keys comes from.
    auto rows_at = [&](int tile) -> Stream {
      return {{p.k, b, head_kv, tile * kKeys, int(p.dim_qk)}, {p.v, b, head_kv, tile * kKeys, int(p.dim_v)}};
    };
    // The walk of the copies: from the last tile to the first, so that only the first one walked to may lack rows.
    Stream rows = rows_at(end - 1);
    if (p.dim_qk < kDim || p.dim_v < kDim) rows.clear_outside(ring + lane_destination, kStageBytes);
    uint32_t stage = ring;  // that the warps read
    auto other_stage = [&] { return 2 * ring + kStageBytes - stage; };
    // Any tile.
    auto copy = [&](const Stream& rows, int tile, uint32_t to) {
      rows.load(to + lane_destination, visibility.keys - tile * kKeys, p.k.data);
      commit_copies();
    };

    uint32_t offset_b = lane_offset_b_pair<kRowBytes>(), offset_t = lane_offset_a<kRowBytes>();
    keep_in_register(offset_b);
    keep_in_register(offset_t);

    // The row terms of a lane's row of C fragments. Rows past the last one repeat it: they are not stored.
    auto terms = [&](int m, int r) {
      const int query = min(warp_query + m * 16 + r * 8 + lane / 4, int(p.len_q) - 1);
      return params.row_terms + (place.head_of_all * params.row_stride + query) * row_term_size(kFull);
    };
    [[maybe_unused]] float alibi = 0.0f;
    if constexpr (kFull) {
      copy(rows_at(tile), tile, ring);
      const BackwardLogits<Half> logits(p, b, head);
      const ScoreGradients score_gradients(params, b, head);
      const float4 row_terms[2] = {*reinterpret_cast<const float4*>(terms(0, 0)),
                                   *reinterpret_cast<const float4*>(terms(0, 1))};
      const float keep_scale = float(p.dropout.scale());
      while (tile >= begin) {
        const int32_t entry = tiles.entry(tile, entry_at);
        const int next = tiles.before({tile, entry}, entry_at).tile;
        wait_for_copies<0>();
        __syncthreads();  // the tile has arrived for all; all are done with the one whose memory copy() takes
        // Addresses are made anew for each tile: registers are scarcer here than instructions.
        if (next >= begin) copy(rows_at(next), next, other_stage());
#pragma unroll 1
        for (int first = 0; first < kKeys; first += kChunk) {
          FragmentC score[1][2], grad[1][2], slope[2];
          clear(score);
          clear(grad);
          multiply_rows<Half, kDim, 1, 16>(score, own_queries, stage + offset_b + first * kRowBytes);
          multiply_rows<Half, kDim, 1, 16>(grad, own_grads,
                                           stage + offset_b + kStreamBytes + first * kRowBytes);
          const ScoreBlock<false> block{warp_query, tile * kKeys + first};
          const uint32_t visible = logits.visible(block, entry), kept = logits.kept(block);
          logits.finish(score[0], slope, visible, block);
#pragma unroll
          for (int n = 0; n < 2; n++) {
#pragma unroll
            for (int e = 0; e < 4; e++) {
              const float4 row = row_terms[e / 2];  // max, -log, -delta
              const float grad_prob = test(kept, n, e) ? grad[0][n].reg[e] * keep_scale : 0.0f;
              const float grad_logit =
                  test(visible, n, e) ? probability(score[0][n].reg[e], row.x, row.y) * (grad_prob + row.z)
                                      : 0.0f;
              if (p.alibi_slopes.present) {
                alibi -= grad_logit * logits.distance(block.query(n, e), block.key(n, e));
              }
              grad[0][n].reg[e] = grad_logit;
            }
          }
          score_gradients.store(block, grad[0]);
#pragma unroll
          for (int n = 0; n < 2; n++) {
#pragma unroll
            for (int e = 0; e < 4; e++) {
              if (test(visible, n, e)) grad[0][n].reg[e] *= slope[n].reg[e];  // a hidden slope may be NaN
            }
          }
          FragmentA grad_score[1] = {pack<Half>(grad[0][0], grad[0][1])};
          multiply_columns<Half, kDim>(grad_q, grad_score, stage + offset_t + first * kRowBytes);
        }
        stage = other_stage();
        tile = next;
      }
    } else {
      copy(rows, end - 1, ring);
      rows.step_back();
      float minus_lse[kM][2], minus_delta[kM][2];
#pragma unroll
      for (int m = 0; m < kM; m++) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
          const float2 row = *reinterpret_cast<const float2*>(terms(m, r));
          minus_lse[m][r] = row.x;
          minus_delta[m][r] = row.y;
        }
      }
      const float scale_log2 = float(p.scale) * kLog2E;
      const int lane_key = lane % 4 * 2;
      const TileMask first_mask(visibility, lane_key, warp_query + lane / 4, visibility.keys - lane_key);
      LateProducts<Half, kDim, kM> late;
      late.clear();

      // One tile of keys, without a branch, so that the assembler overlaps all of it.
      auto step = [&](auto masked, int tile) {
        constexpr bool kMasked = decltype(masked)::value;
        constexpr int kColumns = kMasked ? 16 : kChunk;  // a mask takes registers, too
        wait_for_copies<0>();
        __syncthreads();  // the tile has arrived for all; all are done with the one whose memory the copies take
        const uint32_t keys_b = stage + offset_b, keys_t = stage + offset_t;
        const TileMask mask = first_mask.later_keys(tile * kKeys);
        late.add_to(grad_q);
        if (kMasked && tile > begin) {
          copy(rows, tile - 1, other_stage());
          rows.step_back();
        }
#pragma unroll
        for (int first = 0; first < kKeys; first += kColumns) {
          FragmentC score[kM][kColumns / 8], grad[kM][kColumns / 8];
          clear(score);
#pragma unroll
          for (int m = 0; m < kM; m++) {
#pragma unroll
            for (int n = 0; n < kColumns / 8; n++) {
#pragma unroll
              for (int e = 0; e < 4; e++) grad[m][n].reg[e] = minus_delta[m][e / 2];
            }
          }
          const bool copies = !kMasked && first == 0;
          multiply_rows<Half, kDim, kM, kColumns>(score, own_queries, keys_b + first * kRowBytes, 0,
                                                  [&](int k) {
                                                    if (copies)
                                                      rows.copy_whole(other_stage() + lane_destination, k);
                                                  });
          if (copies) {
            commit_copies();
            rows.step_back();
          }
          // In parts, if that costs no loads: dS of the first is made while the tensor core works on the second.
          constexpr int kPart = kTile.held == 2 && kColumns > 32 ? 32 : kColumns;
#pragma unroll
          for (int part = 0; part < kColumns; part += kPart) {
            multiply_rows<Half, kDim, kM, kPart>(
                grad, own_grads, keys_b + kStreamBytes + (first + part) * kRowBytes, part / 8);
          }
#pragma unroll
          for (int m = 0; m < kM; m++) {
#pragma unroll
            for (int n = 0; n < kColumns / 8; n++) {
#pragma unroll
              for (int e = 0; e < 4; e++) {
                const float prob = exp2_fast(fmaf(score[m][n].reg[e], scale_log2, minus_lse[m][e / 2]));
                float grad_score = prob * grad[m][n].reg[e];
                if (kMasked) {
                  const int key = first + n * 8 + e % 2, query = m * 16 + e / 2 * 8;
                  const bool visible = mask.visible(key - query, key);
                  grad_score = visible ? grad_score : 0.0f;
                }
                grad[m][n].reg[e] = grad_score;
              }
            }
          }
#pragma unroll
          for (int n = 0; n < kColumns / 16; n++) {
            FragmentA grad_score[kM];
#pragma unroll
            for (int m = 0; m < kM; m++) grad_score[m] = pack<Half>(grad[m][2 * n], grad[m][2 * n + 1]);
            const uint32_t rows_t = keys_t + (first + n * 16) * kRowBytes;
            if (first + n * 16 + 16 < kKeys) {
              multiply_columns<Half, kDim>(grad_q, grad_score, rows_t);
            } else {
              multiply_columns<Half, kDim>(grad_q, grad_score, rows_t, late);
            }
          }
        }
        stage = other_stage();
      };

#pragma unroll 1
      for (int tile = end - 1; tile >= begin;) {
        if (tile >= whole_begin && tile < whole_end) {
#pragma unroll 1
          do {
            step(Bool<false>{}, tile);
            tile--;
          } while (tile >= whole_begin);
        } else {
          step(Bool<true>{}, tile);
          tile--;
        }
      }
      late.add_to(grad_q);
    }
    // The gradient takes the memory of the warp's own rows; with none there, that of the ring, when all are done with it.
    if constexpr (kTile.held == 2) __syncthreads();
    return alibi;
  }

  // Biases as large as the scores, which take their gradient as it is; backward_bias.cuh has the others.
  struct ScoreGradients {
    const AttentionParams& p;
    const BackwardIO& io;
    int b, h;
    bool to_bias, to_mask;

    __device__ __forceinline__ ScoreGradients(const BackwardParams& params, int b, int h)
        : p(params.problem), io(params.io), b(b), h(h), to_bias(takes_scores(p, io.grad_bias, io.bias_size)),
          to_mask(takes_scores(p, io.grad_float_mask, io.float_mask_size)) {}

    // The lane's elements of a block.
    __device__ __forceinline__ void store(const ScoreBlock<false>& block, const FragmentC (&x)[2]) const {
      if (to_bias) store(BlockAddresses<false>(io.grad_bias, b, h, block), block, x);
      if (to_mask) store(BlockAddresses<false>(io.grad_float_mask, b, h, block), block, x);
    }

    // Zero for the keys that none of the block's queries sees: those before `begin` and from `end` on, and in blocks
    // where the block mask hides everything.
    __device__ void clear_unseen(int first_query, int begin, int end) const {
      if (!(to_bias || to_mask)) return;
      const int last_query = min(first_query + kQueries, int(p.len_q));
      for (int i = first_query + int(threadIdx.x) / 32; i < last_query; i += kThreads / 32) {
        for (int j = threadIdx.x % 32; j < int(p.len_k); j += 32) {
          if (j >= begin && j < end && !hidden(first_query, j)) continue;
          if (to_bias) *reinterpret_cast<float*>(io.grad_bias.at(b, h, i, j)) = 0.0f;
          if (to_mask) *reinterpret_cast<float*>(io.grad_float_mask.at(b, h, i, j)) = 0.0f;
        }
      }
    }

   private:
    __device__ __forceinline__ bool hidden(int query, int key) const {
      return p.block_mask.present() &&
             p.block_mask.block(b, h, query / BlockMask::kSize, key / BlockMask::kSize) == 0;
    }

    __device__ __forceinline__ void store(const BlockAddresses<false>& addresses,
                                          const ScoreBlock<false>& block, const FragmentC (&x)[2]) const {
#pragma unroll
      for (int n = 0; n < 2; n++) {
#pragma unroll
        for (int e = 0; e < 4; e++) {
          if (block.query(n, e) < p.len_q && block.key(n, e) < p.len_k) {
            *reinterpret_cast<float*>(addresses.at(n, e)) = x[n].reg[e];
          }
        }
      }
    }
  };

  // The block's share of the slope's gradient, added up in a fixed order.
  static __device__ void store_alibi_sum(const BackwardParams& params, int64_t head, int tile, float x,
                                         char* shared) {
    __syncthreads();  // all have stored their gradient, whose memory this takes
    float* sums = reinterpret_cast<float*>(shared);
    sums[threadIdx.x] = x;
    __syncthreads();  // all shares are there
    if (threadIdx.x == 0) {
      float sum = 0.0f;
      for (int t = 0; t < kThreads; t++) sum += sums[t];
      static_cast<float*>(params.alibi_sums)[head * params.alibi_tiles + tile] = sum;
    }
  }
};

}  // namespace attn_ext::cuda
