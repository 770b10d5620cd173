"""Known faults under autocast, torch.compile, export, vmap, and what fake tensors say.

References are issues of other projects in which users met the fault.
"""

import contextlib

import pytest
import torch
from oracle import HALF, assert_close, oracle, qkv, randn
from other_python import run_python
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.func import vmap

from attn_ext import attention, scaled_dot_product_attention


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch.compiler.reset()


def grads(function, inputs):
    inputs = [t.detach().requires_grad_() for t in inputs]
    out = function(*inputs)
    return out.detach(), *torch.autograd.grad(out.float().square().sum(), inputs)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("call", [attention, scaled_dot_product_attention])
def test_autocast_of_mixed_inputs_and_masks(call, dtype):
    # pytorch#99012, #111276: q, k, v or the mask come in different dtypes and the call raises
    q, k, v = qkv(dtype=torch.float32)
    k, v = k.to(dtype), v.to(dtype)
    exact = oracle(q.to(dtype), k, v)[0]
    name = "mask" if call is attention else "attn_mask"
    with torch.autocast("cpu", dtype):
        out = call(q, k, v)
        assert out.dtype == dtype
        torch.testing.assert_close(out.double(), exact, atol=2e-2, rtol=2e-2)
        for mask in (torch.zeros(5, 7), torch.zeros(5, 7, dtype=dtype), torch.ones(5, 7, dtype=torch.bool)):
            assert torch.equal(call(q, k, v, **{name: mask}), out)
        double = [t.double() for t in (q, k, v)]
        assert call(*double).dtype == torch.float64  # as torch's own
        got = grads(call, (q, k, v))
        assert [g.dtype for g in got[1:]] == [torch.float32, dtype, dtype]
    with pytest.raises(TypeError, match=r"torch.float32.*torch.(b?)float16.*torch.(b?)float16"):
        call(q, k, v)  # flash-attention#398: mixed without autocast names all three


def test_autocast_options_and_weights_are_float32_inside():
    # pytorch#111276: a float32 bias is cast down, or refused
    q, k, v = qkv(dtype=torch.float32)
    bias, sinks = randn(5, 7, dtype=torch.float32, seed=5), randn(2, dtype=torch.float32, seed=6)
    low = [t.bfloat16() for t in (q, k, v)]
    with torch.autocast("cpu", torch.bfloat16):
        out, lse, weights = attention(
            q, k, v, bias=bias, sinks=sinks, return_lse=True, return_weights="colsum"
        )
        expected = attention(*low, bias=bias, sinks=sinks, return_lse=True, return_weights="colsum")
    assert out.dtype == torch.bfloat16
    assert lse.dtype == weights.dtype == torch.float32
    assert all(map(torch.equal, (out, lse, weights), expected))
    truth = oracle(*low, bias=bias, sinks=sinks)[1]
    assert_close("lse", lse, truth, oracle(*low, bias=bias, sinks=sinks, dtype=torch.float32)[1])


def test_autocast_gives_the_same_with_and_without_gradients():
    # pytorch#161489, #161936: a fast path in eval differs from training
    q, k, v = (t.requires_grad_() for t in qkv(dtype=torch.float32))
    with torch.autocast("cpu", torch.bfloat16):
        trained = attention(q, k, v, causal=True)
        with torch.no_grad():
            assert torch.equal(attention(q, k, v, causal=True), trained)
        with torch.inference_mode():
            assert torch.equal(attention(q, k, v, causal=True), trained)


def test_grad_scaler_finds_infinities_and_scales_back():
    # GradScaler contract: scaled gradients, an overflow skips the step
    weight = torch.nn.Parameter(randn(8, 8, dtype=torch.float32))
    x = randn(2, 2, 5, 8, dtype=torch.float32, seed=1)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)

    def step(factor):
        with torch.autocast("cpu", torch.float16):
            loss = (attention(x @ weight, x, x).float() * factor).sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    before = weight.detach().clone()
    step(1e9)
    assert torch.equal(weight, before)
    assert scaler.get_scale() < 2.0**10
    step(1.0)
    assert not torch.equal(weight, before)
    assert weight.isfinite().all()


