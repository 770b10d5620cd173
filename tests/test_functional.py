"""How attn_ext.attention takes its arguments: broadcasting, dtypes, autocast, seeds, devices, compilation."""

import itertools
import math
import sys

import numpy as np
import pytest
import torch

import attn_ext
from attn_ext import arguments, attention, reference, scaled_dot_product_attention

B, H, HKV, NQ, NK, D, DV = 2, 4, 2, 5, 7, 3, 6
F64 = torch.float64
TERM_SHAPES = [
    (),
    (NK,),
    (NQ, 1),
    (NQ, NK),
    (H, 1, 1),
    (H, NQ, NK),
    (B, 1, 1, NK),
    (1, H, NQ, 1),
    (B, H, NQ, NK),
]


def make_qkv(dtype=F64, requires_grad=False):
    shapes = [(B, H, NQ, D), (B, HKV, NK, D), (B, HKV, NK, DV)]
    return [torch.randn(s, dtype=F64).to(dtype).requires_grad_(requires_grad) for s in shapes]


@pytest.mark.parametrize("shape", TERM_SHAPES)
@pytest.mark.parametrize("name", ["bool mask", "float mask", "bias"])
def test_terms_broadcast(name, shape):
    """Catches alignment at the wrong side and a gradient that is not summed over the broadcast axes."""
    torch.manual_seed(0)
    q, k, v = make_qkv()
    term = (
        torch.rand(shape) > 0.3 if name == "bool mask" else torch.randn(shape, dtype=F64, requires_grad=True)
    )
    key = name.split()[-1]
    out = attention(q, k, v, **{key: term})
    expected = reference.attention(q, k, v, **{key: term.expand(B, H, NQ, NK)})[0]
    torch.testing.assert_close(out, expected)
    if term.requires_grad:
        grad_out = torch.randn_like(out)
        ours, theirs = (torch.autograd.grad(x, term, grad_out)[0] for x in (out, expected))
        assert ours.shape == term.shape
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("shape", TERM_SHAPES)
def test_terms_are_views(shape):
    """A small mask blown up to B x H x N x N, or copied at all, is what fused attention is to avoid."""
    q = make_qkv(torch.float32)[0]
    for term in (torch.rand(shape) > 0.5, torch.randn(shape)):
        canonical = arguments.score_term("mask", term, q, NK, False, bool_allowed=True)
        assert canonical.dim() == 4
        assert canonical.data_ptr() == term.data_ptr()
        assert canonical.numel() == term.numel()


def test_mask_and_bias_together():
    """Both are added, both have gradients; neither replaces the other."""
    q, k, v = make_qkv()
    mask, bias = (torch.randn(s, dtype=F64, requires_grad=True) for s in ((NQ, NK), (H, 1, NK)))
    outs = [
        f(q, k, v, mask=mask, bias=bias) for f in (attention, lambda *a, **o: reference.attention(*a, **o)[0])
    ]
    torch.testing.assert_close(*outs)
    torch.testing.assert_close(*(torch.autograd.grad(out.square().sum(), (mask, bias)) for out in outs))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_float32_terms_of_half_inputs(dtype):
    """A float32 bias must act in float32: rounded to half, 1000.25 and 1000 would be the same."""
    q, k, v = make_qkv(dtype)
    bias = torch.tensor([1000.0, 1000.25, 1000.5, 0, 0, 0, 0])
    slopes, sinks = torch.rand(H), torch.full((H,), 1000.0)
    out = attention(q, k, v, bias=bias, alibi_slopes=slopes, sinks=sinks)
    exact, _ = reference.attention(
        q.double(), k.double(), v.double(), bias=bias, alibi_slopes=slopes, sinks=sinks
    )
    torch.testing.assert_close(
        out.double(), exact, rtol=0, atol=torch.finfo(dtype).eps * exact.abs().max().item()
    )


def test_float32_terms_of_float64_inputs():
    """They are widened, as torch does; float64 results stay exact."""
    q, k, v = make_qkv()
    terms = {"bias": torch.randn(NQ, NK), "sinks": torch.randn(H), "alibi_slopes": torch.rand(B, H)}
    torch.testing.assert_close(attention(q, k, v, **terms), reference.attention(q, k, v, **terms)[0])


