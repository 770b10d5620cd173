"""What the attention variants share: checks of their input, and heads split off and put together again."""

import torch
from torch import Tensor

from .. import arguments
from ..arguments import ArgumentTypeError, ArgumentValueError


def check_heads(embed_dim: int, num_heads: int, parts: int = 1) -> None:
    """embed_dim must divide into ``parts`` times as many parts as there are heads."""
    if num_heads < 1 or embed_dim < 1 or embed_dim % (parts * num_heads):
        multiple = "num_heads" if parts == 1 else f"{parts} * num_heads"
        raise ArgumentValueError(
            f"embed_dim must be a multiple of {multiple}, both > 0, got {embed_dim} and {num_heads}"
        )


def check_sequence(name: str, x: Tensor, features: int) -> None:
    arguments.check_tensor(name, x)
    if x.dim() != 3 or x.shape[2] != features:
        raise ArgumentValueError(f"{name} must be (N, L, {features}), got {tuple(x.shape)}")


def check_padding(mask: Tensor | None, x: Tensor) -> None:
    if mask is None:
        return
    if mask.dtype != torch.bool:
        raise ArgumentTypeError(f"key_padding_mask must be boolean, True = padding, got {mask.dtype}")
    if mask.shape != x.shape[:2]:
        raise ArgumentValueError(
            f"key_padding_mask must be (N, L) = {tuple(x.shape[:2])}, got {tuple(mask.shape)}"
        )


def split_heads(x: Tensor, heads: int) -> Tensor:
    """(N, L, H * D) -> a view (N, H, L, D)."""
    return x.unflatten(2, (heads, -1)).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """(N, H, L, D) -> (N, L, H * D)."""
    return x.transpose(1, 2).flatten(2)
