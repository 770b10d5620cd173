"""Attention in plain PyTorch: what every kernel, every option and every page of the documentation means.

    s   = scale * q k^T                                      logits            (B, Hq, Nq, Nk)
    s   = softcap * tanh(s / softcap)                        soft-capping
    s   = s + bias + mask - slope * |i + Nk - Nq - j|        additive terms (mask: when it is a float mask)
    s   = -inf where query i may not see key j               visibility
    lse = log(exp(sink) + sum_j exp(s))                      row normaliser    (B, Hq, Nq)
    p   = exp(s - lse)                                       weights           (B, Hq, Nq, Nk)
    out = dropout(p) v                                       output            (B, Hq, Nq, Dv)

It holds the Nq x Nk matrix, computes in float32 (float64 for float64 inputs) and can be differentiated any
number of times, in forward and reverse mode. A query that sees no key has out = 0 and lse = -inf (or its
sink), and none of its derivatives is NaN. What the logits of hidden pairs would have been never matters, nor
do keys that no query sees.

Sources: softmax attention, Vaswani et al. 2017 (section 3.2.1); soft-capping, Gemma 2 2024 (section 2);
ALiBi, Press et al. 2021 (section 3); sinks, gpt-oss 2025; Philox 4x32-10, Salmon et al. 2011 (section 3.3).
"""

import contextlib
import math

import torch


def attention(
    q, k, v, *, mask=None, bias=None, causal=False, window=None, scale=None, softcap=None, alibi_slopes=None,
    sinks=None, key_lengths=None, query_lengths=None, block_mask=None, dropout_p=0.0, rng_state=None,
    corner=(0, 0, 0), of_queries=None,
):  # fmt: skip
    """Return ``(out, lse)``: out (B, Hq, Nq, Dv) in q's dtype, lse (B, Hq, Nq) in float32 or float64 as q is.

    q (B, Hq, Nq, D), k (B, Hkv, Nk, D), v (B, Hkv, Nk, Dv); the options are those of
    :func:`attn_ext.attention`, except that the dropout mask is a function of ``rng_state``, an int64 tensor
    (seed, offset).

    All tensors may be the part of a larger problem, with all its keys: its batch elements, query heads and
    queries from ``corner`` on, out of ``of_queries`` queries.
    """
    part = {"first_query": corner[2], "of_queries": of_queries}
    visible = visibility(
        q.shape[-2], k.shape[-2], mask=mask, bias=bias, causal=causal, window=window,
        key_lengths=key_lengths, query_lengths=query_lengths, block_mask=block_mask, device=q.device, **part,
    )  # fmt: skip
    s = scores(
        q, k, visible, mask=mask, bias=bias, scale=scale, softcap=softcap, alibi_slopes=alibi_slopes, **part
    )  # fmt: skip
    p, lse = softmax(s, sinks)
    if dropout_p > 0:
        threshold = round(dropout_p * 65536)  # the probability in 16 bits, ties to even
        keep = dropout_keep(rng_state, dropout_p, *p.shape, corner=corner)
        p = torch.where(keep, p * (65536 / (65536 - threshold) if threshold < 65536 else 0.0), 0.0)

    v = _repeat_heads(v.to(p.dtype), q.shape[1])
    if key_lengths is not None:  # values past the length are storage, not data
        beyond = torch.arange(k.shape[-2], device=q.device) >= _column(key_lengths, q.device)[:, :, 0]
        v = v.masked_fill(beyond[..., None], 0.0)
    with no_autocast(q):
        out = p @ v
    empty = (s == -math.inf).all(-1, keepdim=True)
    return out.masked_fill(empty, 0.0).to(q.dtype), lse


def weights(
    q, k, *, mask=None, bias=None, causal=False, window=None, scale=None, softcap=None, alibi_slopes=None,
    sinks=None, key_lengths=None, query_lengths=None, block_mask=None,
):  # fmt: skip
    """The probabilities p (B, Hq, Nq, Nk) before dropout, in float32 or float64; options as in attention."""
    visible = visibility(
        q.shape[-2], k.shape[-2], mask=mask, bias=bias, causal=causal, window=window,
        key_lengths=key_lengths, query_lengths=query_lengths, block_mask=block_mask, device=q.device,
    )  # fmt: skip
    s = scores(q, k, visible, mask=mask, bias=bias, scale=scale, softcap=softcap, alibi_slopes=alibi_slopes)
    return softmax(s, sinks)[0]


