#include "../sm90/forward_kernels.cuh"

ATTN_SM90_FORWARD_KERNEL(attn_fwd_sm90_f16_d192, f16, 192, kWide)
