"""Known faults in numerics: empty rows, infinities and NaN, large numbers, and how errors are judged.

References are issues of other projects in which users met the fault.
"""

import math

import pytest
import torch
from oracle import DTYPES, HALF, check, oracle, qkv, randn
from torch.nn import functional as F

from attn_ext import attention, merge_attention, scaled_dot_product_attention

INF, NAN = math.inf, math.nan


@pytest.mark.parametrize("dtype", DTYPES)
def test_fully_masked_row_is_zero_and_reaches_no_gradient(dtype):
    # pytorch#103963, #103749: NaN, or the mean of V, in a row whose bool mask is all False
    q, k, v = qkv(1, 1, 2, 2, dtype=dtype)
    got = check(q, k, v, mask=torch.tensor([[True, True], [False, False]]))
    alone = check(q[:, :, :1], k, v)
    assert not got["out"][0, 0, 1].any()
    assert got["lse"][0, 0, 1] == -INF
    assert not got["dq"][0, 0, 1].any()
    torch.testing.assert_close(got["out"][:, :, :1], alone["out"])


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_row_masked(dtype):
    # pytorch#41508: a sample that is all padding turns the model NaN
    for options in (
        {"mask": torch.zeros(7, dtype=torch.bool)},
        {"mask": torch.full((5, 1), -INF, dtype=dtype)},
        {"bias": torch.full((7,), -INF, dtype=dtype)},
        {"key_lengths": [0, 0]},
        {"query_lengths": [0, 0]},
    ):
        got = check(*qkv(dtype=dtype), **options)
        assert not got["out"].any(), options
        assert (got["lse"] == -INF).all(), options
        assert not any(got[name].any() for name in ("dq", "dk", "dv")), options


@pytest.mark.parametrize("dtype", DTYPES)
def test_causal_and_padding_masks_of_finfo_min_that_add_up_to_minus_infinity(dtype):
    # transformers#31303: the sum of two finite masks overflows, the row's softmax is NaN
    lowest = torch.finfo(dtype).min
    causal = torch.full((4, 4), lowest, dtype=dtype).triu(1)
    padding = torch.tensor([lowest, lowest, 0, 0], dtype=dtype)
    q, k, v = qkv(len_q=4, len_k=4, dtype=dtype)
    for mask in (causal + padding, (causal + padding).maximum(torch.tensor(lowest, dtype=dtype))):
        got = check(q, k, v, mask=mask)
        assert got["out"].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["mask", "bias"])
def test_finite_finfo_min_absorbs_but_does_not_mask(dtype, name):
    # transformers#31303: a row of nothing but finfo.min is a uniform row; scaled by log2(e) it would overflow
    q, k, v = qkv(dtype=dtype)
    lowest = torch.full((5, 7), torch.finfo(dtype).min, dtype=dtype)
    out = attention(q, k, v, **{name: lowest})
    # float16's lowest number, -65504, is small enough for float32 to keep the logits beside it.
    expected = attention(q, k, v) if dtype == torch.float16 else v.mean(2, keepdim=True).expand_as(out)
    torch.testing.assert_close(out, expected, atol=1e-2, rtol=1e-2)
    half = lowest.clone()
    half[:, :3] = 0
    torch.testing.assert_close(attention(q, k, v, **{name: half}), attention(q, k[:, :, :3], v[:, :, :3]))


@pytest.mark.parametrize("rule", ["bool", "float", "causal", "upper_left", "window", "key_lengths"])
@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_what_stands_in_a_hidden_key_does_not_matter(rule, value, dtype):
    # pytorch#101967: NaN in padding that was never written reaches the output
    q, k, v = qkv(len_q=6, len_k=6, dtype=dtype)
    hidden = torch.arange(6) >= 4
    rows = slice(0, 4)  # the queries that do not see keys 4 and 5
    options = {
        "bool": {"mask": ~hidden},
        "float": {"mask": torch.zeros(6, dtype=dtype).masked_fill(hidden, -INF)},
        "causal": {"causal": True},
        "upper_left": {"causal": "upper_left"},
        "window": {"window": (None, 0)},
        "key_lengths": {"key_lengths": [4, 4]},
    }[rule]
    bad = k.masked_fill(hidden[:, None], value)
    expected = attention(q, k, v, return_lse=True, **options)
    got = attention(q, bad, v, return_lse=True, **options)
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a[:, :, rows], b[:, :, rows])
    q, bad, v = (t.requires_grad_() for t in (q, bad, v))
    dq, *grads = torch.autograd.grad(attention(q, bad, v, **options)[:, :, rows].sum(), (q, bad, v))
    assert dq[:, :, rows].isfinite().all()
    if rule in ("bool", "float", "key_lengths"):  # else the last queries see the key and have NaN to pass on
        assert all(g.isfinite().all() for g in grads)


