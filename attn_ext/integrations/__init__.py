"""Callers of other libraries, served by attn_ext."""
