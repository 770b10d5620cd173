"""Block masks: sparse attention patterns that kernels skip through, where a dense mask would be read.

    mask = masks.longformer(16384, 512, global_tokens=[0]) & masks.causal(16384)
    out = attn_ext.attention(q, k, v, block_mask=mask)

A mask is made once and serves many calls, layers and steps.
"""

from .block_mask import BlockCounts, BlockMask
from .patterns import (
    big_bird,
    causal,
    documents,
    longformer,
    prefix_lm,
    sliding_window,
    sparse_transformer_fixed,
    sparse_transformer_strided,
)

__all__ = [
    "BlockCounts",
    "BlockMask",
    "big_bird",
    "causal",
    "documents",
    "longformer",
    "prefix_lm",
    "sliding_window",
    "sparse_transformer_fixed",
    "sparse_transformer_strided",
]
