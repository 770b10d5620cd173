"""Block masks in the CUDA kernels for every head dim, on a GPU if there is one, else in ptxrun.

Errors are judged by the rule of oracle.py. Every result has, moreover, the bits that the dense mask gives.
"""

import math

import pytest
import torch
from block_masks import mask_of
from cuda_kernels import DEVICES, attention_on, dropout_factors, generator, tangents_on
from oracle import check, check_tangents, qkv, randn, results, tangents_of

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
KERNELS = {"f32": F32, "tf32": F32, "f64": F64, "f16": F16, "bf16": BF16}
every_kernel = pytest.mark.parametrize("kernel", KERNELS)


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


def problem(kernel, batch, heads, len_q, len_k):
    """{"q", "k", "v"} with one KV head. Half types come to these kernels with a head dim above 256."""
    dim_v = 257 if KERNELS[kernel] in (F16, BF16) else 12
    tensors = qkv(batch, heads, len_q, len_k, 8, dim_v, heads_kv=1, dtype=KERNELS[kernel])
    return dict(zip("qkv", tensors, strict=True))


def everything(device, kernel, tensors, keep=None, judge=False, poison=(0, 0, 0), **options):
    """{name: out, lse, their gradients and tangents}; judge: hold them against the formula.

    poison is added to q, k and v, but not to what the formula sees.
    """
    on = {"device": device, "allow_tf32": kernel == "tf32"}
    attend, move = (
        lambda q, k, v, kernels=kernels, **more: kernels(*map(torch.add, (q, k, v), poison), **more)
        for kernels in (attention_on(**on), tangents_on(**on))
    )
    tangents = tangents_of(tensors)

    def given():  # both calls draw the same random numbers
        return {**options, "generator": generator("cpu", 9)} if "dropout_p" in options else options

    if judge:
        rule = {"keep": keep, "tf32": kernel == "tf32"}
        found = check(**tensors, **given(), call=attend, **rule)
        moved = check_tangents(**tensors, **given(), tangents=tangents, call=move, **rule)
    else:
        shape, dtype = (*tensors["q"].shape[:3], tensors["v"].shape[3]), tensors["q"].dtype
        cotangents = [randn(*shape, dtype=dtype, seed=100), randn(*shape[:3], seed=101)]  # those of check()
        found = results(attend, tensors, cotangents, given())
        moved = move(**tensors, tangents=tangents, **given())
    return {**found, "tangent of out": moved[0], "tangent of lse": moved[1]}


def assert_same_bits(got, want):
    for name in want:
        assert torch.equal(got[name], want[name]), name


N, K = 70, 150  # 2 x 3 blocks, ragged
OF_HEADS = [[[[0, 0, 3], [1, 2, 0]], [[2, 0, 0], [0, 1, 1]]]]
OF_SAMPLES = [[[[1, 0, 2], [0, 2, 1]]], [[[0, 3, 1], [3, 0, 0]]]]
NOTHING = [[[[0] * 3] * 2]]


def options_of(dtype):
    """{name: (blocks, batch, heads, tensors, other options)}"""

    def normal(*shape):
        return randn(*shape, dtype=dtype, seed=5)

    terms = {
        "alibi_slopes": torch.tensor([0.1, 0.02], dtype=dtype),
        "sinks": torch.tensor([1.0, -2.0], dtype=dtype),
    }
    lengths = {"key_lengths": [K, 100], "query_lengths": [66, N]}
    some = randn(1, 2, N, K, seed=6) > -1
    return {
        "causal": (OF_SAMPLES, 2, 1, {"bias": normal(2, 1, N, K)}, {"causal": True, **lengths}),
        "dropout": (OF_SAMPLES[1:], 1, 1, {}, {"dropout_p": 0.3, "window": (100, 60)}),
        "all": (OF_HEADS, 1, 2, {"bias": normal(1, 2, N, 1), **terms}, {"mask": some, "softcap": 2.0}),
        "nothing": (NOTHING, 1, 2, {"bias": normal(1, 2, N, K), **terms}, {}),
    }


