"""MultiHeadAttention as a module: errors, hooks, copies, distributed use, autocast, compilation, export.

"Known fault" in a docstring is a failure that users met in other libraries and the test guards against.
"""

import copy
import doctest
import io
import pickle

import pytest
import torch
from multihead_modes import F64, MODES, TOLERANCE, in_mode
from other_python import start_python
from torch import nn
from torch.nn.utils import parametrize

import attn_ext.modules.multihead
from attn_ext import MultiHeadAttention

# ---- errors ----


def error_cases():
    x, memory = torch.randn(2, 3, 8), torch.randn(2, 5, 8)
    return {
        "4d_query": (ValueError, "query must be 2-D .* or 3-D", (x[None], x, x), {}),
        "2d_key": (ValueError, "key must be 3-D like query", (x, memory[0], memory), {}),
        "query_features": (ValueError, "query must have embed_dim=8", (x[..., :7], memory, memory), {}),
        "key_features": (ValueError, "key must have kdim=8", (x, memory[..., :7], memory), {}),
        "value_features": (ValueError, "value must have vdim=8", (x, memory, memory[..., :7]), {}),
        "lengths": (ValueError, "key and value must have the same length", (x, memory, memory[:, :4]), {}),
        "batch": (ValueError, "same batch size N", (x, memory[:1], memory[:1]), {}),
        "padding_shape": (
            ValueError,
            r"key_padding_mask must have shape \(N, S\) = \(2, 5\), got \(5, 2\)",
            (x, memory, memory),
            {"key_padding_mask": torch.zeros(5, 2, dtype=torch.bool)},
        ),
        "mask_shape": (
            ValueError,
            r"attn_mask must have shape \(L, S\) or .* = \(3, 5\) or \(4, 3, 5\), got \(2, 3, 5\)",
            (x, memory, memory),
            {"attn_mask": torch.zeros(2, 3, 5)},
        ),
        "mask_integer": (
            TypeError,
            r"attn_mask must be bool .* got torch.uint8: convert a 0/1 mask with attn_mask.bool\(\)",
            (x, memory, memory),
            {"attn_mask": torch.zeros(3, 5, dtype=torch.uint8)},
        ),
        "padding_integer": (
            TypeError,
            "key_padding_mask must be bool .* got torch.int64",
            (x, memory, memory),
            {"key_padding_mask": torch.zeros(2, 5, dtype=torch.int64)},
        ),
        "mask_float64": (
            TypeError,
            "attn_mask is torch.float64, wider than torch.float32",
            (x, memory, memory),
            {"attn_mask": torch.zeros(3, 5, dtype=torch.float64)},
        ),
        "mask_list": (TypeError, "attn_mask must be a torch.Tensor", (x, x, x), {"attn_mask": [[0.0]]}),
        "bias_bool": (
            TypeError,
            "attn_bias must be a floating-point tensor, got torch.bool",
            (x, memory, memory),
            {"attn_bias": torch.zeros(3, 5, dtype=torch.bool)},
        ),
        "bias_shape": (
            ValueError,
            r"attn_bias must broadcast to \(N, num_heads, L, S\) = \(2, 2, 3, 5\), got \(4, 3, 5\)",
            (x, memory, memory),
            {"attn_bias": torch.zeros(4, 3, 5)},
        ),
        "query_dtype": (TypeError, "query is torch.float16.*torch.float32", (x.half(), memory, memory), {}),
        "key_dtype": (TypeError, "key is torch.bfloat16.*torch.float32", (x, memory.bfloat16(), memory), {}),
    }


@pytest.mark.parametrize("name", error_cases())
def test_clear_errors(name):
    error, message, inputs, options = error_cases()[name]
    module = MultiHeadAttention(8, 2, batch_first=True)
    with pytest.raises(error, match=message):
        module(*inputs, **options)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"embed_dim": 10, "num_heads": 4}, "embed_dim must be divisible by num_heads, got embed_dim=10"),
        ({"embed_dim": 0}, "embed_dim must be greater than 0, got 0"),
        ({"num_heads": -1}, "num_heads must be greater than 0, got -1"),
        ({"num_kv_heads": 3}, "num_kv_heads must divide num_heads=4, got 3"),
        ({"num_kv_heads": 0}, "num_kv_heads must be greater than 0, got 0"),
        ({"head_dim": 0}, "head_dim must be greater than 0, got 0"),
        ({"kdim": 0}, "kdim must be greater than 0, got 0"),
        ({"dropout": 1.5}, "dropout must be a probability between 0 and 1, got 1.5"),
        ({"window": 4}, r"window must be a pair \(left, right\)"),
        ({"softcap": -1.0}, "softcap must be None or a finite number > 0, got -1.0"),
        ({"qk_norm": "l2"}, 'qk_norm must be None, "rms" or "layer", got \'l2\''),
    ],
)
def test_clear_constructor_errors(arguments, message):
    with pytest.raises(ValueError, match=message):
        MultiHeadAttention(**{"embed_dim": 8, "num_heads": 4, **arguments})


