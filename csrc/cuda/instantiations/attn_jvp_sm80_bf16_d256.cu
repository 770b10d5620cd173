#include "../registry.h"
#include "../sm80/jvp.cuh"

namespace cuda = attn_ext::cuda;

extern "C" __global__ void __launch_bounds__(cuda::jvp_tile(256).threads(), cuda::jvp_tile(256).blocks)
    attn_jvp_sm80_bf16_d256(const __grid_constant__ cuda::JvpParams params) {
  cuda::Jvp<cuda::bf16, 256>::run(params);
}

ATTN_REGISTER_KERNEL(attn_jvp_sm80_bf16_d256)
