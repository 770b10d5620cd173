"""attn_ext.launch_plan: which kernels a GPU would run, for which memory, told without a GPU."""

import itertools

import pytest
import torch
from oracle import qkv, randn

import attn_ext
from attn_ext import _info


def kernels(*args, **options):
    return [launch.kernel for launch in attn_ext.launch_plan(*args, **options).launches]


def half(**sizes):
    return qkv(batch=1, len_q=100, len_k=120, dtype=torch.float16, **sizes)


@pytest.mark.parametrize(
    ("dim", "dim_v", "bucket"),
    [(1, 1, 32), (32, 7, 32), (33, 1, 64), (59, 96, 96), (128, 128, 128), (129, 8, 192), (8, 256, 256)],
)
def test_head_dims_run_in_the_next_bucket(dim, dim_v, bucket):
    assert kernels(*half(dim=dim, dim_v=dim_v)) == [f"attn_fwd_sm80_f16_d{bucket}"]


def test_head_dims_above_256_run_in_the_kernel_that_tiles_them():
    assert kernels(*half(dim=257)) == ["attn_fwd_simt_f16"]


@pytest.mark.parametrize(("dtype", "name"), [(torch.float32, "f32"), (torch.float64, "f64")])
def test_wide_types_run_on_cuda_cores(dtype, name):
    assert kernels(*qkv(dtype=dtype)) == [f"attn_fwd_simt_{name}"]


@pytest.mark.parametrize(
    "options",
    [
        {"mask": torch.ones(100, 120, dtype=torch.bool)},
        {"mask": randn(100, 120, dtype=torch.float16)},
        {"bias": randn(1, 1, 100, 120, dtype=torch.float16)},
        {"alibi_slopes": torch.ones(2, dtype=torch.float16)},
        {"sinks": torch.ones(2, dtype=torch.float16)},
        {"softcap": 3.0},
        {"dropout_p": 0.5},
    ],
    ids=lambda options: ", ".join(options),
)
def test_options_beyond_lengths_and_windows_take_the_full_kernel(options):
    assert kernels(*half(dim=64), **options) == ["attn_fwd_sm80_f16_d64_full"]


@pytest.mark.parametrize(
    "options", [{"causal": True}, {"window": (3, 0)}, {"key_lengths": [7]}, {"scale": 2.0}]
)
def test_lean_options_take_the_lean_kernel(options):
    assert kernels(*half(dim=64), **options) == ["attn_fwd_sm80_f16_d64"]


def test_few_queries_split_the_keys_and_join_them():
    q, k, v = qkv(batch=1, heads=8, heads_kv=2, len_q=1, len_k=4000, dim=128, dtype=torch.bfloat16)
    decode, combine = attn_ext.launch_plan(q, k, v).launches
    assert decode.kernel == "attn_decode_sm80_bf16_d128"
    assert decode.grid[0] > 2  # more blocks than KV heads
    assert combine.kernel == "attn_decode_combine_bf16"
    assert combine.grid == (8, 1, 1)  # a block a row


def test_splits_depend_on_the_gpu_and_not_on_its_state():
    q, k, v = qkv(batch=1, heads=8, len_q=1, len_k=4000, dim=128, dtype=torch.bfloat16)
    plans = [attn_ext.launch_plan(q, k, v, arch=arch) for arch in ("sm_80", "sm_80", "sm_89")]
    grids = [plan.launches[0].grid for plan in plans]
    assert grids[0] == grids[1] != grids[2]


def test_buffers_cover_inputs_and_results_exactly():
    q, k, v = half(dim=64)
    plan = attn_ext.launch_plan(q, k, v, key_lengths=[7])
    sizes = {buffer.name: buffer.nbytes for buffer in plan.buffers}
    assert sizes["q"] == q.numel() * 2
    assert sizes["k"] == k.numel() * 2
    assert sizes["key_lengths"] == 8
    places = {buffer.name: buffer.data_ptr for buffer in plan.buffers}
    assert places["q"] == q.data_ptr()
    assert places["out"] == plan.results["out"].data_ptr()
    assert plan.results["lse_parts"].shape == (1, 2, 100, 2)


def test_a_strided_view_is_read_where_it_lies():
    packed = randn(1, 100, 3, 2, 64, dtype=torch.float16)  # (B, N, qkv, H, D)
    q, k, v = (packed[:, :, n].transpose(1, 2) for n in range(3))
    places = {buffer.name: buffer.data_ptr for buffer in attn_ext.launch_plan(q, k, v).buffers}
    assert (places["q"], places["k"], places["v"]) == (q.data_ptr(), k.data_ptr(), v.data_ptr())


