"""torch.compile: one graph for every batch size and length, and nothing in it that waits for a GPU."""

import pytest
import torch
from oracle import randn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from attn_ext import MultiHeadAttention, attention, ops, scaled_dot_product_attention

SIZES = ((2, 6, 9), (3, 9, 6), (5, 7, 70), (4, 31, 31))  # batch, queries, keys


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch.compiler.reset()


def marked(t, *axes):
    """The tensor with these axes marked dynamic: torch raises where code fixes the size of one."""
    for axis in axes:
        torch._dynamo.mark_dynamic(t, axis)
    return t


def floats(*shape, seed, axes):
    return marked(randn(*shape, seed=seed).requires_grad_(), *axes)


def qkv(batch, len_q, len_k, heads_kv=2):
    sizes = ((4, len_q), (heads_kv, len_k), (heads_kv, len_k))
    return {
        x: floats(batch, h, n, 8, seed=ord(x), axes=(0, 2)) for x, (h, n) in zip("qkv", sizes, strict=True)
    }


def every_term(batch, len_q, len_k):
    return qkv(batch, len_q, len_k) | {
        "mask": marked(randn(batch, 1, len_q, len_k, seed=1) > -1, 0, 2, 3),
        "bias": floats(4, len_q, len_k, seed=2, axes=(1, 2)),
        "alibi_slopes": floats(batch, 4, seed=3, axes=(0,)),
        "sinks": floats(4, seed=4, axes=()),
        "key_lengths": marked(torch.arange(batch) % (len_k + 1), 0),
        "query_lengths": marked(len_q - torch.arange(batch) % (len_q + 1), 0),
    }


def sdpa_inputs(batch, len_q, len_k):
    mask = floats(batch, 1, len_q, len_k, seed=1, axes=(0, 2, 3))
    return qkv(batch, len_q, len_k) | {"attn_mask": mask}


def three_dims(batch, len_q, len_k):
    return {
        x: floats(batch, n, 8, seed=n, axes=(0, 1)) for x, n in (("q", len_q), ("k", len_k), ("v", len_k))
    }


def padded(batch, len_q, len_k):
    return three_dims(batch, len_q, len_k) | {
        "key_padding_mask": marked(randn(batch, len_k, seed=5) > 1, 0, 1),
        "attn_mask": marked(randn(len_q, len_k, seed=6) > 1, 0, 1),
    }


MODULE = MultiHeadAttention(8, 4, batch_first=True, dtype=torch.float64)
CASES = {
    "every term": (
        every_term,
        lambda q, k, v, **terms: attention(
            q, k, v, **terms, causal=True, window=(5, None), softcap=3.0, dropout_p=0.2
        ),
    ),
    "lse": (qkv, lambda q, k, v: attention(q, k, v, return_lse=True)),
    "full weights": (qkv, lambda q, k, v: attention(q, k, v, causal=True, return_weights="full")),
    "mean_heads": (qkv, lambda q, k, v: attention(q, k, v, causal=True, return_weights="mean_heads")),
    "colsum": (qkv, lambda q, k, v: attention(q, k, v, causal=True, return_weights="colsum")),
    "sdpa": (
        sdpa_inputs,
        lambda q, k, v, **mask: scaled_dot_product_attention(q, k, v, **mask, dropout_p=0.2, enable_gqa=True),
    ),
    "sdpa 3-D": (three_dims, lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True)),
    "module": (padded, lambda q, k, v, **masks: MODULE(q, k, v, **masks)),
    "self-attention": (three_dims, lambda q, k, v: MODULE(q, q, q, need_weights=False, is_causal=True)[0]),
}


def run(function, inputs, training):
    """Results of the function, and gradients of a weighted sum of them."""
    torch.manual_seed(7)
    inputs = inputs()
    with torch.set_grad_enabled(training):
        made = function(**inputs)
    made = made if isinstance(made, tuple) else (made,)
    if not training:
        return made
    variables = [t for t in inputs.values() if t.is_floating_point()]
    loss = sum((t.masked_fill(t.isinf(), 0) * randn(*t.shape, seed=8)).sum() for t in made)
    return *(t.detach() for t in made), *torch.autograd.grad(loss, variables, allow_unused=True)


@pytest.mark.compile
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_one_graph_for_every_size(case, training):
    """Fault: a graph for each length or batch size, or a size that is fixed in the graph."""
    inputs, function = CASES[case]
    graphs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, backend=graphs, fullgraph=True)
    for sizes in SIZES:
        got, expected = (run(f, lambda s=sizes: inputs(*s), training) for f in (compiled, function))
        torch.testing.assert_close(got, expected)
    assert graphs.frame_count == 1


@pytest.mark.compile
def test_sizes_that_are_not_marked_cost_one_graph_more():
    graphs = CompileCounterWithBackend("eager")
    compiled = torch.compile(attention, backend=graphs, fullgraph=True)
    for batch, n in ((2, 6), (3, 9), (5, 70), (4, 31)):
        compiled(*(randn(batch, 2, n, 8, seed=s) for s in range(3)), causal=True)
    assert graphs.frame_count == 2


@pytest.mark.compile
def test_autocast_inside_and_around():
    """Fault: compiled code that loses autocast's dtype, or keeps that of its first call."""

    def inside(q, k, v):
        with torch.autocast("cpu", torch.bfloat16):
            return attention(q.sin(), k, v, causal=True)

    def around(q, k, v):
        return attention(q.sin(), k, v, causal=True)

    inputs = [t.detach().float().requires_grad_() for t in qkv(2, 5, 5).values()]
    for function in (inside, around):
        compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
        for enabled in (True, False):
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                made = [f(*inputs) for f in (compiled, function)]
            got, expected = ((t, *torch.autograd.grad(t.float().sum(), inputs)) for t in made)
            assert got[0].dtype == (torch.bfloat16 if enabled or function is inside else torch.float32)
            torch.testing.assert_close(got, expected)


class NoHost(TorchDispatchMode):
    """Refuses what a CUDA graph cannot hold: values that go to the host, or tensors that come from there."""

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        made = op(*args, **(kwargs or {}))
        tensors = [
            t for t in torch.utils._pytree.tree_leaves((args, kwargs, made)) if isinstance(t, torch.Tensor)
        ]
        assert {t.device.type for t in tensors} <= {"cuda"}, op
        assert torch.Tag.data_dependent_output not in op.tags, op
        assert torch.Tag.dynamic_output_shape not in op.tags, op
        return made


@pytest.mark.skipif(torch.version.cuda is None, reason="this torch knows no CUDA device, not even a fake one")
@pytest.mark.parametrize("case", CASES)
def test_nothing_waits_for_the_gpu(case, monkeypatch):
    """With fake tensors, which have no values to hand out. Fault: a value that is read on the host, or copied
    to the device. The backward is on the CPU: autograd's engine asks for a GPU."""
    monkeypatch.setattr(ops, "CUDA_PROBLEM", "")
    inputs, function = CASES[case]
    real = inputs(*SIZES[0])
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = {name: mode.from_tensor(t) for name, t in real.items()}
        made = function(**fake)
        made = made if isinstance(made, torch.Tensor) else made[-1]
        torch.autograd.grad(made.sum(), [t for t in fake.values() if t.requires_grad], allow_unused=True)
    with FakeTensorMode(), torch.device("cuda"):
        module = MultiHeadAttention(8, 4, batch_first=True, dtype=torch.float64)
        monkeypatch.setitem(globals(), "MODULE", module)
        fake = {name: torch.empty(t.shape, dtype=t.dtype) for name, t in real.items()}
        with NoHost():
            function(**fake)
