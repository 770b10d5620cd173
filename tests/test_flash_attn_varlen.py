"""flash_attn_varlen_func: each sequence as if it were alone."""

import math

import flash_attn_formula as by_hand
import pytest
import torch
from oracle import randn

from attn_ext.integrations import flash_attn as api

SLOPES = {"one": torch.tensor([0.1, 0.2, 0.4, 0.8]), "each": randn(5, 4, dtype=torch.float32).abs()}
OPTIONS = [
    {},
    {"causal": True},
    {"window_size": (2, 1)},
    {"causal": True, "window_size": (1, -1), "softcap": 2.0, "softmax_scale": 0.7},
    {"causal": True, "alibi_slopes": SLOPES["one"]},
    {"alibi_slopes": SLOPES["each"]},
]
# Of queries and keys: sequences without queries, without keys, without either, at the ends and between.
LENGTHS = [
    ([5, 1, 0, 7, 3], [5, 4, 2, 3, 0]),
    ([0, 0, 4, 2, 0], [0, 3, 6, 2, 0]),
    ([3, 3, 3, 3, 3], [3, 3, 3, 3, 3]),
    ([0, 0, 0, 0, 0], [0, 0, 0, 0, 0]),
]


def ends(lengths):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)


def make(lengths_q, lengths_k, heads_kv=2, left_over=0, dtype=torch.float64):
    """q, k, v with rows that belong to no sequence, full of NaN, and the five arguments about lengths."""
    tensors = []
    for n, (lengths, heads) in enumerate(((lengths_q, 4), (lengths_k, heads_kv), (lengths_k, heads_kv))):
        t = randn(sum(lengths) + left_over, heads, 8, dtype=dtype, seed=n)
        t[sum(lengths) :] = math.nan
        tensors.append(t.requires_grad_())
    return tensors, (ends(lengths_q), ends(lengths_k), max(lengths_q), max(lengths_k))


def sequence_by_sequence(tensors, lengths_q, lengths_k, alibi_slopes=None, **options):
    """[(out (Nq, H, D), lse (H, Nq)) of each sequence]."""
    results, start_q, start_k = [], 0, 0
    for b, (n_q, n_k) in enumerate(zip(lengths_q, lengths_k, strict=True)):
        q, k, v = (
            t[None, start : start + n]
            for t, start, n in zip(tensors, (start_q, start_k, start_k), (n_q, n_k, n_k), strict=True)
        )
        slopes = alibi_slopes[b] if alibi_slopes is not None and alibi_slopes.dim() == 2 else alibi_slopes
        out, lse = by_hand.attention(q, k, v, alibi_slopes=slopes, **options)
        results.append((out[0], lse[0]))
        start_q, start_k = start_q + n_q, start_k + n_k
    return results


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("left_over", [0, 3])
def test_each_sequence_as_if_alone(options, lengths, left_over):
    """The diagonal is that of each sequence, and NaN in rows of no sequence goes nowhere."""
    tensors, arguments = make(*lengths, left_over=left_over)
    out, lse, pattern = api.flash_attn_varlen_func(*tensors, *arguments, **options, return_attn_probs=True)
    assert torch.equal(out, api.flash_attn_varlen_func(*tensors, *arguments, **options))
    assert pattern.shape == (0,)
    expected = sequence_by_sequence(tensors, *lengths, **options)
    total = sum(lengths[0])
    torch.testing.assert_close(out[:total], torch.cat([x for x, _ in expected]))
    torch.testing.assert_close(lse[:, :total], torch.cat([x for _, x in expected], 1))
    assert out.shape == tensors[0].shape
    assert (out[total:] == 0).all()
    assert (lse[:, total:] == -math.inf).all()
    weight = randn(*out.shape, seed=9)
    grads = torch.autograd.grad((out * weight).sum(), tensors)
    by_hand_loss = (torch.cat([x for x, _ in expected]) * weight[:total]).sum()
    for got, want in zip(grads, torch.autograd.grad(by_hand_loss, tensors), strict=True):
        torch.testing.assert_close(got, want)
        used = got.shape[0] - left_over
        assert (got[used:] == 0).all()


def test_packed():
    lengths = [3, 1, 4]
    cu = ends(lengths)
    qkv = randn(8, 3, 4, 8).requires_grad_()
    out = api.flash_attn_varlen_qkvpacked_func(qkv, cu, 4, causal=True)
    assert torch.equal(out, api.flash_attn_varlen_func(*qkv.unbind(1), cu, cu, 4, 4, causal=True))
    assert torch.autograd.grad(out.sum(), qkv)[0].shape == qkv.shape
    q, kv = randn(8, 4, 8), randn(8, 2, 2, 8)
    out = api.flash_attn_varlen_kvpacked_func(q, kv, cu, cu, 4, 4, 0.0, None, True)
    assert torch.equal(out, api.flash_attn_varlen_func(q, *kv.unbind(1), cu, cu, 4, 4, causal=True))