def visibility(
    num_queries, num_keys, *, mask=None, bias=None, causal=False, window=None, key_lengths=None,
    query_lengths=None, block_mask=None, device=None, first_query=0, of_queries=None,
):  # fmt: skip
    """Which query may see which key: bool, broadcasts to (B, Hq, Nq, Nk). Every rule must allow a pair.

    mask: bool (True = may attend) or float (-inf hides, as it does in bias). causal: False, "upper_left"
    (j <= i) or "lower_right" = True (j <= i + Nk - Nq). window (left, right): i + offset - left <= j <=
    i + offset + right, where None and -1 are open and offset is 0 for "upper_left", else Nk - Nq.
    key_lengths, query_lengths (B,): j < key_length, i < query_length. block_mask: a
    :class:`attn_ext.masks.BlockMask`. The queries are those from first_query on of of_queries; None: all
    there are.
    """
    if not isinstance(causal, bool) and causal not in ("upper_left", "lower_right"):
        raise ValueError(f"causal must be False, True, 'upper_left' or 'lower_right', got {causal!r}")
    i = _queries(num_queries, first_query, device)
    j = torch.arange(num_keys, device=device)
    of_queries = num_queries if of_queries is None else of_queries
    diagonal = i if causal == "upper_left" else i + num_keys - of_queries
    visible = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device)
    if causal:
        visible = visible & (j <= diagonal)
    if window is not None:
        left, right = (None if side == -1 else side for side in window)
        reach = of_queries + num_keys  # nothing lies farther away, and a sum with sys.maxsize would wrap
        if left is not None:
            visible = visible & (j >= diagonal - min(left, reach))
        if right is not None:
            visible = visible & (j <= diagonal + min(right, reach))
    if key_lengths is not None:
        visible = visible & (j < _column(key_lengths, device))
    if query_lengths is not None:
        visible = visible & (i < _column(query_lengths, device))
    if block_mask is not None:
        if (block_mask.len_q, block_mask.len_k) != (of_queries, num_keys):
            raise ValueError(
                f"block_mask must be made for {of_queries} queries and {num_keys} keys, got one for "
                f"{block_mask.len_q} and {block_mask.len_k}"
            )
        visible = visible & block_mask.to_dense(first_query, num_queries)
    if mask is not None:
        visible = visible & (mask if mask.dtype == torch.bool else mask != -math.inf)
    if bias is not None:
        visible = visible & (bias != -math.inf)
    return visible


def scores(
    q, k, visible, *, mask=None, bias=None, scale=None, softcap=None, alibi_slopes=None, first_query=0,
    of_queries=None,
):  # fmt: skip
    """The logits s (B, Hq, Nq, Nk), -inf where ``visible`` (from :func:`visibility`) is False.

    k has Hkv heads, of which each serves Hq / Hkv consecutive query heads. softcap: None or 0 = off.
    first_query and of_queries as in :func:`visibility`.
    """
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    head_dim = q.shape[-1]
    if scale is None:
        scale = 1 / math.sqrt(head_dim) if head_dim > 0 else 1.0
    # 0 * NaN = NaN in the products of the backward pass, so queries and keys without a partner are blanked.
    # Hidden pairs are blanked before softcap, because the derivative of tanh at NaN would undo the final
    # masked_fill.
    q = q.to(dtype).masked_fill(~visible.any(-1)[..., None], 0.0)
    k = _repeat_heads(k.to(dtype), q.shape[1]).masked_fill(~visible.any(-2)[..., None], 0.0)
    with no_autocast(q):
        s = (scale * (q @ k.transpose(-2, -1))).masked_fill(~visible, 0.0)
    if softcap and softcap <= torch.finfo(dtype).max:  # a larger cap changes nothing, but 0 * inf would
        s = softcap * torch.tanh(s / softcap)
    if bias is not None:
        s = s + bias.to(dtype)
    if mask is not None and mask.dtype != torch.bool:
        s = s + mask.to(dtype)
    if alibi_slopes is not None:  # (Hq,) or (B, Hq)
        num_queries, num_keys = s.shape[-2:]
        i = _queries(num_queries, first_query, q.device)
        j = torch.arange(num_keys, device=q.device)
        offset = num_keys - (num_queries if of_queries is None else of_queries)
        s = s - alibi_slopes.to(dtype)[..., None, None] * (i + offset - j).abs()
    return s.masked_fill(~visible, -math.inf)


