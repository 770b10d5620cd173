"""Derivatives of the fused ops: reverse mode in the kernels, second order through the reference.

The derivatives are written once, as functions of the ops' arguments, and used twice: by the Functions that
:func:`attention` goes through, and registered for the raw ops. The first derivative recomputes
probabilities tile by tile from the LSE (csrc/cpu/grad_tile.h): memory stays O(N), and what is saved is q, k,
v, out, lse_parts and the small tensors. Second derivatives (``create_graph=True``) differentiate
:mod:`attn_ext.reference`, a few heads at a time: they are exact, and need O(Nq * Nk) memory for those heads.
Third and higher derivatives keep the whole reference graph.
"""

from typing import NamedTuple

import torch
from torch.autograd import forward_ad

from . import ops as _ops  # noqa: F401  registers what torch.ops.attn_ext needs
from . import reference

_forward_op = torch.ops.attn_ext.attention_forward
_backward_op = torch.ops.attn_ext.attention_backward

# Scores held at one time by a second derivative: 2^22 make 32 MiB a copy in float64, of which about ten live.
SECOND_DERIVATIVE_SCORES = 1 << 22


class Options(NamedTuple):
    """The plain numbers of a call, in the ops' order; allow_tf32 comes after the tensors there."""

    scale: float  # of q . k
    causal: int = 0  # 0: no, 1: upper left, 2: lower right
    softcap: float = 0.0  # 0: none
    window_left: int = -1  # keys to the left of the diagonal, -1: all
    window_right: int = -1  # keys to the right of it, -1: all
    dropout_p: float = 0.0
    allow_tf32: bool = False  # arguments.allows_tf32, kept for the backward: it needs the forward's scores

    def with_tensors(self, *tensors):
        """What the ops take at their end: the numbers, the 8 optional tensors, allow_tf32."""
        return (*self[:6], *tensors, self.allow_tf32)

    def of_scores(self):
        """Those that shape the scores, as keyword arguments of :mod:`attn_ext.reference`."""
        return {
            "causal": (False, "upper_left", "lower_right")[self.causal],
            "window": (self.window_left, self.window_right),
            "scale": self.scale,
            "softcap": self.softcap,
        }


def attention(
    q, k, v, bias, float_mask, bool_mask, alibi_slopes, sinks, key_lengths, query_lengths, rng_state, options
):  # fmt: skip
    """(out, lse, lse_parts) of canonical arguments; out and lse are differentiable in the floating ones.

    q (B, Hq, Nq, D), k (B, Hkv, Nk, D), v (B, Hkv, Nk, Dv); bias, float_mask, bool_mask 4-D with axes of full
    size or 1; alibi_slopes (Hq,) or (B, Hq); sinks (Hq,); key_lengths and query_lengths (B,) int64; rng_state
    (2,) int64, given when options.dropout_p > 0. Checked by :mod:`attn_ext.functional`, not here.
    """
    tensors = (
        q, k, v, bias, float_mask, bool_mask, alibi_slopes, sinks, key_lengths, query_lengths, rng_state
    )  # fmt: skip
    if torch.compiler.is_compiling():
        tensors = _distinct(tensors)
        # Dynamo of torch 2.14 drops the backward of a Function that is called under torch.func.grad: a wrong
        # gradient without a word. It cannot trace this question there, so the graph breaks and eager code
        # answers.
        torch._C._functorch.maybe_current_level()
        return _Attention.apply(*tensors[:3], *options.with_tensors(*tensors[3:]))
    if in_transform():
        # The Function refuses what it cannot do; the raw op would drop a tangent without a word.
        return _Attention.apply(*tensors[:3], *options.with_tensors(*tensors[3:]))
    if torch.is_grad_enabled() and torch._C._any_requires_grad(*tensors):
        return _EagerAttention.apply(*tensors[:3], *options.with_tensors(*tensors[3:]))
    return _below_autograd(_forward_op, *tensors[:3], *options.with_tensors(*tensors[3:]))


