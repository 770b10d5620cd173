#include "../sm80/forward_kernels.cuh"

ATTN_FORWARD_KERNEL(attn_fwd_sm80_bf16_d256, bf16, 256, kLean)
ATTN_FORWARD_KERNEL(attn_fwd_sm80_bf16_d256_compact, bf16, 256, kCompact)
ATTN_FORWARD_KERNEL(attn_fwd_sm80_bf16_d256_full, bf16, 256, kFull)