def softmax(s, sinks=None):
    """Return ``(p, lse)``: weights (B, Hq, Nq, Nk) and log-sum-exp (B, Hq, Nq) of the rows of s.

    sinks (Hq,) adds one logit to each row, which takes its share of the sum but has no key. A row of which
    every logit is -inf has p = 0 and lse = -inf.
    """
    sink = s.new_full((), -math.inf) if sinks is None else sinks.to(s.dtype)[:, None, None]
    logits = torch.cat([s, sink.expand(*s.shape[:-1], 1)], -1)
    # The shift cancels, so it is a constant to the derivative. Its lower bound keeps -inf - (-inf) out of
    # empty rows.
    shift = logits.detach().amax(-1, keepdim=True).clamp_min(torch.finfo(s.dtype).min)
    e = torch.exp(logits - shift)
    total = e.sum(-1, keepdim=True)
    empty = total == 0
    total = total.masked_fill(empty, 1.0)
    lse = (shift + torch.log(total)).masked_fill(empty, -math.inf)
    return (e / total)[..., :-1], lse[..., 0]


def dropout_keep(rng_state, p, B, H, Nq, Nk, *, corner=(0, 0, 0)):
    """Which weights survive dropout with probability p: bool (B, H, Nq, Nk), fixed by place and rng_state.

    rng_state int64 (2,): (seed, offset). One Philox 4x32-10 call, with counter (j // 8, i, h, b) and key
    seed + offset * 0x9E3779B97F4A7C15, gives eight 16-bit numbers, one for each key from j // 8 * 8 on; a
    weight is kept if its number is at least round(p * 65536). b, h and i count from ``corner``.
    """
    device = rng_state.device
    seed, offset = rng_state.unbind()
    key = seed + offset * (0x9E3779B97F4A7C15 - (1 << 64))  # 2^64 / golden ratio, signed; the product wraps
    b = corner[0] + torch.arange(B, device=device)[:, None, None, None]
    h = corner[1] + torch.arange(H, device=device)[:, None, None]
    i = _queries(Nq, corner[2], device)
    j_block = torch.arange((Nk + 7) // 8, device=device)
    words = philox_4x32(torch.broadcast_tensors(j_block, i, h, b), (key & _LOW32, (key >> 32) & _LOW32))
    words = torch.stack(words, -1)
    numbers = torch.stack([words & 0xFFFF, words >> 16], -1)  # (B, H, Nq, ceil(Nk / 8), word, half)
    return numbers.flatten(-3)[..., :Nk] >= round(p * 65536)


_LOW32 = 0xFFFFFFFF


def philox_4x32(counter, key, rounds=10):
    """Philox 4x32: four 32-bit words from a 4-word counter and a 2-word key, int64 tensors in [0, 2^32)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        high0, low0 = _multiply_32x32(0xD2511F53, c0)
        high1, low1 = _multiply_32x32(0xCD9E8D57, c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & _LOW32, (k1 + 0xBB67AE85) & _LOW32
    return c0, c1, c2, c3


def _multiply_32x32(a, b):
    """High and low 32 bits of a * b. The signed product wraps, but its bits are those of the unsigned one."""
    product = a * b
    return (product >> 32) & _LOW32, product & _LOW32


def _repeat_heads(x, num_heads):
    """(B, Hkv, N, D) -> (B, Hq, N, D): query head h uses key/value head h // (Hq / Hkv)."""
    return x if x.shape[1] == num_heads else x.repeat_interleave(num_heads // x.shape[1], dim=1)


def _queries(num_queries, first_query, device):
    """Their positions (Nq, 1)."""
    return first_query + torch.arange(num_queries, device=device)[:, None]


def _column(lengths, device):
    """Lengths (B,), a tensor or a list, as (B, 1, 1, 1)."""
    return torch.as_tensor(lengths, device=device)[:, None, None, None]


def no_autocast(t):
    """float32 stays float32 inside; meta tensors have no autocast and need nothing."""
    if t.is_meta or not torch.is_autocast_enabled(t.device.type):
        return contextlib.nullcontext()
    return torch.autocast(t.device.type, enabled=False)
