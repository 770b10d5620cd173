"""Every CUDA kernel against the formula, forward and backward: in ptxrun, and on a GPU where there is one.

There is one kernel for each half type, bucket of head dims, direction and variant, each with code of its own
for whole tiles, tiles at the edge of what is visible, and tiles cut short. The problems below are the
smallest that send a kernel through all of it; `pytest --kernel-lines=FILE` tells which lines they leave out.
test_cuda_faults.py has the options one by one, in more shapes, on fewer kernels.
"""

import math

import pytest
import torch
from cuda_kernels import DEVICES, attention_on, dropout_factors, generator
from oracle import check, check_forward, qkv, randn

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
BUCKETS = (32, 64, 96, 128, 192, 256)

every_device = pytest.mark.parametrize("device", DEVICES)
TENSOR_CORES = [(dtype, b) for b in BUCKETS for dtype in (F16, BF16)]
CUDA_CORES = [(F16, 272), (BF16, 272), (F32, 40), (F64, 40)]

every_kernel = pytest.mark.parametrize(("dtype", "bucket"), TENSOR_CORES, ids=str)
every_other_kernel_too = pytest.mark.parametrize(("dtype", "bucket"), TENSOR_CORES + CUDA_CORES, ids=str)


def call(device, **options):
    """One multiprocessor: no tile of queries is so few that its keys would be split."""
    return attention_on(device, multiprocessors=1, **options)


def widths(bucket, less_qk, less_v):
    """Head dims of q and k, and of v. Above 256 one of them is enough; slices of q and k take time."""
    return (40 if bucket > 256 else bucket) - less_qk, bucket - less_v


def everything(device, q, k, seed=1, dtype=None):
    """All options at once, and the tensors among them, of this dtype or q's, want gradients."""
    (batch, heads, n, _), m = q.shape, k.shape[2]
    return {
        "mask": randn(batch, 1, n, m, seed=6) > -1,
        "softcap": 3.0,
        "alibi_slopes": randn(heads, dtype=dtype or q.dtype, seed=7).abs() * 0.05,
        "sinks": randn(heads, dtype=dtype or q.dtype, seed=8),
        "dropout_p": 0.2,
        "keep": dropout_factors(device, batch, heads, n, m, 0.2, seed=seed),
        "generator": generator(device, seed),
    }


@every_device
@every_kernel
def test_whole_tiles(device, dtype, bucket):
    """The main loops: more keys than the ring of copies holds, and the loop's last tile is a whole one."""
    check(*qkv(1, 1, 128, 256, bucket, dtype=dtype), call=call(device))


@every_device
@every_other_kernel_too
def test_edges_grouped_heads_and_an_odd_head_dim(device, dtype, bucket):
    """Rows that no 16 bytes divide, a window on both sides, lengths, rows and a sample that see nothing."""
    len_q, len_k = (147, 203) if (dtype, bucket) in TENSOR_CORES else (21, 70)
    q, k, v = qkv(2, 2, len_q, len_k, *widths(bucket, 7, 15), heads_kv=1, dtype=dtype)
    lengths = {"key_lengths": [len_k - 13, 0], "query_lengths": [len_q - 7, len_q]}
    check(q, k, v, call=call(device), window=(90, 20), **lengths)


@every_device
@every_kernel
def test_scores_that_grow_from_tile_to_tile(device, dtype, bucket):
    """The forward walks from the last keys to the first: each tile leaves the main loop for the exact one."""
    q, k, v = qkv(1, 1, 65, 260, bucket, dtype=dtype)
    k = (k.double() * torch.linspace(8, 0.1, 260)[:, None]).to(dtype)
    check(q, k, v, call=call(device))


@every_device
@every_other_kernel_too
def test_every_option(device, dtype, bucket):
    """The full variants, with a bias that has every axis; one sample sees nothing."""
    of_bias = F32 if dtype == BF16 else dtype
    len_q, len_k = (70, 150) if (dtype, bucket) in TENSOR_CORES else (21, 70)
    q, k, v = qkv(2, 2, len_q, len_k, *widths(bucket, 8, 9), heads_kv=1, dtype=dtype)
    bias = randn(2, 2, len_q, len_k, dtype=of_bias, seed=5)
    options = everything(device, q, k, dtype=of_bias)
    check(q, k, v, bias=bias, causal=True, key_lengths=[len_k - 10, 0], call=call(device), **options)


