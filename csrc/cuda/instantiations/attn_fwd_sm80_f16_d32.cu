#include "../sm80/forward_kernels.cuh"

ATTN_FORWARD_KERNEL(attn_fwd_sm80_f16_d32, f16, 32, kLean)
ATTN_FORWARD_KERNEL(attn_fwd_sm80_f16_d32_full, f16, 32, kFull)
