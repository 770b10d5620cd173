"""Derivatives of the fused ops: forward and reverse mode in the kernels, second order through the reference.

The derivatives are written once, as functions of the ops' arguments, and used twice: by the Functions that
:func:`attention` goes through, and registered for the raw ops. The gradient recomputes probabilities tile by
tile from the LSE (csrc/cpu/grad_tile.h): memory stays O(N), and what is saved is q, k, v, out, lse_parts and
the small tensors. Tangents (forward mode) do the same. Derivatives of either, second ones in any mix of the
modes, come from :mod:`attn_ext.second_order`, block by block. :mod:`attn_ext.batching` has the rules of vmap.
"""

import functools
import sys
from typing import NamedTuple

import torch
from torch.autograd import forward_ad

from . import arguments, batching, second_order
from . import ops as _ops  # noqa: F401  registers what torch.ops.attn_ext needs

_forward_op = torch.ops.attn_ext.attention_forward.default
_plain_op = torch.ops.attn_ext.attention_forward_plain.default
_plain_backward_op = torch.ops.attn_ext.attention_backward_plain.default
_backward_op = torch.ops.attn_ext.attention_backward.default
_jvp_op = torch.ops.attn_ext.attention_jvp

# Positions of what has derivatives (second_order.INPUTS) among the arguments of the forward op, and of the
# backward op, there after grad_out and grad_lse.
_FORWARD_PLACES = (0, 1, 2, 9, 10, 12, 13)
_BACKWARD_PLACES = (0, 1, 2, 3, 4, 14, 15, 17, 18)
_BACKWARD_TENSORS = ("grad_out", "grad_lse", *second_order.INPUTS)
# The same for _Tangents: the inputs, and their tangents.
_TANGENT_PLACES = (0, 1, 2, 18, 19, 21, 22)
_TANGENTS_AT = range(5, 12)


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
        """What the ops take at their end: the numbers, the 10 optional tensors, allow_tf32.

        A block mask's two may be left out.
        """
        return (*self[:6], *tensors, *(None,) * (10 - len(tensors)), self.allow_tf32)

    def of_scores(self):
        """Those that shape the scores, as keyword arguments of :mod:`attn_ext.reference`."""
        return {
            "causal": (False, "upper_left", "lower_right")[self.causal],
            "window": (self.window_left, self.window_right),
            "scale": self.scale,
            "softcap": self.softcap,
        }


def attention(
    q, k, v, bias, float_mask, bool_mask, alibi_slopes, sinks, key_lengths, query_lengths, rng_state, options,
    block_map=None, block_tiles=None,
):  # fmt: skip
    """(out, lse, lse_parts) of canonical arguments; out and lse are differentiable in the floating ones.

    q (B, Hq, Nq, D), k (B, Hkv, Nk, D), v (B, Hkv, Nk, Dv); bias, float_mask, bool_mask 4-D with axes of full
    size or 1; alibi_slopes (Hq,) or (B, Hq); sinks (Hq,); key_lengths and query_lengths (B,) int64; rng_state
    (2,) int64, given when options.dropout_p > 0; block_map and block_tiles those of
    :class:`attn_ext.masks.BlockMask`. Checked by :mod:`attn_ext.functional`, not here.
    """
    tensors = (
        q, k, v, bias, float_mask, bool_mask, alibi_slopes, sinks, key_lengths, query_lengths, rng_state,
        block_map, block_tiles,
    )  # fmt: skip
    if torch.compiler.is_compiling():
        tensors = _distinct(tensors)
        # Dynamo of torch 2.14 drops the backward of a Function that is called under torch.func.grad: a wrong
        # gradient without a word. It cannot trace this question there, so the graph breaks and eager code
        # answers.
        torch._C._functorch.maybe_current_level()
    if torch.compiler.is_compiling() or in_transform():
        apply = apply_of(_Attention, _TransformedAttention)
        return apply(*tensors[:3], *options.with_tensors(*tensors[3:]))
    if torch.is_grad_enabled() and torch._C._any_requires_grad(*tensors):
        return _EagerAttention.apply(*tensors[:3], *options.with_tensors(*tensors[3:]))
    return _below_autograd(_forward_op, *tensors[:3], *options.with_tensors(*tensors[3:]))


