// Forward on Hopper's tensor cores: causal, window, key and query lengths, grouped heads.
//
// One block an SM walks tiles of query rows. Its first warpgroup is the producer: one thread of it starts the copies of
// Q, K and V, always ahead. The others are consumers of 64 rows each. For tile j of the keys, from the last to the
// first, a consumer starts
//
//   S = Q K(j)^T  and  O += P(j+1) V(j+1),
//
// and while the tensor cores are at the first, scales O down to the maximum that P(j+1) has; while they are at the second,
// it computes P(j) = exp2(scale * S - maximum) of the first. Consumers take turns at starting products, so that one
// computes exponentials while the other's products run.
#pragma once

#include "../tile/visibility.cuh"
#include "forward_scheduler.h"
#include "forward_sizes.h"
#include "output_rows.cuh"
#include "softmax.cuh"
#include "tensor_copy.cuh"

namespace attn_ext::cuda::sm90 {

// Shared memory: Q, the stages of K, those of V, the barriers.
template <int HeadDim, ForwardVariant Variant>
struct ForwardShared {
  static constexpr ForwardTile kTile = forward_tile(HeadDim, Variant);
  static constexpr int kStages = ForwardTile::kStages;
  uint32_t queries, keys, values;
  StageBarriers<1> query_barriers;
  StageBarriers<kStages> key_barriers, value_barriers;

  __device__ __forceinline__ explicit ForwardShared(uint32_t start) {
    queries = (start + ForwardTile::kAlignment - 1) & ~(ForwardTile::kAlignment - 1);
    keys = queries + kTile.query_bytes();
    values = keys + kStages * kTile.key_bytes();
    query_barriers.address = values + kStages * kTile.key_bytes();
    key_barriers.address = query_barriers.address + StageBarriers<1>::kBytes;
    value_barriers.address = key_barriers.address + StageBarriers<kStages>::kBytes;
  }

  __device__ __forceinline__ void init_barriers() const {
    constexpr int kWarps = 4 * kTile.consumers;  // each empties a stage by one arrival
    query_barriers.init(kWarps);
    key_barriers.init(kWarps);
    value_barriers.init(kWarps);
    fence_barrier_init();
  }
};

// One tile of query rows.
template <int HeadDim, ForwardVariant Variant>
struct ForwardWork {
  static constexpr ForwardTile kTile = forward_tile(HeadDim, Variant);
  int batch, head, row;
  Visibility visible;
  KeyTiles tiles;

