"""torch.func and forward mode on the fused ops: jvp, vmap, and their nestings with each other and vjp."""

import itertools

import pytest
import torch
from torch.autograd import forward_ad, gradcheck
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import attn_ext
from attn_ext import reference, second_order, weights

F64 = torch.float64
B, HQ, HKV, NQ, NK, D, DV, V = 2, 4, 2, 4, 5, 3, 2, 3
SHAPES = {
    "q": (B, HQ, NQ, D), "k": (B, HKV, NK, D), "v": (B, HKV, NK, DV), "bias": (1, HQ, NQ, NK),
    "mask": (B, 1, 1, NK), "alibi_slopes": (HQ,), "sinks": (HQ,),
}  # fmt: skip
NAMES = tuple(SHAPES)
OPTIONS = {
    "plain": {},
    "window, upper left": {"causal": "upper_left", "window": (1, 0)},
    "all": {
        "causal": True, "window": (3, None), "scale": -0.7, "softcap": 2.0, "key_lengths": [5, 3],
        "query_lengths": [3, 4],
    },
}  # fmt: skip
DROPOUT = {"dropout_p": 0.3}

every_option = pytest.mark.parametrize(
    "options", [*OPTIONS.values(), {**OPTIONS["all"], **DROPOUT}], ids=[*OPTIONS, "all, dropout"]
)
blocks = pytest.mark.parametrize("block_scores", [1 << 22, HQ * NQ * NK, 1], ids=["whole", "samples", "rows"])


def randn(*shape, seed=0, dtype=F64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64).to(dtype)


def tensors(names=NAMES, seed=0, lead=()):
    return {n: randn(*lead, *SHAPES[n], seed=seed + 10 * s) for s, n in enumerate(names)}


def function(names, options, attention=attn_ext.attention):
    """(out, lse) of the named tensors; the same dropout mask each time, and no -inf among the LSEs."""

    def call(*values):
        given = {**dict(zip(names, values, strict=True)), **options}
        if attention is reference.attention:
            if given.get("dropout_p"):
                drawn = torch.Generator().manual_seed(7)
                given["rng_state"] = torch.randint(-(2**63), 2**63 - 1, (2,), generator=drawn)
            out, lse = attention(**given)
        else:
            generator = torch.Generator().manual_seed(7)
            out, lse = attention(**given, generator=generator, return_lse=True)
        return out, lse.masked_fill(lse == -torch.inf, 0.0)

    return call


def close(got, want):
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)


# Forward mode


@every_option
def test_jvp_along_all_tensors(options):
    names = NAMES
    x, t = tensors(names), tensors(names, seed=1)
    got = jvp(function(names, options), tuple(x.values()), tuple(t.values()))
    want = jvp(function(names, options, reference.attention), tuple(x.values()), tuple(t.values()))
    close(got, want)


@pytest.mark.parametrize(
    "moving", [m for n in (1, 2, 3) for m in itertools.combinations(NAMES[:4], n)], ids=str
)
def test_jvp_along_some_of_q_k_v_and_bias(moving):
    """Missing tangents are zero, by torch.func and by dual numbers."""
    x, t = tensors(), tensors(seed=1)
    fixed = {n: x[n] for n in NAMES if n not in moving}

    def through(attention):
        return lambda *values: function((*moving, *fixed), OPTIONS["all"], attention)(
            *values, *fixed.values()
        )

    given = tuple(x[n] for n in moving), tuple(t[n] for n in moving)
    want = jvp(through(reference.attention), *given)
    close(jvp(through(attn_ext.attention), *given), want)
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(*pair) for pair in zip(*given, strict=True)]
        got = [forward_ad.unpack_dual(y) for y in through(attn_ext.attention)(*duals)]
        close(tuple(g.primal for g in got), want[0])
        close(tuple(g.tangent for g in got), want[1])