COMPILED = {
    "every option": lambda q, k, v: attention(
        q, k, v, mask=torch.ones(2, 1, 1, k.shape[2], dtype=torch.bool), causal=True, window=(5, None),
        bias=torch.ones(2, 1, 1, dtype=q.dtype), softcap=3.0, sinks=torch.zeros(2, dtype=q.dtype),
        alibi_slopes=torch.full((2,), 0.1, dtype=q.dtype), key_lengths=torch.tensor([3, 5]),
    ),
    "lse": lambda q, k, v: (lambda out, lse: out * lse[..., None])(*attention(q, k, v, return_lse=True)),
    "colsum": lambda q, k, v: attention(q, k, v, return_weights="colsum")[1][..., None] * v,
    "sdpa causal": lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True),
    "sdpa 3-D": lambda q, k, v: scaled_dot_product_attention(q[0], k[0], v[0]),
    "computed mask": lambda q, k, v: attention(q, k, v, mask=(k[..., 0] > 0)[:, :, None]),
}  # fmt: skip


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_equals_eager_without_graph_breaks(name):
    # flash-attention#1386, #849, pytorch#128071: graph breaks; pytorch#110832: a length-1 mask axis, Ev != E
    function = COMPILED[name]
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    inputs = qkv(2, 2, 4, 5, 8, 5, dtype=torch.float32)
    torch.testing.assert_close(grads(compiled, inputs), grads(function, inputs))