def test_dropout_and_its_pattern():
    lengths_q, lengths_k = [3, 0, 2], [4, 1, 6]
    tensors, arguments = make(lengths_q, lengths_k, left_over=2)
    torch.manual_seed(0)
    out, _, pattern = api.flash_attn_varlen_func(*tensors, *arguments, dropout_p=0.5, return_attn_probs=True)
    torch.manual_seed(0)
    assert torch.equal(out, api.flash_attn_varlen_func(*tensors, *arguments, dropout_p=0.5))
    assert pattern.shape == (3, 4, 3, 6)
    first_q = first_k = 0
    for b, (n_q, n_k) in enumerate(zip(lengths_q, lengths_k, strict=True)):
        own = pattern[b : b + 1, :, :n_q, :n_k]
        q, k, v = tensors
        k, v = (t[None, first_k : first_k + n_k] for t in (k, v))
        want, _ = by_hand.attention(q[None, first_q : first_q + n_q], k, v, kept=2.0 * ~torch.signbit(own))
        torch.testing.assert_close(out[None, first_q : first_q + n_q], want)
        assert (pattern[b, :, n_q:] == 0).all()
        assert (pattern[b, :, :, n_k:] == 0).all()
        first_q, first_k = first_q + n_q, first_k + n_k


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_accuracy_of_half_types(dtype):
    """flash-attn's rule, over sequences of odd lengths."""
    lengths = [113, 1, 203]
    tensors, arguments = make(lengths, lengths, dtype=dtype)

    def formula(*tensors, reordered=False):
        return torch.cat([x for x, _ in sequence_by_sequence(tensors, lengths, lengths, reordered=reordered)])

    by_hand.assert_as_good_as(formula, lambda *t: api.flash_attn_varlen_func(*t, *arguments), tensors)


def test_lengths_of_no_sequence_at_all():
    q = randn(3, 4, 8).requires_grad_()
    cu = torch.zeros(1, dtype=torch.int32)
    out = api.flash_attn_varlen_func(q, q, q, cu, cu, 0, 0)
    assert torch.equal(out, torch.zeros_like(q))
    assert torch.equal(torch.autograd.grad(out.sum(), q)[0], torch.zeros_like(q))


@pytest.mark.compile
def test_compiles_with_a_graph_break():
    """Other lengths in the same tensor shapes: nothing of the first call may be kept."""
    torch._dynamo.reset()
    f = torch.compile(api.flash_attn_varlen_func, backend="aot_eager")
    for lengths in ([3, 2], [1, 4]):
        tensors, arguments = make(lengths, lengths)
        arguments = (*arguments[:2], 5, 5)
        want = api.flash_attn_varlen_func(*tensors, *arguments, causal=True)
        torch.testing.assert_close(f(*tensors, *arguments, causal=True), want)


GOOD, (CU, _, _, _) = make([3, 2], [3, 2])
GOOD = {**dict(zip("qkv", (t.detach() for t in GOOD), strict=True)), "cu_seqlens_q": CU, "cu_seqlens_k": CU}
GOOD |= {"max_seqlen_q": 3, "max_seqlen_k": 3}
WRONG = {
    "4-D": ({"q": GOOD["q"][None]}, ValueError, ["(total length, heads, head_dim)", "(1, 5, 4, 8)"]),
    "int64": ({"cu_seqlens_q": CU.long()}, TypeError, ["cu_seqlens_q must be int32", "int64"]),
    "a list": ({"cu_seqlens_k": [0, 3, 5]}, TypeError, ["cu_seqlens_k must be a torch.Tensor"]),
    "2-D": ({"cu_seqlens_k": CU[None]}, ValueError, ["cu_seqlens_k", "(sequences + 1,)", "(1, 3)"]),
    "empty": ({"cu_seqlens_k": CU[:0]}, ValueError, ["cu_seqlens_k", "(0,)"]),
    "starts late": (
        {"cu_seqlens_q": torch.tensor([1, 3, 5]).int()},
        ValueError,
        ["cu_seqlens_q", "start with 0", "[1, 3, 5]"],
    ),
    "falls": ({"cu_seqlens_q": CU.flip(0) - 5}, ValueError, ["cu_seqlens_q", "never fall", "[0, -2, -5]"]),
    "too long": ({"cu_seqlens_k": CU * 2}, ValueError, ["cu_seqlens_k", "5 rows of k", "[0, 6, 10]"]),
    "another batch": ({"cu_seqlens_k": CU[:2]}, ValueError, ["same number of sequences", "2 and 1"]),
    "max_seqlen": ({"max_seqlen_q": 2}, ValueError, ["max_seqlen_q", "at least", "3, got 2"]),
    "max_seqlen a float": ({"max_seqlen_k": 3.0}, TypeError, ["max_seqlen_k must be an integer", "3.0"]),
    "slopes": ({"alibi_slopes": torch.ones(3, 4)}, ValueError, ["alibi_slopes", "(4,) or (2, 4)", "(3, 4)"]),
    "block_table": (
        {"block_table": torch.zeros(2, 1, dtype=torch.int32)},
        NotImplementedError,
        ["flash_attn_varlen_func", "block_table", "gather"],
    ),
}


@pytest.mark.parametrize(("changes", "error", "words"), WRONG.values(), ids=WRONG.keys())
def test_errors(changes, error, words):
    with pytest.raises(error) as caught:
        api.flash_attn_varlen_func(**{**GOOD, **changes})
    for word in words:
        assert word in str(caught.value)


def test_lengths_as_tensors_of_one_number():
    """max_seqlen as code computes it, (cu[1:] - cu[:-1]).max(), without .item()."""
    longest = (CU[1:] - CU[:-1]).max()
    out = api.flash_attn_varlen_func(**{**GOOD, "max_seqlen_q": longest, "max_seqlen_k": longest})
    assert torch.equal(out, api.flash_attn_varlen_func(**GOOD))
