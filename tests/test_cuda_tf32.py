"""float32 on the tensor cores, products in TF32: on a GPU if there is one, else in ptxrun.

Errors are judged by the formula in float32 whose products have operands rounded to TF32 (oracle.py).
"""

import math

import pytest
import torch
from cuda_kernels import DEVICES, attention_on, dropout_factors, generator
from oracle import check, qkv, randn, rounded_to_tf32

import attn_ext

F32, INF = torch.float32, math.inf


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


def tf32_on(device):
    return attention_on(device, allow_tf32=True)


def problem(len_q, len_k, dim, dim_v=None, heads=2, heads_kv=1, batch=1):
    return qkv(batch, heads, len_q, len_k, dim, dim_v, heads_kv, F32)


@pytest.mark.parametrize(
    ("len_q", "len_k", "dim", "dim_v"),
    [
        (1, 1, 1, 1),
        (1, 147, 7, 7),
        (113, 203, 59, 80),
        (128, 217, 32, 32),
        (257, 63, 64, 64),
        (64, 64, 128, 128),  # whole tiles of the score and of the output
        (70, 66, 128, 40),  # dV and dK by blocks of their own
        (20, 70, 16, 130),  # two chunks of the output, the second nearly empty
        (66, 20, 200, 3),
        (5, 0, 8, 8),
        (0, 5, 8, 8),
        (3, 4, 0, 8),
        (3, 4, 8, 0),
    ],
)
def test_sizes(device, len_q, len_k, dim, dim_v):
    check(*problem(len_q, len_k, dim, dim_v), call=tf32_on(device), tf32=True)


N, K = 70, 90  # two tiles each way, ragged


def no_key(*rows):
    mask = torch.ones(1, 1, N, K, dtype=torch.bool)
    mask[:, :, list(rows)] = False
    return mask


def some_hidden(*shape):
    return randn(*shape, dtype=F32, seed=7).masked_fill(randn(*shape, seed=8) > 1, -INF)


OPTIONS = {
    "causal": {"causal": True},
    "upper left": {"causal": "upper_left", "window": (40, None)},
    "window": {"window": (10, 3)},
    "lengths": {"key_lengths": [65, 0], "query_lengths": [70, 3]},
    "scale": {"scale": -0.3},
    "bool mask": {"mask": randn(1, 2, N, K, seed=6) > 0},
    "rows without a key": {"mask": no_key(0, 33, 69)},
    "float mask": {"mask": some_hidden(2, 2, N, K)},
    "finfo.min": {"mask": torch.zeros(1, 1, N, K).masked_fill(~no_key(3), torch.finfo(F32).min)},
    "bias": {"bias": randn(2, 2, N, K, dtype=F32, seed=5)},
    "bias over batch": {"bias": randn(1, 2, N, K, dtype=F32, seed=5)},
    "bias over queries": {"bias": randn(2, 1, 1, K, dtype=F32, seed=5)},
    "bias over keys": {
        "bias": randn(1, 2, N, 1, dtype=F32, seed=5),
        "key_lengths": [65, 0],
        "query_lengths": [70, 3],
    },
    "bias of a head": {"bias": randn(1, 2, 1, 1, dtype=F32, seed=5), "mask": some_hidden(1, 1, 1, K)},
    "bias in a band": {  # 0 outside of it
        "bias": randn(2, 2, N, K, dtype=F32, seed=5),
        "mask": some_hidden(2, 2, N, K),
        "window": (3, 0),
        "key_lengths": [90, 20],
    },
    "alibi": {"alibi_slopes": torch.tensor([[0.5, 0.02], [0.1, 0.0]])},
    "softcap": {"softcap": 0.8, "mask": randn(1, 1, N, K, seed=6) > -1},
    "sinks": {"sinks": torch.tensor([1.0, -2.0]), "mask": no_key(5)},
    "all": {
        "bias": randn(1, 2, N, K, dtype=F32, seed=5),
        "mask": randn(1, 2, N, K, seed=6) > -1,
        "causal": True,
        "window": (60, 0),
        "softcap": 2.0,
        "alibi_slopes": torch.tensor([0.1, 0.02]),
        "sinks": torch.tensor([1.0, -2.0]),
        "key_lengths": [90, 71],
    },
}


ODD = {
    "sinks",
    "softcap",
    "all",
    "bias over queries",
    "bias in a band",
}  # rows that are copied element by element


