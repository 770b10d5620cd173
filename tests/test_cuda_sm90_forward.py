"""The forward for Hopper (TMA, wgmma, warp specialisation): in ptxrun, and on a Hopper where there is one.

One or two blocks share the tiles of most problems, so that a block goes from tile to tile; keys make five
tiles, so that the ring of two stages goes round.
"""

import math

import cuda_kernels
import hopper
import nvcc
import pytest
import torch
from hopper import on_each_device, rows_first
from oracle import assert_close, oracle, qkv, randn

import attn_ext

F16, BF16 = torch.float16, torch.bfloat16


@pytest.fixture(autouse=True)
def hopper_kernels(monkeypatch):
    monkeypatch.setenv("ATTN_EXT_KERNELS", "sm90")


def kernel_of(q, k, v, **options):
    """The kernel of a forward on a Hopper of one multiprocessor."""
    (launch,) = attn_ext.launch_plan(q, k, v, arch="sm_90", multiprocessors=1, **options).launches
    return launch.kernel


def check(device, q, k, v, *, multiprocessors=2, **options):
    """Holds out and LSE against the oracle, by the rule of assert_close; launch options as for ptxrun."""
    launch = {n: options.pop(n) for n in ("shuffle", "collectives_order", "batch") if n in options}
    assert "_sm90_" in kernel_of(q, k, v, **options)
    call = cuda_kernels.attention_on(device, "sm_90", multiprocessors, **launch)
    out, lse = call(q, k, v, **options)
    truth, plain = (oracle(q, k, v, **options, dtype=dtype) for dtype in (torch.float64, q.dtype))
    single = oracle(q, k, v, **options, dtype=torch.float32)  # the LSE is float32
    assert_close("out", out, truth[0], plain[0])
    assert_close("lse", lse, truth[1], single[1])
    return out, lse


# D, and keys that make five tiles, the last of them ragged.
SHAPES = {
    "d64": (40, 529),
    "d96": (96, 820),
    "d128": (104, 721),
    "d128_banded": (128, 529),
    "d192": (160, 465),
    "d256": (256, 337),
}


