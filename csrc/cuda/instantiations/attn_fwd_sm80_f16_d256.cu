#include "../sm80/forward_kernels.cuh"

ATTN_FORWARD_KERNEL(attn_fwd_sm80_f16_d256, f16, 256, kLean)
ATTN_FORWARD_KERNEL(attn_fwd_sm80_f16_d256_compact, f16, 256, kCompact)
ATTN_FORWARD_KERNEL(attn_fwd_sm80_f16_d256_full, f16, 256, kFull)
