// AVX-512 F, BW, DQ, VL: servers since 2017. See kernels.inl for how one source becomes several builds.
#if defined(__x86_64__)
#include "headers.h"
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"))), \
                             apply_to = function)
#else
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // false alarms inside GCC's own intrinsics
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
#endif
#define ATTN_ISA isa_avx512
#define ATTN_VECTOR_BYTES 64
namespace attn_ext {
constexpr int kPanelVectors = 4;  // vectors of columns in a panel, see matmul.h
}
#include "kernels.inl"

namespace attn_ext {
extern const CpuKernels kAvx512Kernels;
const CpuKernels kAvx512Kernels = {"avx512", isa_avx512::run_forward, isa_avx512::run_backward,
                                   isa_avx512::run_jvp};
}  // namespace attn_ext
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif  // __x86_64__
