"""return_weights and merge_attention: values, derivatives, and the memory that they promise."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import attn_ext
from attn_ext import attention, merge_attention, reference, weights

B, H, HKV, NQ, NK, D = 2, 4, 2, 5, 7, 2
F64 = torch.float64
KINDS = ["full", "mean_heads", "colsum"]


def reduce(p, kind):
    """What a kind of weights is, from all probabilities (B, H, Nq, Nk)."""
    return {"full": p, "mean_heads": p.mean(1), "colsum": p.sum(2)}[kind]


def make_inputs(dtype=F64):
    """q, k, v, bias, alibi_slopes, sinks, which require grad."""
    shapes = [(B, H, NQ, D), (B, HKV, NK, D), (B, HKV, NK, 2), (H, 1, NK), (B, H), (H,)]
    return [torch.randn(s, dtype=F64).to(dtype).requires_grad_() for s in shapes]


def make_options(kind):
    """Every rule of visibility, with rows that see nothing, and the mask bool or float."""
    mask = torch.rand(B, 1, NQ, NK) > 0.4
    if kind == "float":
        mask = torch.randn(H, NQ, NK, dtype=F64).masked_fill(~mask[0], -math.inf)
    return {
        "mask": mask,
        "causal": True,
        "window": (3, None),
        "softcap": 1.5,
        "key_lengths": torch.tensor([7, 4]),
        "query_lengths": torch.tensor([5, 3]),
    }


@pytest.fixture(params=[*KINDS, "mean_heads, one by one"])
def kind(request, monkeypatch):
    """Each kind of weights, and mean_heads with both of its ways through the heads."""
    if "one by one" in request.param:
        monkeypatch.setattr(weights, "HEAD_CHUNK_SCORES", 1)
    return request.param.partition(",")[0]


@pytest.mark.parametrize("mask", ["bool", "float"])
def test_values_and_gradients(kind, mask):
    """Catches a part of an option that goes to the wrong heads, and gradients that miss a chunk."""
    torch.manual_seed(0)
    q, k, v, bias, slopes, sinks = inputs = make_inputs()
    options = make_options(mask) | {"bias": bias, "alibi_slopes": slopes, "sinks": sinks}
    out, lse, p = attention(q, k, v, return_lse=True, return_weights=kind, dropout_p=0.0, **options)
    expected = reduce(reference.weights(q, k, **options), kind)
    torch.testing.assert_close(p, expected)
    torch.testing.assert_close((out, lse), reference.attention(q, k, v, **options))
    wanted = [x for x in inputs if x is not v]
    grad_p = torch.randn_like(p)
    ours, theirs = (torch.autograd.grad(x, wanted, grad_p) for x in (p, expected))
    torch.testing.assert_close(ours, theirs)


def test_second_derivatives(kind):
    """A penalty on the attention map is differentiated twice by second-order methods; catches lost terms."""
    torch.manual_seed(0)
    inputs = make_inputs()
    options = make_options("bool")

    def f(q, k, bias, slopes, sinks):
        terms = {"bias": bias, "alibi_slopes": slopes, "sinks": sinks}
        return attention(q, k, inputs[2].detach(), return_weights=kind, **terms, **options)[1]

    wanted = [x for n, x in enumerate(inputs) if n != 2]
    assert torch.autograd.gradcheck(f, wanted)
    assert torch.autograd.gradgradcheck(
        f, wanted, fast_mode=True
    )  # one random direction instead of each entry


def test_gradients_of_a_shared_input(kind):
    """q and k made from one x: a backward that differentiates through both would count terms twice."""
    x = torch.randn(1, 2, 5, D, dtype=F64, requires_grad=True)

    def f(x, weights_of):
        q, k = x.tanh(), x.tanh() * 2
        return weights_of(q + k, k).square().sum()

    def gradient_and_more(weights_of):
        (g,) = torch.autograd.grad(f(x, weights_of), x, create_graph=True)
        return g, torch.autograd.grad(g.square().sum(), x)[0]

    ours = gradient_and_more(lambda q, k: attention(q, k, k, causal=True, return_weights=kind)[1])
    theirs = gradient_and_more(lambda q, k: reduce(reference.weights(q, k, causal=True), kind))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes_and_precision(kind, dtype):
    """Weights are computed in float32; rounding to q's dtype comes last. Column sums stay float32."""
    q, k, v = (torch.randn(B, H, n, 16).to(dtype) for n in (NQ, NK, NK))
    p = attention(q, k, v, return_weights=kind)[1]
    assert p.dtype == (torch.float32 if kind == "colsum" else dtype)
    exact = reduce(reference.weights(q.double(), k.double()), kind)
    # one rounding of values up to 1 (of sums of 5 of them), and the float32 arithmetic before it
    eps = torch.finfo(p.dtype).eps
    assert (p - exact).abs().max() <= (10 if p.dtype == torch.float32 else 1) * eps * exact.max()


