"""attn_ext.integrations.flash_attn: signatures, layouts, return values and errors."""

import inspect
import math

import flash_attn_formula as by_hand
import pytest
import torch
from oracle import qkv as bhnd
from oracle import randn

from attn_ext.integrations import flash_attn as api

F64 = torch.float64
# As flash-attn 2.8 has them.
COMMON = (
    "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, "
    "deterministic=False, return_attn_probs=False"
)
LENGTHS = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
SIGNATURES = {
    "flash_attn_func": f"(q, k, v, {COMMON})",
    "flash_attn_qkvpacked_func": f"(qkv, {COMMON})",
    "flash_attn_kvpacked_func": f"(q, kv, {COMMON})",
    "flash_attn_varlen_func": f"(q, k, v, {LENGTHS}, {COMMON}, block_table=None)",
    "flash_attn_varlen_qkvpacked_func": f"(qkv, cu_seqlens, max_seqlen, {COMMON})",
    "flash_attn_varlen_kvpacked_func": f"(q, kv, {LENGTHS}, {COMMON})",
    "flash_attn_with_kvcache": "(q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, "
    "cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, "
    "causal=False, window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, "
    "num_splits=0, return_softmax_lse=False)",
}
OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "local": {"window_size": (2, 1)},
    "left": {"window_size": (1, -1)},
    "right": {"window_size": (-1, 1)},
    "causal and local": {"causal": True, "window_size": (2, 5)},
    "scale": {"softmax_scale": 0.7},
    "softcap": {"softcap": 0.8},
    "alibi": {"alibi_slopes": torch.tensor([0.1, 0.2, 0.4, 0.8])},
    "alibi of each sample": {"alibi_slopes": randn(2, 4, dtype=torch.float32).abs(), "causal": True},
    "everything": {
        **{"softmax_scale": 0.7, "causal": True, "window_size": (3, -1), "softcap": 2.0},
        **{"alibi_slopes": torch.tensor([0.1, 0.2, 0.4, 0.8])},
    },
}


def make_qkv(len_q=5, len_k=7, heads_kv=2, dim_v=None, dtype=F64, dim=8):
    tensors = bhnd(2, 4, len_q, len_k, dim, dim_v, heads_kv, dtype)
    return [t.transpose(1, 2).contiguous().requires_grad_() for t in tensors]


def assert_same(results, expected, inputs):
    """Outputs and gradients of a random function of them."""
    loss = 0
    for got, want in zip(results, expected, strict=True):
        torch.testing.assert_close(got, want)
        weight = randn(*got.shape, dtype=got.dtype, seed=7)
        loss = loss + ((got - want).masked_fill(want.isinf(), 0) * weight).sum()
    for g in torch.autograd.grad(loss, inputs):
        torch.testing.assert_close(g, torch.zeros_like(g))


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name):
    """Positional calls written for flash-attn must not land in another argument."""
    assert str(inspect.signature(getattr(api, name))) == SIGNATURES[name]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("lengths", [(5, 7), (7, 5), (1, 6), (6, 6)])
@pytest.mark.parametrize("heads_kv", [4, 2, 1])
def test_values_and_gradients(options, lengths, heads_kv):
    """out, LSE and their gradients are the formula's: alignment, window and bias in every mode."""
    tensors = make_qkv(*lengths, heads_kv)
    out, lse, pattern = api.flash_attn_func(*tensors, **options, return_attn_probs=True)
    assert_same((out, lse), by_hand.attention(*tensors, **options), tensors)
    assert torch.equal(out, api.flash_attn_func(*tensors, **options))
    assert pattern.shape == (0,)
    assert out.shape == (2, lengths[0], 4, 8)
    assert lse.shape == (2, 4, lengths[0])
    assert out.is_contiguous()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_dtypes_of_results(dtype):
    q, k, v = make_qkv(dtype=dtype, dim_v=3)
    out, lse, _ = api.flash_attn_func(q, k, v, return_attn_probs=True)
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    assert out.shape == (2, 5, 4, 3)


def test_packed():
    """The parts of packed tensors, and their gradients in one piece."""
    qkv = randn(2, 5, 3, 4, 8).requires_grad_()
    kv = randn(2, 7, 2, 2, 8, seed=1).requires_grad_()
    q = randn(2, 5, 4, 8, seed=2).requires_grad_()
    options = OPTIONS["everything"]
    got = api.flash_attn_qkvpacked_func(qkv, **options, return_attn_probs=True)[:2]
    assert_same(got, by_hand.attention(*qkv.unbind(2), **options), [qkv])
    got = api.flash_attn_kvpacked_func(q, kv, **options, return_attn_probs=True)[:2]
    assert_same(got, by_hand.attention(q, *kv.unbind(2), **options), [q, kv])


