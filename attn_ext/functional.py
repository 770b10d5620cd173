"""The functions people call: arguments are resolved and checked here, the fused ops compute."""

import math

import torch

from . import arguments, kernel_weights, weights
from . import autograd as _autograd
from .masks import BlockMask

RETURN_WEIGHTS = (None, "full", "mean_heads", "colsum")


def attention(
    q,
    k,
    v,
    *,
    mask=None,
    bias=None,
    causal=False,
    window=None,
    block_mask=None,
    scale=None,
    softcap=None,
    alibi_slopes=None,
    sinks=None,
    key_lengths=None,
    query_lengths=None,
    dropout_p=0.0,
    generator=None,
    return_lse=False,
    return_weights=None,
    deterministic=None,
):
    r"""Exact attention in fused kernels, O(N) memory: softmax(scale q k^T, capped, biased and masked) v.

        s   = scale * (q . k); softcap * tanh(s / softcap); + bias + mask - slope * |i + Nk - Nq - j|
        out = dropout(softmax(s over the keys that query i may see)) v

    :mod:`attn_ext.reference` is the same in plain PyTorch, and decides what every option means.

    Args:
        q: (B, Hq, Nq, D); float64, float32, bfloat16 or float16, the same for q, k, v. Any strides; a last
            dimension that is not contiguous costs a copy. float32 is computed in float32, but on a GPU, where
            torch's switch allows it at the time of the call, with products in TF32, forward and backward
            (``torch.backends.cuda.matmul.allow_tf32``, ``torch.set_float32_matmul_precision("high")``).
        k: (B, Hkv, Nk, D). Hq must be a multiple of Hkv: query head h uses key head h // (Hq / Hkv).
        v: (B, Hkv, Nk, Dv).
        mask: broadcasts to (B, Hq, Nq, Nk), read through its strides. bool: True = may attend. Floating:
            added to the logits; -inf masks.
        bias: the same, floating only. Both may be given; both have gradients, in their own shape. Floating
            terms have q's dtype or are float32.
        causal: True or "lower_right": key j is visible to query i if j <= i + Nk - Nq, so the last query sees
            every key. "upper_left": if j <= i.
        window: (left, right): i + offset - left <= j <= i + offset + right, with the offset of ``causal``
            (Nk - Nq also without it). None or -1 leaves a side open. W keys up to the diagonal: (W - 1, 0).
        block_mask: :class:`attn_ext.masks.BlockMask`: a sparse pattern (sliding window, global tokens, packed
            documents, any predicate), of which hidden blocks cost nothing. Together with all other rules.
        scale: finite; default 1 / sqrt(D).
        softcap: > 0, see above; None: none.
        alibi_slopes: (Hq,) or (B, Hq).
        sinks: (Hq,): a logit in each row's denominator that no key stands for.
        key_lengths: B integers (tensor or list): sample b has keys 0 ... key_lengths[b] - 1; its other keys
            and values are never read. Lengths do not move the diagonal.
        query_lengths: the same for queries.
        dropout_p: probability that a weight is dropped, in [0, 1] and in 16 bits; kept ones are scaled by
            1 / (1 - p). It is applied always: there is no training flag here.
        generator: where the dropout seed is drawn; default: torch's generator of q's device.
        return_lse: also return the log-sum-exp of s (natural log), (B, Hq, Nq) float32, float64 for float64.
        return_weights: also return the probabilities, before dropout: "full" (B, Hq, Nq, Nk); "mean_heads"
            (B, Nq, Nk), their mean over heads, a few heads in memory at a time; "colsum" (B, Hq, Nk), what
            each key received in all, float32 or float64, in O(N) memory. Rows sum to 1, with sinks to less.
        deterministic: whether the backward must give the same bits each time. On the CPU it always does.

    Returns:
        out (B, Hq, Nq, Dv) in q's dtype (autocast's, under autocast), its axes in memory in the order of q's;
        a tuple (out, lse), (out, weights) or (out, lse, weights) with return_lse and return_weights. All are
        differentiable.

    A query that sees no key gets out 0, LSE -inf (with sinks: its sink), weights 0 and gradients 0. What
    stands in a masked key does not matter. A masked value v counts with weight 0, so NaN there may give NaN
    (the kernels skip tiles that causal, window, lengths or a block mask hide as a whole); keep masked values
    finite.

    Raises:
        TypeError, ValueError: naming the argument, what it was and what it may be.

    Sources: Vaswani et al. 2017 (arXiv 1706.03762, section 3.2.1); tiling: Dao 2023 (arXiv 2307.08691, 3.1).
    """
    if return_weights is not None and not (
        isinstance(return_weights, str) and return_weights in RETURN_WEIGHTS
    ):
        raise arguments.ArgumentValueError(
            f"return_weights must be one of {RETURN_WEIGHTS}, got {return_weights!r}"
        )
    if deterministic is not None and not isinstance(deterministic, bool):
        raise arguments.ArgumentValueError(
            f"deterministic must be None, True or False, got {deterministic!r}"
        )
    if (
        mask is bias is window is block_mask is softcap is alibi_slopes is sinks is None
        and key_lengths is query_lengths is None
        and generator is None
        and not return_lse
        and return_weights != "colsum"
        and _is_zero(dropout_p)
    ):
        args = (q, k, v, scale, arguments.alignment(causal))
        if return_weights is None:
            result = _plain(*args, True)
        else:
            result = kernel_weights.plain_attention(return_weights, *args)
        if result is not None:
            return result
    q, k, v, terms, rng_state, options = resolve(
        q, k, v, mask=mask, bias=bias, causal=causal, window=window, scale=scale, softcap=softcap,
        alibi_slopes=alibi_slopes, sinks=sinks, key_lengths=key_lengths, query_lengths=query_lengths,
        dropout_p=dropout_p, generator=generator,
    )  # fmt: skip
    blocks = blocks_of(block_mask, q, k.shape[2])
    if return_weights in ("full", "mean_heads") and kernel_weights.covers(q, terms):
        out, lse, p = kernel_weights.attention(return_weights, q, k, v, terms, rng_state, block_mask, options)
        return (out, lse, p) if return_lse else (out, p)
    out, lse, lse_parts = _autograd.attention(q, k, v, *terms, rng_state, options, *blocks)
    if return_weights is None:
        return (out, lse) if return_lse else out
    if return_weights == "colsum":
        p = weights.column_sums(q, k, lse_parts, *terms, *blocks, options)
    else:
        p = weights.by_formula(return_weights, q, k, terms, block_mask, options)
    return (out, lse, p) if return_lse else (out, p)