def in_transform():
    """Whether eager code runs inside torch.func's transforms or forward-mode AD. Not for compiled code.

    It must not ask whether it is being compiled: code that Dynamo gives up, as it does for dual numbers, runs
    with Dynamo still looking, which would compile this by itself, and for good.
    """
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def apply_of(plain, transformed):
    """The apply of ``plain``, or inside transforms that of ``transformed``, a Function with all derivatives.

    Of the latter Dynamo compiles no part: it fails on the steps of a Function that it meets by themselves.
    """
    if torch.compiler.is_compiling() and forward_ad._current_level < 0:  # a graph knows the level it is for
        return plain.apply
    if not in_transform():
        return plain.apply
    return _outside_graphs(transformed) if "torch._dynamo" in sys.modules else transformed.apply


@functools.cache
def _outside_graphs(function):
    return torch.compiler.disable(function.apply)


def is_plain(q, k, v):
    """Whether :func:`plain_attention` may be asked: ordinary 4-D tensors with data, without autocast or TF32,
    and nothing between an op and its kernel."""
    return (
        type(q) is type(k) is type(v) is torch.Tensor
        and q.dim() == 4
        and (q.is_cpu or not (q.is_meta or arguments.allows_tf32(q)))
        and not torch._C._is_any_autocast_enabled()
        and _reaches_kernels()
    )


def _reaches_kernels():
    """Whether code runs eagerly, outside tracing, transforms, forward mode and dispatch modes."""
    return (
        not torch.compiler.is_compiling()
        and torch._C._get_tracing_state() is None
        and not in_transform()
        and torch._C._len_torch_dispatch_stack() == 0
    )


def plain_attention(q, k, v, scale, causal):
    """out of :func:`attention` without optional tensors and further options, where :func:`is_plain`.

    The same in fewer steps, for the sake of small problems. RuntimeError where q, k, v do not fit.
    """
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return _PlainAttention.apply(q, k, v, scale, causal)
    return _plain_op(q, k, v, scale, causal)[0]


def plain_gradients(grad_out, q, k, v, out, lse_parts, output_mask, scale, causal):
    """Gradients of q, k and v for :func:`plain_attention`; where a graph is wanted differentiable ones, and
    empty ones of the absent terms after them."""
    if type(grad_out) is torch.Tensor and not torch.is_grad_enabled() and _reaches_kernels():
        return _plain_backward_op(grad_out, q, k, v, out, lse_parts, output_mask, scale, causal)
    options = Options(scale, causal).with_tensors(*(None,) * 8)
    return _gradients(grad_out, None, q, k, v, out, lse_parts, output_mask, *options)


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
    ctx.options = Options(*numbers, *inputs[19:])
    out, _, lse_parts = output
    ctx.save_for_backward(q, k, v, *inputs[9:19], out, lse_parts)
    ctx.mark_non_differentiable(lse_parts)
    ctx.set_materialize_grads(False)


def _forward_backward(ctx, grad_out, grad_lse, _):
    q, k, v, bias, float_mask, bool_mask, alibi_slopes, sinks, *rest, out, lse_parts = ctx.saved_tensors
    if grad_out is None and grad_lse is None:
        return (None,) * 20
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    wanted = _chosen(_FORWARD_PLACES, _needs(ctx, 20))
    output_mask = sum(1 << n for n, need in enumerate(wanted) if need)
    grads = _gradients(
        grad_out, grad_lse, q, k, v, out, lse_parts, output_mask,
        *ctx.options.with_tensors(bias, float_mask, bool_mask, alibi_slopes, sinks, *rest),
    )  # fmt: skip
    return _at_places(
        _FORWARD_PLACES, [g if need else None for g, need in zip(grads, wanted, strict=True)], 20
    )


def _forward_jvp(ctx, *tangents):
    q, k, v, *tensors, out, lse_parts = ctx.saved_tensors
    moved = _chosen(_FORWARD_PLACES, tangents)
    return *_Tangents.apply(q, k, v, out, lse_parts, *moved, *ctx.options.with_tensors(*tensors)), None


def _gradients(*args):
    """The backward op, differentiable if a graph is wanted."""
    if (
        torch.compiler.is_compiling()
    ):  # a Function inside the backward of a Function is more than Dynamo takes
        return _backward_op(*args)
    if torch.is_grad_enabled() or in_transform():
        return _AttentionBackward.apply(*args)
    return _below_autograd(_backward_op, *args)


def _needs(ctx, n):
    """needs_input_grad of n inputs: the raw ops come without those at the end that have their default."""
    needs = ctx.needs_input_grad
    return (*needs, *(False,) * (n - len(needs)))


