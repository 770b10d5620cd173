"""The registered ops: opcheck, fake tensors, torch.compile; and what the raw ops refuse."""

import contextlib
import itertools

import pytest
import torch
from torch._subclasses import FakeTensorMode

import attn_ext
from attn_ext import autograd

FORWARD = torch.ops.attn_ext.attention_forward
BACKWARD = torch.ops.attn_ext.attention_backward
JVP = torch.ops.attn_ext.attention_jvp


def arguments(full):
    """Canonical arguments of the forward op: lean, or with everything on and GQA, Dv != D, strided views."""
    torch.manual_seed(0)
    if not full:
        q, k, v = (torch.randn(1, 2, n, 8) for n in (3, 5, 5))
        return (q, k, v, 0.35, 0, 0.0, -1, -1, 0.0, *[None] * 8)
    q = torch.randn(2, 6, 4, 8).transpose(1, 2)
    k, v = torch.randn(2, 2, 7, 8), torch.randn(2, 2, 7, 5)
    bias, float_mask, bool_mask = (
        torch.randn(1, 4, 6, 7),
        torch.randn(2, 1, 1, 7),
        torch.rand(2, 1, 6, 7) > 0.2,
    )
    lengths, rng = (torch.tensor([7, 3]), torch.tensor([6, 2])), torch.tensor([5, 11])
    return (
        q, k, v, 0.3, 2, 2.0, 4, -1, 0.2,
        bias, float_mask, bool_mask, torch.rand(4), torch.rand(4), *lengths, rng,
    )  # fmt: skip


@pytest.mark.compile
@pytest.mark.parametrize("full", [False, True])
def test_opcheck_forward(full):
    torch.library.opcheck(FORWARD, arguments(full))


@pytest.mark.compile
@pytest.mark.parametrize(("full", "output_mask"), [(False, 7), (False, 2), (True, 127), (True, 0b0101010)])
def test_opcheck_backward(full, output_mask):
    args = arguments(full)
    out, lse, lse_parts = FORWARD(*args)
    grad_lse = torch.randn_like(lse) if full else None
    rest = (*args[:3], out, lse_parts, output_mask, *args[3:])
    torch.library.opcheck(BACKWARD, (torch.randn_like(out), grad_lse, *rest))


@pytest.mark.compile
@pytest.mark.parametrize("full", [False, True])
def test_opcheck_jvp(full):
    args = arguments(full)
    out, _, lse_parts = FORWARD(*args)
    tangents = [torch.randn_like(args[n]) if full or n == 1 else None for n in (0, 1, 2)]
    tangents += [torch.randn_like(args[n]) if full else None for n in (9, 10, 12, 13)]
    torch.library.opcheck(JVP, (*args[:3], out, lse_parts, *tangents, *args[3:]))


@pytest.mark.parametrize("device", ["meta", "fake"])
def test_shapes_without_data(device):
    """Strides too: what compiled code assumes must be what the kernel returns."""
    args = arguments(True)
    real = FORWARD(*args)
    if device == "meta":
        got = FORWARD(*(a.to("meta") if isinstance(a, torch.Tensor) else a for a in args))
    else:
        with torch._subclasses.FakeTensorMode() as mode:
            got = FORWARD(*(mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in args))
    for a, b in zip(got, real, strict=True):
        assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)


def in_memory(axes, sizes):
    """A random tensor of these sizes whose axes lie in memory in the order given, outermost first."""
    return torch.randn([sizes[a] for a in axes]).permute([axes.index(a) for a in range(4)])


