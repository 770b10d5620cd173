// AMX tiles for half types, with AVX-512 and its BF16 conversions: servers since 2023 (Sapphire Rapids). What tiles do
// not help or cannot do is left to the AVX-512 build. See kernels.inl for how one source becomes several builds.
#if defined(__x86_64__)
#include "headers.h"

// The oldest compilers that know the instructions, and the system call that permits them.
#if defined(__linux__) && (defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11)
#define ATTN_AMX
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace attn_ext {
namespace {

// Whether CPU and operating system have tiles, and let this process use them: Linux wants to be asked, since tiles
// add 8 KiB to a thread's state.
bool amx_runs() {
  constexpr unsigned kAmxBf16 = 1u << 22, kAmxTile = 1u << 24;  // leaf 7.0, edx
  constexpr unsigned kAvx512Bf16 = 1u << 5;                     // leaf 7.1, eax
  constexpr long kRequestPermission = 0x1023, kTileData = 18;   // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & kAmxBf16) == 0 || (d & kAmxTile) == 0) return false;
  if (!__get_cpuid_count(7, 1, &a, &b, &c, &d) || (a & kAvx512Bf16) == 0) return false;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

}  // namespace
}  // namespace attn_ext

#if defined(__clang__)
#pragma clang attribute push(                                                                      \
    __attribute__((                                                                                \
        target("amx-tile,amx-bf16,avx512bf16,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"))), \
    apply_to = function)
#else
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // false alarms inside GCC's own intrinsics
#pragma GCC target("amx-tile,amx-bf16,avx512bf16,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
#endif
#define ATTN_ISA isa_amx
#define ATTN_VECTOR_BYTES 64
namespace attn_ext {
constexpr int kPanelVectors = 4;  // vectors of columns in a panel, see matmul.h
}
#include "kernels.inl"

namespace attn_ext {

extern const CpuKernels kAvx512Kernels;

namespace isa_amx {
namespace {

// How many parts of bfloat16 make an element; 0 where tiles are not used. A scale that is huge would lift what
// tiles flush to 0. A small problem fills tiles with zeros and packs more than it multiplies: up to these sizes the
// AVX-512 build was measured to be the faster one, up to twice. Forward and backward ask the same, since a score must
// be the same in both.
int tile_parts(const AttentionParams& p) {
  const int parts = p.q.dtype == DType::kBFloat16 ? 1 : p.q.dtype == DType::kFloat16 ? 2 : 0;
  const bool small = max(p.len_q, p.len_k) <= (parts == 1 ? 24 : 32) || (parts == 2 && p.len_q <= 16);
  if (p.len_q <= kFewQueries || small || !(p.scale < kTileLimit && p.scale > -kTileLimit)) return 0;
  return parts;
}

void run_tiles_forward(const AttentionParams& p, const ForwardOutput& o, const Threads& threads) {
  const int parts = tile_parts(p);
  if (parts == 1 && forward<float, AmxForwardProducts<1>>(p, o, threads)) return;
  if (parts == 2 && forward<float, AmxForwardProducts<2>>(p, o, threads)) return;
  kAvx512Kernels.forward(p, o, threads);
}

void run_tiles_backward(const AttentionParams& p, const BackwardIO& io, const Threads& threads) {
  const int parts = tile_parts(p);
  if (parts == 1 && backward<float, AmxGradProducts<1>>(p, io, threads)) return;
  if (parts == 2 && backward<float, AmxGradProducts<2>>(p, io, threads)) return;
  kAvx512Kernels.backward(p, io, threads);
}

void run_jvp(const AttentionParams& p, const JvpIO& io, const Threads& threads) {
  kAvx512Kernels.jvp(p, io, threads);
}

}  // namespace
}  // namespace isa_amx

const CpuKernels* amx_kernels() {
  static const CpuKernels kernels = {"amx", isa_amx::run_tiles_forward, isa_amx::run_tiles_backward,
                                     isa_amx::run_jvp};
  return amx_runs() ? &kernels : nullptr;
}

}  // namespace attn_ext
#if defined(__clang__)
#pragma clang attribute pop
#endif

#else
namespace attn_ext {
const CpuKernels* amx_kernels() { return nullptr; }
}  // namespace attn_ext
#endif  // ATTN_AMX
#endif  // __x86_64__
