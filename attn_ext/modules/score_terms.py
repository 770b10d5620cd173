"""The masks of MultiHeadAttention as the `mask` and `bias` arguments of `attention`.

A module call can carry four terms (key_padding_mask, attn_mask, attn_bias and the bias of its position
module), `attention` takes two and reads each through its own strides. So every term keeps its own size, as a
4-D view that broadcasts to (N, H, L, S): a padding mask stays (N, 1, 1, S) beside an (L, S) mask, and no
(N, H, L, S) tensor is built from them.
"""

import math

import torch
from torch import Tensor

from ..arguments import ArgumentTypeError, ArgumentValueError


def score_terms(
    key_padding_mask: Tensor | None,
    attn_mask: Tensor | None,
    biases: dict[str, Tensor | None],
    sizes: tuple[int, int, int, int],
    batched: bool,
    dtype: torch.dtype,
) -> tuple[Tensor | None, Tensor | None]:
    """Check the terms and merge them into `(mask, bias)` for `attention`.

    key_padding_mask (N, S) or unbatched (S,), attn_mask (L, S) or (N*H, L, S): bool with True = masked out,
    or floating and added to the logits. biases, by name: floating, broadcastable to (N, H, L, S). `sizes` is
    (N, H, L, S), `dtype` that of the projected query. In the result a bool mask has True = may attend.

    Only when more than two are given are some merged: of three, the pair whose merged size is smallest.
    """
    batch, heads, queries, keys = sizes
    terms = []
    if key_padding_mask is not None:
        allowed = [(batch, keys)] if batched else [(keys,)]
        _check_mask("key_padding_mask", key_padding_mask, allowed, "(N, S)" if batched else "(S,)")
        terms.append(_as_term("key_padding_mask", key_padding_mask, dtype).reshape(batch, 1, 1, keys))
    if attn_mask is not None:
        allowed = [(queries, keys), (batch * heads, queries, keys)]
        _check_mask("attn_mask", attn_mask, allowed, "(L, S) or (N * num_heads, L, S)")
        term = _as_term("attn_mask", attn_mask, dtype)
        # the leading dimension of a 3-D mask is ordered b * num_heads + h
        terms.append(term[None, None] if term.dim() == 2 else term.unflatten(0, (batch, heads)))
    added = [_as_bias_term(name, bias, sizes, dtype) for name, bias in biases.items() if bias is not None]
    if len(terms) == len(added) == 2:
        added = [_merge(*added)]
    terms += added
    if len(terms) == 3:
        terms = _merge_smallest_pair(*terms)
    if len(terms) == 2:
        first, second = terms
        if first.dtype == second.dtype == torch.bool:  # a padding mask (N, 1, 1, S) and an attention mask
            return second, _merge(first, first.new_zeros(1, dtype=dtype))
        return (second, first) if second.dtype == torch.bool else (first, second)
    mask = terms[0] if terms else None
    return (None, mask) if mask is not None and mask.is_floating_point() else (mask, None)


def _check_mask(name: str, mask: Tensor, allowed: list[tuple[int, ...]], form: str) -> None:
    if not isinstance(mask, Tensor):
        raise ArgumentTypeError(f"{name} must be a torch.Tensor or None, got {type(mask).__name__}")
    if tuple(mask.shape) not in allowed:
        sizes = " or ".join(str(a) for a in allowed)
        raise ArgumentValueError(f"{name} must have shape {form} = {sizes}, got {tuple(mask.shape)}")


def _as_term(name: str, mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A bool mask inverted to True = may attend; a floating one in a dtype that goes with `dtype`."""
    if mask.dtype == torch.bool:
        return ~mask
    if not mask.is_floating_point():
        raise ArgumentTypeError(
            f"{name} must be bool (True = masked out) or floating (added to the logits), got {mask.dtype}: "
            f"convert a 0/1 mask with {name}.bool()"
        )
    wide = torch.promote_types(dtype, torch.float32)
    if torch.promote_types(mask.dtype, wide) != wide:
        raise ArgumentTypeError(
            f"{name} is {mask.dtype}, wider than {wide}, in which logits of a {dtype} query are kept: "
            f"convert it with {name}.to({wide})"
        )
    return mask if mask.dtype == dtype else mask.to(wide)


def _as_bias_term(name: str, bias: Tensor, sizes: tuple[int, int, int, int], dtype: torch.dtype) -> Tensor:
    if not isinstance(bias, Tensor) or not bias.is_floating_point():
        kind = bias.dtype if isinstance(bias, Tensor) else type(bias).__name__
        raise ArgumentTypeError(
            f"{name} must be a floating-point tensor, got {kind}; a bool mask goes to attn_mask"
        )
    shape = tuple(bias.shape)
    if len(shape) > 4 or any(b not in (1, f) for b, f in zip(reversed(shape), reversed(sizes), strict=False)):
        raise ArgumentValueError(
            f"{name} must broadcast to (N, num_heads, L, S) = {tuple(sizes)}, got {shape}"
        )
    term = _as_term(name, bias, dtype)
    return term.reshape((1,) * (4 - term.dim()) + shape)


def _merge_smallest_pair(a: Tensor, b: Tensor, c: Tensor) -> list[Tensor]:
    # comparisons and no min or sort with a key: sizes may be symbolic under torch.compile
    ab, ac, bc = (torch.broadcast_shapes(x.shape, y.shape).numel() for x, y in ((a, b), (a, c), (b, c)))
    if ab <= ac and ab <= bc:
        return [_merge(a, b), c]
    return [_merge(a, c), b] if ac <= bc else [a, _merge(b, c)]


def _merge(a: Tensor, b: Tensor) -> Tensor:
    """Both terms in one: of two bools what both allow, of floats the sum, with -inf where a bool forbids."""
    if a.dtype == b.dtype == torch.bool:
        return a & b
    if a.dtype == torch.bool:
        return b.masked_fill(~a, -math.inf)
    if b.dtype == torch.bool:
        return a.masked_fill(~b, -math.inf)
    return a + b
