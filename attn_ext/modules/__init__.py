"""Modules built on attn_ext.attention."""

from .linear_attention import LinearAttention, linear_attention
from .linformer import LinformerAttention
from .mixed_attention import MixedAttention
from .multihead import MultiHeadAttention

__all__ = [
    "LinearAttention",
    "LinformerAttention",
    "MixedAttention",
    "MultiHeadAttention",
    "linear_attention",
]
