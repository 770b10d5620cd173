// dQ on Hopper. A block owns 128 queries of one head, keeps their gradient in registers and walks over the keys they see:
//   S = Q K^T, dP = dO V^T             (from shared memory)
//   dS = exp2(scale * S - lse) * (dP - delta)
//   dQ += dS K                         (dS packed in the registers it was made in)
// S and dP are those of backward_dkdv.cuh once more: two products of seven, paid for having no atomics, no float32 dQ in
// memory, and the same bits in every run.
#pragma once

#include "../tile/block_order.h"
#include "backward_tile.cuh"

namespace attn_ext::cuda::sm90 {

template <class Half, int kDim>
struct BackwardDq {
  static constexpr int kQueries = kBackwardRows, kKeys = dq_keys(kDim);
  using Shared = BackwardShared<kDim, kKeys, 0>;  // own: Q, dO; stream: K, V
  using Gradient = FragmentC[kDim / 8];

  // What a block works on: key tiles begin .. end - 1 are seen by some of its queries, tiles whole_begin ..
  // whole_end - 1 by all, so that they need no mask.
  struct Work {
    int b, head, first_query, begin, end, whole_begin, whole_end;

    __device__ __forceinline__ explicit Work(const AttentionParams& p) {
      const BlockPlace place = place_of_block(p, blockIdx.x, kQueries);
      b = place.batch;
      head = place.head;
      first_query = place.row;
      const Visibility visibility(p, b);
      const KeyRange seen = visibility.of_queries(first_query, first_query + kQueries - 1);
      const KeyRange whole = visibility.of_all_queries(first_query, first_query + kQueries - 1);
      begin = seen.begin / kKeys;
      end = (seen.end + kKeys - 1) / kKeys;
      whole_begin = (whole.begin + kKeys - 1) / kKeys;
      whole_end = whole.end / kKeys;
    }
    __device__ __forceinline__ bool whole(int tile) const { return tile >= whole_begin && tile < whole_end; }
  };

  static __device__ __forceinline__ void fetch(const BackwardParams& params, const Shared& shared) {
    const AttentionParams& p = params.given.problem;
    const Work work(p);
    if (work.begin >= work.end) return;
    shared.own_full().expect(2 * Shared::kOwnBytes);
    copy_tile<kQueries, kDim>(shared.own(0), params.q, shared.own_full(), work.first_query, work.head,
                              work.b);
    copy_tile<kQueries, kDim>(shared.own(1), params.grad_out, shared.own_full(), work.first_query, work.head,
                              work.b);
    const int head_kv = work.head / int(p.group());
    RingPosition<kBackwardStages> ring;
#pragma unroll 1
    for (int tile = work.begin; tile < work.end; tile++) {
      shared.stages().empty(ring.stage).wait(ring.parity ^ 1);
      const Barrier full = shared.stages().full(ring.stage);
      full.expect(Shared::kStageBytes);
      copy_tile<kKeys, kDim>(shared.stream(ring.stage, 0), params.k, full, tile * kKeys, head_kv, work.b);
      copy_tile<kKeys, kDim>(shared.stream(ring.stage, 1), params.v, full, tile * kKeys, head_kv, work.b);
      ring.advance();
    }
  }

  static __device__ __forceinline__ void gradients(const cuda::BackwardParams& params, const Shared& shared,
                                                   char* memory) {
    const AttentionParams& p = params.problem;
    FragmentC grad_q[1][kDim / 8];
    clear(grad_q);
    const Work work(p);
    if (work.begin < work.end) walk(params, shared, work, grad_q[0]);

    consumers_sync();  // both warpgroups are done with the tiles, whose memory the gradient takes
    const int warp = warp_uniform((threadIdx.x - 128) / 32);
    store_gradient<Half, kDim>(grad_q, float(p.scale), params.io.grad_q, work.b, work.head,
                               work.first_query + warp * 16, int(p.valid_queries(work.b)), int(p.len_q),
                               int(p.dim_qk), memory + warp * 16 * shared_row_bytes(kDim));
  }