@pytest.mark.parametrize(
    ("kernel", "name"),
    [(kernel, name) for kernel in ("f32", "f64", "tf32") for name in options_of(F32)]
    + [("f16", "dropout")],  # float32's source, but for how numbers are read and written
)
@pytest.mark.filterwarnings("ignore:mask hides every key")
def test_options(device, kernel, name):
    blocks, batch, heads, terms, options = options_of(KERNELS[kernel])[name]
    tensors = problem(kernel, batch, heads, N, K) | terms
    mask = mask_of(blocks, N, K)
    keep = dropout_factors(device, batch, heads, N, K, 0.3, seed=9) if name == "dropout" else None
    got = everything(device, kernel, tensors, keep, judge=True, block_mask=mask, **options)
    dense = mask.to_dense() & options.pop("mask", torch.tensor(True))
    assert_same_bits(got, everything(device, kernel, tensors, mask=dense, **options))


@every_kernel
@pytest.mark.parametrize(
    ("len_q", "len_k", "visible", "bias"),
    # Between visible blocks are more hidden ones than a warp reads of the map at once. One kernel walks along
    # rows for a bias of one number, along columns for a bias of all keys.
    [
        (5, 64 * 71, [(0, 33), (0, 67)], (1, 1, 1, 1)),
        (64 * 35 + 3, 70, [(0, 1), (34, 1)], (1, 1, 1, 70)),
    ],
    ids=["keys", "queries"],
)
def test_hidden_blocks_are_not_visited(device, kernel, len_q, len_k, visible, bias):
    """Where a key has no weight NaN still makes NaN, 0 * NaN: but not where nothing is computed."""
    blocks = torch.zeros(1, 1, -(-len_q // 64), -(-len_k // 64))
    for n, (row, column) in enumerate(visible):
        blocks[0, 0, row, column] = 2 - n
    hidden = blocks[0, 0] == 0
    rows = hidden.all(1).repeat_interleave(64)[:len_q]
    columns = hidden.all(0).repeat_interleave(64)[:len_k]
    tensors = problem(kernel, 1, 1, len_q, len_k)
    poison = [torch.zeros_like(tensors[name]) for name in "qkv"]
    for x, unseen in zip(poison, (rows, columns, columns), strict=True):
        x[:, :, unseen] = math.nan
    terms = {
        name: randn(*shape, dtype=tensors["q"].dtype, seed=5)
        for name, shape in (("bias", bias), ("mask", (1, 1, len_q, len_k)))
    }
    mask = mask_of(blocks, len_q, len_k)
    everything(device, kernel, tensors | terms, judge=True, poison=poison, block_mask=mask)


@every_kernel
def test_unseen_keys_take_no_nan_from_grad_out(device, kernel):
    """The same for the walk along the queries."""
    leaves = [t.requires_grad_() for t in problem(kernel, 1, 1, N, K).values()]
    mask = mask_of([[[[0, 1, 0], [0, 0, 2]]]], N, K)
    out, _ = attention_on(device, allow_tf32=kernel == "tf32")(*leaves, block_mask=mask)
    for grad in torch.autograd.grad(out, leaves, torch.full_like(out, math.nan))[1:]:
        assert not grad[:, :, :64].any()
        assert grad[:, :, 64:128].isnan().all()


def test_entries_that_name_no_tile_hide(device):
    tensors = problem("tf32", 1, 1, N, K)
    mask, hidden = (mask_of([[[[1, other, 2], [other, 3, other]]]], N, K) for other in (4, 0))
    mask.map[0, 0, 1, 0], mask.map[0, 0, 1, 2] = -1, 2**31 - 1
    got = everything(device, "tf32", tensors, block_mask=mask)
    assert_same_bits(got, everything(device, "tf32", tensors, block_mask=hidden))
