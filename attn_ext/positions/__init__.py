"""Positions, in the two places where a transformer takes them.

Added to the inputs, once, before the first layer:

    SinusoidalPositionalEncoding, LearnedPositionalEncoding: x -> dropout(x + encoding)

Inside each attention, given as `MultiHeadAttention(position=...)` or to the transformer layers:

    RotaryEmbedding                               turns queries and keys
    ALiBi, T5RelativePositionBias, RelativePositionBias2D   add to the logits

`position` is any nn.Module with a method `attention_terms(q, k) -> (q, k, terms)`: it gets q (B, H, Nq, D)
and k (B, Hkv, Nk, D) as the attention would, returns what the attention shall take instead, and in the dict
`terms` options of :func:`attn_ext.attention` to go with them: `bias`, `alibi_slopes` or none. Query i stands
at position i + Nk - Nq, as it does for ALiBi and windows in :func:`attn_ext.attention`: of L queries and as
many keys at i, and of fewer queries, as when decoding, the last at the last key.
"""

from .biases import ALiBi, RelativePositionBias2D, T5RelativePositionBias, alibi_slopes
from .encodings import LearnedPositionalEncoding, SinusoidalPositionalEncoding
from .rotary import RotaryEmbedding

__all__ = [
    "ALiBi",
    "LearnedPositionalEncoding",
    "RelativePositionBias2D",
    "RotaryEmbedding",
    "SinusoidalPositionalEncoding",
    "T5RelativePositionBias",
    "alibi_slopes",
]
