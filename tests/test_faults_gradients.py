"""Known faults in gradients: broadcast biases, subsets, LSE, second derivatives, determinism, odd corners.

References are issues of other projects in which users met the fault.
"""

import functools
import itertools
import math
import os
import sys

import pytest
import torch
from oracle import DTYPES, HALF, assert_close, check, oracle, qkv, randn
from torch.autograd import gradcheck, gradgradcheck
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from attn_ext import attention, scaled_dot_product_attention


def leaves(*args, **options):
    return [t.requires_grad_() for t in qkv(*args, **options)]


@pytest.mark.parametrize(
    "shape",
    [(1, 2, 5, 7), (1, 1, 5, 7), (2, 1, 1, 7), (2, 1, 1), (7,), (5, 1), (), (2, 2, 1, 1), (1, 1, 1, 1)],
)
@pytest.mark.parametrize("dtype", [*DTYPES, "float32 beside bfloat16"])
def test_gradient_of_a_broadcast_bias_has_its_shape_and_is_summed(shape, dtype):
    # xformers#783, #636, attention-gym#20, flash-attention#617: wrong shape, not summed, or silently None
    bias_dtype = dtype if isinstance(dtype, torch.dtype) else torch.float32
    dtype = dtype if isinstance(dtype, torch.dtype) else torch.bfloat16
    for sizes in ((5, 7), (130, 140)):
        full = tuple({5: sizes[0], 7: sizes[1]}.get(n, n) for n in shape)
        q, k, v = qkv(2, 2, *sizes, dtype=dtype)
        bias = randn(*full, dtype=bias_dtype, seed=5)
        for name in ("bias", "mask"):
            got = check(q, k, v, **{name: bias})
            assert got["d" + name].shape == full
            assert got["d" + name].dtype == bias_dtype


def test_gradient_of_a_bias_expanded_by_the_user():
    # xformers#783: stride-0 views of a learned bias
    q, k, v = qkv()
    table = randn(2, 1, 1, seed=5).requires_grad_()
    got = torch.autograd.grad(attention(q, k, v, bias=table.expand(2, 2, 5, 7)).sum(), table)
    expected = torch.autograd.grad(oracle(q, k, v, bias=table.expand(2, 2, 5, 7))[0].sum(), table)
    torch.testing.assert_close(got, expected)
    position = torch.arange(5)[:, None] - torch.arange(7) + 6
    learned = randn(2, 12, seed=6).requires_grad_()  # relative positions, as in T5
    got = torch.autograd.grad(attention(q, k, v, bias=learned[:, position]).square().sum(), learned)
    expected = torch.autograd.grad(oracle(q, k, v, bias=learned[:, position])[0].square().sum(), learned)
    torch.testing.assert_close(got, expected)


CORNERS = {
    "plain": {},
    "more queries than keys, causal": {"causal": True, "len_q": 5, "len_k": 3},
    "more keys than queries, upper left": {"causal": "upper_left", "len_q": 2, "len_k": 4},
    "masked rows": {"mask": torch.tensor([[True, False, True], [False] * 3, [True] * 3])},
    "one key": {"len_k": 1},
    "one query": {"len_q": 1},
    "Dv differs": {"dim_v": 1},
    "grouped heads": {"heads": 4, "heads_kv": 2},
    "one key head": {"heads": 3, "heads_kv": 1},
    "softcap": {"softcap": 1.5},
    "softcap, causal": {"softcap": 1.5, "causal": True},
    "window": {"window": (1, 0)},
    "negative scale": {"scale": -0.5},
    "key lengths": {"key_lengths": [0, 2]},
    "query lengths": {"query_lengths": [1, 3]},
    "float mask": {"mask": torch.tensor([0.0, -math.inf, 0.3], dtype=torch.float64)},
}


@pytest.mark.parametrize("corner", CORNERS)
def test_gradcheck_of_odd_corners(corner):
    # flash-attention#334, pytorch#81077: gradients by finite differences, also with undefined incoming ones
    options = dict(CORNERS[corner])
    sizes = {"heads": 1, "len_q": 3, "len_k": 3, "dim": 3}
    sizes |= {name: options.pop(name) for name in tuple(options) if name in (*sizes, "dim_v", "heads_kv")}
    inputs = leaves(**sizes)

    def run(q, k, v):
        out, lse = attention(q, k, v, return_lse=True, **options)
        return out, lse.masked_fill(lse == -math.inf, 0.0)

    assert gradcheck(run, inputs, check_undefined_grad=True)
    assert gradgradcheck(run, inputs)