 private:
  // Adds up the gradient, not yet scaled.
  static __device__ __forceinline__ void walk(const cuda::BackwardParams& params, const Shared& shared,
                                              const Work& work, Gradient& grad_q) {
    const AttentionParams& p = params.problem;
    const int thread = threadIdx.x - 128, lane = thread % 32, warp = warp_uniform(thread / 32);
    const float scale_log2 = float(p.scale) * kLog2E;
    const Visibility visibility(p, work.b);
    const int query = work.first_query + warp * 16 + lane / 4, lane_key = lane % 4 * 2;
    const TileMask first_mask(visibility, lane_key, query, visibility.keys - lane_key);
    // Of this lane's rows of the fragments. Rows past the last one repeat it: they are not stored.
    float minus_lse[2], minus_delta[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int64_t row =
          (work.b * p.heads_q + work.head) * params.row_stride + min(query + 8 * r, int(p.len_q) - 1);
      const float2 terms = reinterpret_cast<const float2*>(params.row_terms)[row];
      minus_lse[r] = terms.x;
      minus_delta[r] = terms.y;
    }

    const uint32_t own_rows = warp / 4 * panel_bytes(64);
    const RowsByK<kQueries> queries(shared.own(0) + own_rows), grads(shared.own(1) + own_rows);
    const RowsByK<kKeys> keys(shared.stream(0, 0)), values(shared.stream(0, 1));
    const KByColumns<kKeys> keys_t(shared.stream(0, 0));

    FragmentC prob[kKeys / 8], grad[kKeys / 8];  // S, then P; dP, then dS
    FragmentA packed_grad[kKeys / 16];           // dS
    RingPosition<kBackwardStages> ring;

    auto start_scores = [&] {
      shared.stages().full(ring.stage).wait(ring.parity);
      pin(prob);
      fence_operands();
      multiply<Half, kDim / 16, false>(prob, queries, keys + ring.stage * Shared::kStageBytes);
      commit_products();
    };
    auto start_grads = [&] {
      pin(grad);
      multiply<Half, kDim / 16, false>(grad, grads, values + ring.stage * Shared::kStageBytes);
      commit_products();
    };
    auto exponentials = [&] {
      pin(prob);
#pragma unroll
      for (int n = 0; n < kKeys / 8; n++) {
#pragma unroll
        for (int e = 0; e < 4; e++) {
          prob[n].reg[e] = exp2_fast(fmaf(prob[n].reg[e], scale_log2, minus_lse[e / 2]));
        }
      }
    };
    // Takes hidden keys out of a tile whose S and dP are done.
    auto hide = [&](int tile) {
      consumers_sync();  // both warpgroups are done with S, which needs K as it is
      clear_not_finite<Half, Shared::kStreamBytes>(shared.stream(ring.stage, 0), thread);
      fence_async_proxy();  // wgmma reads what these threads wrote
      consumers_sync();     // all have written
      const TileMask mask = first_mask.later_keys(tile * kKeys);
#pragma unroll
      for (int n = 0; n < kKeys / 8; n++) {
#pragma unroll
        for (int e = 0; e < 4; e++) {
          const int key = n * 8 + e % 2, query = e / 2 * 8;
          grad[n].reg[e] = mask.visible(key - query, key) ? grad[n].reg[e] : 0.0f;
        }
      }
    };
    auto score_gradients = [&](int tile) {
      pin(grad);
#pragma unroll
      for (int n = 0; n < kKeys / 8; n++) {
#pragma unroll
        for (int e = 0; e < 4; e++) grad[n].reg[e] = prob[n].reg[e] * (grad[n].reg[e] + minus_delta[e / 2]);
      }
      if (!work.whole(tile)) hide(tile);
      pack_all<Half>(packed_grad, grad);
    };
    auto start_sum = [&](int stage) {
      pin(packed_grad);
      pin(grad_q);
      multiply<Half, true>(grad_q, packed_grad, keys_t + stage * Shared::kStageBytes);
      commit_products();
    };
    auto pin_sum = [&] {
      pin(packed_grad);
      pin(grad_q);
    };

    const int negative = -int(p.len_q);
    shared.own_full().wait(0);
    start_scores();
    start_grads();
    wait_for_products<1>();
    exponentials();
    wait_for_products<0>();
    score_gradients(work.begin);
#pragma unroll 1
    for (int tile = work.begin + 1; tile < work.end; tile++) {
      const int summed = ring.stage;
      ring.advance();
      pin(packed_grad);
      pin(grad);
      start_scores();
      start_sum(summed);
      start_grads();
      wait_for_products<2>();
      exponentials();
      hold_wait(prob, shared.own(0), negative);
      wait_for_products<0>();
      pin_sum();
      release(shared.stages().empty(summed));
      score_gradients(tile);
    }
    pin(packed_grad);
    fence_operands();
    start_sum(ring.stage);
    wait_for_products<0>();
    pin_sum();
  }
};

}  // namespace attn_ext::cuda::sm90
