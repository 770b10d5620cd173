// cp.async: global to shared memory without passing through registers (PTX ISA, "cp.async"). Copies are collected in
// groups; only after wait_for_copies and a barrier may another thread read what was copied.
#pragma once

#include <cstdint>

namespace attn_ext::cuda {

// 16 bytes, both addresses multiples of 16.
__device__ __forceinline__ void copy_async_16(uint32_t shared, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(global));
}

// The first `bytes` (0 to 16) are copied, the rest of the 16 becomes zero. With 0 nothing is read, but the address must
// still be one of the tensor's.
__device__ __forceinline__ void copy_async_16(uint32_t shared, const void* global, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(bytes));
}

// 16 bytes if `condition` > 0. A branch in C++ might stay one, and no instruction moves across it.
__device__ __forceinline__ void copy_async_16_if(int condition, uint32_t shared, const void* global) {
  asm volatile(
      "{ .reg .pred %%some; setp.gt.s32 %%some, %2, 0; @%%some cp.async.cg.shared.global [%0], [%1], 16; }" ::
          "r"(shared),
      "l"(global), "r"(condition));
}

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;"); }

// Waits until at most `Pending` of this thread's latest groups are still under way.
template <int Pending>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

}  // namespace attn_ext::cuda
