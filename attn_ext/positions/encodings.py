"""Encodings of absolute positions, added to the inputs of a transformer."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import arguments
from ..arguments import ArgumentValueError
from .common import at_least_float32, cos_sin, row_positions


class _Encoding(nn.Module):
    """x -> dropout(x + encoding(positions)); subclasses have `encoding`."""

    max_len: int | None = None  # None: any length

    def __init__(self, d_model: int, dropout: float, batch_first: bool) -> None:
        super().__init__()
        if d_model <= 0:
            raise ArgumentValueError(f"d_model must be greater than 0, got {d_model}")
        self.d_model = d_model
        self.batch_first = batch_first
        self.dropout = nn.Dropout(arguments.probability(dropout, "dropout"))

    def forward(self, x: Tensor, positions: int | Tensor = 0) -> Tensor:
        """x of the class's shapes -> the same shape and dtype.

        positions: that of the first row (when decoding: how many came before; an int, or a tensor without
        dimensions), or those of all rows, (L,) or (N, L).
        """
        arguments.check_tensor("x", x)
        layout = "(N, L, d_model)" if self.batch_first else "(L, N, d_model)"
        if x.dim() not in (2, 3) or x.shape[-1] != self.d_model:
            raise ArgumentValueError(
                f"x must be {layout} or unbatched (L, d_model), with d_model={self.d_model}, "
                f"got {tuple(x.shape)}"
            )
        batch_dim = 0 if self.batch_first else 1
        batch, length = (1, x.shape[0]) if x.dim() == 2 else (x.shape[batch_dim], x.shape[1 - batch_dim])
        if self.max_len is not None and not isinstance(positions, Tensor):
            self._check_range(positions, positions + length - 1)
        rows = self.encoding(row_positions(positions, batch, length, x.device), at_least_float32(x.dtype))
        if rows.dim() == 3 and x.dim() == 2:
            rows = rows.squeeze(0)
        elif x.dim() == 3 and not self.batch_first:
            rows = rows[:, None] if rows.dim() == 2 else rows.transpose(0, 1)
        return self.dropout((x + rows).to(x.dtype))


class SinusoidalPositionalEncoding(_Encoding):
    r"""Sines and cosines of wavelengths from 2 pi to base * 2 pi, for positions of any size.

        PE(pos, 2i) = sin(pos / base^(2i / d_model)),  PE(pos, 2i + 1) = cos(pos / base^(2i / d_model))
        output = dropout(x + PE)

    "Attention Is All You Need", section 3.5 (https://arxiv.org/abs/1706.03762). Nothing is stored: there is
    no longest length, no entry in the state_dict, and no table that `.half()` would round.

    Args:
        d_model: features of x; if it is odd, the last one is a sine.
        dropout: probability of dropping an element of the sum, in training mode.
        base: sets the longest wavelength.
        batch_first: x is (N, L, d_model) instead of (L, N, d_model), as in torch.nn; unbatched (L, d_model).

    x may have any floating dtype: sines are computed in float32 (float64 for float64), the sum is rounded
    once.

    Raises:
        ValueError, TypeError: shapes or positions that do not fit, naming the argument.
    """

    def __init__(
        self, d_model: int, dropout: float = 0.0, *, base: float = 10000.0, batch_first: bool = False
    ) -> None:
        super().__init__(d_model, dropout, batch_first)
        if not base > 0:
            raise ArgumentValueError(f"base must be greater than 0, got {base}")
        self.base = base

    def encoding(self, positions: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """PE (..., d_model) of positions (...), integers or not; dtype float32 or float64."""
        exponents = torch.arange(0, self.d_model, 2, dtype=torch.float64, device=positions.device)
        cos, sin = cos_sin(positions, self.base ** (-exponents / self.d_model), dtype)
        return torch.stack([sin, cos], -1).flatten(-2)[..., : self.d_model]

    def extra_repr(self) -> str:
        return f"{self.d_model}, base={self.base}, batch_first={self.batch_first}"


class LearnedPositionalEncoding(_Encoding):
    """A learned vector for each of `max_len` positions: output = dropout(x + weight[pos]).

    As in BERT (https://arxiv.org/abs/1810.04805) and GPT-2; `weight` (max_len, d_model) starts normal with
    standard deviation 0.02, as theirs do. Shapes and options as in :class:`SinusoidalPositionalEncoding`.

    Raises:
        ValueError: also for x longer than the table. Positions given as a tensor are checked on the CPU only:
            on a GPU it would have to be waited for (there torch stops with a device-side assertion).
    """

    def __init__(
        self,
        d_model: int,
        max_len: int,
        dropout: float = 0.0,
        *,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(d_model, dropout, batch_first)
        if max_len <= 0:
            raise ArgumentValueError(f"max_len must be greater than 0, got {max_len}")
        self.max_len = max_len
        self.weight = nn.Parameter(torch.empty(max_len, d_model, device=device, dtype=dtype))
        nn.init.normal_(self.weight, std=0.02)

    def encoding(self, positions: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """weight's rows (..., d_model) of integer positions (...)."""
        try:
            return F.embedding(positions, self.weight).to(dtype)
        except IndexError:  # raised on the CPU, in eager code
            self._check_range(int(positions.min()), int(positions.max()))
            raise

    def _check_range(self, first: int, last: int) -> None:
        if first < 0 or last >= self.max_len:
            raise ArgumentValueError(
                f"positions must lie in 0 ... {self.max_len - 1}: the table has max_len={self.max_len} rows; "
                f"these run from {first} to {last}"
            )

    def extra_repr(self) -> str:
        return f"{self.d_model}, max_len={self.max_len}, batch_first={self.batch_first}"
