"""attn_ext.scaled_dot_product_attention beside torch's: the same results, gradients and refusals."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

from attn_ext import scaled_dot_product_attention

F64 = torch.float64

# query, key, value shapes: what torch broadcasts. With "gqa": heads are repeated.
SHAPES = {
    "2-D": [(5, 3), (7, 3), (7, 2)],
    "3-D": [(4, 5, 3), (4, 7, 3), (4, 7, 2)],
    "4-D": [(2, 4, 5, 3), (2, 4, 7, 3), (2, 4, 7, 2)],
    "5-D": [(3, 2, 4, 5, 3), (3, 2, 4, 7, 3), (3, 2, 4, 7, 2)],
    "6-D": [(1, 3, 2, 2, 5, 3), (1, 3, 2, 2, 7, 3), (1, 3, 2, 2, 7, 2)],
    "no batch in k": [(2, 4, 5, 3), (4, 7, 3), (4, 7, 2)],
    "no heads in k": [(2, 4, 5, 3), (7, 3), (7, 2)],
    "no batch in q": [(4, 5, 3), (2, 4, 7, 3), (2, 4, 7, 2)],
    "batch of 1 in q": [(1, 4, 5, 3), (2, 4, 7, 3), (2, 4, 7, 2)],
    "batch of 1 in v": [(2, 4, 5, 3), (2, 4, 7, 3), (1, 4, 7, 2)],
    "head of 1 in q": [(2, 1, 5, 3), (2, 4, 7, 3), (2, 4, 7, 2)],
    "head of 1 in k and v": [(2, 4, 5, 3), (2, 1, 7, 3), (2, 1, 7, 2)],
    "head of 1 in v": [(2, 4, 5, 3), (2, 4, 7, 3), (2, 1, 7, 2)],
    "5-D with all kinds": [(3, 1, 4, 5, 3), (1, 2, 4, 7, 3), (2, 1, 7, 2)],
    "gqa": [(2, 4, 5, 3), (2, 2, 7, 3), (2, 2, 7, 2)],
    "gqa 3-D": [(4, 5, 3), (2, 7, 3), (2, 7, 2)],
    "gqa 5-D, batch of 1": [(3, 1, 4, 5, 3), (3, 2, 2, 7, 3), (3, 2, 2, 7, 2)],
    "gqa with other heads in v": [(2, 4, 5, 3), (2, 2, 7, 3), (2, 1, 7, 2)],
    "gqa with as many heads in v": [(2, 4, 5, 3), (2, 2, 7, 3), (2, 4, 7, 2)],
}


def both(inputs, **kwargs):
    """(out, gradients) of ours and of torch's formula for the same inputs and grad_out."""
    results = []
    for f in (scaled_dot_product_attention, F.scaled_dot_product_attention):
        copies = [x.detach().clone().requires_grad_() for x in inputs]
        mask = kwargs.get("attn_mask")
        with sdpa_kernel(SDPBackend.MATH):
            out = f(*copies, **kwargs)
        wanted = copies + ([mask] if mask is not None and mask.requires_grad else [])
        generator = torch.Generator().manual_seed(1)
        grad_out = torch.randn(out.shape, generator=generator, dtype=F64).to(out.dtype)
        results.append((out.detach(), *torch.autograd.grad(out, wanted, grad_out)))
    return results


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_shapes_and_broadcasting(name, is_causal):
    """Catches a wrong output shape, wrong head pairing, gradients not summed where inputs broadcast."""
    torch.manual_seed(0)
    inputs = [torch.randn(shape, dtype=F64) for shape in SHAPES[name]]
    ours, theirs = both(inputs, is_causal=is_causal, enable_gqa=name.startswith("gqa"), scale=0.7)
    torch.testing.assert_close(ours, theirs)