@pytest.mark.parametrize("rule", ["bool", "float", "causal"])
def test_what_stands_in_a_hidden_value_gives_nan_or_nothing(rule):
    # pytorch#101967: 0 * NaN as by the formula, or a tile that was skipped; never another number
    q, k, v = qkv(len_q=200, len_k=200)
    hidden = torch.arange(200) >= 130
    options = {
        "bool": {"mask": ~hidden},
        "float": {"mask": torch.zeros(200).double().masked_fill(hidden, -INF)},
        "causal": {"causal": True},
    }[rule]
    bad = v.clone()
    bad[1, 0, hidden, 3] = NAN
    clean, out = (attention(q, k, x, **options) for x in (v, bad))
    same = out == clean
    assert (same | out.isnan()).all()
    same[1, 0, :, 3] = True  # the only column that may be NaN
    assert same.all()
    if rule != "causal":
        assert out[1, 0, :, 3].isnan().all() or torch.equal(out, clean)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("len_q", [1, 6, 300])
@pytest.mark.parametrize("sink", [None, 0.5, -INF])
def test_a_row_that_sees_nothing_is_0_beside_a_value_that_is_nan(dtype, len_q, sink):
    # pytorch#103963 and #101967 together: a sum of no value is 0, not 0 * NaN; so are its tangents
    q, k, v = qkv(len_q=len_q, len_k=200, dtype=dtype)
    v[:, :, 3] = NAN
    mask = torch.ones(1, 1, len_q, 200, dtype=torch.bool)
    mask[:, :, 0] = False
    options = {} if sink is None else {"sinks": torch.full((2,), sink, dtype=dtype)}
    for terms in ({"mask": mask}, {"bias": torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, -INF)}):

        def call(*x, terms=terms):
            return attention(*x, **terms, **options, return_lse=True)

        (out, lse), (tangent, tangent_lse) = torch.func.jvp(call, (q, k, v), (q, k, v))
        assert not out[:, :, 0].any()
        assert (lse[:, :, 0] == (-INF if sink is None else sink)).all()
        assert not tangent[:, :, 0].any()
        assert not tangent_lse[:, :, 0].any()


def test_values_beyond_key_lengths_are_never_read():
    # flash-attention#1745: unused slots of a cache hold NaN
    for len_q in (1, 6, 300):
        q, k, v = qkv(len_q=len_q, len_k=300)
        lengths = torch.tensor([5, 257], dtype=torch.int32)
        check(q, k, v, key_lengths=lengths)
        beyond = torch.arange(300) >= lengths[:, None]
        bad_k, bad_v = (t.masked_fill(beyond[:, None, :, None], NAN).requires_grad_() for t in (k, v))
        out = attention(q, bad_k, bad_v, key_lengths=lengths)
        assert torch.equal(out, attention(q, k, v, key_lengths=lengths))
        assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), (bad_k, bad_v)))


@pytest.mark.parametrize("argument", ["q", "k", "v", "mask", "bias", "alibi_slopes", "sinks"])
@pytest.mark.parametrize("bits", [0x7FC00000, -1, 0x7F800001], ids=["default", "all-ones", "signalling"])
def test_nan_arrives_where_it_takes_part_and_nowhere_else(argument, bits):
    # own reasoning: memory of 0xff bytes is NaN too, but with a payload that an exponential
    # made by bit arithmetic can turn into finite numbers
    nan = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    shapes = {"mask": (2, 2, 5, 7), "bias": (2, 2, 5, 7), "alibi_slopes": (2, 2), "sinks": (2,)}
    for len_q in (5, 2):  # few queries take a path of their own
        q, k, v = qkv(len_q=len_q, dtype=torch.float32)
        tensors = dict(zip("qkv", (q, k, v), strict=True))
        if argument in shapes:
            shape = (2, 2, len_q, 7) if argument in ("mask", "bias") else shapes[argument]
            tensors[argument] = torch.zeros(shape)
        place = (1,) if argument == "sinks" else (0, 1) if argument == "alibi_slopes" else (0, 1, 1, 4)
        tensors[argument][place] = nan
        out, lse = attention(**tensors, return_lse=True)
        expected, expected_lse, _ = oracle(**tensors)
        assert torch.equal(out.isnan(), expected.isnan())
        assert torch.equal(lse.isnan(), expected_lse.isnan())


