"""Block masks in the tensor-core kernels: in ptxrun, and on a GPU where there is one.

Errors are judged by the rule of oracle.py. Every result has, moreover, the bits that the dense mask gives.
"""

import math

import pytest
import torch
from block_masks import mask_of
from cuda_kernels import DEVICES, attention_on, dropout_factors, generator, tangents_on
from oracle import assert_close, check, check_tangents, oracle, qkv, randn, results, tangents_of

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
BUCKETS = (32, 64, 96, 128, 192, 256)
every_kernel = pytest.mark.parametrize(
    ("dtype", "bucket"), [(dtype, b) for b in BUCKETS for dtype in (F16, BF16)], ids=str
)


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


def few_blocks(shape, visible):
    """A map of hidden blocks but for those at the places `visible`, a full one and partial ones."""
    blocks = torch.zeros(shape, dtype=torch.int32)
    for n, place in enumerate(visible):
        blocks[place] = n + 1
    return blocks


def everything(device, tensors, keep=None, judge=False, poison=None, **options):
    """{name: out, lse, their gradients and tangents}; judge: hold them against the formula.

    poison: {name: what is added to the tensor that the kernels get}. One multiprocessor: no tile of queries
    is so few that its keys would be split.
    """
    attend, move = (
        poisoned(on(device, multiprocessors=1), poison or {}) for on in (attention_on, tangents_on)
    )
    tangents = tangents_of(tensors)

    def given():  # both calls draw the same random numbers
        return {**options, "generator": generator("cpu", 9)} if "dropout_p" in options else options

    if judge:
        found = check(**tensors, **given(), call=attend, keep=keep)
        moved = check_tangents(**tensors, **given(), tangents=tangents, call=move, keep=keep)
    else:
        shape, dtype = (*tensors["q"].shape[:3], tensors["v"].shape[3]), tensors["q"].dtype
        cotangents = [
            randn(*shape, dtype=dtype, seed=100),
            randn(*shape[:3], seed=101),
        ]  # as check() has them
        found = results(attend, tensors, cotangents, given())
        moved = move(**tensors, tangents=tangents, **given())
    return {**found, "tangent of out": moved[0], "tangent of lse": moved[1]}


def poisoned(call, poison):
    return lambda **given: call(**{n: x + poison[n] if n in poison else x for n, x in given.items()})


def assert_same_bits(got, want):
    for name in want:
        assert torch.equal(got[name], want[name]), name


N, K = 70, 200  # 2 x 4 blocks, ragged
OF_HEADS = [[[[0, 3, 1, 0], [1, 2, 0, 2]], [[2, 0, 0, 1], [0] * 4]]]
OF_SAMPLES = [[[[1, 0, 2, 1], [0, 2, 1, 0]]], [[[0, 3, 1, 0], [3, 0, 0, 0]]]]
NOTHING = [[[[0] * 4] * 2]]


def options_of(dtype):
    """{name: (blocks, batch, tensors, other options)}"""

    def normal(*shape):
        return randn(*shape, dtype=dtype, seed=5)

    terms = {
        "alibi_slopes": randn(2, dtype=dtype, seed=7).abs() * 0.05,
        "sinks": randn(2, dtype=dtype, seed=8),
    }
    lengths = {"key_lengths": [K, 100], "query_lengths": [66, N]}
    some = randn(1, 2, N, K, seed=6) > -1
    return {
        "causal": (OF_SAMPLES, 2, {"bias": normal(2, 2, N, K)}, {"causal": True, **lengths}),
        "dropout": (OF_HEADS, 1, {"bias": normal(1, 1, N, K)}, {"dropout_p": 0.3, "window": (100, 60)}),
        "all": (OF_HEADS, 1, {"bias": normal(1, 2, N, 1), **terms}, {"mask": some, "softcap": 2.0}),
        "nothing": (NOTHING, 1, {"bias": normal(1, 2, N, K), **terms}, {}),
    }


@pytest.mark.parametrize(
    ("dtype", "bucket", "name"),
    [(dtype, b, "causal") for b in BUCKETS for dtype in (F16, BF16)]
    + [(F16, b, name) for b, name in [(64, "dropout"), (128, "all"), (192, "all"), (256, "dropout")]]
    + [(BF16, 96, "nothing")],
    ids=str,
)
def test_options(device, dtype, bucket, name):
    blocks, batch, terms, options = options_of(dtype)[name]
    q, k, v = qkv(batch, 2, N, K, bucket - 7, bucket - 9, heads_kv=1, dtype=dtype)
    tensors, mask = {"q": q, "k": k, "v": v, **terms}, mask_of(blocks, N, K)
    keep = dropout_factors(device, batch, 2, N, K, 0.3, seed=9) if name == "dropout" else None
    got = everything(device, tensors, keep, judge=True, block_mask=mask, **options)
    dense = mask.to_dense() & options.pop("mask", torch.tensor(True))
    assert_same_bits(got, everything(device, tensors, mask=dense, **options))


# (query heads, queries, keys), shape of the map, visible blocks, shape of a bias. More blocks are hidden in
# a row than a warp reads of the map at once: along the keys, the queries and the heads. The gradient of the
# bias is a sum along that axis, too, in a kernel with walks of its own.
FAR = {
    "keys": ((1, 20, 64 * 36 + 3), (1, 1, 1, 37), [(0, 0, 0, 34), (0, 0, 0, 36), (0, 0, 0, 0)], (1, 1, 1, 1)),
    "queries": ((1, 64 * 34 + 3, 70), (1, 1, 35, 2), [(0, 0, 34, 0), (0, 0, 0, 1)], (1, 1, 1, 70)),
    "heads": ((35, 20, 70), (1, 35, 1, 2), [(0, 0, 0, 0), (0, 34, 0, 0), (0, 1, 0, 1)], (1, 1, 20, 70)),
}