MASKS = {
    "4-D": [(5, 7), (5, 1), (1, 7), (4, 5, 7), (1, 5, 7), (2, 1, 1, 7), (2, 4, 5, 7), (1, 4, 1, 1)],
    "2-D": [(5, 7), (1, 7)],
    "3-D": [(5, 7), (4, 5, 7)],
    "5-D": [
        (5, 7),
        (4, 5, 7),
        (2, 1, 5, 7),
        (3, 1, 1, 5, 7),
        (1, 1, 4, 5, 7),
        (3, 2, 4, 5, 7),
        (1, 2, 1, 1, 7),
    ],
    "head of 1 in q": [(2, 4, 5, 7), (4, 1, 7)],
    "batch of 1 in q": [(2, 1, 5, 7)],
    "gqa": [(4, 5, 7), (2, 1, 1, 7)],
}


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize(("name", "shape"), [(n, s) for n in MASKS for s in MASKS[n]])
def test_masks_of_every_shape(name, shape, kind):
    """Catches a mask aligned at the wrong side, its polarity, and its gradient in the broadcast shape."""
    torch.manual_seed(0)
    inputs = [torch.randn(s, dtype=F64) for s in SHAPES[name]]
    mask = torch.rand(shape) > 0.3 if kind == "bool" else torch.randn(shape, dtype=F64, requires_grad=True)
    ours, theirs = both(inputs, attn_mask=mask, enable_gqa=name == "gqa")
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("shape", [(), (7,)])
def test_masks_without_a_query_axis(shape):
    """They broadcast like all others; torch takes them where its formula runs (IndexError elsewhere)."""
    q, k, v = (torch.randn(s, dtype=F64) for s in SHAPES["4-D"])
    mask = torch.randn(shape, dtype=F64)
    out = scaled_dot_product_attention(q, k, v, mask)
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v, mask.expand(5, 7)))


@pytest.mark.parametrize("layout", ["transposed", "packed", "strided last", "expanded", "offset mask"])
def test_strides(layout):
    """Catches a kernel that trusts contiguity: views of a packed projection, expanded keys, mask offsets."""
    torch.manual_seed(0)
    mask = None
    if layout == "packed":
        q, k, v = torch.randn(2, 6, 3, 4, 3, dtype=F64).transpose(1, 3).unbind(2)
    elif layout == "transposed":
        q, k, v = (torch.randn(2, 6, 4, 3, dtype=F64).transpose(1, 2) for _ in range(3))
    elif layout == "strided last":
        q, k, v = (torch.randn(2, 4, 3, 6, dtype=F64).transpose(2, 3) for _ in range(3))
    elif layout == "expanded":
        q = torch.randn(2, 4, 5, 3, dtype=F64)
        k, v = (torch.randn(1, 1, 7, 3, dtype=F64).expand(2, 4, 7, 3) for _ in range(2))
    else:
        q, k, v = (torch.randn(2, 4, n, 3, dtype=F64) for n in (5, 13, 13))
        mask = (torch.rand(2, 1, 5, 20) > 0.3)[..., 1:14]
    ours = scaled_dot_product_attention(q, k, v, mask)
    torch.testing.assert_close(ours, F.scaled_dot_product_attention(q, k, v, mask))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", ["plain", "causal", "bool", "float"])
def test_precision(dtype, case):
    """Out and each gradient: error against float64 at most twice that of torch's formula in the same dtype.

    1e-5 (1e-6 for float32) on top is flash-attention's own allowance, where torch's rounding is lucky.
    """
    torch.manual_seed(0)
    inputs = [torch.randn(2, 3, n, d).to(dtype) for n, d in ((113, 40), (203, 40), (203, 24))]
    mask = {"bool": torch.rand(2, 1, 113, 203) > 0.3, "float": torch.randn(113, 203)}.get(case)
    kwargs = {"attn_mask": mask, "is_causal": case == "causal"}
    ours, theirs = both(inputs, **kwargs)
    if case == "float":
        kwargs["attn_mask"] = mask.double()
    _, exact = both([x.double() for x in inputs], **kwargs)
    allowance = 1e-6 if dtype == torch.float32 else 1e-5
    for mine, other, truth in zip(ours, theirs, exact, strict=True):
        assert mine.dtype == dtype
        assert (mine - truth).abs().max() <= 2 * (other - truth).abs().max() + allowance