def test_compiled_with_one_tensor_as_query_key_and_value():
    # own run: Dynamo refuses an autograd.Function that gets the same tensor twice
    x = randn(1, 2, 5, 8)
    for function in (lambda x: attention(x, x, x), lambda x: scaled_dot_product_attention(2 * x, x, x)):
        compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(grads(compiled, [x]), grads(function, [x]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_for_any_length_equals_eager(dtype):
    # pytorch#151558: compiled differs from eager beyond rounding; a new graph for each length
    def function(q, k, v, mask):
        return attention(q, k, v, mask=mask, causal=True)

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()  # other tests of this process compiled too
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=True)
    for len_q, len_k in ((6, 9), (9, 6), (7, 70), (200, 5), (30, 31), (31, 300)):
        inputs = qkv(2, 2, len_q, len_k, 8, 5, dtype=dtype)
        mask = randn(len_q, len_k, seed=5) > -1
        got, expected = (grads(lambda *x, f=f, m=mask: f(*x, m), inputs) for f in (compiled, function))
        torch.testing.assert_close(got, expected)
    assert torch._dynamo.utils.counters["frames"]["ok"] <= 2


def test_compiled_dropout_draws_a_new_mask_each_call_and_follows_the_seed():
    # pytorch#151558: a seed that is baked into the graph
    q, k, v = qkv(len_q=20, len_k=20)
    compiled = torch.compile(lambda *x: attention(*x, dropout_p=0.5), backend="aot_eager", fullgraph=True)
    torch.manual_seed(1)
    first, second = compiled(q, k, v), compiled(q, k, v)
    torch.manual_seed(1)
    assert torch.equal(compiled(q, k, v), first)
    assert not torch.equal(first, second)


@pytest.mark.compile
def test_default_backend_and_its_cache_in_a_second_process(tmp_path):
    # pytorch#177442, #181869: something of the extension is pickled into the compile cache and crashes
    program = """
import torch, attn_ext
torch.set_num_threads(1)
run = lambda q, bias: attn_ext.attention(q, q.sin(), q.cos(), bias=bias, causal=True)
inputs = torch.linspace(-9, 9, 160).sin().view(1, 2, 10, 8), torch.linspace(0, 1, 100).view(10, 10)
results = []
for function in (run, torch.compile(run, fullgraph=True)):
    x = [t.clone().requires_grad_() for t in inputs]
    out = function(*x)
    results.append((out, *torch.autograd.grad(out.sum(), x)))
torch.testing.assert_close(*results)
"""
    for _ in range(2):
        done = run_python("-c", program, TORCHINDUCTOR_CACHE_DIR=str(tmp_path))
        assert done.returncode == 0, done.stderr[-3000:]


def test_export_and_reload(tmp_path):
    # pytorch#143107, #94675: attention that cannot be exported
    class Block(torch.nn.Module):
        def forward(self, q, k, v):
            return attention(q, k, v, causal=True, softcap=2.0) + scaled_dot_product_attention(q, k, v)

    inputs = tuple(qkv(len_q=6, len_k=6))
    length = torch.export.Dim("length", min=2, max=64)
    program = torch.export.export(Block(), inputs, dynamic_shapes=[{2: length}] * 3)
    torch.export.save(program, tmp_path / "block.pt2")
    loaded = torch.export.load(tmp_path / "block.pt2").module()
    for n in (6, 9):
        inputs = tuple(qkv(len_q=n, len_k=n))
        torch.testing.assert_close(loaded(*inputs), Block()(*inputs))


def test_vmap_equals_a_loop():
    # pytorch#108065, #102457: no batching rule, wrong axis; a silent wrong answer would be the worst
    q, k, v = (randn(3, 2, 2, n, 8, seed=n) for n in (5, 7, 8))
    v = v[..., :7, :]
    masks = randn(3, 5, 7, seed=9) > 0
    loops = {
        "all": (lambda: vmap(attention)(q, k, v), [attention(q[n], k[n], v[n]) for n in range(3)]),
        "q": (
            lambda: vmap(attention, (0, None, None))(q, k[0], v[0]),
            [attention(q[n], k[0], v[0]) for n in range(3)],
        ),
        "mask": (
            lambda: vmap(lambda m: attention(q[0], k[0], v[0], mask=m))(masks),
            [attention(q[0], k[0], v[0], mask=m) for m in masks],
        ),
        "gradients": (
            lambda: vmap(torch.func.grad(lambda *x: attention(*x).square().sum()))(q, k, v),
            [torch.func.grad(lambda *x: attention(*x).square().sum())(q[n], k[n], v[n]) for n in range(3)],
        ),
        "lengths": (
            lambda: vmap(lambda n: attention(q[0], k[0], v[0], key_lengths=n))(
                torch.tensor([[1, 2], [7, 0]])
            ),
            [attention(q[0], k[0], v[0], key_lengths=n) for n in ([1, 2], [7, 0])],
        ),
        "weights": (
            lambda: vmap(lambda q: attention(q, k[0], v[0], return_weights="mean_heads")[1])(q),
            [attention(q[n], k[0], v[0], return_weights="mean_heads")[1] for n in range(3)],
        ),
    }
    for batched, loop in loops.values():
        got, loop = batched(), [x if isinstance(x, tuple) else (x,) for x in loop]
        for g, w in zip(got if isinstance(got, tuple) else (got,), zip(*loop, strict=True), strict=True):
            torch.testing.assert_close(g, torch.stack(w))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_fake_tensors_promise_what_the_kernel_returns(dtype):
    # pytorch#138317, #139424, #121943: dtype, shape or strides of out or LSE differ between fake and real
    for dims in ((8, 5, 2), (8, 8, 4)):
        q, k, v = qkv(2, 4, 5, 7, dims[0], dims[1], heads_kv=dims[2], dtype=dtype)
        for layout in (lambda t: t, lambda t: t.transpose(1, 2).contiguous().transpose(1, 2)):
            tensors = [layout(t).requires_grad_() for t in (q, k, v)]
            got = []
            for mode in (contextlib.nullcontext(), FakeTensorMode()):
                with mode as fake:
                    x = [fake.from_tensor(t) if fake else t for t in tensors]
                    out, lse = attention(*x, return_lse=True)
                    ones = (torch.ones_like(out), torch.ones_like(lse))
                    made = (out, lse, *torch.autograd.grad((out, lse), x, ones))
                    got.append([(t.shape, t.dtype, t.stride()) for t in made])
            assert got[0] == got[1]


DUAL = {
    "sdpa": scaled_dot_product_attention,
    "attention": lambda q, k, v: attention(q, k, v, causal=True, return_lse=True),
    "colsum": lambda q, k, v: attention(q, k, v, return_weights="colsum"),
    "mean_heads": lambda q, k, v: attention(q, k, v, return_weights="mean_heads"),
}


@pytest.mark.compile
@pytest.mark.parametrize("before", ["nothing", "plain numbers", "a gradient"])
@pytest.mark.parametrize("name", DUAL)
def test_dual_numbers_through_compiled_code(name, before):
    """Fault: a graph that was made for plain numbers drops the tangents without a word."""
    function = DUAL[name]
    compiled = torch.compile(function, backend="aot_eager")
    x = qkv(len_q=5, len_k=5)
    if before == "plain numbers":
        compiled(*x)
    elif before == "a gradient":
        made = compiled(*(t.clone().requires_grad_() for t in x))
        (made if isinstance(made, torch.Tensor) else made[0]).sum().backward()
    moving = [randn(*t.shape, seed=9 + n) for n, t in enumerate(x)]

    def tangents(f):
        with forward_ad.dual_level():
            made = f(*map(forward_ad.make_dual, x, moving))
            made = (made,) if isinstance(made, torch.Tensor) else made
            return [forward_ad.unpack_dual(t).tangent.clone() for t in made]

    expected = tangents(function)
    torch.testing.assert_close(tangents(compiled), expected)
    made = torch.func.jvp(compiled, tuple(x), tuple(moving))[1]
    torch.testing.assert_close([made] if isinstance(made, torch.Tensor) else list(made), expected)
    torch.testing.assert_close(compiled(*x), function(*x))
