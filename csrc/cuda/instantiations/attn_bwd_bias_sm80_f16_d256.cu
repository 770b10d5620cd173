#include "../registry.h"
#include "../sm80/backward_bias.cuh"

namespace cuda = attn_ext::cuda;

extern "C" __global__ void __launch_bounds__(cuda::kBiasThreads, cuda::kBiasBlocks)
    attn_bwd_bias_sm80_f16_d256(const __grid_constant__ cuda::BackwardParams params) {
  cuda::BackwardBias<cuda::f16, 256>::run(params);
}

ATTN_REGISTER_KERNEL(attn_bwd_bias_sm80_f16_d256)
