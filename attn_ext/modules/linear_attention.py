"""Linear attention: no softmax, cost proportional to the length."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from .. import arguments, reference
from ..arguments import ArgumentTypeError, ArgumentValueError
from .projections import check_heads, check_padding, check_sequence, merge_heads, split_heads

CHUNK = 128  # the work inside chunks grows with it, the memory for the sums between them falls


def elu_plus_one(x: Tensor) -> Tensor:
    """elu(x) + 1 without its cancellation: x + 1 above 0, exp(x) below, which elu would round to -1."""
    return torch.where(x > 0, x + 1, x.clamp_max(0).exp())


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    mask: Tensor | None = None,
    feature_map: Callable[[Tensor], Tensor] = elu_plus_one,
    chunk_size: int = CHUNK,
) -> Tensor:
    r"""Attention with the similarity phi(q) . phi(k) in the place of exp(q . k), phi(x) = elu(x) + 1 > 0:

        out_i = phi(q_i)^T S / (phi(q_i)^T z),   S = sum_j phi(k_j) v_j^T,   z = sum_j phi(k_j)

    Katharopoulos et al., https://arxiv.org/abs/2006.16236, equations 4 to 9. S (D x Dv) and z are sums over
    keys: O(N D Dv) work, where softmax needs O(N^2 D). Causal, S_i and z_i are sums over j <= i: chunks of
    positions see what stands before them through S, and each other through a small matrix.

    What it gives up: the similarity is a smooth function of few features, so it cannot pick one key out of
    many as the exponential does. In plain PyTorch: it is for comparison, and for long sequences.

    Args:
        q (B, H, Nq, D), k (B, H, Nk, D), v (B, H, Nk, Dv): floating, of one dtype.
        causal: query i sees keys j <= i; then Nq = Nk.
        mask: bool, broadcasts to (B, H, Nk): True = the key may be attended to.
        feature_map: phi, to numbers >= 0, of the same or another last size.
        chunk_size: of the causal form.

    Returns:
        (B, H, Nq, Dv) in q's dtype, computed in float32 at least. A query that sees no key gets 0.

    Raises:
        TypeError, ValueError: dtypes or shapes that do not fit, naming the argument.
    """
    for name, t in (("q", q), ("k", k), ("v", v)):
        arguments.check_tensor(name, t)
    sizes = [tuple(t.shape) for t in (q, k, v)]
    fits = q.dim() == k.dim() == v.dim() == 4 and q.shape[:2] == k.shape[:2] == v.shape[:2]
    if not fits or q.shape[3] != k.shape[3] or k.shape[2] != v.shape[2]:
        raise ArgumentValueError(
            "q, k and v must be (B, H, Nq, D), (B, H, Nk, D) and (B, H, Nk, Dv), got "
            f"{sizes[0]}, {sizes[1]} and {sizes[2]}"
        )
    if not q.dtype == k.dtype == v.dtype or not q.is_floating_point():
        raise ArgumentTypeError(
            f"q, k and v must have one floating dtype, got {q.dtype}, {k.dtype}, {v.dtype}"
        )
    if causal and q.shape[2] != k.shape[2]:
        raise ArgumentValueError(
            f"causal linear attention needs as many queries as keys, got {q.shape[2]} and {k.shape[2]}"
        )
    if chunk_size < 1:
        raise ArgumentValueError(f"chunk_size must be at least 1, got {chunk_size}")
    dtype = torch.promote_types(q.dtype, torch.float32)
    with reference.no_autocast(q):
        phi_q, phi_k = feature_map(q.to(dtype)), feature_map(k.to(dtype))
        if mask is not None:
            if mask.dtype != torch.bool:
                raise ArgumentTypeError(f"mask must be boolean, got {mask.dtype}")
            phi_k = torch.where(mask[..., None], phi_k, 0)
        # z is the sum that belongs to a further feature of v, which is 1.
        values = torch.cat([v.to(dtype), v.new_ones((*v.shape[:3], 1), dtype=dtype)], -1)
        sums = _causal_sums(phi_q, phi_k, values, chunk_size) if causal else phi_q @ (phi_k.mT @ values)
        total = sums[..., -1:]
        return (sums[..., :-1] / torch.where(total == 0, 1, total)).to(q.dtype)


def _causal_sums(phi_q: Tensor, phi_k: Tensor, values: Tensor, size: int) -> Tensor:
    """phi(q_i)^T sum over j <= i of phi(k_j) values_j^T, (B, H, N, Dv)."""
    n = phi_q.shape[2]
    missing = -n % size
    q, k, v = (
        nn.functional.pad(t, (0, 0, 0, missing)).unflatten(2, (-1, size)) for t in (phi_q, phi_k, values)
    )  # (B, H, chunks, size, ...)
    of_chunk = k.mT @ v
    before = torch.cat([torch.zeros_like(of_chunk[:, :, :1]), of_chunk[:, :, :-1].cumsum(2)], 2)
    inside = (q @ k.mT).tril()
    return (q @ before + inside @ v).flatten(2, 3)[:, :, :n]


class LinearAttention(nn.Module):
    """Self-attention by :func:`linear_attention`: x (N, L, embed_dim) -> the same shape.

    Args:
        embed_dim, num_heads: as in MultiHeadAttention.
        causal: position i sees positions j <= i.
        bias: of the projections `in_proj` (query, key, value) and `out_proj`.
        chunk_size: of the causal form.

    Raises:
        ValueError, TypeError: shapes or dtypes that do not fit, naming the argument.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        causal: bool = False,
        bias: bool = True,
        chunk_size: int = CHUNK,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_heads(embed_dim, num_heads)
        self.embed_dim, self.num_heads, self.causal, self.chunk_size = (
            embed_dim,
            num_heads,
            causal,
            chunk_size,
        )
        options = {"bias": bias, "device": device, "dtype": dtype}
        self.in_proj = nn.Linear(embed_dim, 3 * embed_dim, **options)
        self.out_proj = nn.Linear(embed_dim, embed_dim, **options)

    def forward(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        """key_padding_mask (N, L), bool: True = padding, as in torch.nn.MultiheadAttention."""
        check_sequence("x", x, self.embed_dim)
        check_padding(key_padding_mask, x)
        q, k, v = (split_heads(t, self.num_heads) for t in self.in_proj(x).chunk(3, -1))
        mask = None if key_padding_mask is None else ~key_padding_mask[:, None]
        out = linear_attention(q, k, v, causal=self.causal, mask=mask, chunk_size=self.chunk_size)
        return self.out_proj(merge_heads(out))

    def extra_repr(self) -> str:
        return f"{self.embed_dim}, {self.num_heads}, causal={self.causal}"