@every_device
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("case", ["plain", "every option", "float32 terms", "one split"])
def test_decoding(device, dtype, dim, case):
    """Few queries: keys in splits, all query heads of a group at once."""
    q, k, v = qkv(2, 6, 3, 300, dim, dim - 5, heads_kv=2, dtype=dtype)
    options = {"causal": True}
    if case == "every option":
        bias = randn(2, 6, 3, 300, dtype=dtype, seed=5)
        options = {**everything(device, q, k), "bias": bias, "window": (200, 2), "key_lengths": [280, 0]}
    elif case == "float32 terms":
        bias, mask = randn(1, 6, 3, 300, dtype=F32, seed=5), randn(2, 1, 3, 300, dtype=F32, seed=6)
        mask[..., ::7] = -math.inf
        options |= {"bias": bias, "mask": mask, "query_lengths": [2, 3]}
        options |= {"alibi_slopes": randn(6, seed=7).float().abs() * 0.05, "sinks": randn(6, dtype=F32)}
    elif case == "one split":
        options["mask"] = randn(2, 1, 3, 300, dtype=dtype, seed=6)
    on = attention_on(device, multiprocessors=1 if case == "one split" else 108)
    # Few queries have no backward of their own: two cases show that it follows such a forward.
    judge = check if case in ("plain", "every option") else check_forward
    judge(q, k, v, call=on, **options)
    if case == "one split":
        for of_sinks in (dtype, F32):
            check_forward(q, k, v, call=on, **options, sinks=randn(6, dtype=of_sinks, seed=7))


@every_device
@every_kernel
@pytest.mark.parametrize("terms", ["half and float", "float and bool"])
def test_aligned_bias_and_mask_on_whole_tiles(device, dtype, bucket, terms):
    """Eight keys a load, and tiles that everybody sees."""
    q, k, v = qkv(1, 1, 64, 128, bucket, dtype=dtype)
    half, single = randn(1, 1, 64, 128, dtype=dtype, seed=5), randn(1, 1, 64, 128, dtype=F32, seed=6)
    pair = (
        {"bias": half, "mask": single} if terms == "half and float" else {"bias": single, "mask": half > -1}
    )
    check(q, k, v, call=call(device), **pair)


@every_device
@every_other_kernel_too
@pytest.mark.parametrize("sum_over", ["queries and heads", "keys"])
def test_broadcast_bias_and_float_mask(device, dtype, bucket, sum_over):
    """Gradients that are summed over broadcast axes have kernels of their own."""
    n = 70 if (dtype, bucket) in TENSOR_CORES else 40
    q, k, v = qkv(2, 2, n, 77, *widths(bucket, 0, 0), dtype=dtype)
    single = F64 if dtype == F64 else F32
    shapes = (
        [(1, 2, 1, 77), (2, 1, n, 77)] if sum_over == "queries and heads" else [(2, 1, 1, 1), (1, 2, n, 1)]
    )
    options = {
        "bias": randn(*shapes[0], dtype=dtype, seed=5),
        "mask": randn(*shapes[1], dtype=dtype if sum_over == "keys" else single, seed=6),
        "alibi_slopes": randn(2, dtype=single, seed=7).abs() * 0.05,
        "key_lengths": [77, 60],
        "query_lengths": [n - 9, n],
    }
    check(q, k, v, window=(60, 30), call=call(device), **options)


@every_device
@every_other_kernel_too
def test_every_option_beside_a_broadcast_bias(device, dtype, bucket):
    q, k, v = qkv(1, 2, 70, 77, *widths(bucket, 7, 9), heads_kv=1, dtype=dtype)
    options = everything(device, q, k)
    bias = randn(1, 1, 70, 77, dtype=F64 if dtype == F64 else F32, seed=5)
    check(q, k, v, bias=bias, window=(60, 40), query_lengths=[65], call=call(device), **options)


