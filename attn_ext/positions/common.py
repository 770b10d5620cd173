"""What the position modules share: which position each row has, and angles that are exact far out."""

import math
import numbers

import torch
from torch import Tensor

from ..arguments import ArgumentTypeError, ArgumentValueError


def row_positions(positions: int | Tensor, batch: int, length: int, device: torch.device) -> Tensor:
    """Positions (length,) or (batch, length); one number is that of the first row, the others follow it."""
    if isinstance(positions, Tensor):
        if positions.dtype == torch.bool or positions.is_complex():
            raise ArgumentTypeError(f"positions must be an int or a tensor of numbers, got {positions.dtype}")
        if positions.dim() == 0:
            return positions.to(device) + torch.arange(length, device=device)
        if tuple(positions.shape) not in ((length,), (batch, length)):
            raise ArgumentValueError(
                f"positions must have shape (length,) = ({length},) or (batch, length) = ({batch}, {length}),"
                f" got {tuple(positions.shape)}"
            )
        return positions.to(device)
    if isinstance(positions, bool) or not isinstance(positions, (numbers.Integral, torch.SymInt)):
        raise ArgumentTypeError(f"positions must be an int or a tensor, got {positions!r}")
    return torch.arange(positions, positions + length, device=device)


def cos_sin(positions: Tensor, frequencies: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin of position * frequency, (..., N, F), in `dtype`, float32 or float64.

    positions (..., N), frequencies (F,) in float64: the product is formed in float64 and brought into
    [0, 2 pi) before it is rounded. In float32 the angle at position 100,000 would be off by up to 0.004, and
    half types cannot even count the positions (bfloat16: to 256).
    """
    angles = positions[..., None] * frequencies
    if dtype != torch.float64:
        angles = torch.remainder(angles, 2 * math.pi).to(dtype)
    return angles.cos(), angles.sin()


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
