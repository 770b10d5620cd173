"""Known faults in shapes, strides and memory: odd sizes, empty axes, views, offsets past 2^31, wrong input.

References are issues of other projects in which users met the fault.
"""

import itertools
import threading

import pytest
import torch
from oracle import DTYPES, HALF, check, oracle, qkv, randn
from torch.nn import functional as F

from attn_ext import attention, scaled_dot_product_attention

FAR = 2**31  # the first offset that does not fit into 32 bits


@pytest.mark.parametrize("shape", [(70001, 1, 1, 8), (1, 70001, 1, 8), (300, 300, 1, 8)])
def test_more_than_65535_batches_or_heads(shape):
    # pytorch#142228, #146704, flash-attention#1786: launch error, or nothing is written
    q, k, v = (randn(*shape, dtype=torch.float32, seed=n).requires_grad_() for n in range(3))
    out = attention(q, k, v)
    torch.testing.assert_close(out, v)  # one key: its value
    (dv,) = torch.autograd.grad(out, v, grad := randn(*shape, dtype=torch.float32, seed=4))
    torch.testing.assert_close(dv, grad)


@pytest.mark.parametrize("argument", ["q", "k", "v", "grad_out", "all"])
def test_offsets_beyond_2_to_the_31(argument):
    # flash-attention#1500, #2260, #767: 32-bit offsets, wrong rows, often only in the backward
    memory = torch.empty(FAR + 2**16, dtype=torch.float16)  # 4.3 GB, of which a few pages are touched
    tensors = dict(
        zip(("q", "k", "v", "grad_out"), [*qkv(2, 1, 4, 4, dtype=torch.float16), None], strict=True)
    )
    tensors["grad_out"] = randn(2, 1, 4, 8, dtype=torch.float16, seed=9)
    expected = results(**tensors)
    for place, name in enumerate(tensors if argument == "all" else [argument]):
        view = memory.as_strided((2, 1, 4, 8), (FAR, 32, 8, 1), 64 * place)
        tensors[name] = view.copy_(tensors[name])
    for got, wanted in zip(results(**tensors), expected, strict=True):
        assert torch.equal(got, wanted)


def results(q, k, v, grad_out):
    q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
    out = attention(q, k, v)
    return out, *torch.autograd.grad(out, (q, k, v), grad_out)


@pytest.mark.parametrize("axis", [0, 1, 2, 3])
@pytest.mark.parametrize("name", ["bool", "mask", "bias"])
def test_mask_and_bias_offsets_beyond_2_to_the_31(name, axis):
    # pytorch#162588, #187227, xformers#788: a mask is read at a wrapped offset
    dtype = torch.bool if name == "bool" else torch.float16
    memory = torch.empty(FAR + 64, dtype=dtype)
    size, stride = [1, 1, 1, 2], [0, 0, 0, 1]
    size[axis], stride[axis] = 2, FAR
    view = memory.as_strided(size, stride)
    numbers = randn(*size, seed=5)
    view.copy_(numbers > 0 if name == "bool" else numbers)
    inputs = [t.requires_grad_() for t in qkv(len_q=2, len_k=2, dtype=torch.float16)]
    got, wanted = (
        (
            *(outputs := attention(*inputs, **{"bias" if name == "bias" else "mask": t}, return_lse=True)),
            *torch.autograd.grad(outputs[0].square().sum(), inputs),
        )
        for t in (view, view.clone())
    )
    assert all(map(torch.equal, got, wanted))


