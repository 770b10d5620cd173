"""Sequences that lie one after the other in one tensor, as ops: one node for torch.compile, at any lengths.

Eager code calls :func:`attn_ext.autograd.attention` sequence by sequence, which has all derivatives. Compiled
code cannot: the lengths, which are data, decide which calls there are. It calls these ops, which do the same
in one step and have a first derivative.

* ``packed_forward(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, <numbers>, alibi_slopes,
  rng_state) -> (out, lse, lse_parts)``
* ``packed_backward(grad_out, grad_lse, q, k, v, out, lse_parts, cu_seqlens_q, cu_seqlens_k, output_mask,
  <numbers>, alibi_slopes, rng_state)`` -> gradients of q, k, v, alibi_slopes. Bit n of ``output_mask`` asks
  for the n-th; the others come back with 0 elements.

q (total_q, Hq, D), k (total_k, Hkv, D), v (total_k, Hkv, Dv), out (total_q, Hq, Dv), lse (Hq, total_q),
lse_parts (Hq, total_q, 2), alibi_slopes (B, Hq); <numbers> are :class:`attn_ext.autograd.Options`.
"""

import itertools
import math

import torch
from torch import Tensor

from . import arguments
from .autograd import Options
from .ops import _lse_dtype


def ends(what, cu_seqlens, longest, total):
    """[0, the ends of the sequences], checked. what: "q" or "k", for messages."""
    name = f"cu_seqlens_{what}"
    found = cu_seqlens.tolist()
    lengths = [end - start for start, end in itertools.pairwise(found)]
    if found[0] != 0 or min(lengths, default=0) < 0 or found[-1] > total:
        raise arguments.ArgumentValueError(
            f"{name} must start with 0, never fall and end at most with the {total} rows of {what}, "
            f"got {found}"
        )
    if max(lengths, default=0) > longest:
        raise arguments.ArgumentValueError(
            f"max_seqlen_{what} must be at least the longest sequence of {name}, {max(lengths)}, "
            f"got {longest}"
        )
    return found


def rng_states(rng_state, count):
    """An own state of dropout (2,) for each sequence: the same seed, offsets that follow each other."""
    if rng_state is None:
        return [None] * count
    steps = torch.arange(count, device=rng_state.device)
    return torch.stack([rng_state[0].expand(count), rng_state[1] + steps], 1).unbind()


def heads(t):
    """(N, H, D) -> (1, H, N, D)."""
    return t.transpose(0, 1)[None]


@torch.library.custom_op("attn_ext::packed_forward", mutates_args=())
def packed_forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
    max_seqlen_k: int, scale: float, causal: int, softcap: float, window_left: int, window_right: int,
    dropout_p: float, allow_tf32: bool, alibi_slopes: Tensor | None, rng_state: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    out, lse, lse_parts = made = _empty(q, v)
    out.zero_()  # as rows of no sequence and queries without keys are
    lse.fill_(-math.inf)
    lse_parts.zero_()
    options = Options(scale, causal, softcap, window_left, window_right, dropout_p, allow_tf32)
    ends_q = ends("q", cu_seqlens_q, max_seqlen_q, q.shape[0])
    ends_k = ends("k", cu_seqlens_k, max_seqlen_k, k.shape[0])
    for in_q, in_k, terms in _sequences(ends_q, ends_k, alibi_slopes, rng_state):
        own = (heads(q[in_q]), heads(k[in_k]), heads(v[in_k]))
        (x,), (y,), (z,) = torch.ops.attn_ext.attention_forward(*own, *options.with_tensors(*terms))
        out[in_q], lse[:, in_q], lse_parts[:, in_q] = x.transpose(0, 1), y, z
    return made


@packed_forward.register_fake
def _(q, k, v, *rest):
    return _empty(q, v)


