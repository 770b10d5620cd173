"""Known faults of other attention libraries, held against the CUDA kernels: on a GPU if there is one, else in
ptxrun.

The CPU's tests of the same faults are in test_faults_*.py; here are those that a kernel can show, in sizes
that an interpreter of PTX runs in about a second. References are issues in which users met the fault.
"""

import math

import pytest
import torch
from cuda_kernels import DEVICES, attention_on, dropout_factors, generator
from oracle import check, oracle, pairs, qkv, randn

from attn_ext import merge_attention

INF, NAN, FAR = math.inf, math.nan, 2**31
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32

# Which kernels take a problem: dtype, head dim, number of queries, and for how many multiprocessors it is
# planned (few queries are decoded; so are few tiles of queries on a GPU of many multiprocessors).
ROUTES = {
    "forward": {"dtype": F16, "len_q": 37, "dim": 64, "multiprocessors": 1},
    "forward-bf16-d80": {"dtype": BF16, "len_q": 21, "dim": 80, "multiprocessors": 1},
    "decode": {"dtype": F16, "len_q": 3, "dim": 64, "multiprocessors": 1},
    "decode-splits": {"dtype": F16, "len_q": 3, "dim": 59, "multiprocessors": 108},
    "simt": {"dtype": F32, "len_q": 9, "dim": 40, "multiprocessors": 1},
}


def routes(*quick):
    """All routes; those not named are slow tests, since what they do hardly depends on the kernel."""
    return pytest.mark.parametrize(
        "route", [r if r in quick else pytest.param(r, marks=pytest.mark.slow) for r in ROUTES]
    )


EVERY_ROUTE = routes("forward", "decode", "decode-splits", "simt")
TWO_ROUTES = routes("forward", "decode-splits")


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


def problem(
    device, route, *, batch=1, heads=2, heads_kv=None, len_q=None, len_k=150, dim=None, dim_v=None, seed=0
):
    """``(q, k, v, call)``: tensors for a route, and attention() by its kernels, which returns (out, lse)."""
    r = ROUTES[route]
    len_q, dim = len_q or r["len_q"], dim or r["dim"]
    tensors = qkv(batch, heads, len_q, len_k, dim, dim_v, heads_kv, r["dtype"], seed)
    return *tensors, attention_on(device, multiprocessors=r["multiprocessors"])


def same_bits(got, expected):
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b) or (
            torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())
        )


# ---------------------------------------------------------------------------------------- what a row may see


def bool_rows(len_q, len_k, *hidden):
    mask = torch.ones(1, 1, len_q, len_k, dtype=torch.bool)
    for row, keys in hidden:
        mask[:, :, row, keys] = False
    return mask


VISIBILITY = {
    # 1: pytorch#103963; a row without keys is NaN, or poisons dk and dv
    "empty row of a bool mask": lambda n, k: {"mask": bool_rows(n, k, (1, slice(None)))},
    "nothing visible at all": lambda n, k: {"mask": torch.zeros(1, 1, 1, 1, dtype=torch.bool)},
    # 4: transformers#31303; finfo.min + finfo.min = -inf
    "masks of -inf by overflow": lambda n, k: {
        "mask": torch.full((1, 1, n, k), torch.finfo(F32).min).index_fill(2, torch.tensor([0]), 0.0) * 2.0
    },
    "finfo.min absorbs": lambda n, k: {"bias": torch.full((1, 1, n, k), torch.finfo(F32).min)},
    # 14: pytorch#127055; the running maximum is still -inf when the first visible tile comes
    "leading tiles hidden by a bool mask": lambda n, k: {"mask": (torch.arange(k) >= k - 7).view(1, 1, 1, k)},
    "leading tiles hidden by a bias": lambda n, k: {
        "bias": torch.zeros(1, 1, 1, k).masked_fill(torch.arange(k) < k - 7, -INF)
    },
    "every second key hidden by a bias": lambda n, k: {
        "bias": torch.zeros(1, 1, 1, k).masked_fill(torch.arange(k) % 2 == 0, -INF)
    },
    "window far from the first keys": lambda n, k: {"window": (3, 0)},
    # 12: flash-attention PR#978; LSE of such rows
    "empty rows with sinks": lambda n, k: {
        "mask": bool_rows(n, k, (1, slice(None))),
        "sinks": torch.tensor([0.5, -1.0]),
    },
    # 49, 62: HF transformers#41966; causal is dropped beside padding
    "causal and lengths": lambda n, k: {"causal": True, "key_lengths": [k - 5]},
    "upper left and lengths": lambda n, k: {
        "causal": "upper_left",
        "key_lengths": [2],
        "query_lengths": [n - 1],
    },
    "no keys by length": lambda n, k: {"key_lengths": [0]},
    # 10: flash-attention#1065; masked logits become -cap, or tanh's slope is left out
    "softcap before causal": lambda n, k: {"softcap": 1.5, "causal": True},
    # 59: flash-attention#1585; distance from the upper left
    "alibi of few queries": lambda n, k: {"alibi_slopes": torch.tensor([0.3, 0.02]), "causal": True},
    # a LSE of -30000 beside padded lanes of 0: exp(0 - lse) overflows
    "very negative lse": lambda n, k: {"bias": torch.full((1, 1, n, k), -30000.0)},
    "very negative lse, one key": lambda n, k: {"bias": torch.full((1, 1, n, k), -30000.0), "window": (0, 0)},
}


