"""Attention as callers of flash-attn write it by hand, in (B, N, H, D), and the rule that judges errors.

Nothing of attn_ext is in it: the tests of attn_ext.integrations.flash_attn are held against it.
"""

import functools
import math

import torch


def visible(len_q, len_k, causal=False, window_size=(-1, -1)):
    """bool (Nq, Nk): the last query and the last key are at the same place."""
    left, right = (math.inf if side < 0 else side for side in window_size)
    seen = torch.zeros(len_q, len_k, dtype=torch.bool)
    for i in range(len_q):
        place = i + len_k - len_q
        first = max(0, place - left)
        last = min(len_k - 1, place + (min(right, 0) if causal else right))
        if first <= last:
            seen[i, int(first) : int(last) + 1] = True
    return seen


def attention(
    q, k, v, *, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
    kept=None, reordered=False,
):  # fmt: skip
    """(out, lse) of q (B, Nq, Hq, D), k (B, Nk, Hkv, D), v (B, Nk, Hkv, Dv), computed in their dtype.

    ``kept`` (B, Hq, Nq, Nk) holds dropout's factors, 0 or 1 / (1 - p). ``reordered`` scales k instead of q,
    which changes nothing but the rounding.
    """
    len_q, len_k, group = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    k, v = (t.repeat_interleave(group, 2) for t in (k, v))
    scale = q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale
    q, k = (q, k * scale) if reordered else (q * scale, k)
    s = torch.einsum("bihd,bjhd->bhij", q, k)
    if softcap > 0:
        s = softcap * torch.tanh(s / softcap)
    if alibi_slopes is not None:
        i, j = torch.arange(len_q)[:, None], torch.arange(len_k)
        s = s - (alibi_slopes[..., None, None] * (i + len_k - len_q - j).abs()).to(s.dtype)
    hidden = ~visible(len_q, len_k, causal, window_size)
    s = s.masked_fill(hidden, -math.inf)
    lse = torch.logsumexp(s, -1)
    p = torch.softmax(s.masked_fill(hidden.all(-1, keepdim=True), 0.0), -1).masked_fill(hidden, 0.0)
    if kept is not None:
        p = p * kept.to(p.dtype)
    return torch.einsum("bhij,bjhd->bihd", p, v), lse


def assert_as_good_as(formula, function, tensors):
    """flash-attn's own rule: the largest errors of out and of each gradient, against the formula in float32,
    are at most twice and three times those of the formula in half precision with its steps reordered.

    function(q, k, v) and formula(q, k, v, reordered=...) return out. The 1e-5 is for errors that the formula
    escapes by luck.
    """
    half = tensors[0].dtype

    def run(f, dtype):
        leaves = [t.to(dtype).detach().requires_grad_() for t in tensors]
        out = f(*leaves)
        grad_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(half).to(dtype)
        grads = torch.autograd.grad(out, leaves, grad_out)
        return [t.detach().to(half).float() for t in (out, *grads)]

    ours = run(function, half)
    truth = run(formula, torch.float32)
    by_hand = run(functools.partial(formula, reordered=True), half)
    for name, factor, got, want, plain in zip(
        ("out", "dq", "dk", "dv"), (2, 3, 3, 3), ours, truth, by_hand, strict=True
    ):
        assert got.isfinite().all(), f"{name} is not finite"
        error, allowed = (got - want).abs().max(), factor * (plain - want).abs().max() + 1e-5
        assert error <= allowed, f"{name}: error {error:.3g}, allowed {allowed:.3g}"