def in_transform():
    """Whether eager code runs inside torch.func's transforms or forward-mode AD."""
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def plain_attention(q, k, v, scale, causal):
    """out of :func:`attention` without optional tensors and further options, outside :func:`in_transform`.

    The same ops in fewer steps, for the sake of small problems. RuntimeError where q, k, v do not fit.
    """
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return _PlainAttention.apply(q, k, v, scale, causal)
    with torch._C._AutoDispatchBelowAutograd():
        return _forward_op(q, k, v, scale, causal)[0]


def _distinct(tensors):
    """The same tensors, none of them twice: Dynamo refuses a Function of (x, x, x)."""
    found = []
    for t in tensors:
        found.append(t.view_as(t) if t is not None and any(t is other for other in found) else t)
    return tuple(found)


def _below_autograd(op, *args):
    """The op without its registered derivative, whose Python would cost as much as a small call does."""
    if torch.compiler.is_compiling():
        return op(*args)
    with torch._C._AutoDispatchBelowAutograd():
        return op(*args)


def _save_forward(ctx, inputs, output):
    q, k, v, *numbers = inputs[:9]
    ctx.options = Options(*numbers, *inputs[17:])
    out, _, lse_parts = output
    ctx.save_for_backward(q, k, v, *inputs[9:17], out, lse_parts)
    ctx.mark_non_differentiable(lse_parts)
    ctx.set_materialize_grads(False)


def _forward_backward(ctx, grad_out, grad_lse, _):
    q, k, v, bias, float_mask, bool_mask, alibi_slopes, sinks, *rest, out, lse_parts = ctx.saved_tensors
    if grad_out is None and grad_lse is None:
        return (None,) * 18
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    needs = _needs(ctx, 18)
    wanted = (*needs[:3], *needs[9:11], *needs[12:14])  # the differentiable ones
    output_mask = sum(1 << n for n, need in enumerate(wanted) if need)
    grads = _gradients(
        grad_out, grad_lse, q, k, v, out, lse_parts, output_mask,
        *ctx.options.with_tensors(bias, float_mask, bool_mask, alibi_slopes, sinks, *rest),
    )  # fmt: skip
    grads = [g if need else None for g, need in zip(grads, wanted, strict=True)]
    return (*grads[:3], *(None,) * 6, *grads[3:5], None, *grads[5:], None, None, None, None)


def _gradients(*args):
    """The backward op, differentiable if a graph is wanted."""
    if (
        torch.compiler.is_compiling()
    ):  # a Function inside the backward of a Function is more than Dynamo takes
        return _backward_op(*args)
    if torch.is_grad_enabled():
        return _AttentionBackward.apply(*args)
    return _below_autograd(_backward_op, *args)


def _needs(ctx, n):
    """needs_input_grad of n inputs: the raw ops come without those at the end that have their default."""
    needs = ctx.needs_input_grad
    return (*needs, *(False,) * (n - len(needs)))


def _save_backward(ctx, inputs, output):
    ctx.output_mask, ctx.options = inputs[7], Options(*inputs[8:14], *inputs[22:])
    ctx.save_for_backward(*inputs[:7], *inputs[14:22])
    ctx.set_materialize_grads(False)


def _backward_backward(ctx, *cotangents):
    grad_out, grad_lse, q, k, v, _, _, bias, float_mask, bool_mask, alibi_slopes, sinks, *rest = (
        ctx.saved_tensors
    )
    needs = _needs(ctx, 23)
    # without out and lse_parts, which are functions of the others
    wanted = (*needs[:5], *needs[14:16], *needs[17:19])
    problem = _Problem(
        (grad_out, grad_lse, q, k, v, bias, float_mask, alibi_slopes, sinks), bool_mask, *rest, ctx.options
    )
    cotangents = [c if ctx.output_mask >> n & 1 else None for n, c in enumerate(cotangents)]
    if all(c is None for c in cotangents):
        return (None,) * 23
    if torch.is_grad_enabled():
        grads = problem.differentiate(cotangents, wanted)
    else:
        grads = problem.differentiate_in_parts(cotangents, wanted)
    return (*grads[:5], *(None,) * 9, *grads[5:7], None, *grads[7:], None, None, None, None)