@every_device
@every_other_kernel_too
def test_gradients_of_bias_and_mask_that_no_query_sees(device, dtype, bucket):
    """Tiles of keys before the window and beyond the length have a gradient of 0, in the scores' shape."""
    q, k, v = qkv(1, 1, 19, 340, 8, bucket, dtype=dtype)
    bias = {"bias": randn(1, 1, 19, 340, dtype=dtype, seed=5)}
    mask = randn(1, 1, 19, 340, dtype=dtype, seed=6)
    for terms in (bias, {"mask": mask if dtype == F64 else mask.float()}, {**bias, "mask": mask}):
        check(q, k, v, window=(120, 0), key_lengths=[250], call=call(device), **terms)


@every_device
@every_other_kernel_too
def test_each_gradient_alone(device, dtype, bucket):
    """Kernels leave out what serves other gradients only; the numbers stay."""
    widest = 40 if bucket > 256 else bucket  # of q and k
    for dim in (widest, widest - 7):
        tensors = [*qkv(1, 1, 40, 100, dim, bucket, dtype=dtype), randn(1, 1, 40, 100, dtype=dtype, seed=5)]

        def gradients(wanted, tensors=tensors):
            q, k, v, bias = leaves = [t.detach().requires_grad_(n in wanted) for n, t in enumerate(tensors)]
            out, _ = call(device)(q, k, v, bias=bias)
            grad_out = randn(*out.shape, dtype=dtype, seed=6)
            return torch.autograd.grad(out, [leaves[n] for n in wanted], grad_out)

        for n, expected in enumerate(gradients(range(4))):
            torch.testing.assert_close(gradients([n])[0], expected)


@every_device
@every_other_kernel_too
@pytest.mark.parametrize("narrow", ["queries and keys", "values"])
def test_head_dims_far_apart(device, dtype, bucket, narrow):
    """Of the narrow one, most pieces of a row in shared memory lie outside: they are zero, and stay so."""
    dims = (8, bucket) if narrow == "queries and keys" else (bucket, 8)
    q, k, v = qkv(1, 1, 40, 100, *dims, dtype=dtype)
    check(q, k, v, call=call(device))
    check(q, k, v, bias=randn(1, 1, 40, 100, dtype=dtype, seed=5), call=call(device))


@every_device
@pytest.mark.parametrize(
    ("dtype", "dim", "dim_v"),
    [
        (F16, 131, 265),
        (BF16, 131, 265),
        (F16, 40, 264),
        (BF16, 40, 264),
        (F32, 131, 131),
        (F32, 72, 72),
        (F64, 35, 67),
    ],
    ids=str,
)
def test_whole_tiles_in_several_chunks(device, dtype, dim, dim_v):
    """All rows of a tile are stored, also where no vector divides them; one sample has no queries."""
    q, k, v = qkv(2, 2, 64, 65, dim, dim_v, heads_kv=2 if dtype == F64 else 1, dtype=dtype)
    check(q, k, v, query_lengths=[64, 0], call=call(device))


@every_device
@pytest.mark.parametrize(("dtype", "dim_v"), [(F16, 272), (BF16, 272), (F32, 24), (F64, 24)], ids=str)
@pytest.mark.parametrize("dim", [40, 39])
def test_infinite_numbers_of_hidden_queries_and_keys(device, dtype, dim, dim_v):
    """Without a partner they have dS = 0, and 0 * inf must not reach the gradient of the others."""
    q, k, v = qkv(1, 1, 64, 70, dim, dim_v, dtype=dtype)
    mask = torch.ones(1, 1, 64, 70, dtype=torch.bool)
    mask[:, :, ::3] = mask[..., ::3] = False
    q[:, :, ::3] = k[:, :, ::3] = torch.tensor([math.inf, math.nan], dtype=dtype).repeat(dim)[:dim]
    check(q, k, v, mask=mask, sinks=randn(1, dtype=dtype), call=call(device))


@every_device
@every_other_kernel_too
def test_nan_in_every_row(device, dtype, bucket):
    """It goes through all of the softmax, and its LSE is NaN."""
    q, k, v = qkv(1, 1, 64, 16, 8, bucket, dtype=dtype)
    check(q.fill_(math.nan), k, v, call=call(device))
    check(q, k, v, bias=randn(1, 1, 64, 16, dtype=dtype), call=call(device))


@every_device
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_nan_in_decoding(device, dtype, dim):
    q, k, v = qkv(1, 4, 4, 300, 8, dim, heads_kv=1, dtype=dtype)
    for multiprocessors in (1, 108):
        on = attention_on(device, multiprocessors=multiprocessors)
        check_forward(q.fill_(math.nan), k, v, call=on)


