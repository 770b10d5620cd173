"""SelfAttention and CrossAttention: MultiHeadAttention with the inputs that each of them has."""

from torch import Tensor

from ..masks import BlockMask
from .multihead import MultiHeadAttention


class SelfAttention(MultiHeadAttention):
    """Every position of a sequence attends to the positions of the same sequence: x -> output.

    :class:`MultiHeadAttention` with query = key = value = x; its parameters and state_dict.

    Args:
        embed_dim, num_heads, dropout, bias: as in MultiHeadAttention.
        causal: position i sees positions j <= i only, together with whatever masks are given.
        options: further keyword arguments of MultiHeadAttention (batch_first, qk_norm, position, ...).

    Example::

        >>> layer = SelfAttention(512, 8, causal=True, batch_first=True)
        >>> layer(torch.randn(2, 10, 512)).shape
        torch.Size([2, 10, 512])
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        *,
        causal: bool = False,
        window: tuple[int | None, int | None] | None = None,
        **options,
    ) -> None:
        super().__init__(embed_dim, num_heads, dropout, bias, window=window, **options)
        if causal:  # the diagonal as a window's right side, which unlike is_causal holds beside masks too
            self.window = (None if window is None else window[0], 0)

    def forward(
        self,
        x: Tensor,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        *,
        attn_bias: Tensor | None = None,
        block_mask: BlockMask | None = None,
        need_weights: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """x (N, L, embed_dim) if batch_first, else (L, N, embed_dim), or (L, embed_dim) -> the same shape.

        With need_weights a pair: also the weights of each head, (N, H, L, L). True in a boolean mask means
        may NOT be attended to; masks, attn_bias, block_mask and errors are those of MultiHeadAttention.
        """
        out, weights = super().forward(
            x, x, x, key_padding_mask, need_weights, attn_mask, False, attn_bias=attn_bias,
            block_mask=block_mask,
        )  # fmt: skip
        return (out, weights) if need_weights else out


class CrossAttention(MultiHeadAttention):
    """Every position of x attends to the positions of another sequence, context: x, context -> output.

    :class:`MultiHeadAttention` with query = x, key = value = context; its parameters and state_dict.

    Args:
        embed_dim, num_heads, dropout, bias: as in MultiHeadAttention.
        context_dim: features of context, by default embed_dim.
        options: further keyword arguments of MultiHeadAttention (batch_first, qk_norm, ...).

    Example::

        >>> layer = CrossAttention(512, 8, context_dim=768, batch_first=True)
        >>> layer(torch.randn(2, 10, 512), torch.randn(2, 77, 768)).shape
        torch.Size([2, 10, 512])
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        *,
        context_dim: int | None = None,
        **options,
    ) -> None:
        if context_dim is not None:
            options.update(kdim=context_dim, vdim=context_dim)
        super().__init__(embed_dim, num_heads, dropout, bias, **options)

    def forward(
        self,
        x: Tensor,
        context: Tensor,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        *,
        attn_bias: Tensor | None = None,
        block_mask: BlockMask | None = None,
        need_weights: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """x (N, L, embed_dim), context (N, S, context_dim) if batch_first, else (L, N, ...), (S, N, ...).

        Unbatched inputs lack N. The output has the shape of x; with need_weights a pair: also the weights of
        each head, (N, H, L, S). key_padding_mask (N, S): True = this position of context is padding.
        """
        out, weights = super().forward(
            x, context, context, key_padding_mask, need_weights, attn_mask, False, attn_bias=attn_bias,
            block_mask=block_mask,
        )  # fmt: skip
        return (out, weights) if need_weights else out
