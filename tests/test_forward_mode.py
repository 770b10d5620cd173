"""The op of forward mode against forward mode of the reference; test_transforms.py has torch.func."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from problems import problems
from torch.func import jvp
from torch.utils._python_dispatch import TorchDispatchMode

import attn_ext
from attn_ext import reference
from attn_ext.autograd import Options

FORWARD, JVP = torch.ops.attn_ext.attention_forward, torch.ops.attn_ext.attention_jvp


def randn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def finite(outputs):
    out, lse = outputs
    return out, lse.masked_fill(lse == -torch.inf, 0.0)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(problem=problems(), seed=st.integers(0, 2**32), some=st.integers(1, 127))
def test_random_problems(problem, seed, some):
    """Sizes around the edges of tiles, every option, any subset of the tensors moving."""
    wanted = [n for n, t in problem.tensors.items() if t is not None and t.requires_grad]
    moving = [n for bit, n in enumerate(wanted) if some >> bit & 1] or wanted[:1]
    x = tuple(problem.tensors[n].detach() for n in moving)
    t = tuple(randn(*y.shape, seed=seed + n) for n, y in enumerate(x))
    fixed = {n: y if y is None else y.detach() for n, y in problem.tensors.items()}
    draws = problem.options["generator"].initial_seed()

    def ours(*x):
        options = {**problem.options, "generator": torch.Generator().manual_seed(draws)}
        tensors = {**fixed, **dict(zip(moving, x, strict=True))}
        return finite(attn_ext.attention(**tensors, **options, return_lse=True))

    def theirs(*x):
        options = {n: o for n, o in problem.options.items() if n != "generator"}
        if options["dropout_p"] > 0:
            generator = torch.Generator().manual_seed(draws)
            options["rng_state"] = torch.randint(-(2**63), 2**63 - 1, (2,), generator=generator)
        return finite(reference.attention(**{**fixed, **dict(zip(moving, x, strict=True))}, **options))

    for got, want in zip(jvp(ours, x, t)[1], jvp(theirs, x, t)[1], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("len_q", [3, 130])
def test_error_is_at_most_that_of_the_plain_formula(dtype, len_q):
    """The rule of oracle.py, for tangents. 3 queries are computed where their keys lie, 130 in tiles."""
    shapes = ((2, 4, len_q, 40), (2, 2, 300, 40), (2, 2, 300, 24), (1, 4, len_q, 300))
    x, t = ([randn(*s, seed=n + k, dtype=dtype) for n, s in enumerate(shapes)] for k in (0, 10))

    def plain(q, k, v, bias):
        k, v = (y.repeat_interleave(2, 1) for y in (k, v))
        return (q @ k.mT / 40**0.5 + bias).softmax(-1) @ v

    def ours(q, k, v, bias):
        return attn_ext.attention(q, k, v, bias=bias)

    exact = jvp(plain, tuple(y.double() for y in x), tuple(y.double() for y in t))[1]
    error, allowed = (
        (jvp(f, tuple(x), tuple(t))[1].double() - exact).abs().max().item() for f in (ours, plain)
    )
    assert error <= 2 * allowed + 1e-5


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("len_q", [3, 130])
def test_what_is_hidden_never_matters(bad, len_q):
    """Not even its tangents: masked keys, storage past key_lengths, rows past query_lengths."""
    shapes = ((2, 2, len_q, 5), (2, 2, 140, 5), (2, 2, 140, 7), (2, 2, len_q, 140))
    x, t = ([randn(*s, seed=n + k) for n, s in enumerate(shapes)] for k in (0, 10))
    mask = torch.ones(140, dtype=torch.bool)
    mask[[1, 64]] = False
    lengths = {"key_lengths": torch.tensor([131, 0]), "query_lengths": torch.tensor([len_q - 1, len_q])}

    def ours(q, k, v, bias):
        options = {"mask": mask.expand(len_q, 140), "softcap": 3.0, **lengths}
        return finite(attn_ext.attention(q, k, v, bias=bias, **options, return_lse=True))

    clean = jvp(ours, tuple(x), tuple(t))[1]
    for q, k, v, bias in (x, t):
        q[0, :, -1:] = bad
        k[:, :, ~mask] = bad
        bias[..., ~mask] = bad if q is t[0] else -torch.inf
        for b, length in enumerate(lengths["key_lengths"].tolist()):
            k[b, :, length:], v[b, :, length:] = bad, bad
    for got, want in zip(jvp(ours, tuple(x), tuple(t))[1], clean, strict=True):
        assert torch.equal(got, want)
        assert want.isfinite().all()
        assert want[0].abs().max() > 0
        assert not want[1].any()


def test_large_logits_keep_their_weights():
    """P = exp(S - lse) needs the forward's own S where S is 1e4."""
    for len_q in (2, 20):
        q, k, v = (randn(1, 1, n, 16, seed=n, dtype=torch.float32) for n in (len_q, 70, 71))
        x = (q * 100, k * 100, v[:, :, :70])
        t = tuple(randn(*y.shape, seed=3, dtype=torch.float32) for y in x)
        got = jvp(lambda *x: attn_ext.attention(*x), x, t)[1]
        exact = jvp(lambda *x: reference.attention(*x)[0], *(tuple(y.double() for y in z) for z in (x, t)))[1]
        torch.testing.assert_close(got.double(), exact, rtol=1e-2, atol=1e-2)