# ---- the module as a module ----


def test_documented_examples():
    result = doctest.testmod(attn_ext.modules.multihead, extraglobs={"torch": torch})
    assert result.attempted > 0
    assert result.failed == 0


def test_per_head_weights_shape_and_mean():
    """Known fault: weights per head and averaged disagree, or have the wrong shape."""
    module = MultiHeadAttention(512, 8, batch_first=True)
    x = torch.randn(2, 10, 512)
    _, heads = module(x, x, x, need_weights=True, average_attn_weights=False)
    _, mean = module(x, x, x, need_weights=True)
    assert heads.shape == (2, 8, 10, 10)
    assert mean.shape == (2, 10, 10)
    torch.testing.assert_close(heads.mean(1), mean)
    _, heads = module(x[0], x[0], x[0], average_attn_weights=False)
    _, mean = module(x[0], x[0], x[0])
    assert heads.shape == (8, 10, 10)
    assert mean.shape == (10, 10)


def test_batch_first_changes_only_the_layout():
    """Known fault: (L, N, E) read as (N, L, E); both run."""
    first = MultiHeadAttention(8, 2, batch_first=True, **F64)
    second = MultiHeadAttention(8, 2, **F64)
    second.load_state_dict(first.state_dict())
    x = torch.randn(2, 3, 8, **F64)
    padding = torch.tensor([[False, False, True], [False, False, False]])
    out, weights = first(x, x, x, padding)
    y = x.transpose(0, 1)
    out_second, weights_second = second(y, y, y, padding)
    assert out_second.shape == (3, 2, 8)
    assert weights_second.shape == (2, 3, 3)
    torch.testing.assert_close(out_second.transpose(0, 1), out, **TOLERANCE)
    torch.testing.assert_close(weights_second, weights, **TOLERANCE)


def test_no_bias_is_the_same_in_every_mode():
    """Known fault: bias=False fails or differs in eval."""
    module = MultiHeadAttention(8, 2, bias=False, batch_first=True, **F64)
    assert list(module.state_dict()) == ["in_proj_weight", "out_proj.weight"]
    x = torch.randn(2, 3, 8, **F64)
    results = []
    for mode in MODES:
        with in_mode(module, mode):
            results.append(module(x, x, x))
    assert all(torch.equal(a, b) for r in results[1:] for a, b in zip(r, results[0], strict=True))


def test_dropout_only_in_training_mode():
    """Known fault: attention drops out in eval, because the functional has no training flag."""
    module = MultiHeadAttention(8, 2, dropout=0.5, batch_first=True)
    x = torch.randn(2, 16, 8)
    assert not torch.equal(module(x, x, x)[0], module(x, x, x)[0])
    weights = [module(x, x, x)[1] for _ in range(2)]
    assert torch.equal(*weights)  # weights are those before dropout
    torch.manual_seed(3)
    first = module(x, x, x)[0]
    torch.manual_seed(3)
    assert torch.equal(first, module(x, x, x)[0])
    module.eval()
    assert torch.equal(module(x, x, x)[0], module(x, x, x)[0])