@EVERY_ROUTE
@pytest.mark.parametrize("rule", VISIBILITY)
def test_who_sees_what(device, route, rule):
    q, k, v, call = problem(device, route)
    check(q, k, v, call=call, **VISIBILITY[rule](q.shape[2], k.shape[2]))


@EVERY_ROUTE
@pytest.mark.parametrize("sizes", [(8, 3), (40, 10)])
def test_rows_that_the_window_leaves_empty(device, route, sizes):
    # 58: flash-attention#2199; more queries than keys, aligned at the lower right
    q, k, v, call = problem(device, route, len_q=sizes[0], len_k=sizes[1])
    got = check(q, k, v, call=call, window=(1, 0), causal=True)
    empty = ~pairs(*sizes, True, (1, 0)).any(1)
    assert not got["out"][:, :, empty].any()
    assert (got["lse"][:, :, empty] == -INF).all()


@EVERY_ROUTE
def test_window_counts_keys_to_each_side_of_the_diagonal(device, route):
    # 56: HF transformers#39408, flash-attention#1133; off by one. Equal logits and one-hot values tell
    q, k, v, call = problem(device, route, len_k=64, dim_v=64)
    values = torch.eye(64, dtype=v.dtype).expand(1, 2, 64, 64)
    for window, causal in (((2, 0), False), ((5, 3), False), ((1, 9), True), ((40, None), "upper_left")):
        out, _ = call(q * 0, k, values, window=window, causal=causal)
        assert torch.equal(out[0, 0] > 0, pairs(q.shape[2], 64, causal, window))


@EVERY_ROUTE
def test_empty_parts_merge(device, route):
    # 12: flashinfer#4452
    q, k, v, call = problem(device, route)
    empty = call(q, k, v, mask=torch.zeros(1, 1, 1, 1, dtype=torch.bool))
    part = call(q, k, v)
    assert (empty[1] == -INF).all()
    assert not empty[0].any()
    same_bits(merge_attention(*empty, *part), part)


# ------------------------------------------------------------------------------- NaN, infinity, large numbers


@TWO_ROUTES
@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize("rule", ["mask", "bias", "causal", "window"])
def test_what_stands_in_a_hidden_key_does_not_matter(device, route, rule, value):
    # 6: pytorch#101967
    q, k, v, call = problem(device, route)
    n, m = q.shape[2], k.shape[2]
    hidden = torch.arange(m) >= m - 2
    options = {
        "mask": {"mask": ~hidden.view(1, 1, 1, m)},
        "bias": {"bias": torch.zeros(1, 1, 1, m).masked_fill(hidden, -INF)},
        "causal": {"causal": True},
        "window": {"window": (None, 0)},
    }[rule]
    rows = slice(0, n - 2) if rule in ("causal", "window") else slice(None)  # the others see these keys
    bad = k.masked_fill(hidden[:, None], value)
    for a, b in zip(call(q, bad, v, **options), call(q, k, v, **options), strict=True):
        assert torch.equal(a[:, :, rows], b[:, :, rows])