def scaled_dot_product_attention(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False
):
    """A drop-in for `torch.nn.functional.scaled_dot_product_attention`; in attn_mask, True = may attend.

    Args:
        query: (..., Hq, L, E), any number of batch dimensions, also none: (H, L, E) and (L, E).
        key: (..., H, S, E).
        value: (..., H, S, Ev). Batch dimensions broadcast, and so do heads, as in torch.
        attn_mask: broadcasts to (..., Hq, L, S). bool: True = may attend (nn.MultiheadAttention's masks mean
            the opposite). float32 or query's dtype: added to the logits, may require grad. Also a
            `torch.nn.attention.bias.CausalBias`.
        dropout_p: applied always, as in torch: pass 0.0 in evaluation.
        is_causal: query i sees keys j <= i (upper left). Together with attn_mask it is an error, as in torch.
        scale: default 1 / sqrt(E).
        enable_gqa: Hq may be a multiple of the heads of key and of value.

    Returns:
        (..., Hq, L, Ev) in query's dtype, its axes in memory in the order of query's.

    Unlike torch, a key and a value of different length are refused, and so is a scale that is not finite.

    Raises:
        TypeError, ValueError: both are RuntimeErrors too, the class that torch raises.
    """
    if (
        attn_mask is None
        and isinstance(is_causal, bool)
        and _is_zero(dropout_p)
        and (out := _plain(query, key, value, scale, int(is_causal), enable_gqa)) is not None
    ):
        return out
    query, key, value, autocast = arguments.qkv(query, key, value, ("query", "key", "value"))
    if not isinstance(is_causal, bool):
        raise arguments.ArgumentTypeError(f"is_causal must be a bool, got {is_causal!r}")
    if attn_mask is not None and is_causal:
        raise arguments.ArgumentValueError(
            "attn_mask must be None when is_causal=True: put the causal mask into attn_mask, or use "
            "attn_ext.attention(mask=..., causal='upper_left'), which takes both"
        )
    causal = arguments.causal_bias(attn_mask, query, key)
    if causal is None:
        causal = 1 if is_causal else 0
    else:
        attn_mask = None
    q, k, v, mask, shape = arguments.sdpa_shapes(query, key, value, attn_mask, enable_gqa)
    if isinstance(scale, torch.Tensor) and not scale.requires_grad:
        scale = scale.item()  # torch takes such tensors
    terms, options = _resolve(
        q, k, autocast, mask, None, None, None, None, None, causal, None, scale, None, dropout_p,
        mask_name="attn_mask",
    )  # fmt: skip
    out, _, _ = _autograd.attention(
        q, k, v, *terms, arguments.rng_state(options.dropout_p, None, q.device), options
    )
    return out if shape is None else out.reshape(shape)


