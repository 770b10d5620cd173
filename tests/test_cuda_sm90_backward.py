"""The backward for Hopper (TMA, wgmma, warp specialisation): in ptxrun, and on a Hopper where there is one.

Most problems have at least four tiles of queries in all heads of a group, two more than the ring has stages,
so that it goes round.
"""

import math
import subprocess

import cuda_kernels
import hopper
import nvcc
import pytest
import torch
from hopper import on_each_device, rows_first
from oracle import check, qkv, randn

import attn_ext

F16, BF16 = torch.float16, torch.bfloat16


@pytest.fixture(autouse=True)
def hopper_kernels(monkeypatch):
    monkeypatch.setenv("ATTN_EXT_KERNELS", "sm90")


def kernels(q, k, v, gradients=None, **options):
    """The kernels of a backward on a Hopper."""
    out, lse = attn_ext.attention(q, k, v, return_lse=True, **options)[:2]
    plan = attn_ext.launch_plan(
        q, k, v, direction="backward", arch="sm_90", out=out, lse=lse, grad_out=out, gradients=gradients,
        **options,
    )  # fmt: skip
    return [launch.kernel for launch in plan.launches]


class _Backward(torch.autograd.Function):
    """The forward on the CPU, whose results are as good; the backward in ptxrun."""

    @staticmethod
    def forward(ctx, launch, options, q, k, v):
        out, lse = attn_ext.attention(q, k, v, return_lse=True, **options)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.launch, ctx.options = launch, options
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_out, grad_lse):
        q, k, v, out, lse = ctx.saved_tensors
        plan = attn_ext.launch_plan(
            q, k, v, direction="backward", arch="sm_90", out=out, lse=lse, grad_out=grad_out,
            grad_lse=grad_lse, **ctx.options,
        )  # fmt: skip
        assert [n.kernel.split("_sm90_")[0] for n in plan.launches[1:]] == ["attn_bwd", "attn_bwd_dq"]
        cuda_kernels.carry_out(plan, "sm_90", **ctx.launch)
        return None, None, *(plan.results[name] for name in ("grad_q", "grad_k", "grad_v"))


def attention_on(device, **launch):
    """As cuda_kernels.attention_on, for a Hopper and in ptxrun the backward alone."""
    if device == "cuda":
        return cuda_kernels.attention_on(device)
    return lambda q, k, v, return_lse, **options: _Backward.apply(launch, options, q, k, v)


# keys for four blocks; dim, dim_v: the bucket's size and about the least it takes.
SHAPES = {"d64": (401, 40, 64), "d96": (401, 96, 65), "d128": (401, 97, 128)}


@on_each_device
@pytest.mark.parametrize("dtype", [F16, BF16], ids=["f16", "bf16"])
@pytest.mark.parametrize("name", SHAPES)
def test_every_kernel(name, dtype, device):
    q, k, v = rows_first(*qkv(1, 2, 213, *SHAPES[name], heads_kv=1, dtype=dtype))
    kind = f"sm90_{'f16' if dtype == F16 else 'bf16'}_{name}"
    assert kernels(q, k, v)[1:] == [f"attn_bwd_{kind}", f"attn_bwd_dq_{kind}"]
    check(q, k, v, call=attention_on(device))


@on_each_device
@pytest.mark.parametrize("dtype", [F16, BF16], ids=["f16", "bf16"])
@pytest.mark.parametrize("name", SHAPES)
def test_a_single_tile_of_queries_in_every_kernel(name, dtype, device):
    """The loop over tiles does not run once; two blocks add to dQ."""
    check(*qkv(1, 1, 7, 140, *SHAPES[name][1:], dtype=dtype), call=attention_on(device))


@on_each_device
@pytest.mark.parametrize("dtype", [F16, BF16], ids=["f16", "bf16"])
@pytest.mark.parametrize("name", SHAPES)
def test_lengths_a_band_and_nan_in_every_kernel(name, dtype, device):
    """Rows that no 16 bytes divide; a sample without keys; NaN in rows of Q and K, all over the tiles, that
    some see and others, who share the tile, do not: it gets nowhere where it does not get on the CPU."""
    _, dim, dim_v = SHAPES[name]
    tensors = qkv(3, 2, 203, 230, dim - 1, dim_v - 1, heads_kv=1, dtype=dtype)
    options = {"window": (40, 5), "causal": "upper_left", "query_lengths": [150, 97, 190]}
    options["key_lengths"] = [230, 200, 0]
    check(*tensors, call=attention_on(device), **options)
    q, k, _ = tensors
    q[1, :, 7::13], k[0, :, 3::13] = math.nan, math.nan
    grad_out = randn(3, 2, 203, dim_v - 1, dtype=dtype, seed=9)

    def gradients(call):
        leaves = [t.detach().requires_grad_() for t in tensors]
        return torch.autograd.grad(call(*leaves, return_lse=True, **options)[0], leaves, grad_out)

    for got, want in zip(gradients(attention_on(device)), gradients(attn_ext.attention), strict=True):
        assert got.isnan().any()
        assert not (got.isnan() & ~want.isnan()).any()
        torch.testing.assert_close(got[~want.isnan()], want[~want.isnan()], rtol=0, atol=0.05)