@EVERY_ROUTE
def test_memory_beyond_lengths_and_head_dim_is_never_read(device, route):
    # 131: flash-attention#1745, vllm#936; a cache whose free slots are NaN. Its rows are wider than the
    # head dim, and what lies between them is NaN too: stale lanes of a padded tile
    q, k, v, call = problem(device, route, batch=2, dim=59)

    def cache(t, lengths):
        wide = torch.full((t.shape[0], t.shape[2], t.shape[1], 72), NAN, dtype=t.dtype)
        wide[..., :59] = t.transpose(1, 2)
        for b, n in enumerate(lengths):
            wide[b, n:] = NAN
        return wide[..., :59].transpose(1, 2)

    keys, queries = [5, 131], [q.shape[2], 2]
    options = {
        "key_lengths": keys,
        "query_lengths": queries,
    }
    clean = [t.detach().requires_grad_() for t in (q, k, v)]
    stale = [cache(t, n).requires_grad_() for t, n in zip((q, k, v), (queries, keys, keys), strict=True)]
    results = []
    for tensors in (clean, stale):
        out, lse = call(*tensors, **options)
        weight = randn(*out.shape, dtype=out.dtype, seed=9)
        results.append(
            [out, lse, *torch.autograd.grad((out, lse), tensors, (weight, weight[..., 0].to(lse)))]
        )
    same_bits(results[1], results[0])
    out, lse, dq, dk, dv = results[1]
    # 73: flash-attention#1228; what nothing reaches is 0, not what the allocator left there
    assert not out[1, :, 2:].any()
    assert not dq[1, :, 2:].any()
    assert not dk[0, :, 5:].any()
    assert not dv[0, :, 5:].any()


@TWO_ROUTES
@pytest.mark.parametrize("argument", ["q", "k", "v", "bias", "sinks"])
def test_nan_arrives_where_it_takes_part_and_nowhere_else(device, route, argument):
    q, k, v, call = problem(device, route)
    tensors = {
        "q": q,
        "k": k,
        "v": v,
        "bias": torch.zeros(1, 1, q.shape[2], k.shape[2]),
        "sinks": torch.zeros(2),
    }
    tensors[argument].view(-1)[0] = NAN
    got, expected = call(**tensors), oracle(**tensors)[:2]
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a.isnan(), b.isnan())


@EVERY_ROUTE
def test_logits_beyond_the_range_of_half_precision(device, route):
    # 8: pytorch#60939; products above 65504 before the scale
    q, k, v, call = problem(device, route)
    out, _ = call(torch.full_like(q, 200), torch.full_like(k, 200), v)
    torch.testing.assert_close(
        out, v.double().mean(2, keepdim=True).expand_as(out).to(out), atol=2e-3, rtol=1e-2
    )


@EVERY_ROUTE
def test_scores_that_keep_growing(device, route):
    # a maximum that is out of date lets probabilities overflow
    q, k, v, call = problem(device, route, len_k=300)
    check(q, k * torch.linspace(0.1, 8, 300)[:, None].to(k), v, call=call)
    check(q, k * torch.linspace(8, 0.1, 300)[:, None].to(k), v, call=call)


@TWO_ROUTES
@pytest.mark.parametrize("scale", [0.0, -0.3, 1e-30])
def test_scale_zero_negative_and_tiny(device, route, scale):
    check(*problem(device, route)[:3], call=problem(device, route)[3], scale=scale)


@pytest.mark.parametrize("device", DEVICES)
def test_float32_after_a_training_run_blew_up(device):
    # 18: pytorch#125674
    q, k, v = (t * 5e8 for t in qkv(1, 1, 8, 8, 16, dtype=F32))
    out, lse = attention_on(device)(q, k, v)
    torch.testing.assert_close(out, oracle(q, k, v)[0].to(F32))
    assert lse.isfinite().all()


# --------------------------------------------------------------------------------- shapes, strides, alignment


@TWO_ROUTES
@pytest.mark.parametrize("argument", ["q", "k", "v", "grad_out"])
def test_offsets_beyond_2_to_the_31(device, route, argument):
    # 21: flash-attention#1500; 4.3 GB of address space, of which a few pages are touched
    q, k, v, call = problem(device, route, batch=2, heads=1, len_q=4, len_k=4, dim=8)
    tensors = {"q": q, "k": k, "v": v, "grad_out": randn(*q.shape, dtype=q.dtype, seed=9)}
    results = []
    for far in (False, True):
        if far:
            memory = torch.empty(FAR + 2**16, dtype=q.dtype)
            tensors[argument] = memory.as_strided((2, 1, 4, 8), (FAR, 32, 8, 1)).copy_(tensors[argument])
        leaves = [tensors[name].detach().requires_grad_() for name in "qkv"]
        out, _ = call(*leaves)
        results.append([out, *torch.autograd.grad(out, leaves, tensors["grad_out"])])
    same_bits(results[1], results[0])