def _chosen(places, values):
    return tuple(values[n] for n in places)


def _at_places(places, values, size):
    """``size`` values, of which those at ``places`` are given and the others None."""
    result = [None] * size
    for place, value in zip(places, values, strict=True):
        result[place] = value
    return tuple(result)


def _save_backward(ctx, inputs, output):
    ctx.output_mask, ctx.options = inputs[7], Options(*inputs[8:14], *inputs[24:])
    ctx.save_for_backward(*inputs[:7], *inputs[14:24])
    ctx.set_materialize_grads(False)


def _of_backward(ctx):
    """(second_order.Problem, its tensors by name) of the backward op."""
    grad_out, grad_lse, q, k, v, _, _, bias, float_mask, bool_mask, alibi_slopes, sinks, *rest = (
        ctx.saved_tensors
    )
    tensors = (grad_out, grad_lse, q, k, v, bias, float_mask, alibi_slopes, sinks)
    problem = second_order.Problem(bool_mask, *rest, ctx.options)
    return problem, dict(zip(_BACKWARD_TENSORS, tensors, strict=True))


def _backward_backward(ctx, *cotangents):
    problem, tensors = _of_backward(ctx)
    # out and lse_parts are functions of the others
    wanted = [
        n
        for n, need in zip(_BACKWARD_TENSORS, _chosen(_BACKWARD_PLACES, _needs(ctx, 25)), strict=True)
        if need
    ]
    given = {n: c for n, c in _outputs(ctx, cotangents) if c is not None}
    if not given:
        return (None,) * 25
    grads = second_order.pull(second_order.gradients, problem, tensors, wanted, given)
    return _at_places(_BACKWARD_PLACES, [grads.get(n) for n in _BACKWARD_TENSORS], 25)


def _backward_jvp(ctx, *tangents):
    problem, tensors = _of_backward(ctx)
    moving = {
        n: t
        for n, t in zip(_BACKWARD_TENSORS, _chosen(_BACKWARD_PLACES, tangents), strict=True)
        if t is not None
    }
    results = [n for n, _ in _outputs(ctx, second_order.INPUTS)]
    moved = second_order.push(second_order.gradients, problem, tensors, moving, results)
    nothing = tensors["q"].new_zeros(0)  # as what was not asked for; the engine takes no None here
    return tuple(moved.get(n, nothing) for n in second_order.INPUTS)


def _outputs(ctx, values):
    """(name, value) of those gradients that the backward op was asked for."""
    pairs = zip(second_order.INPUTS, values, strict=True)
    return [pair for bit, pair in enumerate(pairs) if ctx.output_mask >> bit & 1]


class _Attention(torch.autograd.Function):
    """The forward op with its derivative, in the form that torch.func's transforms and Dynamo take."""

    # Named arguments: Dynamo of torch 2.14 takes the first of *args for a ctx when nothing requires a
    # gradient.
    @staticmethod
    def forward(
        q, k, v, scale, causal, softcap, window_left, window_right, dropout_p, bias, float_mask, bool_mask,
        alibi_slopes, sinks, key_lengths, query_lengths, rng_state, block_map, block_tiles, allow_tf32,
    ):  # fmt: skip
        return _below_autograd(
            _forward_op, q, k, v, scale, causal, softcap, window_left, window_right, dropout_p, bias,
            float_mask, bool_mask, alibi_slopes, sinks, key_lengths, query_lengths, rng_state, block_map,
            block_tiles, allow_tf32,
        )  # fmt: skip

    setup_context = staticmethod(_save_forward)
    backward = staticmethod(_forward_backward)


class _TransformedAttention(_Attention):
    """The same with forward mode and vmap, which Dynamo of torch 2.14 refuses in a Function."""

    @staticmethod
    def setup_context(ctx, inputs, output):
        _save_forward(ctx, inputs, output)
        ctx.save_for_forward(*inputs[:3], *inputs[9:19], *_chosen((0, 2), output))

    jvp = staticmethod(_forward_jvp)

    @staticmethod
    def vmap(info, in_dims, *args):
        return batching.call(_TransformedAttention.apply, batching.FORWARD, info, in_dims, args)


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
        out, lse_parts = _plain_op(q, k, v, scale, causal)
        ctx.scale, ctx.causal = scale, causal
        ctx.save_for_backward(q, k, v, out, lse_parts)
        return out

    @staticmethod
    def backward(ctx, grad_out):
        wanted = ctx.needs_input_grad[:3]
        output_mask = wanted[0] + 2 * wanted[1] + 4 * wanted[2]
        grads = plain_gradients(grad_out, *ctx.saved_tensors, output_mask, ctx.scale, ctx.causal)
        return (*(g if need else None for g, need in zip(grads, wanted, strict=False)), None, None)