def test_float32_mask_with_half_and_double():
    """Torch takes a float32 mask whatever query's dtype is; with float64 it must not lower the precision."""
    mask = torch.randn(5, 7)
    for dtype in (F64, torch.bfloat16, torch.float16):
        q, k, v = (torch.randn(s, dtype=dtype) for s in SHAPES["4-D"])
        out = scaled_dot_product_attention(q, k, v, mask)
        expected = F.scaled_dot_product_attention(q, k, v, mask)
        assert out.dtype == dtype
        # Both round in half types; float64 is held to assert_close's own tolerance.
        tolerance = {} if dtype == F64 else {"rtol": 0, "atol": 2 * torch.finfo(dtype).eps}
        torch.testing.assert_close(out, expected, **tolerance)


@pytest.mark.parametrize("bias", [causal_upper_left, causal_lower_right])
def test_causal_bias_objects(bias):
    """A CausalBias has no mask in its storage: read as a tensor it is garbage."""
    q, k, v = (torch.randn(s) for s in SHAPES["4-D"])
    out = scaled_dot_product_attention(q, k, v, bias(5, 7))
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v, bias(5, 7)))
    with pytest.raises(ValueError, match="made for the lengths"):
        scaled_dot_product_attention(q, k, v, bias(5, 6))


def test_upper_left_when_decoding():
    """is_causal=True with one query and six keys sees only the first: torch's documented alignment."""
    q, k, v = torch.randn(1, 1, 1, 4), torch.randn(1, 1, 6, 4), torch.randn(1, 1, 6, 4)
    torch.testing.assert_close(scaled_dot_product_attention(q, k, v, is_causal=True), v[:, :, :1])


@pytest.mark.parametrize("scale", [0.0, -1.5, 1, True, torch.tensor(0.5), None])
def test_scales_that_torch_takes(scale):
    """0 and negative scales are legal, and so are numbers that are not Python floats."""
    q, k, v = (torch.randn(s) for s in SHAPES["4-D"])
    torch.testing.assert_close(
        scaled_dot_product_attention(q, k, v, scale=scale),
        F.scaled_dot_product_attention(q, k, v, scale=scale),
    )


@pytest.mark.parametrize("axis", ["B", "H", "L", "S", "E", "Ev"])
def test_axes_of_size_zero(axis):
    """Catches division by zero, 1 / sqrt(0) and uninitialised results."""
    b, h, n, s, e, ev = (0 if name == axis else 2 for name in ("B", "H", "L", "S", "E", "Ev"))
    inputs = [torch.randn(b, h, *shape, dtype=F64) for shape in ((n, e), (s, e), (s, ev))]
    ours, theirs = both(inputs)
    torch.testing.assert_close(ours, theirs)


def test_empty_rows_leave_no_nan():
    """A row that may attend to nothing gives 0 and finite gradients, whether hidden by bool or by -inf."""
    hidden = torch.tensor([[True, True], [False, False]])
    for mask in (hidden, torch.zeros(2, 2).masked_fill(~hidden, -math.inf)):
        q, k, v = (torch.randn(1, 1, 2, 8, requires_grad=True) for _ in range(3))
        out = scaled_dot_product_attention(q, k, v, mask)
        assert (out[:, :, 1] == 0).all()
        grads = torch.autograd.grad(out.sum(), (q, k, v))
        assert all(g.isfinite().all() for g in grads)
        assert (grads[0][:, :, 1] == 0).all()


def test_dropout_is_always_on_and_follows_the_seed():
    """The functional has no training flag, as in torch; two calls differ, the same seed repeats."""
    q, k, v = (torch.randn(1, 2, 16, 8) for _ in range(3))
    torch.manual_seed(3)
    first, second = (scaled_dot_product_attention(q, k, v, dropout_p=0.5) for _ in range(2))
    torch.manual_seed(3)
    assert torch.equal(first, scaled_dot_product_attention(q, k, v, dropout_p=0.5))
    assert not torch.equal(first, second)
    assert (scaled_dot_product_attention(q, k, v, dropout_p=1.0) == 0).all()