  __device__ __forceinline__ ForwardWork(const AttentionParams& p, const BlockPlace& place)
      : batch(place.batch), head(place.head), row(place.row), visible(p, batch),
        tiles(visible, row, kTile.rows(), kTile.keys) {
    // At least one tile, even if everything in it is hidden: then Q's buffer is handed over as always.
    tiles.last = max(tiles.last, tiles.first);
  }
};

// Calls `each` with the tiles of this block.
template <int HeadDim, ForwardVariant Variant, class Each>
__device__ __forceinline__ void for_each_tile(const AttentionParams& p, Each each) {
  constexpr int kRows = forward_tile(HeadDim, Variant).rows();
  const uint32_t tiles = uint32_t(p.batch * p.heads_q) * uint32_t((p.len_q + kRows - 1) / kRows);
  BlockTiles own{blockIdx.x, gridDim.x};
  for (uint32_t tile = own.next(); tile < tiles; tile = own.next()) {
    each(ForwardWork<HeadDim, Variant>(p, place_of_tile(p, tile, kRows)));
  }
}

// What the producer's one thread does.
template <int HeadDim, ForwardVariant Variant>
__device__ __forceinline__ void produce(const ForwardParams& params,
                                        const ForwardShared<HeadDim, Variant>& shared) {
  constexpr ForwardTile kTile = forward_tile(HeadDim, Variant);
  const int group = int(params.problem.heads_q) / int(params.problem.heads_kv);
  RingPosition<1> query;
  RingPosition<ForwardTile::kStages> key, value;
  for_each_tile<HeadDim, Variant>(params.problem, [&](const ForwardWork<HeadDim, Variant>& work) {
    const int head = work.head / group;
    const auto copy_keys = [&](int tile) {
      shared.key_barriers.empty(key.stage).wait(key.parity ^ 1);  // all consumers are done with what is there
      const Barrier full = shared.key_barriers.full(key.stage);
      full.expect(kTile.key_bytes());
      copy_tile<kTile.keys, HeadDim>(shared.keys + key.stage * kTile.key_bytes(), params.k, full,
                                     tile * kTile.keys, head, work.batch);
      key.advance();
    };
    const auto copy_values = [&](int tile) {
      shared.value_barriers.empty(value.stage).wait(value.parity ^ 1);
      const Barrier full = shared.value_barriers.full(value.stage);
      full.expect(kTile.key_bytes());
      copy_tile<kTile.keys, HeadDim>(shared.values + value.stage * kTile.key_bytes(), params.v, full,
                                     tile * kTile.keys, head, work.batch);
      value.advance();
    };
    // Keys first: unlike Q, they need not wait until the rows before have been stored.
    copy_keys(work.tiles.last);
    shared.query_barriers.empty(0).wait(query.parity ^ 1);
    const Barrier full = shared.query_barriers.full(0);
    full.expect(kTile.query_bytes());
    copy_tile<kTile.rows(), HeadDim>(shared.queries, params.q, full, work.row, work.head, work.batch);
    query.advance();
    // In the order of use: S of a tile comes before O of the tile after it.
#pragma unroll 1
    for (int tile = work.tiles.last - 1; tile >= work.tiles.first; tile--) {
      copy_keys(tile);
      copy_values(tile + 1);
    }
    copy_values(work.tiles.first);
  });
}

// A consumer warpgroup: 64 rows.
template <class Half, int HeadDim, ForwardVariant Variant>
struct ForwardConsumer {
  static constexpr ForwardTile kTile = forward_tile(HeadDim, Variant);
  static constexpr int kKeys = kTile.keys, kStages = ForwardTile::kStages;
  static constexpr int kThreads = 128 * kTile.consumers;  // of all consumers
  // Whether causal and window rules come to this kernel.
  static constexpr bool kBands = HeadDim != 128 || Variant == ForwardVariant::kBanded;
  // Named barriers: 1 .. consumers hand over the turn; then one of all consumers.
  static constexpr int kFirstTurn = 1, kAllConsumers = kFirstTurn + kTile.consumers;
  // How many of a tile's score fragments become exponentials before the wait for O += P V: 10/16, found by trying
  // with the assembler's schedule. Fewer, and the wait is idle; more, and the next products start late.
  static constexpr int kBeforeWait = (kKeys / 8 * 10 + 15) / 16;

  const ForwardShared<HeadDim, Variant>& shared;
  const float scale_log2;
  const int index, lane;  // of the consumer; of the thread in its warp
  RowsByK<kTile.rows()> queries;
  RowsByK<kKeys> keys;
  KByColumns<kKeys> values;
  RingPosition<1> query;
  RingPosition<kStages> key, value;

  using Scores = FragmentC[kKeys / 8];
  FragmentC out[HeadDim / 8];  // sum of exp(s - maximum) v
  FragmentA prob[kKeys / 16];  // P of the tile before
  RowSoftmax softmax;
  float factor[2];  // what O is yet to be multiplied with, by row: the maximum has grown

  __device__ __forceinline__ ForwardConsumer(const ForwardShared<HeadDim, Variant>& shared_memory,
                                             const AttentionParams& p, int warp)
      : shared(shared_memory), scale_log2(float(p.scale) * kLog2E), index(warp / 4 - 1),
        lane(threadIdx.x % 32), queries(shared.queries + index * panel_bytes(64)), keys(shared.keys),
        values(shared.values) {}

  // First row of this warpgroup, and of this warp, within the block's tile.
  __device__ __forceinline__ int group_row() const { return 64 * index; }
  __device__ __forceinline__ int warp_row() const { return warp_uniform(threadIdx.x / 32 - 4) * 16; }

  __device__ __forceinline__ void take_turn() const { named_barrier_sync<256>(kFirstTurn + index); }
  __device__ __forceinline__ void pass_turn() const {
    named_barrier_arrive<256>(kFirstTurn + (index + 1 == kTile.consumers ? 0 : index + 1));
  }
  // The first turn is the first consumer's. Whom the last one is passed to has nothing left to do.
  __device__ __forceinline__ void open_turns() const {
    if (index == kTile.consumers - 1) pass_turn();
  }

  // The scores of hidden keys become -inf.
  __device__ __forceinline__ void hide(Scores& s, const Visibility& visible, int row0, int key0) const {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const KeyRange seen = visible.of_query(row0 + warp_row() + lane / 4 + 8 * r);
      const int first = key0 + lane % 4 * 2 - seen.begin;
      const uint32_t count = seen.end - seen.begin;
#pragma unroll
      for (int n = 0; n < kKeys / 8; n++) {
#pragma unroll
        for (int e = 0; e < 2; e++) {
          float& x = s[n].reg[2 * r + e];
          x = uint32_t(first + 8 * n + e) < count ? x : -ATTN_INFINITY;
        }
      }
    }
  }