class _AttentionBackward(torch.autograd.Function):
    """The backward op with its own derivatives."""

    @staticmethod
    def forward(*args):
        return _below_autograd(_backward_op, *args)

    @staticmethod
    def setup_context(ctx, inputs, output):
        _save_backward(ctx, inputs, output)
        ctx.save_for_forward(*inputs[:7], *inputs[14:24])

    backward = staticmethod(_backward_backward)
    jvp = staticmethod(_backward_jvp)

    @staticmethod
    def vmap(info, in_dims, *args):
        like = batching.BACKWARD.like
        own = [n for bit, n in enumerate(like) if args[7] >> bit & 1]
        return batching.call(_AttentionBackward.apply, batching.BACKWARD, info, in_dims, args, own)


class _Tangents(torch.autograd.Function):
    """The tangents of (out, lse): q, k, v, out, lse_parts, seven tangents, then as the other ops."""

    @staticmethod
    def forward(*args):
        return _below_autograd(_jvp_op, *args)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.options = Options(*inputs[12:18], *inputs[28:])
        saved = (*inputs[:3], *inputs[5:12], *inputs[18:28])
        ctx.save_for_backward(*saved)
        ctx.save_for_forward(*saved)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, *cotangents):
        problem, tensors = _of_saved_tangents(ctx)
        needs = _needs(ctx, 29)
        names = (*second_order.INPUTS, *_TANGENT_NAMES)
        places = (*_TANGENT_PLACES, *_TANGENTS_AT)
        wanted = [n for n, place in zip(names, places, strict=True) if needs[place]]
        given = {n: c for n, c in zip(("out", "lse"), cotangents, strict=True) if c is not None}
        if not given:
            return (None,) * 29
        grads = second_order.pull(second_order.tangents, problem, tensors, wanted, given)
        return _at_places(places, [grads.get(n) for n in names], 29)

    @staticmethod
    def jvp(ctx, *tangents):
        problem, tensors = _of_saved_tangents(ctx)
        places = zip((*second_order.INPUTS, *_TANGENT_NAMES), (*_TANGENT_PLACES, *_TANGENTS_AT), strict=True)
        moving = {n: tangents[place] for n, place in places if tangents[place] is not None}
        moved = second_order.push(second_order.tangents, problem, tensors, moving, ["out", "lse"])
        return moved["out"].to(tensors["q"].dtype), moved["lse"]

    @staticmethod
    def vmap(info, in_dims, *args):
        own = []
        for pair in zip(_TANGENT_PLACES[3:], _TANGENTS_AT[3:], strict=True):
            if any(in_dims[n] is not None for n in pair):  # then primal and tangent must have one shape
                own += pair
        return batching.call(_Tangents.apply, batching.TANGENTS, info, in_dims, args, own)


_TANGENT_NAMES = tuple("tangent_" + n for n in second_order.INPUTS)


def _of_saved_tangents(ctx):
    """(second_order.Problem, its tensors by name) of _Tangents."""
    saved = ctx.saved_tensors
    bias, float_mask, bool_mask, alibi_slopes, sinks, *rest = saved[10:]
    names = (*second_order.INPUTS, *_TANGENT_NAMES)
    values = (*saved[:3], bias, float_mask, alibi_slopes, sinks, *saved[3:10])
    return second_order.Problem(bool_mask, *rest, ctx.options), dict(zip(names, values, strict=True))


# The raw ops have the same derivatives, so that a call of torch.ops.attn_ext.* by itself loses no gradient;
# under torch.func's transforms torch refuses them, which is why the functions above do not rely on this.
torch.library.register_autograd("attn_ext::attention_forward", _forward_backward, setup_context=_save_forward)
torch.library.register_autograd(
    "attn_ext::attention_backward", _backward_backward, setup_context=_save_backward
)
torch.library.register_autograd(
    "attn_ext::attention_jvp", _Tangents.backward, setup_context=_Tangents.setup_context
)
