"""Known faults in masks: polarity, alignment, windows, lengths, ALiBi, dtypes; and every pair of options.

References are issues of other projects in which users met the fault.
"""

import itertools
import math
import sys

import pytest
import torch
from oracle import DTYPES, check, dropout_factors, oracle, pairs, qkv, randn
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

from attn_ext import attention, scaled_dot_product_attention


def visible(len_q, len_k, **options):
    """Which keys each query sees, found out by what it returns: bool (Nq, Nk)."""
    q, k = (torch.zeros(1, 1, n, 4, dtype=torch.float64) for n in (len_q, len_k))
    return attention(q, k, torch.eye(len_k, dtype=torch.float64)[None, None], **options)[0, 0] > 0


def test_true_means_may_attend_and_modules_mean_the_opposite():
    # x-transformers#160, pytorch#170400: polarity of bool masks mixed up
    x = randn(1, 4, 8)
    mask = randn(4, 4, seed=1) > 0
    mask.fill_diagonal_(True)
    torch_mha = torch.nn.MultiheadAttention(8, 1, batch_first=True, dtype=torch.float64)
    expected = torch_mha(x, x, x, attn_mask=~mask)[0]
    q, k, v = F.linear(x, torch_mha.in_proj_weight, torch_mha.in_proj_bias)[:, None].chunk(3, -1)
    for out in (scaled_dot_product_attention(q, k, v, mask), attention(q, k, v, mask=mask)):
        torch.testing.assert_close(torch_mha.out_proj(out[:, 0]), expected)


@pytest.mark.parametrize("sizes", [(1, 6), (3, 6), (6, 3), (5, 5), (200, 300), (300, 200)])
def test_causal_of_sdpa_is_upper_left_that_of_attention_lower_right(sizes):
    # pytorch#103082, #108108, flash-attention#282: decoding with a cache sees the first key only
    upper_left, lower_right = (torch.ones(sizes, dtype=torch.bool).tril(d) for d in (0, sizes[1] - sizes[0]))
    assert torch.equal(visible(*sizes, causal="upper_left"), upper_left)
    assert torch.equal(visible(*sizes, causal=True), lower_right)
    assert torch.equal(visible(*sizes, causal="lower_right"), lower_right)
    q, k, v = qkv(1, 2, *sizes)
    sdpa = scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(sdpa, F.scaled_dot_product_attention(q, k, v, is_causal=True))
    if sizes[0] == 1:
        torch.testing.assert_close(sdpa, v[:, :, :1])
    for variant in (causal_upper_left, causal_lower_right):
        bias = variant(*sizes)
        expected = F.scaled_dot_product_attention(q, k, v, attn_mask=bias).nan_to_num(0)
        torch.testing.assert_close(scaled_dot_product_attention(q, k, v, attn_mask=bias), expected)


def test_causal_together_with_a_padding_mask():
    # pytorch#101531, #100709: refused, so users build an N x N mask
    q, k, v = qkv()
    padding = torch.tensor([[1, 1, 1, 1, 1, 0, 0], [0, 1, 1, 1, 1, 1, 1]]).bool()[:, None, None]
    for causal in (True, "upper_left"):
        got = check(q, k, v, causal=causal, mask=padding)["out"]
        torch.testing.assert_close(got, attention(q, k, v, mask=padding & pairs(5, 7, causal)))
    with pytest.raises(ValueError, match=r"attn_ext.attention"):
        scaled_dot_product_attention(q, k, v, padding, is_causal=True)


@pytest.mark.parametrize("call", ["attention", "sdpa"])
def test_float_mask_is_added_and_bool_mask_selects(call):
    # pytorch#92554, #107084, #118628: a float mask of 0 and 1 read as bool, or the reverse
    q, k, v = qkv(len_q=2, len_k=2)
    run = (
        (lambda m: attention(q, k, v, mask=m))
        if call == "attention"
        else (lambda m: scaled_dot_product_attention(q, k, v, m))
    )
    ones = torch.tensor([[0.0, 1], [1, 0]], dtype=torch.float64)
    torch.testing.assert_close(run(ones), oracle(q, k, v, mask=ones)[0])
    torch.testing.assert_close(run(ones.bool()), v.flip(2))