@TWO_ROUTES
@pytest.mark.parametrize("axis", [0, 1, 2, 3])
@pytest.mark.parametrize("name", ["bool", "mask", "bias"])
def test_mask_and_bias_offsets_beyond_2_to_the_31(device, route, name, axis):
    # 22: pytorch#162588, xformers#788
    q, k, v, call = problem(device, route, batch=2, len_q=2, len_k=2, dim=8)
    size, stride = [1, 1, 1, 2], [0, 0, 0, 1]
    size[axis], stride[axis] = 2, FAR
    memory = torch.empty(FAR + 64, dtype=torch.bool if name == "bool" else q.dtype)
    numbers = randn(*size, seed=5)
    term = memory.as_strided(size, stride).copy_(numbers > 0 if name == "bool" else numbers)
    key = "bias" if name == "bias" else "mask"
    same_bits(call(q, k, v, **{key: term}), call(q, k, v, **{key: term.clone()}))


@pytest.mark.parametrize("shape", [(70001, 1), (1, 70001), (300, 300)], ids=str)
@pytest.mark.parametrize("dtype", [F16, F32], ids=str)
def test_more_than_65535_batches_or_heads(device, dtype, shape):
    # 19: pytorch#142228, flash-attention#1786. In ptxrun only the last blocks run, which 16 bits cannot count
    q, k, v = (torch.zeros(*shape, 1, 8, dtype=dtype) for _ in range(3))
    last = slice(-3, None)
    v.view(-1, 8)[last] = randn(3, 8, dtype=dtype)
    pairs_of_heads = shape[0] * shape[1]
    only = {"blocks": range(pairs_of_heads - 3, pairs_of_heads)} if device == "ptxrun" else {}
    out, _ = attention_on(device, multiprocessors=1, **only)(q, k, v)
    torch.testing.assert_close(out.view(-1, 8)[last], v.view(-1, 8)[last])


LAYOUTS = {
    # 26: pytorch#181133
    "packed qkv": lambda b, h, n, d, t: randn(b, n, 3, h, d, dtype=t).transpose(1, 3).unbind(2),
    "(B, N, H, D)": lambda b, h, n, d, t: [
        randn(b, n, h, d, dtype=t, seed=s).transpose(1, 2) for s in range(3)
    ],
    "last axis not contiguous": lambda b, h, n, d, t: [
        randn(b, h, d, n, dtype=t, seed=s).mT for s in range(3)
    ],
    "odd offset": lambda b, h, n, d, t: [
        randn(b * h * n * d + 1, dtype=t, seed=s)[1:].view(b, h, n, d) for s in range(3)
    ],
    "slices": lambda b, h, n, d, t: [
        randn(b, h, 2 * n, d + 3, dtype=t, seed=s)[:, :, 1::2, 1:-2] for s in range(3)
    ],
    "expanded over heads": lambda b, h, n, d, t: [
        randn(b, 1, n, d, dtype=t, seed=s).expand(b, h, n, d) for s in range(3)
    ],
    "expanded over keys": lambda b, h, n, d, t: [
        randn(b, h, 1, d, dtype=t, seed=s).expand(b, h, n, d) for s in range(3)
    ],
}


@TWO_ROUTES
@pytest.mark.parametrize("layout", LAYOUTS)
def test_memory_layout_does_not_change_the_result(device, route, layout):
    q, _, _, call = problem(device, route)
    tensors = LAYOUTS[layout](2, 2, q.shape[2], q.shape[3], q.dtype)
    results = []
    for these in (tensors, [t.contiguous() for t in tensors]):
        leaves = [t.detach().requires_grad_() for t in these]
        out, _ = call(*leaves, causal=True)
        results.append([out, *torch.autograd.grad(out, leaves, randn(*out.shape, dtype=out.dtype, seed=8))])
    same_bits(*results)


