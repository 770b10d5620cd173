"""A second derivation of attention, independent of attn_ext.reference, and the rule that judges errors.

The tests of known faults hold the library against this file, so that a misunderstanding would have to happen
twice to stay unseen.
"""

import math

import torch

import attn_ext

HALF = (torch.float16, torch.bfloat16)
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
TF32_EPS = 2.0**-10  # 10 bits of mantissa


def pairs(len_q, len_k, causal=False, window=None):
    """Which query may see which key by the rules of position: bool (Nq, Nk)."""
    position = torch.arange(len_q) + (0 if causal == "upper_left" else len_k - len_q)
    ahead = torch.arange(len_k) - position[:, None]  # how far key j lies ahead of query i
    left, right = (math.inf if side in (None, -1) else float(side) for side in window or (None, None))
    if causal:
        right = min(right, 0)
    return (ahead <= right) & (ahead >= -left)


def oracle(
    q, k, v, *, mask=None, bias=None, causal=False, window=None, scale=None, softcap=None, alibi_slopes=None,
    sinks=None, key_lengths=None, query_lengths=None, block_mask=None, keep=None, dtype=torch.float64,
    product=torch.einsum,
):  # fmt: skip
    """``(out, lse, probabilities)``, all in ``dtype``; ``keep`` holds dropout's factors 0 or 1 / (1 - p).

    float64 makes it the truth, q's own dtype the plain formula that users would write by hand; with
    product=tf32_product as a GPU with TF32 computes it.
    """
    batch, heads, len_q, dim = q.shape
    len_k = k.shape[2]
    q, k, v = (t.to(dtype) for t in (q, k, v))
    if heads != k.shape[1]:
        own = torch.arange(heads) // (heads // k.shape[1])  # the key head of each query head
        k, v = k[:, own], v[:, own]

    seen = pairs(len_q, len_k, causal, window).expand(batch, heads, len_q, len_k)
    if block_mask is not None:
        seen = seen & block_mask.to_dense()
    extra = q.new_zeros(())
    for term in (mask, bias):
        if term is None:
            continue
        seen = seen & (term if term.dtype == torch.bool else ~torch.isneginf(term))
        if term.dtype != torch.bool:
            extra = extra + term.to(dtype).masked_fill(torch.isneginf(term), 0)
    if key_lengths is not None:
        real = torch.arange(len_k) < torch.as_tensor(key_lengths)[:, None]
        seen = seen & real[:, None, None]
        v = torch.where(real[:, None, :, None], v, v.new_zeros(()))
    if query_lengths is not None:
        seen = seen & (torch.arange(len_q) < torch.as_tensor(query_lengths)[:, None])[:, None, :, None]
    if alibi_slopes is not None:
        distance = (torch.arange(len_q)[:, None] + (len_k - len_q) - torch.arange(len_k)).abs()
        extra = extra - alibi_slopes.to(dtype)[..., None, None] * distance.to(dtype)

    zero = q.new_zeros(())
    q = torch.where(seen.any(3)[..., None], q, zero)
    k = torch.where(seen.any(2)[..., None], k, zero)
    if scale is None:
        scale = dim**-0.5 if dim else 1.0
    s = torch.where(seen, product("bhid,bhjd->bhij", q, k) * scale, zero)
    if softcap is not None:
        s = torch.tanh(s / softcap) * softcap
    s = torch.where(seen, s + extra, zero - math.inf)
    if sinks is not None:
        s = torch.cat([s, sinks.to(dtype).view(-1, 1, 1).expand(batch, heads, len_q, 1)], 3)
    # A row of nothing but -inf is given any finite logits, and its results are taken away again below.
    nothing = torch.isneginf(s).all(3)
    logits = s.masked_fill(nothing[..., None], 0)
    p = torch.softmax(logits, 3).masked_fill(nothing[..., None], 0)[..., :len_k]
    # Not torch.logsumexp: its derivative exp(logits - lse) is wrong by log n where the LSE swallows it
    # (finfo.min).
    top = (
        logits.detach().amax(3, keepdim=True) if logits.shape[3] else logits.new_zeros((*logits.shape[:3], 1))
    )
    lse = (torch.exp(logits - top).sum(3).log() + top[..., 0]).masked_fill(nothing, -math.inf)
    used = p if keep is None else p * keep.to(dtype)
    out = product("bhij,bhjd->bhid", used, v).masked_fill(~seen.any(3)[..., None], 0)
    return out, lse, p


def rounded_to_tf32(x):
    """float32 with 10 bits of mantissa, the nearest, ties away from zero."""
    bits = x.contiguous().view(torch.int32)
    bits = torch.where(x.isfinite(), (bits + 0x1000) & ~0x1FFF, bits)
    return bits.view(torch.float32)


