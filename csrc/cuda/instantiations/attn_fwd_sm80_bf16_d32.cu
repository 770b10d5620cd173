#include "../sm80/forward_kernels.cuh"

ATTN_FORWARD_KERNEL(attn_fwd_sm80_bf16_d32, bf16, 32, kLean)
ATTN_FORWARD_KERNEL(attn_fwd_sm80_bf16_d32_full, bf16, 32, kFull)
