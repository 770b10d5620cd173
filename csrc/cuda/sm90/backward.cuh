// The backward on Hopper: five products, and the same bits in every run. A block owns 128 keys of one KV head, keeps
// their dK and dV in registers and walks over the queries of the head's whole group that can see them.
//
// Everything is transposed, so that the rows are keys, or columns of K:
//   S^T = K Q^T, dP^T = V dO^T        (from shared memory)
//   P^T = exp2(scale * S^T - lse), dS^T = P^T * (dP^T - delta)
//   dV += P^T dO, dK += dS^T Q        (P^T and dS^T packed in the registers they were made in)
//   dQ^T = K^T dS^T                   (from shared memory, where both warpgroups put their keys' part of dS)
//
// dQ of a tile of queries is a sum over blocks. They add to it in float32, in global memory and in turn: backward_sums.cuh.
//
// In the first warpgroup one thread starts the copies (TMA), one of another warp adds up dQ. The two others multiply
// (wgmma). They meet once in a tile, for dS; apart from that each goes at its own pace, and one's exponentials hide behind
// the other's products.
#pragma once

#include "backward_sums.cuh"

namespace attn_ext::cuda::sm90 {

template <class Half, int kDim>
struct Backward {
  using Shared = BackwardShared<kDim>;
  using Gradient = FragmentC[kDim / 8];
  static constexpr int kKeys = kBackwardKeys, kQueries = Shared::kQueries;
  // How many fragments of P are made before the wait for dP^T: five eighths, found by trying with the assembler's
  // schedule. Fewer, and nothing runs beside the last of dP^T; more, and D 128 has no registers for them.
  static constexpr int kBeforeWait = kQueries / 8 * 5 / 8;

  static __device__ __forceinline__ void fetch(const BackwardParams& params, const Shared& shared,
                                               const BackwardWork& work) {
    if (work.empty()) return;
    shared.own_full().expect(2 * Shared::kOwnBytes);
    copy_tile<kKeys, kDim>(shared.keys(), params.k, shared.own_full(), work.first_key, work.head_kv,
                           work.batch);
    copy_tile<kKeys, kDim>(shared.values(), params.v, shared.own_full(), work.first_key, work.head_kv,
                           work.batch);
    RingPosition<kBackwardStages> ring;
    work.for_each_tile([&](int head, int tile) {
      const float* terms =
          params.given.row_terms +
          ((int64_t(work.batch) * params.given.problem.heads_q + head) * params.given.row_stride +
           int64_t(tile) * kQueries) *
              kTermSize;
      shared.stages().empty(ring.stage).wait(ring.parity ^ 1);
      asm volatile("st.shared.b32 [%0], %1;" ::"r"(shared.tile(ring.stage)), "r"(tile) : "memory");
      const Barrier full = shared.stages().full(ring.stage);
      full.expect(Shared::kStageBytes + Shared::kTermBytes);
      copy_tile<kQueries, kDim>(shared.queries(ring.stage), params.q, full, tile * kQueries, head,
                                work.batch);
      copy_tile<kQueries, kDim>(shared.grads(ring.stage), params.grad_out, full, tile * kQueries, head,
                                work.batch);
      bulk_copy(shared.terms(ring.stage), terms, Shared::kTermBytes, full);
      ring.advance();
    });
  }

  static __device__ __forceinline__ void multiply_all(const cuda::BackwardParams& params,
                                                      const Shared& shared, const BackwardWork& work,
                                                      char* memory) {
    const AttentionParams& p = params.problem;
    FragmentC grad_k[1][kDim / 8], grad_v[1][kDim / 8];
    clear(grad_k);
    clear(grad_v);
    if (!work.empty()) walk(p, shared, work, grad_k[0], grad_v[0]);

    consumers_sync();  // both warpgroups are done with the tiles, whose memory the gradients take
    const int warp = warp_uniform((threadIdx.x - 128) / 32), warp_key = work.first_key + warp * 16;
    const int keys = int(p.valid_keys(work.batch));
    char* const rows = memory + warp * 16 * shared_row_bytes(kDim);
    if (params.io.grad_k.present) {
      store_gradient<Half, kDim>(grad_k, float(p.scale), params.io.grad_k, work.batch, work.head_kv, warp_key,
                                 keys, int(p.len_k), int(p.dim_qk), rows);
    }
    __syncwarp();  // all lanes have read dK, whose memory dV takes
    if (params.io.grad_v.present) {
      store_gradient<Half, kDim>(grad_v, 1.0f, params.io.grad_v, work.batch, work.head_kv, warp_key, keys,
                                 int(p.len_k), int(p.dim_v), rows);
    }
  }