@pytest.mark.parametrize("argument", ["q", "k", "v", "mask", "bias", "alibi_slopes", "sinks"])
@pytest.mark.parametrize("value", [INF, -INF])
def test_infinity_in_any_argument_gives_what_the_formula_gives(argument, value):
    # pytorch#125674 and its like: infinities must become neither garbage nor another row's problem
    q, k, v = qkv(dtype=torch.float32)
    tensors = {"q": q, "k": k, "v": v, "mask": torch.zeros(5, 7), "bias": torch.zeros(2, 1, 7)}
    tensors |= {"alibi_slopes": torch.zeros(2), "sinks": torch.zeros(2)}
    tensors = {name: tensors[name] for name in {"q", "k", "v", argument}}
    tensors[argument].view(-1)[1] = value
    out = attention(**tensors)
    expected = oracle(**tensors, dtype=torch.float32)[0]
    torch.testing.assert_close(out, expected, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
def test_equal_logits_beyond_the_range_of_half_precision(dtype):
    # pytorch#60939, #110505: a raw product of 2.56e6 overflows float16 before the scale is applied
    q = 200 * torch.ones(1, 1, 4, 64, dtype=dtype)
    v = randn(1, 1, 4, 64, dtype=dtype)
    out, lse = attention(q, q, v, return_lse=True)
    torch.testing.assert_close(out, v.double().mean(2, keepdim=True).expand_as(v).to(dtype))
    assert lse.isfinite().all()
    check(q, q, v)


@pytest.mark.parametrize("size", [30, 1e3, 1e4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_large_logits_lose_no_more_than_the_plain_formula(size, dtype):
    # pytorch#125674 family: exp(s - lse) with a float32 LSE is off by eps * |lse|, 0.1 % at 1e4
    q, k, v = qkv(len_q=40, len_k=50, dtype=dtype)
    check(q, k, v, scale=size / 8)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_gradients_stay_finite_after_a_training_run_blew_up(dtype):
    # pytorch#125674: NaN in the backward at q, k, v around 1e8, where the plain formula's are finite
    q, k, v = (5e8 * t for t in qkv(1, 1, 8, 8, 16, dtype=dtype))
    leaves = [t.requires_grad_() for t in (q, k, v)]
    by_hand = torch.softmax(q.float() @ k.float().mT / 4, -1) @ v.float()
    out = attention(q, k, v)
    torch.testing.assert_close(out.float(), by_hand, rtol=1e-2, atol=0)
    dq, dk, dv = torch.autograd.grad(out, leaves, torch.ones_like(out))
    expected = torch.autograd.grad(by_hand, leaves, torch.ones_like(by_hand))
    torch.testing.assert_close(dv, expected[2], rtol=1e-2, atol=1e-2)  # each value was read by whole rows
    # One-hot rows have no gradient; what rounding leaves is small against |dO V k|.
    bound = 1e-2 * float(v.detach().abs().max()) * float(k.detach().abs().max())
    assert max(dq.abs().max(), dk.abs().max()) < bound


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_softcap_derivative_and_order(dtype):
    # flash-attention#1065, #1016: tanh's derivative left out; or capped after masking: -inf becomes -cap
    q, k, v = qkv(dtype=dtype)
    check(5 * q, k, v, softcap=5.0, causal=True)
    check(5 * q, k, v, softcap=5.0, mask=torch.tensor([True, False, True, True, False, True, True]))
    check(5 * q, k, v, softcap=5.0, bias=randn(5, 7, dtype=dtype), alibi_slopes=torch.ones(2, dtype=dtype))


@pytest.mark.parametrize("cap", [1e3, 1e6, 1e10, 1e30, 3e38])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_huge_softcap_is_no_softcap(cap, dtype):
    # own reasoning: cap * tanh(s / cap) with a tanh of absolute accuracy loses cap * eps, all of s in the end
    q, k, v = qkv(len_q=40, len_k=50, dtype=dtype)
    check(q, k, v, softcap=cap)


@pytest.mark.parametrize("cap", [0.1, 1e-30, 1e-39])
def test_tiny_softcap_makes_all_keys_equal(cap):
    # own reasoning: 1 / cap overflows below 3e-39
    q, k, v = qkv(dtype=torch.float32)
    if cap == 0.1:
        check(q, k, v, softcap=cap)
    else:
        out = attention(q, k, v, softcap=cap)
        torch.testing.assert_close(out, v.mean(2, keepdim=True).expand_as(out))


@pytest.mark.parametrize("scale", [0.0, -0.7, -1e-30, 1e-38, 1e30])
def test_scale_zero_negative_tiny_and_huge(scale):
    # `if scale:` takes 0 for "not given"
    q, k, v = qkv(dtype=torch.float32)
    if scale == 1e30:
        q = 1e-20 * q
        k = 1e-10 * k
    got = check(q, k, v, scale=scale)
    if scale == 0:
        assert not got["dq"].any()
        torch.testing.assert_close(got["out"], v.mean(2, keepdim=True).expand_as(got["out"]))
    torch.testing.assert_close(scaled_dot_product_attention(q, k, v, scale=scale), got["out"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_denormal_inputs(dtype):
    tiny = torch.finfo(dtype).smallest_normal / 8
    q, k, v = qkv(dtype=dtype)
    check(q * tiny, k, v)
    got = check(q, k, v * tiny)
    assert got["out"].any()


@pytest.mark.parametrize("len_q", [1, 300])
def test_leading_key_blocks_fully_masked(len_q):
    # pytorch#127055: an online softmax whose maximum is still -inf computes exp(-inf - (-inf)) = NaN
    q, k, v = qkv(1, 2, len_q, 600)
    for first in (1, 200, 256, 512, 599):
        got = check(q, k, v, mask=torch.arange(600) >= first)
        torch.testing.assert_close(got["out"], attention(q, k[:, :, first:], v[:, :, first:]))
        check(q, k, v, mask=torch.zeros(600, dtype=torch.float64).index_fill(0, torch.arange(first), -INF))


def test_window_that_lies_far_to_the_right_of_the_first_keys():
    # pytorch#127055: the same through a window
    q, k, v = qkv(1, 1, 8, 1000)
    got = check(q, k, v, window=(3, 0))
    torch.testing.assert_close(got["out"][:, :, -1:], attention(q[:, :, -1:], k[:, :, -4:], v[:, :, -4:]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_lse_of_an_empty_row_is_minus_infinity_and_merges(dtype):
    # flash-attention PR#978, flashinfer#4452: +inf, 0 or garbage, and NaN in what is merged with it
    q, k, v = qkv(dtype=dtype)
    empty = attention(q, k, v, mask=torch.tensor(False), return_lse=True)
    part = attention(q, k, v, return_lse=True)
    assert (empty[1] == -INF).all()
    for merged in (merge_attention(*empty, *part), merge_attention(*part, *empty)):
        assert torch.equal(merged[0], part[0])
        assert torch.equal(merged[1], part[1])
    out, lse = merge_attention(*empty, *empty)
    assert not out.any()
    assert (lse == -INF).all()


def test_merge_equals_attention_over_both_parts_with_gradients():
    # flash-attention PR#978: partial results by their LSE
    q, k, v = (t.requires_grad_() for t in qkv())
    mask = torch.ones(2, 1, 5, 7, dtype=torch.bool)
    mask[0, :, 2, :3] = mask[1, :, 3, 3:] = mask[0, :, 4] = False
    parts = [
        attention(q, k[:, :, s], v[:, :, s], mask=mask[..., s], return_lse=True)
        for s in (slice(0, 3), slice(3, 7))
    ]
    whole = attention(q, k, v, mask=mask, return_lse=True)
    merged = merge_attention(*parts[0], *parts[1])
    cotangents = (randn(2, 2, 5, 8, seed=8), randn(2, 2, 5, seed=9))
    for a, b in zip(merged, whole, strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)
    for a, b in zip(*(torch.autograd.grad(x, (q, k, v), cotangents) for x in (merged, whole)), strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@pytest.mark.parametrize("sizes", [(113, 203), (1, 4096), (128, 217), (239, 2), (17, 1023)])
def test_error_is_at_most_twice_that_of_the_plain_formula(dtype, sizes):
    # flash-attention#1071, #145, #1624: no agreed yardstick; this one holds for out, LSE and each gradient
    check(*qkv(1, 2, *sizes, 64, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_block_diagonal_mask_equals_attending_block_by_block(dtype):
    # pytorch#108503: users find "different" results in bfloat16
    x = randn(1, 2, 60, 80, dtype=dtype)
    blocks = (13, 16, 1, 30)
    mask = torch.block_diag(*(torch.ones(n, n) for n in blocks)).bool()
    got = check(x, x, x, mask=mask)["out"]
    parts = torch.cat([attention(part, part, part) for part in x.split(blocks, 2)], 2)
    rtol = {torch.float64: 1e-12, torch.float32: 1e-5}.get(dtype, 1e-2)
    torch.testing.assert_close(got, parts, rtol=rtol, atol=rtol)


def test_sink_of_an_empty_row_is_its_lse():
    # known_faults: an empty row has out 0; with sinks its LSE is the sink, and its gradients are 0, not NaN
    q, k, v = qkv()
    sinks = torch.tensor([0.5, -2.0], dtype=torch.float64)
    got = check(q, k, v, sinks=sinks, query_lengths=[0, 3])
    assert torch.equal(got["lse"][0], sinks[:, None].expand(2, 5))
    assert not got["out"][0].any()
    check(q, k, v, sinks=sinks, mask=torch.tensor(False))


def test_sink_of_minus_infinity_is_no_sink():
    q, k, v = qkv()
    got = check(q, k, v, sinks=torch.full((2,), -INF, dtype=torch.float64), causal=True)
    torch.testing.assert_close(got["out"], attention(q, k, v, causal=True))
    empty = attention(
        q, k, v, sinks=torch.full((2,), -INF, dtype=torch.float64), key_lengths=[0, 7], return_lse=True
    )
    assert not empty[0][0].any()
    assert (empty[1][0] == -INF).all()


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("rule", ["mask", "query_lengths", "window"])
def test_nan_gradient_of_an_empty_row_reaches_nothing(rule, with_sinks):
    # pytorch#103749: 0 * NaN; the loss of a padded row is often NaN and masked away too late
    inputs = [t.requires_grad_() for t in qkv(len_k=3)]
    sinks = torch.zeros(2, dtype=torch.float64, requires_grad=True) if with_sinks else None
    seen = torch.tensor(
        [False, False, True, True, True]
    )  # (1, 0) around i - 2 leaves the first two rows empty
    seen = seen.flip(0) if rule == "query_lengths" else seen
    option = {"mask": seen[:, None], "query_lengths": [3, 3], "window": (1, 0)}[rule]
    out = attention(*inputs, sinks=sinks, **{rule: option})
    grad = torch.ones_like(out)
    grad[:, :, ~seen] = NAN
    wanted = [*inputs, sinks] if with_sinks else inputs
    assert all(g.isfinite().all() for g in torch.autograd.grad(out, wanted, grad))


def test_zero_slopes_of_alibi_change_nothing():
    q, k, v = qkv()
    torch.testing.assert_close(
        attention(q, k, v, alibi_slopes=torch.zeros(2, dtype=torch.float64)), attention(q, k, v)
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_sdpa_agrees_with_torch_on_masked_rows(dtype):
    # pytorch#103963: the same numbers as torch's math path, row by row
    q, k, v = qkv(dtype=dtype)
    mask = torch.rand(2, 1, 5, 7, generator=torch.Generator().manual_seed(0)) > 0.5
    mask[0, :, 2] = False
    expected = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), attn_mask=mask).to(dtype)
    # Kernels may round a probability of half type once more.
    tolerance = {"rtol": 0, "atol": torch.finfo(dtype).eps} if dtype in HALF else {}
    torch.testing.assert_close(scaled_dot_product_attention(q, k, v, attn_mask=mask), expected, **tolerance)
