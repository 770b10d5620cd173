"""The fused kernels against the reference formula, over random shapes, strides and options, in all four
dtypes.
"""

import itertools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from problems import gradients, problems

import attn_ext
from attn_ext import reference

COMMON = settings(deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, print_blob=True)


def compare(got, want, tolerance):
    """-inf where -inf is due, else within tolerance of the largest value: rounding scales with it."""
    assert got.shape == want.shape
    want = want.to(torch.float64)
    infinite = want == -torch.inf
    assert torch.equal(got == -torch.inf, infinite)
    difference = (got.to(torch.float64) - want).masked_fill(infinite, 0)
    largest = want.masked_fill(infinite, 0).abs().max().item() if want.numel() else 0.0
    assert not difference.isnan().any()
    assert difference.numel() == 0 or difference.abs().max().item() <= tolerance * (1 + largest)


def check(problem, seed, tolerance):
    outputs = problem.run()
    expected, tensors = problem.run_reference()
    for got, want in zip(outputs, expected, strict=True):
        compare(got, want, tolerance)
    got, want = gradients(outputs, problem.tensors, seed), gradients(expected, tensors, seed)
    for name in want:
        compare(got[name], want[name], tolerance)


# 1e-10: float64 rounding (1e-16) times the sums of up to 300 terms of size up to 100, with room.
@settings(COMMON, max_examples=300)
@given(problems(torch.float64), st.integers(0, 2**32))
def test_random_float64(problem, seed):
    check(problem, seed, 1e-10)


# 2e-4: float32 rounding (6e-8) of logits up to 50 is a relative error of 3e-6 in a probability, times
# cancellation in dS = P (dP - delta) and sums over 300 rows.
@settings(COMMON, max_examples=150)
@given(problems(torch.float32), st.integers(0, 2**32))
def test_random_float32(problem, seed):
    check(problem, seed, 2e-4)


def plain(q, k, v, causal, bias):
    """The textbook formula in the dtype of its inputs, as eager PyTorch computes it."""
    s = q @ k.mT / q.shape[-1] ** 0.5 + bias
    if causal:
        s = s.masked_fill(
            torch.ones_like(s, dtype=torch.bool).triu(k.shape[-2] - q.shape[-2] + 1), -torch.inf
        )
    return s.softmax(-1) @ v


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("len_q", "len_k"), [(1, 1), (113, 203), (128, 217), (64, 512), (259, 259), (3, 700)]
)
@pytest.mark.parametrize(("head_dim", "causal"), [(32, False), (59, True), (128, True)])
def test_error_is_at_most_twice_that_of_the_plain_formula(dtype, len_q, len_k, head_dim, causal):
    """The yardstick of design.md: half types may lose what they must, not more."""
    if causal and len_q > len_k:
        pytest.fail("the plain formula has no empty rows")
    torch.manual_seed(0)
    inputs = [torch.randn(2, 3, n, head_dim).to(dtype) for n in (len_q, len_k, len_k)]
    inputs.append(torch.randn(1, 3, len_q, len_k).to(dtype))
    grad = torch.randn(2, 3, len_q, head_dim).to(dtype)

    def run(function, dtype):
        tensors = [t.to(dtype).requires_grad_() for t in inputs]
        out = function(*tensors)
        return [out, *torch.autograd.grad(out, tensors, grad.to(dtype))]

    exact = run(
        lambda q, k, v, bias: reference.attention(q, k, v, causal=causal, bias=bias)[0], torch.float64
    )
    ours = run(lambda q, k, v, bias: attn_ext.attention(q, k, v, causal=causal, bias=bias), dtype)
    theirs = run(lambda q, k, v, bias: plain(q, k, v, causal, bias), dtype)
    for name, a, b, c in zip(("out", "dq", "dk", "dv", "dbias"), ours, theirs, exact, strict=True):
        error, allowed = (a - c).abs().max().item(), 2 * (b - c).abs().max().item() + 1e-5
        assert error <= allowed, f"{name}: error {error:.3g}, allowed {allowed:.3g}"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_softmax_of_growing_scores(dtype):
    """Every key block raises the maximum, so every block rescales; a missed rescale is off by orders of
    magnitude.
    """
    n = 1000
    q = torch.ones(1, 1, 5, 4, dtype=dtype)
    k = torch.linspace(-400, 400, n, dtype=dtype)[None, None, :, None].expand(1, 1, n, 4)
    v = torch.randn(1, 1, n, 3, dtype=dtype)
    for order in (k, k.flip(2)):
        out, lse = attn_ext.attention(q, order, v, return_lse=True)
        want, want_lse = reference.attention(q.double(), order.double(), v.double())
        torch.testing.assert_close(out.double(), want, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(lse.double(), want_lse, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("shape", list(itertools.product((1, 2), (1, 3), (1, 5), (1, 6))))
def test_gradient_of_a_bias_in_every_broadcast_shape(shape):
    """A reduction over the wrong axis, or one that is forgotten, shows in one of the 16 shapes."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, n, 4, dtype=torch.float64) for n in (5, 6, 6))
    bias = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(2, 3, 5, 4, dtype=torch.float64)
    got = torch.autograd.grad((attn_ext.attention(q, k, v, bias=bias, mask=bias) * weight).sum(), bias)[0]
    want = torch.autograd.grad((reference.attention(q, k, v, bias=bias, mask=bias)[0] * weight).sum(), bias)[
        0
    ]
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_lse_of_equal_logits_is_a_logarithm(dtype):
    """Every power of 2, and the numbers around it, where the kernels' logarithm changes its exponent."""
    lengths = torch.tensor(
        sorted({n for b in range(12) for n in (2**b - 1, 2**b, 2**b + 1, 3 * 2**b // 2)} - {0})
    )
    q, k = torch.zeros(len(lengths), 1, 7, 8, dtype=dtype), torch.zeros(1, 1, 3072, 8, dtype=dtype)
    k = k.expand(len(lengths), 1, 3072, 8)
    for rows in (7, 1):
        _, lse = attn_ext.attention(q[:, :, :rows], k, k, key_lengths=lengths, return_lse=True)
        want = lengths.double().log()[:, None, None].expand_as(lse)
        torch.testing.assert_close(lse.double(), want, rtol=2 * torch.finfo(dtype).eps, atol=0)
