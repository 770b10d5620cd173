// dK and dV. A block owns a tile of keys of one KV head, keeps their gradients in registers and walks over the queries
// of the head's whole group that can see them, in a fixed order: no atomics, the same bits in every run.
//
// Everything is transposed, so that a warp's rows are keys:
//   S^T = K Q^T, dP^T = V dO^T        (keys x queries; K and V are the A fragments)
//   P^T = exp2(scale * S^T - lse), dS^T = P^T * (dP^T - delta)
//   dV += P^T dO, dK += dS^T Q        (P^T and dS^T turn from C into A fragments within a thread)
//
// The full variant does not visit tiles in which a block mask hides everything.
#pragma once

#include "../tile/block_mask.cuh"
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
  using Stream = PairLoader<kDim, kTile.stream, kThreads>;

  // What a block works on. Blocks of one head follow each other, so that they find its queries in the L2 cache; first
  // keys first, which most queries see under a causal mask.
  struct Place {
    int b, head_kv, first_key;

    __device__ __forceinline__ explicit Place(const AttentionParams& p) {
      const uint32_t block = block_index() / (dkdv_split(kDim) ? 2 : 1),
                     tiles = uint32_t((p.len_k + kKeys - 1) / kKeys);
      const int head = int(block / tiles);
      b = head / int(p.heads_kv);
      head_kv = head % int(p.heads_kv);
      first_key = int(block % tiles) * kKeys;
    }
    __device__ __forceinline__ int warp_key() const {
      return first_key + int(threadIdx.x) / 32 * kTile.warp_rows;
    }
  };

  static __device__ __forceinline__ void run(const BackwardParams& params) {
    if constexpr (!dkdv_split(kDim)) {
      gradients<true, true>(params);
    } else if (blockIdx.x % 2 == 0) {
      gradients<true, false>(params);
    } else {
      gradients<false, true>(params);
    }
  }

 private:
  template <bool kOfKeys, bool kOfValues>
  static __device__ __forceinline__ void gradients(const BackwardParams& params) {
    extern __shared__ __align__(128) char shared[];
    FragmentC grad_k[kM][kDim / 8], grad_v[kM][kDim / 8];
    clear(grad_k);
    clear(grad_v);
    walk<kOfKeys, kOfValues>(params, grad_k, grad_v, shared);

    const AttentionParams& p = params.problem;
    const Place place(p);
    const int keys = int(p.valid_keys(place.b));
    char* const own_shared = shared + threadIdx.x / 32 * kTile.warp_rows * kRowBytes;
    if (kOfKeys && params.io.grad_k.present) {
      store_gradient<Half, kDim>(grad_k, float(p.scale), params.io.grad_k, place.b, place.head_kv,
                                 place.warp_key(), keys, int(p.len_k), int(p.dim_qk), own_shared);
    }
    if constexpr (kOfKeys && kOfValues) __syncwarp();  // all lanes have read dK, whose memory dV takes
    if (kOfValues && params.io.grad_v.present) {
      store_gradient<Half, kDim>(grad_v, 1.0f, params.io.grad_v, place.b, place.head_kv, place.warp_key(),
                                 keys, int(p.len_k), int(p.dim_v), own_shared);
    }
  }

  // Adds up both gradients, dK not yet scaled, over the queries.
  template <bool kOfKeys, bool kOfValues>
  static __device__ __forceinline__ void walk(const BackwardParams& params, FragmentC (&grad_k)[kM][kDim / 8],
                                              FragmentC (&grad_v)[kM][kDim / 8], char* shared) {
    const AttentionParams& p = params.problem;
    const int lane = threadIdx.x % 32;
    const Place place(p);
    const int b = place.b, head_kv = place.head_kv, first_key = place.first_key, warp_key = place.warp_key();
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
    if (begin >= end) return;

    [[maybe_unused]] const TileWalk<kQueries> tiles{p.block_mask, begin};
    static_assert(!kFull || BlockMask::kSize % kKeys == 0);
    [[maybe_unused]] const auto entries_of = [&](int g) {
      return [&, g](int block) {
        return p.block_mask.block(b, head_kv * group + g, block, first_key / BlockMask::kSize);
      };
    };
    // What the walk in the group's head g has found or, if that is nothing, what it finds in a head after it, which g
    // becomes. Below `begin` if there is nothing at all.
    [[maybe_unused]] const auto or_later = [&](int& g, MaskedTile found) {
      while (found.tile < begin && g + 1 < group) {
        g++;
        found = tiles.last(end - 1, entries_of(g));
      }
      return found;
    };
    [[maybe_unused]] int head = 0;  // of the group
    [[maybe_unused]] MaskedTile now;
    if constexpr (kFull) {
      now = or_later(head, tiles.last(end - 1, entries_of(head)));
      if (now.tile < begin) return;
    }

    const uint32_t ring = shared_address(shared) + (2 - kTile.held) * kKeys * kRowBytes;
    uint32_t lane_destination = Lanes::row() * kRowBytes + Lanes::byte();
    keep_in_register(lane_destination);

    // The block's own keys and values. Where one of them stays in registers that is V: dP's products, which need nothing
    // but dO from shared memory then, hide the copies.
    constexpr bool kHoldsValues = kTile.held == 2 || (kTile.held == 1 && kOfKeys);
    constexpr bool kHoldsKeys = kTile.held == 2 || (kTile.held == 1 && !kOfKeys);
    const uint32_t keys_shared = kHoldsKeys ? ring : shared_address(shared);
    const uint32_t values_shared =
        kHoldsValues ? ring + (kHoldsKeys ? kKeys * kRowBytes : 0) : ring - kKeys * kRowBytes;
    {
      const OwnLoader keys(p.k, b, head_kv, first_key, int(p.dim_qk));
      keys.load(keys_shared + lane_destination, visibility.keys - first_key, p.k.data);
      if constexpr (kOfKeys) {
        const OwnLoader values(p.v, b, head_kv, first_key, int(p.dim_v));
        values.load(values_shared + lane_destination, visibility.keys - first_key, p.k.data);
      }
    }
    if constexpr (kTile.held > 0) {  // else they arrive with the first tile of queries
      commit_copies();
      wait_for_copies<0>();
      __syncthreads();  // all threads' copies of keys and values have arrived
    }
    const uint32_t own_offset = threadIdx.x / 32 * kTile.warp_rows * kRowBytes + lane_offset_a<kRowBytes>();
    OwnOperand<kDim, kTile.warp_rows, kHoldsKeys> own_keys;
    OwnOperand<kDim, kTile.warp_rows, kHoldsValues> own_values;
    own_keys.set(keys_shared + own_offset);
    if (kOfKeys) own_values.set(values_shared + own_offset);
    if (!kHoldsKeys) keep_in_register(own_keys.address);
    if (kOfKeys && !kHoldsValues) keep_in_register(own_values.address);
    if (kTile.held > 0) __syncthreads();  // all warps have read them before the ring takes their memory

    // Where a tile of queries of head first_head + g comes from.
    const int first_head = head_kv * group;
    auto rows_at = [&](int g, int tile) -> Stream {
      return {{p.q, b, first_head + g, tile * kQueries, int(p.dim_qk)},
              {params.io.grad_out, b, first_head + g, tile * kQueries, int(p.dim_v)}};
    };
    auto terms_at = [&](int g, int tile) {
      const int64_t row = (int64_t(b) * p.heads_q + first_head + g) * params.row_stride + tile * kQueries;
      return reinterpret_cast<const char*>(params.row_terms) + row * kTermBytes;
    };
    // The walk of the copies: from the last tile to the first, so that only a head's first one may lack rows.
    Stream rows = rows_at(0, end - 1);
    const char* terms = terms_at(0, end - 1);
    if (p.dim_qk < kDim || p.dim_v < kDim) rows.clear_outside(ring + lane_destination, kStageBytes);
    uint32_t stage = ring;  // that the warps read
    auto other_stage = [&] { return 2 * ring + kStageBytes - stage; };

    auto copy_terms = [&](const char* from, uint32_t to) {
      constexpr int kPieces = kQueries * kTermBytes / 16;  // threads that copy one
      static_assert(kPieces <= kThreads);
      copy_async_16_if(kPieces - int(threadIdx.x), to + 2 * kStreamBytes + threadIdx.x * 16,
                       from + threadIdx.x * 16);
    };
    auto step_back = [&] {
      rows.step_back();
      terms -= kQueries * kTermBytes;
    };
    auto to_next_head = [&] {
      const int64_t walked = (end - begin) * kQueries;
      rows.first.source += p.q.stride[1] * 2 + walked * rows.first.row_bytes;
      rows.second.source += params.io.grad_out.stride[1] * 2 + walked * rows.second.row_bytes;
      terms += (params.row_stride + walked) * kTermBytes;
    };
    // Any tile.
    auto copy = [&](const Stream& rows, const char* terms, int tile, uint32_t to) {
      rows.load(to + lane_destination, visibility.queries - tile * kQueries, p.q.data);
      copy_terms(terms, to);
      commit_copies();
    };
    uint32_t offset_b = lane_offset_b_pair<kRowBytes>(), offset_t = lane_offset_a<kRowBytes>();
    uint32_t offset_terms = 2 * kStreamBytes + lane % 4 * 2 * kTermBytes;
    keep_in_register(offset_b);
    keep_in_register(offset_t);
    keep_in_register(offset_terms);
    const float scale_log2 = float(p.scale) * kLog2E;

    // dV += P^T dO for 16 queries, or dK += dS^T Q. `late...` takes the last products, if it is given.
    auto accumulate = [&](auto& sum, const auto& x, int n, uint32_t rows_t, auto&... late) {
      FragmentA a[kM];
#pragma unroll
      for (int m = 0; m < kM; m++) a[m] = pack<Half>(x[m][2 * n], x[m][2 * n + 1]);
      multiply_columns<Half, kDim>(sum, a, rows_t, late...);
    };
    LateProducts<Half, kDim, kM> late;
    late.clear();
    const int lane_query = lane % 4 * 2;
    const TileMask first_mask(visibility, warp_key + lane / 4, lane_query, visibility.queries - lane_query);
    auto add_late = [&] { late.add_to(kOfKeys ? grad_k : grad_v); };

    // One tile of queries, lean variant: four products without a branch, so that the assembler overlaps all of it.
    auto step = [&](auto masked, int tile, int next) {
      constexpr bool kMasked = decltype(masked)::value;
      constexpr int kColumns = kMasked ? 16 : kChunk;  // a mask takes registers, too
      wait_for_copies<0>();
      __syncthreads();  // the tile has arrived for all; all are done with the one whose memory the copies take
      const uint32_t queries_b = stage + offset_b, queries_t = stage + offset_t,
                     terms_shared = stage + offset_terms;
      const TileMask mask = first_mask.later_queries(tile * kQueries);
      add_late();
      if (kMasked && next >= 0) {
        copy(rows, terms, next, other_stage());
        step_back();
      }
#pragma unroll
      for (int first = 0; first < kQueries; first += kColumns) {
        FragmentC score[kM][kColumns / 8], grad[kM][kColumns / 8];
        float minus_lse[kColumns / 8][2];
#pragma unroll
        for (int n = 0; n < kColumns / 8; n++) {
          const float4 two = load_shared(terms_shared + (first + n * 8) * kTermBytes);
          minus_lse[n][0] = two.x;
          minus_lse[n][1] = two.z;
#pragma unroll
          for (int m = 0; m < kM; m++)
            grad[m][n] = {{two.y, two.w, two.y, two.w}};  // dP - delta from the start
        }
        clear(score);
        const uint32_t rows_b = queries_b + first * kRowBytes;
        const bool copies = !kMasked && first == 0;
        auto copy_whole = [&](int k) {
          if (!copies) return;
          if (k == 1) copy_terms(terms, other_stage());
          rows.copy_whole(other_stage() + lane_destination, k);
        };
        if constexpr (kOfKeys) {
          multiply_rows<Half, kDim, kM, kColumns>(score, own_keys, rows_b);
          multiply_rows<Half, kDim, kM, kColumns>(grad, own_values, rows_b + kStreamBytes, 0, copy_whole);
        } else {
          multiply_rows<Half, kDim, kM, kColumns>(score, own_keys, rows_b, 0, copy_whole);
        }
        if (copies) {
          commit_copies();
          step_back();
        }
#pragma unroll
        for (int m = 0; m < kM; m++) {
#pragma unroll
          for (int n = 0; n < kColumns / 8; n++) {
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
        // All of dV comes first: dS has time to arrive.
        auto accumulate_all = [&](auto& sum, const auto& x, uint32_t rows_t, bool is_last) {
#pragma unroll
          for (int n = 0; n < kColumns / 16; n++) {
            if (is_last && first + n * 16 + 16 == kQueries) {
              accumulate(sum, x, n, rows_t + n * 16 * kRowBytes, late);
            } else {
              accumulate(sum, x, n, rows_t + n * 16 * kRowBytes);
            }
          }
        };
        const uint32_t rows_t = queries_t + first * kRowBytes;
        if constexpr (kOfValues) accumulate_all(grad_v, score, rows_t + kStreamBytes, !kOfKeys);
        if constexpr (kOfKeys) accumulate_all(grad_k, grad, rows_t, true);
      }
      stage = other_stage();
    };

    // One tile of queries of head first_head + g, full variant. The one after it is tile `next` of head next_g.
    auto full_step = [&](auto g, MaskedTile now, int next_g, int next) {
      const int tile = now.tile;
      wait_for_copies<0>();
      __syncthreads();  // as above
      // Addresses are made anew for each tile: registers are scarcer here than instructions.
      if (next >= begin) copy(rows_at(next_g, next), terms_at(next_g, next), next, other_stage());
      const BackwardLogits<Half> logits(p, b, first_head + g);
      const uint32_t queries_b = stage + offset_b, queries_t = stage + offset_t,
                     terms_shared = stage + offset_terms;
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
        const uint32_t visible = logits.visible(block, now.entry), kept = logits.kept(block);
        logits.finish(score[0], slope, visible, block);
#pragma unroll
        for (int n = 0; n < 2; n++) {
#pragma unroll
          for (int e = 0; e < 4; e++) {
            const float4 row =
                load_shared(terms_shared + (first + n * 8 + e % 2) * kTermBytes);  // max, -log, -delta
            const float prob = test(visible, n, e) ? probability(score[0][n].reg[e], row.x, row.y) : 0.0f;
            const float factor = test(kept, n, e) ? keep_scale : 0.0f;
            const float grad_prob = test(kept, n, e) ? grad[0][n].reg[e] * keep_scale : 0.0f;
            score[0][n].reg[e] = prob * factor;
            grad[0][n].reg[e] = test(visible, n, e) ? prob * (grad_prob + row.z) * slope[n].reg[e] : 0.0f;
          }
        }
        if constexpr (kOfValues) accumulate(grad_v, score, 0, queries_t + kStreamBytes + first * kRowBytes);
        if constexpr (kOfKeys) accumulate(grad_k, grad, 0, queries_t + first * kRowBytes);
      }
      stage = other_stage();
    };

    if constexpr (kFull) {
      copy(rows_at(head, now.tile), terms_at(head, now.tile), now.tile, ring);
#pragma unroll 1
      while (now.tile >= begin) {
        int next_head = head;
        const MaskedTile next = or_later(next_head, tiles.before(now, entries_of(head)));
        full_step(head, now, next_head, next.tile);
        head = next_head;
        now = next;
      }
    } else {
      copy(rows, terms, end - 1, ring);
      step_back();
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
            const int next = tile > begin ? tile - 1 : g + 1 < group ? end - 1 : -1;
            if (tile == begin) to_next_head();
            step(Bool<true>{}, tile, next);
            tile--;
          }
        }
      }
      add_late();
    }
    // The gradients take the memory of the warp's own rows; with none there, that of the ring, when all are done with it.
    if constexpr (kTile.held == 2) __syncthreads();
  }
};

}  // namespace attn_ext::cuda
