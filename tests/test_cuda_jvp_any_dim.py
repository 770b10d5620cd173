"""Forward mode in the CUDA kernels for every head dim, on a GPU if there is one, else in ptxrun.

Errors are judged by the rule of oracle.py.
"""

import math

import pytest
import torch
from cuda_kernels import DEVICES, dropout_factors, generator, tangents_on
from oracle import check_tangents, qkv, randn, tangents_of

F16, BF16, F32, F64, INF = torch.float16, torch.bfloat16, torch.float32, torch.float64, math.inf
KERNELS = {"f32": F32, "tf32": F32, "f64": F64, "f16": F16, "bf16": BF16}
every_kernel = pytest.mark.parametrize("kernel", KERNELS)


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


def check(device, kernel, q, k, v, *, moving=None, keep=None, **options):
    """Moves all tensors of floating point, or those that are named."""
    tangents = tangents_of({"q": q, "k": k, "v": v, **options})
    tangents = {n: t for n, t in tangents.items() if moving is None or n in moving}
    tf32 = kernel == "tf32"
    call = tangents_on(device, allow_tf32=tf32)
    return check_tangents(q, k, v, tangents, call=call, keep=keep, tf32=tf32, **options)


def heads_last(t):
    """The same numbers as a (B, N, H, D) view that begins in the middle of something."""
    whole = torch.zeros(1 + t.numel(), dtype=t.dtype)
    view = whole[1:].view(t.shape[0], t.shape[2], t.shape[1], t.shape[3])
    return view.copy_(t.transpose(1, 2)).transpose(1, 2)


@pytest.mark.parametrize(
    ("kernel", "dim"),
    [(kernel, dim) for kernel in ("f32", "f64", "tf32") for dim in (1, 7, 64, 111, 320)]
    + [("f16", 320), ("bf16", 257)],
)
def test_head_dims(device, kernel, dim):
    check(device, kernel, *qkv(1, 1, 19, 37, dim, max(1, dim - 3), dtype=KERNELS[kernel]), causal=True)


@pytest.mark.parametrize("kernel", ["f32", "tf32"])
@pytest.mark.parametrize(
    ("len_q", "len_k", "dim", "dim_v"),
    [
        (1, 1, 8, 8),
        (1, 147, 8, 8),
        (113, 203, 8, 20),
        (257, 63, 8, 20),
        (64, 64, 32, 128),  # whole tiles of the score and of the output
        (64, 70, 16, 131),  # two chunks of the output, the second nearly empty
        (66, 20, 200, 67),
        (5, 0, 8, 8),
        (0, 5, 8, 8),
        (3, 4, 0, 8),
        (3, 4, 8, 0),
    ],
)
def test_sizes(device, kernel, len_q, len_k, dim, dim_v):
    check(device, kernel, *qkv(1, 1, len_q, len_k, dim, dim_v, dtype=F32))


@pytest.mark.parametrize(
    ("len_q", "len_k", "dim", "dim_v"), [(70, 129, 8, 70), (33, 20, 40, 35), (5, 0, 8, 8)]
)
def test_sizes_in_float64(device, len_q, len_k, dim, dim_v):
    """Its tile is half as high, and its chunk half as wide."""
    check(device, "f64", *qkv(1, 1, len_q, len_k, dim, dim_v, dtype=F64))


@pytest.mark.parametrize("kernel", ["f16", "bf16"])
def test_whole_tiles_of_half_types(device, kernel):
    check(device, kernel, *qkv(1, 1, 64, 130, 40, 272, dtype=KERNELS[kernel]))


N, K = 70, 90  # two tiles each way, ragged; of float64 three


def no_key(*rows):
    mask = torch.ones(1, 1, N, K, dtype=torch.bool)
    mask[:, :, list(rows)] = False
    return mask