def test_mask_of_many_rows_whose_last_row_lies_beyond_2_to_the_31():
    # pytorch#162588: (1, 1, 65537, 32769) bool, only the last key is shown; here most rows share memory
    memory = torch.empty(FAR + 2**20, dtype=torch.bool)
    mask = memory.as_strided((1, 1, 129, 32769), (0, 0, FAR // 128, 1))
    mask[:] = False
    mask[..., -1] = True
    q, k, v = (randn(1, 1, n, 8, dtype=torch.float32, seed=n) for n in (129, 32769, 32769))
    torch.testing.assert_close(attention(q, k, v, mask=mask), v[:, :, -1:].expand(1, 1, 129, 8))


LAYOUTS = {
    "packed qkv": lambda b, h, n, d: list(randn(b, n, 3, h, d).transpose(1, 3).unbind(2)),
    "(B, N, H, D)": lambda b, h, n, d: [randn(b, n, h, d, seed=s).transpose(1, 2) for s in range(3)],
    "last axis not contiguous": lambda b, h, n, d: [randn(b, h, d, n, seed=s).mT for s in range(3)],
    "all axes reversed": lambda b, h, n, d: [randn(d, n, h, b, seed=s).permute(3, 2, 1, 0) for s in range(3)],
    "slices": lambda b, h, n, d: [randn(b, h, 2 * n, d + 3, seed=s)[:, :, 1::2, 1:-2] for s in range(3)],
    "every second column": lambda b, h, n, d: [randn(b, h, n, 2 * d, seed=s)[..., ::2] for s in range(3)],
    "odd offset": lambda b, h, n, d: [
        randn(b * h * n * d + 1, seed=s)[1:].view(b, h, n, d) for s in range(3)
    ],
    "expanded over batch and heads": lambda b, h, n, d: [
        randn(1, 1, n, d, seed=s).expand(b, h, n, d) for s in range(3)
    ],
    "expanded over keys": lambda b, h, n, d: [randn(b, h, 1, d, seed=s).expand(b, h, n, d) for s in range(3)],
    "expanded over columns": lambda b, h, n, d: [
        randn(b, h, n, 1, seed=s).expand(b, h, n, d) for s in range(3)
    ],
    "overlapping windows": lambda b, h, n, d: [
        randn(b * h * n + d, seed=s).as_strided((b, h, n, d), (h * n, n, 1, 1)) for s in range(3)
    ],
    "wild strides of size-1 axes": lambda b, h, n, d: [
        t.as_strided(t.shape, [12345 if t.shape[a] == 1 else s for a, s in enumerate(t.stride())])
        for t in (randn(b, h, n, d, seed=s) for s in range(3))
    ],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("sizes", [(2, 2, 5, 8), (2, 1, 1, 8), (1, 3, 9, 1), (1, 1, 130, 12)])
def test_memory_layout_does_not_change_the_result(layout, sizes):
    # pytorch#181133, #112577, FlagGems#5896: views are read wrongly, for some shapes only
    views = [t.requires_grad_() for t in LAYOUTS[layout](*sizes)]
    copies = [t.detach().contiguous().clone().requires_grad_() for t in views]
    grad = randn(*sizes, seed=7)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        got, expected = (
            (
                out := attention(*(t.to(dtype) for t in x), causal=True),
                *torch.autograd.grad(out, x, grad.to(dtype)),
            )
            for x in (views, copies)
        )
        for a, b in zip(got, expected, strict=True):
            assert torch.equal(a, b)


GRADIENTS = {
    "transposed": lambda b, h, n, d: randn(b, n, h, d, seed=7).transpose(1, 2),
    "last axis not contiguous": lambda b, h, n, d: randn(b, h, d, n, seed=7).mT,
    "stride 0": lambda b, h, n, d: torch.ones((), dtype=torch.float64).expand(b, h, n, d),
    "one row": lambda b, h, n, d: randn(1, 1, 1, d, seed=7).expand(b, h, n, d),
    "slice": lambda b, h, n, d: randn(b, h, n + 2, 2 * d, seed=7)[:, :, 1:-1, ::2],
}


@pytest.mark.parametrize("layout", GRADIENTS)
@pytest.mark.parametrize("len_q", [3, 130])
def test_incoming_gradient_in_any_layout(layout, len_q):
    # flash-attention#355, pytorch#133671: grad_out read as if contiguous; #134001: stride 0 refused
    inputs = [t.requires_grad_() for t in qkv(2, 3, len_q, 7)]
    grad = GRADIENTS[layout](2, 3, len_q, 8)
    out, lse = attention(*inputs, return_lse=True)
    grad_lse = randn(len_q, 3, 2, seed=8).permute(2, 1, 0)
    got = torch.autograd.grad((out, lse), inputs, (grad, grad_lse))
    expected = torch.autograd.grad(oracle(*inputs)[:2], inputs, (grad.contiguous(), grad_lse.contiguous()))
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-11, rtol=1e-11)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sum_mean_and_single_element_backward(dtype):
    # pytorch#134001, #138529: `out.sum().backward()` hands over an expanded gradient
    for loss in (
        torch.sum,
        torch.mean,
        lambda out: out[0, 0, 0, 0],
        lambda out: out.transpose(1, 2).flatten(2).norm(),
    ):
        inputs = [t.requires_grad_() for t in qkv(dtype=dtype)]
        got = torch.autograd.grad(loss(attention(*inputs)), inputs)
        exact = [t.detach().double().requires_grad_() for t in inputs]
        expected = torch.autograd.grad(loss(oracle(*exact)[0]), exact)
        tolerance = {torch.float64: 1e-12, torch.float32: 1e-5}.get(dtype, 3e-2)
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a.double(), b, atol=tolerance, rtol=tolerance)


SIZES = dict(batch=2, heads=2, len_q=3, len_k=4, dim=5, dim_v=6)  # noqa: C408  the names of qkv's arguments


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "empty", [*SIZES, ("len_q", "len_k"), ("dim", "dim_v"), ("heads", "len_k"), tuple(SIZES)]
)
def test_axis_of_size_zero_with_every_option(empty, dtype):
    # pytorch#141218, #141219, flash-attention#2470: division by zero, empty grid, uninitialised memory
    empty = (empty,) if isinstance(empty, str) else empty
    batch, heads, len_q, len_k, dim, dim_v = (0 if name in empty else n for name, n in SIZES.items())
    shapes = ((batch, heads, len_q, dim), (batch, heads, len_k, dim), (batch, heads, len_k, dim_v))
    q, k, v = (randn(*shape, dtype=dtype, seed=n) for n, shape in enumerate(shapes))
    term = randn(batch, heads, len_q, len_k, dtype=dtype, seed=3)
    for options in (
        {},
        {"mask": term > 0},
        {"mask": term},
        {"bias": term},
        {"bias": term[:1, :1, :1, :1]},
        {"causal": True},
        {"causal": "upper_left"},
        {"window": (1, 1)},
        {"softcap": 2.0},
        {"alibi_slopes": randn(heads, dtype=dtype)},
        {"alibi_slopes": randn(batch, heads, dtype=dtype)},
        {"sinks": randn(heads, dtype=dtype)},
        {"key_lengths": [len_k // 2] * batch},
        {"query_lengths": torch.full((batch,), len_q // 2)},
    ):
        got = check(q, k, v, **options)
        assert got["out"].shape == (batch, heads, len_q, dim_v)
        if len_k == 0:
            assert not got["out"].any()
            assert not got["dq"].any()
        if dim == 0 and not options and len_k:
            mean = (
                v.double().mean(2, keepdim=True).expand(got["out"].shape).to(dtype)
            )  # 1 / sqrt(0) is no NaN
            torch.testing.assert_close(got["out"], mean)
    out = attention(q.requires_grad_(), k, v, dropout_p=0.5)
    assert torch.autograd.grad(out.sum(), q)[0].shape == q.shape
    for kind, shape in (
        ("full", (heads, len_q, len_k)),
        ("mean_heads", (len_q, len_k)),
        ("colsum", (heads, len_k)),
    ):
        weights = attention(q, k, v, return_weights=kind)[1]
        assert weights.shape == (batch, *shape)
        assert weights.isfinite().all()
    expected = F.scaled_dot_product_attention(q, k, v) if batch and heads else None
    sdpa = scaled_dot_product_attention(q, k, v)
    assert sdpa.shape == out.shape
    if expected is not None:
        assert expected.shape == sdpa.shape


@pytest.mark.parametrize("call", [attention, scaled_dot_product_attention])
@pytest.mark.parametrize("lengths", [(4, 6), (6, 4)])
def test_key_and_value_of_different_length_are_refused(call, lengths):
    # pytorch PR#193728: torch accepts both, and reads past the end of key
    q, k, v = (torch.zeros(1, 1, n, 8) for n in (2, *lengths))
    with pytest.raises(ValueError, match=r"same length.*4.*6|same length.*6.*4"):
        call(q, k, v)


@pytest.mark.parametrize("dim", [1, 2, 3, 5, 7, 9, 17, 33, 40, 72, 80, 96, 100, 129, 257, 320, 512, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
def test_any_head_dim(dim, dtype):
    # pytorch#110630, flash-attention#1347, #801, xformers#1027: only multiples of 8, only up to 256
    for len_q in (17, 2):
        check(*qkv(1, 1, len_q, 17, dim, dtype=dtype))


@pytest.mark.parametrize("dims", [(64, 32), (32, 80), (192, 128), (3, 1), (1, 33)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_value_head_dim_differs_from_query_head_dim(dims, dtype):
    # pytorch#128348, flash-attention#753, #1541: refused, or out has the columns of q
    for len_q in (6, 3):
        got = check(*qkv(1, 2, len_q, 9, *dims, dtype=dtype))
        assert got["out"].shape[-1] == got["dv"].shape[-1] == dims[1]


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("width", [1, 5, 13, 130])
def test_mask_of_any_width_offset_and_stride(kind, width):
    # xformers#808, #813, diffusers#9637: "not correctly aligned" unless padded to a multiple of 8
    q, k, v = qkv(len_k=width)
    whole = randn(1, 1, 7, width + 9, seed=5)
    if kind == "bool":
        whole = whole > 0
    check(q, k, v, mask=whole[..., 1:6, 1 : width + 1])
    check(q, k, v, mask=whole.mT.contiguous().mT[..., :5, 3 : width + 3])
    check(q, k, v, mask=whole.repeat_interleave(2, 3)[..., :5, : 2 * width : 2])
    check(q, k, v, mask=whole[..., :1, :1].expand(2, 2, 5, width))


@pytest.mark.parametrize(
    "shape", [(6,), (8,), (4, 7), (3, 1, 7), (5, 1, 5, 7), (2, 3, 5, 7), (2, 2, 2, 5, 7), (0,)]
)
@pytest.mark.parametrize("argument", ["mask", "bias", "attn_mask"])
def test_mask_of_a_wrong_shape_is_refused(shape, argument):
    # flashinfer#3176: accepted, and memory out of bounds is read
    q, k, v = qkv()
    call = scaled_dot_product_attention if argument == "attn_mask" else attention
    with pytest.raises(ValueError, match="broadcast") as error:
        call(q, k, v, **{argument: torch.zeros(shape, dtype=torch.float64)})
    assert argument in str(error.value)
    assert str(tuple(shape)) in str(error.value)


def test_query_heads_that_are_no_multiple_of_key_heads():
    # flash-linear-attention#1029: an integer division picks wrong heads
    for heads, heads_kv in ((6, 4), (2, 4), (1, 2)):
        q, k, v = qkv(heads=heads, heads_kv=heads_kv)
        with pytest.raises(ValueError, match="multiple"):
            attention(q, k, v)
        with pytest.raises(ValueError, match="multiple"):
            scaled_dot_product_attention(q, k, v, enable_gqa=True)
    with pytest.raises(ValueError, match="enable_gqa"):
        scaled_dot_product_attention(*qkv(heads=4, heads_kv=2))


def test_grouped_heads_repeat_and_do_not_tile():
    # jax-js#180: query heads 0 1 2 3 use key heads 0 1 0 1 instead of 0 0 1 1
    q, k, _ = qkv(1, 4, 2, 3, heads_kv=2)
    v = torch.tensor([10.0, 20.0], dtype=torch.float64).view(1, 2, 1, 1).expand(1, 2, 3, 8)
    for out in (attention(q, k, v), scaled_dot_product_attention(q, k, v, enable_gqa=True)):
        torch.testing.assert_close(out[0, :, 0, 0], torch.tensor([10.0, 10, 20, 20], dtype=torch.float64))


@pytest.mark.parametrize("batches", [(1, 4, 4), (4, 1, 1), (1, 1, 4), (4, 1, 4)])
def test_batch_broadcasting_of_sdpa_and_refusal_by_attention(batches):
    # pytorch#64888, xformers#87: an out-of-bounds read, or an error that says nothing
    q, k, v = (randn(b, 2, n, 8, seed=n).requires_grad_() for b, n in zip(batches, (3, 5, 5), strict=True))
    out = scaled_dot_product_attention(q, k, v)
    expected = F.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(out, expected)
    grad = randn(4, 2, 3, 8, seed=6)
    for a, b in zip(*(torch.autograd.grad(o, (q, k, v), grad) for o in (out, expected)), strict=True):
        assert a.shape == b.shape
        torch.testing.assert_close(a, b)
    with pytest.raises(ValueError, match="batch"):
        attention(q, k, v)


@pytest.mark.parametrize("dims", list(itertools.product((2, 3, 4, 5), repeat=3)))
def test_sdpa_takes_any_number_of_dimensions(dims):
    # pytorch contract: missing batch axes broadcast; torch itself is the reference
    sizes = (2, 1, 3)
    q, k, v = (randn(*sizes[5 - d :], n, 8, seed=n) for d, n in zip(dims, (4, 5, 5), strict=True))
    torch.testing.assert_close(scaled_dot_product_attention(q, k, v), F.scaled_dot_product_attention(q, k, v))


def test_concurrent_threads_of_python():
    # own reasoning: scratch memory shared by threads; results of one call in another
    problems = [qkv(2, 2, 33 + n, 65 + n, 8 + n, dtype=torch.float32, seed=n) for n in range(4)]

    def solve(problem):
        inputs = [t.clone().requires_grad_() for t in problem]
        out = attention(*inputs, causal=True)
        return out, *torch.autograd.grad(out.square().sum(), inputs)

    expected = [solve(problem) for problem in problems]
    wrong = []

    def work(number):
        for _ in range(10):
            if not all(map(torch.equal, solve(problems[number]), expected[number])):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_inference_mode_and_no_grad():
    q, k, v = (t.requires_grad_() for t in qkv())
    expected = attention(q, k, v).detach()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            for got in (
                attention(q, k, v, return_weights="colsum")[0],
                scaled_dot_product_attention(q, k, v),
            ):
                assert torch.equal(got, expected)
                assert not got.requires_grad


WRONG = {
    "5-D": lambda q, k, v: (q[None], k[None], v[None]),
    "3-D": lambda q, k, v: (q[0], k[0], v[0]),
    "head_dim": lambda q, k, v: (q, k[..., :4], v),
    "heads": lambda q, k, v: (q, k, v[:, :1]),
    "half": lambda q, k, v: (q.half(), k, v),
    "float64": lambda q, k, v: (q, k, v.float()),
    "complex": lambda q, k, v: (q.cfloat(), k.cfloat(), v.cfloat()),
    "integer": lambda q, k, v: (q.int(), k.int(), v.int()),
    "bool": lambda q, k, v: (q > 0, k > 0, v > 0),
    "float8": lambda q, k, v: tuple(t.to(torch.float8_e4m3fn) for t in (q, k, v)),
    "sparse": lambda q, k, v: (q.to_sparse(), k, v),
    "quantised": lambda q, k, v: (q, k, torch.quantize_per_tensor(v.float(), 0.1, 0, torch.qint8)),
    "nested": lambda q, k, v: tuple(
        torch.nested.nested_tensor(list(t), layout=torch.jagged) for t in (q, k, v)
    ),
    "meta": lambda q, k, v: (q, k.to("meta"), v),
    "list": lambda q, k, v: (q.tolist(), k, v),
    "None": lambda q, k, v: (q, k, None),
}


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_tensors_are_refused_with_a_clear_error(kind):
    # known_faults: what must never reach a kernel
    q, k, v = WRONG[kind](*qkv())
    with pytest.raises((TypeError, ValueError), match=r"\b[qkv]\b"):
        attention(q, k, v)


def test_meta_tensors_give_shapes():
    q, k, v = (t.to("meta") for t in qkv(heads=4, heads_kv=2, dim_v=3))
    out, lse = attention(q, k, v, causal=True, key_lengths=[3, 4], return_lse=True)
    assert out.shape == (2, 4, 5, 3)
    assert lse.shape == (2, 4, 5)
    assert out.is_meta
