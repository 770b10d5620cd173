"""torch's switch for TF32 reaches the ops: for float32 on a GPU, at the time of the call, backward included.

The GPU is made believe: tensors of the CPU say that they are on one, and the CPU's kernels ignore the switch.
"""

import pytest
import torch
from oracle import qkv
from torch.utils._python_dispatch import TorchDispatchMode

import attn_ext
from attn_ext import arguments, ops

matmul = torch.backends.cuda.matmul
WAYS_TO_ALLOW = {
    "allow_tf32": lambda: setattr(matmul, "allow_tf32", True),
    "set_float32_matmul_precision": lambda: torch.set_float32_matmul_precision("high"),
    "fp32_precision": lambda: setattr(matmul, "fp32_precision", "tf32"),
    "fp32_precision of everything": lambda: setattr(torch.backends, "fp32_precision", "tf32"),
}


@pytest.fixture(autouse=True)
def _switch_is_off_before_and_after():
    def off():
        torch.set_float32_matmul_precision("highest")
        torch.backends.fp32_precision = matmul.fp32_precision = "none"

    off()
    yield
    off()


@pytest.fixture
def on_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "is_cpu", property(lambda self: False))
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True))
    monkeypatch.setattr(ops, "CUDA_PROBLEM", "")


def allowed(op, args, kwargs):
    """[allow_tf32] of a call of one of this library's ops, else []."""
    if getattr(op, "namespace", None) != "attn_ext":
        return []
    given = dict(zip((a.name for a in op._schema.arguments), args, strict=False))
    return [{**given, **kwargs}.get("allow_tf32", False)]


class Calls(TorchDispatchMode):
    """What allow_tf32 was in each op of this library, in order."""

    def __init__(self):
        super().__init__()
        self.allowed = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.allowed += allowed(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def inputs(dtype=torch.float32):
    return [t.requires_grad_() for t in qkv(dtype=dtype)]


CALLS = {
    "plain": attn_ext.attention,
    "with the LSE": lambda *x: attn_ext.attention(*x, return_lse=True)[0],
    "with options": lambda *x: attn_ext.attention(*x, causal=True, softcap=2.0),
    "sdpa": attn_ext.scaled_dot_product_attention,
    "sdpa of 3-D": lambda *x: attn_ext.scaled_dot_product_attention(*(t[0] for t in x)),
}


@pytest.mark.parametrize("way", WAYS_TO_ALLOW)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.usefixtures("on_a_gpu")
def test_every_way_to_allow_it_reaches_forward_and_backward(call, way):
    x = inputs()
    with Calls() as calls:
        torch.autograd.grad(CALLS[call](*x).sum(), x)
        WAYS_TO_ALLOW[way]()
        torch.autograd.grad(CALLS[call](*x).sum(), x)
        with torch.no_grad():
            CALLS[call](*x)
    assert calls.allowed == [False, False, True, True, True]


@pytest.mark.usefixtures("on_a_gpu")
def test_the_backward_keeps_to_the_forward():
    """P = exp(S - lse) needs the S of the forward, whatever the switch says by then."""
    x = inputs()
    with Calls() as calls:
        matmul.allow_tf32 = True
        out = attn_ext.attention(*x)
        matmul.allow_tf32 = False
        (grad,) = torch.autograd.grad(out.sum(), x[:1], create_graph=True)
        grad.square().sum().backward()
    assert calls.allowed == [True, True]  # the second derivative is the reference's
    assert x[0].grad is not None


@pytest.mark.usefixtures("on_a_gpu")
def test_column_sums_keep_to_the_forward():
    x = inputs()
    with Calls() as calls:
        matmul.allow_tf32 = True
        _, sums = attn_ext.attention(*x, return_weights="colsum")
        matmul.allow_tf32 = False
        torch.autograd.grad(sums.square().sum(), x[:2])
    assert len(calls.allowed) == 4
    assert all(calls.allowed)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.usefixtures("on_a_gpu")
def test_other_dtypes_are_not_asked(dtype):
    matmul.allow_tf32 = True
    with Calls() as calls:
        attn_ext.attention(*inputs(dtype))
    assert calls.allowed == [False]


def test_the_cpu_is_not_asked_and_gives_the_same(monkeypatch):
    monkeypatch.setattr(arguments, "tf32_switch", lambda: pytest.fail("the CPU has no TF32"))
    matmul.allow_tf32 = True
    x = inputs()
    with Calls() as calls:
        plain, with_lse = attn_ext.attention(*x), attn_ext.attention(*x, return_lse=True)[0]
    assert calls.allowed == [False, False]
    q, k, v = (t.detach() for t in x)
    raw = torch.ops.attn_ext.attention_forward(q, k, v, 8**-0.5, allow_tf32=True)[0]
    assert torch.equal(raw, plain)
    assert torch.equal(raw, with_lse)


@pytest.mark.parametrize("way", WAYS_TO_ALLOW)
def test_launch_plan_follows_the_switch_for_tensors_anywhere(way):
    def kernel(**options):
        return attn_ext.launch_plan(*inputs(), **options).launches[0].kernel

    assert kernel() == "attn_fwd_simt_f32"
    WAYS_TO_ALLOW[way]()
    assert kernel() == "attn_fwd_tf32_sm80"
    assert kernel(allow_tf32=False) == "attn_fwd_simt_f32"


def test_launch_plan_says_what_allow_tf32_may_be():
    with pytest.raises(ValueError, match="allow_tf32 must be None, True or False, got 'high'"):
        attn_ext.launch_plan(*inputs(), allow_tf32="high")


@pytest.mark.compile
def test_compiled_code_follows_the_switch(monkeypatch):
    """Without a graph break, and anew when the switch changes."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    torch._dynamo.reset()
    monkeypatch.setattr(arguments, "allows_tf32", lambda q: arguments.tf32_switch())
    seen = []

    def compiler(graph, inputs):
        for node in graph.graph.nodes:
            seen.extend(allowed(node.target, node.args, node.kwargs))
        return make_boxed_func(graph.forward)

    compiled = torch.compile(attn_ext.attention, fullgraph=True, backend=aot_autograd(fw_compiler=compiler))
    for way in (lambda: None, *WAYS_TO_ALLOW.values()):
        way()
        x = inputs()
        torch.autograd.grad(compiled(*x).sum(), x)
        matmul.fp32_precision = "none"
    # A graph for the forward and one for the backward, with the switch off and on.
    assert seen == [False, False, True, True]
