#include "../sm90/forward_kernels.cuh"

ATTN_SM90_FORWARD_KERNEL(attn_fwd_sm90_f16_d64, f16, 64, kWide)
