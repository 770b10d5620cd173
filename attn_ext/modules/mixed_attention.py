"""ConvBERT's mixed attention: some heads look everywhere, the others are convolutions."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import arguments
from ..arguments import ArgumentValueError
from ..functional import attention
from .projections import check_heads, check_padding, check_sequence, merge_heads, split_heads


class MixedAttention(nn.Module):
    r"""Self-attention heads beside span-based dynamic convolution, each giving half of the features:

        attention:    softmax(Q K^T / sqrt(D)) V
        convolution:  out_i = sum_j softmax(W_f (Q_i * K^s_i))_j (W_c x)_{i + j - (w - 1) / 2}

    K^s is a depthwise-separable convolution of x over w positions, so that the convolution's own weights, w
    for each position and head, depend on the span around it. The two halves are joined and projected.
    Jiang et al., ConvBERT, https://arxiv.org/abs/2008.02496, sections 3.2 and 3.3. Local patterns, which many
    heads of BERT learn, cost O(L w) there, and the attention has half as many features.

    Args:
        embed_dim: features of x, a multiple of 2 * num_heads.
        num_heads: H, of the attention and of the convolution; D = embed_dim / (2 H). (ConvBERT halves the
            heads of the BERT it starts from: its `num_attention_heads / head_ratio`.)
        kernel_size: w, odd.
        dropout: of the attention weights, in training mode.

    The parameters have ConvBERT's shapes and roles (query, key, value, depthwise, pointwise, kernel, conv),
    and `out_proj` is its output projection.

    Raises:
        ValueError, TypeError: shapes or dtypes that do not fit, naming the argument.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        kernel_size: int = 9,
        *,
        dropout: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_heads(embed_dim, num_heads, 2)
        if kernel_size < 1 or kernel_size % 2 == 0:
            raise ArgumentValueError(f"kernel_size must be odd and greater than 0, got {kernel_size}")
        self.embed_dim, self.num_heads, self.kernel_size = embed_dim, num_heads, kernel_size
        self.dropout = arguments.probability(dropout, "dropout")
        factory = {"device": device, "dtype": dtype}
        half = embed_dim // 2
        self.query, self.key, self.value = (nn.Linear(embed_dim, half, **factory) for _ in range(3))
        self.depthwise = nn.Conv1d(
            embed_dim,
            embed_dim,
            kernel_size,
            padding=kernel_size // 2,
            groups=embed_dim,
            bias=False,
            **factory,
        )
        self.pointwise = nn.Conv1d(embed_dim, half, 1, **factory)
        self.kernel = nn.Linear(half, num_heads * kernel_size, **factory)
        self.conv = nn.Linear(embed_dim, half, **factory)
        self.out_proj = nn.Linear(embed_dim, embed_dim, **factory)

    def forward(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        """x (N, L, embed_dim) -> the same shape.

        key_padding_mask (N, L), bool: True = padding: never attended to, and zero to the convolutions, as
        what lies beyond the ends.
        """
        check_sequence("x", x, self.embed_dim)
        check_padding(key_padding_mask, x)
        query = self.query(x)
        attended = self._attend(query, x, key_padding_mask)
        return self.out_proj(torch.cat([attended, self._convolve(query, x, key_padding_mask)], -1))

    def _attend(self, query: Tensor, x: Tensor, padding: Tensor | None) -> Tensor:
        q, k, v = (split_heads(t, self.num_heads) for t in (query, self.key(x), self.value(x)))
        mask = None if padding is None else ~padding[:, None, None]
        return merge_heads(attention(q, k, v, mask=mask, dropout_p=self.dropout if self.training else 0.0))

    def _convolve(self, query: Tensor, x: Tensor, padding: Tensor | None) -> Tensor:
        values = self.conv(x)
        if padding is not None:
            x, values = (t.masked_fill(padding[..., None], 0) for t in (x, values))
        span_key = self.pointwise(self.depthwise(x.mT)).mT  # (N, L, embed_dim / 2)
        kernels = self.kernel(query * span_key).unflatten(-1, (self.num_heads, self.kernel_size)).softmax(-1)
        reach = self.kernel_size // 2
        spans = F.pad(values, (0, 0, reach, reach)).unfold(1, self.kernel_size, 1)  # (N, L, embed_dim / 2, w)
        spans = spans.unflatten(2, (self.num_heads, -1))  # (N, L, H, D, w), a view
        return (spans @ kernels[..., None]).flatten(2)

    def extra_repr(self) -> str:
        return f"{self.embed_dim}, {self.num_heads}, kernel_size={self.kernel_size}"
