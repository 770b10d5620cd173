#include "../sm80/decode.cuh"

ATTN_DECODE_KERNEL(attn_decode_sm80_bf16_d64, bf16, 64)
ATTN_DECODE_KERNEL(attn_decode_sm80_bf16_d128, bf16, 128)
ATTN_DECODE_KERNEL(attn_decode_sm80_bf16_d256, bf16, 256)