def assert_order(t, axes):
    """t is dense, its axes in memory in the order given."""
    assert t.permute(axes).is_contiguous()


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("axes", list(itertools.permutations(range(3))))
@pytest.mark.parametrize("last", ["inside", "outside", "repeated batch"])
def test_results_lie_in_memory_as_their_inputs(axes, last, heads):
    """Gradients and tangents too, on CUDA (in a plan) and for fake tensors as well.

    Where they do not, a caller's view() fails, or a projection makes a copy.
    """
    torch.manual_seed(0)
    places = (*axes, 3) if last == "inside" else (3, *axes)
    q, k, v = (in_memory(places, (2, heads, n, d)) for n, d in ((5, 8), (7, 8), (7, 6)))
    if last == "repeated batch":
        q, k, v, axes = *(t[:1].expand(2, -1, -1, -1) for t in (q, k, v)), (0, *(a for a in axes if a != 0))
    results = []
    for mode in (contextlib.nullcontext(), FakeTensorMode()):
        with mode as fake:
            x = [fake.from_tensor(t) if fake else t for t in (q, k, v)]
            out, _, lse_parts = FORWARD(*x)
            tangents = torch.ops.attn_ext.attention_jvp(*x, out, lse_parts, x[0], *[None] * 6)
            results.append((out, *BACKWARD(out, None, *x, out, lse_parts, 7)[:3], *tangents))
    for real, promised in zip(*results, strict=True):
        assert real.stride() == promised.stride()
    out, *grads, tangent_out, _ = results[0]
    planned = torch.ops.attn_ext.attention_forward_plan(q.half(), k.half(), v.half(), 80, 4)[1]
    for t in (out, *grads, tangent_out, planned):
        assert_order(t, (*axes, 3))


@pytest.mark.compile
@pytest.mark.parametrize("axes", [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3)])
def test_compiled_results_lie_in_memory_as_eager_ones(axes):
    """Inductor lays out what it makes itself as it likes, but the op was traced with eager strides."""
    torch._dynamo.reset()

    def f(q, k, v):
        q = torch.cat((q[..., 4:] * 2, q[..., :4]), 3)
        out = attn_ext.attention(q * 0.5, k.sin(), v)
        return out, attn_ext.attention(k, out, out)

    inputs = [in_memory(axes, (2, 3, 5, 8)).requires_grad_() for _ in range(3)]
    results = []
    for function in (f, torch.compile(f, fullgraph=True)):
        outs = function(*inputs)
        results.append((*outs, *torch.autograd.grad([out.sin().sum() for out in outs], inputs)))
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(eager, compiled)
    assert [t.stride() for t in results[0][:2]] == [t.stride() for t in results[1][:2]]


@pytest.mark.compile
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_fullgraph(backend, dynamic):
    """Forward and backward without a graph break, at several lengths, equal to eager."""
    torch._dynamo.reset()

    def f(q, k, v, bias):
        out, lse = attn_ext.attention(q * 2, k, v, bias=bias, causal=True, softcap=5.0, return_lse=True)
        return out.sin().sum() + lse.sum()

    compiled = torch.compile(f, fullgraph=True, backend=backend, dynamic=dynamic)
    for n in (6, 9):
        torch.manual_seed(0)
        inputs = [
            torch.randn(2, 4, n, 8, requires_grad=True),
            *(torch.randn(2, 2, n, 8, requires_grad=True) for _ in "kv"),
        ]
        inputs.append(torch.randn(1, 4, n, n, requires_grad=True))
        got, want = compiled(*inputs), f(*inputs)
        torch.testing.assert_close(got, want)
        grads = zip(torch.autograd.grad(got, inputs), torch.autograd.grad(want, inputs), strict=True)
        for a, b in grads:
            torch.testing.assert_close(a, b)


@pytest.mark.compile
def test_compile_sdpa_and_dropout():
    torch._dynamo.reset()
    q, k, v = (torch.randn(2, 3, 8, 4) for _ in range(3))
    compiled = torch.compile(attn_ext.scaled_dot_product_attention, fullgraph=True, backend="aot_eager")
    mask = torch.rand(2, 1, 8, 8) > 0.3
    torch.testing.assert_close(compiled(q, k, v, mask), attn_ext.scaled_dot_product_attention(q, k, v, mask))
    a, b = compiled(q, k, v, None, 0.5), compiled(q, k, v, None, 0.5)
    assert not torch.equal(a, b), "two calls must draw two masks, compiled or not"