@pytest.mark.parametrize("q_dtype", DTYPES)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.bool, torch.int64, torch.uint8, torch.complex64])
def test_dtypes_of_mask_and_bias(q_dtype, dtype):
    # pytorch#92554, own run: integers refused with a hint; float32 beside half types keeps its precision
    q, k, v = qkv(dtype=q_dtype)
    term = (3 * randn(2, 1, 5, 7)).to(dtype)
    additive = dtype in (q_dtype, torch.float32)
    for name in ("mask", "bias", "attn_mask"):
        call = scaled_dot_product_attention if name == "attn_mask" else attention
        if additive or (dtype == torch.bool and name != "bias"):
            out = call(q, k, v, **{name: term})
            assert out.dtype == q_dtype
            expected = oracle(q, k, v, mask=term)[0]
            torch.testing.assert_close(out, expected.to(q_dtype), atol=2e-2, rtol=2e-2)
        else:
            with pytest.raises(TypeError, match=f"{name} must be .*{dtype}"):
                call(q, k, v, **{name: term})
    if additive:
        check(q, k, v, mask=term, bias=term[:1])
        check(q, k, v, sinks=term[0, 0, 0, :2], alibi_slopes=term[:, 0, 0, :2])


def test_window_counts_keys_to_each_side_of_the_diagonal():
    # transformers#39408, #29623, flash-attention#1133: off by one between libraries
    assert visible(6, 6, window=(2, 0), causal=True)[4].nonzero().flatten().tolist() == [2, 3, 4]
    assert visible(6, 6, window=(2, 0))[4].nonzero().flatten().tolist() == [2, 3, 4]
    assert visible(6, 6, window=(1, 2))[2].nonzero().flatten().tolist() == [1, 2, 3, 4]
    assert visible(6, 6, window=(0, None))[4].nonzero().flatten().tolist() == [4, 5]
    assert visible(6, 6, window=(-1, 0))[2].nonzero().flatten().tolist() == [0, 1, 2]
    assert visible(3, 6, window=(1, 0))[0].nonzero().flatten().tolist() == [
        2,
        3,
    ]  # lower right without causal
    assert visible(3, 6, window=(1, 0), causal="upper_left")[1].nonzero().flatten().tolist() == [0, 1]


@pytest.mark.parametrize("causal", [False, True, "upper_left"])
@pytest.mark.parametrize("sizes", [(5, 7), (7, 5), (1, 9), (9, 1), (3, 400), (400, 3), (130, 390)])
def test_windows_of_every_size(sizes, causal):
    # flash-attention#2199: rows without a key keep garbage; huge sides overflow i + right
    sides = (0, 1, 3, 129, 1000, sys.maxsize, 2**63, None, -1)
    for window in (
        itertools.product(sides, sides) if max(sizes) < 100 else zip(sides, reversed(sides), strict=True)
    ):
        assert torch.equal(visible(*sizes, window=window, causal=causal), pairs(*sizes, causal, window)), (
            window
        )


def test_rows_that_the_window_leaves_empty():
    # flash-attention#2199: window (0, 0), 8 queries, 3 keys: the first five rows see nothing
    q, k, v = qkv(1, 1, 8, 3)
    got = check(q, k, v, window=(0, 0), causal=True)
    assert not got["out"][:, :, :5].any()
    assert (got["lse"][:, :, :5] == -math.inf).all()
    torch.testing.assert_close(got["out"][:, :, 5:], v)


@pytest.mark.parametrize("window", [(-2, 0), (0, -3), (1,), (1, 2, 3), 5, "ab", (1.5, 0), (True, 0), {}])
def test_window_of_a_wrong_form_is_refused(window):
    with pytest.raises(ValueError, match="window"):
        attention(*qkv(), window=window)


