"""Modules built on attn_ext.attention."""

from .multihead import MultiHeadAttention

__all__ = ["MultiHeadAttention"]