GRADIENTS = {
    # 29, 30: flash-attention#355, pytorch#134001
    "transposed": lambda b, h, n, d, t: randn(b, n, h, d, dtype=t, seed=7).transpose(1, 2),
    "last axis not contiguous": lambda b, h, n, d, t: randn(b, h, d, n, dtype=t, seed=7).mT,
    "stride 0": lambda b, h, n, d, t: torch.ones((), dtype=t).expand(b, h, n, d),
    "slice": lambda b, h, n, d, t: randn(b, h, n + 2, 2 * d, dtype=t, seed=7)[:, :, 1:-1, ::2],
    "one element": lambda b, h, n, d, t: torch.zeros(b, h, n, d, dtype=t).index_fill(
        2, torch.tensor([0]), 1.0
    ),
}


@TWO_ROUTES
@pytest.mark.parametrize("layout", GRADIENTS)
def test_incoming_gradient_in_any_layout(device, route, layout):
    q, k, v, call = problem(device, route, batch=2)
    grad = GRADIENTS[layout](*q.shape, q.dtype)
    grad_lse = randn(q.shape[2], 2, 2, dtype=F32, seed=8).permute(2, 1, 0)
    results = []
    for g, g_lse in ((grad, grad_lse), (grad.contiguous(), grad_lse.contiguous())):
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        outputs = call(*leaves)
        results.append(torch.autograd.grad(outputs, leaves, (g, g_lse)))
    same_bits(*results)


@TWO_ROUTES
@pytest.mark.parametrize("dim", [1, 7, 32, 33, 72, 96, 111, 129, 200, 256])
def test_any_head_dim(device, route, dim):
    # 33: pytorch#110630, flash-attention#1347; scale from the padded head dim, garbage in the padding
    check(*problem(device, route, len_k=70, dim=dim)[:3], call=problem(device, route)[3], causal=True)


@pytest.mark.parametrize("dim", [257, 320])
@pytest.mark.parametrize("dtype", [F16, F32], ids=str)
def test_head_dims_above_256(device, dim, dtype):
    # 35: flash-attention#801
    check(*qkv(1, 1, 17, 17, dim, dtype=dtype), call=attention_on(device))


@TWO_ROUTES
@pytest.mark.parametrize("dims", [(64, 32), (32, 80), (192, 128), (3, 1), (1, 256)], ids=str)
def test_value_head_dim_differs(device, route, dims):
    # 36: flash-attention#753
    q, k, v, call = problem(device, route, len_k=70, dim=dims[0], dim_v=dims[1])
    check(q, k, v, call=call)


@TWO_ROUTES
@pytest.mark.parametrize("kind", ["bool", "half", "float"])
@pytest.mark.parametrize(
    "shape", ["exact", "odd offset", "transposed", "stride 2", "per key", "per query", "per head"]
)
def test_mask_of_any_width_offset_and_stride(device, route, kind, shape):
    # 38: xformers#808, #813; "not correctly aligned"
    q, k, v, call = problem(device, route, batch=2, len_k=77)
    n, m = q.shape[2], 77
    term = {
        "exact": lambda: randn(2, 2, n, m, seed=5),
        "odd offset": lambda: randn(1, 1, n + 1, m + 6, seed=5)[..., 1:, 3:-3],
        "transposed": lambda: randn(1, 2, m, n, seed=5).mT,
        "stride 2": lambda: randn(1, 1, n, 2 * m, seed=5)[..., ::2],
        "per key": lambda: randn(2, 1, 1, m, seed=5),
        "per query": lambda: randn(1, 2, n, 1, seed=5),
        "per head": lambda: randn(1, 2, 1, 1, seed=5),
    }[shape]()
    if kind == "bool":
        check(q, k, v, call=call, mask=term > -0.5)
    else:  # 64: xformers#783; the gradient has the bias's own shape, summed over broadcast axes in float32
        check(q, k, v, call=call, bias=term.to(q.dtype if kind == "half" else F32), causal=True)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("sizes", [(1, 1), (2, 0), (1, 147), (64, 64), (113, 203)], ids=str)
def test_odd_sizes(device, route, sizes):
    # 31: pytorch#141218, FlashMLA#11; no keys: out 0, LSE -inf, dq 0
    q, k, v, call = problem(device, route, len_q=sizes[0], len_k=sizes[1], heads=1)
    check(q, k, v, call=call, causal=True)


# --------------------------------------------------------------------------------- heads, gradients, dropout