def test_autocast():
    """Mixed dtypes meet in autocast's; float64 stays; a float32 mask is welcome."""
    q, k, v = (torch.randn(s) for s in SHAPES["4-D"])
    mask = torch.randn(5, 7)
    with torch.autocast("cpu", torch.bfloat16):
        out = scaled_dot_product_attention(q, k.bfloat16(), v.half(), mask)
        assert out.dtype == torch.bfloat16
        expected = F.scaled_dot_product_attention(q, k.bfloat16(), v.half(), mask)
        torch.testing.assert_close(out, expected, rtol=0, atol=2**-7)  # two roundings of values below 2
        assert scaled_dot_product_attention(q.double(), k.double(), v.double()).dtype == F64


Q, K, V = (torch.randn(s) for s in SHAPES["4-D"])
SQUARE = (K, K, K)  # where torch uses its fused kernel
MISUSE = {
    "one dimension": ((Q[0, 0, 0], K[0, 0, 0], V[0, 0, 0]), {}),
    "head_dim of key": ((Q, K[..., :2], V), {}),
    "batch does not broadcast": ((torch.randn(3, 4, 5, 3), K, V), {}),
    "heads do not broadcast": ((Q, K[:, :2], V[:, :2]), {}),
    "gqa without a multiple": ((Q, K[:, :3], V[:, :3]), {"enable_gqa": True}),
    "gqa with more key heads": ((Q[:, :2], K, V), {"enable_gqa": True}),
    "gqa without heads": ((Q[0, 0], K[0, 0], V[0, 0]), {"enable_gqa": True}),
    "mask and is_causal": ((Q, K, V), {"attn_mask": torch.ones(5, 7, dtype=torch.bool), "is_causal": True}),
    "mask of int64": ((Q, K, V), {"attn_mask": torch.ones(5, 7, dtype=torch.int64)}),
    "mask of uint8": ((Q, K, V), {"attn_mask": torch.ones(5, 7, dtype=torch.uint8)}),
    "mask of float64": ((Q, K, V), {"attn_mask": torch.ones(5, 7, dtype=F64)}),
    "mask of half with float": ((Q, K, V), {"attn_mask": torch.ones(5, 7, dtype=torch.half)}),
    "mask of bfloat16 with half": (
        (Q.half(), K.half(), V.half()),
        {"attn_mask": torch.ones(5, 7, dtype=torch.bfloat16)},
    ),
    "mask too narrow": ((Q, K, V), {"attn_mask": torch.ones(5, 6, dtype=torch.bool)}),
    "mask too wide": ((Q, K, V), {"attn_mask": torch.ones(5, 8, dtype=torch.bool)}),
    "mask with wrong heads": ((Q, K, V), {"attn_mask": torch.ones(3, 5, 7, dtype=torch.bool)}),
    "mask (B, L, S)": ((Q, K, V), {"attn_mask": torch.ones(2, 5, 7, dtype=torch.bool)}),
    "mask with wrong batch": ((Q, K, V), {"attn_mask": torch.ones(3, 4, 5, 7, dtype=torch.bool)}),
    "mask with too many axes": ((Q, K, V), {"attn_mask": torch.ones(3, 2, 4, 5, 7, dtype=torch.bool)}),
    "mask with batch for 3-D": ((Q[0], K[0], V[0]), {"attn_mask": torch.ones(2, 4, 5, 7, dtype=torch.bool)}),
    "mask is a list": ((Q, K, V), {"attn_mask": [[True]]}),
    "dtypes differ": ((Q, K.half(), V.half()), {}),
    "dtype of value differs": ((Q, K, V.double()), {}),
    "integers": ((Q.long(), K.long(), V.long()), {}),
    "booleans": ((Q > 0, K > 0, V > 0), {}),
    "complex": ((Q + 0j, K + 0j, V + 0j), {}),
    "devices differ": ((Q, K.to("meta"), V.to("meta")), {}),
    "sparse": ((Q.to_sparse(), K.to_sparse(), V.to_sparse()), {}),
    "sparse mask": ((Q, K, V), {"attn_mask": torch.ones(5, 7).to_sparse()}),
    "not tensors": (([1.0], K, V), {}),
    "None": ((None, K, V), {}),
    "dropout_p above 1": (SQUARE, {"dropout_p": 1.5}),
    "dropout_p below 0": (SQUARE, {"dropout_p": -0.1}),
    "dropout_p NaN": (SQUARE, {"dropout_p": math.nan}),
    "dropout_p is a string": ((Q, K, V), {"dropout_p": "0.1"}),
    "scale is a string": ((Q, K, V), {"scale": "1"}),
    "scale with gradient": ((Q, K, V), {"scale": torch.tensor(1.0, requires_grad=True)}),
    "is_causal is an int": ((Q, K, V), {"is_causal": 1}),
}