@pytest.mark.parametrize("mode", MODES)
def test_out_proj_is_called_as_a_module(mode):
    """Known fault: hooks on out_proj, LoRA wrappers and replacements are ignored."""

    class Doubled(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return 2 * self.inner(x)

    module = MultiHeadAttention(8, 2, batch_first=True)
    x = torch.randn(2, 3, 8)
    calls = []
    handle = module.out_proj.register_forward_hook(lambda *_: calls.append(1))
    with in_mode(module, mode):
        plain = module(x, x, x)[0]
        assert calls == [1]
        handle.remove()
        module.out_proj = Doubled(module.out_proj)
        torch.testing.assert_close(module(x, x, x)[0], 2 * plain)


@pytest.mark.parametrize("mode", MODES)
def test_parametrized_weights_are_used(mode):
    """Known fault: weight norm, spectral norm or tied weights of in_proj ignored."""

    class Doubled(nn.Module):
        readings = 0

        def forward(self, x):
            self.readings += 1
            return 2 * x

    module = MultiHeadAttention(8, 2, batch_first=True)
    doubled = copy.deepcopy(module)
    with torch.no_grad():
        doubled.in_proj_weight.mul_(2)
    parametrize.register_parametrization(module, "in_proj_weight", Doubled())
    x = torch.randn(2, 3, 8)
    with in_mode(module, mode):
        doubled_out = doubled(x, x, x)
        module.parametrizations.in_proj_weight[0].readings = 0
        torch.testing.assert_close(module(x, x, x), doubled_out)
        assert module.parametrizations.in_proj_weight[0].readings == 1  # spectral norm iterates at each
    module(x, x, x)[0].sum().backward()
    assert module.parametrizations.in_proj_weight.original.grad.abs().sum() > 0


def test_deepcopy_pickle_and_save():
    """Known fault: the module cannot be pickled, or not after use."""
    module = MultiHeadAttention(8, 2, qk_norm="rms", add_bias_kv=True, window=(4, None), batch_first=True)
    x = torch.randn(2, 3, 8)
    for _ in range(2):  # before and after use
        buffer = io.BytesIO()
        torch.save(module, buffer)
        buffer.seek(0)
        copies = [copy.deepcopy(module), pickle.loads(pickle.dumps(module))]
        copies.append(torch.load(buffer, weights_only=False))
        for other in copies:
            assert torch.equal(other(x, x, x)[0], module(x, x, x)[0])


CONSTRUCTORS = [{}, {"kdim": 6, "vdim": 5}, {"add_bias_kv": True}, {"qk_norm": "layer", "num_kv_heads": 1}]


@pytest.mark.parametrize("arguments", CONSTRUCTORS, ids=str)
@pytest.mark.parametrize("need_weights", [True, False])
def test_every_parameter_gets_a_gradient(arguments, need_weights):
    """Known fault: parameters unused in a pass make DistributedDataParallel hang or raise."""
    module = MultiHeadAttention(8, 2, batch_first=True, **arguments)
    query = torch.randn(2, 3, 8)
    key, value = torch.randn(2, 4, module.kdim), torch.randn(2, 4, module.vdim)
    module(query, key, value, torch.ones(2, 4, dtype=torch.bool), need_weights)[0].sum().backward()
    assert [name for name, p in module.named_parameters() if p.grad is None] == []


DDP_SCRIPT = """
import os, sys, torch
from torch import distributed, nn
from attn_ext import MultiHeadAttention
rank, world, store = int(sys.argv[1]), 2, sys.argv[2]
torch.set_num_threads(1)
distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
torch.manual_seed(0)
module = MultiHeadAttention(8, 2, add_bias_kv=True, batch_first=True, dtype=torch.float64)
x = torch.randn(4, 3, 8, dtype=torch.float64)
module(x, x, x)[0].square().mean().backward()
expected = [p.grad.clone() for p in module.parameters()]
module.zero_grad()
ddp = nn.parallel.DistributedDataParallel(module)
for need_weights in (True, False):
    module.zero_grad()
    mine = x[2 * rank : 2 * rank + 2]
    ddp(mine, mine, mine, need_weights=need_weights)[0].square().mean().backward()
    for p, grad in zip(module.parameters(), expected):
        torch.testing.assert_close(p.grad, grad)
distributed.destroy_process_group()
"""


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
def test_distributed_data_parallel_of_two_processes(tmp_path):
    processes = [
        start_python("-c", DDP_SCRIPT, rank, tmp_path / "store", GLOO_SOCKET_IFNAME="lo") for rank in range(2)
    ]
    errors = [process.communicate(timeout=100)[1].decode() for process in processes]
    assert [process.returncode for process in processes] == [0, 0], errors


# ---- autocast ----


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize(
    "extras", [{}, {"qk_norm": "rms", "add_bias_kv": True}], ids=["plain", "norm_bias_kv"]
)
def test_autocast(need_weights, extras):
    """Known fault: under autocast q, k, v or a mask differ in dtype and the call raises, or eval differs."""
    module = MultiHeadAttention(16, 2, batch_first=True, **extras)
    query, memory = torch.randn(2, 5, 16), torch.randn(2, 7, 16)
    options = {
        "key_padding_mask": torch.tensor([[0.0] * 7, [0.0] * 4 + [-torch.inf] * 3]),
        "attn_mask": torch.rand(5, 7) < 0.1,
        "attn_bias": torch.randn(2, 5, 7).bfloat16(),
        "need_weights": need_weights,
    }
    expected = module(query, memory, memory, **options)[0]
    results = []
    for mode in MODES:
        with in_mode(module, mode), torch.autocast("cpu", torch.bfloat16):
            out, _ = module(query, memory.bfloat16(), memory, **options)
        assert out.dtype == torch.bfloat16
        results.append(out)
    assert all(torch.equal(out, results[0]) for out in results)
    # bfloat16 keeps 8 bits: four roundings (projection, probabilities, output, projection) of values around 1
    torch.testing.assert_close(results[0].float(), expected, atol=0.03, rtol=0.03)
    results[0].sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in module.parameters())


