#include "../sm80/forward_kernels.cuh"

ATTN_FORWARD_KERNEL(attn_fwd_sm80_f16_d192, f16, 192, kLean)
ATTN_FORWARD_KERNEL(attn_fwd_sm80_f16_d192_compact, f16, 192, kCompact)
ATTN_FORWARD_KERNEL(attn_fwd_sm80_f16_d192_full, f16, 192, kFull)
