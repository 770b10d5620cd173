// dK and dV. A block owns a tile of keys of one KV head, keeps their gradients in registers and walks over the queries
// of the head's whole group that can see them, in a fixed order: no atomics, the same bits in every run.
//
// Everything is transposed, so that a warp's rows are keys:
//   S^T = K Q^T, dP^T = V dO^T        (keys x queries; K and V are the A fragments)
//   P^T = exp2(scale * S^T - lse), dS^T = P^T * (dP^T - delta)
//   dV += P^T dO, dK += dS^T Q        (P^T and dS^T turn from C into A fragments within a thread)
#pragma once

#include "backward_logits.cuh"
#include "backward_tile.cuh"

namespace attn_ext::cuda {

template <class Half, int kDim, bool kFull>
struct BackwardDkDv {
  static constexpr BackwardTile kTile = dkdv_tile(kDim, kFull);
  static constexpr int kThreads = kTile.threads(), kKeys = kTile.rows(), kQueries = kTile.stream;
  static constexpr int kChunk = kTile.chunk, kM = kTile.warp_rows / 16;
  static constexpr int kRowBytes = shared_row_bytes(kDim), kStreamBytes = kQueries * kRowBytes;
  static constexpr int kStageBytes = dkdv_stage_bytes(kDim, kFull), kTermBytes = row_term_size(kFull) * 4;
  static_assert(!kFull || (kM == 1 && kChunk == 16));
  using Lanes = RowLanes<kDim, kThreads>;
  using OwnLoader = RowLoader<kDim, kTile.rows(), kThreads>;
  using StreamLoader = RowLoader<kDim, kTile.stream, kThreads>;

  static __device__ __forceinline__ void run(const BackwardParams& params) {
    if constexpr (!dkdv_split(kDim)) {
      gradients<true, true>(params, blockIdx.x);
    } else if (blockIdx.x % 2 == 0) {
      gradients<true, false>(params, blockIdx.x / 2);
    } else {
      gradients<false, true>(params, blockIdx.x / 2);
    }
  }

