#include "../sm90/forward_kernels.cuh"

ATTN_SM90_FORWARD_KERNEL(attn_fwd_sm90_f16_d128, f16, 128, kWide)
ATTN_SM90_FORWARD_KERNEL(attn_fwd_sm90_f16_d128_banded, f16, 128, kBanded)