  __device__ __forceinline__ void pack_probabilities(const Scores& s) {
#pragma unroll
    for (int i = 0; i < kKeys / 4; i++) {  // pairs of columns, in the order of A fragments
      const float* pair = s[i / 2].reg + i % 2 * 2;
      prob[i / 4].reg[i % 4] = pack<Half>(pair[0], pair[1]);
    }
  }

  // The last tile of keys, where there is no P V to run beside.
  __device__ __forceinline__ void first_step(const ForwardWork<HeadDim, Variant>& work, bool masked) {
#pragma unroll
    for (int d = 0; d < HeadDim / 8; d++) out[d] = {};
    softmax.reset();
    shared.query_barriers.full(0).wait(query.parity);  // Q is there
    query.advance();

    Scores s;
    shared.key_barriers.full(key.stage).wait(key.parity);
    pin(s);
    fence_operands();
    multiply<Half, HeadDim / 16, false>(s, queries, keys + key.stage * kTile.key_bytes());
    commit_products();
    wait_for_products<0>();
    pin(s);
    shared.key_barriers.empty(key.stage).arrive_if(lane == 0);
    key.advance();

    if (masked) hide(s, work.visible, work.row, work.tiles.last * kKeys);
    softmax.begin(s, scale_log2, factor);
    softmax.template exponentials<0, kKeys / 8>(s, scale_log2);
    softmax.end(factor);
    pack_probabilities(s);
  }

  // Rows of V past the element's keys, which the tensor has and the copy brought, become zero: P is 0 there, but
  // 0 * NaN is not. They can only be in the last tile; the consumers share the work.
  __device__ __forceinline__ void clear_values(const ForwardWork<HeadDim, Variant>& work, int64_t len_k) {
    const int exist = work.visible.keys - work.tiles.last * kKeys;
    if (exist >= kKeys || work.visible.keys == len_k) return;
    shared.value_barriers.full(value.stage).wait(value.parity);
    const uint32_t tile = shared.values + value.stage * kTile.key_bytes();
#pragma unroll 1  // once a batch element: no reason for more code
    for (int i = max(exist, 0) * 8 + threadIdx.x - 128; i < kKeys * 8; i += kThreads) {
#pragma unroll
      for (int panel = 0; panel < panels(HeadDim); panel++) {
        asm volatile(
            "st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(tile + panel * panel_bytes(kKeys) + i * 16),
            "r"(0)
            : "memory");
      }
    }
    fence_async_proxy();                          // the zeros before the products that read them
    named_barrier_sync<kThreads>(kAllConsumers);  // everybody's zeros
  }

  // O, relative to the maximum that P has.
  __device__ __forceinline__ void rescale() {
#pragma unroll
    for (int i = 0; i < HeadDim / 2; i++) out[i / 4].reg[i % 4] *= factor[i / 2 % 2];
  }

  // One tile of keys: its scores and probabilities, beside the product of the probabilities before.
  template <bool Masked>
  __device__ __forceinline__ void step(const ForwardWork<HeadDim, Variant>& work, int tile) {
    Scores s;
    shared.key_barriers.full(key.stage).wait(key.parity);
    take_turn();
    pin(s);
    fence_operands();
    multiply<Half, HeadDim / 16, false>(s, queries, keys + key.stage * kTile.key_bytes());
    commit_products();
    rescale();  // beside S
    shared.value_barriers.full(value.stage).wait(value.parity);
    pin(prob);
    pin(out);
    fence_operands();
    multiply<Half, true>(out, prob, values + value.stage * kTile.key_bytes());
    commit_products();
    pass_turn();
    wait_for_products<1>();  // S
    pin(s);
    shared.key_barriers.empty(key.stage).arrive_if(lane == 0);
    key.advance();

    if constexpr (Masked) hide(s, work.visible, work.row, tile * kKeys);
    softmax.begin(s, scale_log2, factor);
    softmax.template exponentials<0, kBeforeWait>(s, scale_log2);
    softmax.hold_wait(shared.queries, scale_log2);
    wait_for_products<0>();  // O
    pin(out);
    pin(prob);
    shared.value_barriers.empty(value.stage).arrive_if(lane == 0);
    value.advance();
    softmax.template exponentials<kBeforeWait, kKeys / 8>(s, scale_log2);
    softmax.end(factor);
    pack_probabilities(s);
  }