OPTIONS = {
    **hopper.OPTIONS,
    "one query, one key": ((1, 1), {}),
    "one query": ((1, 147), {}),
    "whole tiles, no mask": ((384, 512), {}),
    "odd": ((257, 63), {"scale": -0.3}),
    "causal, more queries than keys": ((400, 150), {"causal": True}),
    "upper left": ((400, 463), {"causal": "upper_left"}),
    "a window on both sides": ((500, 530), {"window": (150, 20)}),
    "lengths": ((203, 330), {"key_lengths": [0, 195], "query_lengths": [203, 97]}),
}


@on_each_device
@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, F16) for name in OPTIONS), ("upper left", BF16)], ids=str
)
def test_options(name, dtype, device):
    (queries, keys), options = OPTIONS[name]
    batch = 2 if "key_lengths" in options else 1
    check(*qkv(batch, 3, queries, keys, 64, heads_kv=1, dtype=dtype), call=attention_on(device), **options)


@on_each_device
@pytest.mark.parametrize("dtype", [F16, BF16], ids=["f16", "bf16"])
def test_what_lies_beyond_the_lengths_may_be_anything(dtype, device):
    """The copies bring it into shared memory all the same."""
    options = {"key_lengths": [150, 77], "query_lengths": [70, 111]}
    clean = [t.requires_grad_() for t in qkv(2, 2, 130, 203, 64, heads_kv=1, dtype=dtype)]
    dirty = [t.detach().clone() for t in clean]
    grad_out = randn(2, 2, 130, 64, dtype=dtype, seed=9)
    dirty_grad_out = grad_out.clone()
    for n in range(2):
        dirty[0][n, :, options["query_lengths"][n] :] = math.inf
        dirty_grad_out[n, :, options["query_lengths"][n] :] = math.nan
        dirty[1][n, :, options["key_lengths"][n] :] = math.nan
        dirty[2][n, :, options["key_lengths"][n] :] = math.inf
    call = attention_on(device)
    results = []
    for tensors, cotangent in ((clean, grad_out), ([t.requires_grad_() for t in dirty], dirty_grad_out)):
        out, _ = call(*tensors, return_lse=True, **options)
        results.append(torch.autograd.grad(out, tensors, cotangent))
    for expected, got in zip(*results, strict=True):
        assert torch.equal(expected, got)


@on_each_device
def test_nan_reaches_who_sees_it_and_nobody_else(device):
    """Under the causal rule: from there on in dq, up to there in dk and dv. Hidden pairs share its tiles."""

    def spoilt(name):
        """The rows of dq, dk and dv that are NaN after a NaN in row 70 of one head of q, k or dO."""
        tensors = dict(zip("qkv", qkv(1, 2, 140, 140, 64, dtype=BF16), strict=True))
        grad_out = randn(1, 2, 140, 64, dtype=BF16, seed=9)
        {**tensors, "dO": grad_out}[name][0, 0, 70, 5] = math.nan
        for t in tensors.values():
            t.requires_grad_()
        out, _ = attention_on(device)(**tensors, return_lse=True, causal=True)
        grads = torch.autograd.grad(out, list(tensors.values()), grad_out)
        assert not any(g[0, 1].isnan().any() for g in grads)  # the other head
        assert all(torch.equal(g.isnan().any(-1), g.isnan().all(-1)) for g in grads[:2])
        return [g[0, 0].isnan().all(-1).nonzero().flatten().tolist() for g in grads]

    before, after, every = list(range(71)), list(range(70, 140)), list(range(140))
    assert spoilt("q") == [[70], before, before]
    assert spoilt("k") == [after, every, every]
    assert spoilt("dO") == [[70], before, []]  # dv has NaN in one column, 0 * NaN among it


def test_the_same_bits_whatever_the_order_of_blocks_and_warps():
    q, k, v = (t.requires_grad_() for t in qkv(1, 4, 250, 280, 64, heads_kv=2, dtype=F16))
    results = []
    for launch in ({}, {"shuffle": 1}, {"batch": False}, {"collectives_order": False}):
        out, _ = attention_on("ptxrun", **launch)(q, k, v, return_lse=True, causal=True)
        results.append(torch.autograd.grad(out.float().square().sum(), (q, k, v)))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@nvcc.needed
