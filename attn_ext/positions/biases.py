"""Biases of the logits that depend on where query and key stand relative to each other."""

import math

import torch
from torch import Tensor, nn

from ..arguments import ArgumentValueError


def alibi_slopes(
    num_heads: int, *, device: torch.device | str | None = None, dtype: torch.dtype = torch.float32
) -> Tensor:
    """ALiBi's slopes (num_heads,) for any number of heads: logits get - slope_h * |distance|.

    For p heads, a power of two, they are the geometric sequence 2^(-8/p), 2^(-16/p), ..., 2^-8. For other
    numbers: those of the power of two below, then every second one of the next power of two, from the first.
    Press et al., https://arxiv.org/abs/2108.12409, section 3 and the authors' code.
    """
    if num_heads <= 0:
        raise ArgumentValueError(f"num_heads must be greater than 0, got {num_heads}")
    power = 1 << (num_heads.bit_length() - 1)
    h = torch.arange(num_heads, dtype=torch.float64, device=device)
    # the next power of two halves the step: its first, third, ... slope has the exponent 1/2, 3/2, ...
    exponents = torch.where(h < power, h + 1, h - power + 0.5)
    return (2 ** (-8 / power * exponents)).to(dtype)


class ALiBi(nn.Module):
    """Attention with linear biases: logits get - slope_h * |i + Nk - Nq - j|, in the kernel.

    See :func:`alibi_slopes`. With the causal mask this is the paper's bias; without one it is symmetric.
    No parameters; nothing of size Nq x Nk exists.
    """

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        alibi_slopes(num_heads)  # refuses what is no number of heads

    def attention_terms(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """For MultiHeadAttention."""
        _check_heads(self, q)
        return q, k, {"alibi_slopes": alibi_slopes(self.num_heads, device=q.device)}

    def extra_repr(self) -> str:
        return f"{self.num_heads}"


class T5RelativePositionBias(nn.Module):
    r"""T5's learned bias: one number for each head and bucket of distances.

        bias[0, h, i, j] = weight[bucket(j - (i + Nk - Nq)), h]

    Raffel et al., https://arxiv.org/abs/1910.10683, section 2.1. With n buckets for a direction, distances 0
    ... n/2 - 1 have one each; larger ones share the others on a logarithmic scale up to max_distance, and all
    beyond it the last. bidirectional: half of num_buckets for keys after the query, half for those up to it.
    Otherwise, for causal attention, keys after the query count as distance 0.

    Args:
        num_heads: H.
        num_buckets: rows of the table; even if bidirectional.
        max_distance: where the last bucket begins.
        bidirectional: keys stand on both sides (an encoder).

    The parameter `relative_attention_bias.weight` (num_buckets, H) has T5's name; it starts normal with
    standard deviation 0.02. (T5 itself does not scale its logits by 1 / sqrt(head_dim); its layers share one
    such bias.) One bias (1, H, Nq, Nk) serves the whole batch, and its gradient is summed over the batch in
    the kernel.
    """

    def __init__(
        self,
        num_heads: int,
        num_buckets: int = 32,
        max_distance: int = 128,
        bidirectional: bool = True,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        directions = 2 if bidirectional else 1
        if num_buckets < 2 * directions or num_buckets % directions:
            raise ArgumentValueError(
                f"num_buckets must be {'even and at least 4' if bidirectional else 'at least 2'}, "
                f"got {num_buckets}"
            )
        if max_distance <= num_buckets // directions // 2:
            raise ArgumentValueError(
                f"max_distance must be greater than the {num_buckets // directions // 2} distances with a "
                f"bucket of their own, got {max_distance}"
            )
        self.num_heads = num_heads
        self.num_buckets = num_buckets
        self.max_distance = max_distance
        self.bidirectional = bidirectional
        self.relative_attention_bias = nn.Embedding(num_buckets, num_heads, device=device, dtype=dtype)
        nn.init.normal_(self.relative_attention_bias.weight, std=0.02)

    def forward(self, num_queries: int, num_keys: int) -> Tensor:
        """The bias (1, H, Nq, Nk)."""
        table = self.relative_attention_bias.weight
        # Each distance is looked up once: values[h, i - j + Nk - 1], seen through a window that moves on with
        # i and is read backwards in j. So the gradient sums along diagonals, without an index for each pair.
        first = num_queries - 1
        distances = first - torch.arange(max(first + num_keys, num_keys), device=table.device)
        values = table.t()[:, self._bucket(distances)]  # (H, Nq + Nk - 1)
        return values.unfold(1, num_keys, 1)[None, :, :num_queries].flip(-1)

    def attention_terms(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """For MultiHeadAttention."""
        _check_heads(self, q)
        return q, k, {"bias": self(q.shape[2], k.shape[2])}

    def _bucket(self, distance: Tensor) -> Tensor:
        """Buckets of key position - query position."""
        count = self.num_buckets
        offset = 0
        if self.bidirectional:
            count //= 2
            offset = (distance > 0) * count
            distance = distance.abs()
        else:
            distance = (-distance).clamp_min(0)
        exact = count // 2
        # float32, as in T5's code: a bucket's border may fall on an integer
        ratio = torch.log(distance.clamp_min(1).float() / exact) / math.log(self.max_distance / exact)
        shared = (exact + (ratio * (count - exact)).long()).clamp_max(count - 1)
        return offset + torch.where(distance < exact, distance, shared)

    def extra_repr(self) -> str:
        return (
            f"{self.num_heads}, num_buckets={self.num_buckets}, max_distance={self.max_distance}, "
            f"bidirectional={self.bidirectional}"
        )


class RelativePositionBias2D(nn.Module):
    r"""Swin's learned bias for a window of height x width tokens, in rows: one for each head and offset.

        bias[0, h, (y1, x1), (y2, x2)] = table[(y1 - y2 + height - 1) (2 width - 1) + x1 - x2 + width - 1, h]

    Liu et al., https://arxiv.org/abs/2103.14030, section 3.2, equation 4.

    Args:
        num_heads: H.
        window_size: (height, width); queries and keys are its height * width tokens.

    The parameter `relative_position_bias_table` ((2 height - 1) (2 width - 1), H) has Swin's name and start,
    a normal distribution with standard deviation 0.02, truncated.
    """

    def __init__(
        self,
        num_heads: int,
        window_size: tuple[int, int],
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        height, width = window_size
        if height <= 0 or width <= 0:
            raise ArgumentValueError(f"window_size must be (height, width), both > 0, got {window_size}")
        self.num_heads = num_heads
        self.window_size = (height, width)
        offsets = (2 * height - 1) * (2 * width - 1)
        self.relative_position_bias_table = nn.Parameter(
            torch.empty(offsets, num_heads, device=device, dtype=dtype)
        )
        nn.init.trunc_normal_(self.relative_position_bias_table, std=0.02)

    def forward(self) -> Tensor:
        """The bias (1, H, height * width, height * width)."""
        height, width = self.window_size
        table = self.relative_position_bias_table.unflatten(0, (2 * height - 1, 2 * width - 1))
        # windows (y1, x1, H, height - 1 - y2, width - 1 - x2): offsets grow with y1 and fall with y2
        bias = table.unfold(0, height, 1).unfold(1, width, 1).flip(-2, -1).permute(2, 0, 1, 3, 4)
        return bias.reshape(1, self.num_heads, height * width, height * width)

    def attention_terms(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """For MultiHeadAttention."""
        _check_heads(self, q)
        tokens = self.window_size[0] * self.window_size[1]
        if not q.shape[2] == k.shape[2] == tokens:
            raise ArgumentValueError(
                f"query and key must hold the {tokens} tokens of window_size={self.window_size}, "
                f"got {q.shape[2]} and {k.shape[2]}"
            )
        return q, k, {"bias": self()}

    def extra_repr(self) -> str:
        return f"{self.num_heads}, window_size={self.window_size}"


def _check_heads(position: nn.Module, q: Tensor) -> None:
    if q.shape[1] != position.num_heads:
        raise ArgumentValueError(
            f"{type(position).__name__} has num_heads={position.num_heads}, the attention {q.shape[1]}"
        )