def merge_attention(out1, lse1, out2, lse2):
    """Join two attentions of the same queries over two disjoint sets of keys: ``(out, lse)`` over both sets.

        lse = log(exp(lse1) + exp(lse2)),  out = exp(lse1 - lse) out1 + exp(lse2 - lse) out2

    Args:
        out1, out2: (..., N, Dv), of one shape and dtype.
        lse1, lse2: (..., N): their log-sum-exps as :func:`attention` returns them, float32, or float64 for
            float64.

    Exact up to rounding, differentiable in all four. A part that saw no key (LSE -inf) has no influence,
    whatever stands in its out; where neither saw one, out is 0 and LSE -inf, without NaN in the gradients.
    Sinks belong into one of the parts only.
    """
    for name, t in (("out1", out1), ("lse1", lse1), ("out2", out2), ("lse2", lse2)):
        arguments.check_tensor(name, t)
    if out1.shape != out2.shape or lse1.shape != lse2.shape or lse1.shape != out1.shape[:-1]:
        raise arguments.ArgumentValueError(
            "out1 and out2 must be (..., N, Dv) of one shape, lse1 and lse2 (..., N), got "
            f"{tuple(out1.shape)}, {tuple(out2.shape)}, {tuple(lse1.shape)} and {tuple(lse2.shape)}"
        )
    if not out1.device == lse1.device == out2.device == lse2.device:
        raise arguments.ArgumentTypeError(
            "out1, lse1, out2 and lse2 must be on the same device, got "
            f"{out1.device}, {lse1.device}, {out2.device} and {lse2.device}"
        )
    lse_dtype = torch.float64 if out1.dtype == torch.float64 else torch.float32
    if (
        out1.dtype not in arguments.DTYPES
        or out1.dtype != out2.dtype
        or not lse1.dtype == lse2.dtype == lse_dtype
    ):
        raise arguments.ArgumentTypeError(
            "out1 and out2 must have one dtype, a floating one, lse1 and lse2 be both float32 or both "
            "float64 (for float64), got "
            f"{out1.dtype}, {out2.dtype}, {lse1.dtype} and {lse2.dtype}"
        )
    # The shift cancels, so it is a constant to the derivative; finite, so that -inf - shift is never NaN.
    shift = torch.maximum(lse1, lse2).detach().clamp_min(torch.finfo(lse1.dtype).min)
    e1, e2 = torch.exp(lse1 - shift), torch.exp(lse2 - shift)
    empty = (e1 + e2) == 0
    total = (e1 + e2).masked_fill(empty, 1.0)
    lse = (shift + torch.log(total)).masked_fill(empty, -math.inf)
    parts = [
        (e / total)[..., None] * out.to(lse.dtype).masked_fill((part == -math.inf)[..., None], 0.0)
        for e, out, part in ((e1, out1, lse1), (e2, out2, lse2))
    ]
    return (parts[0] + parts[1]).to(out1.dtype), lse


