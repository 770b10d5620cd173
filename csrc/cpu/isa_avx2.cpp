// AVX2, FMA and F16C: x86-64 since 2013. See kernels.inl for how one source becomes several builds.
#if defined(__x86_64__)
#include "headers.h"
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif
#define ATTN_ISA isa_avx2
#define ATTN_VECTOR_BYTES 32
namespace attn_ext {
constexpr int kPanelVectors = 2;  // vectors of columns in a panel, see matmul.h
}
#include "kernels.inl"

namespace attn_ext {
extern const CpuKernels kAvx2Kernels;
const CpuKernels kAvx2Kernels = {"avx2", isa_avx2::run_forward, isa_avx2::run_backward, isa_avx2::run_jvp};
}  // namespace attn_ext
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif  // __x86_64__