@pytest.mark.parametrize("name", MISUSE)
def test_what_torch_refuses_is_refused(name):
    """Same misuse, same refusal; those who catch torch's RuntimeError catch ours."""
    args, kwargs = MISUSE[name]
    with pytest.raises((RuntimeError, TypeError, IndexError)):
        F.scaled_dot_product_attention(*args, **kwargs)
    with pytest.raises((ValueError, TypeError)) as error:
        scaled_dot_product_attention(*args, **kwargs)
    assert isinstance(error.value, RuntimeError)


@pytest.mark.parametrize("length", [6, 8])
def test_value_of_another_length_is_refused(length):
    """Torch's CPU kernel accepts it, and reads behind the shorter of the two."""
    with pytest.raises(ValueError, match=r"key and value must have the same length.*\(2, 4, 7, 3\)"):
        scaled_dot_product_attention(Q, K, torch.randn(2, 4, length, 2))


@pytest.mark.parametrize("scale", [math.nan, math.inf])
def test_scale_that_is_not_finite_is_refused(scale):
    """Torch returns NaN everywhere; the cause is then far away."""
    with pytest.raises(ValueError, match="scale must be a finite number"):
        scaled_dot_product_attention(Q, K, V, scale=scale)


def test_signature():
    """Positional and keyword calls of torch's must run unchanged, and a sixth positional be refused."""
    expected = F.scaled_dot_product_attention(Q, K, V, None, 0.0, True, scale=0.5)
    torch.testing.assert_close(scaled_dot_product_attention(Q, K, V, None, 0.0, True, scale=0.5), expected)
    named = {
        "query": Q,
        "key": K,
        "value": V,
        "attn_mask": None,
        "dropout_p": 0.0,
        "is_causal": True,
        "scale": 0.5,
    }
    torch.testing.assert_close(scaled_dot_product_attention(**named, enable_gqa=False), expected)
    with pytest.raises(TypeError):
        scaled_dot_product_attention(Q, K, V, None, 0.0, True, 0.5)


@pytest.mark.compile
@pytest.mark.parametrize(("name", "dynamic"), [("3-D", False), ("batch of 1 in q", True), ("5-D", True)])
def test_compiles_without_graph_breaks(name, dynamic):
    """Broadcasting and checks must not depend on data or break the graph; gradients as in eager."""
    torch._dynamo.reset()

    def f(q, k, v, mask):
        return scaled_dot_product_attention(q, k, v, mask).square().sum()

    compiled = torch.compile(f, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for shape in ((1, 7), (5, 7)):
        inputs = [torch.randn(s, requires_grad=True) for s in SHAPES[name]]
        mask = torch.randn(shape, requires_grad=True)
        results = [torch.autograd.grad(g(*inputs, mask), [*inputs, mask]) for g in (compiled, f)]
        torch.testing.assert_close(*results)