 private:
  template <bool kOfKeys, bool kOfValues>
  static __device__ __forceinline__ void gradients(const BackwardParams& params, uint32_t block) {
    extern __shared__ __align__(128) char shared[];
    const AttentionParams& p = params.problem;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

    // Blocks of one head follow each other, so that they find its queries in the L2 cache; first keys first, which most
    // queries see under a causal mask.
    const int tiles_of_keys = int((p.len_k + kKeys - 1) / kKeys);
    const int64_t head = block / tiles_of_keys;
    const int64_t b = head / p.heads_kv, head_kv = head % p.heads_kv;
    const int first_key = block % tiles_of_keys * kKeys, warp_key = first_key + warp * kTile.warp_rows;
    const int group = int(p.group());

    const Visibility visibility(p, b);
    const int last_key = min(first_key + kKeys, visibility.keys) - 1;
    const KeyRange seen = visibility.queries_of_keys(first_key, last_key);
    const KeyRange whole = visibility.queries_of_all_keys(first_key, last_key);
    // Query tiles begin .. end - 1 see some of the keys; those from whole_begin to whole_end - 1 see all and need no mask.
    const int begin = seen.begin / kQueries, end = (seen.end + kQueries - 1) / kQueries;
    // The loop without mask leaves out the last tile of a head, so that it need not know where the next head begins.
    const bool whole_pieces = (p.dim_qk | p.dim_v) % 8 == 0;
    const int whole_begin = max((whole.begin + kQueries - 1) / kQueries, begin + 1);
    const int whole_end = whole_pieces ? whole.end / kQueries : 0;

    FragmentC grad_k[kM][kDim / 8], grad_v[kM][kDim / 8];
    clear(grad_k);
    clear(grad_v);

    if (begin < end) {
      const uint32_t ring = shared_address(shared) + (2 - kTile.held) * kKeys * kRowBytes;
      uint32_t lane_destination = Lanes::row() * kRowBytes + Lanes::byte();
      keep_in_register(lane_destination);

      // The block's own keys and values.
      const uint32_t keys_shared = kTile.held >= 1 ? ring : ring - kKeys * kRowBytes;
      const uint32_t values_shared = kTile.held == 2 ? ring + kKeys * kRowBytes : shared_address(shared);
      {
        const OwnLoader keys(p.k, b, head_kv, first_key, int(p.dim_qk)),
            values(p.v, b, head_kv, first_key, int(p.dim_v));
        keys.load(keys_shared + lane_destination, visibility.keys - first_key, p.k.data);
        values.load(values_shared + lane_destination, visibility.keys - first_key, p.k.data);
        commit_copies();
      }
      const uint32_t own_offset = warp * kTile.warp_rows * kRowBytes + lane_offset_a<kRowBytes>();
      OwnOperand<kDim, kTile.warp_rows, kTile.held >= 1> own_keys;
      OwnOperand<kDim, kTile.warp_rows, kTile.held == 2> own_values;
      wait_for_copies<0>();
      __syncthreads();  // all threads' copies of keys and values have arrived
      own_keys.set(keys_shared + own_offset);
      own_values.set(values_shared + own_offset);
      if (kTile.held < 2) keep_in_register(own_values.address);
      if (kTile.held < 1) keep_in_register(own_keys.address);
      if (kTile.held > 0) __syncthreads();  // all warps have read them before the ring takes their memory

      // The walk of the copies: from the last tile to the first, so that only a head's first one may lack rows.
      const int first_head = int(head_kv) * group;
      StreamLoader queries(p.q, b, first_head, (end - 1) * kQueries, int(p.dim_qk));
      StreamLoader grads(params.io.grad_out, b, first_head, (end - 1) * kQueries, int(p.dim_v));
      constexpr int kTermPieces = kQueries * kTermBytes / 16;  // threads that copy row terms
      static_assert(kTermPieces <= kThreads);
      const char* terms =
          reinterpret_cast<const char*>(params.row_terms) + threadIdx.x % kTermPieces * 16 +
          ((b * p.heads_q + first_head) * params.row_stride + (end - 1) * kQueries) * kTermBytes;
      uint32_t write_stage = ring + lane_destination;
      if (p.dim_qk < kDim || p.dim_v < kDim) {
        for (int s = 0; s < 2; s++) {
          clear_outside(queries, write_stage + s * kStageBytes);
          clear_outside(grads, write_stage + s * kStageBytes + kStreamBytes);
        }
      }

      // The tile at which the walk stands; `exist` of its rows do, or all where `whole`.
      auto copy_next = [&](auto whole, int exist) {
        if constexpr (decltype(whole)::value) {
          copy_whole_pieces(queries, write_stage);
          copy_whole_pieces(grads, write_stage + kStreamBytes);
        } else {
          queries.load(write_stage, exist, p.q.data);
          grads.load(write_stage + kStreamBytes, exist, p.q.data);
        }
        if (threadIdx.x < kTermPieces)
          copy_async_16(write_stage - lane_destination + 2 * kStreamBytes + threadIdx.x * 16, terms);
        commit_copies();
        queries.step_back();
        grads.step_back();
        terms -= kQueries * kTermBytes;
        write_stage = 2 * (ring + lane_destination) + kStageBytes - write_stage;
      };
      auto to_next_head = [&] {
        const int64_t rows = (end - begin) * kQueries;
        queries.source += p.q.stride[1] * 2 + rows * queries.row_bytes;
        grads.source += params.io.grad_out.stride[1] * 2 + rows * grads.row_bytes;
        terms += (params.row_stride + rows) * kTermBytes;
      };
      auto copy_any = [&](int tile) { copy_next(Bool<false>{}, visibility.queries - tile * kQueries); };

      uint32_t offset_b = lane_offset_b_pair<kRowBytes>(), offset_t = lane_offset_a<kRowBytes>();
      uint32_t offset_terms = 2 * kStreamBytes + lane % 4 * 2 * kTermBytes;
      keep_in_register(offset_b);
      keep_in_register(offset_t);
      keep_in_register(offset_terms);
      const float scale_log2 = float(p.scale) * kLog2E;
      uint32_t stage = ring;

      // dV += P^T dO and dK += dS^T Q for 16 queries.
      auto accumulate = [&](const auto& prob, const auto& grad_score, int n, uint32_t queries_t) {
        FragmentA a[kM];
        if constexpr (kOfValues) {
#pragma unroll
          for (int m = 0; m < kM; m++) a[m] = pack<Half>(prob[m][2 * n], prob[m][2 * n + 1]);
          multiply_columns<Half, kDim>(grad_v, a, queries_t + kStreamBytes);
        }
        if constexpr (kOfKeys) {
#pragma unroll
          for (int m = 0; m < kM; m++) a[m] = pack<Half>(grad_score[m][2 * n], grad_score[m][2 * n + 1]);
          multiply_columns<Half, kDim>(grad_k, a, queries_t);
        }
      };

      // One tile of queries, lean variant: four products without a branch, so that the assembler overlaps all of it.
      auto step = [&](auto masked, int tile, int next) {
        constexpr bool kMasked = decltype(masked)::value;
        wait_for_copies<0>();
        __syncthreads();  // the tile has arrived for all; all are done with the one whose memory copy_next() takes
        const uint32_t queries_b = stage + offset_b, queries_t = stage + offset_t,
                       terms = stage + offset_terms;
        const int lane_query = tile * kQueries + lane % 4 * 2;
        const TileMask mask(visibility, warp_key + lane / 4, lane_query, visibility.queries - lane_query);
#pragma unroll
        for (int first = 0; first < kQueries; first += kChunk) {
          FragmentC score[kM][kChunk / 8], grad[kM][kChunk / 8];
          float minus_lse[kChunk / 8][2];
#pragma unroll
          for (int n = 0; n < kChunk / 8; n++) {
            const float4 two = load_shared(terms + (first + n * 8) * kTermBytes);
            minus_lse[n][0] = two.x;
            minus_lse[n][1] = two.z;
#pragma unroll
            for (int m = 0; m < kM; m++)
              grad[m][n] = {{two.y, two.w, two.y, two.w}};  // dP - delta from the start
          }
          clear(score);
          const uint32_t rows_b = queries_b + first * kRowBytes;
          if constexpr (!kOfKeys) {
            multiply_rows<Half, kDim, kM, kChunk>(score, own_keys, rows_b);
          } else if constexpr (kM == 1) {
            multiply_rows<Half, kDim, kM, kChunk>(score, own_keys, rows_b, grad, own_values,
                                                  rows_b + kStreamBytes);
          } else {
            multiply_rows<Half, kDim, kM, kChunk>(score, own_keys, rows_b);
            multiply_rows<Half, kDim, kM, kChunk>(grad, own_values, rows_b + kStreamBytes);
          }
          // Copies stand after the first products: the assembler moves no ldmatrix across them.
          if constexpr (!kMasked) {
            if (first == 0) copy_next(Bool<true>{}, kQueries);
          } else {
            if (first == 0 && next >= 0) copy_any(next);
          }
#pragma unroll
          for (int m = 0; m < kM; m++) {
#pragma unroll
            for (int n = 0; n < kChunk / 8; n++) {
#pragma unroll
              for (int e = 0; e < 4; e++) {
                float prob = exp2_fast(fmaf(score[m][n].reg[e], scale_log2, minus_lse[n][e % 2]));
                float grad_score = prob * grad[m][n].reg[e];
                if (kMasked) {
                  const int query = first + n * 8 + e % 2, key = m * 16 + e / 2 * 8;
                  const bool visible = mask.visible(key - query, query);
                  prob = visible ? prob : 0.0f;
                  grad_score = visible ? grad_score : 0.0f;
                }
                score[m][n].reg[e] = prob;
                grad[m][n].reg[e] = grad_score;
              }
            }
          }
#pragma unroll
          for (int n = 0; n < kChunk / 16; n++)
            accumulate(score, grad, n, queries_t + (first + n * 16) * kRowBytes);
        }
        stage = 2 * ring + kStageBytes - stage;
      };

      // One tile of queries of head h, full variant.
      auto full_step = [&](const auto& logits, int tile, int next) {
        wait_for_copies<0>();
        __syncthreads();  // as above
        if (next >= 0) copy_any(next);
        const uint32_t queries_b = stage + offset_b, queries_t = stage + offset_t,
                       terms = stage + offset_terms;
        const float keep_scale = float(p.dropout.scale());
#pragma unroll 1
        for (int first = 0; first < kQueries; first += kChunk) {
          FragmentC score[1][2], grad[1][2], slope[2];
          clear(score);
          clear(grad);
          multiply_rows<Half, kDim, 1, 16>(score, own_keys, queries_b + first * kRowBytes);
          if constexpr (kOfKeys) {
            multiply_rows<Half, kDim, 1, 16>(grad, own_values, queries_b + kStreamBytes + first * kRowBytes);
          }
          const ScoreBlock<true> block{tile * kQueries + first, warp_key};
          const uint32_t visible = logits.visible(block), kept = logits.kept(block);
          logits.finish(score[0], slope, visible, block);
#pragma unroll
          for (int n = 0; n < 2; n++) {
#pragma unroll
            for (int e = 0; e < 4; e++) {
              const float4 row =
                  load_shared(terms + (first + n * 8 + e % 2) * kTermBytes);  // max, -log, -delta
              const float prob = test(visible, n, e) ? probability(score[0][n].reg[e], row.x, row.y) : 0.0f;
              const float factor = test(kept, n, e) ? keep_scale : 0.0f;
              const float grad_prob = test(kept, n, e) ? grad[0][n].reg[e] * keep_scale : 0.0f;
              score[0][n].reg[e] = prob * factor;
              grad[0][n].reg[e] = test(visible, n, e) ? prob * (grad_prob + row.z) * slope[n].reg[e] : 0.0f;
            }
          }
          accumulate(score, grad, 0, queries_t + first * kRowBytes);
        }
        stage = 2 * ring + kStageBytes - stage;
      };

      copy_any(end - 1);
#pragma unroll 1
      for (int g = 0; g < group; g++) {
#pragma unroll 1
        for (int tile = end - 1; tile >= begin;) {
          if (!kFull && tile >= whole_begin && tile < whole_end) {
#pragma unroll 1
            do {
              step(Bool<false>{}, tile, tile - 1);
              tile--;
            } while (tile >= whole_begin);
          } else {
            int next = tile - 1;
            if (tile == begin) {
              next = g + 1 < group ? end - 1 : -1;
              to_next_head();
            }
            if constexpr (kFull) {
              full_step(BackwardLogits<Half>(p, b, first_head + g), tile, next);
            } else {
              step(Bool<true>{}, tile, next);
            }
            tile--;
          }
        }
      }
      wait_for_copies<0>();
      __syncthreads();  // all warps are done with the ring, whose memory now takes the gradients
    }

    char* const own_shared = shared + warp * kTile.warp_rows * kRowBytes;
    if (kOfKeys && params.io.grad_k.present) {
      store_gradient<Half, kDim>(grad_k, float(p.scale), params.io.grad_k, b, head_kv, warp_key,
                                 visibility.keys, int(p.len_k), int(p.dim_qk), own_shared);
    }
    if (kOfValues && params.io.grad_v.present) {
      store_gradient<Half, kDim>(grad_v, 1.0f, params.io.grad_v, b, head_kv, warp_key, visibility.keys,
                                 int(p.len_k), int(p.dim_v), own_shared);
    }
  }
};

}  // namespace attn_ext::cuda
