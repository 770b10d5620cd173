#include "../sm80/forward_kernels.cuh"

ATTN_FORWARD_KERNEL(attn_fwd_sm80_bf16_d128, bf16, 128, kLean)
ATTN_FORWARD_KERNEL(attn_fwd_sm80_bf16_d128_full, bf16, 128, kFull)