  // The product of the last probabilities.
  __device__ __forceinline__ void last_step() {
    rescale();
    shared.value_barriers.full(value.stage).wait(value.parity);
    pin(prob);
    pin(out);
    fence_operands();
    multiply<Half, true>(out, prob, values + value.stage * kTile.key_bytes());
    commit_products();
    wait_for_products<0>();
    pin(out);
    shared.value_barriers.empty(value.stage).arrive_if(lane == 0);
    value.advance();
  }

  // O over the row's sum is the output; the LSE, and the two parts that it is the sum of. The output passes through
  // this warp's own rows of Q, which nobody reads any more.
  __device__ __forceinline__ void store(const ForwardWork<HeadDim, Variant>& work, const AttentionParams& p,
                                        const ForwardOutput& output) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int row = work.row + warp_row() + lane / 4 + 8 * r;
      const float sum = quad_sum(softmax.sum[r]);
      // An empty row's output is 0 whatever NaN times 0 has left in O.
      const bool empty = row >= work.visible.queries || sum == 0.0f;
      const float inverse = 1.0f / sum;
#pragma unroll
      for (int i = 0; i < HeadDim / 4; i++) {
        float& x = out[i / 2].reg[2 * r + i % 2];
        x = empty ? 0.0f : x * inverse;
      }
      if (lane % 4 == 0 && row < p.len_q) {
        store_lse(output, work.batch, work.head, row, empty ? -ATTN_INFINITY : softmax.shift[r] * kLn2,
                  empty ? 0.0f : __log2f(sum) * kLn2);
      }
    }
    const uint32_t rows = shared.queries + warp_row() * kPanelRowBytes;
    gather_rows<Half, kTile.rows()>(rows, out);
    __syncwarp();  // the rows are complete; only this warp's
    const int64_t first = work.row + warp_row();
    store_rows<kTile.rows(), HeadDim>(rows, output.out, work.batch, work.head, first,
                                      int(p.len_q - first < 16 ? p.len_q - first : 16), int(p.dim_v));
    fence_async_proxy();  // before the copy of the next Q
    __syncwarp();         // all lanes have read
    shared.query_barriers.empty(0).arrive_if(lane == 0);
  }

  __device__ __forceinline__ void run(const ForwardParams& params) {
    const AttentionParams& p = params.problem;
    open_turns();
    for_each_tile<HeadDim, Variant>(p, [&](const ForwardWork<HeadDim, Variant>& work) {
      const KeyTiles own(work.visible, work.row + group_row(), 64, kKeys);
      int tile = work.tiles.last;
      first_step(work, tile > own.whole_last || tile < own.whole_first);
      clear_values(work, p.len_k);
      tile--;
      if constexpr (kBands) {
        // Tiles whole_first .. whole_last need no mask, if there are any; none of them lies outside the block's.
        const int whole_first = max(own.whole_first, work.tiles.first);
        const int whole_last = max(own.whole_last, work.tiles.first - 1);
#pragma unroll 1
        for (; tile > whole_last; tile--) step<true>(work, tile);
#pragma unroll 1
        for (; tile >= whole_first; tile--) step<false>(work, tile);
#pragma unroll 1
        for (; tile >= work.tiles.first; tile--) step<true>(work, tile);
      } else {  // the rows see every key; those that do not exist become empty rows whatever they see
#pragma unroll 1
        for (; tile >= work.tiles.first; tile--) step<false>(work, tile);
      }
      last_step();
      store(work, p, params.output);
    });
  }
};

template <class Half, int HeadDim, ForwardVariant Variant>
__device__ __forceinline__ void attn_forward(const ForwardParams& params) {
  constexpr ForwardTile kTile = forward_tile(HeadDim, Variant);
  extern __shared__ char shared_memory[];
  const ForwardShared<HeadDim, Variant> shared(shared_address(shared_memory));
  if (threadIdx.x == 0) shared.init_barriers();
  __syncthreads();  // the barriers are there

  const int warp = warp_uniform(threadIdx.x / 32);
  if (warp < 4) {
    give_up_registers<kTile.producer_registers>();
    if (threadIdx.x == 0) produce<HeadDim, Variant>(params, shared);
  } else {
    take_registers<kTile.consumer_registers>();
    ForwardConsumer<Half, HeadDim, Variant>(shared, params.problem, warp).run(params);
  }
}

}  // namespace attn_ext::cuda::sm90