@EVERY_ROUTE
@pytest.mark.parametrize(("heads", "heads_kv"), [(4, 2), (3, 1), (8, 1), (6, 6)])
def test_grouped_heads(device, route, heads, heads_kv):
    # 43: jax-js#180; heads tiled instead of repeated. 71: levanter#449; dk, dv not summed over the group
    q, k, v, call = problem(device, route, batch=2, heads=heads, heads_kv=heads_kv, len_k=70)
    check(q, k, v, call=call, causal=True)


@EVERY_ROUTE
@pytest.mark.parametrize("of", ["out", "lse"])
def test_gradient_through_lse(device, route, of):
    # 70: flash-attention#889; the gradient of the LSE is dropped
    q, k, v, call = problem(device, route)
    expected, got = [], []
    for function, into in ((oracle, expected), (call, got)):
        leaves = [
            t.detach().to(torch.float64 if function is oracle else q.dtype).requires_grad_()
            for t in (q, k, v)
        ]
        out, lse = function(*leaves, causal=True)[:2]
        loss = (out.double() * 0.3).sum() if of == "out" else (lse.double().sin()).sum()
        into += torch.autograd.grad(loss, leaves, materialize_grads=True)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a.double(), b, atol=2e-2, rtol=2e-2)


@EVERY_ROUTE
@pytest.mark.parametrize("p", [0.3, 1.0])
def test_dropout_is_the_same_forward_and_backward(device, route, p):
    # 79, 80: flash-attention#1251, apex#816; 84: p = 1 gives zeros, no 0 / 0
    q, k, v, call = problem(device, route, batch=2, heads=4, heads_kv=2, len_k=83)
    keep = dropout_factors(device, 2, 4, q.shape[2], 83, p, seed=1)
    check(
        q,
        k,
        v,
        call=call,
        keep=keep,
        dropout_p=p,
        generator=generator(device, 1),
        causal=True,
        window=(70, 0),
    )


@EVERY_ROUTE
def test_the_same_bits_each_time(device, route):
    # 69, 129: flash-attention#414, #2481; atomic additions, missing barriers. ptxrun runs the blocks in
    # another order each time
    q, k, v, _ = problem(device, route, batch=2, heads_kv=1)
    bias = randn(1, 2, 1, 150, dtype=q.dtype, seed=5)
    results = []
    for order in range(3):
        shuffled = {"shuffle": order} if device == "ptxrun" else {}
        call = attention_on(device, multiprocessors=ROUTES[route]["multiprocessors"], **shuffled)
        leaves = [t.detach().requires_grad_() for t in (q, k, v, bias)]
        out, _ = call(*leaves[:3], bias=leaves[3], causal=True)
        results.append([out, *torch.autograd.grad(out, leaves, randn(*out.shape, dtype=out.dtype, seed=8))])
    same_bits(results[0], results[1])
    same_bits(results[0], results[2])


@pytest.mark.parametrize(
    "options", [{}, {"window": (20, 0)}, {"alibi_slopes": torch.tensor([0.1, 0.3])}], ids=str
)
def test_cached_decoding_equals_the_full_forward(device, options):
    # 135: x-transformers#311; 47: the diagonal of a single query lies at the last key
    q, k, v = qkv(1, 2, 40, 40, 64, dtype=F16)
    whole, _ = attention_on(device, multiprocessors=1)(q, k, v, causal=True, **options)
    for n in (1, 17, 40):
        step, _ = attention_on(device)(q[:, :, n - 1 : n], k[:, :, :n], v[:, :, :n], causal=True, **options)
        torch.testing.assert_close(step, whole[:, :, n - 1 : n], atol=2e-3, rtol=1e-2)


@pytest.mark.parametrize("route", ROUTES)
def test_everything_at_once(device, route):
    q, k, v, call = problem(device, route, batch=2, heads=4, heads_kv=2, len_k=170, dim=59, dim_v=32)
    n = q.shape[2]
    check(
        q, k, v, call=call, causal=True, window=(120, 0), key_lengths=[170, 150], query_lengths=[n, n - 1],
        bias=randn(1, 4, n, 170, dtype=q.dtype, seed=5), mask=randn(2, 1, n, 170, seed=6) > -1, softcap=3.0,
        alibi_slopes=randn(4, dtype=F32, seed=7).abs() * 0.05, sinks=randn(4, dtype=F32, seed=8),
        keep=dropout_factors(device, 2, 4, n, 170, 0.2, seed=1), dropout_p=0.2,
        generator=generator(device, 1),
    )  # fmt: skip
