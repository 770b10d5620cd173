// dK and dV on Hopper. A block owns 128 keys of one KV head, keeps their gradients in registers and walks over the
// queries of the head's whole group that can see them, in a fixed order: no atomics, the same bits in every run.
//
// Everything is transposed, so that the rows are keys:
//   S^T = K Q^T, dP^T = V dO^T        (from shared memory)
//   P^T = exp2(scale * S^T - lse), dS^T = P^T * (dP^T - delta)
//   dV += P^T dO, dK += dS^T Q        (P^T and dS^T packed in the registers they were made in)
#pragma once

#include "backward_tile.cuh"

namespace attn_ext::cuda::sm90 {

template <class Half, int kDim>
struct BackwardDkDv {
  static constexpr int kKeys = kBackwardRows, kQueries = dkdv_queries(kDim);
  using Shared = BackwardShared<kDim, kQueries, kTermSize>;  // own: K, V; stream: Q, dO
  using Gradient = FragmentC[kDim / 8];

  // What a block works on: tiles begin .. end - 1 of the queries of each head of the group see some of its keys, tiles
  // whole_begin .. whole_end - 1 see all of them and need no mask. Blocks of one head follow each other, so that they
  // find its queries in the L2 cache; first keys first, which most queries see under a causal mask.
  struct Work {
    int b, head_kv, first_key, begin, end, whole_begin, whole_end;

    __device__ __forceinline__ explicit Work(const AttentionParams& p) {
      const uint32_t tiles = uint32_t((p.len_k + kKeys - 1) / kKeys), head = blockIdx.x / tiles;
      b = int(head / uint32_t(p.heads_kv));
      head_kv = int(head % uint32_t(p.heads_kv));
      first_key = int(blockIdx.x % tiles) * kKeys;
      const Visibility visibility(p, b);
      const int last_key = min(first_key + kKeys, visibility.keys) - 1;
      const KeyRange seen = visibility.queries_of_keys(first_key, last_key);
      const KeyRange whole = visibility.queries_of_all_keys(first_key, last_key);
      begin = seen.begin / kQueries;
      end = (seen.end + kQueries - 1) / kQueries;
      whole_begin = (whole.begin + kQueries - 1) / kQueries;
      whole_end = whole.end / kQueries;
    }
    __device__ __forceinline__ bool whole(int tile) const { return tile >= whole_begin && tile < whole_end; }
  };

  static __device__ __forceinline__ void fetch(const BackwardParams& params, const Shared& shared) {
    const AttentionParams& p = params.given.problem;
    const Work work(p);
    if (work.begin >= work.end) return;
    shared.own_full().expect(2 * Shared::kOwnBytes);
    copy_tile<kKeys, kDim>(shared.own(0), params.k, shared.own_full(), work.first_key, work.head_kv, work.b);
    copy_tile<kKeys, kDim>(shared.own(1), params.v, shared.own_full(), work.first_key, work.head_kv, work.b);
    const int group = int(p.group());
    RingPosition<kBackwardStages> ring;
#pragma unroll 1
    for (int head = work.head_kv * group; head < (work.head_kv + 1) * group; head++) {
      const float* terms =
          params.given.row_terms + (work.b * p.heads_q + head) * params.given.row_stride * (kTermSize / 4);
#pragma unroll 1
      for (int tile = work.begin; tile < work.end; tile++) {
        shared.stages().empty(ring.stage).wait(ring.parity ^ 1);
        const Barrier full = shared.stages().full(ring.stage);
        full.expect(Shared::kStageBytes + Shared::kTermBytes);
        copy_tile<kQueries, kDim>(shared.stream(ring.stage, 0), params.q, full, tile * kQueries, head,
                                  work.b);
        copy_tile<kQueries, kDim>(shared.stream(ring.stage, 1), params.grad_out, full, tile * kQueries, head,
                                  work.b);
        bulk_copy(shared.terms(ring.stage), terms + int64_t(tile) * kQueries * (kTermSize / 4),
                  Shared::kTermBytes, full);
        ring.advance();
      }
    }
  }

  static __device__ __forceinline__ void gradients(const cuda::BackwardParams& params, const Shared& shared,
                                                   char* memory) {
    const AttentionParams& p = params.problem;
    FragmentC grad_k[1][kDim / 8], grad_v[1][kDim / 8];
    clear(grad_k);
    clear(grad_v);
    const Work work(p);
    if (work.begin < work.end) walk(p, shared, work, grad_k[0], grad_v[0]);

    consumers_sync();  // both warpgroups are done with the tiles, whose memory the gradients take
    const int warp = warp_uniform((threadIdx.x - 128) / 32), warp_key = work.first_key + warp * 16;
    const int keys = int(p.valid_keys(work.b));
    char* const rows = memory + warp * 16 * shared_row_bytes(kDim);
    if (params.io.grad_k.present) {
      store_gradient<Half, kDim>(grad_k, float(p.scale), params.io.grad_k, work.b, work.head_kv, warp_key,
                                 keys, int(p.len_k), int(p.dim_qk), rows);
    }
    __syncwarp();  // all lanes have read dK, whose memory dV takes
    if (params.io.grad_v.present) {
      store_gradient<Half, kDim>(grad_v, 1.0f, params.io.grad_v, work.b, work.head_kv, warp_key, keys,
                                 int(p.len_k), int(p.dim_v), rows);
    }
  }