def test_nothing_is_copied_on_the_way_in():
    """The op gets views of what the caller passed, also of packed tensors."""
    qkv = randn(2, 5, 3, 4, 8)
    seen = []
    original = api.functional.attention
    api.functional.attention = lambda *tensors, **options: (
        seen.extend(tensors) or original(*tensors, **options)
    )
    try:
        api.flash_attn_qkvpacked_func(qkv)
    finally:
        api.functional.attention = original
    assert len(seen) == 3
    for t in seen:
        assert t.shape == (2, 4, 5, 8)
        assert t.untyped_storage().data_ptr() == qkv.untyped_storage().data_ptr()


def test_rows_without_keys():
    """0 and -inf, and no NaN in a gradient: more queries than keys under causal."""
    tensors = make_qkv(6, 2)
    out, lse, _ = api.flash_attn_func(*tensors, causal=True, return_attn_probs=True)
    assert (out[:, :4] == 0).all()
    assert (lse[:, :, :4] == -math.inf).all()
    grads = torch.autograd.grad(out.sum(), tensors)
    assert all(g.isfinite().all() for g in grads)
    assert (grads[0][:, :4] == 0).all()


@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
def test_dropout_and_its_pattern(p):
    """S_dmask: the sign tells what was dropped, the size is the probability before dropout."""
    tensors = make_qkv()
    options = OPTIONS["everything"]
    torch.manual_seed(3)
    out, lse, pattern = api.flash_attn_func(*tensors, p, **options, return_attn_probs=True)
    torch.manual_seed(3)
    assert torch.equal(out, api.flash_attn_func(*tensors, p, **options))
    if p == 0:
        assert pattern.shape == (0,)
        return
    assert pattern.shape == (2, 4, 5, 7)
    assert not pattern.requires_grad
    threshold = round(p * 65536)
    kept = ~torch.signbit(pattern) * (65536 / (65536 - threshold) if threshold < 65536 else 0.0)
    assert_same((out, lse), by_hand.attention(*tensors, **options, kept=kept), tensors)
    identity = torch.eye(7, dtype=F64)[None, :, None].expand(2, 7, 2, 7)
    p_by_hand, _ = by_hand.attention(*tensors[:2], identity, **options)
    torch.testing.assert_close(pattern.abs(), p_by_hand.transpose(1, 2))


def test_dropout_is_new_in_each_call():
    tensors = make_qkv()
    assert not torch.equal(*(api.flash_attn_func(*tensors, dropout_p=0.5) for _ in range(2)))


def test_more_than_flash_attn_allows():
    """Second derivatives, and a gradient of alibi_slopes."""
    tensors = make_qkv(3, 4, dim=3)
    slopes = randn(4).abs().requires_grad_()

    def function(q, k, v, slopes):
        return api.flash_attn_func(q, k, v, causal=True, alibi_slopes=slopes, return_attn_probs=True)[:1]

    assert torch.autograd.gradcheck(function, (*tensors, slopes), fast_mode=True)
    assert torch.autograd.gradgradcheck(function, (*tensors, slopes), fast_mode=True)


