"""flash_attn_varlen_func: each sequence as if it were alone."""

import math

import flash_attn_formula as by_hand
import pytest
import torch
from oracle import randn
from torch._dynamo.testing import CompileCounterWithBackend

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
@pytest.mark.parametrize("options", [*OPTIONS, {"dropout_p": 0.4}])
def test_compiled_is_one_graph_for_all_lengths(options):
    """Fault: a graph break, a graph for each length, lengths of the first call that are kept."""
    torch.compiler.reset()
    graphs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(api.flash_attn_varlen_func, backend=graphs, fullgraph=True, dynamic=True)
    counts, probs = [], "dropout_p" not in options
    for (lengths_q, lengths_k), left_over in zip(LENGTHS[:3], (0, 3, 2), strict=True):
        tensors, arguments = make(lengths_q, lengths_k, left_over=left_over)
        slopes = options.get("alibi_slopes", torch.zeros(())).clone().requires_grad_()
        own = {**options, "alibi_slopes": slopes} if "alibi_slopes" in options else options
        results = []
        for f in (compiled, api.flash_attn_varlen_func):
            torch.manual_seed(0)
            out = f(*tensors, *arguments, **own, return_attn_probs=probs)
            out, lse = out[:2] if probs else (out, out.sum(-1).T)
            loss = (out * randn(*out.shape, seed=9)).sum() + lse.masked_fill(lse.isinf(), 0).square().sum()
            variables = [*tensors, slopes] if "alibi_slopes" in options else tensors
            results.append((out, lse, *torch.autograd.grad(loss, variables)))
        torch.testing.assert_close(*results)
        counts.append(graphs.frame_count)  # Dynamo may begin the first anew, with dropout_p as a constant
    assert counts == counts[:1] * 3


@pytest.mark.compile
def test_compiled_refuses_wrong_lengths():
    torch.compiler.reset()
    compiled = torch.compile(api.flash_attn_varlen_func, backend="aot_eager", fullgraph=True)
    for name in ("falls", "too long", "max_seqlen"):
        changes, error, words = WRONG[name]
        with pytest.raises(error) as caught:
            compiled(**{**GOOD, **changes})
        assert all(word in str(caught.value) for word in words)


@pytest.mark.compile
def test_compiled_torch_func_grad_is_right():
    """Fault: a gradient that Dynamo loses without a word, see test_ops.py. The graph breaks."""
    torch.compiler.reset()
    (q, _, _), arguments = make([3, 2], [3, 2])

    def gradient(q):
        return torch.func.grad(lambda q: api.flash_attn_varlen_func(q, q * 2, q + 1, *arguments).sin().sum())(
            q
        )

    torch.testing.assert_close(torch.compile(gradient, backend="aot_eager")(q.detach()), gradient(q.detach()))


@pytest.mark.compile
@pytest.mark.parametrize("output_mask", [15, 2])
def test_opcheck(output_mask):
    (q, k, v), (cu_q, cu_k, *longest) = make([3, 0, 2], [4, 1, 2], left_over=1)
    numbers = (0.3, 2, 2.0, 3, -1, 0.2, False)
    slopes = randn(3, 4, dtype=torch.float64, seed=5).requires_grad_()
    rest = (*numbers, slopes, torch.tensor([5, 11]))
    arguments = (q, k, v, cu_q, cu_k, *longest, *rest)
    torch.library.opcheck(torch.ops.attn_ext.packed_forward, arguments)
    with torch.no_grad():
        out, lse, parts = torch.ops.attn_ext.packed_forward(*arguments)
        grads = (randn(*out.shape, seed=6), randn(*lse.shape, seed=7), q, k, v)
        arguments = (*grads, out, parts, cu_q, cu_k, output_mask, *rest)
        arguments = [t.detach() if isinstance(t, torch.Tensor) else t for t in arguments]
        torch.library.opcheck(torch.ops.attn_ext.packed_backward, arguments)


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
