// How the warps of a Hopper block wait for copies and for each other: mbarriers, rings of stages, named barriers, and
// the fences between ordinary and asynchronous accesses (PTX ISA, "mbarrier", "bar", "Async proxy").
#pragma once

#include <cstdint>

namespace attn_ext::cuda::sm90 {

// An mbarrier, 8 bytes of shared memory. It counts phases: one ends when the expected number of arrivals has come and
// all announced bytes have landed. Phase n has parity n % 2.
struct Barrier {
  static constexpr int kBytes = 8;
  uint32_t address;

  // By one thread, before fence_barrier_init() and a barrier of the block.
  __device__ __forceinline__ void init(int arrivals) const {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address), "r"(arrivals) : "memory");
  }

  // An arrival that also announces bytes, which copies to this barrier will bring.
  __device__ __forceinline__ void expect(int bytes) const {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address), "r"(bytes)
                 : "memory");
  }

  // An arrival of this thread if `condition`; as a predicate, since a branch would hold up the warp.
  __device__ __forceinline__ void arrive_if(bool condition) const {
    asm volatile(
        "{\n\t.reg .pred some;\n\tsetp.ne.b32 some, %1, 0;\n\t"
        "@some mbarrier.arrive.shared::cta.b64 _, [%0];\n\t}" ::"r"(address),
        "r"(int(condition))
        : "memory");
  }

  // Waits until the phase of this parity is over. A new barrier counts as if a phase of parity 1 were over.
  __device__ __forceinline__ void wait(uint32_t parity) const {
    asm volatile(
        "{\n\t.reg .pred over;\n\tagain:\n\tmbarrier.try_wait.parity.shared::cta.b64 over, [%0], %1;\n\t"
        "@!over bra again;\n\t}" ::"r"(address),
        "r"(parity)
        : "memory");
  }
};

// Makes initialised barriers known to copies.
__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// A pair of barriers for each stage of a buffer that the producer fills and the consumers empty, in turn.
template <int Stages>
struct StageBarriers {
  static constexpr int kBytes = 2 * Stages * Barrier::kBytes;
  uint32_t address;

  __device__ __forceinline__ Barrier full(int stage) const { return {address + Barrier::kBytes * stage}; }
  __device__ __forceinline__ Barrier empty(int stage) const {
    return {address + Barrier::kBytes * (Stages + stage)};
  }

  // `consumers`: arrivals that empty a stage. Filling one is a single arrival, expect().
  __device__ __forceinline__ void init(int consumers) const {
    for (int stage = 0; stage < Stages; stage++) {
      full(stage).init(1);
      empty(stage).init(consumers);
    }
  }
};

// Where in the ring a producer or consumer is. Consumers wait for full(stage) with `parity`, the producer for
// empty(stage) with `parity ^ 1`, which lets it pass on its first round.
template <int Stages>
struct RingPosition {
  int stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void advance() {
    if constexpr (Stages == 1) {
      parity ^= 1;
    } else if constexpr (Stages == 2) {  // without a comparison
      parity ^= stage;
      stage ^= 1;
    } else if (++stage == Stages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// Barrier `id` (1 to 15; 0 is __syncthreads) of `Threads` threads, whole warps.
template <int Threads>
__device__ __forceinline__ void named_barrier_sync(int id) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(Threads) : "memory");
}

// Counts as one who came, without waiting.
template <int Threads>
__device__ __forceinline__ void named_barrier_arrive(int id) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "n"(Threads) : "memory");
}

// Between this thread's ordinary accesses of shared memory and later accesses by wgmma or bulk copies.
__device__ __forceinline__ void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// The same of global memory.
__device__ __forceinline__ void fence_async_proxy_global() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

// Registers a thread of this warpgroup from here on. What the producer gives up, the consumers take.
template <int Registers>
__device__ __forceinline__ void give_up_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Registers));
}

template <int Registers>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Registers));
}

}  // namespace attn_ext::cuda::sm90
