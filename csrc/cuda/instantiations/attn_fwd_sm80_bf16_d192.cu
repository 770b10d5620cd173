#include "../sm80/forward_kernels.cuh"

ATTN_FORWARD_KERNEL(attn_fwd_sm80_bf16_d192, bf16, 192, kLean)
ATTN_FORWARD_KERNEL(attn_fwd_sm80_bf16_d192_compact, bf16, 192, kCompact)
ATTN_FORWARD_KERNEL(attn_fwd_sm80_bf16_d192_full, bf16, 192, kFull)
