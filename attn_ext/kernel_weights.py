"""Attention together with its probabilities, both from the kernels: eager code on the CPU.

    dlse[i] / dbias[i][j] = P[i][j]

so the kernel of the backward computes the weights if it is asked for the gradient of a bias of zeros. It
recomputes the forward's logits, bit for bit, and takes the row's maximum and sum from the forward
(csrc/cpu/grad_tile.h): rows sum to 1 at any size of the logits. A bias that all heads share adds their
weights up as they are made, in memory of the result's size.
"""

import torch

from . import arguments, autograd, reference, weights

_weights_op = torch.ops.attn_ext.attention_weights.default

# Those of q, k, v and the terms (bias, float_mask, bool_mask, alibi_slopes, sinks, lengths) with a gradient:
# its place in the results of the backward op is its bit in output_mask, too.
_GRADIENTS = {0: 0, 1: 1, 2: 2, 3: 3, 4: 4, 6: 5, 7: 6}
_BIAS, _FLOAT_MASK = 3, 4


def covers(q, terms):
    """Whether :func:`attention` is for these. Of bias and float_mask it needs one for itself."""
    bias, float_mask = terms[:2]
    return (
        (bias is None or float_mask is None)
        and q.is_cpu
        and not torch.compiler.is_compiling()
        and not autograd.in_transform()
    )


def plain_attention(kind, q, k, v, scale, causal):
    """(out, weights) of q, k, v and no other term, or None where they need a closer look.

    As in :func:`attn_ext.functional.attention` without weights: that takes as long as a small problem itself.
    """
    if not (autograd.is_plain(q, k, v) and q.is_cpu):
        return None
    try:
        arguments.check_shapes(q, k, v)
        options = autograd.Options(arguments.scale_factor(scale, q.shape[3]), causal)
        out, _, p = attention(kind, q, k, v, (), None, None, options)
    except RuntimeError:
        return None
    return out, p


def attention(kind, q, k, v, terms, rng_state, block_mask, options):
    """(out, lse, weights), the weights of kind "full" or "mean_heads" in q's dtype, where it :func:`covers`.

    Without terms, (), lse is None.
    """
    args = (kind, block_mask, options, rng_state, q, k, v, *terms)
    if torch.is_grad_enabled() and torch._C._any_requires_grad(q, k, v, *terms):
        return _AttentionAndWeights.apply(*args)
    out, lse, _, p = _forward(*args)
    return out, lse, p


def _forward(kind, block_mask, options, rng_state, q, k, v, *terms):
    """(out, lse, lse_parts, weights)."""
    is_mean = kind == "mean_heads"
    if not terms:
        out, lse_parts = autograd._plain_op(q, k, v, *options[:2])
        p = _weights_op(q, k, lse_parts, *options[:2], is_mean)
        return out, None, lse_parts, p.squeeze(1) if is_mean else p
    (batch, heads, len_q, _), (_, heads_kv, len_k, _) = q.shape, k.shape
    zero = q.new_zeros(1)
    no_bias = zero.expand(batch, 1 if is_mean else heads, len_q, len_k)
    tensors = _optional_tensors(terms, rng_state, block_mask)
    args = (q, k, v, *options.with_tensors(*tensors))
    out, lse, lse_parts = autograd._below_autograd(autograd._forward_op, *args)
    bias, float_mask, *others = tensors
    place = _BIAS if bias is None else _FLOAT_MASK
    added = (no_bias, float_mask) if bias is None else (bias, no_bias)
    numbers = options._replace(dropout_p=0.0).with_tensors(*added, *others)
    no_value = zero.expand(batch, heads_kv, len_k, 1)
    no_grad_out = out_of_zeros = zero.expand(batch, heads, len_q, 1)
    grad_lse = lse_parts.new_full((batch, heads, len_q), 1 / max(1, heads) if is_mean else 1.0)
    args = (no_grad_out, grad_lse, q, k, no_value, out_of_zeros, lse_parts, 1 << place, *numbers)
    p = autograd._below_autograd(autograd._backward_op, *args)[place]
    p = p.squeeze(1) if is_mean else p
    return out, lse, lse_parts, p if p.dtype == q.dtype else p.to(q.dtype)


def _optional_tensors(terms, rng_state, block_mask):
    """Those of the ops, in their order."""
    blocks = (None, None) if block_mask is None else (block_mask.map, block_mask.tiles)
    return (*terms, rng_state, *blocks)


class _AttentionAndWeights(torch.autograd.Function):
    """Derivatives of out and lse come from the kernels, those of the weights from the formula, anew."""

    @staticmethod
    def forward(ctx, kind, block_mask, options, rng_state, *tensors):
        out, lse, lse_parts, p = _forward(kind, block_mask, options, rng_state, *tensors)
        ctx.kind, ctx.block_mask, ctx.options = kind, block_mask, options
        ctx.save_for_backward(out, lse_parts, rng_state, *tensors)
        ctx.set_materialize_grads(False)
        return out, lse, p

    @staticmethod
    def backward(ctx, grad_out, grad_lse, grad_p):
        out, lse_parts, rng_state, *tensors = ctx.saved_tensors
        wanted = [n for n, need in enumerate(ctx.needs_input_grad[4:]) if need]
        grads = {}
        if grad_out is not None or grad_lse is not None:
            grad_out = torch.zeros_like(out) if grad_out is None else grad_out
            q, k, v, *terms = tensors
            args = (q, k, v, out, lse_parts, sum(1 << _GRADIENTS[n] for n in wanted))
            if not terms:
                made = autograd.plain_gradients(grad_out, *args, *ctx.options[:2])
            else:
                optional = _optional_tensors(terms, rng_state, ctx.block_mask)
                options = ctx.options.with_tensors(*optional)
                made = autograd._gradients(grad_out, grad_lse, *args, *options)
            grads = {n: made[_GRADIENTS[n]] for n in wanted}
        moving = [n for n in wanted if n != 2]  # v has no part in the weights
        if grad_p is not None and moving:

            def formula(*variables):
                new = dict(zip(moving, variables, strict=True))
                q, k, _, *terms = (new.get(n, t) for n, t in enumerate(tensors))
                return weights.by_formula(ctx.kind, q, k, terms or (None,) * 7, ctx.block_mask, ctx.options)

            made = _pull_back(formula, [tensors[n] for n in moving], grad_p)
            for n, g in zip(moving, made, strict=True):
                grads[n] = grads[n] + g if n in grads else g
        return (None,) * 4 + tuple(grads.get(n) for n in range(len(tensors)))


def _pull_back(function, variables, grad):
    """The gradients of sum(grad * function(*variables)), differentiable if a graph is wanted."""
    with reference.no_autocast(grad):
        if torch.is_grad_enabled():
            return torch.func.vjp(function, *variables)[1](grad)
        with torch.enable_grad():  # in half the time of a transform
            leaves = [t.detach().requires_grad_() for t in variables]
            return torch.autograd.grad(function(*leaves), leaves, grad)
