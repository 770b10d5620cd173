"""Block masks: sparse attention patterns that kernels skip through, where a dense mask would be read.

mask = masks.longformer(16384, window=512, global_tokens=[0]) & masks.causal(16384)
out = attn_ext.attention(q, k, v, block_mask=mask)
"""

from .block_mask import BlockCounts, BlockMask

__all__ = [
    "BlockCounts",
    "BlockMask",
]