class _Tf32Product(torch.autograd.Function):
    @staticmethod
    def forward(equation, a, b):
        return torch.einsum(equation, rounded_to_tf32(a), rounded_to_tf32(b))

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.equation, *operands = inputs
        ctx.save_for_backward(*operands)
        ctx.save_for_forward(*operands)

    @staticmethod
    def backward(ctx, grad):
        a, b = (rounded_to_tf32(x) for x in ctx.saved_tensors)
        of_a, of_b, of_result = ctx.equation.replace("->", ",").split(",")
        grad = rounded_to_tf32(grad)
        return (
            None,
            torch.einsum(f"{of_result},{of_b}->{of_a}", grad, b),
            torch.einsum(f"{of_result},{of_a}->{of_b}", grad, a),
        )

    @staticmethod
    def jvp(ctx, _, moved_a, moved_b):
        a, b, moved_a, moved_b = (rounded_to_tf32(x) for x in (*ctx.saved_tensors, moved_a, moved_b))
        return torch.einsum(ctx.equation, moved_a, b) + torch.einsum(ctx.equation, a, moved_b)


def tf32_product(equation, a, b):
    """torch.einsum of two float32 tensors, operands rounded to TF32, also in the derivatives."""
    return _Tf32Product.apply(equation, a, b)


def results(function, tensors, cotangents, options):
    """Outputs and gradients of function(**tensors, **options) -> (out, lse, ...) by name."""
    leaves = {name: t.detach().requires_grad_(t.is_floating_point()) for name, t in tensors.items()}
    out, lse = function(**leaves, **options)[:2]
    wanted = {"d" + name: t for name, t in leaves.items() if t.requires_grad}
    cotangents = [c.to(t) for c, t in zip(cotangents, (out, lse), strict=True)]
    grads = torch.autograd.grad((out, lse), list(wanted.values()), cotangents, materialize_grads=True)
    return {"out": out.detach(), "lse": lse.detach(), **dict(zip(wanted, grads, strict=True))}


def assert_close(what, got, truth, plain, eps=None, factor=2, by_hand=0.0):
    """|got - truth| <= factor |plain - truth| + slack: at most twice what the dtype's plain formula loses.

    This is the habit of flash-attention's tests. The slack, for errors that the plain formula escapes by
    luck, grows with the largest value: 1e-5 for half types, 2e-6 for float32 (where dP - delta should be 0,
    some ulps of its terms remain), 1e-10 alone for float64. ``eps`` is the dtype's, or TF32_EPS.
    ``by_hand``: a loss of the plain formula that is known from elsewhere.
    """
    assert got.shape == truth.shape, f"{what}: shape {tuple(got.shape)}, should be {tuple(truth.shape)}"
    dtype = got.dtype
    rounded = truth.to(dtype).double()
    truth = torch.where(rounded.isinf(), rounded, truth)  # what overflows
    got, plain = got.double(), plain.double()
    usual = truth.isfinite()
    assert torch.equal(got.isnan(), truth.isnan()), f"{what}: NaN in other places than the formula has it"
    special = truth.isinf()
    assert torch.equal(got[special], truth[special]), f"{what}: infinities in other places"
    if not usual.any():
        return
    size = max(1.0, truth[usual].abs().max().item())
    error = (got - truth)[usual].abs().max().item()
    if dtype == torch.float64:
        limit = 1e-10 * size
    else:
        # A few numbers may come out exact by hand, but rounding alone may cost half an ulp of the largest.
        half_ulp = (eps or torch.finfo(dtype).eps) / 2 * size
        by_hand = max(by_hand, (plain - truth)[usual].abs().max().item(), half_ulp)
        limit = factor * by_hand + (1e-5 if dtype in HALF else 2e-6) * size
    assert error <= limit, f"{what}: error {error:.3g}, allowed {limit:.3g} (largest value {size:.3g})"


def check(q, k, v, *, keep=None, call=attn_ext.attention, tf32=False, **options):
    """Hold attention()'s out, LSE and every gradient against the oracle; ``options`` as for attention().

    With dropout, pass its factors as ``keep`` (see dropout_factors) and a ``generator`` with their seed.
    tf32: the float32 formula that judges the errors has its products in TF32.
    """
    tensors = {"q": q, "k": k, "v": v}
    tensors |= {n: options.pop(n) for n in ("mask", "bias", "alibi_slopes", "sinks") if n in options}
    cotangents = [randn(*q.shape[:3], v.shape[3], dtype=q.dtype, seed=100), randn(*q.shape[:3], seed=101)]
    got = results(call, tensors, cotangents, {**options, "return_lse": True})
    plain_options = {n: o for n, o in options.items() if n not in ("dropout_p", "generator")}
    plain_options["keep"] = keep
    truth = results(oracle, tensors, cotangents, plain_options)
    plain_options["product"] = tf32_product if tf32 else torch.einsum
    plain = results(oracle, tensors, cotangents, {**plain_options, "dtype": q.dtype})
    if q.dtype in HALF:
        single = results(oracle, tensors, cotangents, {**plain_options, "dtype": torch.float32})
        plain["lse"] = single["lse"]  # the LSE is float32, so float32's plain formula judges it
        # Where half precision overflows by hand, float32 rounded once is the bar.
        plain = {name: torch.where(t.isfinite(), t, single[name].to(t.dtype)) for name, t in plain.items()}
    few = [name for name, t in truth.items() if name.startswith("d") and 0 < t.numel() < 32]
    elsewhere = dict.fromkeys(got, 0.0)
    for seed in range(200, 208, 2) if few and q.dtype in HALF else ():
        # The sums over a whole matrix of logits: two numbers that came out well by hand say little.
        others = [randn(*c.shape, dtype=c.dtype, seed=seed + n) for n, c in enumerate(cotangents)]
        exact = results(oracle, tensors, others, {**plain_options, "product": torch.einsum})
        halves = results(oracle, tensors, others, {**plain_options, "dtype": q.dtype})
        for name in few:
            error = (halves[name].double() - exact[name]).abs().max().item()
            elsewhere[name] = max(elsewhere[name], error if math.isfinite(error) else 0.0)
    for name, value in got.items():
        # In TF32 the plain formula's dS, a softmax's derivative, adds up to 0 over a row, ours, with a delta
        # taken from out, to an error. ALiBi's gradient weighs these errors of rows with the keys' distance.
        factor = 4 if tf32 and name == "dalibi_slopes" else 2
        eps = TF32_EPS if tf32 else None
        assert_close(name, value, truth[name], plain[name], eps, factor, elsewhere[name])
    return got


