#include "../sm80/forward_kernels.cuh"

ATTN_FORWARD_KERNEL(attn_fwd_sm80_bf16_d96, bf16, 96, kLean)
ATTN_FORWARD_KERNEL(attn_fwd_sm80_bf16_d96_full, bf16, 96, kFull)