class _Attention(torch.autograd.Function):
    """The forward op with its derivative, in the form that torch.func's transforms and Dynamo take."""

    # Named arguments: Dynamo of torch 2.14 takes the first of *args for a ctx when nothing requires a
    # gradient.
    @staticmethod
    def forward(
        q, k, v, scale, causal, softcap, window_left, window_right, dropout_p, bias, float_mask, bool_mask,
        alibi_slopes, sinks, key_lengths, query_lengths, rng_state, allow_tf32,
    ):  # fmt: skip
        return _below_autograd(
            _forward_op, q, k, v, scale, causal, softcap, window_left, window_right, dropout_p, bias,
            float_mask, bool_mask, alibi_slopes, sinks, key_lengths, query_lengths, rng_state, allow_tf32,
        )  # fmt: skip

    setup_context = staticmethod(_save_forward)
    backward = staticmethod(_forward_backward)


class _EagerAttention(torch.autograd.Function):
    """The same for plain eager code, without the look-up of forward's signature that setup_context brings:
    that costs more than a small call."""

    @staticmethod
    def forward(ctx, *args):
        output = _below_autograd(_forward_op, *args)
        _save_forward(ctx, args, output)
        return output

    backward = staticmethod(_forward_backward)


class _PlainAttention(torch.autograd.Function):
    """The same for :func:`plain_attention`: each further input and output would cost a small call 3 %."""

    @staticmethod
    def forward(ctx, q, k, v, scale, causal):
        with torch._C._AutoDispatchBelowAutograd():
            out, _, lse_parts = _forward_op(q, k, v, scale, causal)
        ctx.scale, ctx.causal = scale, causal
        ctx.save_for_backward(q, k, v, out, lse_parts)
        return out

    @staticmethod
    def backward(ctx, grad_out):
        wanted = ctx.needs_input_grad[:3]
        output_mask = wanted[0] + 2 * wanted[1] + 4 * wanted[2]
        q, k, v, out, lse_parts = ctx.saved_tensors
        args = (grad_out, None, q, k, v, out, lse_parts, output_mask, ctx.scale, ctx.causal)
        if torch.is_grad_enabled():
            grads = _gradients(*args[:8], *Options(*args[8:]).with_tensors(*(None,) * 8))
        else:
            grads = _below_autograd(_backward_op, *args)
        return (*(g if need else None for g, need in zip(grads, wanted, strict=False)), None, None)


class _AttentionBackward(torch.autograd.Function):
    """The backward op with its own derivative."""

    @staticmethod
    def forward(*args):
        return _below_autograd(_backward_op, *args)

    setup_context = staticmethod(_save_backward)
    backward = staticmethod(_backward_backward)


# The raw ops have the same derivatives, so that a call of torch.ops.attn_ext.* by itself loses no gradient;
# under torch.func's transforms torch refuses them, which is why the functions above do not rely on this.
torch.library.register_autograd("attn_ext::attention_forward", _forward_backward, setup_context=_save_forward)
torch.library.register_autograd(
    "attn_ext::attention_backward", _backward_backward, setup_context=_save_backward
)


