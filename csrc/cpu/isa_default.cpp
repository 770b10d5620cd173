// The build that runs on every CPU: 16-byte vectors (SSE2 on x86-64, NEON on AArch64). See kernels.inl for how one source becomes several builds.
#include "headers.h"
#define ATTN_ISA isa_default
#define ATTN_VECTOR_BYTES 16
namespace attn_ext {
constexpr int kPanelVectors = 2;  // vectors of columns in a panel, see matmul.h
}
#include "kernels.inl"

namespace attn_ext {
extern const CpuKernels kDefaultKernels;
const CpuKernels kDefaultKernels = {"default", isa_default::run_forward, isa_default::run_backward,
                                    isa_default::run_jvp};
}  // namespace attn_ext