def test_results_do_not_depend_on_the_number_of_threads():
    x, t = ([randn(2, 3, n, 40, seed=n + k, dtype=torch.float32) for n in (400, 421, 421)] for k in (0, 1))
    results = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(jvp(lambda *x: attn_ext.attention(*x, causal=True), tuple(x), tuple(t))[1])
    finally:
        torch.set_num_threads(1)
    for other in results[1:]:
        assert torch.equal(other, results[0])


def test_memory_is_linear_in_length():
    """No tensor of a call of 4096 positions has more elements than q."""
    largest = []

    class Largest(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            leaves = torch.utils._pytree.tree_leaves(result)
            largest.extend(y.numel() for y in leaves if isinstance(y, torch.Tensor))
            return result

    x = tuple(randn(1, 1, 4096, 4, seed=n, dtype=torch.float32) for n in range(3))
    with Largest():
        jvp(lambda *x: attn_ext.attention(*x, causal=True), x, x)
    assert max(largest) <= 4096 * 4


def op_arguments(dtype=torch.float64):
    q, k, v, bias = (randn(*s, dtype=dtype) for s in ((1, 4, 3, 5), (1, 2, 6, 5), (1, 2, 6, 7), (1, 1, 3, 6)))
    sinks, rng = randn(4, dtype=dtype), torch.tensor([1, 2])
    options = Options(0.4, 2, 3.0, 4, -1, 0.2).with_tensors(bias, None, None, None, sinks, None, None, rng)
    out, _, lse_parts = FORWARD(q, k, v, *options)
    tangents = (randn(*q.shape), None, randn(*v.shape), randn(*bias.shape), None, None, randn(4))
    return [q, k, v, out, lse_parts, *(t if t is None else t.to(dtype) for t in tangents), *options]


@pytest.mark.compile
def test_opcheck():
    torch.library.opcheck(JVP, tuple(op_arguments()))


def test_raw_op_is_differentiable():
    args = op_arguments()
    inputs = [args[n].requires_grad_() for n in (0, 1, 2, 5, 7, 8, 11, 18, 22)]
    assert torch.autograd.gradcheck(lambda *x: JVP(*_with(args, x)), inputs, nondet_tol=0.0, fast_mode=True)
    q, k, v = inputs[:3]
    out, _, lse_parts = FORWARD(q.detach(), k.detach(), v.detach())
    grad = torch.autograd.grad(
        JVP(q, k, v, out, lse_parts, q, None, None, None, None, None, None)[0].sum(), k
    )
    assert grad[0].abs().max() > 0


def _with(args, values):
    """The arguments with other tensors; out and lse_parts belong to these."""
    changed = list(args)
    for n, t in zip((0, 1, 2, 5, 7, 8, 11, 18, 22), values, strict=True):
        changed[n] = t
    with torch.no_grad():
        changed[3], _, changed[4] = FORWARD(*changed[:3], *changed[12:])
    return changed


@pytest.mark.parametrize(
    ("position", "value"),
    [
        (5, randn(1, 4, 3, 4)), (6, randn(1, 2, 7, 5)), (7, randn(1, 4, 6, 7)), (8, randn(1, 1, 3, 5)),
        (9, randn(1, 1, 3, 6)), (10, randn(4)), (11, randn(3)), (5, randn(1, 4, 3, 5).float()),
        (8, torch.ones(1, 1, 3, 6, dtype=torch.bool)), (3, randn(1, 4, 3, 6)), (4, randn(1, 4, 3, 1)),
    ],
)  # fmt: skip
def test_refuses_what_does_not_fit(position, value):
    args = op_arguments()
    args[position] = value
    with pytest.raises(RuntimeError, match="attn_ext: "):
        JVP(*args)