def check_forward(q, k, v, *, call, tf32=False, **options):
    """check() of out and LSE alone, without dropout."""
    got = call(q, k, v, **options)
    truth, plain = (oracle(q, k, v, **options, dtype=dtype)[:2] for dtype in (torch.float64, q.dtype))
    for what, *values in zip(("out", "lse"), got, truth, (plain[0], truth[1]), strict=True):
        assert_close(what, *values, TF32_EPS if tf32 else None)


def tangents_of(tensors):
    """{name: a tangent} of those of the tensors (a dict, which may hold anything else too) that have one."""
    floats = {n: t for n, t in tensors.items() if isinstance(t, torch.Tensor) and t.is_floating_point()}
    return {n: randn(*t.shape, dtype=t.dtype, seed=50 + seed) for seed, (n, t) in enumerate(floats.items())}


def check_tangents(q, k, v, tangents, *, call, keep=None, tf32=False, **options):
    """Hold the tangents of out and LSE along ``tangents`` against the oracle.

    tangents: {name of a tensor: its tangent}; call: as cuda_kernels.tangents_on gives it; the rest as for
    check().
    """
    tensors = {"q": q, "k": k, "v": v, **{n: options.pop(n) for n in tangents if n in options}}
    got = call(**tensors, tangents=tangents, **options)
    plain_options = {n: o for n, o in options.items() if n not in ("dropout_p", "generator")}

    def formula(dtype, product=torch.einsum):
        def moving(*x):
            changed = {**tensors, **dict(zip(tangents, x, strict=True))}
            out, lse, _ = oracle(**changed, **plain_options, keep=keep, dtype=dtype, product=product)
            return out, lse.masked_fill(lse == -math.inf, 0)

        primals, moved = (
            [x.to(dtype) for x in y] for y in ([tensors[n] for n in tangents], tangents.values())
        )
        return torch.func.jvp(moving, tuple(primals), tuple(moved))[1]

    truth, plain = formula(torch.float64), formula(q.dtype, tf32_product if tf32 else torch.einsum)
    if q.dtype in HALF:  # as in check()
        single = formula(torch.float32)
        plain = torch.where(plain[0].isfinite(), plain[0], single[0].to(q.dtype)), single[1]
    for what, *values in zip(("tangent of out", "tangent of lse"), got, truth, plain, strict=True):
        # Ours is a difference, sum(P S.) v - lse. out, and in TF32 both of its terms have been rounded.
        assert_close(what, *values, TF32_EPS if tf32 else None, factor=4 if tf32 else 2)
    return got


def randn(*shape, dtype=torch.float64, seed=0):
    """Normal numbers that do not depend on the global generator."""
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def qkv(batch=2, heads=2, len_q=5, len_k=7, dim=8, dim_v=None, heads_kv=None, dtype=torch.float64, seed=0):
    heads_kv, dim_v = heads_kv or heads, dim if dim_v is None else dim_v
    shapes = ((batch, heads, len_q, dim), (batch, heads_kv, len_k, dim), (batch, heads_kv, len_k, dim_v))
    return [randn(*shape, dtype=dtype, seed=3 * seed + n) for n, shape in enumerate(shapes)]


def dropout_factors(batch, heads, len_q, len_k, p, seed):
    """0 or 1 / (1 - p) for each probability: equal logits and an identity for V show what dropout does."""
    q, k = (torch.zeros(batch, heads, n, 1, dtype=torch.float64) for n in (len_q, len_k))
    identity = torch.eye(len_k, dtype=torch.float64).expand(batch, heads, -1, -1)
    generator = torch.Generator().manual_seed(seed)
    return attn_ext.attention(q, k, identity, dropout_p=p, generator=generator) * len_k
