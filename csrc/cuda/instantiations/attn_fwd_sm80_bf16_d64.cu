#include "../sm80/forward_kernels.cuh"

ATTN_FORWARD_KERNEL(attn_fwd_sm80_bf16_d64, bf16, 64, kLean)
ATTN_FORWARD_KERNEL(attn_fwd_sm80_bf16_d64_full, bf16, 64, kFull)