@pytest.mark.parametrize("what", ["offset", "row pitch"])
def test_rows_that_cannot_be_read_in_16_byte_pieces_are_copied_once(what):
    _, k, v = half(dim=64)
    if what == "offset":
        q = randn(1 * 2 * 100 * 64 + 1, dtype=torch.float16)[1:].view(1, 2, 100, 64)
    else:
        q = randn(1, 2, 100, 65, dtype=torch.float16)[..., :64]
    places = {buffer.name: buffer.data_ptr for buffer in attn_ext.launch_plan(q, k, v).buffers}
    assert places["q"] != q.data_ptr()
    assert places["q"] % 16 == 0
    assert places["k"] == k.data_ptr()


def forward_mode(q, k, v, tangents=(), **options):
    """The jvp plan of a call whose forward returned zeros."""
    out = torch.zeros(*q.shape[:3], v.shape[3], dtype=q.dtype)
    sums = torch.float64 if q.dtype == torch.float64 else torch.float32
    lse = torch.zeros(q.shape[:3], dtype=sums)
    return attn_ext.launch_plan(
        q, k, v, direction="jvp", out=out, lse=lse, tangents=dict(tangents), **options
    )


@pytest.mark.parametrize(
    ("dtype", "dim", "options", "kernel"),
    [
        (torch.float16, 100, {"causal": True}, "attn_jvp_sm80_f16_d128"),
        (torch.bfloat16, 320, {}, "attn_jvp_simt_bf16"),
        (torch.float32, 64, {"allow_tf32": False}, "attn_jvp_simt_f32"),
        (torch.float32, 64, {"allow_tf32": True}, "attn_jvp_tf32_sm80"),
        (torch.float64, 64, {}, "attn_jvp_simt_f64"),
    ],
)
def test_forward_mode_is_one_kernel(dtype, dim, options, kernel):
    q, k, v = qkv(batch=1, len_q=100, len_k=120, dim=dim, dtype=dtype)
    plan = forward_mode(q, k, v, {"q": q, "v": v}, **options)
    assert [launch.kernel for launch in plan.launches] == [kernel]
    assert plan.results["tangent_out"].shape == q.shape
    assert plan.results["tangent_lse"].shape == (1, 2, 100)


def test_forward_mode_reads_the_tangents_that_it_is_given():
    q, k, v = half(dim=64)
    mask, sinks = (torch.zeros(*size, dtype=torch.float16) for size in ((100, 120), (2,)))
    plan = forward_mode(q, k, v, {"k": k, "mask": mask, "sinks": sinks}, mask=mask, sinks=sinks)
    names = {buffer.name for buffer in plan.buffers}
    assert {n for n in names if n.startswith("tangent")} == {
        "tangent_k", "tangent_float_mask", "tangent_sinks", "tangent_out", "tangent_lse"
    }  # fmt: skip


def test_forward_mode_copies_tangents_that_cannot_be_read_in_16_byte_pieces():
    q, k, v = half(dim=64)
    odd = randn(1, 2, 120, 65, dtype=torch.float16)[..., :64]
    places = {buffer.name: buffer.data_ptr for buffer in forward_mode(q, k, v, {"k": odd, "v": v}).buffers}
    assert places["tangent_k"] != odd.data_ptr()
    assert places["tangent_v"] == v.data_ptr()


def test_no_query_launches_nothing():
    assert kernels(*qkv(len_q=0)) == []
    assert forward_mode(*qkv(len_q=0)).launches == ()
    assert str(attn_ext.launch_plan(*qkv(len_q=0))) == "nothing to launch"


def test_more_heads_than_a_grid_axis_holds():
    # Faults: a grid's second and third axis end at 65535, in the backward or when decoding as well
    for dtype, len_q in ((torch.float16, 17), (torch.float16, 1), (torch.float32, 1)):
        q = torch.zeros(1, 70_000, len_q, 8, dtype=dtype)
        forward = attn_ext.launch_plan(q, q, q)
        given = {"out": forward.results["out"], "lse": forward.results["lse_parts"], "grad_out": q}
        backward = attn_ext.launch_plan(q, q, q, direction="backward", **given)
        assert forward.launches[0].grid[0] >= 70_000
        assert all(launch.grid[1:] == (1, 1) for launch in (*forward.launches, *backward.launches))