@pytest.mark.parametrize("name", OPTIONS)
def test_options(device, name):
    dim, dim_v = (23, 21) if name in ODD else (24, 20)
    check(*problem(N, K, dim, dim_v, batch=2), call=tf32_on(device), tf32=True, **OPTIONS[name])


@pytest.mark.parametrize(("dim", "options"), [(24, {}), (130, {"causal": True, "softcap": 2.0})])
def test_dropout(device, dim, options):
    q, k, v = problem(N, K, dim, 20)
    keep = dropout_factors(device, 1, 2, N, K, 0.3, seed=4)
    draws = generator("cpu", 4)
    check(
        q, k, v, keep=keep, dropout_p=0.3, generator=draws, call=tf32_on(device), tf32=True,
        bias=randn(1, 1, N, K, dtype=F32), **options,
    )  # fmt: skip


def test_strides_and_odd_addresses(device):
    # Rows of 4-byte alignment are copied element by element, in other places of the same buffers.
    packed = randn(1, N, 3, 2, 37, dtype=F32)[..., 1:]  # (B, N, qkv, H, D)
    q, k, v = (packed[:, :, n].transpose(1, 2) for n in range(3))
    check(q, k, v, call=tf32_on(device), tf32=True, causal=True)
    aligned = randn(1, N, 3, 2, 36, dtype=F32)
    check(*(aligned[:, :, n].transpose(1, 2) for n in range(3)), call=tf32_on(device), tf32=True)


def test_operands_are_rounded_to_the_nearest(device):
    """One key: LSE = q k, with a k that TF32 has exactly, is what the rounding made of q."""
    bits = randn(64, seed=3).to(F32).view(torch.int32)
    ties = (bits & ~0x1FFF) | 0x1000  # half way between two numbers of TF32
    q = torch.cat([bits, ties, ties - 1, ties + 1]).view(F32)
    special = torch.tensor([0.0, 3.4e38, -3.4e38, -INF])  # the largest of TF32 is 3.401e38
    q = torch.cat([q, special]).reshape(1, 1, -1, 1)
    ones = torch.ones(1, 1, 1, 1)
    _, lse = tf32_on(device)(q, ones, ones, scale=1.0)
    assert torch.equal(lse[0, 0], rounded_to_tf32(q)[0, 0, :, 0])


@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FFFFFFF, -1, 0x7F800001])
def test_every_nan_stays_one(device, bits):
    """Rounding must not carry a mantissa of ones into the sign: the GPU's own NaN is 0x7fffffff."""
    nan = torch.tensor(bits, dtype=torch.int32).view(F32)
    for name in range(3):
        tensors = problem(3, 5, 8, heads=1)
        tensors[name].view(torch.int32)[0, 0, 1, 2] = nan.view(torch.int32)
        out, lse = tf32_on(device)(*tensors)
        if name == 0:  # one query
            assert out[0, 0, 1].isnan().all()
            assert out[0, 0, [0, 2]].isfinite().all()
        elif name == 1:  # one key, which every query sees
            assert out.isnan().all()
        else:  # one column of v
            assert out[..., 2].isnan().all()
            assert out[..., [0, 1, 3]].isfinite().all()
            assert lse.isfinite().all()


@pytest.mark.parametrize("poison", [math.nan, INF, 3.4028234e38])
def test_what_a_hidden_key_and_query_hold_does_not_matter(device, poison):
    # 3.4028234e38 is finite, but infinite once it is rounded to TF32, and 0 * inf is NaN.
    q, k, v = problem(N, K, 16)
    mask = torch.ones(N, K, dtype=torch.bool)
    mask[:, 7] = mask[5] = False
    cotangent = randn(*q.shape[:3], 16, dtype=F32, seed=9)

    def gradients(q, k):
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        out, _ = tf32_on(device)(*leaves, mask=mask)
        return out, *torch.autograd.grad(out, leaves, cotangent)

    expected = gradients(q, k)
    q, k = q.clone(), k.clone()
    q[:, :, 5], k[:, :, 7] = poison, poison
    for got, want in zip(gradients(q, k), expected, strict=True):
        assert torch.equal(got, want)


def test_the_true_float32_kernels_are_more_accurate(device):
    """The two differ, so the switch chooses: with it off, float32 keeps its 23 bits."""
    q, k, v = problem(64, 64, 64)
    off = check(q, k, v, call=attention_on(device))
    on = check(q, k, v, call=tf32_on(device), tf32=True)
    assert all((off[name] - on[name]).abs().max() > 1e-5 for name in off)


