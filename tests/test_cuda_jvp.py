"""Forward mode on the tensor cores against that of the formula: in ptxrun, and on a GPU where there is one.

There is one kernel for each half type and bucket of head dims. It has code of its own for tiles that
everybody sees all of, and branches for each option and for each tangent that may be absent.
"""

import math

import pytest
import torch
from cuda_kernels import DEVICES, dropout_factors, generator, tangents_on
from oracle import check_tangents, qkv, randn, tangents_of

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
BUCKETS = (32, 64, 96, 128, 192, 256)
KERNELS = [(dtype, b) for b in BUCKETS for dtype in (F16, BF16)]

every_device = pytest.mark.parametrize("device", DEVICES)
every_kernel = pytest.mark.parametrize(("dtype", "bucket"), KERNELS, ids=str)


def check(device, q, k, v, moving, **options):
    """Tangents of the tensors that are named."""
    every = tangents_of({"q": q, "k": k, "v": v, **options})
    return check_tangents(q, k, v, {n: every[n] for n in moving}, call=tangents_on(device), **options)


@every_device
@every_kernel
@pytest.mark.parametrize("moving", ["qkv", "k", "qv", "v"])
def test_whole_tiles(device, dtype, bucket, moving):
    check(device, *qkv(1, 1, 64, 96, bucket, dtype=dtype), moving)


@every_device
@every_kernel
def test_edges_grouped_heads_and_an_odd_head_dim(device, dtype, bucket):
    """Rows that no 16 bytes divide, a window on both sides, lengths, rows and a sample that see nothing."""
    q, k, v = qkv(2, 2, 75, 140, bucket - 7, bucket - 15, heads_kv=1, dtype=dtype)
    lengths = {"key_lengths": [127, 0], "query_lengths": [68, 75]}
    check(device, q, k, v, "qkv", window=(60, 20), **lengths)


EVERYTHING = ["q", "k", "v", "bias", "mask", "alibi_slopes", "sinks"]
TERMS = {
    "half and float": ("half", F32),
    "float and bool": (F32, torch.bool),
    "float and half": (F32, "half"),
}


def every_option(device, dtype, batch, len_q, len_k, which="half and float"):
    """Every option of two heads; one of two samples sees nothing. which: dtypes of bias and mask."""
    of_bias, of_mask = (dtype if t == "half" else t for t in TERMS[which])
    mask = randn(batch, 1, len_q, len_k, seed=6)
    return {
        "bias": randn(batch, 2, len_q, len_k, dtype=of_bias, seed=5),
        "mask": mask > -1 if of_mask == torch.bool else mask.to(of_mask),
        "softcap": 3.0,
        "alibi_slopes": (randn(2, seed=7).abs() * 0.05).to(of_bias),
        "sinks": randn(2, dtype=of_bias, seed=8),
        "dropout_p": 0.2,
        "keep": dropout_factors(device, batch, 2, len_q, len_k, 0.2, seed=1),
        "generator": generator(device, 1),
        "causal": True,
        "key_lengths": [len_k - 10, 0][:batch],
    }


@every_device
@every_kernel
@pytest.mark.parametrize("which", TERMS)
def test_every_option(device, dtype, bucket, which):
    """And every tangent."""
    q, k, v = qkv(2, 2, 40, 75, bucket - 8, bucket - 9, heads_kv=1, dtype=dtype)
    options = every_option(device, dtype, 2, 40, 75, which)
    moving = [n for n in EVERYTHING if n != "mask" or which != "float and bool"]
    check(device, q, k, v, moving, **options)


@every_device
@pytest.mark.parametrize(
    "moving",
    [[n] for n in EVERYTHING]
    + [["q", "k"], ["q", "bias"], ["v", "sinks"], ["k", "v"], ["bias", "mask"], ["alibi_slopes", "v"]],
    ids="-".join,
)
def test_some_tangents_beside_every_option(device, moving):
    q, k, v = qkv(1, 2, 40, 90, 24, dtype=F16)
    check(device, q, k, v, moving, **every_option(device, F16, 1, 40, 90))


@every_device
@pytest.mark.parametrize("moving", ["q", "k", "v", "qk", "kv"])
def test_some_tangents_without_options(device, moving):
    q, k, v = qkv(1, 2, 40, 90, 24, dtype=BF16)
    check(device, q, k, v, moving, causal=True)


@every_device
@pytest.mark.parametrize(
    "sizes", [(1, 1), (1, 147), (113, 203), (128, 217), (257, 63), (64, 64), (5, 0)], ids=str
)
@pytest.mark.parametrize("causal", [False, True])
def test_sizes(device, sizes, causal):
    batch_last = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in qkv(1, 2, *sizes, 64, dtype=F16)]
    check(device, *batch_last, "qkv", causal=causal)


@every_device
@pytest.mark.parametrize("dim", [1, 7, 32, 59, 64, 72, 80, 96, 111, 128, 160, 192, 224, 256])
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_head_dims(device, dim, dtype):
    q, k, v = qkv(1, 1, 19, 37, dim, max(1, dim - 3), dtype=dtype)
    check(device, q, k, v, "qkv", causal=True)


@every_device
@pytest.mark.parametrize("dim", [1, 90, 250])
def test_values_wider_than_keys(device, dim):
    check(device, *qkv(1, 1, 3, 40, dim, dim + 6, dtype=F16), "qkv")


