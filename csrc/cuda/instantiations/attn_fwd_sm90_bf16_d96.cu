#include "../sm90/forward_kernels.cuh"

ATTN_SM90_FORWARD_KERNEL(attn_fwd_sm90_bf16_d96, bf16, 96, kWide)
