"""The functions of the package flash-attn 2.8, computed by attn_ext: the same arguments and results.

    from attn_ext.integrations.flash_attn import flash_attn_func  # was: from flash_attn import ...

Tensors are (B, N, H, D) here, (total, H, D) in the varlen functions, where :mod:`attn_ext` has (B, H, N, D).
The kernels read them through their strides, so nothing is copied, and ``out`` lies in memory as ``q`` does.

More than theirs is allowed: float32 and float64, the CPU, any head_dim, values of another head_dim, softcap
with dropout, gradients of alibi_slopes and through softmax_lse, second derivatives. Under autocast q, k and v
are cast to its dtype. docs/migrating/flash_attn.md lists each argument and each difference.

Mistakes raise TypeError or ValueError (both RuntimeErrors too), naming the argument, what it was and what is
allowed.
"""

import itertools
import operator

import torch

from .. import arguments, functional, packed, reference, weights
from .. import autograd as _autograd


def flash_attn_func(
    q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
    alibi_slopes=None, deterministic=False, return_attn_probs=False,
):  # fmt: skip
    """softmax(softmax_scale q k^T, capped, biased and masked) v.

    Args:
        q: (B, Nq, Hq, D); float16, bfloat16, float32 or float64, the same for q, k, v.
        k: (B, Nk, Hkv, D). Hq must be a multiple of Hkv: query head h uses key head h // (Hq / Hkv).
        v: (B, Nk, Hkv, Dv).
        dropout_p: probability that a weight is dropped; pass 0.0 in evaluation.
        softmax_scale: default 1 / sqrt(D).
        causal: query i sees the keys j <= i + Nk - Nq: the last query sees every key.
        window_size: (left, right): query i sees i + Nk - Nq - left <= j <= i + Nk - Nq + right; -1: no limit.
        softcap: logits become softcap * tanh(logits / softcap); 0.0: none.
        alibi_slopes: (Hq,) or (B, Hq): -slope * |i + Nk - Nq - j| is added to the logits.
        deterministic: gradients with the same bits each time; on the CPU they always have.
        return_attn_probs: also return softmax_lse and S_dmask.

    Returns:
        out (B, Nq, Hq, Dv) in q's dtype, or with return_attn_probs the tuple of

        - out;
        - softmax_lse (B, Hq, Nq): the log-sum-exp of each row's logits (natural log), float32, float64 for
          float64; differentiable. A row that sees no key has -inf (flash-attn: +inf), and 0 in out;
        - S_dmask: with dropout the probabilities (B, Hq, Nq, Nk) in q's dtype, those dropped with a negative
          sign (-0.0 too), the others as before their scaling by 1 / (1 - dropout_p); without gradient, in
          O(Nq Nk) memory, for tests. Without dropout a tensor of 0 elements, as flash-attn returns.
    """
    _check_tensors(q, k, v, 4)
    options = _options(
        q, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )
    return _attention(q, k, v, dropout_p, return_attn_probs, options)


def flash_attn_qkvpacked_func(
    qkv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
    alibi_slopes=None, deterministic=False, return_attn_probs=False,
):  # fmt: skip
    """:func:`flash_attn_func` of qkv (B, N, 3, H, D).

    The parts are read where they lie; the gradient of qkv is put together by one copy.
    """
    q, k, v = _parts("qkv", qkv, 3, ("batch", "length"))
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs,
    )  # fmt: skip