 private:
  // Adds up dK, not yet scaled, and dV, and hands dQ of each tile over.
  static __device__ __forceinline__ void walk(const AttentionParams& p, const Shared& shared,
                                              const BackwardWork& work, Gradient& grad_k, Gradient& grad_v) {
    const int thread = threadIdx.x - 128, lane = thread % 32, warp = warp_uniform(thread / 32);
    const int group = warp / 4;
    const uint32_t lane_terms = shared.terms(0) + lane % 4 * 16;

    const uint32_t own_rows = group * panel_bytes(64);
    const RowsByK<kKeys> keys(shared.keys() + own_rows), values(shared.values() + own_rows);
    const RowsByK<kQueries> queries(shared.queries(0)), grads(shared.grads(0));
    const KByColumns<kQueries> queries_t(shared.queries(0)), grads_t(shared.grads(0));
    // For dQ^T: this warpgroup's panel of K's columns and all queries, or the one panel and half of the queries.
    constexpr bool kByColumns = panels(kDim) == 2;
    const KByColumns<kKeys> keys_t(shared.keys() + (kByColumns ? group * panel_bytes(kKeys) : 0));
    const RowsByK<kQueries> score_grads(shared.score_grads() +
                                        (kByColumns ? 0 : group * panel_bytes(kQueries / 2)));
    // Where the lane's row address of the first 16 queries of dS lies, in the warp's 16 columns; and its share of dQ.
    const uint32_t lane_score_grads = shared.score_grads() + group * panel_bytes(kQueries) +
                                      swizzled(lane % 8 + lane / 16 * 8, warp % 4 * 2 + lane / 8 % 2);
    const uint32_t lane_sums = shared.sums() + group * (Shared::kSumBytes / 2) + thread % 128 * 16;

    FragmentC prob[kQueries / 8], grad[kQueries / 8];  // S^T, then P^T; dP^T - delta, then dS^T
    FragmentA packed_prob[kQueries / 16], packed_grad[kQueries / 16];  // P^T and dS^T
    FragmentC sum[sums_fragments(kDim)];                               // dQ^T
    RingPosition<kBackwardStages> ring;

    // In dQ a dS of 0 must make 0 whatever K has there, so what is not finite in K becomes 0. S should be NaN all the
    // same (or infinite: then NaN, too): the scale of such a key makes it so.
    shared.own_full().wait(0);
    const uint32_t spoilt = clear_not_finite_rows<Half, kDim>(shared.keys() + warp * 16 * kPanelRowBytes);
    fence_async_proxy();  // wgmma reads what these threads wrote
    consumers_sync();     // all have written
    const float scale_log2 = float(p.scale) * kLog2E;
    const float scale[2] = {spoilt & 1 ? ATTN_NAN : scale_log2, spoilt & 2 ? ATTN_NAN : scale_log2};

    // Which tile of queries is in the stage.
    auto tile_of_stage = [&] {
      int tile;
      asm volatile("ld.shared.b32 %0, [%1];" : "=r"(tile) : "r"(shared.tile(ring.stage)));
      return tile;
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
        const float4 two = load_shared(lane_terms + ring.stage * Shared::kTermBytes + kQueries * 4 + n * 64);
        grad[n] = {{two.x, two.y, two.z, two.w}};
      }
      pin(grad);
      fence_operands();
      multiply<Half, kDim / 16, true>(grad, values, grads + ring.stage * Shared::kStageBytes);
      commit_products();
    };
    // P^T of S^T.
    auto exponentials = [&](int first, int last) {
#pragma unroll
      for (int n = first; n < last; n += 2) {
        const float4 four = load_shared(lane_terms + ring.stage * Shared::kTermBytes + n * 32);
#pragma unroll
        for (int e = 0; e < 4; e++) {
          float &left = prob[n].reg[e], &right = prob[n + 1].reg[e];
          left = exp2_fast(fmaf(left, scale[e / 2], e % 2 ? four.y : four.x));
          right = exp2_fast(fmaf(right, scale[e / 2], e % 2 ? four.w : four.z));
        }
      }
    };
    // Takes what is hidden out of a tile whose S^T and dP^T are done. dO of queries that do not count, but have memory
    // (past query_lengths), must not reach dV even as NaN.
    auto hide = [&](int tile) {
      const int thread = thread_index() - 128, lane = thread % 32;
      consumers_sync();  // both warpgroups are done with S^T and dP^T, which need the rows as they are
      clear_not_finite<Half, Shared::kStreamBytes>(shared.queries(ring.stage), thread);
      clear_rows<kQueries, Shared::kStreamBytes>(shared.grads(ring.stage), work.mask.left - tile * kQueries,
                                                 thread);
      fence_async_proxy();  // wgmma reads what these threads wrote
      consumers_sync();     // all have written
      const int query0 = tile * kQueries + lane % 4 * 2, key0 = work.first_key + thread / 32 * 16 + lane / 4;
      const int keys_left = work.keys - key0;
      const TileMask mask(work.mask.from_left + uint32_t(key0 - query0), work.mask.width,
                          work.mask.left - query0);
#pragma unroll
      for (int n = 0; n < kQueries / 8; n++) {
#pragma unroll
        for (int e = 0; e < 4; e++) {
          const int query = n * 8 + e % 2, key = e / 2 * 8;
          const bool visible = mask.visible(key - query, query) && key < keys_left;
          prob[n].reg[e] = visible ? prob[n].reg[e] : 0.0f;
          grad[n].reg[e] = visible ? grad[n].reg[e] : 0.0f;
        }
      }
    };
    // Starts dV += P^T dO, dK += dS^T Q and, as a group of its own, dQ^T = K^T dS^T.
    auto start_sums = [&] {
#pragma unroll
      for (int n = 0; n < kQueries / 8; n++) {
#pragma unroll
        for (int e = 0; e < 4; e++) grad[n].reg[e] *= prob[n].reg[e];
      }
      pack_all<Half>(packed_grad, grad);
      pin(packed_grad);
      pack_all<Half>(packed_prob, prob);
      pin(packed_prob);
#pragma unroll
      for (int k = 0; k < kQueries / 16; k++) {
        stmatrix_x4_transposed(lane_score_grads + ring.stage * Shared::kScoreBytes + k * panel_bytes(16),
                               packed_grad[k].reg);
      }
      fence_async_proxy();  // wgmma reads what these threads write
      pin(grad_v);
      pin(grad_k);
      fence_operands();
      multiply<Half, true>(grad_v, packed_prob, grads_t + ring.stage * Shared::kStageBytes);
      multiply<Half, true>(grad_k, packed_grad, queries_t + ring.stage * Shared::kStageBytes);
      commit_products();
      // dS is complete. And both warpgroups are done with the other buffer: the next tile's dS may take it.
      consumers_sync();
      pin(sum);
      multiply<Half, kKeys / 16, false>(sum, keys_t, score_grads + ring.stage * Shared::kScoreBytes);
      commit_products();
    };
    auto pin_sums = [&] {
      pin(packed_prob);
      pin(packed_grad);
      pin(grad_v);
      pin(grad_k);
    };
    // Hands dQ of the tile of this stage over to the thread that adds it up.
    auto give_sum = [&](int stage) {
      static_assert(kBackwardStages == 2);  // so phases alternate as stages do
      pin(sum);
      shared.sum_stage().empty(0).wait(stage ^ 1);  // it has taken the one before
#pragma unroll
      for (int n = 0; n < sums_fragments(kDim); n++) store_shared(lane_sums + n * 128 * 16, sum[n]);
      fence_async_proxy();  // a bulk copy reads what these threads write
      __syncwarp();         // all lanes have written
      release(shared.sum_stage().full(0));
    };

