"""The attention probabilities themselves, for ``attention(return_weights=...)``, by formula and as sums.

The formula is the reference's, not exp(s - LSE): a float32 LSE near 3e5 is only known to 0.03, an error of
3 % in the weights; a softmax that subtracts the row's maximum is right at any size of the logits. So are the
kernels that :mod:`attn_ext.kernel_weights` has them from: they keep the maximum and the sum apart.
"""

import math

import torch

from . import arguments, autograd, reference, second_order

# How many scores mean_heads holds at a time, if more than those of one head: 1 MiB in float32. It spares
# small problems the loop over heads and adds nothing that matters to large ones.
HEAD_CHUNK_SCORES = 1 << 18
# In how many parts compiled code takes the heads, whatever the sizes: it must not be compiled anew for each,
# and each part is traced, forward and backward.
COMPILED_CHUNKS = 4


def by_formula(kind, q, k, terms, block_mask, options):
    """The weights of kind "full" or "mean_heads" by plain torch operations, on every device."""
    if block_mask is not None:  # a matrix of their size is made anyway
        terms = with_dense_mask(terms, block_mask)
    return (full if kind == "full" else mean_heads)(q, k, *terms, options)


def full(q, k, bias, float_mask, bool_mask, alibi_slopes, sinks, key_lengths, query_lengths, options):
    """All probabilities, (B, Hq, Nq, Nk) in q's dtype, by plain differentiable torch operations."""
    mask = float_mask if bool_mask is None else bool_mask
    return _weights(q, k, bias, mask, alibi_slopes, sinks, key_lengths, query_lengths, options).to(q.dtype)


def with_dense_mask(terms, block_mask):
    """The optional tensors (bias, float_mask, bool_mask, ...) with a BlockMask inside the mask."""
    bias, float_mask, bool_mask, *rest = terms
    visible = block_mask.to_dense()
    if float_mask is not None:
        return bias, float_mask.masked_fill(~visible, -math.inf), None, *rest
    return bias, None, visible if bool_mask is None else bool_mask & visible, *rest