class _Problem(NamedTuple):
    """The arguments of a backward, as a function that the reference formula can differentiate."""

    tensors: tuple  # grad_out, grad_lse, q, k, v, bias, float_mask, alibi_slopes, sinks; None where not given
    bool_mask: torch.Tensor | None
    key_lengths: torch.Tensor | None
    query_lengths: torch.Tensor | None
    rng_state: torch.Tensor | None
    options: Options

    def differentiate(self, cotangents, wanted, corner=(0, 0)):
        """d<cotangents, gradients(tensors)> / d tensors, for those that are wanted; None for the others.

        cotangents: one for each of q, k, v, bias, float_mask, alibi_slopes, sinks, None meaning zero.
        ``corner`` is the (batch, query head) of the first element, which dropout's mask depends on.
        Differentiable again, and under torch.func's transforms: both derivatives are torch.func.vjp.
        """
        chosen = [n for n, want in enumerate(wanted) if want]
        active = [n for n, c in enumerate(cotangents) if c is not None]

        def gradients(*changing):
            tensors = list(self.tensors)
            for n, t in zip(chosen, changing, strict=True):
                tensors[n] = t
            grad_out, grad_lse, *inputs = tensors

            def forward(*active_inputs):
                for n, t in zip(active, active_inputs, strict=True):
                    inputs[n] = t
                out, lse = self._reference(inputs, corner)
                # The LSE of a row that sees nothing is -inf, whatever the inputs are.
                return (out,) if grad_lse is None else (out, lse.masked_fill(lse == -torch.inf, 0.0))

            _, pull = torch.func.vjp(forward, *(inputs[n] for n in active))
            return pull((grad_out,) if grad_lse is None else (grad_out, grad_lse))

        result = [None] * len(self.tensors)
        with reference.no_autocast(self.tensors[0]):  # the pull-backs too
            _, pull = torch.func.vjp(gradients, *(self.tensors[n] for n in chosen))
            for n, g in zip(chosen, pull(tuple(cotangents[n] for n in active)), strict=True):
                result[n] = g
        return result

    def differentiate_in_parts(self, cotangents, wanted):
        """The same without a graph, a part of the batch or of the KV heads at a time."""
        q, k = self.tensors[2], self.tensors[3]
        batch, heads_q, len_q, _ = q.shape
        heads_kv, len_k = k.shape[1], k.shape[2]
        group = heads_q // heads_kv if heads_kv else 1
        per_head = max(1, group * len_q * len_k)
        heads = max(1, min(heads_kv, SECOND_DERIVATIVE_SCORES // per_head))
        samples = (
            max(1, min(batch, SECOND_DERIVATIVE_SCORES // (per_head * max(1, heads_kv))))
            if heads == heads_kv
            else 1
        )
        if samples >= batch and heads >= heads_kv:
            return self.differentiate(cotangents, wanted)
        total = [
            torch.zeros_like(t) if want and t is not None else None
            for t, want in zip(self.tensors, wanted, strict=True)
        ]
        for b in range(0, batch, samples):
            for h in range(0, heads_kv, heads):
                cut = _Cut(slice(b, b + samples), slice(h, h + heads), slice(h * group, (h + heads) * group))
                part = self._replace(
                    tensors=tuple(cut.take(n, t) for n, t in enumerate(self.tensors)),
                    bool_mask=cut.of_scores(self.bool_mask),
                    key_lengths=cut.of_batch(self.key_lengths),
                    query_lengths=cut.of_batch(self.query_lengths),
                )
                # cotangents stand for tensors[2:]
                part_cotangents = [cut.take(n + 2, c) for n, c in enumerate(cotangents)]
                grads = part.differentiate(part_cotangents, wanted, corner=(b, h * group))
                for n, g in enumerate(grads):
                    if g is not None:
                        cut.take(n, total[n]).add_(g)
        return total

    def _reference(self, inputs, corner):
        q, k, v, bias, float_mask, alibi_slopes, sinks = inputs
        o = self.options
        mask = self.bool_mask if float_mask is None else float_mask
        if float_mask is not None and self.bool_mask is not None:
            mask = float_mask.masked_fill(~self.bool_mask, -torch.inf)
        return reference.attention(
            q, k, v, mask=mask, bias=bias, alibi_slopes=alibi_slopes, sinks=sinks, **o.of_scores(),
            key_lengths=self.key_lengths, query_lengths=self.query_lengths,
            dropout_p=o.dropout_p, rng_state=self.rng_state, dropout_corner=corner,
        )  # fmt: skip


class _Cut(NamedTuple):
    """A range of samples and heads, and how each argument of a problem is cut to it."""

    batch: slice
    heads_kv: slice
    heads_q: slice

    def take(self, position, t):
        """The part of ``_Problem.tensors[position]``."""
        if t is None:
            return None
        if position in (3, 4):  # k, v
            return t[self.batch, self.heads_kv]
        if position in (5, 6):  # bias, float_mask
            return self.of_scores(t)
        if position in (7, 8):  # alibi_slopes (Hq,) or (B, Hq), sinks (Hq,)
            return t[self.heads_q] if t.dim() == 1 else t[self.batch, self.heads_q]
        return t[self.batch, self.heads_q]  # grad_out, grad_lse, q

    def of_scores(self, t):
        if t is None:
            return None
        return t[
            self.batch if t.shape[0] > 1 else slice(None), self.heads_q if t.shape[1] > 1 else slice(None)
        ]

    def of_batch(self, t):
        return None if t is None else t[self.batch]