def test_gradcheck_of_everything_at_once():
    # flash-attention#414, #889: bias, sinks, slopes and LSE together, with an expanded key and value
    q, k, v = leaves(2, 2, 3, 4, 2)
    bias, sinks = randn(1, 2, 1, 4, seed=5).requires_grad_(), randn(2, seed=6).requires_grad_()
    slopes = randn(2, 2, seed=7).requires_grad_()
    mask = torch.tensor([True, True, True, False])

    def run(q, k, v, bias, sinks, slopes):
        return attention(
            q, k[:1].expand_as(k), v[:, :1].expand_as(v), mask=mask, bias=bias, sinks=sinks,
            alibi_slopes=slopes, softcap=2.0, causal=True, window=(2, None), key_lengths=[4, 2],
            query_lengths=[3, 2], return_lse=True,
        )  # fmt: skip

    assert gradcheck(run, (q, k, v, bias, sinks, slopes))
    assert gradgradcheck(run, (q, k, v, bias, sinks, slopes))


@pytest.mark.parametrize("call", [attention, scaled_dot_product_attention])
def test_second_derivative_is_there_and_not_zero(call):
    # pytorch#116350, #117974, NATTEN#191: "derivative not implemented", or silently zero
    inputs = leaves(1, 1, 3, 4)

    def penalty(function):
        grads = torch.autograd.grad(function(*inputs).square().sum(), inputs, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in grads), inputs)

    for a, b in zip(penalty(call), penalty(lambda *x: oracle(*x)[0]), strict=True):
        torch.testing.assert_close(a, b, atol=1e-10, rtol=1e-10)
    hvp = torch.autograd.functional.hvp(
        lambda q: call(q, *inputs[1:]).sin().sum(), inputs[0], torch.ones(1, 1, 3, 8).double()
    )
    exact = torch.autograd.functional.hvp(
        lambda q: oracle(q, *inputs[1:])[0].sin().sum(), inputs[0], torch.ones(1, 1, 3, 8).double()
    )
    torch.testing.assert_close(hvp, exact)


@pytest.mark.parametrize("wanted", list(itertools.product((False, True), repeat=3)))
def test_only_the_wanted_gradients(wanted):
    # pytorch#148476: others get a gradient too, or an undefined one crashes
    for len_q, len_k, dtype in ((5, 7, torch.float64), (130, 140, torch.float32)):
        everything = check(*qkv(len_q=len_q, len_k=len_k, dtype=dtype))
        inputs = [
            t.requires_grad_(w)
            for t, w in zip(qkv(len_q=len_q, len_k=len_k, dtype=dtype), wanted, strict=True)
        ]
        out, lse = attention(*inputs, return_lse=True)
        assert out.requires_grad == any(wanted)
        if not any(wanted):
            continue
        cotangents = (randn(*out.shape, dtype=dtype, seed=100), randn(*lse.shape, seed=101).to(lse))
        torch.autograd.backward((out, lse), cotangents)
        for t, w, name in zip(inputs, wanted, ("dq", "dk", "dv"), strict=True):
            assert (t.grad is not None) == w
            assert not w or torch.equal(t.grad, everything[name])


@pytest.mark.parametrize("name", ["bias", "mask", "sinks", "alibi_slopes"])
def test_only_an_option_wants_a_gradient(name):
    # pytorch#148476 family: q, k and v frozen, the bias learned
    shape = (2, 7) if name in ("bias", "mask") else (2,)
    option = randn(*shape, seed=5).view(2, 1, 7) if len(shape) == 2 else randn(*shape, seed=5)
    option.requires_grad_()
    q, k, v = qkv()
    got = torch.autograd.grad(attention(q, k, v, **{name: option}).square().sum(), option)
    expected = torch.autograd.grad(oracle(q, k, v, **{name: option})[0].square().sum(), option)
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("of", ["out", "lse", "both"])
def test_gradient_through_lse(dtype, of):
    # flash-attention#889, #1137, #141: the gradient of the LSE is dropped
    mask = torch.ones(5, 7, dtype=torch.bool)
    mask[3] = False
    values = {}
    for name, function, kind in (
        ("got", attention, dtype),
        ("truth", oracle, torch.float64),
        ("plain", oracle, dtype),
    ):
        inputs = [t.to(kind).requires_grad_() for t in qkv(dtype=dtype)]
        extra = {"return_lse": True} if function is attention else {"dtype": kind}
        out, lse = function(*inputs, mask=mask, **extra)[:2]
        loss = (out * randn(*out.shape, dtype=dtype, seed=8).to(out)).sum() if of != "lse" else 0
        if of != "out":
            loss = loss + (lse.masked_fill(lse == -math.inf, 0) * randn(2, 2, 5, seed=9).to(lse)).sum()
        values[name] = torch.autograd.grad(loss, inputs, materialize_grads=True)
    for name, *three in zip("qkv", values["got"], values["truth"], values["plain"], strict=True):
        assert_close(f"d{name}", *three)
    assert values["got"][2].any() == (of != "lse")


