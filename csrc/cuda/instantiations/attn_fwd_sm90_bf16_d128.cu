#include "../sm90/forward_kernels.cuh"

ATTN_SM90_FORWARD_KERNEL(attn_fwd_sm90_bf16_d128, bf16, 128, kWide)
ATTN_SM90_FORWARD_KERNEL(attn_fwd_sm90_bf16_d128_banded, bf16, 128, kBanded)