def options_of(dtype):
    def normal(*shape):
        return randn(*shape, dtype=dtype, seed=5)

    def some_hidden(*shape):
        return normal(*shape).masked_fill(randn(*shape, seed=8) > 1, -INF)

    return {
        "window": {"window": (10, 3), "scale": -0.3},
        "upper left": {"causal": "upper_left", "window": (40, None)},
        "lengths": {"causal": True, "key_lengths": [65, 0], "query_lengths": [70, 3]},
        "bool mask": {"mask": randn(1, 2, N, K, seed=6) > 0},
        "rows without a key": {"mask": no_key(0, 33, 69), "softcap": 0.8},
        "float mask": {"mask": some_hidden(2, 2, N, K)},
        "finfo.min": {"mask": normal(1, 1, N, K).masked_fill(~no_key(3), torch.finfo(dtype).min)},
        "bias": {"bias": normal(2, 2, N, K)},
        "bias over queries": {"bias": normal(2, 1, 1, K), "mask": some_hidden(1, 1, 1, K)},
        "bias over keys": {"bias": normal(1, 2, N, 1), "softcap": 2.0},
        "alibi": {"alibi_slopes": torch.tensor([[0.5, 0.02], [0.1, 0.0]])},
        "sinks": {"sinks": torch.tensor([1.0, -2.0]), "mask": no_key(5), "query_lengths": [70, 50]},
        "all": {
            "bias": normal(1, 2, N, K),
            "mask": randn(1, 2, N, K, seed=6) > -1,
            "causal": True,
            "window": (60, 0),
            "softcap": 2.0,
            "alibi_slopes": torch.tensor([0.1, 0.02]),
            "sinks": torch.tensor([1.0, -INF]),
            "key_lengths": [90, 71],
        },
    }


@pytest.mark.parametrize(
    ("kernel", "name"),
    [(kernel, name) for kernel in ("f32", "f64", "tf32") for name in options_of(F32)]
    # The source is float32's, but for how numbers are read and written.
    + [(kernel, name) for kernel in ("f16", "bf16") for name in ("all", "float mask")],
)
def test_options(device, kernel, name):
    dtype = KERNELS[kernel]
    dim, dim_v = (23, 21) if name in ("all", "sinks") else (24, 20)  # odd: copied element by element
    if dtype in (F16, BF16):
        dim, dim_v = (7, 259) if name in ("all", "sinks") else (8, 260)
    options = options_of(dtype)[name]
    for term in ("alibi_slopes", "sinks"):
        if term in options:
            options[term] = options[term].to(dtype)
    check(device, kernel, *qkv(2, 2, N, K, dim, dim_v, heads_kv=1, dtype=dtype), **options)


SUBSETS = [
    ("q",), ("k",), ("v",), ("bias",), ("mask",), ("alibi_slopes",), ("sinks",),
    ("q", "v"), ("k", "bias"), ("v", "sinks"), ("bias", "mask", "alibi_slopes"),
]  # fmt: skip


@pytest.mark.parametrize("odd", [0, 1])
@pytest.mark.parametrize(
    ("kernel", "moving"),
    [("f32", names) for names in SUBSETS]
    + [(kernel, (name,)) for kernel in ("f64", "tf32", "f16", "bf16") for name in ("k", "v", "bias")],
)
def test_some_of_the_tensors(device, kernel, moving, odd):
    """Products of tangents that are not there are left out; where sinks alone move, all are."""
    dtype = KERNELS[kernel]
    dims = 20 - odd, (260 if dtype in (F16, BF16) else 12) - odd  # odd ones are copied element by element
    options = {
        "bias": randn(1, 2, 20, 70, dtype=dtype, seed=5),
        "mask": randn(1, 1, 20, 70, dtype=dtype, seed=6).masked_fill(randn(20, 70, seed=8) > 1, -INF),
        "alibi_slopes": torch.tensor([0.1, 0.02], dtype=dtype),
        "sinks": torch.tensor([1.0, -2.0], dtype=dtype),
        "softcap": 2.0,
    }
    check(device, kernel, *qkv(1, 2, 20, 70, *dims, dtype=dtype), moving=moving, **options)


@every_kernel
@pytest.mark.parametrize("p", [0.3, 1.0])
def test_dropout(device, kernel, p):
    dtype = KERNELS[kernel]
    dims = (8, 260) if dtype in (F16, BF16) else (16, 12)
    keep = dropout_factors(device, 1, 2, 40, 70, p, seed=9)
    q, k, v = qkv(1, 2, 40, 70, *dims, heads_kv=1, dtype=dtype)
    check(device, kernel, q, k, v, keep=keep, dropout_p=p, generator=generator(device, 9), causal=True)


