"""Running CUDA kernels without a GPU: cuda_kernels.py, kernel_lines.py and ptxrun/mutate.py themselves."""

import cuda_kernels
import kernel_lines
import numpy as np
import nvcc
import oracle
import ptxrun
import pytest
import torch
from ptxrun import mutate
from ptxrun.toys import HEAD

import attn_ext

ROTATE = """K k(int *o) {
  __shared__ int s[64];
  int t = threadIdx.x;
  s[t] = t;
  __syncthreads();
  int v = s[(t + 33) % 64];
  __syncthreads();
  o[t] = v; }
"""


@pytest.mark.parametrize("device", cuda_kernels.DEVICES)
def test_a_plan_is_carried_out(device):
    q, k, v = oracle.qkv(batch=1, heads=2, heads_kv=1, len_q=70, len_k=90, dim=64, dtype=torch.float16)
    oracle.check_forward(q, k, v, call=cuda_kernels.attention_on(device), causal=True)


@nvcc.needed
def test_inputs_cut_from_one_tensor_are_one_piece_of_memory():
    packed = oracle.randn(1, 20, 3, 2, 64, dtype=torch.float16)  # (B, N, qkv, H, D)
    q, k, v = (packed[:, :, n].transpose(1, 2) for n in range(3))
    out, _ = cuda_kernels.attention_on("ptxrun")(q, k, v)
    apart, _ = cuda_kernels.attention_on("ptxrun")(q.contiguous(), k.contiguous(), v.contiguous())
    assert torch.equal(out, apart)