@torch.library.custom_op("attn_ext::packed_backward", mutates_args=())
def packed_backward(
    grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor,
    lse_parts: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, output_mask: int, scale: float,
    causal: int, softcap: float, window_left: int, window_right: int, dropout_p: float, allow_tf32: bool,
    alibi_slopes: Tensor | None, rng_state: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    grads = _empty_grads(q, k, v, alibi_slopes, output_mask)
    for grad in grads:
        grad.zero_()
    options = Options(scale, causal, softcap, window_left, window_right, dropout_p, allow_tf32)
    wanted = output_mask & 7 | (output_mask & 8) << 2  # slopes are the ops' sixth
    sequences = _sequences(cu_seqlens_q.tolist(), cu_seqlens_k.tolist(), alibi_slopes, rng_state)
    for b, (in_q, in_k, terms) in enumerate(sequences):
        places = (in_q, in_k, in_k, b)
        own = (heads(q[in_q]), heads(k[in_k]), heads(v[in_k]), heads(out[in_q]))
        given = (heads(grad_out[in_q]), None if grad_lse is None else grad_lse[None, :, in_q])
        args = (*given, *own, lse_parts[None, :, in_q], wanted, *options.with_tensors(*terms))
        made = torch.ops.attn_ext.attention_backward(*args)
        for n, (grad, part) in enumerate(zip(grads, (*made[:3], made[5]), strict=True)):
            if output_mask >> n & 1:
                grad[places[n]] = part if n == 3 else part[0].transpose(0, 1)
    return grads


@packed_backward.register_fake
def _(grad_out, grad_lse, q, k, v, out, lse_parts, cu_seqlens_q, cu_seqlens_k, output_mask, *options):
    return _empty_grads(q, k, v, options[-2], output_mask)


def _sequences(ends_q, ends_k, alibi_slopes, rng_state):
    """(rows of its queries, rows of its keys, the ops' eight tensors) of each sequence."""
    states = rng_states(rng_state, len(ends_q) - 1)
    rows = zip(itertools.pairwise(ends_q), itertools.pairwise(ends_k), states, strict=True)
    for b, (of_q, of_k, state) in enumerate(rows):
        slopes = None if alibi_slopes is None else alibi_slopes[b]
        yield slice(*of_q), slice(*of_k), (None, None, None, slopes, None, None, None, state)


def _empty(q, v):
    total, heads_q, _ = q.shape
    return (
        q.new_empty((total, heads_q, v.shape[2])),
        q.new_empty((heads_q, total), dtype=_lse_dtype(q)),
        q.new_empty((heads_q, total, 2), dtype=_lse_dtype(q)),
    )


def _empty_grads(q, k, v, alibi_slopes, output_mask):
    tensors = (q, k, v, alibi_slopes)
    return tuple(
        q.new_empty(0) if not output_mask >> n & 1 else t.new_empty(t.shape) for n, t in enumerate(tensors)
    )


def _save(ctx, inputs, output):
    ctx.numbers = inputs[7:14]
    out, _, lse_parts = output
    ctx.save_for_backward(*inputs[:3], out, lse_parts, *inputs[3:5], *inputs[14:])
    ctx.mark_non_differentiable(lse_parts)
    ctx.set_materialize_grads(False)


def _backward(ctx, grad_out, grad_lse, _):
    *tensors, cu_seqlens_q, cu_seqlens_k, alibi_slopes, rng_state = ctx.saved_tensors
    needs = (*ctx.needs_input_grad[:3], ctx.needs_input_grad[14])
    if grad_out is None:
        grad_out = torch.zeros_like(tensors[3])
    output_mask = sum(1 << n for n, need in enumerate(needs) if need)
    rest = (cu_seqlens_q, cu_seqlens_k, output_mask, *ctx.numbers, alibi_slopes, rng_state)
    grads = packed_backward(grad_out, grad_lse, *tensors, *rest)
    grads = [grad if need else None for grad, need in zip(grads, needs, strict=True)]
    return *grads[:3], *(None,) * 11, grads[3], None


packed_forward.register_autograd(_backward, setup_context=_save)