@pytest.mark.parametrize("as_type", [list, tuple, torch.tensor, lambda x: torch.tensor(x, dtype=torch.int32)])
def test_lengths_in_every_form(as_type):
    """Lists, int32 and int64 mean the same."""
    q, k, v = make_qkv()
    lengths = {"key_lengths": as_type([7, 3]), "query_lengths": as_type([2, 5])}
    torch.testing.assert_close(attention(q, k, v, **lengths), reference.attention(q, k, v, **lengths)[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    """q, k, v become autocast's dtype, terms keep float32, float64 stays; softmax is in float32."""
    q, k, v = make_qkv(torch.float32)
    bias, mask, sinks = torch.randn(NQ, NK), torch.randn(NQ, NK), torch.randn(H)
    low = [x.to(dtype) for x in (q, k, v)]
    with torch.autocast("cpu", dtype):
        out, lse = attention(q, k.half(), v.bfloat16(), bias=bias, mask=mask, sinks=sinks, return_lse=True)
        expected = attention(
            low[0], k.half().to(dtype), v.bfloat16().to(dtype), bias=bias, mask=mask, sinks=sinks
        )
        assert (out.dtype, lse.dtype) == (dtype, torch.float32)
        assert torch.equal(out, expected)
        # half terms of either kind, which a model under autocast produces
        out = attention(*low, bias=bias.half(), mask=mask.bfloat16())
        exact = reference.attention(*low, bias=bias.half().float(), mask=mask.bfloat16().float())[0]
        # the kernels may round probabilities to the dtype
        torch.testing.assert_close(out, exact, rtol=0, atol=torch.finfo(dtype).eps)
        double = make_qkv(F64)
        assert attention(*double).dtype == F64
        with pytest.raises(TypeError, match="same dtype"):
            attention(double[0], k, v)
        p = attention(q, k, v, return_weights="full")[1]
    assert p.dtype == dtype
    assert (p.float().sum(-1) - 1).abs().max() < 4 * torch.finfo(dtype).eps


def test_autocast_keeps_gradients_in_the_parameters_dtype():
    """The cast is differentiable: float32 leaves get float32 gradients."""
    q, k, v = make_qkv(torch.float32, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = attention(q, k, v)
    grads = torch.autograd.grad(out.float().sum(), (q, k, v))
    assert all(g.dtype == torch.float32 for g in grads)


def test_seeds():
    """manual_seed governs dropout, calls consume the generator's state, p = 0 consumes none."""
    q, k, v = (torch.randn(1, 2, 16, 8) for _ in range(3))
    torch.manual_seed(5)
    attention(q, k, v, dropout_p=0.0)
    first, second = attention(q, k, v, dropout_p=0.5), attention(q, k, v, dropout_p=0.5)
    torch.manual_seed(5)
    assert torch.equal(first, attention(q, k, v, dropout_p=0.5))
    assert not torch.equal(first, second)
    own = [attention(q, k, v, dropout_p=0.5, generator=torch.Generator().manual_seed(5)) for _ in range(2)]
    assert torch.equal(own[0], own[1])
    state = torch.get_rng_state()
    attention(q, k, v, dropout_p=0.5, generator=torch.Generator())
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("deterministic", [None, True, False])
def test_deterministic(deterministic):
    """Accepted in each form; on the CPU gradients have the same bits each time."""
    inputs = make_qkv(torch.float32, requires_grad=True)
    runs = [
        torch.autograd.grad(attention(*inputs, deterministic=deterministic).sum(), inputs) for _ in range(2)
    ]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_grad_mode(mode):
    """Parameters that require grad are fine in evaluation."""
    inputs = make_qkv(torch.float32, requires_grad=True)
    with mode():
        out, lse, p = attention(*inputs, return_lse=True, return_weights="mean_heads")
    assert not any(x.requires_grad for x in (out, lse, p))
    torch.testing.assert_close(out, attention(*inputs))


def test_meta_tensors():
    """Shapes and dtypes without data, also of the weights and under dropout."""
    q, k, v = (x.to("meta") for x in make_qkv(torch.bfloat16))
    shapes = {"full": (B, H, NQ, NK), "mean_heads": (B, NQ, NK), "colsum": (B, H, NK)}
    for kind, shape in shapes.items():
        mask = torch.ones(NQ, NK, dtype=torch.bool, device="meta")
        options = {"mask": mask, "causal": True, "dropout_p": 0.5, "key_lengths": [7, 3]}
        results = attention(q, k, v, **options, return_lse=True, return_weights=kind)
        assert [x.shape for x in results] == [(B, H, NQ, DV), (B, H, NQ), shape]
        assert results[0].device.type == "meta"
    assert scaled_dot_product_attention(q[0], k[0], v[0], enable_gqa=True).shape == (H, NQ, DV)


# positions of B, Hq, Hkv, Nq, Nk, D, Dv; query heads without key heads are refused
ZERO_AXES = [
    axes for n in (1, 2) for axes in itertools.combinations(range(7), n) if 2 not in axes or 1 in axes
]


@pytest.mark.parametrize("axes", ZERO_AXES)
def test_axes_of_size_zero(axes):
    """Every position and pair of positions: no crash, nothing uninitialised, gradients of the right shape."""
    b, h, hkv, nq, nk, d, dv = (0 if n in axes else size for n, size in enumerate((B, H, HKV, NQ, NK, D, DV)))
    shapes = [(b, h, nq, d), (b, hkv, nk, d), (b, hkv, nk, dv)]
    inputs = [torch.randn(s, dtype=F64, requires_grad=True) for s in shapes]
    out, lse = attention(*inputs, causal=True, softcap=2.0, return_lse=True)
    assert out.shape == (b, h, nq, dv)
    assert out.isfinite().all()
    if nk == 0:
        assert (out == 0).all()
        assert (lse == -math.inf).all()
    for g, x in zip(torch.autograd.grad(out.sum(), inputs), inputs, strict=True):
        assert g.shape == x.shape
        assert g.isfinite().all()


def test_last_dimension_of_any_stride():
    """A transposed view costs a copy, not an error."""
    q, k, v = (x.mT.contiguous().mT for x in make_qkv())
    assert q.stride(-1) != 1
    torch.testing.assert_close(attention(q, k, v), reference.attention(q, k, v)[0])


def test_subclasses_and_parameters():
    """What holds a tensor is passed on as it is: parameters, and subclasses with results of their class."""

    class Tagged(torch.Tensor):
        pass

    q, k, v = make_qkv(torch.float32)
    assert isinstance(attention(q.as_subclass(Tagged), k, v), Tagged)
    assert attention(torch.nn.Parameter(q), k, v).requires_grad


OPTIONS = {
    "mask": torch.rand(B, 1, NQ, NK) > 0.3,
    "bias": torch.randn(H, 1, NK),
    "causal": True,
    "window": (3, None),
    "softcap": 2.0,
    "alibi_slopes": torch.rand(H),
    "sinks": torch.randn(H),
    "key_lengths": torch.tensor([7, 4]),
    "query_lengths": [5, 3],
}


@pytest.mark.compile
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_with_every_option(dynamic):
    """No check may break the graph: not lengths in tensors, not lists, not numbers that become symbolic."""
    torch._dynamo.reset()

    def f(q, k, v, scale, left):
        options = {**OPTIONS, "scale": scale, "window": (left, None)}
        out, lse = attention(q, k, v, return_lse=True, **options)
        return out.square().sum() + lse.sum()

    compiled = torch.compile(f, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    inputs = make_qkv(torch.float32, requires_grad=True)
    for scale, left in ((0.5, 3), (0.7, 2)):
        results = [g(*inputs, scale, left) for g in (compiled, f)]
        torch.testing.assert_close(*results)
        torch.testing.assert_close(*(torch.autograd.grad(x, inputs) for x in results))


@pytest.mark.compile
def test_compiled_dropout_is_new_in_each_call():
    """The seed is drawn inside the graph: a constant seed would drop the same weights in every step."""
    torch._dynamo.reset()
    q, k, v = (torch.randn(1, 2, 16, 8) for _ in range(3))
    compiled = torch.compile(lambda *x: attention(*x, dropout_p=0.5), fullgraph=True, backend="aot_eager")
    assert not torch.equal(compiled(q, k, v), compiled(q, k, v))


@pytest.mark.compile
def test_exports():
    """torch.export keeps the op in the graph, with the batch and lengths dynamic."""

    class Model(torch.nn.Module):
        def forward(self, q, k, v, key_lengths):
            return attention(q, k, v, causal=True, key_lengths=key_lengths)

    args = (*make_qkv(torch.float32), torch.tensor([7, 4]))
    batch, nq, nk = (torch.export.Dim(name, min=2, max=64) for name in ("batch", "nq", "nk"))
    dims = ({0: batch, 2: nq}, {0: batch, 2: nk}, {0: batch, 2: nk}, {0: batch})
    exported = torch.export.export(Model(), args, dynamic_shapes=dims).module()
    larger = (
        torch.randn(3, H, 9, D),
        torch.randn(3, HKV, 11, D),
        torch.randn(3, HKV, 11, DV),
        torch.tensor([1, 0, 11]),
    )
    for inputs in (args, larger):
        torch.testing.assert_close(exported(*inputs), Model()(*inputs))


def test_softcap_beyond_the_largest_float_caps_nothing():
    """1e39 is infinite in float32, and 0 * inf would make every logit NaN."""
    q = torch.randn(1, 2, 6, 4, requires_grad=True)
    out, want = attn_ext.attention(q, q, q, softcap=1e39), attn_ext.attention(q, q, q)
    assert torch.equal(out, want)
    torch.testing.assert_close(reference.attention(q, q, q, softcap=1e39)[0], want)
    a, b = (torch.autograd.grad(x.sin().sum(), q)[0] for x in (out, want))
    assert torch.equal(a, b)


@pytest.mark.parametrize("window", [(sys.maxsize, None), (None, sys.maxsize), (sys.maxsize, 0)])
def test_huge_windows_are_open_in_kernels_and_reference(window):
    """i + sys.maxsize wraps in int64, and then hides what it should show."""
    q, k = torch.randn(1, 1, 3, 4), torch.randn(1, 1, 2, 4)
    open_window = tuple(None if side == sys.maxsize else side for side in window)
    want = attn_ext.attention(q, k, k, window=open_window)
    assert torch.equal(attn_ext.attention(q, k, k, window=window), want)
    torch.testing.assert_close(reference.attention(q, k, k, window=window)[0], want)


def test_numpy_integers_are_integers():
    q = torch.randn(2, 1, 5, 4)
    got = attn_ext.attention(
        q, q, q, window=(np.int64(1), np.int32(0)), key_lengths=[np.int64(3), np.int64(5)]
    )
    assert torch.equal(got, attn_ext.attention(q, q, q, window=(1, 0), key_lengths=[3, 5]))


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int32, torch.bool])
def test_merge_refuses_what_it_would_truncate(dtype):
    out, lse = torch.ones(2, 3).to(dtype), torch.zeros(2)
    with pytest.raises(TypeError, match="floating"):
        attn_ext.merge_attention(out, lse, out, lse)


def test_merge_refuses_an_lse_that_is_less_precise_than_out():
    out, lse = torch.ones(2, 3, dtype=torch.float64), torch.zeros(2)
    with pytest.raises(TypeError, match="both float32 or both float64"):
        attn_ext.merge_attention(out, lse, out, lse)


@pytest.mark.parametrize(
    ("options", "name"),
    [({"scale": 10**400}, "scale"), ({"return_weights": np.zeros(3)}, "return_weights"),
     ({"deterministic": torch.zeros(3)}, "deterministic"), ({"return_weights": "FULL"}, "return_weights")],
)  # fmt: skip
def test_odd_values_are_refused_by_name(options, name):
    q = torch.randn(1, 1, 2, 4)
    with pytest.raises((TypeError, ValueError), match=name):
        attn_ext.attention(q, q, q, **options)


def test_second_derivative_does_not_depend_on_autocast_around_it():
    """The forward was float32; autocast around the second backward must not put bfloat16 into it."""
    x = torch.randn(1, 2, 10, 8, requires_grad=True)
    first = torch.autograd.grad(attn_ext.attention(x, x, x).square().sum(), x, create_graph=True)[0]
    want = torch.autograd.grad(first.square().sum(), x, retain_graph=True)[0]
    with torch.autocast("cpu", torch.bfloat16):
        got = torch.autograd.grad(first.square().sum(), x)[0]
    torch.testing.assert_close(got, want)