@nvcc.needed
def test_what_a_kernel_may_not_touch_is_noticed():
    # Fault: a kernel that reads past what the plan names; here the plan names half of the queries.
    q, k, v = oracle.qkv(batch=1, len_q=40, len_k=40, dim=64, dtype=torch.float16)
    plan = attn_ext.launch_plan(q, k, v)
    cuda_kernels.carry_out(plan)
    assert not plan.results["out"].isnan().any()
    cut = [b if b.name != "q" else type(b)(b.name, b.data_ptr, b.nbytes // 2) for b in plan.buffers]
    short = type(plan)(plan.launches, tuple(cut), plan.results, plan._alive)
    with pytest.raises(ptxrun.AccessError, match="past the end of q"):
        cuda_kernels.carry_out(short)


def test_a_kernel_that_no_file_exports_is_named():
    with pytest.raises(LookupError, match="attn_fwd_by_magic, found none"):
        cuda_kernels.source_of("attn_fwd_by_magic")


UNUSED = ROTATE.replace("  o[t] = v;", "  while (v > 99) v = v * 7 % 1000;\n  o[t] = v;")


@nvcc.needed
def test_lines_that_no_process_reached():
    text = nvcc.ptx_of_text(HEAD + UNUSED, flags=("-lineinfo",))
    lines = ptxrun.Module(text).launch("k", 1, 64, [np.zeros(64, np.int32)]).unexecuted
    assert lines
    origin = kernel_lines.source_lines(text)
    assert {kernel_lines.place(origin, n)[2] for n in lines} == {"while (v > 99) v = v * 7 % 1000;"}


@nvcc.needed
def test_what_stands_behind_a_shut_gate_belongs_to_it():
    # Fault: every line needs a reason of its own, or a gate is taken for part of what stands behind another.
    nested = (
        "  if (v > 99) { if (v % 3) o[1] = t; else o[2] = v; __syncthreads(); }\n  if (t > 99) o[3] = v;\n"
    )
    text = nvcc.ptx_of_text(
        HEAD + ROTATE.replace("  o[t] = v;", nested + "  o[t] = v;"), flags=("-lineinfo",)
    )
    lines = set(ptxrun.Module(text).launch("k", 1, 64, [np.zeros(64, np.int32)]).unexecuted)
    (first, _, many), (second, _, few) = kernel_lines.gates(text, "k", lines)
    assert many + few == len(lines)
    assert few <= len(second) + 1 < many  # a branch may follow a gate's first block
    origin = kernel_lines.source_lines(text)
    assert {kernel_lines.place(origin, n)[2] for n in second} == {"if (t > 99) o[3] = v;"}
    reached = lines - set(first)  # as if a thread had gone there, and no further
    assert len(kernel_lines.gates(text, "k", reached)) == 3


def test_lines_are_merged_over_processes():
    one, other = '[["a", "sm_80", [1, 2, 3]], ["b", "sm_80", [5]]]', '[["a", "sm_80", [2, 3, 4]]]'
    assert kernel_lines.merge([one, other]) == {("a", "sm_80"): {2, 3}, ("b", "sm_80"): {5}}


@nvcc.needed
def test_lines_without_a_reason_are_reported(monkeypatch, tmp_path):
    # Faults: a pattern that explains nothing or all; the same code of two architectures counted twice.
    texts = {arch: nvcc.ptx_of_text(HEAD + UNUSED, arch, ("-lineinfo",)) for arch in ("sm_80", "sm_86")}
    lines = set(ptxrun.Module(texts["sm_80"]).launch("k", 1, 64, [np.zeros(64, np.int32)]).unexecuted)
    monkeypatch.setattr(cuda_kernels, "ptx", lambda kernel, arch: texts[arch])
    monkeypatch.setattr(cuda_kernels, "INSTANTIATIONS", tmp_path)
    merged = {("k", "sm_80"): lines, ("k", "sm_86"): lines | {max(lines) + 1}}

    others = [
        ("k", r"for \(", "another line"),
        ("kk|.", r"while \(v > 9\)", "no line"),
        ("kernel", "v", "no kernel"),
    ]
    monkeypatch.setattr(kernel_lines, "EXPECTED", others)
    text, failures = kernel_lines.report(merged)
    assert text.startswith(f"k (sm_80): {len(lines)} PTX lines")
    assert "k (sm_86)" not in text
    row, *stale = failures
    assert "while (v > 99)" in row
    assert len(stale) == len(others)
    assert all(word in line for word, line in zip(["for", "kk", "kernel"], stale, strict=True))

    monkeypatch.setattr(kernel_lines, "EXPECTED", [("k", r"while \(v > 99\).* \| ", "v is below 64")])
    text, failures = kernel_lines.report(merged)
    assert "v is below 64" in text
    assert failures == []
    assert kernel_lines.report({}) == ("", [])

    (tmp_path / "toy.cu").touch()
    unused = nvcc.ptx_of_text(HEAD + ROTATE.replace("K k(", "K unused("))
    monkeypatch.setattr(nvcc, "ptx_of_file", lambda path, flags: unused)
    assert kernel_lines.report(merged)[1] == ["unused: no test launches it"]


@nvcc.needed
def test_a_needed_barrier_is_told_from_a_redundant_one():
    text = nvcc.ptx_of_text(HEAD + ROTATE)
    (first, _), (second, _) = mutate.synchronisations(text)
    o = np.zeros(64, np.int32)
    with pytest.raises(ptxrun.RaceError):
        ptxrun.Module(mutate.without(text, first)).launch("k", 1, 64, [o])
    ptxrun.Module(mutate.without(text, second)).launch("k", 1, 64, [o])
    assert o.tolist() == [(t + 33) % 64 for t in range(64)]
    assert mutate.synchronisations(text, range(second, second + 1)) == [(second, "bar.sync \t0")]


def test_every_kind_of_synchronisation_is_left_out():
    kinds = [
        "bar.sync 0",
        "@%p1 bar.sync 1, 64",
        "bar.warp.sync -1",
        "barrier.sync.aligned 0",
        "bar.arrive 2, 64",
    ]
    kinds += [
        "cp.async.commit_group",
        "cp.async.wait_group 1",
        "cp.async.wait_all",
        "cp.async.bulk.wait_group.read 0",
    ]
    kinds += [
        "fence.proxy.async.shared::cta",
        "membar.gl",
        "fence.acq_rel.gpu",
        "wgmma.wait_group.sync.aligned 0",
    ]
    others = [
        "cp.async.cg.shared.global [%r1], [%rd1], 16",
        "mov.u32 %r1, %tid.x",
        "$L__BB0_2:",
        "bra $L__BB0_2",
    ]
    text = "\n".join(f"\t{line};" for line in kinds + others)
    assert [instruction for _, instruction in mutate.synchronisations(text)] == kinds