@every_option
def test_gradcheck_in_forward_mode(options):
    inputs = tuple(t.requires_grad_() for t in tensors().values())
    assert gradcheck(
        function(NAMES, options), inputs, check_forward_ad=True, check_backward_ad=False,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_jvp_in_other_dtypes(dtype):
    names = NAMES[:4]
    x, t = ({n: y.to(dtype) for n, y in tensors(names, seed=s).items()} for s in (0, 1))
    got = jvp(function(names, {}), tuple(x.values()), tuple(t.values()))
    wide = [tuple(y.double() for y in z.values()) for z in (x, t)]
    want = jvp(function(names, {}, reference.attention), *wide)
    tolerance = 10 * torch.finfo(dtype).eps
    for g, w, kind in zip((*got[0], *got[1]), (*want[0], *want[1]), ("out", "lse") * 2, strict=True):
        assert g.dtype == (dtype if kind == "out" else torch.float32)
        torch.testing.assert_close(g.double(), w, rtol=tolerance, atol=tolerance)


def test_tangents_of_rows_without_keys_are_zero():
    x, t = tensors(NAMES[:3]), tensors(NAMES[:3], seed=1)
    mask = torch.ones(NQ, NK, dtype=torch.bool)
    mask[1] = False
    options = {"mask": mask, "key_lengths": [NK, 0]}
    _, (out, lse) = jvp(function(NAMES[:3], options), tuple(x.values()), tuple(t.values()))
    for nothing in (out[0, :, 1], out[1], lse[0, :, 1], lse[1]):
        assert torch.equal(nothing, torch.zeros_like(nothing))
    assert out[0, :, 0].abs().min() > 0


def test_hidden_keys_have_no_tangent():
    """NaN in a key, and in its tangent, that nobody sees."""
    x, t = tensors(NAMES[:3]), tensors(NAMES[:3], seed=1)
    want = jvp(function(NAMES[:3], {"key_lengths": [3, 3]}), tuple(x.values()), tuple(t.values()))
    for y in (x["k"], t["k"], x["v"], t["v"]):
        y[:, :, 3:] = torch.nan
    got = jvp(function(NAMES[:3], {"key_lengths": [3, 3]}), tuple(x.values()), tuple(t.values()))
    close(got, want)


# vmap


@pytest.mark.parametrize("mapped", [*((n,) for n in NAMES), NAMES[:3], NAMES], ids=str)
@pytest.mark.parametrize("options", [OPTIONS["plain"], OPTIONS["all"]], ids=["plain", "all"])
@pytest.mark.parametrize("axis", [0, -1])
def test_vmap(mapped, options, axis):
    """Over each input alone, some and all, results and gradients, against one call a sample."""
    x = tensors(seed=3)
    x.update({n: t.movedim(0, axis) for n, t in tensors(mapped, seed=5, lead=(V,)).items()})
    weight = randn(V, B, HQ, NQ, DV, seed=9)

    def loss(w, *values):
        out, lse = function(NAMES, options)(*values)
        return (w * out).sum() + lse.sin().sum()

    axes = tuple(axis if n in mapped else None for n in NAMES)
    samples = [[t.select(axis, i) if n in mapped else t for n, t in x.items()] for i in range(V)]
    got = vmap(function(NAMES, options), axes)(*x.values())
    want = [function(NAMES, options)(*s) for s in samples]
    for g, w in zip(got, zip(*want, strict=True), strict=True):
        close(g, torch.stack(w))
    arguments = tuple(range(1, 1 + len(NAMES)))
    got = vmap(grad(loss, arguments), (0, *axes))(weight, *x.values())
    want = [grad(loss, arguments)(w, *s) for w, s in zip(weight, samples, strict=True)]
    for n, g, w in zip(NAMES, got, zip(*want, strict=True), strict=True):
        torch.testing.assert_close(g, torch.stack(w), rtol=1e-9, atol=1e-11, msg=lambda m, n=n: f"{n}: {m}")


def test_vmap_over_lengths_and_sinks_at_once():
    """Lengths go with the batch, sinks with the heads: here no single call can serve."""
    x = tensors(NAMES[:3])
    lengths, sinks = torch.tensor([[5, 3], [2, 0], [1, 4]]), randn(V, HQ, seed=4)

    def f(lengths, sinks):
        return attn_ext.attention(**x, key_lengths=lengths, sinks=sinks)

    close(vmap(f)(lengths, sinks), torch.stack([f(*s) for s in zip(lengths, sinks, strict=True)]))
    close(vmap(f, (0, None))(lengths, sinks[0]), torch.stack([f(n, sinks[0]) for n in lengths]))


def test_vmap_twice_and_of_no_sample():
    q, k, v = (randn(2, 3, *SHAPES[n], seed=s) for s, n in enumerate("qkv"))
    got = vmap(vmap(attn_ext.attention))(q, k, v)
    close(got, torch.stack([vmap(attn_ext.attention)(*s) for s in zip(q, k, v, strict=True)]))
    assert vmap(attn_ext.attention)(q[0, :0], k[0, :0], v[0, :0]).shape == (0, B, HQ, NQ, DV)


@pytest.mark.parametrize("randomness", ["same", "different"])
def test_dropout_under_vmap(randomness):
    """ "same": one mask for all samples; "different": one each."""
    q, k = torch.zeros(V, 1, 1, 40, 1, dtype=F64), torch.zeros(1, 1, 30, 1, dtype=F64)
    identity = torch.eye(30, dtype=F64)[None, None]

    def f(q):
        return attn_ext.attention(q, k, identity, dropout_p=0.5)

    kept = vmap(f, randomness=randomness)(q) > 0
    assert torch.equal(kept[0], kept[1]) == torch.equal(kept[0], kept[2]) == (randomness == "same")
    assert 0.4 < kept.double().mean() < 0.6
    with pytest.raises(RuntimeError, match="randomness"):
        vmap(f)(q)


def test_jacobian_of_autograd_in_one_vmapped_backward():
    x = tensors(NAMES[:3])
    f = lambda q: attn_ext.attention(q, x["k"], x["v"], causal=True)  # noqa: E731
    together = torch.autograd.functional.jacobian(f, x["q"], vectorize=True)
    close(together, torch.autograd.functional.jacobian(f, x["q"]))
    forward = torch.autograd.functional.jacobian(f, x["q"], vectorize=True, strategy="forward-mode")
    close(forward, together)


@pytest.mark.parametrize("kind", ["full", "mean_heads", "colsum"])
def test_weights(kind, monkeypatch):
    """Forward mode, vmap and forward over reverse through what return_weights returns."""
    monkeypatch.setattr(weights, "HEAD_CHUNK_SCORES", 1)
    names = ("q", "k", "bias", "alibi_slopes", "sinks")
    v = tensors()["v"]

    def ours(*values):
        given = dict(zip(names, values, strict=True))
        return attn_ext.attention(v=v, **given, causal=True, softcap=2.0, return_weights=kind)[1]

    def theirs(*values):
        p = reference.weights(**dict(zip(names, values, strict=True)), causal=True, softcap=2.0)
        return {"full": p, "mean_heads": p.mean(1), "colsum": p.sum(2)}[kind]

    x, t = tuple(tensors(names).values()), tuple(tensors(names, seed=1).values())
    close(jvp(ours, x, t), jvp(theirs, x, t))
    loss = lambda f: lambda *x: f(*x).pow(2).sum()  # noqa: E731
    places = tuple(range(len(names)))
    close(jvp(grad(loss(ours), places), x, t)[1], jvp(grad(loss(theirs), places), x, t)[1])
    batch = tuple(tensors(names, seed=2, lead=(V,)).values())
    close(vmap(ours)(*batch), vmap(theirs)(*batch))
    close(vmap(grad(loss(ours), places))(*batch), vmap(grad(loss(theirs), places))(*batch))


def test_vmapped_cotangents_of_a_graph_that_was_made_outside(recwarn):
    """By our rule: torch's fallback, one call a sample, would warn."""
    q, k, v = (t.requires_grad_() for t in tensors(NAMES[:3]).values())
    out = attn_ext.attention(q, k, v)
    cotangents = randn(V, *out.shape, seed=4)
    got = vmap(lambda g: torch.autograd.grad(out, (q, k, v), g, retain_graph=True))(cotangents)
    want = [torch.autograd.grad(out, (q, k, v), g, retain_graph=True) for g in cotangents]
    for g, w in zip(got, zip(*want, strict=True), strict=True):
        close(g, torch.stack(w))
    assert not [w for w in recwarn if "batching rule" in str(w.message)]


# Nestings


@every_option
def test_jacfwd_equals_jacrev(options):
    if "dropout_p" in options:
        options = {n: o for n, o in options.items() if n != "dropout_p"}
    f = function(NAMES, options)
    x = tuple(tensors().values())
    places = tuple(range(len(NAMES)))
    for a, b in zip(jacfwd(f, places)(*x), jacrev(f, places)(*x), strict=True):
        close(a, b)


def loss(names, options, attention=attn_ext.attention):
    def call(*values):
        out, lse = function(names, options, attention)(*values)
        return out.pow(2).sum() + (out.sum((0, 1, 3)) * lse.sum((0, 1))).sin().sum()

    return call


@blocks
@every_option
def test_hessian_vector_products(options, block_scores, monkeypatch):
    """Forward over reverse, reverse over forward, reverse over reverse, forward over forward: one matrix."""
    monkeypatch.setattr(second_order, "BLOCK_SCORES", block_scores)
    x, t = tuple(tensors().values()), tuple(tensors(seed=1).values())
    places = tuple(range(len(NAMES)))
    ours, theirs = loss(NAMES, options), loss(NAMES, options, reference.attention)
    want = vjp(grad(theirs, places), *x)[1](t)
    close(jvp(grad(ours, places), x, t)[1], want)
    close(vjp(grad(ours, places), *x)[1](t), want)
    close(grad(lambda *x: jvp(ours, x, t)[1], places)(*x), want)
    curvature = sum((a * b).sum() for a, b in zip(want, t, strict=True))
    close(jvp(lambda *x: jvp(ours, x, t)[1], x, t)[1], curvature)


@pytest.mark.parametrize("outer", [hessian, lambda f: jacrev(jacrev(f)), lambda f: jacfwd(jacfwd(f))])
def test_hessian(outer):
    x = randn(1, 2, 3, 2)
    f = lambda x, attention: attention(x, x.flip(1), x * 2, causal=True).pow(2).sum()  # noqa: E731
    want = hessian(lambda x: f(x, lambda *a, **o: reference.attention(*a, **o)[0]))(x)
    close(outer(lambda x: f(x, attn_ext.attention))(x), want)


def test_per_sample_gradients_of_a_module():
    module = attn_ext.MultiHeadAttention(8, 2, num_kv_heads=1, qk_norm="rms", batch_first=True, dtype=F64)
    parameters = {n: p.detach() for n, p in module.named_parameters()}
    x, padding = randn(V, 5, 8), torch.arange(5) >= torch.tensor([5, 3, 4])[:, None]

    def loss(parameters, x, padding):
        kwargs = {"key_padding_mask": padding[None], "need_weights": False}
        return functional_call(module, parameters, (x[None], x[None], x[None]), kwargs)[0].pow(2).sum()

    got = vmap(grad(loss), (None, 0, 0))(parameters, x, padding)
    want = [grad(loss)(parameters, *s) for s in zip(x, padding, strict=True)]
    for n, g in got.items():
        close(g, torch.stack([w[n] for w in want]))


def test_vjp_and_ensembles():
    q, k, v = tensors(NAMES[:3]).values()
    out, pull = vjp(lambda *a: attn_ext.attention(*a, causal=True), q, k, v)
    inputs = [t.clone().requires_grad_() for t in (q, k, v)]
    want = torch.autograd.grad(attn_ext.attention(*inputs, causal=True), inputs, torch.ones_like(out))
    close(pull(torch.ones_like(out)), want)


# Memory


def test_second_derivatives_hold_one_block(monkeypatch):
    """N x N scores in float64 would be 8 MiB; a block has 2^14, 128 KiB."""
    monkeypatch.setattr(second_order, "BLOCK_SCORES", 1 << 14)
    n, largest = 1024, []

    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            largest.extend(
                t.numel() for t in torch.utils._pytree.tree_leaves(result) if isinstance(t, torch.Tensor)
            )
            return result

    x = randn(1, 1, n, 4)
    f = lambda x: attn_ext.attention(x, x, x, causal=True).pow(2).sum()  # noqa: E731
    y = x.clone().requires_grad_()
    with Largest():
        jvp(grad(f), (x,), (x,))
        vjp(grad(f), x)[1](x)
        first = torch.autograd.grad(f(y), y, create_graph=True)[0]
        torch.autograd.grad(first.sum(), y)
    assert max(largest) <= 4 * (1 << 14)