def test_every_block_finds_its_turn_and_none_waits_long(tmp_path):
    """Else the kernel would hang. `behind`: by at most a tile for each block before it."""
    program, source = tmp_path / "backward_turns", nvcc.ROOT / "tests" / "cpp" / "backward_turns.cpp"
    options = ("-x", "c++", "-std=c++17", "-cudart", "none", "-I", nvcc.CSRC)
    subprocess.run([nvcc.compiler()[0], *options, "-o", program, source], check=True, timeout=60)
    counts, *costs = subprocess.check_output(program, text=True, timeout=60).splitlines()
    wrong, visits, behind = map(int, counts.split())
    assert wrong == 0
    assert visits > 10_000
    assert behind == 0
    assert len(costs) == 4
    assert all(1 <= float(cost) < 1.06 for cost in costs)


def half(**sizes):
    return qkv(**{"batch": 1, "len_q": 100, "len_k": 120, "dim": 64, "dtype": F16, **sizes})


def test_only_what_is_asked_for_is_computed():
    rows, products, dq = "attn_bwd_rows_f16", "attn_bwd_sm90_f16_d64", "attn_bwd_dq_sm90_f16_d64"
    assert kernels(*half(), gradients=["q"]) == [rows, products, dq]
    assert kernels(*half(), gradients=["v"]) == [rows, products]
    q, k, v = half()
    out, lse = attn_ext.attention(q, k, v, return_lse=True)
    saved = {"out": out, "lse": lse, "grad_out": torch.ones_like(out)}
    plans = {
        names: attn_ext.launch_plan(
            q, k, v, direction="backward", arch="sm_90", gradients=list(names), **saved
        )
        for names in ("qkv", "q", "k", "v")
    }
    for plan in plans.values():
        cuda_kernels.carry_out(plan, "sm_90")
    for name in "qkv":
        assert list(plans[name].results) == [f"grad_{name}"]
        whole, part = (plans[names].results[f"grad_{name}"] for names in ("qkv", name))
        assert torch.equal(whole, part)


@pytest.mark.parametrize(
    "options",
    [
        {"mask": torch.ones(100, 120, dtype=torch.bool)},
        {"bias": randn(1, 1, 100, 120, dtype=F16)},
        {"alibi_slopes": torch.ones(2, dtype=F16)},
        {"softcap": 3.0},
        {"dropout_p": 0.5},
    ],
    ids=lambda options: ", ".join(options),
)
def test_other_options_take_the_sm80_kernels(options):
    assert "attn_bwd_dq_sm80_f16_d64_full" in kernels(*half(), **options)


def test_sinks_are_inside_the_lse():
    given = kernels(*half(), sinks=torch.ones(2, dtype=F16))
    assert given[1:] == ["attn_bwd_sm90_f16_d64", "attn_bwd_dq_sm90_f16_d64", "attn_bwd_sums_f32"]


def test_what_tma_cannot_address_takes_the_sm80_kernels():
    q, k, v = half()
    assert "attn_bwd_dq_sm80_f16_d64" in kernels(q, k[:, :1].expand(-1, 2, -1, -1), v)  # a stride of 0
    assert "attn_bwd_dq_sm80_f16_d64" in kernels(q, k[:, :, :0], v[:, :, :0])
    assert "attn_bwd_dq_sm80_f16_d64" in kernels(*half(dim_v=0))


def test_sizes_and_types_that_other_kernels_take():
    assert "attn_bwd_dq_sm80_f16_d192" in kernels(*half(dim=129))
    assert "attn_bwd_dq_simt_f16" in kernels(*half(dim=257))
    assert "attn_bwd_dq_simt_f32" in kernels(*half(dtype=torch.float32))


def test_tensor_maps_describe_the_tensors():
    q, k, v = rows_first(*qkv(2, 4, 100, 300, 104, heads_kv=2, dtype=BF16))
    out, lse = attn_ext.attention(q, k, v, return_lse=True)
    _, products, dq = attn_ext.launch_plan(
        q, k, v, direction="backward", arch="sm_90", out=out, lse=lse, grad_out=out
    ).launches
    q_map, k_map, _, grad_map = products.tensor_maps
    assert (q_map.data_ptr, q_map.sizes, q_map.box_rows) == (q.data_ptr(), (104, 100, 4, 2), 80)
    assert (k_map.sizes, k_map.strides, k_map.box_rows) == ((104, 300, 2, 2), (416, 208, 124800), 128)
    assert (grad_map.data_ptr, grad_map.box_rows) == (out.data_ptr(), 80)
    assert {m.params_offset % 64 for m in products.tensor_maps} == {0}
    assert not dq.tensor_maps


def test_other_architectures_and_no_wish_take_the_sm80_kernels(monkeypatch):
    assert "attn_bwd_dq_sm90_f16_d64" in kernels(*half())
    monkeypatch.delenv("ATTN_EXT_KERNELS")
    assert "attn_bwd_dq_sm80_f16_d64" in kernels(*half())
