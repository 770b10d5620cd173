#include "../sm80/decode.cuh"

ATTN_DECODE_KERNEL(attn_decode_sm80_f16_d64, f16, 64)
ATTN_DECODE_KERNEL(attn_decode_sm80_f16_d128, f16, 128)
ATTN_DECODE_KERNEL(attn_decode_sm80_f16_d256, f16, 256)