@pytest.mark.parametrize("heads_kv", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_shared_key_heads_are_summed_over_their_queries(heads_kv, dtype):
    # levanter#449, native-sparse-attention#27: the last head wins, or the sum is taken in half precision
    for len_q in (5, 150):
        check(*qkv(2, 8, len_q, 7, heads_kv=heads_kv, dtype=dtype), causal=True)
    q, k, v = leaves(2, 8, 5, 7, heads_kv=heads_kv, dtype=torch.float64)
    grads = []
    for function in (scaled_dot_product_attention, F.scaled_dot_product_attention):
        grads.append(torch.autograd.grad(function(q, k, v, enable_gqa=True).square().sum(), (q, k, v)))
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
def test_backward_gives_the_same_bits_each_time_and_for_any_number_of_threads(dtype):
    # flash-attention#414, #349, pytorch#91979: atomic additions; the deterministic switch has no effect
    q, k, v = leaves(2, 4, 200, 300, 16, heads_kv=2, dtype=dtype)
    bias = randn(1, 4, 1, 300, dtype=dtype, seed=5).requires_grad_()
    before = torch.get_num_threads()

    def run(deterministic):
        out = attention(q, k, v, bias=bias, dropout_p=0.2, generator=torch.Generator().manual_seed(1),
                        deterministic=deterministic)  # fmt: skip
        return out, *torch.autograd.grad(out.square().sum(), (q, k, v, bias))

    first = run(None)
    try:
        for threads in (1, 2, 3, 8):
            torch.set_num_threads(threads)
            for deterministic in (None, True):
                assert all(map(torch.equal, run(deterministic), first)), threads
    finally:
        torch.set_num_threads(before)


@pytest.fixture
def deterministic_algorithms():
    """torch's switch, under which torch.empty is full of NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("len_q", [3, 130])
@pytest.mark.usefixtures("deterministic_algorithms")
def test_results_are_written_and_not_left_as_memory_was(dtype, len_q):
    # flash-attention#1228, #2324: rows that no query or key reaches keep what the allocator left there
    assert torch.empty(1).isnan()
    got = check(
        *qkv(2, 2, len_q, 140, dtype=dtype), key_lengths=[0, 60], query_lengths=[len_q, 2],
        causal="upper_left", bias=randn(2, len_q, 140, dtype=dtype, seed=5),
        sinks=randn(2, dtype=dtype, seed=6), alibi_slopes=randn(2, dtype=dtype, seed=7),
    )  # fmt: skip
    assert not got["dk"][0].any()
    assert not got["dv"][1, :, 60:].any()
    assert not got["dq"][1, :, 2:].any()


def test_forward_mode():
    # pytorch#128971, #154226, xformers#552: forward mode missing; a dropped tangent would be worse
    inputs, tangents = tuple(qkv(1, 1, 3, 4)), tuple(qkv(1, 1, 3, 4, seed=9))
    exact = torch.func.jvp(lambda *x: oracle(*x)[0], inputs, tangents)[1]
    for run in (
        attention,
        scaled_dot_product_attention,
        lambda *x: attention(*x, return_weights="colsum")[0],
    ):
        torch.testing.assert_close(torch.func.jvp(run, inputs, tangents)[1], exact)
    with torch.autograd.forward_ad.dual_level():
        duals = [torch.autograd.forward_ad.make_dual(*pair) for pair in zip(inputs, tangents, strict=True)]
        out = attention(*duals)
        torch.testing.assert_close(torch.autograd.forward_ad.unpack_dual(out).tangent, exact)


def test_torch_func_grad_and_vjp():
    inputs = tuple(qkv())
    got = torch.func.grad(lambda *x: attention(*x).square().sum(), (0, 1, 2))(*inputs)
    exact = torch.func.grad(lambda *x: oracle(*x)[0].square().sum(), (0, 1, 2))(*inputs)
    torch.testing.assert_close(got, exact)
    hessian = torch.func.grad(
        lambda q: torch.func.grad(lambda q: attention(q, *inputs[1:]).square().sum())(q).sin().sum()
    )
    expected = torch.func.grad(
        lambda q: torch.func.grad(lambda q: oracle(q, *inputs[1:])[0].square().sum())(q).sin().sum()
    )
    torch.testing.assert_close(hessian(inputs[0]), expected(inputs[0]))


def test_saved_tensors_do_not_hold_the_scores():
    # OLMo-core#828 family: O(N^2) memory kept between forward and backward
    q, k, v = leaves(1, 1, 300, 400, 16, dtype=torch.float32)
    saved = {}

    def pack(t):
        saved[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        attention(q, k, v, causal=True)
    assert sum(saved.values()) <= 4 * (300 * 16 * 2 + 400 * 16 * 2) + 8 * 300


@pytest.mark.parametrize("call", [attention, scaled_dot_product_attention])
def test_selective_checkpointing_can_name_the_op(call):
    # OLMo-core#828 family: a policy that is to save attention's result and recompute the rest
    op = torch.ops.attn_ext.attention_forward.default
    inputs = leaves(dtype=torch.float32)
    run = lambda *x: call(*(t.sin() for t in x), dropout_p=0.3).square()  # noqa: E731

    class Calls(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.count += function is op
            return function(*args, **(kwargs or {}))

    torch.manual_seed(1)
    expected = torch.autograd.grad(run(*inputs).sum(), inputs)
    for saved, times in (([op], 1), ([], 2)):
        torch.manual_seed(1)
        contexts = functools.partial(create_selective_checkpoint_contexts, saved)
        with Calls() as calls:
            loss = checkpoint(run, *inputs, use_reentrant=False, context_fn=contexts).sum()
            assert all(map(torch.equal, torch.autograd.grad(loss, inputs), expected))
        assert calls.count == times


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpointing(use_reentrant):
    # OLMo-core#828, torchtitan#1323: other gradients, or "saved tensors have different metadata"
    inputs = leaves(dtype=torch.float32)
    run = lambda *x: attention(*x, causal=True).square()  # noqa: E731
    expected = torch.autograd.grad(run(*inputs).sum(), inputs)
    checkpoint(run, *inputs, use_reentrant=use_reentrant).sum().backward()
    assert all(torch.equal(t.grad, g) for t, g in zip(inputs, expected, strict=True))


def test_the_same_tensor_three_times_and_modified_in_place():
    # own reasoning: gradients of shared inputs add up; a changed saved tensor must raise, not mislead
    x = randn(2, 2, 5, 8).requires_grad_()
    got = torch.autograd.grad(attention(x, x, x).square().sum(), x)
    torch.testing.assert_close(got, torch.autograd.grad(oracle(x, x, x)[0].square().sum(), x))
    y = x * 1
    out = attention(y, y, y)
    with torch.no_grad():
        y.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_backward_twice_needs_retain_graph_and_then_agrees():
    inputs = leaves()
    out = attention(*inputs)
    first = torch.autograd.grad(out.sum(), inputs, retain_graph=True)
    assert all(map(torch.equal, first, torch.autograd.grad(out.sum(), inputs)))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(out.sum(), inputs)


@pytest.mark.parametrize("kind", ["full", "mean_heads", "colsum"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradient_through_returned_weights(kind, dtype):
    # pytorch#34537 family: weights that are returned but detached
    q, k, v = qkv(heads=4, heads_kv=2, dtype=dtype)
    options = {
        "mask": randn(5, 7, seed=8) > -0.5,
        "sinks": randn(4, dtype=dtype, seed=9),
        "query_lengths": [4, 5],
    }
    values = {}
    for name, function, of in (
        ("got", attention, dtype),
        ("truth", oracle, torch.float64),
        ("plain", oracle, dtype),
    ):
        inputs = [t.to(of).requires_grad_() for t in (q, k)]
        if function is attention:
            p = attention(*inputs, v, return_weights=kind, **options)[1]
        else:
            p = oracle(*inputs, v, dtype=of, **options)[2]
            p = {"full": p, "mean_heads": p.mean(1), "colsum": p.sum(2)}[kind]
        grad = randn(*p.shape, dtype=dtype, seed=10).to(p)
        values[name] = (p.detach(), *torch.autograd.grad(p, inputs, grad))
    for name, *three in zip((kind, "dq", "dk"), values["got"], values["truth"], values["plain"], strict=True):
        assert_close(name, *three)


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
def test_forked_child_computes():
    # xformers#1030 family: a library that runs threads at import breaks data loaders that fork
    q, k, v = qkv(2, 2, 50, 60)
    expected = attention(q, k, v)
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)  # OpenMP's own pool does not survive a fork
        os._exit(0 if torch.equal(attention(q, k, v), expected) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