def test_huge_logits():
    """Catches weights as exp(s - LSE): at logits of 3e5 a float32 LSE gives 0.253 where 0.25 is right."""
    q, k = (torch.full((1, 2, n, 64), 200.0, dtype=torch.float16) for n in (3, 4))
    for kind in ("full", "mean_heads"):
        assert (attention(q, k, k, return_weights=kind)[1] == 0.25).all()


def test_sums():
    """Rows sum to 1; with sinks to less; rows without keys to 0; columns to the number of live rows."""
    q, k, v, _, _, sinks = (x.detach() for x in make_inputs())
    rows = {kind: attention(q, k, v, return_weights=kind, query_lengths=[5, 3])[1] for kind in KINDS}
    live = torch.tensor([[1.0] * 5, [1.0] * 3 + [0.0] * 2], dtype=F64)
    torch.testing.assert_close(rows["full"].sum(-1), live[:, None].expand(B, H, NQ))
    torch.testing.assert_close(rows["mean_heads"].sum(-1), live)
    torch.testing.assert_close(rows["colsum"].sum(-1), live.sum(-1)[:, None].expand(B, H))
    _, lse, p = attention(q, k, v, sinks=sinks, return_lse=True, return_weights="full")
    torch.testing.assert_close(p.sum(-1), 1 - torch.exp(sinks[:, None] - lse))


def test_dropout_does_not_enter(kind):
    """The weights are those before dropout, as documented; out is after it."""
    q, k, v = (torch.randn(B, H, 16, 8) for _ in range(3))
    out, p = attention(q, k, v, dropout_p=0.5, return_weights=kind)
    plain, expected = attention(q, k, v, return_weights=kind)
    torch.testing.assert_close(p, expected)
    assert not torch.equal(out, plain)


def test_order_of_results(kind):
    """out; (out, lse); (out, weights); (out, lse, weights)."""
    q, k, v = (torch.randn(B, H, n, D) for n in (NQ, NK, NK))
    shape = {"full": (B, H, NQ, NK), "mean_heads": (B, NQ, NK), "colsum": (B, H, NK)}[kind]
    results = attention(q, k, v, return_lse=True, return_weights=kind)
    assert [x.shape for x in results] == [(B, H, NQ, D), (B, H, NQ), shape]
    assert [x.shape for x in attention(q, k, v, return_weights=kind)] == [(B, H, NQ, D), shape]
    assert [x.shape for x in attention(q, k, v, return_lse=True)] == [(B, H, NQ, D), (B, H, NQ)]
    assert attention(q, k, v).shape == (B, H, NQ, D)


@pytest.mark.parametrize("axis", ["B", "H", "Nq", "Nk", "D"])
def test_axes_of_size_zero(kind, axis):
    """Catches divisions by the number of heads and reductions over no keys."""
    b, h, nq, nk, d = (0 if name == axis else 2 for name in ("B", "H", "Nq", "Nk", "D"))
    q, k = (torch.randn(b, h, n, d, dtype=F64, requires_grad=True) for n in (nq, nk))
    p = attention(q, k, k, return_weights=kind)[1]
    assert p.shape == {"full": (b, h, nq, nk), "mean_heads": (b, nq, nk), "colsum": (b, h, nk)}[kind]
    assert p.isfinite().all()
    assert all(
        (g == 0).all() for g in torch.autograd.grad(p.sum(), (q, k), allow_unused=True) if g is not None
    )


def test_func_grad(kind):
    """torch.func.grad differentiates through a graph of its own."""
    q, k, v = (x.detach() for x in make_inputs()[:3])

    def loss(q, k):
        return attention(q, k, v, causal=True, return_weights=kind)[1].square().sum()

    grads = torch.func.grad(loss, argnums=(0, 1))(q, k)
    leaves = [x.clone().requires_grad_() for x in (q, k)]
    torch.testing.assert_close(grads, torch.autograd.grad(loss(*leaves), leaves))