def column_sums(
    q, k, lse_parts, bias, float_mask, bool_mask, alibi_slopes, sinks, key_lengths, query_lengths, block_map,
    block_tiles, options,
):  # fmt: skip
    """The attention each key receives, (B, Hq, Nk) in float32 or float64: O(N) memory, derivatives too.

    ``lse_parts`` is that of the forward; dropout does not enter.
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    terms = [
        t if t is None or t.dtype == torch.bool else t.to(dtype)
        for t in (bias, float_mask, bool_mask, alibi_slopes, sinks)
    ]
    return autograd.apply_of(_ColumnSums, _TransformedColumnSums)(
        q.to(dtype),
        _repeat_heads(k, q).to(dtype),
        lse_parts,
        *terms,
        key_lengths,
        query_lengths,
        block_map,
        block_tiles,
        options._replace(dropout_p=0.0),
    )


def mean_heads(q, k, bias, float_mask, bool_mask, alibi_slopes, sinks, key_lengths, query_lengths, options):
    """Their mean over heads, (B, Nq, Nk) in q's dtype; a few heads at a time, in the backward too.

    Compiled code takes a quarter of the heads at a time.
    With create_graph=True the backward's graph keeps the matrices of all heads.
    """
    mask = float_mask if bool_mask is None else bool_mask
    args = (q, _repeat_heads(k, q), bias, mask, alibi_slopes, sinks, key_lengths, query_lengths, options)
    if len(_chunks(q, k)) == 1 and q.shape[1] > 0:  # nothing to take in parts
        return _weights(*args).mean(1).to(q.dtype)
    return autograd.apply_of(_MeanHeads, _TransformedMeanHeads)(*args).to(q.dtype)


def _weights(q, k, bias, mask, alibi_slopes, sinks, key_lengths, query_lengths, options):
    if (
        bias is mask is alibi_slopes is sinks is key_lengths is query_lengths is None
        and options[1:5] == autograd.Options(options.scale)[1:5]
    ):
        # Most steps of the reference are about hidden pairs. Here none is, and a small problem is done
        # in half the time; a row of logits that are all -inf has weights 0 as there.
        if q.dtype in arguments.HALF:
            q, k = q.float(), k.float()
        with reference.no_autocast(q):
            s = (options.scale * q) @ _repeat_heads(k, q).transpose(-2, -1)
        return torch.ops.aten._safe_softmax(s, -1)
    return reference.weights(
        q, k, mask=mask, bias=bias, alibi_slopes=alibi_slopes, sinks=sinks, key_lengths=key_lengths,
        query_lengths=query_lengths, **options.of_scores(),
    )  # fmt: skip


def _sum_of_heads(*args):
    return _weights(*args).sum(1)


class _MeanHeads(torch.autograd.Function):
    """Sums over chunks of heads, which the backward computes again; k has as many heads as q."""

    generate_vmap_rule = True

    @staticmethod
    def forward(q, k, bias, mask, alibi_slopes, sinks, key_lengths, query_lengths, options):
        batch, heads, len_q, _ = q.shape
        total = q.new_zeros((batch, len_q, k.shape[2]), dtype=torch.promote_types(q.dtype, torch.float32))
        for chunk in _chunks(q, k):
            tensors = _cut(chunk, q, k, bias, mask, alibi_slopes, sinks)
            total = total + _sum_of_heads(*tensors, key_lengths, query_lengths, options)
        return total / max(1, heads)

    @staticmethod
    def setup_context(ctx, inputs, output):
        *tensors, ctx.options = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx, grad):
        *tensors, key_lengths, query_lengths = ctx.saved_tensors
        wanted = [n for n, need in enumerate(ctx.needs_input_grad[:6]) if need]
        grads = {n: [] for n in wanted}
        for chunk in _chunks(*tensors[:2]):
            cut = _cut(chunk, *tensors)
            _, pullback = torch.func.vjp(
                lambda *variables, cut=cut: _sum_of_heads(
                    *_replace(cut, wanted, variables), key_lengths, query_lengths, ctx.options
                ),
                *(cut[n] for n in wanted),
            )
            with reference.no_autocast(grad):
                parts = pullback(grad / max(1, tensors[0].shape[1]))
            for n, g in zip(wanted, parts, strict=True):
                shared = grads[n] and not _has_heads(tensors[n], _HEAD_AXES[n])
                grads[n] = [grads[n][0] + g] if shared else [*grads[n], g]
        return tuple(torch.cat(grads[n], _HEAD_AXES[n]) if n in grads else None for n in range(9))


class _TransformedMeanHeads(_MeanHeads):
    """The same with forward mode, which Dynamo of torch 2.14 refuses in a Function."""

    @staticmethod
    def setup_context(ctx, inputs, output):
        _MeanHeads.setup_context(ctx, inputs, output)
        ctx.save_for_forward(*inputs[:8])

    @staticmethod
    def jvp(ctx, *tangents):
        *tensors, key_lengths, query_lengths = ctx.saved_tensors
        moving = [n for n, t in enumerate(tangents[:6]) if t is not None]
        total = 0
        for chunk in _chunks(*tensors[:2]):
            cut, steps = _cut(chunk, *tensors), _cut(chunk, *tangents[:6])

            def of_moving(*values, cut=cut):
                changed = _replace(cut, moving, values)
                return {"sum": _sum_of_heads(*changed, key_lengths, query_lengths, ctx.options)}

            primals, steps = [cut[n] for n in moving], [steps[n] for n in moving]
            total = total + second_order.linearized(of_moving, primals, steps)["sum"]
        return total / max(1, tensors[0].shape[1])


class _ColumnSums(torch.autograd.Function):
    """sum_i P[i][j]; k has as many heads as q, and both are float32 or float64.

    With values of one column, <g, column sums> = sum(P g) = sum(attention(q, k, v=g)). So the sums are the
    gradient of that with respect to v, and their own derivatives are its others at v = g: all of it is O(N).
    """

    @staticmethod
    def forward(
        q, k, lse_parts, bias, float_mask, bool_mask, alibi_slopes, sinks, key_lengths, query_lengths,
        block_map, block_tiles, options,
    ):  # fmt: skip
        ones, no_value = q.new_ones((*q.shape[:3], 1)), k.new_zeros((*k.shape[:3], 1))
        terms = (
            bias, float_mask, bool_mask, alibi_slopes, sinks, key_lengths, query_lengths, None, block_map,
            block_tiles,
        )  # fmt: skip
        args = (ones, None, q, k, no_value, torch.zeros_like(ones), lse_parts, 1 << 2)
        return _differentiable("attention_backward", *args, *options.with_tensors(*terms))[2].squeeze(-1)

    @staticmethod
    def setup_context(ctx, inputs, output):
        *tensors, ctx.options = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx, grad):
        q, k, lse_parts, *terms, block_map, block_tiles = ctx.saved_tensors
        v = grad[..., None]
        options = ctx.options.with_tensors(*terms, None, block_map, block_tiles)
        with torch.no_grad():  # to the backward, out and lse_parts are functions of the others
            out, _, _ = _differentiable("attention_forward", q, k, v, *options)
        needs = ctx.needs_input_grad
        # the ops' order: q, k, v, bias, float_mask, alibi_slopes, sinks
        wanted = (*needs[:2], False, *needs[3:5], *needs[6:8])
        output_mask = sum(1 << n for n, need in enumerate(wanted) if need)
        args = (torch.ones_like(out), None, q, k, v, out, lse_parts, output_mask, *options)
        grads = _differentiable("attention_backward", *args)
        grads = [g if need else None for g, need in zip(grads, wanted, strict=True)]
        return (*grads[:5], None, *grads[5:], *(None,) * 5)


class _TransformedColumnSums(_ColumnSums):
    """The same with forward mode and vmap."""

    generate_vmap_rule = True

    @staticmethod
    def setup_context(ctx, inputs, output):
        _ColumnSums.setup_context(ctx, inputs, output)
        ctx.save_for_forward(*inputs[:12])

    @staticmethod
    def jvp(ctx, *tangents):
        q, k, _, bias, float_mask, bool_mask, alibi_slopes, sinks, *lengths, block_map, block_tiles = (
            ctx.saved_tensors
        )
        problem = second_order.Problem(bool_mask, *lengths, None, block_map, block_tiles, ctx.options)
        tensors = {
            "q": q, "k": k, "v": k.new_zeros((*k.shape[:3], 1)), "bias": bias, "float_mask": float_mask,
            "alibi_slopes": alibi_slopes, "sinks": sinks, "grad_out": q.new_ones((*q.shape[:3], 1)),
        }  # fmt: skip
        names = ("q", "k", None, "bias", "float_mask", None, "alibi_slopes", "sinks")
        moving = {n: t for n, t in zip(names, tangents, strict=False) if n is not None and t is not None}
        moved = second_order.push(second_order.gradients, problem, tensors, moving, ["v"])
        return moved["v"].squeeze(-1)


def _differentiable(name, *args):
    """An op, through the Function that torch.func knows; in a backward Dynamo takes only the op itself."""
    if torch.compiler.is_compiling():
        return getattr(torch.ops.attn_ext, name)(*args)
    if name == "attention_backward":
        return autograd._AttentionBackward.apply(*args)
    return autograd.apply_of(autograd._Attention, autograd._TransformedAttention)(*args)


# Where the query heads lie in each of q, k, bias, mask, alibi_slopes, sinks.
_HEAD_AXES = (1, 1, 1, 1, -1, 0)


def _chunks(q, k):
    """Slices of the heads, at least one; each as many heads as HEAD_CHUNK_SCORES allows, at least one."""
    batch, heads, len_q, _ = q.shape
    if torch.compiler.is_compiling():
        step = max(1, math.ceil(heads / COMPILED_CHUNKS))
    else:
        step = max(1, HEAD_CHUNK_SCORES // max(1, batch * len_q * k.shape[2]))
    return [slice(start, start + step) for start in range(0, max(1, heads), step)]


def _has_heads(t, axis):
    """False for a bias or mask that all heads share."""
    return t.dim() < 4 or t.shape[axis] != 1


def _cut(heads, *tensors):
    """The part of each tensor that belongs to these heads."""
    return [
        t[(slice(None),) * (axis % t.dim()) + (heads,)] if t is not None and _has_heads(t, axis) else t
        for t, axis in zip(tensors, _HEAD_AXES, strict=True)
    ]


def _replace(tensors, positions, values):
    """The list with other values at these positions."""
    new = dict(zip(positions, values, strict=True))
    return [new.get(n, t) for n, t in enumerate(tensors)]


def _repeat_heads(k, q):
    """Keys for each query head: small beside the scores, and no head has to know its group."""
    heads, heads_kv = q.shape[1], k.shape[1]
    return k if heads == heads_kv or heads_kv == 0 else k.repeat_interleave(heads // heads_kv, 1)
