#include "../sm80/forward_kernels.cuh"

ATTN_FORWARD_KERNEL(attn_fwd_sm80_f16_d64, f16, 64, kLean)
ATTN_FORWARD_KERNEL(attn_fwd_sm80_f16_d64_full, f16, 64, kFull)
