#include "../sm80/forward_kernels.cuh"

ATTN_FORWARD_KERNEL(attn_fwd_sm80_f16_d128, f16, 128, kLean)
ATTN_FORWARD_KERNEL(attn_fwd_sm80_f16_d128_full, f16, 128, kFull)