def flash_attn_kvpacked_func(
    q, kv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
    alibi_slopes=None, deterministic=False, return_attn_probs=False,
):  # fmt: skip
    """:func:`flash_attn_func` of q (B, Nq, Hq, D) and kv (B, Nk, 2, Hkv, D).

    The parts are read where they lie; the gradient of kv is put together by one copy.
    """
    k, v = _parts("kv", kv, 2, ("batch", "length"))
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None,
    causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False,
    return_attn_probs=False, block_table=None,
):  # fmt: skip
    """:func:`flash_attn_func` of each of B sequences that lie one after the other.

    Sequence b has the queries cu_seqlens_q[b] ... cu_seqlens_q[b + 1] - 1 and the keys likewise; its own
    lengths take the place of Nq and Nk, so causal and window_size are aligned sequence by sequence.

    Args:
        q: (total_q, Hq, D). k: (total_k, Hkv, D). v: (total_k, Hkv, Dv).
        cu_seqlens_q, cu_seqlens_k: (B + 1,) int32: 0, then the sums of the lengths.
        max_seqlen_q, max_seqlen_k: integers, at least the longest length.
        block_table: must be None.

    Returns:
        out (total_q, Hq, Dv), or with return_attn_probs the tuple of out, softmax_lse (Hq, total_q) and, with
        dropout, S_dmask (B, Hq, max_seqlen_q, max_seqlen_k), 0 beyond a sequence's lengths. Rows after
        cu_seqlens_q[-1] belong to no sequence: 0 in out and in all gradients, and LSE -inf.

    **What it costs**: one call of the kernels a sequence, one after the other. Nothing is padded, and the
    work is that of the pairs within sequences; but each call costs some 0.1 ms of Python, which sequences of
    a few dozen tokens will notice, and one sequence may not fill a GPU. cu_seqlens on a GPU are read, which
    waits for it, so a CUDA graph cannot hold it: tensors on the CPU are taken too, and spare the wait.

    torch.compile keeps one step of all sequences, whatever their lengths (torch.ops.attn_ext.packed_forward).
    Its mistakes in cu_seqlens are found when it runs, it has no second derivatives, and it breaks the graph
    where max_seqlen is a tensor, and for return_attn_probs with dropout.

    Raises:
        NotImplementedError: for a block_table.
    """
    if block_table is not None:
        raise NotImplementedError(
            "flash_attn_varlen_func does not take a block_table (pages of a key-value cache) yet: gather "
            "each sequence's pages into k and v, and leave block_table out"
        )
    _check_tensors(q, k, v, 3)
    options = _options(
        q, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )
    longest_q = _longest("q", cu_seqlens_q, max_seqlen_q)
    longest_k = _longest("k", cu_seqlens_k, max_seqlen_k)
    batch = cu_seqlens_q.shape[0] - 1
    if batch != cu_seqlens_k.shape[0] - 1:
        raise arguments.ArgumentValueError(
            "cu_seqlens_q and cu_seqlens_k must be for the same number of sequences, "
            f"got {batch} and {cu_seqlens_k.shape[0] - 1}"
        )
    q, k, v, _ = arguments.qkv(q, k, v)
    # Checked as sequences that are as long as all of them.
    *_, terms, rng_state, options = _resolve(
        *(packed.heads(t).expand(batch, -1, -1, -1) for t in (q, k, v)), dropout_p, options
    )
    slopes = terms[3]
    if slopes is not None:
        slopes = slopes.expand(batch, -1)
    if torch.compiler.is_compiling() and not (return_attn_probs and rng_state is not None):
        torch._C._functorch.maybe_current_level()  # see autograd.attention: no graph under torch.func.grad
        out, lse, _ = packed.packed_forward(
            q, k, v, cu_seqlens_q, cu_seqlens_k, longest_q, longest_k, *options, slopes, rng_state
        )
        return (out, lse, q.new_empty(0)) if return_attn_probs else out
    ends_q = packed.ends("q", cu_seqlens_q, longest_q, q.shape[0])
    ends_k = packed.ends("k", cu_seqlens_k, longest_k, k.shape[0])
    # The queries left over are a sequence without keys: out 0, gradients 0, LSE -inf.
    lengths_q = [end - start for start, end in itertools.pairwise([*ends_q, q.shape[0]])]
    lengths_k = [end - start for start, end in itertools.pairwise([*ends_k, ends_k[-1], k.shape[0]])]
    parts = [q.split(lengths_q), *(t.split(lengths_k)[:-1] for t in (k, v))]
    slopes = [None] * (batch + 1) if slopes is None else [*slopes.unbind(), None]
    results = [
        _results(*(packed.heads(t) for t in qkv), (None, None, None, slope, None, None, None), state, options,
                 return_attn_probs)
        for *qkv, slope, state in zip(*parts, slopes, packed.rng_states(rng_state, batch + 1), strict=True)
    ]  # fmt: skip
    if not return_attn_probs:
        return torch.cat([out[0] for out in results])
    out, lse, patterns = zip(*results, strict=True)
    pattern = patterns[0]
    if pattern.dim() == 4:  # there is dropout
        pattern = pattern.new_zeros((batch, q.shape[1], longest_q, longest_k))
        for padded, (part,) in zip(pattern, patterns[:-1], strict=True):
            padded[:, : part.shape[1], : part.shape[2]] = part
    return torch.cat([x[0] for x in out]), torch.cat([x[0] for x in lse], 1), pattern


def flash_attn_varlen_qkvpacked_func(
    qkv, cu_seqlens, max_seqlen, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1),
    softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False,
):  # fmt: skip
    """:func:`flash_attn_varlen_func` of qkv (total, 3, H, D)."""
    q, k, v = _parts("qkv", qkv, 3, ("total length",))
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale, causal,
        window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_kvpacked_func(
    q, kv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None,
    causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False,
    return_attn_probs=False,
):  # fmt: skip
    """:func:`flash_attn_varlen_func` of q (total_q, Hq, D) and kv (total_k, 2, Hkv, D)."""
    k, v = _parts("kv", kv, 2, ("total length",))
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
        window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_with_kvcache(
    q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
    cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0,
    return_softmax_lse=False,
):  # fmt: skip
    """Not there yet: it raises NotImplementedError, which says how to write the same with a cache at hand."""
    raise NotImplementedError(
        "flash_attn_with_kvcache is not implemented by attn_ext yet (it writes k and v into the cache, "
        "rotates and attends in one). Write k and v into the cache in your code, then call "
        "flash_attn_func(q, k_cache[:, :n], v_cache[:, :n], causal=True), where n is the length that "
        "includes them. For samples of different lengths and one query each: attn_ext.attention("
        "q.transpose(1, 2), k_cache.transpose(1, 2), v_cache.transpose(1, 2), key_lengths=lengths"
        ").transpose(1, 2)"
    )