def resolve(
    q, k, v, *, mask=None, bias=None, causal=False, window=None, scale=None, softcap=None, alibi_slopes=None,
    sinks=None, key_lengths=None, query_lengths=None, dropout_p=0.0, generator=None,
):  # fmt: skip
    """Check arguments of :func:`attention`: q, k, v, the optional tensors, rng_state, Options for the ops."""
    q, k, v, autocast = arguments.qkv(q, k, v)
    arguments.check_shapes(q, k, v)
    terms, options = _resolve(
        q, k, autocast, mask, bias, alibi_slopes, sinks, key_lengths, query_lengths,
        arguments.alignment(causal), window, scale, softcap, dropout_p,
    )  # fmt: skip
    return q, k, v, terms, arguments.rng_state(options.dropout_p, generator, q.device), options


def blocks_of(block_mask, q, len_k):
    """The map and the tiles of a :class:`attn_ext.masks.BlockMask` that fits q; (None, None) for None."""
    if block_mask is None:
        return None, None
    if not isinstance(block_mask, BlockMask):
        hint = ""
        if type(block_mask).__module__.startswith("torch.nn.attention"):
            hint = (
                " (attn_ext.masks.BlockMask.from_predicate takes the mask_mod that torch's was made from: "
                "block_mask.mask_mod)"
            )
        elif isinstance(block_mask, torch.Tensor):
            hint = " (a tensor goes into mask=, or through BlockMask.from_dense)"
        raise arguments.ArgumentTypeError(
            f"block_mask must be an attn_ext.masks.BlockMask, got {type(block_mask).__name__}{hint}"
        )
    full = (*q.shape[:3], len_k)
    if not (arguments.broadcasts_to(block_mask.shape[:2], full[:2]) and block_mask.shape[2:] == full[2:]):
        raise arguments.ArgumentValueError(
            "block_mask must be made for (batch or 1, query heads or 1, query length, key length) = "
            f"{tuple(full)}, got one for {tuple(block_mask.shape)}"
        )
    arguments.same_device("block_mask", block_mask, q)
    return block_mask.map, block_mask.tiles


def _plain(q, k, v, scale, causal, gqa):
    """out of q, k, v and no other term, or None where they need a closer look.

    The checks of all arguments would take as long as the attention of a dozen positions. The op refuses by
    itself what does not fit, in fewer words; then, too, the answer is None, and the checks find the words.
    """
    if not _autograd.is_plain(q, k, v) or not (gqa or (k.dim() == 4 and k.size(1) == q.size(1))):
        return None  # to broadcast heads is not the op's; nor are batches, but those it refuses
    try:
        return _autograd.plain_attention(q, k, v, arguments.scale_factor(scale, q.size(3)), causal)
    except RuntimeError:
        return None


def _is_zero(dropout_p):
    return isinstance(dropout_p, (float, int)) and dropout_p == 0


def _resolve(
    q, k, autocast, mask, bias, alibi_slopes, sinks, key_lengths, query_lengths, causal, window, scale,
    softcap, dropout_p, mask_name="mask",
):  # fmt: skip
    """Check what the user passed; return the seven optional tensors in the ops' order, and the Options."""
    len_k = k.shape[2]
    float_mask = bool_mask = None
    if mask is not None:
        mask = arguments.score_term(mask_name, mask, q, len_k, autocast, bool_allowed=True)
        if mask.dtype == torch.bool:
            arguments.warn_if_all_hidden(mask_name, mask)
            bool_mask = mask
        else:
            float_mask = mask
    if bias is not None:
        bias = arguments.score_term("bias", bias, q, len_k, autocast)
    if alibi_slopes is not None:
        alibi_slopes = arguments.per_head("alibi_slopes", alibi_slopes, q, autocast, batch_allowed=True)
    if sinks is not None:
        sinks = arguments.per_head("sinks", sinks, q, autocast)
    if key_lengths is not None:
        key_lengths = arguments.lengths("key_lengths", key_lengths, q, len_k, "key length")
    if query_lengths is not None:
        query_lengths = arguments.lengths("query_lengths", query_lengths, q, q.shape[2], "query length")
    options = _autograd.Options(
        arguments.scale_factor(scale, q.shape[3]),
        causal,
        arguments.cap(softcap),
        *arguments.window_sides(window),
        arguments.probability(dropout_p),
        arguments.allows_tf32(q),
    )
    return (bias, float_mask, bool_mask, alibi_slopes, sinks, key_lengths, query_lengths), options