def test_both_passes_see_the_same_scores(device):
    """P is computed again from the LSE: rows of it sum to 1 only where the scores have the same bits.

    With large logits another rounding would multiply P by exp of many units; dV of ones is the sum of P.
    """
    q, k, _ = problem(64, 64, 32, heads=1)
    q, k = q * 30, k * 30
    v = torch.zeros(1, 1, 64, 4, requires_grad=True)
    out, _ = tf32_on(device)(q, k, v)
    (grad,) = torch.autograd.grad(out.sum(), v)
    torch.testing.assert_close(grad.sum(2), torch.full((1, 1, 4), 64.0), rtol=3e-3, atol=0)


def kernels(plan):
    return [launch.kernel for launch in plan.launches]


def backward_plan(q, k, v, **options):
    out, lse = torch.zeros(*q.shape[:3], v.shape[3], dtype=q.dtype), torch.zeros(q.shape[:3])
    return attn_ext.launch_plan(
        q, k, v, direction="backward", out=out, lse=lse, grad_out=out, bias=torch.zeros(1, 1, 1, 1), **options
    )


def test_the_planner_takes_tf32_where_it_may():
    q, k, v = problem(9, 9, 40)
    assert kernels(attn_ext.launch_plan(q, k, v, allow_tf32=True)) == ["attn_fwd_tf32_sm80"]
    assert kernels(attn_ext.launch_plan(q, k, v, allow_tf32=False)) == ["attn_fwd_simt_f32"]
    tf32 = kernels(backward_plan(q, k, v, allow_tf32=True))
    assert tf32 == [
        "attn_bwd_rows_tf32", "attn_bwd_dkdv_tf32_sm80", "attn_bwd_dq_tf32_sm80", "attn_bwd_bias_tf32_sm80"
    ]  # fmt: skip
    true_float32 = [name.replace("tf32_sm80", "simt_f32").replace("tf32", "f32") for name in tf32]
    assert kernels(backward_plan(q, k, v, allow_tf32=False)) == true_float32
    for dtype, name in ((torch.float64, "attn_fwd_simt_f64"), (torch.float16, "attn_fwd_sm80_f16_d64")):
        tensors = [t.expand(64, -1, 99, -1).to(dtype) for t in problem(1, 1, 40)]
        assert kernels(attn_ext.launch_plan(*tensors, allow_tf32=True)) == [name]


@pytest.mark.parametrize("dim", [24, 23])
def test_infinite_numbers_of_hidden_queries_and_keys(device, dim):
    """As in test_cuda_kernels.py; beside a sink, rows that attend to nothing have a maximum."""
    q, k, v = problem(64, 70, dim, 24, heads=1)
    mask = torch.ones(1, 1, 64, 70, dtype=torch.bool)
    mask[:, :, ::3] = mask[..., ::3] = False
    q[:, :, ::3] = k[:, :, ::3] = INF
    check(q, k, v, mask=mask, sinks=torch.ones(1), call=tf32_on(device), tf32=True)


def test_nan_in_every_row(device):
    q, k, v = problem(64, 16, 8, heads=1)
    check(q.fill_(math.nan), k, v, call=tf32_on(device), tf32=True)


@pytest.mark.parametrize("dim", [24, 23])
def test_gradients_of_bias_and_mask_alone(device, dim):
    """Without dQ; tiles of keys that no query sees have 0."""
    terms = [randn(1, 1, 19, 340, dtype=F32, seed=seed) for seed in (5, 6)]
    tensors = [*problem(19, 340, dim, heads=1), *terms]

    def gradients(wanted):
        q, k, v, bias, mask = leaves = [t.detach().requires_grad_(n in wanted) for n, t in enumerate(tensors)]
        out, _ = tf32_on(device)(q, k, v, bias=bias, mask=mask, window=(150, 0), key_lengths=[250])
        return torch.autograd.grad(out, [leaves[n] for n in wanted], randn(*out.shape, dtype=F32, seed=6))

    together = gradients(range(5))
    for wanted in ([3], [4], [3, 4]):
        for n, got in zip(wanted, gradients(wanted), strict=True):
            assert torch.equal(got, together[n])
            assert not got[..., 250:].any()