    const int negative = -int(p.len_q);
    start_scores();
    wait_for_products<0>();  // the assembler would put one of its own before start_grads() touches registers
    start_grads();
    pin(prob);
    exponentials(0, kQueries / 8);
    wait_for_products<0>();
    pin(grad);
    if (const int tile = tile_of_stage(); !work.tiles.whole(tile)) hide(tile);
#pragma unroll 1
    for (int left = work.tile_count() - 1; left > 0; left--) {
      start_sums();
      wait_for_products<1>();  // dV and dK
      pin_sums();
      const int summed = ring.stage;
      release(shared.stages().empty(summed));  // the barrier for dS was after all lanes' reads of row terms
      ring.advance();
      start_scores();
      wait_for_products<1>();  // dQ
      give_sum(summed);
      start_grads();
      const int tile = tile_of_stage();
      const bool whole = work.tiles.whole(tile);
      wait_for_products<1>();
      pin(prob);
      exponentials(0, kBeforeWait);
      hold_wait<kBeforeWait>(prob, shared.terms(0), negative);
      wait_for_products<0>();
      pin(grad);
      exponentials(kBeforeWait, kQueries / 8);
      if (!whole) hide(tile);
    }
    start_sums();
    wait_for_products<0>();
    pin_sums();
    give_sum(ring.stage);
  }
};

template <class Half, int kDim>
__device__ __forceinline__ void run_backward(const BackwardParams& params) {
  // Aligned by the assembler: rounding an address up would cost memory that is not there.
  extern __shared__ __align__(kTileAlignment) char memory[];
  using Kernel = Backward<Half, kDim>;
  const BackwardShared<kDim> shared(memory);
  BackwardWork& work = *reinterpret_cast<BackwardWork*>(memory + (shared.work() - shared.start));
  if (threadIdx.x == 0) {
    shared.own_full().init(1);
    shared.stages().init(kConsumerThreads / 32);  // each warp arrives once
    shared.sum_stage().full(0).init(kConsumerThreads / 32);
    shared.sum_stage().empty(0).init(1);
    fence_barrier_init();
    const AttentionParams& p = params.given.problem;
    work = BackwardWork(p, key_block_of_number(p, take_number(params.given), kBackwardKeys),
                        backward_queries(kDim));
  }
  __syncthreads();  // the barriers and the work are there for all
  if (threadIdx.x < 128) {
    give_up_registers<kBackwardProducerRegisters>();
    if (threadIdx.x == 0) Kernel::fetch(params, shared, work);
    if (threadIdx.x == 32) add_up(params.given, shared, work);
  } else {
    take_registers<kBackwardConsumerRegisters>();
    Kernel::multiply_all(params.given, shared, work, memory);
  }
}

}  // namespace attn_ext::cuda::sm90