def test_autocast_leaves_float64():
    module = MultiHeadAttention(8, 2, **F64)
    x = torch.randn(3, 2, 8, **F64)
    with torch.autocast("cpu", torch.bfloat16):
        out, _ = module(x, x, x)
    assert out.dtype == torch.float64


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_module_with_float32_mask(dtype):
    module = MultiHeadAttention(16, 2, batch_first=True, dtype=dtype)
    x = torch.randn(2, 5, 16, dtype=dtype)
    mask = torch.randn(5, 5)
    out, weights = module(x, x, x, attn_mask=mask)
    x32, exact = x.float(), copy.deepcopy(module).float()
    torch.testing.assert_close(out.float(), exact(x32, x32, x32, attn_mask=mask)[0], atol=0.02, rtol=0.02)
    assert out.dtype == weights.dtype == dtype


# ---- compile, export, transforms ----

CALLS = {
    "plain": ({}, {}),
    "no_weights": ({}, {"need_weights": False}),
    "causal": ({"qk_norm": "rms", "num_kv_heads": 1}, {"need_weights": False, "is_causal": True}),
    "two_masks": ({}, {"key_padding_mask": "padding", "attn_mask": "forbid"}),
    "masks": (
        {},
        {"need_weights": False, "key_padding_mask": "padding", "attn_mask": "forbid", "attn_bias": "bias"},
    ),
    "extra_keys": ({"add_bias_kv": True, "add_zero_attn": True}, {"key_padding_mask": "padding"}),
}


def make_call(name):
    arguments, options = CALLS[name]
    named = {
        "padding": torch.tensor([[False] * 5, [False] * 3 + [True] * 2]),
        "bias": torch.randn(2, 1, 1, 5),
    }
    named["forbid"] = torch.triu(torch.ones(5, 5, dtype=torch.bool), 1)
    options = {key: named.get(v, v) if isinstance(v, str) else v for key, v in options.items()}
    return MultiHeadAttention(8, 2, batch_first=True, **arguments), torch.randn(2, 5, 8), options


@pytest.mark.parametrize(
    ("name", "dynamic"), [*((name, False) for name in CALLS), ("two_masks", True), ("masks", True)]
)
def test_compile_fullgraph(name, dynamic):
    """dynamic: sizes are symbolic from the first compilation on; comparing them must not break the graph."""
    module, x, options = make_call(name)
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    out, weights = compiled(x, x, x, **options)
    expected = module(x, x, x, **options)
    torch.testing.assert_close((out, weights), expected)
    parameters = list(module.parameters())
    grads = [torch.autograd.grad(o.sin().sum(), parameters) for o in (out, expected[0])]
    torch.testing.assert_close(*grads)


def test_compile_default_backend():
    module, x, options = make_call("causal")
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True)
    out, _ = compiled(x, x, x, **options)
    expected, _ = module(x, x, x, **options)
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("name", CALLS)
def test_export(name):
    """Known fault: in eval mode the module turned into an operator that cannot be exported."""
    module, x, options = make_call(name)
    module.eval()
    with torch.no_grad():
        program = torch.export.export(module, (x, x, x), options)
    torch.testing.assert_close(program.module()(x, x, x, **options), module(x, x, x, **options))


def test_export_with_dynamic_batch_and_length():
    module, x, _ = make_call("causal")
    batch, length = torch.export.Dim("batch", min=2), torch.export.Dim("length", min=2)
    dynamic = {name: {0: batch, 1: length} for name in ("query", "key", "value")}
    options = {"need_weights": False, "is_causal": True}
    dynamic |= dict.fromkeys(options)
    program = torch.export.export(module, (x, x, x), options, dynamic_shapes=dynamic)
    y = torch.randn(3, 9, 8)
    torch.testing.assert_close(program.module()(y, y, y, **options), module(y, y, y, **options))


def test_functional_call_and_func_grad():
    module = MultiHeadAttention(8, 2, batch_first=True, **F64)
    x = torch.randn(2, 5, 8, **F64)

    def loss(parameters):
        return torch.func.functional_call(module, parameters, (x, x, x))[0].sin().sum()

    grads = torch.func.grad(loss)(dict(module.named_parameters()))
    loss({}).backward()
    torch.testing.assert_close(grads, {name: p.grad for name, p in module.named_parameters()}, **TOLERANCE)


def test_meta_device_and_materialisation():
    module = MultiHeadAttention(8, 2, batch_first=True, device="meta")
    x = torch.randn(2, 5, 8, device="meta")
    out, weights = module(x, x, x)
    assert out.shape == (2, 5, 8)
    assert weights.shape == (2, 5, 5)


def test_inputs_that_are_no_tensors_are_refused_by_name():
    module, x = MultiHeadAttention(8, 2), torch.randn(3, 1, 8)
    with pytest.raises(TypeError, match=r"value must be a torch\.Tensor"):
        module(x, x, None)
    with pytest.raises(TypeError, match="dropout"):
        MultiHeadAttention(8, 2, dropout=None)