@pytest.mark.parametrize("causal", [False, True, "upper_left"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_alibi_distance_counts_from_the_lower_right(causal, dtype):
    # flash-attention#1585, #907: sign, distance, and alignment when decoding
    for len_q, len_k in ((3, 7), (7, 3), (1, 30), (40, 60)):
        q, k, v = qkv(len_q=len_q, len_k=len_k, dtype=dtype)
        slopes = torch.tensor([0.5, 0.0625], dtype=dtype)
        distance = (torch.arange(len_q)[:, None] + len_k - len_q - torch.arange(len_k)).abs()
        got = check(q, k, v, alibi_slopes=slopes, causal=causal)["out"]
        dense = -slopes[:, None, None].float() * distance
        expected = attention(q, k, v, bias=dense, causal=causal)
        torch.testing.assert_close(got, expected)
        check(q, k, v, alibi_slopes=torch.stack([slopes, slopes / 8]), causal=causal)


def test_sequences_do_not_attend_into_their_neighbours():
    # pytorch#177378: padded and packed batches; every value holds the number of its sequence
    lengths = [3, 5, 1, 0, 4]
    q, k, _ = qkv(5, 2, 5, 5)
    v = torch.arange(1.0, 6, dtype=torch.float64).view(5, 1, 1, 1).expand(5, 2, 5, 8)
    out = attention(q, k, v, key_lengths=lengths)
    alive = torch.tensor(lengths).view(5, 1, 1, 1) > 0
    torch.testing.assert_close(out, v * alive)
    packed = [torch.cat([t[b, :, :n] for b, n in enumerate(lengths)], 1)[None] for t in (q, k, v)]
    number = torch.arange(5).repeat_interleave(torch.tensor(lengths))
    out = attention(*packed, mask=number[:, None] == number)
    torch.testing.assert_close(out, packed[2])


def test_padding_of_one_sample_leaves_the_other_alone():
    # transformers#41966: causal is dropped as soon as a padding mask is there
    q, k, v = qkv(len_q=4, len_k=4)
    full = attention(q, k, v, causal=True)
    torch.testing.assert_close(attention(q, k, v, causal=True, key_lengths=[4, 2])[0], full[0])
    torch.testing.assert_close(attention(q, k, v, causal=True, key_lengths=[4, 2])[1, :, :2], full[1, :, :2])


@pytest.mark.parametrize("kind", [list, tuple, torch.tensor, lambda n: torch.tensor(n, dtype=torch.int32)])
def test_lengths_in_any_form(kind):
    q, k, v = qkv()
    check(q, k, v, key_lengths=kind([0, 6]), query_lengths=kind([3, 5]))
    both = torch.tensor([[0, 1, 6, 1]]).view(2, 2)[:, 0]  # strided
    check(q, k, v, key_lengths=both)


@pytest.mark.parametrize("name", ["key_lengths", "query_lengths"])
@pytest.mark.parametrize(
    "lengths",
    [
        *([8, 8], [-1, 3], [3], [1, 2, 3], [1.0, 2.0], [True, False], 3, "ab"),
        *map(torch.tensor, ([1.0, 2.0], 3, [9, 1], [1, -1], [[1, 2]], [2**62, 0])),
    ],
    ids=str,
)
def test_wrong_lengths_are_refused(name, lengths):
    # flash-attention#638 family: a length past the end reads, or writes, other memory
    with pytest.raises((TypeError, ValueError), match=name):
        attention(*qkv(), **{name: lengths})


@pytest.mark.parametrize(
    ("options", "name"),
    [({name: value}, name) for name, values in {
        "scale": [math.nan, math.inf, "1", 1j, torch.ones(2)],
        "softcap": [0.0, -1.0, math.nan, math.inf, "5"],
        "causal": ["left", 1, None], "sinks": [torch.zeros(3), torch.zeros(2, 2), 1.0, torch.zeros(2).int()],
        "alibi_slopes": [torch.zeros(3), torch.zeros(1, 2), torch.zeros(2, dtype=torch.int64), [1.0, 2.0]],
        "return_weights": ["Full", True], "deterministic": ["yes"], "generator": [0],
        "mask": [[[True]]], "bias": [1.0],
    }.items() for value in values],
    ids=str,
)  # fmt: skip
def test_wrong_options_are_refused(options, name):
    # known_faults: an option that is wrong must neither be ignored nor crash
    with pytest.raises((TypeError, ValueError), match=name):
        attention(*qkv(), **options)


OPTIONS = {
    "bool mask": lambda n, t: {"mask": randn(2, 1, *n, seed=10) > -0.5},
    "float mask": lambda n, t: {"mask": randn(2, 4, 1, n[1], dtype=t, seed=11).masked_fill(
        torch.arange(n[1]) % 5 == 1, -math.inf)},
    "bias": lambda n, t: {"bias": randn(4, n[0], 1, dtype=t, seed=12)},
    "broadcast bias": lambda n, t: {"bias": randn(2, 1, 1, n[1], dtype=t, seed=13)},
    "causal": lambda n, t: {"causal": True},
    "upper left": lambda n, t: {"causal": "upper_left"},
    "window": lambda n, t: {"window": (3, 2)},
    "left window": lambda n, t: {"window": (2, None)},
    "scale": lambda n, t: {"scale": -0.3},
    "softcap": lambda n, t: {"softcap": 1.5},
    "alibi": lambda n, t: {"alibi_slopes": 0.02 * randn(2, 4, dtype=t, seed=14)},
    "sinks": lambda n, t: {"sinks": randn(4, dtype=t, seed=15)},
    "key lengths": lambda n, t: {"key_lengths": [n[1] - 2, n[1] // 2]},
    "query lengths": lambda n, t: {"query_lengths": [n[0] // 2, n[0]]},
    "dropout": lambda n, t: {"dropout_p": 0.3},
}  # fmt: skip


@pytest.mark.parametrize(("first", "second"), list(itertools.combinations(OPTIONS, 2)))
def test_every_pair_of_options(first, second):
    # own reasoning: options are tested alone and fail together
    for number, (sizes, dtype) in enumerate(
        [
            ((6, 9), torch.float64),
            ((9, 6), torch.float32),
            ((3, 140), torch.float32),
            ((100, 130), torch.float64),
        ]
    ):
        options = OPTIONS[first](sizes, dtype) | OPTIONS[second](sizes, dtype)
        q, k, v = qkv(2, 4, *sizes, 5, 3, heads_kv=(4, 2, 1, 2)[number], dtype=dtype)
        if "dropout_p" in options:
            options["keep"] = dropout_factors(2, 4, *sizes, 0.3, seed=number)
            options["generator"] = torch.Generator().manual_seed(number)
        check(q, k, v, **options)


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_options_at_once(dtype):
    # the same with every option that can stand beside the others
    names = (
        "bool mask",
        "bias",
        "causal",
        "left window",
        "scale",
        "softcap",
        "alibi",
        "sinks",
        "key lengths",
    )
    for sizes in ((4, 300), (130, 131)):
        options = {}
        for name in (*names, "query lengths", "dropout"):
            options |= OPTIONS[name](sizes, dtype)
        keep = dropout_factors(2, 4, *sizes, 0.3, seed=1)
        q, k, v = qkv(2, 4, *sizes, 16, 24, heads_kv=2, dtype=dtype)
        check(q, k, v, keep=keep, generator=torch.Generator().manual_seed(1), **options)


@pytest.mark.parametrize("call", [attention, scaled_dot_product_attention])
@pytest.mark.parametrize("shape", [(1, 1, 1, 4096), (4096, 4096)])
def test_a_mask_is_not_blown_up(shape, call):
    # DA3#268, mlx#1753: a bool mask is copied as floats, a padding mask to the size of all scores
    count = 4096
    q, k, v = (randn(1, 1, count, 8, dtype=torch.float32, seed=n).requires_grad_() for n in range(3))
    mask = (torch.arange(count) < 4000).expand(shape).contiguous()
    name = "mask" if call is attention else "attn_mask"
    with torch.profiler.profile(profile_memory=True) as profile:
        call(q, k, v, **{name: mask}).sum().backward()
    used = sum(e.self_cpu_memory_usage for e in profile.key_averages() if e.self_cpu_memory_usage > 0)
    assert used < count * count / 8, f"{used} bytes"
