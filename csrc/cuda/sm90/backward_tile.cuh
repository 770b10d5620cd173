// The memory of a block of the Hopper backward, and how rows that nobody may see leave a tile.
#pragma once

#include "../sm80/backward_logits.cuh"
#include "../sm80/backward_tile.cuh"
#include "backward_order.h"
#include "backward_sizes.h"
#include "tensor_copy.cuh"
#include "wgmma.cuh"

namespace attn_ext::cuda::sm90 {

constexpr int kConsumerThreads = 128 * kBackwardConsumers;

// What a block works on. It lies in shared memory, and who wants to know something reads it there: no register holds it all
// through the loops.
struct BackwardWork {
  int batch, head_kv, group, first_key;
  TileMask mask;  // of query 0 and key 0
  int keys;       // that exist in this element of the batch
  QueryTiles tiles;

  // For tiles of `queries`.
  __device__ __forceinline__ BackwardWork(const AttentionParams& p, const KeyBlock& own, int queries)
      : BackwardWork(p, own, Visibility(p, own.batch), queries) {}

  __device__ __forceinline__ bool empty() const { return tiles.begin >= tiles.end; }
  // Of all heads of the group.
  __device__ __forceinline__ int tile_count() const { return group * (tiles.end - tiles.begin); }

  // Calls `each` with the query heads and tiles, in the order in which all work on them: see backward_sums.cuh.
  template <class Each>
  __device__ __forceinline__ void for_each_tile(Each each) const {
#pragma unroll 1
    for (int tile = tiles.end - 1; tile >= tiles.begin; tile--) {
#pragma unroll 1
      for (int head = head_kv * group; head < (head_kv + 1) * group; head++) each(head, tile);
    }
  }

 private:
  __device__ __forceinline__ BackwardWork(const AttentionParams& p, const KeyBlock& own,
                                          const Visibility& visible, int queries)
      : batch(own.batch), head_kv(own.head_kv), group(int(p.group())), first_key(own.first_key),
        mask(visible, 0, 0, visible.queries), keys(visible.keys),
        tiles(visible, own.first_key, kBackwardKeys, queries) {}
};

static_assert(sizeof(BackwardWork) == kWorkBytes);

// Addresses in a block's shared memory: K and V; stages of a tile of Q, one of dO, and the terms of their rows; two
// buffers of dS, which has the rows of Q and the keys for columns; dQ of a tile; what the block works on; barriers; which
// tile of queries a stage holds.
template <int kDim>
struct BackwardShared {
  static constexpr int kQueries = backward_queries(kDim);
  static constexpr int kOwnBytes = tile_bytes(kBackwardKeys, kDim);
  static constexpr int kStreamBytes = tile_bytes(kQueries, kDim), kStageBytes = 2 * kStreamBytes;
  static constexpr int kTermBytes = kQueries * kTermSize * 4;
  static constexpr int kScoreBytes = tile_bytes(kQueries, kBackwardKeys);
  static constexpr int kSumBytes = 4 * sums_elements(kDim);
  uint32_t start;

  __device__ __forceinline__ explicit BackwardShared(const char* memory) : start(shared_address(memory)) {}

  __device__ __forceinline__ uint32_t keys() const { return start; }
  __device__ __forceinline__ uint32_t values() const { return start + kOwnBytes; }
  __device__ __forceinline__ uint32_t queries(int stage) const {
    return values() + kOwnBytes + stage * kStageBytes;
  }
  __device__ __forceinline__ uint32_t grads(int stage) const { return queries(stage) + kStreamBytes; }
  __device__ __forceinline__ uint32_t score_grads() const { return queries(kBackwardStages); }
  __device__ __forceinline__ uint32_t sums() const { return score_grads() + 2 * kScoreBytes; }
  __device__ __forceinline__ uint32_t terms(int stage) const {
    return sums() + kSumBytes + stage * kTermBytes;
  }
  __device__ __forceinline__ uint32_t work() const { return terms(kBackwardStages); }
  __device__ __forceinline__ Barrier own_full() const { return {work() + kWorkBytes}; }
  __device__ __forceinline__ StageBarriers<kBackwardStages> stages() const {
    return {own_full().address + Barrier::kBytes};
  }
  __device__ __forceinline__ StageBarriers<1> sum_stage() const {
    return {stages().address + StageBarriers<kBackwardStages>::kBytes};
  }
  __device__ __forceinline__ uint32_t tile(int stage) const {
    return sum_stage().address + StageBarriers<1>::kBytes + stage * 4;
  }
};

// threadIdx.x, read anew: what follows from it is then computed where it is needed and not held in registers all through a
// loop.
__device__ __forceinline__ int thread_index() {
  int x;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
  return x;
}

// A barrier of the consumers.
__device__ __forceinline__ void consumers_sync() { named_barrier_sync<kConsumerThreads>(1); }

// This warp is done with a stage.
__device__ __forceinline__ void release(Barrier empty) { empty.arrive_if(threadIdx.x % 32 == 0); }

// Bits 15 and 31: which half of a pair is infinite or NaN. Where all bits of the exponent are set, one more at its lowest
// place runs over into the sign's.
template <class Half>
__device__ __forceinline__ uint32_t not_finite(uint32_t pair);

template <>
__device__ __forceinline__ uint32_t not_finite<f16>(uint32_t pair) {
  return ((pair & 0x7c007c00u) + 0x04000400u) & 0x80008000u;
}

template <>
__device__ __forceinline__ uint32_t not_finite<bf16>(uint32_t pair) {
  return ((pair & 0x7f807f80u) + 0x00800080u) & 0x80008000u;
}

// Makes elements of 16 bytes zero that are infinite or NaN; whether there are any.
template <class Half>
__device__ __forceinline__ bool clear_not_finite_piece(uint32_t address) {
  uint32_t x[4], bad[4];
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(address));
#pragma unroll
  for (int i = 0; i < 4; i++) bad[i] = not_finite<Half>(x[i]);
  if ((bad[0] | bad[1] | bad[2] | bad[3]) == 0) return false;
#pragma unroll
  for (int i = 0; i < 4; i++) x[i] &= ~((bad[i] >> 15) * 0xffffu);
  asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(x[0]), "r"(x[1]), "r"(x[2]),
               "r"(x[3]));
  return true;
}

