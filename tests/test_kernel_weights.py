"""Weights from the kernel of the backward: every option, as the formula has them, and their derivatives."""

import math

import pytest
import torch

from attn_ext import attention, kernel_weights, masks, weights

B, HQ, HKV, N, D = 2, 4, 2, 6, 3
F64 = torch.float64
TERMS = ("bias", "mask", "alibi_slopes", "sinks")  # what has a gradient besides q, k, v
GENERATOR = torch.Generator().manual_seed(0)


def randn(*shape):
    return torch.randn(shape, dtype=F64, generator=GENERATOR)


def float_mask(*shape):
    return randn(*shape, N, N).masked_fill(randn(N, N) < -0.5, -math.inf)


OPTIONS = {
    "nothing": {},
    "causal, scale": {"causal": True, "scale": 0.3},
    "bool mask": {"mask": torch.tensor([True, False, True, True, False, True])},
    "float mask": {"mask": float_mask(HQ)},
    "float mask of all heads": {"mask": float_mask()},
    "bias": {"bias": randn(B, 1, 1, N)},
    "bias of each head, bool mask": {"bias": randn(HQ, N, N), "mask": torch.eye(N) < 1},
    "softcap, window": {"softcap": 0.7, "window": (2, 1)},
    "slopes, sinks": {"alibi_slopes": randn(B, HQ).exp(), "sinks": randn(HQ)},
    "lengths": {"key_lengths": [4, 0], "query_lengths": [6, 3]},
    "block mask": {"block_mask": masks.sliding_window(N, 1, 1)},
    "block mask, float mask": {"block_mask": masks.sliding_window(N, 1, 1), "mask": float_mask()},
    "dropout": {"dropout_p": 0.4},
}


@pytest.fixture(params=OPTIONS.values(), ids=OPTIONS.keys())
def options(request):
    return {
        name: t.clone().requires_grad_() if isinstance(t, torch.Tensor) and t.is_floating_point() else t
        for name, t in request.param.items()
    }


def make_inputs(*, requires_grad=True):
    torch.manual_seed(0)
    shapes = [(B, HQ, N, D), (B, HKV, N, D), (B, HKV, N, 2)]
    return [torch.randn(shape, dtype=F64, requires_grad=requires_grad) for shape in shapes]


def results(inputs, kind, options, *, return_lse):
    """(out, weights) or (out, lse, weights), with an LSE of -inf set to 0, always by the same dropout."""
    torch.manual_seed(1)
    out, *lse, p = attention(*inputs, return_weights=kind, return_lse=return_lse, **options)
    return out, *(t.masked_fill(t == -math.inf, 0) for t in lse), p


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("kind", ["full", "mean_heads"])
def test_as_by_formula(kind, options, return_lse, monkeypatch):
    """Results and gradients, also those of out, lse and weights at once: each must reach its argument."""
    inputs = make_inputs()
    wanted = [*inputs, *(options[name] for name in TERMS if name in options)]
    wanted = [t for t in wanted if t.requires_grad]
    ours = results(inputs, kind, options, return_lse=return_lse)
    with torch.no_grad():
        torch.testing.assert_close(results(inputs, kind, options, return_lse=return_lse), ours)
    monkeypatch.setattr(kernel_weights, "covers", lambda *args: False)
    monkeypatch.setattr(kernel_weights, "plain_attention", lambda *args: None)
    theirs = results(inputs, kind, options, return_lse=return_lse)
    torch.testing.assert_close(ours, theirs)
    factors = [torch.randn_like(t) for t in ours]
    for some in (slice(None), slice(0, 1), slice(-1, None)):  # all, out alone, the weights alone
        grads = [
            torch.autograd.grad(x[some], wanted, factors[some], retain_graph=True, materialize_grads=True)
            for x in (ours, theirs)
        ]
        torch.testing.assert_close(*grads)


@pytest.mark.parametrize("kind", ["full", "mean_heads"])
def test_second_derivatives_of_all_results(kind):
    """In the second derivative of a sum of them, mixed terms of out and the weights appear."""
    q, k, v = make_inputs()
    bias = torch.randn(HQ, N, N, dtype=F64, requires_grad=True)

    def f(q, k, v, bias):
        return attention(q, k, v, bias=bias, return_lse=True, return_weights=kind)

    def plain(q, k, v):
        return attention(q, k, v, causal=True, return_weights=kind)

    assert torch.autograd.gradgradcheck(f, (q, k, v, bias), fast_mode=True)
    assert torch.autograd.gradgradcheck(plain, (q, k, v), fast_mode=True)