@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients_repeat(deterministic):
    tensors = make_qkv(40, 50, dtype=torch.bfloat16)
    runs = [
        torch.autograd.grad(api.flash_attn_func(*tensors, deterministic=deterministic).sum(), tensors)
        for _ in range(2)
    ]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_autocast():
    """float32 inputs become autocast's dtype, which flash-attn refuses; leaves get float32 gradients."""
    tensors = make_qkv(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out, lse, pattern = api.flash_attn_func(*tensors, 0.5, return_attn_probs=True)
        cu = torch.tensor([0, 3], dtype=torch.int32)
        packed = api.flash_attn_varlen_func(*(t[0] for t in tensors), cu, cu, 3, 3)
    assert (out.dtype, lse.dtype, pattern.dtype) == (torch.bfloat16, torch.float32, torch.bfloat16)
    assert packed.dtype == torch.bfloat16
    assert all(g.dtype == torch.float32 for g in torch.autograd.grad(out.float().sum(), tensors))


@pytest.mark.compile
def test_compiles_without_graph_breaks():
    """Every option, out and LSE, at fixed lengths and, in the second call, at dynamic ones."""
    torch._dynamo.reset()

    def f(q, k, v, slopes):
        options = (0.0, 0.3, True, (3, -1), 2.0, slopes)
        out, lse, _ = api.flash_attn_func(q, k, v, *options, return_attn_probs=True)
        return out.square().sum() + lse.sum()

    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    for lengths in ((5, 7), (6, 9)):
        tensors = make_qkv(*lengths)
        results = [g(*tensors, torch.tensor([0.1, 0.2, 0.4, 0.8])) for g in (compiled, f)]
        torch.testing.assert_close(*results)
        torch.testing.assert_close(*(torch.autograd.grad(x, tensors) for x in results))


@pytest.mark.compile
def test_compiled_dropout():
    """The pattern that comes back is that of the call, and each call has another."""
    torch._dynamo.reset()
    tensors = make_qkv()
    f = torch.compile(api.flash_attn_func, fullgraph=True, backend="aot_eager")
    (out, _, pattern), (_, _, second) = (f(*tensors, 0.5, return_attn_probs=True) for _ in range(2))
    assert not torch.equal(pattern, second)
    expected, _ = by_hand.attention(*tensors, kept=2.0 * ~torch.signbit(pattern))
    torch.testing.assert_close(out, expected)


def test_kvcache_says_what_to_do_instead():
    q, k, v = make_qkv()
    with pytest.raises(NotImplementedError, match=r"flash_attn_with_kvcache .* flash_attn_func\("):
        api.flash_attn_with_kvcache(q, k, v, cache_seqlens=3)


Q, K, V = (t.detach() for t in make_qkv(dtype=torch.float32))
# What is wrong: (arguments that replace the good ones, exception, words of the message).
WRONG = {
    "q is a list": ({"q": [1.0]}, TypeError, ["q must be a torch.Tensor"]),
    "dtypes": ({"k": K.half()}, TypeError, ["same dtype", "k torch.float16"]),
    "integers": ({"q": Q.int(), "k": K.int(), "v": V.int()}, TypeError, ["int32"]),
    "3-D": ({"q": Q[0]}, ValueError, ["(batch, length, heads, head_dim)", "q (5, 4, 8)"]),
    "batch": ({"q": Q[:1]}, ValueError, ["batch", "q (1, 5, 4, 8)", "k (2, 7, 2, 8)"]),
    "head_dim": ({"q": Q[..., :4]}, ValueError, ["head_dim", "q (2, 5, 4, 4)"]),
    "length of v": ({"v": V[:, :3]}, ValueError, ["one length", "v (2, 3, 2, 8)"]),
    "heads": ({"q": Q[:, :, :3]}, ValueError, ["multiple", "q (2, 5, 3, 8)"]),
    "(B, H, N, D)": (
        {"q": Q.transpose(1, 2)},
        ValueError,
        ["(batch, length, heads, head_dim)", "(2, 4, 5, 8)"],
    ),
    "dropout_p": ({"dropout_p": 1.5}, ValueError, ["dropout_p", "between 0 and 1", "1.5"]),
    "softmax_scale": ({"softmax_scale": math.nan}, ValueError, ["softmax_scale", "finite", "nan"]),
    "causal": ({"causal": "upper_left"}, TypeError, ["causal must be True or False", "upper_left"]),
    "window_size an int": ({"window_size": 3}, ValueError, ["window_size", "pair", "3"]),
    "window_size of three": ({"window_size": (1, 2, 3)}, ValueError, ["window_size", "(1, 2, 3)"]),
    "window_size of floats": ({"window_size": (1.0, 0)}, ValueError, ["window_size", "integers", "(1.0, 0)"]),
    "window_size below -1": ({"window_size": (-2, 0)}, ValueError, ["window_size", "-1", "(-2, 0)"]),
    "softcap": ({"softcap": -1.0}, ValueError, ["softcap", "> 0", "-1.0"]),
    "slopes": ({"alibi_slopes": torch.ones(3)}, ValueError, ["alibi_slopes", "(4,) or (2, 4)", "(3,)"]),
    "slopes list": ({"alibi_slopes": [0.1] * 4}, TypeError, ["alibi_slopes must be a torch.Tensor"]),
    "deterministic": ({"deterministic": 1}, TypeError, ["deterministic", "True or False", "1"]),
    "return_attn_probs": ({"return_attn_probs": None}, TypeError, ["return_attn_probs", "None"]),
}


@pytest.mark.parametrize(("changes", "error", "words"), WRONG.values(), ids=WRONG.keys())
def test_errors(changes, error, words):
    with pytest.raises(error) as caught:
        api.flash_attn_func(**{"q": Q, "k": K, "v": V, **changes})
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("function", "shape", "words"),
    [
        (api.flash_attn_qkvpacked_func, (2, 5, 2, 4, 8), "qkv must be (batch, length, 3, heads, head_dim)"),
        (api.flash_attn_qkvpacked_func, (2, 5, 12, 8), "got (2, 5, 12, 8)"),
        (lambda kv: api.flash_attn_kvpacked_func(Q, kv), (2, 7, 3, 2, 8), "kv must be (batch, length, 2,"),
        (lambda x: api.flash_attn_varlen_qkvpacked_func(x, None, 5), (5, 4, 8), "(total length, 3, heads"),
        (lambda x: api.flash_attn_varlen_kvpacked_func(Q, x, *[0] * 4), (5, 3, 4, 8), "(total length, 2,"),
    ],
)  # fmt: skip
def test_errors_of_packed_tensors(function, shape, words):
    with pytest.raises(ValueError) as caught:  # noqa: PT011  the words are looked at below
        function(torch.zeros(shape))
    assert words in str(caught.value)