def test_bad_arguments_name_what_is_allowed():
    q, k, v = half(dim=64)
    with pytest.raises(ValueError, match=r"arch must be one of sm_80, .*got 'sm_75'"):
        attn_ext.launch_plan(q, k, v, arch="sm_75")
    with pytest.raises(ValueError, match=r"direction must be 'forward', 'backward' or 'jvp', got 'sideways'"):
        attn_ext.launch_plan(q, k, v, direction="sideways")
    with pytest.raises(TypeError, match=r"grad_out is needed for direction='backward', got None"):
        attn_ext.launch_plan(q, k, v, direction="backward", out=q, lse=torch.zeros(1, 2, 100))
    with pytest.raises(TypeError, match=r"lse is needed for direction='jvp', got None"):
        attn_ext.launch_plan(q, k, v, direction="jvp", out=q)
    for tangents in ({"x": q}, {"sinks": q}):
        with pytest.raises(ValueError, match=r"tangents may name q, k, v in this call, got '(x|sinks)'"):
            forward_mode(q, k, v, tangents)
    with pytest.raises(ValueError, match=r"the tangent of k must have its shape .*120, 64\), got .*100, 64"):
        forward_mode(q, k, v, {"k": q})
    given = {"out": q, "lse": torch.zeros(1, 2, 100), "grad_out": q}
    with pytest.raises(ValueError, match=r"gradients may name q, k, v in this call, got 'bias'"):
        attn_ext.launch_plan(q, k, v, direction="backward", gradients=["q", "bias"], **given)
    with pytest.raises(ValueError, match="softcap"):
        attn_ext.launch_plan(q, k, v, softcap=-1.0)


def every_plan():
    """Plans that between them use each kernel, for the kinds of GPU that differ."""
    sizes = {100: 2, 1: 108}  # multiprocessors: few, so that 100 queries are not decoded; many, for splits
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        for dim in (32, 64, 96, 128, 192, 256, 320):
            for len_q, options in itertools.product((100, 1), ({}, {"softcap": 3.0, "bias": "one head"})):
                q, k, v = qkv(batch=1, len_q=len_q, len_k=3000, dim=dim, dtype=dtype)
                terms = dict(options)
                if "bias" in terms:
                    terms["bias"] = torch.zeros(1, 1, len_q, 3000, dtype=dtype)
                    terms["alibi_slopes"] = torch.zeros(2, dtype=dtype)
                targets = [{"arch": arch, "allow_tf32": False} for arch in ("sm_80", "sm_89")]
                if dtype == torch.float32:
                    targets.append({"arch": "sm_80", "allow_tf32": True})
                for target in targets:
                    terms |= target
                    plan = attn_ext.launch_plan(q, k, v, multiprocessors=sizes[len_q], **terms)
                    yield plan
                    given = {"out": plan.results["out"], "lse": plan.results["lse_parts"], "grad_out": q}
                    yield attn_ext.launch_plan(q, k, v, direction="backward", **given, **terms)
                    del given["grad_out"]
                    yield attn_ext.launch_plan(q, k, v, direction="jvp", **given, **terms)


def every_hopper_plan():
    for dtype in (torch.float16, torch.bfloat16):
        for dim, causal in itertools.product((64, 96, 128, 192, 256), (False, True)):
            q, k, v = qkv(batch=1, len_q=100, len_k=300, dim=dim, dtype=dtype)
            plan = attn_ext.launch_plan(q, k, v, arch="sm_90", multiprocessors=1, causal=causal)
            yield plan
            given = {"out": plan.results["out"], "lse": plan.results["lse_parts"], "grad_out": q}
            yield attn_ext.launch_plan(q, k, v, direction="backward", arch="sm_90", **given)


def test_every_kernel_that_is_planned_was_built_and_the_other_way_round(monkeypatch):
    module, problem = _info.load_cuda()
    if module is None:
        pytest.skip(f"CUDA kernels: {problem}")
    built, plans = set(module.kernels()), every_plan()
    if any("_sm90_" in name for name in built):  # with 9.0a among the architectures
        monkeypatch.setenv("ATTN_EXT_KERNELS", "sm90")
        plans = itertools.chain(plans, every_hopper_plan())
    assert {launch.kernel for plan in plans for launch in plan.launches} == built
