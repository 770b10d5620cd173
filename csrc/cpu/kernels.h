// What the CPU kernels offer to the rest of the library, and the choice between their builds.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "../attention_params.h"

namespace attn_ext {

// How kernels get threads without knowing who provides them (torch's pool, or a plain loop in the C++ test):
// run(n, body, context) calls body(context, 0..n-1), possibly at the same time.
struct Threads {
  int64_t count = 1;
  void (*run)(int64_t n, void (*body)(void* context, int64_t worker), void* context) = nullptr;
};

// One set of kernels per instruction set, all compiled from the same source (isa_*.cpp).
struct CpuKernels {
  const char* name;
  void (*forward)(const AttentionParams&, const ForwardOutput&, const Threads&);
  void (*backward)(const AttentionParams&, const BackwardIO&, const Threads&);
  void (*jvp)(const AttentionParams&, const JvpIO&, const Threads&);
};

const CpuKernels& cpu_kernels();      // the best this machine runs, or what ATTN_EXT_CPU_ISA names
std::string cpu_isa();                // its name: "default", "avx2", "avx512" or "amx"
std::vector<std::string> cpu_isas();  // every name this machine can run

// Scratch memory of the calling thread: 64-byte aligned, kept from call to call, never shrunk below what small
// problems need. A slot is one buffer; asking again for the same slot may move it.
void* thread_scratch(int slot, size_t bytes);
void release_large_thread_scratch();

}  // namespace attn_ext
