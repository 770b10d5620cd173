// Chooses the instruction set once, at the first call, and owns the per-thread scratch memory.
#include <cstdlib>
#include <new>
#include <stdexcept>

#include "kernels.h"

namespace attn_ext {

extern const CpuKernels kDefaultKernels;
#if defined(__x86_64__)
extern const CpuKernels kAvx2Kernels, kAvx512Kernels;
const CpuKernels* amx_kernels();  // null where CPU, system or compiler has no tiles; expects AVX-512
#endif

namespace {

// Best first.
std::vector<const CpuKernels*> runnable() {
  std::vector<const CpuKernels*> found;
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    if (const CpuKernels* amx = amx_kernels()) found.push_back(amx);
    found.push_back(&kAvx512Kernels);
  }
  if (avx2) found.push_back(&kAvx2Kernels);  // every CPU with AVX2 and FMA also has F16C
#endif
  found.push_back(&kDefaultKernels);
  return found;
}

const CpuKernels* choose() {
  const auto found = runnable();
  const char* wanted = std::getenv("ATTN_EXT_CPU_ISA");
  if (wanted == nullptr || *wanted == '\0') return found.front();
  std::string names;
  for (const CpuKernels* kernels : found) {
    if (std::string(wanted) == kernels->name) return kernels;
    names += std::string(names.empty() ? "" : ", ") + kernels->name;
  }
  throw std::runtime_error("ATTN_EXT_CPU_ISA=" + std::string(wanted) +
                           " is not an instruction set this machine can run; it can run: " + names);
}

// Above this size a slot is given back after the call, so that one long sequence does not hold memory forever.
constexpr size_t kKeepBytes = size_t{4} << 20;
constexpr int kSlots = 19;

struct Scratch {
  void* data[kSlots] = {};
  size_t size[kSlots] = {};
  ~Scratch() {
    for (void* buffer : data) std::free(buffer);
  }
};

thread_local Scratch scratch;

}  // namespace

const CpuKernels& cpu_kernels() {
  static const CpuKernels* const chosen = choose();
  return *chosen;
}

std::string cpu_isa() { return cpu_kernels().name; }

std::vector<std::string> cpu_isas() {
  std::vector<std::string> names;
  for (const CpuKernels* kernels : runnable()) names.emplace_back(kernels->name);
  return names;
}

void* thread_scratch(int slot, size_t bytes) {
  if (scratch.size[slot] < bytes) {
    std::free(scratch.data[slot]);
    scratch.size[slot] = 0;
    const size_t rounded = (bytes + 4095) / 4096 * 4096;
    scratch.data[slot] = std::aligned_alloc(4096, rounded);
    if (scratch.data[slot] == nullptr) throw std::bad_alloc();
    scratch.size[slot] = rounded;
  }
  return scratch.data[slot];
}

void release_large_thread_scratch() {
  for (int slot = 0; slot < kSlots; slot++) {
    if (scratch.size[slot] <= kKeepBytes) continue;
    std::free(scratch.data[slot]);
    scratch.data[slot] = nullptr;
    scratch.size[slot] = 0;
  }
}

}  // namespace attn_ext