@every_kernel
@pytest.mark.parametrize("along", FAR)
def test_hidden_blocks_are_not_visited(device, dtype, bucket, along):
    """Where a key has no weight NaN still makes NaN, 0 * NaN: but not where nothing is computed."""
    (heads, len_q, len_k), shape, visible, of_bias = FAR[along]
    blocks = few_blocks(shape, visible)
    q, k, v = qkv(1, heads, len_q, len_k, 8, bucket, heads_kv=1, dtype=dtype)
    tensors = {"q": q, "k": k, "v": v, "bias": randn(*of_bias, dtype=dtype, seed=5)}
    used = (blocks != 0).any(1).any(0)
    in_queries, in_keys = (
        torch.where(used.any(axis).repeat_interleave(64)[:n, None], 0.0, math.nan).to(dtype)
        for axis, n in ((1, len_q), (0, len_k))
    )
    poison = {"q": in_queries, "k": in_keys, "v": in_keys}
    everything(device, tensors, judge=True, poison=poison, block_mask=mask_of(blocks, len_q, len_k))


def test_many_random_blocks(device):
    """Gaps of all lengths, on both sides of where a warp reads on."""
    draw = torch.Generator().manual_seed(3)
    blocks = torch.randint(0, 4, (1, 2, 3, 45), generator=draw)
    blocks[torch.rand(blocks.shape, generator=draw) > 0.1] = 0
    q, k, v = qkv(1, 2, 130, 64 * 45, 8, heads_kv=1, dtype=F16)
    tensors = {"q": q, "k": k, "v": v, "bias": randn(1, 1, 1, 64 * 45, dtype=F16, seed=5)}
    everything(device, tensors, judge=True, block_mask=mask_of(blocks, 130, 64 * 45))


every_decoding_kernel = pytest.mark.parametrize(
    ("dtype", "dim"), [(dtype, dim) for dim in (64, 128, 256) for dtype in (F16, BF16)], ids=str
)


@every_decoding_kernel
def test_decoding(device, dtype, dim):
    """The window makes tiles begin anywhere in a block, and rows of one tile have blocks of several heads."""
    blocks = few_blocks((2, 4, 1, 9), [(0, 0, 0, 3), (0, 3, 0, 8), (1, 1, 0, 1)])
    blocks[1, 2, 0, ::3] = 1
    q, k, v = qkv(2, 4, 3, 515, 8, dim - 5, heads_kv=2, dtype=dtype)
    mask, attend = mask_of(blocks, 3, 515), attention_on(device, multiprocessors=9)
    options = {"window": (496, 2), "key_lengths": [515, 445]}
    if dim == 64:
        check(q, k, v, block_mask=mask, call=attend, **options)
    got = attend(q, k, v, block_mask=mask, **options)
    want = attend(q, k, v, mask=mask.to_dense(), **options)
    for name, x, y in zip(("out", "lse"), got, want, strict=True):
        assert torch.equal(x, y), name


@every_decoding_kernel
def test_decoding_visits_no_hidden_tiles(device, dtype, dim):
    """More is hidden than a warp reads of the map at once, early and where copies are under way already."""
    len_k = 64 * 72 + 3
    blocks = torch.zeros(1, 1, 1, 73, dtype=torch.int32)
    blocks[..., [0, 34, 35, 36, 37, 38, 72]] = torch.tensor([1, 2, 3, 1, 1, 2, 3], dtype=torch.int32)
    q, k, v = qkv(1, 4, 3, len_k, 8, dim, heads_kv=2, dtype=dtype)
    hidden = (blocks[0, 0, 0] == 0).repeat_interleave(64)[:len_k, None]
    poison = torch.where(hidden, math.nan, 0.0).to(dtype)
    mask = mask_of(blocks, 3, len_k)
    got = attention_on(device, multiprocessors=1)(q, k + poison, v + poison, block_mask=mask)
    truth, plain = (oracle(q, k, v, block_mask=mask, dtype=of) for of in (torch.float64, dtype))
    assert_close("out", got[0], truth[0], plain[0])


def test_decoding_many_queries(device):
    """Few tiles leave a GPU idle: keys are split for 70 queries, too, which lie in two rows of blocks."""
    q, k, v = qkv(1, 1, 70, 1100, 8, dtype=F16)
    mask = mask_of(few_blocks((1, 1, 2, 18), [(0, 0, 1, 2), (0, 0, 0, 9), (0, 0, 1, 17)]), 70, 1100)
    check(q, k, v, block_mask=mask, call=attention_on(device))


def test_entries_that_name_no_tile_hide(device):
    q, k, v = qkv(1, 2, N, K, 8, heads_kv=1, dtype=F16)
    mask, hidden = (mask_of([[[[1, other, 2, 0], [other, 3, other, 1]]]], N, K) for other in (4, 0))
    mask.map[0, 0, 1, 0], mask.map[0, 0, 1, 2] = -1, 2**31 - 1
    tensors = {"q": q, "k": k, "v": v}
    got = everything(device, tensors, block_mask=mask)
    assert_same_bits(got, everything(device, tensors, block_mask=hidden))
