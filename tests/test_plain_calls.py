"""Calls of q, k, v alone take a shorter way through the library. In nothing but time may it differ from the
long one, which every call with return_lse=True takes.
"""

import math

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.utils._python_dispatch import TorchDispatchMode

from attn_ext import attention, functional, kernel_weights, reference, scaled_dot_product_attention

B, HQ, HKV, NQ, NK, D, DV = 2, 4, 2, 5, 7, 3, 2
OPTIONS = {
    "none": {},
    "causal": {"causal": True},
    "upper left, scale": {"causal": "upper_left", "scale": -0.7},
}


def make_inputs(dtype=torch.float64):
    """q a view of (B, NQ, HQ, D), k with a last dimension that is not contiguous; all require grad."""
    q, k, v = torch.randn(B, NQ, HQ, D), torch.randn(B, HKV, D, NK), torch.randn(B, HKV, NK, DV)
    leaves = [q.transpose(1, 2), k.transpose(2, 3), v]
    return [t.to(dtype).requires_grad_() for t in leaves]


@pytest.fixture
def long_way(monkeypatch):
    """A function that takes the short ways from whoever calls it."""

    def close():
        monkeypatch.setattr(functional, "_plain", lambda *args: None)
        monkeypatch.setattr(kernel_weights, "plain_attention", lambda *args: None)

    return close


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_both_ways_agree_to_the_bit(dtype, options):
    torch.manual_seed(0)
    inputs = make_inputs(dtype)
    short, long = attention(*inputs, **options), attention(*inputs, **options, return_lse=True)[0]
    assert torch.equal(short, long)
    assert short.stride() == long.stride()
    grad = torch.randn_like(short)
    for a, b in zip(*(torch.autograd.grad(out, inputs, grad) for out in (short, long)), strict=True):
        assert torch.equal(a, b)
        assert a.stride() == b.stride()
    with torch.no_grad():
        without = attention(*inputs, **options)
    assert torch.equal(without, long)
    assert not without.requires_grad


@pytest.mark.parametrize("kind", ["full", "mean_heads"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_weights_of_both_ways_agree(kind, options, long_way):
    torch.manual_seed(0)
    inputs = make_inputs()
    short = attention(*inputs, **options, return_weights=kind)
    long_way()
    for a, b in zip(short, attention(*inputs, **options, return_weights=kind), strict=True):
        assert torch.equal(a, b)
    expected = reference.weights(*inputs[:2], **options)
    torch.testing.assert_close(short[1], expected if kind == "full" else expected.mean(1))


@pytest.mark.parametrize("is_causal", [False, True])
def test_sdpa_of_both_ways_agrees(is_causal, long_way):
    torch.manual_seed(0)
    inputs = make_inputs()
    short = scaled_dot_product_attention(*inputs, is_causal=is_causal, enable_gqa=True)
    long_way()
    assert torch.equal(short, scaled_dot_product_attention(*inputs, is_causal=is_causal, enable_gqa=True))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_derivatives(options):
    """The short way has a Function of its own, whose second derivative is that of the long one."""
    torch.manual_seed(0)
    inputs = make_inputs()

    def f(*inputs):
        return attention(*inputs, **options)

    assert gradcheck(f, inputs)
    assert gradgradcheck(f, inputs)


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2)])
def test_only_wanted_gradients(wanted):
    """Catches a gradient that goes to another argument, and one that was not asked for."""
    torch.manual_seed(0)
    leaves = make_inputs()
    expected = torch.autograd.grad(attention(*leaves, return_lse=True)[0].square().sum(), leaves)
    inputs = [t.detach().requires_grad_(n in wanted) for n, t in enumerate(leaves)]
    attention(*inputs).square().sum().backward()
    for n, (t, g) in enumerate(zip(inputs, expected, strict=True)):
        assert (t.grad is None) if n not in wanted else torch.equal(t.grad, g)


class Ops(TorchDispatchMode):
    """Keeps the names of this library's ops as they pass the dispatcher."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "attn_ext":
            self.names.append(func._schema.name.removeprefix("attn_ext::"))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("function", [attention, scaled_dot_product_attention])
def test_modes_see_the_ops(function):
    """However short the way: profilers, FakeTensorMode and make_fx work through the dispatcher."""
    inputs = [torch.randn(1, 2, 3, 4, requires_grad=True) for _ in range(3)]
    with Ops() as ops:
        function(*inputs).sum().backward()
        with torch.no_grad():
            function(*inputs)
    assert ops.names == ["attention_forward", "attention_backward", "attention_forward"]


@pytest.mark.parametrize("function", [attention, scaled_dot_product_attention])
def test_autocast_is_not_overlooked(function):
    q, k, v = (torch.randn(1, 2, 3, 4) for _ in range(3))
    with torch.autocast("cpu", torch.bfloat16):
        assert function(q, k, v).dtype == torch.bfloat16


def test_logits_of_minus_infinity():
    """A row of nothing but -inf sees nothing: weights 0 as out is, not softmax's 0 / 0."""
    q, k, v = torch.ones(1, 1, 2, 1), torch.full((1, 1, 3, 1), -math.inf), torch.ones(1, 1, 3, 1)
    out, weights = attention(q, k, v, return_weights="full")
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(weights, torch.zeros_like(weights))


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(("length", "dim"), [(1, 8), (16, 64), (40, 24), (65, 72)])
def test_value_read_where_it_lies(threads, length, dim):
    """Few queries and whole vectors of float32: the value is not copied. Its strides must not matter."""
    torch.manual_seed(0)
    q, k = torch.randn(2, 3, length, 8), torch.randn(2, 3, 70, 8)
    wide = torch.randn(2, 70, 3, 3 * dim + 1)
    torch.set_num_threads(threads)
    try:
        for v in (
            wide[..., 1 : dim + 1].transpose(1, 2),
            wide[:, :1, :, :dim].transpose(1, 2).expand(2, 3, 70, dim),
        ):
            assert torch.equal(attention(q, k, v), attention(q, k, v.contiguous()))
            torch.testing.assert_close(attention(q, k, v), reference.attention(q, k, v)[0])
    finally:
        torch.set_num_threads(1)


def test_the_plain_op_tells_that_it_has_no_derivative():
    q = torch.randn(1, 1, 3, 4, requires_grad=True)
    out, _ = torch.ops.attn_ext.attention_forward_plain(q, q, q, 0.5, 0)
    with pytest.warns(UserWarning, match="autograd kernel was not registered"):
        out.sum().backward()


def test_a_head_dimension_is_not_made_up():
    """What the short way cannot take is the long way's to refuse, whatever torch calls it."""
    q = torch.randn(1, 2, 3, 4)
    for k in (torch.randn(4), torch.randn(3, 4), torch.randn(1, 2, 3, 4, device="meta")):
        with pytest.raises((TypeError, ValueError)):
            attention(q, k, k)
    with pytest.raises((TypeError, ValueError)):
        scaled_dot_product_attention(q, torch.randn(4), torch.randn(4))