// Makes elements of a tile zero that are infinite or NaN, since a product with dS = 0 should be 0. By all consumers,
// `thread` of them. (Where such an element is visible, S has carried it on already.)
template <class Half, int kBytes>
__device__ __forceinline__ void clear_not_finite(uint32_t tile, int thread) {
  static_assert(kBytes % (16 * kConsumerThreads) == 0);
#pragma unroll
  for (int at = 0; at < kBytes; at += 16 * kConsumerThreads) {
    clear_not_finite_piece<Half>(tile + at + thread * 16);
  }
}

// Makes the rows of a tile zero from row `exist` on. By all consumers.
template <int kRows, int kBytes>
__device__ __forceinline__ void clear_rows(uint32_t tile, int exist, int thread) {
  if (exist >= kRows) return;
#pragma unroll
  for (int at = 0; at < kBytes; at += 16 * kConsumerThreads) {
    const int offset = at + thread * 16;
    if (offset / kPanelRowBytes % kRows >= exist) {
      asm volatile("st.shared.v4.u32 [%0], {%1,%1,%1,%1};" ::"r"(tile + offset), "r"(0));
    }
  }
}

// Makes elements of this warp's 16 rows of a tile zero that are infinite or NaN, and returns which of the lane's two rows
// had any: bits 0 and 1.
template <class Half, int kDim>
__device__ __forceinline__ uint32_t clear_not_finite_rows(uint32_t rows) {
  const int lane = threadIdx.x % 32;
  uint32_t found = 0;
#pragma unroll
  for (int at = 0; at < 2 * 2 * panels(kDim); at++) {  // the quad has two rows of eight pieces a panel
    const uint32_t address = rows + at / 4 * panel_bytes(kBackwardKeys) +
                             (lane / 4 + at % 2 * 8) * kPanelRowBytes + (at / 2 % 2 * 4 + lane % 4) * 16;
    found |= uint32_t(clear_not_finite_piece<Half>(address)) << at % 2;
  }
  found |= __shfl_xor_sync(0xffffffffu, found, 1);
  return found | __shfl_xor_sync(0xffffffffu, found, 2);
}

// A wait for products below this line stays below half of the exponentials above it, the first kCount fragments of
// `prob`. The assembler would move it above all of them, and nothing would run beside the products; all of them below
// would cost more than it gains. It does not move the wait across a store, and this one, which never happens (31 bits are
// no negative number), needs their results. With a constant in place of `negative` it would see through.
template <int kCount, int N>
__device__ __forceinline__ void hold_wait(const FragmentC (&prob)[N], uint32_t shared, int negative) {
  uint32_t any = 0;
#pragma unroll
  for (int n = 0; n < kCount; n += 2) {
#pragma unroll
    for (int e = 0; e < 4; e++) any |= __float_as_uint(prob[n].reg[e]);
  }
  any &= 0x7fffffffu;  // a hidden P may be NaN of either sign
  asm volatile(
      "{\n\t.reg .pred never;\n\tsetp.lt.s32 never, %0, %2;\n\t@never st.shared.b32 [%1], %0;\n\t}" ::"r"(
          any),
      "r"(shared), "r"(negative)
      : "memory");
}

__device__ __forceinline__ void store_shared(uint32_t address, const FragmentC& x) {
  asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(address), "f"(x.reg[0]), "f"(x.reg[1]),
               "f"(x.reg[2]), "f"(x.reg[3])
               : "memory");
}

// Accumulators, packed to halves, as A of the products that follow.
template <class Half, int kSteps>
__device__ __forceinline__ void pack_all(FragmentA (&packed)[kSteps], const FragmentC (&x)[2 * kSteps]) {
#pragma unroll
  for (int k = 0; k < kSteps; k++) packed[k] = pack<Half>(x[2 * k], x[2 * k + 1]);
}

}  // namespace attn_ext::cuda::sm90