 private:
  // Adds up both gradients, dK not yet scaled.
  static __device__ __forceinline__ void walk(const AttentionParams& p, const Shared& shared,
                                              const Work& work, Gradient& grad_k, Gradient& grad_v) {
    const int thread = threadIdx.x - 128, lane = thread % 32, warp = warp_uniform(thread / 32);
    const float scale_log2 = float(p.scale) * kLog2E;
    const Visibility visibility(p, work.b);
    const int lane_query = lane % 4 * 2;
    const TileMask first_mask(visibility, work.first_key + warp * 16 + lane / 4, lane_query,
                              visibility.queries - lane_query);
    const uint32_t lane_terms = shared.terms(0) + lane_query * kTermSize;

    const uint32_t own_rows = warp / 4 * panel_bytes(64);
    const RowsByK<kKeys> keys(shared.own(0) + own_rows), values(shared.own(1) + own_rows);
    const RowsByK<kQueries> queries(shared.stream(0, 0)), grads(shared.stream(0, 1));
    const KByColumns<kQueries> queries_t(shared.stream(0, 0)), grads_t(shared.stream(0, 1));

    FragmentC prob[kQueries / 8], grad[kQueries / 8];  // S^T, then P^T; dP^T - delta, then dS^T
    FragmentA packed_prob[kQueries / 16], packed_grad[kQueries / 16];  // P^T and dS^T
    RingPosition<kBackwardStages> ring;

    // {-lse, -delta} of this lane's two queries of fragment n.
    auto terms = [&](int n) {
      return load_shared(lane_terms + ring.stage * Shared::kTermBytes + n * 8 * kTermSize);
    };
    // Starts S^T.
    auto start_scores = [&] {
      shared.stages().full(ring.stage).wait(ring.parity);
      pin(prob);
      fence_operands();
      multiply<Half, kDim / 16, false>(prob, keys, queries + ring.stage * Shared::kStageBytes);
      commit_products();
    };
    // Starts dP^T - delta: delta is subtracted before there is dP^T.
    auto start_grads = [&] {
#pragma unroll
      for (int n = 0; n < kQueries / 8; n++) {
        const float4 two = terms(n);
        grad[n] = {{two.y, two.w, two.y, two.w}};
      }
      pin(grad);
      fence_operands();
      multiply<Half, kDim / 16, true>(grad, values, grads + ring.stage * Shared::kStageBytes);
      commit_products();
    };
    // P^T of S^T.
    auto exponentials = [&] {
      pin(prob);
#pragma unroll
      for (int n = 0; n < kQueries / 8; n++) {
        const float4 two = terms(n);
#pragma unroll
        for (int e = 0; e < 4; e++) {
          prob[n].reg[e] = exp2_fast(fmaf(prob[n].reg[e], scale_log2, e % 2 ? two.z : two.x));
        }
      }
      pack_all<Half>(packed_prob, prob);
    };
    // Takes what is hidden out of a tile whose S^T and dP^T are done. dO of queries that do not count, but have memory
    // (past query_lengths), must not reach dV even as NaN.
    auto hide = [&](int tile) {
      consumers_sync();  // both warpgroups are done with S^T and dP^T, which need the rows as they are
      clear_not_finite<Half, Shared::kStreamBytes>(shared.stream(ring.stage, 0), thread);
      clear_rows<kQueries, Shared::kStreamBytes>(shared.stream(ring.stage, 1),
                                                 visibility.queries - tile * kQueries, thread);
      fence_async_proxy();  // wgmma reads what these threads wrote
      consumers_sync();     // all have written
      const TileMask mask = first_mask.later_queries(tile * kQueries);
#pragma unroll
      for (int n = 0; n < kQueries / 8; n++) {
#pragma unroll
        for (int e = 0; e < 4; e++) {
          const int query = n * 8 + e % 2, key = e / 2 * 8;
          const bool visible = mask.visible(key - query, query);
          prob[n].reg[e] = visible ? prob[n].reg[e] : 0.0f;
          grad[n].reg[e] = visible ? grad[n].reg[e] : 0.0f;
        }
      }
      pack_all<Half>(packed_prob, prob);
    };
    // Starts dV += P^T dO, then dK += dS^T Q.
    auto start_sums = [&] {
      pin(packed_prob);
      pin(grad_v);
      fence_operands();
      multiply<Half, true>(grad_v, packed_prob, grads_t + ring.stage * Shared::kStageBytes);
#pragma unroll
      for (int n = 0; n < kQueries / 8; n++) {
#pragma unroll
        for (int e = 0; e < 4; e++) grad[n].reg[e] *= prob[n].reg[e];
      }
      pack_all<Half>(packed_grad, grad);
      pin(packed_grad);
      pin(grad_k);
      fence_operands();
      multiply<Half, true>(grad_k, packed_grad, queries_t + ring.stage * Shared::kStageBytes);
      commit_products();
    };
    auto pin_sums = [&] {
      pin(packed_prob);
      pin(packed_grad);
      pin(grad_v);
      pin(grad_k);
    };

    const int negative = -int(p.len_q);
    shared.own_full().wait(0);
    start_scores();
    wait_for_products<0>();  // the assembler would put one of its own before start_grads() touches registers
    start_grads();
    exponentials();
    wait_for_products<0>();
    pin(grad);
    if (!work.whole(work.begin)) hide(work.begin);
    int tile = work.begin;
#pragma unroll 1
    for (int left = int(p.group()) * (work.end - work.begin) - 1; left > 0; left--) {
      tile = tile + 1 < work.end ? tile + 1 : work.begin;
      start_sums();
      const int summed = ring.stage;
      ring.advance();
      start_scores();
      wait_for_products<1>();
      pin_sums();
      __syncwarp();  // all lanes have read their row terms
      release(shared.stages().empty(summed));
      start_grads();
      wait_for_products<1>();
      exponentials();
      hold_wait(prob, shared.terms(0), negative);
      wait_for_products<0>();
      pin(grad);
      if (!work.whole(tile)) hide(tile);
    }
    start_sums();
    wait_for_products<0>();
    pin_sums();
  }
};

}  // namespace attn_ext::cuda::sm90