@every_device
@pytest.mark.parametrize(
    "shape",
    [(1, 1, 33, 70), (2, 1, 1, 70), (1, 6, 1, 1), (2, 6, 33, 70), (1, 1, 33, 1), (2, 1, 1, 1)],
    ids=str,
)
def test_bias_of_every_broadcast_shape(device, shape):
    q, k, v = qkv(2, 6, 33, 70, 40, heads_kv=2, dtype=F16)
    bias = randn(*shape, dtype=F16, seed=5)
    check(device, q, k, v, ["bias", "q"], bias=bias, window=(50, 30))


@every_device
def test_slopes_of_each_sample(device):
    q, k, v = qkv(2, 2, 33, 70, 40, dtype=BF16)
    slopes = randn(2, 2, dtype=F32, seed=5).abs() * 0.1
    check(device, q, k, v, ["alibi_slopes", "k"], alibi_slopes=slopes)


@every_device
def test_tangents_with_strides_of_their_own(device):
    """Heads inside, and storage that no 16 bytes divide: the op makes an aligned copy of that one."""
    q, k, v = qkv(2, 3, 20, 37, 40, dtype=F16)
    t = dict(zip("qkv", qkv(2, 3, 20, 37, 40, dtype=F16, seed=9), strict=True))
    want = tangents_on(device)(q, k, v, t)
    inside = t["k"].transpose(1, 2).contiguous().transpose(1, 2)
    odd = torch.zeros(t["v"].numel() + 1, dtype=F16)[1:].view_as(t["v"]).copy_(t["v"])
    reversed_axes = t["q"].mT.contiguous().mT
    got = tangents_on(device)(q, k, v, {"q": reversed_axes, "k": inside, "v": odd})
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@every_device
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_hidden_never_matters(device, dtype, bad):
    """Not even its tangents: masked keys, storage past key_lengths, rows past query_lengths."""
    n, m = 37, 75
    x, t = (
        [*qkv(2, 2, n, m, 5, 7, dtype=dtype, seed=s), randn(2, 2, n, m, seed=s + 7, dtype=dtype)]
        for s in (1, 3)
    )
    mask = torch.ones(m, dtype=torch.bool)
    mask[[1, 64]] = False
    options = {"mask": mask.expand(n, m), "softcap": 3.0, "key_lengths": [70, 0], "query_lengths": [n - 1, n]}

    def tangents():
        of = dict(zip(("q", "k", "v", "bias"), t, strict=True))
        return tangents_on(device)(*x[:3], of, bias=x[3], **options)

    clean = tangents()
    for q, k, v, bias in (x, t):
        q[0, :, -1:] = bad
        k[:, :, ~mask] = bad
        bias[..., ~mask] = bad if q is t[0] else -math.inf
        for b, length in enumerate(options["key_lengths"]):
            k[b, :, length:], v[b, :, length:] = bad, bad
    for got, want in zip(tangents(), clean, strict=True):
        assert torch.equal(got, want)
        assert want[0].isfinite().all()
        assert want[0].abs().max() > 0
        assert not want[1].any()


@every_device
@pytest.mark.parametrize("sinks", [False, True])
def test_rows_that_see_nothing_are_zero(device, sinks):
    """Hidden by a bool mask, a bias of -inf or query_lengths, beside tangents of V that are NaN."""
    q, k, v = qkv(1, 1, 20, 40, 16, dtype=F16)
    tangents = {"q": q, "k": k, "v": torch.full_like(v, math.nan)}
    bias = torch.zeros(1, 1, 20, 40, dtype=F16)
    bias[:, :, 2] = -math.inf
    mask = torch.ones(20, 40, dtype=torch.bool)
    mask[4] = False
    options = {"bias": bias, "mask": mask}
    if sinks:
        options["sinks"] = torch.tensor([0.5])
        tangents["sinks"] = torch.tensor([2.0])
    out, lse = tangents_on(device)(q, k, v, tangents, query_lengths=[18], **options)
    empty = [2, 4, 18, 19]
    assert not out[:, :, empty].any()
    assert torch.equal(lse[0, 0, empty], torch.full((4,), 2.0 if sinks else 0.0))
    assert out[:, :, 5].isnan().all()


@every_device
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_a_mask_of_the_smallest_number_absorbs(device, dtype):
    """A row of finfo.min throughout has equal weights, not none."""
    q, k, v = qkv(1, 2, 20, 70, 32, dtype=dtype)
    bias = randn(1, 2, 20, 70, dtype=F32, seed=5)
    bias[:, :, 3] = torch.finfo(F32).min
    bias[:, :, :, 60:] = torch.finfo(F32).min
    bias[:, :, 5, ::2] = -math.inf
    check(device, q, k, v, ["q", "k", "v", "bias"], bias=bias)


@every_device
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_rows_of_one_weight_do_not_move(device, dtype):
    """S. = 100 on the one key of weight 1 has no influence on out: nor must its rounding to half."""
    q, k, v = qkv(1, 1, 20, 70, 64, dtype=dtype)
    moving = {"q": randn(*q.shape, dtype=dtype, seed=8), "k": randn(*k.shape, dtype=dtype, seed=9)}
    out, lse = tangents_on(device)(q * 32, k * 32, v, moving)
    assert lse.abs().max() > 50
    assert out.abs().max() < 1e-4


@every_device
def test_a_second_run_gives_the_same_bits(device):
    q, k, v = qkv(2, 4, 130, 190, 64, heads_kv=2, dtype=F16)
    t = dict(zip("qkv", qkv(2, 4, 130, 190, 64, heads_kv=2, dtype=F16, seed=9), strict=True))
    first, second = (tangents_on(device)(q, k, v, t, causal=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