@pytest.mark.parametrize("kind", ["full", "mean_heads"])
def test_eager_code_has_no_need_of_the_formula(kind, options, monkeypatch):
    """Catches an option that silently takes several times as long; bias and float mask together do."""

    def forbidden(*args):
        raise AssertionError("the formula was called")

    monkeypatch.setattr(weights, "by_formula", forbidden)
    attention(*make_inputs(), return_weights=kind, **options)
    with pytest.raises(AssertionError, match="formula"):
        attention(*make_inputs(), return_weights=kind, mask=float_mask(), bias=float_mask())


@pytest.mark.parametrize("kind", ["full", "mean_heads"])
@pytest.mark.parametrize("wanted", [(0,), (1,), (2,)])
def test_only_wanted_gradients(kind, wanted):
    """Catches a gradient that goes to another argument, and weights that have a gradient in v."""
    leaves = make_inputs()
    expected = torch.autograd.grad(
        sum(t.square().sum() for t in attention(*leaves, return_weights=kind)), leaves
    )
    inputs = [t.detach().requires_grad_(n in wanted) for n, t in enumerate(leaves)]
    sum(t.square().sum() for t in attention(*inputs, return_weights=kind)).backward()
    for n, (t, g) in enumerate(zip(inputs, expected, strict=True)):
        assert (t.grad is None) if n not in wanted else torch.equal(t.grad, g)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1000), (3, 40), (16, 16), (70, 300)])
def test_rows_of_large_logits_sum_to_one(dtype, queries, keys):
    """At logits of 4e5 their float32 rounding is 0.03. Catches a kernel whose logits are not those of the
    forward, in its own order of sums: whole rows would be wrong by exp(0.03)."""
    torch.manual_seed(0)
    base = torch.randn(1, 2, 1, 64) * 200
    near = 1e-6 if dtype == torch.float32 else 2e-3  # keys whose logits are a few apart
    k = (base + base.abs() * near * torch.randn(1, 2, keys, 64)).to(dtype)
    q = base.to(dtype).expand(1, 2, queries, 64)
    _, p = attention(q, k, k, return_weights="full")
    # as many roundings to dtype as there are keys, of weights that sum to 1
    torch.testing.assert_close(
        p.double().sum(-1), torch.ones(1, 2, queries, dtype=F64), rtol=0, atol=8 * torch.finfo(dtype).eps
    )


@pytest.mark.parametrize("kind", ["full", "mean_heads"])
def test_words_of_refusals(kind):
    """What the short way cannot take is refused in the words of the long one."""
    q, k, v = make_inputs(requires_grad=False)
    for change, error, words in [
        ({"k": k[..., :2]}, ValueError, "head_dim"),
        ({"v": v[:, :, 1:]}, ValueError, "same length"),
        ({"k": k[:, :1].expand(-1, 3, -1, -1), "v": v[:, :1].expand(-1, 3, -1, -1)}, ValueError, "multiple"),
        ({"v": v.float()}, TypeError, "same dtype"),
        ({"scale": math.inf}, ValueError, "scale"),
    ]:
        with pytest.raises(error, match=words):
            attention(**{"q": q, "k": k, "v": v, "return_weights": kind} | change)


@pytest.mark.parametrize("kind", ["full", "mean_heads"])
def test_batched_gradients(kind):
    """Vectorised Jacobians call the backward under vmap, outside of which the Function was applied."""
    inputs = make_inputs()
    results = attention(*inputs, return_weights=kind)
    grads = [torch.randn(3, *t.shape, dtype=F64) for t in results]
    each = [torch.autograd.grad(results, inputs, one, retain_graph=True) for one in zip(*grads, strict=True)]
    together = torch.autograd.grad(results, inputs, grads, is_grads_batched=True)
    torch.testing.assert_close(together, tuple(torch.stack(g) for g in zip(*each, strict=True)))