@every_kernel
def test_terms_in_float32_and_strided_views(device, kernel):
    """Half types take terms in float32 too. Tensors lie as models make them, at odd addresses."""
    dtype = KERNELS[kernel]
    single = F64 if dtype == F64 else F32
    dims = (12, 264) if dtype in (F16, BF16) else (16, 24)
    q, k, v = (heads_last(t) for t in qkv(2, 4, 20, 70, *dims, heads_kv=2, dtype=dtype))
    bias = randn(70, 4, 20, 1, dtype=single, seed=5).permute(3, 1, 2, 0)
    mask = randn(2, 1, 140, dtype=single, seed=6)[:, :, None, ::2]
    terms = {
        "bias": bias,
        "mask": mask,
        "alibi_slopes": torch.tensor([0.5, 0.1, 0.02, 0.0], dtype=single),
        "sinks": torch.tensor([1.0, -2.0, 0.0, 3.0], dtype=single),
    }
    tangents = tangents_of({"q": q, "k": k, "v": v, **terms})
    tangents |= {n: heads_last(tangents[n]) for n in "qkv"}
    tangents["bias"] = tangents["bias"].mT.contiguous().mT
    call = tangents_on(device, allow_tf32=kernel == "tf32")
    check_tangents(q, k, v, tangents, call=call, tf32=kernel == "tf32", **terms)


@every_kernel
@pytest.mark.parametrize("bad", [math.nan, INF])
def test_what_is_hidden_never_matters(device, kernel, bad):
    """Neither K of hidden keys nor tangents; nothing past key_lengths; no row past query_lengths."""
    dtype = KERNELS[kernel]
    dims = (8, 260) if dtype in (F16, BF16) else (8, 12)
    q, k, v = qkv(2, 1, 36, 70, *dims, dtype=dtype)
    tensors = {"q": q, "k": k, "v": v, "bias": randn(1, 1, 36, 70, dtype=dtype, seed=5)}
    tangents = tangents_of(tensors)
    mask = torch.ones(36, 70, dtype=torch.bool)
    mask[:, [1, 64]] = False
    lengths = {"key_lengths": [66, 0], "query_lengths": [33, 36]}
    call = tangents_on(device, allow_tf32=kernel == "tf32")

    def run():
        return call(**tensors, tangents=tangents, mask=mask, softcap=3.0, **lengths)

    clean = run()
    for moving, x in ((False, tensors), (True, tangents)):
        x["q"][0, :, 33:] = bad
        x["k"][:, :, [1, 64]] = bad
        x["bias"][..., [1, 64]] = bad if moving else -INF
        for b, length in enumerate(lengths["key_lengths"]):
            x["k"][b, :, length:], x["v"][b, :, length:] = bad, bad
    for got, want in zip(run(), clean, strict=True):
        assert torch.equal(got, want)
        assert want.isfinite().all()
        assert want[0].abs().max() > 0
        assert not want[1].any()


@pytest.mark.parametrize("sinks", [None, torch.zeros(1)])
@pytest.mark.parametrize("moving", ["v", "tangent"])
def test_rows_that_see_nothing_are_zero_beside_nan_in_v(device, sinks, moving):
    q, k, v = qkv(1, 1, 5, 9, 8, dtype=F32)
    tangents = {n: randn(*t.shape, dtype=F32, seed=3) for n, t in {"q": q, "v": v}.items()}
    (v if moving == "v" else tangents["v"])[0, 0, 4] = math.nan
    mask = torch.ones(5, 9, dtype=torch.bool)
    mask[1] = False
    out, lse = tangents_on(device)(q, k, v, tangents, mask=mask, sinks=sinks)
    assert out[0, 0].isnan().all(1).tolist() == [True, False, True, True, True]
    assert not out[0, 0, 1].any()
    assert not lse[0, 0, 1].any()


def test_exponents_at_the_end_of_float64(device):
    """As in test_cuda_kernels.py."""
    bias = torch.linspace(-745, -710, 70, dtype=F64).repeat(1, 2, 1, 1)
    bias[0, 0, 0, 0] = bias[0, 1, 0, -1] = 0
    sinks = torch.tensor([-720.0, 720.0], dtype=F64)
    check(device, "f64", *qkv(1, 2, 40, 70, 8), bias=bias, sinks=sinks)


@pytest.mark.parametrize("kernel", ["f32", "f64"])
def test_large_logits_keep_their_weights(device, kernel):
    """P = exp(S - lse) needs the forward's own S where S is 1e4."""
    q, k, v = qkv(1, 1, 20, 70, 16, dtype=KERNELS[kernel])
    check(device, kernel, 100 * q, 100 * k, v, moving=("v",))
