// What the Hopper backward kernels share: a block's memory and roles, and how rows that nobody may see leave a tile.
//
// Both kernels hold two tiles of operands of their own and walk over a stream of tiles of the two others:
//   dK, dV: K and V against Q and dO,    dQ: Q and dO against K and V.
// A producer thread starts the copies (TMA), two warpgroups of consumers multiply (wgmma), 64 rows of the own tiles each.
// The consumers meet only where a tile has hidden elements; else each goes at its own pace, and one's exponentials hide
// behind the other's products.
#pragma once

#include "../sm80/backward_logits.cuh"
#include "../sm80/backward_tile.cuh"
#include "backward_sizes.h"
#include "tensor_copy.cuh"
#include "wgmma.cuh"

namespace attn_ext::cuda::sm90 {

constexpr int kConsumerThreads = 128 * kBackwardConsumers;

// Addresses in a block's shared memory: two own tiles, stages of two streamed tiles each, `kRowBytes` bytes that come
// with each row of a stage, barriers.
template <int kDim, int kStreamRows, int kRowBytes>
struct BackwardShared {
  static constexpr int kOwnBytes = tile_bytes(kBackwardRows, kDim);
  static constexpr int kStreamBytes = tile_bytes(kStreamRows, kDim), kStageBytes = 2 * kStreamBytes;
  static constexpr int kTermBytes = kStreamRows * kRowBytes;
  uint32_t start;

  // `raw`: where dynamic shared memory starts.
  __device__ __forceinline__ explicit BackwardShared(const char* raw)
      : start((shared_address(raw) + kTileAlignment - 1) / kTileAlignment * kTileAlignment) {}

  __device__ __forceinline__ uint32_t own(int operand) const { return start + operand * kOwnBytes; }
  __device__ __forceinline__ uint32_t stream(int stage, int operand) const {
    return own(2) + stage * kStageBytes + operand * kStreamBytes;
  }
  __device__ __forceinline__ uint32_t terms(int stage) const {
    return stream(kBackwardStages, 0) + stage * kTermBytes;
  }
  __device__ __forceinline__ Barrier own_full() const { return {terms(kBackwardStages)}; }
  __device__ __forceinline__ StageBarriers<kBackwardStages> stages() const {
    return {terms(kBackwardStages) + Barrier::kBytes};
  }
};

// A block of a kernel with functions fetch(params, shared), for the one thread that starts copies, and
// gradients(params, shared, memory), for the consumers; `memory` is where the tiles are.
template <class Kernel>
__device__ __forceinline__ void run_backward(const BackwardParams& params) {
  extern __shared__ char raw[];
  const typename Kernel::Shared shared(raw);
  if (threadIdx.x == 0) {
    shared.own_full().init(1);
    shared.stages().init(kConsumerThreads / 32);  // each warp arrives once
    fence_barrier_init();
  }
  __syncthreads();  // the barriers are there for all
  if (threadIdx.x < 128) {
    give_up_registers<kBackwardProducerRegisters>();
    if (threadIdx.x == 0) Kernel::fetch(params, shared);
  } else {
    take_registers<kBackwardConsumerRegisters>();
    Kernel::gradients(params.given, shared, raw + (shared.start - shared_address(raw)));
  }
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

// Makes elements of a tile zero that are infinite or NaN, since a product with dS = 0 should be 0. By all consumers,
// `thread` of them. (Where such an element is visible, S has carried it on already.)
template <class Half, int kBytes>
__device__ __forceinline__ void clear_not_finite(uint32_t tile, int thread) {
  static_assert(kBytes % (16 * kConsumerThreads) == 0);
#pragma unroll
  for (int at = 0; at < kBytes; at += 16 * kConsumerThreads) {
    const uint32_t address = tile + at + thread * 16;
    uint32_t x[4], bad[4];
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(address));
#pragma unroll
    for (int i = 0; i < 4; i++) bad[i] = not_finite<Half>(x[i]);
    if ((bad[0] | bad[1] | bad[2] | bad[3]) == 0) continue;
#pragma unroll
    for (int i = 0; i < 4; i++) x[i] &= ~((bad[i] >> 15) * 0xffffu);
    asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(x[0]), "r"(x[1]), "r"(x[2]),
                 "r"(x[3]));
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

// A wait for products below this line stays below half of the exponentials above it. The assembler would move it above
// all of them, and nothing would run beside the products; all of them below would cost more than it gains. It does not
// move the wait across a store, and this one, which never happens (31 bits are no negative number), needs their results.
// With a constant in place of `negative` it would see through.
template <int N>
__device__ __forceinline__ void hold_wait(const FragmentC (&prob)[N], uint32_t shared, int negative) {
  uint32_t any = 0;
#pragma unroll
  for (int n = 0; n < N; n += 2) {
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

// Accumulators, packed to halves, as A of the products that follow.
template <class Half, int kSteps>
__device__ __forceinline__ void pack_all(FragmentA (&packed)[kSteps], const FragmentC (&x)[2 * kSteps]) {
#pragma unroll
  for (int k = 0; k < kSteps; k++) packed[k] = pack<Half>(x[2 * k], x[2 * k + 1]);
}

}  // namespace attn_ext::cuda::sm90
