#include "../sm80/forward_kernels.cuh"

ATTN_FORWARD_KERNEL(attn_fwd_sm80_f16_d96, f16, 96, kLean)
ATTN_FORWARD_KERNEL(attn_fwd_sm80_f16_d96_full, f16, 96, kFull)
