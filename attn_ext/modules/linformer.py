"""Linformer: attention to a fixed number of mixtures of the keys."""

import math

import torch
from torch import Tensor, nn

from .. import arguments
from ..arguments import ArgumentValueError
from ..functional import attention
from .projections import check_heads, check_padding, check_sequence, merge_heads, split_heads


class LinformerAttention(nn.Module):
    r"""Self-attention whose keys and values are projected along the sequence, from L positions to k mixtures:

        head = softmax(Q (E K)^T / sqrt(D)) (F V)        E, F: (k, L), learned

    Wang et al., https://arxiv.org/abs/2006.04768, section 4. O(L k) work and memory instead of O(L^2). The
    mixtures take the fused kernel.

    What it gives up: a mixture has parts of all positions, so there is no causal form; and E and F belong to
    the positions that they were trained on. Shorter sequences use their first L columns.

    Args:
        embed_dim, num_heads: as in MultiHeadAttention.
        max_len: the longest sequence: columns of E and F.
        num_mixtures: k.
        sharing: what uses one projection, as in the paper: "heads" (E and F for all heads), "keys_values"
            (one for all heads, and E = F), None (E and F for each head). The same across layers: assign the
            Parameters of one layer to the others.
        dropout: of the attention weights, in training mode.
        bias: of the projections `in_proj` (query, key, value) and `out_proj`.

    Parameters `key_mixing` (H or 1, k, max_len) and `value_mixing`, None if E = F; they start normal with
    variance 1 / k, as in the paper's theorem 2.

    Raises:
        ValueError, TypeError: x longer than max_len; shapes or dtypes that do not fit.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        max_len: int,
        num_mixtures: int = 256,
        *,
        sharing: str | None = "heads",
        dropout: float = 0.0,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_heads(embed_dim, num_heads)
        for name, size in (("max_len", max_len), ("num_mixtures", num_mixtures)):
            if size < 1:
                raise ArgumentValueError(f"{name} must be at least 1, got {size}")
        if sharing not in ("heads", "keys_values", None):
            raise ArgumentValueError(f'sharing must be "heads", "keys_values" or None, got {sharing!r}')
        self.embed_dim, self.num_heads, self.max_len = embed_dim, num_heads, max_len
        self.num_mixtures, self.sharing = num_mixtures, sharing
        self.dropout = arguments.probability(dropout, "dropout")
        factory = {"device": device, "dtype": dtype}
        self.in_proj = nn.Linear(embed_dim, 3 * embed_dim, bias=bias, **factory)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias, **factory)
        heads = num_heads if sharing is None else 1
        self.key_mixing = nn.Parameter(torch.empty(heads, num_mixtures, max_len, **factory))
        self.value_mixing = None
        if sharing != "keys_values":
            self.value_mixing = nn.Parameter(torch.empty(heads, num_mixtures, max_len, **factory))
        for mixing in (self.key_mixing, self.value_mixing):
            if mixing is not None:
                nn.init.normal_(mixing, std=1 / math.sqrt(num_mixtures))

    def forward(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        """x (N, L, embed_dim) -> the same shape. key_padding_mask (N, L), bool: True = in no mixture."""
        check_sequence("x", x, self.embed_dim)
        check_padding(key_padding_mask, x)
        length = x.shape[1]
        if length > self.max_len:
            raise ArgumentValueError(f"x must have at most max_len={self.max_len} positions, got {length}")
        q, k, v = (split_heads(t, self.num_heads) for t in self.in_proj(x).chunk(3, -1))
        if key_padding_mask is not None:
            k, v = (t.masked_fill(key_padding_mask[:, None, :, None], 0) for t in (k, v))
        value_mixing = self.key_mixing if self.value_mixing is None else self.value_mixing
        k, v = self.key_mixing[..., :length] @ k, value_mixing[..., :length] @ v
        out = attention(q, k, v, dropout_p=self.dropout if self.training else 0.0)
        return self.out_proj(merge_heads(out))

    def extra_repr(self) -> str:
        return (
            f"{self.embed_dim}, {self.num_heads}, max_len={self.max_len}, num_mixtures={self.num_mixtures}, "
            f"sharing={self.sharing!r}"
        )