@every_device
def test_exponents_at_the_end_of_float64(device):
    """exp(x) has a path of its own below -708, where its results lose bits."""
    q, k, v = qkv(1, 2, 40, 130, 8)
    bias = torch.linspace(-745, -710, 130, dtype=F64).repeat(1, 2, 1, 1)
    bias[0, 0, 0, 0] = bias[0, 1, 0, -1] = 0  # the maximum is in the first tile of keys, or in the last
    check(q, k, v, bias=bias, sinks=torch.tensor([-720.0, 720.0], dtype=F64), call=call(device))


@every_device
@pytest.mark.parametrize("dtype", [F16, F64], ids=str)
def test_gradients_that_are_sums_over_no_sample(device, dtype):
    q, k, v = qkv(0, 2, 5, 7, 8, dtype=dtype)
    got = check(q, k, v, sinks=torch.ones(2, dtype=dtype), call=call(device))
    assert not got["dsinks"].any()


@every_device
@pytest.mark.parametrize("dtype", [F16, BF16, F64], ids=str)
def test_gradients_that_are_sums_over_many_rows(device, dtype):
    """More than four for each thread of the kernel that adds them up."""
    q, k, v = qkv(1, 2, 1030 if dtype == F64 else 1540, 3, 8, dtype=dtype)
    options = {"alibi_slopes": randn(2, dtype=dtype, seed=7).abs() * 0.05}
    options["sinks"] = torch.tensor([0.5, -720.0], dtype=dtype)  # exp(-720) is not 0 in float64
    check(q, k, v, call=call(device), **options)


@every_device
@pytest.mark.parametrize(("dtype", "dim"), [(F16, 192), (BF16, 192), (F16, 256), (BF16, 256)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_gpus_with_less_shared_memory(device, dtype, dim, causal):
    """Head dims above 128 have forward kernels of their own where a block gets 99 KiB."""
    small = call(device, arch="sm_86")
    q, k, v = qkv(1, 2, 80, 260, dim, heads_kv=1, dtype=dtype)
    growing = (k.double() * torch.linspace(8, 0.1, 260)[:, None]).to(dtype)
    lengths = {"key_lengths": [140, 0], "query_lengths": [75, 80]}
    check_forward(q, growing, v, causal=causal, call=small)
    odd = qkv(2, 1, 80, 150, dim - 9, dim - 15, dtype=dtype)
    check_forward(*odd, causal=causal, call=small, **lengths)
    check_forward(q[:, :, :64].fill_(math.nan), k[:, :, :16], v[:, :, :16], causal=causal, call=small)


@every_device
@pytest.mark.parametrize(
    "sizes", [(1, 1), (1, 147), (113, 203), (128, 217), (257, 63), (64, 64), (5, 0)], ids=str
)
@pytest.mark.parametrize("causal", [False, True])
def test_sizes(device, sizes, causal):
    batch_last = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in qkv(1, 1, *sizes, 64, dtype=F16)]
    check(*batch_last, causal=causal, call=call(device))


@every_device
@pytest.mark.parametrize("dim", [1, 7, 32, 59, 64, 72, 80, 96, 111, 128, 160, 192, 224, 256, 320])
@pytest.mark.parametrize("dtype", [F16, BF16, F32, F64], ids=str)
def test_head_dims(device, dtype, dim):
    q, k, v = qkv(1, 1, 19, 37, dim, max(1, dim - 3), dtype=dtype)
    check(q, k, v, causal=True, call=call(device))


@every_device
@pytest.mark.parametrize("dtype", [F16, F32], ids=str)
@pytest.mark.parametrize(
    "shape",
    [(1, 1, 33, 70), (2, 1, 1, 70), (1, 2, 1, 1), (2, 2, 33, 70), (1, 1, 33, 1), (2, 1, 1, 1)],
    ids=str,
)
def test_bias_of_every_broadcast_shape(device, dtype, shape):
    q, k, v = qkv(2, 2, 33, 70, 40, heads_kv=1, dtype=dtype)
    check(q, k, v, bias=randn(*shape, dtype=dtype, seed=5), call=call(device))
