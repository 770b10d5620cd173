#include "../registry.h"
#include "../sm80/jvp.cuh"

namespace cuda = attn_ext::cuda;

extern "C" __global__ void __launch_bounds__(cuda::jvp_tile(192).threads(), cuda::jvp_tile(192).blocks)
    attn_jvp_sm80_f16_d192(const __grid_constant__ cuda::JvpParams params) {
  cuda::Jvp<cuda::f16, 192>::run(params);
}

ATTN_REGISTER_KERNEL(attn_jvp_sm80_f16_d192)