@on_each_device
@pytest.mark.parametrize("dtype", [F16, BF16], ids=["f16", "bf16"])
@pytest.mark.parametrize("name", SHAPES)
def test_every_kernel(name, dtype, device):
    dim, keys = SHAPES[name]
    banded = name.endswith("banded")
    kernel = f"attn_fwd_sm90_{'f16' if dtype == F16 else 'bf16'}_{name}"
    # A row of the output that takes single elements; then one of 16-byte pieces, and all kinds of tiles.
    q, k, v = rows_first(*qkv(1, 2, 213, keys, dim, dim - 3, heads_kv=1, dtype=dtype))
    options = {"causal": True} if banded else {}
    assert kernel_of(q, k, v, **options) == kernel
    check(device, q, k, v, **options)
    options = {"key_lengths": [keys - 43], "query_lengths": [140]}
    if name != "d128":  # which leaves bands to d128_banded
        options |= {"causal": True, "window": (keys // 4, None)}
    q, k, v = rows_first(*qkv(1, 1, 150, keys, dim, dtype=dtype))
    assert kernel_of(q, k, v, **options) == kernel
    check(device, q, k, v, **options)
    options = {"causal": "upper_left"} if name != "d128" else {}
    check(device, q[:, :, :20], k[:, :, :40], v[:, :, :40], **options)  # one tile


OPTIONS = {
    **hopper.OPTIONS,
    "one query more than is decoded": ((17, 1), {}),
    "odd": ((113, 203), {"scale": 0.3}),
    "causal, more queries than keys": ((300, 150), {"causal": True}),
    "upper left": ((200, 399), {"causal": "upper_left"}),
    "a window on both sides": ((300, 630), {"window": (150, 20)}),
    "lengths": ((203, 330), {"key_lengths": [0, 195], "query_lengths": [203, 80]}),
}


@on_each_device
@pytest.mark.parametrize("name", OPTIONS)
def test_options(name, device):
    (queries, keys), options = OPTIONS[name]
    batch = 2 if "key_lengths" in options else 1
    q, k, v = qkv(batch, 3, queries, keys, 64, heads_kv=1, dtype=F16)
    if batch == 2:  # what lies beyond the lengths may be anything
        for n, length in enumerate(options["key_lengths"]):
            k[n, :, length:] = v[n, :, length:] = math.nan
        for n, length in enumerate(options["query_lengths"]):
            q[n, :, length:] = math.inf
    check(device, q, k, v, **options)


@on_each_device
def test_nan_and_infinity_reach_the_rows_that_see_them(device):
    q, k, v = qkv(1, 2, 100, 300, 128, dtype=BF16)
    q[0, 0, 3, 5] = math.nan
    k[0, 1, 250] = math.nan  # hidden from half of the queries
    v[0, 0, 299, 7] = math.inf  # seen by the last query alone
    q[0, 1, 7, 9] = math.inf
    check(device, q, k, v, causal=True)


def test_scores_far_from_zero():
    q, k, v = qkv(1, 1, 70, 300, 64, dtype=BF16)
    check("ptxrun", q * 300, k, v)
    check("ptxrun", q, k, v, scale=1e-30)


@pytest.mark.parametrize("launch", [{"shuffle": 1}, {"batch": False}], ids=str)
def test_blocks_and_warps_in_another_order(launch):
    q, k, v = qkv(2, 2, 250, 280, 64, dtype=F16)
    check("ptxrun", q, k, v, causal=True, multiprocessors=3, **launch)


def test_the_output_may_have_any_strides():
    """Rows of 41 halves cannot be written 16 bytes at a time."""
    out, _ = check("ptxrun", *rows_first(*qkv(1, 2, 70, 140, 64, 41, dtype=F16)))
    assert out.shape == (1, 2, 70, 41)


def test_the_two_parts_add_up_to_the_lse():
    q, k, v = qkv(1, 1, 130, 50, 64, dtype=F16)
    plan = attn_ext.launch_plan(q, k, v, arch="sm_90", multiprocessors=1, causal=True)
    cuda_kernels.carry_out(plan, "sm_90")
    parts, lse = plan.results["lse_parts"], plan.results["lse"]
    assert torch.equal(parts.sum(-1), lse)
    assert parts[lse.isfinite()].isfinite().all()
    assert (parts[0, 0, :80] == torch.tensor([-math.inf, 0.0])).all()  # rows that see no key


def half(**sizes):
    return qkv(**{"batch": 1, "len_q": 100, "len_k": 120, "dim": 64, "dtype": F16, **sizes})


@pytest.mark.parametrize(
    "options",
    [
        {"mask": torch.ones(100, 120, dtype=torch.bool)},
        {"bias": randn(1, 1, 100, 120, dtype=F16)},
        {"alibi_slopes": torch.ones(2, dtype=F16)},
        {"sinks": torch.ones(2, dtype=F16)},
        {"softcap": 3.0},
        {"dropout_p": 0.5},
    ],
    ids=lambda options: ", ".join(options),
)
def test_other_options_take_the_sm80_kernel(options):
    assert kernel_of(*half(), **options) == "attn_fwd_sm80_f16_d64_full"


@pytest.mark.parametrize("scale", [0.0, -1.0, 1e-60])
def test_scales_that_are_not_positive_floats_take_the_sm80_kernel(scale):
    assert kernel_of(*half(), scale=scale) == "attn_fwd_sm80_f16_d64"


def test_what_tma_cannot_address_takes_the_sm80_kernel():
    q, k, v = half()
    assert kernel_of(q, k[:, :1].expand(-1, 2, -1, -1), v) == "attn_fwd_sm80_f16_d64"  # a stride of 0
    assert kernel_of(q, k[:, :, :0], v[:, :, :0]) == "attn_fwd_sm80_f16_d64"
    assert kernel_of(*half(dim_v=0)) == "attn_fwd_sm80_f16_d64"


def test_sizes_and_types_that_other_kernels_take():
    assert kernel_of(*half(dim=257)) == "attn_fwd_simt_f16"
    assert kernel_of(*half(dtype=torch.float32)) == "attn_fwd_simt_f32"
    assert kernel_of(*half(len_q=1)) == "attn_decode_sm80_f16_d64"


def test_tensor_maps_describe_the_tensors():
    q, k, v = rows_first(*qkv(2, 4, 100, 300, 104, heads_kv=2, dtype=BF16))
    (launch,) = attn_ext.launch_plan(q, k, v, arch="sm_90").launches
    q_map, k_map, _ = launch.tensor_maps
    assert (q_map.data_ptr, q_map.sizes, q_map.box_rows) == (q.data_ptr(), (104, 100, 4, 2), 128)
    assert (k_map.sizes, k_map.strides, k_map.dtype) == ((104, 300, 2, 2), (416, 208, 124800), "bf16")
    assert {m.params_offset % 64 for m in launch.tensor_maps} == {0}


@nvcc.needed
def test_every_tile_is_taken_once_and_causal_work_is_shared_out_evenly(tmp_path):
    lines = nvcc.output_of("block_tiles", tmp_path).splitlines()
    for line in lines:
        once, busiest = line.split()
        assert once == "1"
        assert float(busiest) < 1.04
    assert len(lines) == 4


# What is in the names of the forward's and the backward's kernels, or in the error, for the problems of
# tests/cpp/hopper_plans.cpp.
PLANS = {
    "nothing special": ("_sm90_", "_sm90_"),
    "the last tile that is counted": ("_sm90_", "CUDA launches up to 2147483647"),
    "a tile more": ("_sm80_", "CUDA launches up to 2147483647"),
    "more than a grid": ("_sm80_f16_d64 would need 2147483648 blocks", "CUDA launches up to 2147483647"),
    "q at 8 bytes": ("_sm80_", "_sm80_"),
    "dO at 8 bytes": ("_sm90_", "_sm80_"),
    "rows of k 8 bytes on": ("_sm80_", "_sm80_"),
    "heads of v 0 bytes on": ("_sm80_", "_sm80_"),
    "batches of q 2^40 bytes on": ("_sm80_", "_sm80_"),
    "batches of q 16 bytes less on": ("_sm90_", "_sm90_"),
    "heads of k, which is one, anywhere": ("_sm90_", "_sm90_"),
    "no keys": ("_sm80_", "_sm80_"),
}


@nvcc.needed
def test_what_32_bits_cannot_count_and_tma_cannot_address_takes_the_sm80_kernels(tmp_path):
    lines = nvcc.output_of("hopper_plans", tmp_path, "cuda/launch_plan.cpp").splitlines()
    plans = {name: plan for name, *plan in (line.split("|") for line in lines)}
    assert list(plans) == list(PLANS)
    for name, wanted in PLANS.items():
        for plan, word in zip(plans[name], wanted, strict=True):
            assert word in plan, name
            assert word == "_sm90_" or "_sm90_" not in plan, name


def test_one_block_a_multiprocessor_and_none_without_a_tile():
    q, k, v = half(len_q=400)  # three tiles a head
    grids = {
        n: attn_ext.launch_plan(q, k, v, arch="sm_90", multiprocessors=n).launches[0].grid for n in (4, 132)
    }
    assert grids == {4: (4, 1, 1), 132: (6, 1, 1)}


def test_the_environment_chooses(monkeypatch):
    q, k, v = half()
    assert attn_ext.launch_plan(q, k, v, arch="sm_80").launches[0].kernel == "attn_fwd_sm80_f16_d64"
    for value in ("", "sm80"):
        monkeypatch.setenv("ATTN_EXT_KERNELS", value)
        assert kernel_of(q, k, v) == "attn_fwd_sm80_f16_d64"
    monkeypatch.delenv("ATTN_EXT_KERNELS")
    assert kernel_of(q, k, v) == "attn_fwd_sm80_f16_d64"


def test_an_unknown_wish_is_an_error_in_every_direction(monkeypatch):
    q, k, v = half(len_q=120)
    saved = {"out": q, "lse": torch.zeros(1, 2, 120)}
    monkeypatch.setenv("ATTN_EXT_KERNELS", "hopper")
    for direction in ({}, {"direction": "backward", "grad_out": q, **saved}, {"direction": "jvp", **saved}):
        with pytest.raises(RuntimeError, match="ATTN_EXT_KERNELS is 'hopper', must be sm80, sm90 or not set"):
            attn_ext.launch_plan(q, k, v, arch="sm_90", **direction)


def test_forward_mode_takes_the_sm80_kernel():
    q, k, v = half(len_q=120)
    plan = attn_ext.launch_plan(
        q, k, v, direction="jvp", arch="sm_90", out=q, lse=torch.zeros(1, 2, 120), tangents={"q": q}
    )
    assert [launch.kernel for launch in plan.launches] == ["attn_jvp_sm80_f16_d64"]