@pytest.mark.compile
@pytest.mark.parametrize(("kind", "dynamic"), [("full", False), ("mean_heads", False), ("colsum", True)])
def test_compiles_without_graph_breaks(kind, dynamic):
    """The loop over heads and its backward are traced; values and gradients as in eager."""
    torch._dynamo.reset()

    def f(q, k, v):
        return attention(q, k, v, causal=True, softcap=2.0, return_weights=kind)[1]

    compiled = torch.compile(f, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    inputs = make_inputs()[:3]
    torch.testing.assert_close(compiled(*inputs), f(*inputs))
    ours, theirs = (torch.autograd.grad(g(*inputs).square().sum(), inputs[:2]) for g in (compiled, f))
    torch.testing.assert_close(ours, theirs)


MEMORY = """
import sys, torch
from attn_ext import attention

torch.set_num_threads(1)

def peak():  # KiB
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])

def run(heads, n, kind, requires_grad=True):
    q, k, v = (torch.randn(1, heads, n, 8, requires_grad=requires_grad) for _ in range(3))
    before = peak()
    out, p = attention(q, k, v, causal=True, return_weights=kind)
    if requires_grad:
        (out.sum() + p.square().sum()).backward()
    return (peak() - before) / 1024

run(2, 512, "mean_heads"), run(2, 16, "colsum")  # what is imported and allocated once; 512: in two chunks
inference = run(16, 1024, "mean_heads", False)
print(inference, run(1, 4096, "colsum"), run(16, 1024, "mean_heads"))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak from Linux's /proc")
def test_memory(tmp_path):
    """mean_heads may hold a few N x N matrices but never one for each head; colsum holds none. In MiB."""
    # glibc gives each large block back at once, so that the peak is what lives, not how the heap is cut up
    env = {
        **os.environ,
        "PYTHONPATH": str(Path(attn_ext.__file__).parents[1]),
        "MALLOC_MMAP_THRESHOLD_": "1000000",
    }
    command = [sys.executable, "-c", MEMORY]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    inference, colsum, mean_heads = map(float, done.stdout.split())
    assert inference < 6  # the result is a matrix of 4, q, k, v and out are 0.5 each
    assert colsum < 16  # one matrix is 64
    assert mean_heads < 60  # one matrix is 4 and ten live; those of all heads are 64, all told about 300


def parts(dtype=F64, empty=True):
    """q and keys split into 4 and 3; the second part hides everything from the first two queries."""
    q, k, v = (torch.randn(B, H, n, D, dtype=dtype, requires_grad=True) for n in (NQ, NK, NK))
    mask = torch.ones(NQ, NK, dtype=torch.bool)
    if empty:
        mask[:2, 4:] = mask[0] = False
    return q, k, v, mask


def merged(q, k, v, mask):
    first = attention(q, k[:, :, :4], v[:, :, :4], mask=mask[:, :4], return_lse=True)
    second = attention(q, k[:, :, 4:], v[:, :, 4:], mask=mask[:, 4:], return_lse=True)
    return merge_attention(*first, *second)


def test_merge_is_exact():
    """Two parts joined are attention over all keys, with gradients, also where a part or both are empty."""
    q, k, v, mask = parts()
    whole, joined = attention(q, k, v, mask=mask, return_lse=True), merged(q, k, v, mask)
    torch.testing.assert_close(joined, whole)
    grads = []
    for out, lse in (whole, joined):
        loss = out.square().sum() + lse.masked_fill(lse == -math.inf, 0).sin().sum()
        grads.append(torch.autograd.grad(loss, (q, k, v)))
        assert all(g.isfinite().all() for g in grads[-1])
    torch.testing.assert_close(*grads)


def test_merge_derivatives():
    """Derivatives in all four arguments, with a row where one part is empty and one where both are."""
    out1, out2 = (torch.randn(3, 2, dtype=F64, requires_grad=True) for _ in range(2))
    lse1, lse2 = (torch.randn(3, dtype=F64, requires_grad=True) for _ in range(2))
    none = torch.tensor([False, True, True]), torch.tensor([False, False, True])

    def f(out1, lse1, out2, lse2):
        lses = [lse.masked_fill(hide, -math.inf) for lse, hide in zip((lse1, lse2), none, strict=True)]
        out, lse = merge_attention(out1, lses[0], out2, lses[1])
        return out, lse.masked_fill(lse == -math.inf, 0)

    assert torch.autograd.gradcheck(f, (out1, lse1, out2, lse2), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(f, (out1, lse1, out2, lse2))


def test_merge_with_an_empty_part_changes_nothing():
    """merge(o1, -inf; o2, l2) is (o2, l2) to the bit, even if o1 was never written."""
    out, lse = torch.randn(2, 3, 4), torch.randn(2, 3)
    nothing = torch.full((2, 3, 4), math.nan), torch.full((2, 3), -math.inf)
    for args in ((*nothing, out, lse), (out, lse, *nothing)):
        result = merge_attention(*args)
        assert torch.equal(result[0], out)
        assert torch.equal(result[1], lse)
    both = merge_attention(*nothing, *nothing)
    assert (both[0] == 0).all()
    assert (both[1] == -math.inf).all()


def test_merge_of_distant_parts():
    """exp of LSEs as they are overflows or gives 0 / 0; shifted by the larger one it does not."""
    out = torch.tensor([[1.0]]), torch.tensor([[3.0]])
    for level in (-1e4, 0.0, 1e4):
        lse = torch.tensor([level])
        merged_out, merged_lse = merge_attention(out[0], lse, out[1], lse)
        assert merged_out.item() == 2.0
        assert merged_lse.item() == pytest.approx(level + math.log(2))
        assert merge_attention(out[0], lse, out[1], lse + 500)[0].item() == 3.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_merge_of_half_types(dtype):
    """Joined in float32 and rounded once."""
    q, k, v, mask = parts(torch.float32)
    q, k, v = (x.to(dtype) for x in (q, k, v))
    out, lse = merged(q, k, v, mask)
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    exact, exact_lse = reference.attention(q.double(), k.double(), v.double(), mask=mask)
    # each part was rounded once, then the sum: two roundings
    assert (out - exact).abs().max() <= 2 * torch.finfo(dtype).eps * exact.abs().max()
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-6, atol=1e-6)
