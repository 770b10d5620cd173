"""First and second derivatives in float64 by finite differences, with every option on, and what autograd is
used for.
"""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

import attn_ext
from attn_ext import second_order

B, HQ, HKV, NQ, NK, D, DV = 2, 4, 2, 4, 5, 3, 2
NAMES = ("q", "k", "v", "bias", "mask", "alibi_slopes", "sinks")
OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "window, upper left": {"causal": "upper_left", "window": (1, 0)},
    "all": {
        "causal": True, "window": (3, None), "scale": -0.7, "softcap": 2.0, "key_lengths": [5, 3],
        "query_lengths": [3, 4], "dropout_p": 0.3,
    },
}  # fmt: skip


def tensors(*names):
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "q": (B, HQ, NQ, D), "k": (B, HKV, NK, D), "v": (B, HKV, NK, DV), "bias": (1, HQ, NQ, NK),
        "mask": (B, 1, 1, NK), "alibi_slopes": (HQ,), "sinks": (HQ,),
    }  # fmt: skip
    made = [
        torch.randn(shapes[n], generator=generator, dtype=torch.float64, requires_grad=True) for n in names
    ]
    return dict(zip(names, made, strict=True))


def function(options, names, **extra):
    """(out, lse) as a function of the named tensors; the same dropout mask each time, -inf out of the way."""

    def call(*args):
        generator = torch.Generator().manual_seed(7)
        out, lse = attn_ext.attention(
            **dict(zip(names, args, strict=True)), **options, **extra, generator=generator, return_lse=True
        )
        return out, lse.masked_fill(lse == -torch.inf, 0.0)

    return call


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("names", [NAMES[:3], NAMES], ids=["qkv", "all tensors"])
def test_gradcheck(options, names):
    inputs = tensors(*names)
    assert gradcheck(function(options, names), tuple(inputs.values()))


@pytest.mark.parametrize("scores_at_a_time", [1 << 22, HQ * NQ * NK, 1], ids=["whole", "samples", "heads"])
@pytest.mark.parametrize("options", [OPTIONS["plain"], OPTIONS["all"]], ids=["plain", "all"])
def test_gradgradcheck(options, scores_at_a_time, monkeypatch):
    """Cut into samples or heads too: a part with the wrong slice or dropout mask is far off."""
    monkeypatch.setattr(second_order, "BLOCK_SCORES", scores_at_a_time)
    inputs = tensors(*NAMES)
    assert gradgradcheck(
        function(options, NAMES), tuple(inputs.values()), fast_mode=scores_at_a_time != 1 << 22
    )


def test_column_sums_have_derivatives():
    names = ("q", "k", "bias", "alibi_slopes", "sinks")
    inputs = tensors(*names)
    v = torch.zeros(B, HKV, NK, DV, dtype=torch.float64)

    def sums(*args):
        return attn_ext.attention(
            v=v, **dict(zip(names, args, strict=True)), causal=True, softcap=2.0, return_weights="colsum"
        )[1]

    assert gradcheck(sums, tuple(inputs.values()))


def test_third_derivative():
    """create_graph all the way: the second derivative must itself be a function of its inputs."""
    x = torch.randn(1, 1, 3, 2, dtype=torch.float64, requires_grad=True)

    def second(x):
        first = torch.autograd.grad(attn_ext.attention(x, x, x).pow(2).sum(), x, create_graph=True)[0]
        return torch.autograd.grad(first.pow(2).sum(), x, create_graph=True)[0]

    assert gradcheck(second, (x,))


def test_second_derivative_of_torch_func_equals_autograd():
    inputs = tensors("q", "k", "v")
    q, k, v = inputs.values()

    def loss(q):
        return attn_ext.attention(q, k, v, causal=True).pow(2).sum()

    first = torch.autograd.grad(loss(q), q, create_graph=True)[0]
    want = torch.autograd.grad(first.pow(2).sum(), q)[0]
    torch.testing.assert_close(torch.func.grad(loss)(q.detach()), first.detach())
    got = torch.func.grad(lambda q: torch.func.grad(loss)(q).pow(2).sum())(q.detach())
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_with_dropout(reentrant):
    """The recomputed forward must draw the same dropout mask."""
    q = torch.randn(2, 3, 20, 8, dtype=torch.float64, requires_grad=True)

    def f(q):
        return attn_ext.attention(q, q * 2, q + 1, dropout_p=0.4, causal=True)

    torch.manual_seed(3)
    want = torch.autograd.grad(f(q).pow(2).sum(), q)[0]
    torch.manual_seed(3)
    torch.utils.checkpoint.checkpoint(f, q, use_reentrant=reentrant).pow(2).sum().backward()
    assert torch.equal(q.grad, want)


def test_saved_tensors_are_linear_in_length():
    """Saving P, or an expanded mask, would make memory quadratic."""
    n, saved = 512, []
    q, k, v = (torch.randn(1, 1, n, 16, requires_grad=True) for _ in range(3))
    mask = torch.ones(1, 1, 1, n, dtype=torch.bool)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        attn_ext.attention(q, k, v, mask=mask, causal=True)
    assert max(t.numel() for t in saved) <= n * 16
    assert len(saved) <= 6  # q, k, v, out, lse_parts, mask


def test_only_wanted_gradients():
    """Each subset of (q, k, v), against the gradients of all three: none missing, none too many, none
    different.
    """
    inputs = [t.detach() for t in tensors("q", "k", "v").values()]
    everything = [t.clone().requires_grad_() for t in inputs]
    want = torch.autograd.grad(attn_ext.attention(*everything, causal=True).sin().sum(), everything)
    for subset in range(1, 8):
        some = [t.clone().requires_grad_(bool(subset >> n & 1)) for n, t in enumerate(inputs)]
        attn_ext.attention(*some, causal=True).sin().sum().backward()
        for n, t in enumerate(some):
            if subset >> n & 1:
                assert torch.equal(t.grad, want[n])
            else:
                assert t.grad is None


def test_loss_on_one_output_only():
    q, k, v = tensors("q", "k", "v").values()
    out, lse = attn_ext.attention(q, k, v, return_lse=True)
    a = torch.autograd.grad(lse.sum(), (q, k, v), retain_graph=True)
    assert torch.equal(a[2], torch.zeros_like(v))
    b = torch.autograd.grad(out.sum(), (q, k, v), retain_graph=True)
    both = torch.autograd.grad(out.sum() + lse.sum(), (q, k, v))
    for x, y, z in zip(a, b, both, strict=True):
        torch.testing.assert_close(x + y, z)
