"""Modules built on attn_ext.attention."""

from .linear_attention import LinearAttention, linear_attention
from .linformer import LinformerAttention
from .mixed_attention import MixedAttention
from .multihead import MultiHeadAttention
from .self_cross import CrossAttention, SelfAttention
from .transformer import (
    Transformer,
    TransformerDecoder,
    TransformerDecoderLayer,
    TransformerEncoder,
    TransformerEncoderLayer,
)

__all__ = [
    "CrossAttention",
    "LinearAttention",
    "LinformerAttention",
    "MixedAttention",
    "MultiHeadAttention",
    "SelfAttention",
    "Transformer",
    "TransformerDecoder",
    "TransformerDecoderLayer",
    "TransformerEncoder",
    "TransformerEncoderLayer",
    "linear_attention",
]
