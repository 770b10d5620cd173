"""attn_ext.patch_sdpa and torch.compile: what Dynamo saw and what its caches on disk keep."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from other_python import run_python
from torch import nn

import attn_ext


def attention_of(graph):
    names = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    return {
        "attn_ext" if "attn_ext" in name else "torch"
        for name in names
        if "attn_ext.attention_" in name or "scaled_dot_product" in name
    }


def recording(seen):
    """A back end that notes whose attention the graphs below autograd hold."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    def compiler(graph, inputs):
        seen.extend(attention_of(graph))
        return make_boxed_func(graph.forward)

    return aot_autograd(fw_compiler=compiler)


@pytest.mark.compile
@pytest.mark.parametrize("what", ["function", "module"])
def test_compiled_code_follows_the_patch(what):
    """Known fault: Dynamo holds what it saw. Compiled before, during and after: each gets its attention."""
    torch._dynamo.reset()
    x = torch.randn(2, 5, 8, requires_grad=True)
    module = nn.MultiheadAttention(8, 2, batch_first=True)

    def run(x):
        if what == "module":
            return module(x, x, x, need_weights=False)[0]
        return F.scaled_dot_product_attention(x, x, x)

    seen = []
    compiled = torch.compile(run, fullgraph=True, backend=recording(seen))
    expected = torch.autograd.grad(run(x).sin().sum(), x)
    for patched in (False, True, False):
        seen.clear()
        with attn_ext.patch_sdpa() if patched else warnings.catch_warnings():
            grads = torch.autograd.grad(compiled(x).sin().sum(), x)
        torch.testing.assert_close(grads, expected)
        if seen:  # compiled in this round: forward and backward
            assert set(seen) == {"attn_ext" if patched else "torch"}
        else:  # the code of the first round serves again
            assert patched is False


@pytest.mark.compile
def test_compiled_graphs_of_torchs_module_do_not_have_the_same_key():
    """The caches of torch.compile know a graph by the names in it, and trust those of torch's functions."""
    module, x = nn.MultiheadAttention(8, 2), torch.randn(5, 1, 8)
    names = []

    def backend(graph, inputs):
        targets = (node.target for node in graph.graph.nodes if node.op == "call_function")
        names.append({f"{t.__module__}.{t.__name__}" for t in targets})
        return graph.forward

    for patched in (False, True):
        torch._dynamo.reset()
        with attn_ext.patch_sdpa() if patched else warnings.catch_warnings():
            torch.compile(module, backend=backend, fullgraph=True)(x, x, x, need_weights=False)
    plain, patched = names
    assert [n for n in plain if "attention" in n] == ["torch.nn.functional.multi_head_attention_forward"]
    assert [n.split(".")[0] for n in patched if "attention" in n] == ["attn_ext"]


CACHE_SCRIPT = """
import sys, torch
torch.set_num_threads(1)
if sys.argv[1] == "patched":
    import attn_ext
    attn_ext.patch_sdpa()
module = torch.nn.MultiheadAttention(8, 2, batch_first=True)
x, padding = torch.randn(2, 5, 8), torch.tensor([[False] * 5, [True] * 5])
with torch.no_grad():
    torch.compile(lambda m, x: m(x, x, x, padding, need_weights=False)[0])(module, x)
from torch._dynamo.utils import counters
print(dict(counters["aot_autograd"]))
"""


@pytest.mark.slow
@pytest.mark.compile
def test_compile_caches_on_disk_do_not_mix(tmp_path):
    """Code with our op must not come out of them in a process that never imported attn_ext, nor code with
    torch's in a patched one. Three compilations by inductor."""
    found = {}
    for name in ("plain", "patched", "plain again"):
        result = run_python("-c", CACHE_SCRIPT, name, TORCHINDUCTOR_CACHE_DIR=str(tmp_path))
        assert result.returncode == 0, result.stderr
        found[name] = result.stdout
    assert "autograd_cache_saved" in found["plain"]
    assert "autograd_cache_hit" not in found["patched"]
    assert "autograd_cache_hit" in found["plain again"]