def _attention(q, k, v, dropout_p, return_attn_probs, options):
    """out, or (out, lse, S_dmask), of (B, N, H, D)."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    if not return_attn_probs:
        return functional.attention(q, k, v, dropout_p=dropout_p, **options).transpose(1, 2)
    return _results(*_resolve(q, k, v, dropout_p, options), True)


def _resolve(q, k, v, dropout_p, options):
    """What :func:`functional.resolve` makes of (B, H, N, D) and of :func:`_options`."""
    options = {name: value for name, value in options.items() if name != "deterministic"}
    return functional.resolve(q, k, v, dropout_p=dropout_p, **options)


def _results(q, k, v, terms, rng_state, options, return_attn_probs):
    """out (B, N, H, D), or (out, lse, S_dmask), of canonical arguments (B, H, N, D)."""
    out, lse, _ = _autograd.attention(q, k, v, *terms, rng_state, options)
    out = out.transpose(1, 2)
    if not return_attn_probs:
        return out
    if rng_state is None:
        return out, lse, q.new_empty(0)
    with torch.no_grad():
        p = weights.full(q, k, *terms, options)
        p = torch.where(reference.dropout_keep(rng_state, options.dropout_p, *p.shape), p, -p)
    return out, lse, p


def _options(q, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs):
    """Keyword arguments of attn_ext.attention, checked where their names or meanings differ."""
    flags = {"causal": causal, "deterministic": deterministic, "return_attn_probs": return_attn_probs}
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise arguments.ArgumentTypeError(f"{name} must be True or False, got {flag!r}")
    sides = arguments.window_sides(window_size, "window_size")
    return {
        "causal": causal,
        "window": None if sides == (-1, -1) else sides,
        "scale": arguments.scale_factor(softmax_scale, q.shape[-1], "softmax_scale"),
        "softcap": None if isinstance(softcap, (float, int)) and softcap == 0 else softcap,
        "alibi_slopes": alibi_slopes,
        "deterministic": deterministic,
    }


def _check_tensors(q, k, v, dims):
    """Shapes, in the words of this layout; attn_ext.attention checks the rest."""
    for name, t in (("q", q), ("k", k), ("v", v)):
        arguments.check_tensor(name, t)
    if q.dim() == k.dim() == v.dim() == dims:
        heads, heads_kv = q.shape[-2], k.shape[-2]
        if (
            (dims == 3 or q.shape[0] == k.shape[0])
            and q.shape[-1] == k.shape[-1]
            and k.shape[:-1] == v.shape[:-1]
            and (heads == heads_kv or (heads_kv and heads % heads_kv == 0))
        ):
            return
    axes = "(batch, length, heads, head_dim)" if dims == 4 else "(total length, heads, head_dim)"
    raise arguments.ArgumentValueError(
        f"q, k and v must be {axes}{', all of one batch size' * (dims == 4)}; q and k of one head_dim; k and "
        "v of one length and number of heads; q's number of heads a multiple of k's. "
        f"Got q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    )


def _parts(name, packed, count, axes):
    """The ``count`` tensors that a packed one holds on its axis before heads and head_dim."""
    arguments.check_tensor(name, packed)
    if packed.dim() != len(axes) + 3 or packed.shape[-3] != count:
        raise arguments.ArgumentValueError(
            f"{name} must be ({', '.join(axes)}, {count}, heads, head_dim), got {tuple(packed.shape)}"
        )
    return packed.unbind(-3)


def _longest(what, cu_seqlens, longest):
    """max_seqlen as an int; cu_seqlens is checked as far as that needs none of its values."""
    name = f"cu_seqlens_{what}"
    arguments.check_tensor(name, cu_seqlens)
    if cu_seqlens.dtype != torch.int32:
        raise arguments.ArgumentTypeError(f"{name} must be int32, got {cu_seqlens.dtype}")
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] == 0:
        raise arguments.ArgumentValueError(
            f"{name} must have shape (sequences + 1,), got {tuple(cu_seqlens.shape)}"
        )
    if isinstance(longest, int):  # operator.index would fix its value in compiled code
        return longest
    try:
        return operator.index(longest)
    except TypeError:
        raise arguments.ArgumentTypeError(f"max_seqlen_{what} must be an integer, got {longest!r}") from None