@pytest.mark.compile
def test_compiled_torch_func_grad_is_right():
    """Dynamo drops the backward of an autograd.Function under torch.func.grad: a silent zero, unless the
    graph breaks.
    """
    torch._dynamo.reset()
    q = torch.randn(1, 2, 6, 4)

    def gradient(q):
        return torch.func.grad(lambda q: attn_ext.attention(q, q * 2, q + 1, causal=True).sin().sum())(q)

    want = gradient(q)
    torch.testing.assert_close(torch.compile(gradient, backend="aot_eager")(q), want)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(gradient, backend="aot_eager", fullgraph=True)(q)


def test_raw_ops_are_differentiable():
    """Called by themselves, the ops must not lose a gradient either."""
    args = [
        a.double().requires_grad_() if isinstance(a, torch.Tensor) and a.is_floating_point() else a
        for a in arguments(True)
    ]

    def f(*args):
        out, lse, _ = FORWARD(*args)
        return out.sin().sum() + lse.masked_fill(lse == -torch.inf, 0).sum()

    inputs = [a for a in args if isinstance(a, torch.Tensor) and a.requires_grad]
    got = torch.autograd.grad(f(*args), inputs)
    want = torch.autograd.grad(sum_through_autograd(args), inputs)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


def test_raw_ops_are_differentiable_with_defaults():
    """torch leaves out arguments that have their default, so the derivatives see fewer of them."""
    q, k, v = inputs = [torch.randn(1, 2, 3, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    grads = torch.autograd.grad(FORWARD(q, k, v)[0].sin().sum(), inputs, create_graph=True)
    want = torch.autograd.grad(attn_ext.attention(q, k, v, scale=1.0).sin().sum(), inputs, create_graph=True)
    for a, b in zip(grads, want, strict=True):
        assert torch.equal(a, b)
    again, want = (torch.autograd.grad(sum(g.square().sum() for g in gs), inputs) for gs in (grads, want))
    for a, b in zip(again, want, strict=True):
        torch.testing.assert_close(a, b)


def sum_through_autograd(args):
    out, lse, _ = autograd.attention(*args[:3], *args[9:], autograd.Options(*args[3:9]))
    return out.sin().sum() + lse.masked_fill(lse == -torch.inf, 0).sum()


BAD = {
    "k of another head_dim": (1, lambda k: k[..., :-1]),
    "v of another length": (2, lambda v: v[:, :, :-1]),
    "heads that do not divide": (1, lambda k: torch.cat([k, k[:, :1]], 1)),
    "another dtype": (1, lambda k: k.double()),
    "3-D": (0, lambda q: q[0]),
    "bias of the wrong width": (9, lambda b: b[..., :-1]),
    "bias as bool": (9, lambda b: b > 0),
    "mask as float": (11, lambda m: m.float()),
    "too few slopes": (12, lambda s: s[:-1]),
    "lengths in float": (14, lambda n: n.float()),
    "dropout without state": (16, lambda s: None),
    "causal 3": (4, lambda c: 3),
    "probability 1.5": (8, lambda p: 1.5),
    "probability NaN": (8, lambda p: float("nan")),
}


@pytest.mark.parametrize(("position", "change"), BAD.values(), ids=BAD.keys())
def test_raw_op_refuses_what_would_read_out_of_bounds(position, change):
    args = list(arguments(True))
    args[position] = change(args[position])
    with pytest.raises(RuntimeError, match="attn_ext: "):
        FORWARD(*args)


def test_raw_op_clamps_lengths():
    """Python refuses such lengths; the op must at least not read beyond the tensors."""
    args = list(arguments(True))
    args[14], args[15] = torch.tensor([1 << 40, -5]), torch.tensor([1 << 40, -5])
    out = FORWARD(*args)[0]
    assert out.isfinite().all()
    assert torch.equal(out[1], torch.zeros_like(out[1]))


def test_tensors_on_meta_beside_others_are_refused():
    q = torch.randn(1, 1, 5, 4)
    with pytest.raises(RuntimeError, match="must be on the device of q, cpu, got meta"):
        FORWARD(q, q.to("meta"), q, 0.5, 0)
