"""benchmarks/sass on hand-made instructions and figures: control flow, costs, predictions, gates."""

import dataclasses
import itertools
import json

import pytest

pytest.importorskip("cuxray", reason="benchmarks/sass reads machine code with cuxray (pip install '.[dev]')")

import sass_report
from sass import build, gates, tables
from sass.conflicts import addresses_alone, shared_accesses
from sass.costs import replay, tally
from sass.disassembly import Function, Instruction, parse
from sass.gpus import A100, GPUS
from sass.kernel import Kernel, MainLoop, Resources, read_kernel
from sass.loops import body, control_flow, find_loops, trip
from sass.roofline import OVERLAP, Problem, predict, total


def code(*lines):
    """A Function of lines "label:" and "stall opcode operands"."""
    function = Function("test")
    for line in lines:
        if line.endswith(":"):
            function.labels[line[:-1]] = len(function.instructions)
            continue
        stall, *words = line.split()
        predicate = words.pop(0) if words[0].startswith("@") else ""
        address, operands = 16 * len(function.instructions), " ".join(words[1:])
        function.instructions.append(
            Instruction(address, predicate, words[0], operands, int(stall), 0, 7, 7, "")
        )
    return function


def test_blocks_loops_and_trips():
    function = code(
        "1 MOV R0, RZ",
        ".L_outer:",
        "2 MOV R1, RZ",
        ".L_inner:",
        "3 @P0 BRA `(.L_cheap)",
        "40 FFMA R2, R2, R2, R2",
        "1 BRA `(.L_join)",
        ".L_cheap:",
        "5 FFMA R2, R2, R2, R2",
        ".L_join:",
        "6 @P1 BRA `(.L_inner)",
        "7 @P2 BRA `(.L_outer)",
        "1 EXIT",
    )
    graph = control_flow(function)
    assert len(graph.instructions) == 8
    loops = {loop.label: loop for loop in find_loops(graph, function.labels)}
    assert set(loops) == {".L_outer", ".L_inner"}
    inner, outer = loops[".L_inner"], loops[".L_outer"]
    assert inner.blocks < outer.blocks
    assert tally(body(graph, inner)).stall_cycles == 3 + 40 + 1 + 5 + 6
    work = lambda i: float(i.name == "FFMA")  # noqa: E731
    for dearest, stalls in ((True, [3, 40, 1, 6]), (False, [3, 5, 6])):
        assert [i.stall for i in trip(graph, inner, [], work, dearest=dearest)] == stalls
        through = trip(graph, outer, [inner], work, dearest=dearest)
        assert [i.stall for i in through] == [2, *stalls, 7]


def test_a_call_to_a_subroutine_returns_and_one_to_a_label_jumps():
    function = code(
        "1 CALL.REL.NOINC `($division)",
        "1 CALL.REL.NOINC `(.L_x_1)",
        "1 NOP",
        ".L_x_1:",
        "1 EXIT",
    )
    assert control_flow(function).successors == [[2], [2], []]


def test_costs_count_what_each_unit_does():
    instructions = code(
        "8 HMMA.16816.F32 R0, R4, R8, R0",
        "8 HMMA.1688.F32.TF32 R0, R4, R8, R0",
        "4 MUFU.EX2 R1, R1",
        "2 FFMA R2, R2, R3, R4",
        "2 LDSM.16.M88.4 R4, [R20]",
        "1 @!PT LDS RZ, [RZ]",
        "1 LDL.64 R2, [R1]",
    ).instructions
    costs = tally(instructions)
    assert (costs.instructions, costs.stall_cycles, costs.local_bytes) == (7, 26, 8)
    assert costs.tensor == 2  # TF32 m16n8k8: half the products of f16 m16n8k16, at half the rate
    assert costs.pipes(A100) == {
        "tensor": 16, "issue": 7, "fma": 2, "double": 0, "alu": 0, "mufu": 8, "shared": 4 * 4
    }  # fmt: skip
    assert costs.pipes(GPUS["RTX 4090"])["tensor"] == 64


def test_replay_waits_for_results_that_nothing_hides():
    load = Instruction(0, "", "LDSM.16.M88.4", "R4, [R20]", 2, 0, 0, 7, "")  # releases scoreboard 0
    use = Instruction(16, "", "HMMA.16816.F32", "R0, R4, R8, R0", 8, 1, 7, 7, "")  # waits for it
    filler = Instruction(32, "", "FFMA", "R2, R2, R2, R2", 50, 0, 7, 7, "")
    assert replay([load, use], A100) == 33 + 8
    assert replay([load, filler, use], A100) == 2 + 50 + 8
    tensor = dataclasses.replace(use, waits=0)
    assert replay([tensor] * 4, A100) == 4 * 8
    assert replay([tensor] * 4, GPUS["RTX 4090"]) == 4 * 32  # stalls of 8 do not make its tensor core faster
    commit = Instruction(0, "", "LDGDEPBAR", "", 10, 0, 7, 7, "")
    wait_all, wait_but_one = (
        Instruction(16, "", "DEPBAR.LE", f"SB0, {n:#x}", 10, 0, 7, 7, "") for n in (0, 1)
    )
    assert replay([commit, wait_all], A100) == 500 + 10
    assert replay([commit, *[filler] * 10, wait_but_one], A100) == 10 + 500 + 10  # it came a trip ago


def test_products_of_a_warpgroup_run_beside_its_warps():
    product = Instruction(0, "", "HGMMA.64x128x16.F32", "R24, R8, gdesc[UR4], R24", 10, 0, 7, 7, "")
    last = dataclasses.replace(product, operands="R24, R8, gdesc[UR4], R24, gsb0")
    wait, filler = (Instruction(0, "", *what, 7, 7, "") for what in (
        ("WARPGROUP.DEPBAR.LE", "gsb0, 0x0", 10, 0), ("FFMA", "R2, R2, R2, R2", 100, 0)
    ))  # fmt: skip
    h100 = GPUS["H100"]
    costs = tally([product, last])
    assert costs.tensor == 2 * 128 / 8  # a quarter of 64 x 128 x 16, in units of 16 x 8 x 16
    assert costs.shared_wavefronts == 2 * 128 * 16 * 2 / 128 / 4  # B alone, once for four warps
    from_shared = dataclasses.replace(product, operands="R24, gdesc[UR4], R24")
    assert tally([from_shared]).shared_wavefronts == (128 + 64) * 16 * 2 / 128 / 4
    # 64 cycles each; the wait comes 20 cycles after the first starts, or after the filler.
    assert replay([product, last, wait], h100) == 2 * 64 + 30 + 10
    assert replay([product, last, filler, wait], h100) == 2 * 64 + 30 + 10
    assert replay([product, last, filler, filler, wait], h100) == 20 + 200 + 10


LANE_ADDRESS = ("1 S2R R0, SR_TID.X", "1 IMAD.SHL.U32 R1, R0, 0x10, RZ")
GUARDED = "1 @P0 IMAD.SHL.U32 R1, R0, 0x80, RZ"


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        (["1 LDS.128 R4, [R1]"], "proven"),
        ([GUARDED.replace("@P0 ", ""), "1 LDS.128 R4, [R1]"], "8-way"),  # rows of 128 bytes
        # What a predicate guards holds under the same predicate, as long as that does not change.
        ([GUARDED, "1 @P0 LDS.128 R4, [R1]"], "8-way"),
        ([GUARDED, "1 @P0 IADD3 R1, R1, 0x100, RZ", "1 @P0 LDS.128 R4, [R1]"], "8-way"),
        ([GUARDED, "1 LDS.128 R4, [R1]"], "unknown"),
        ([GUARDED, "1 @!P0 LDS.128 R4, [R1]"], "unknown"),
        ([GUARDED, "1 ISETP.NE.AND P0, PT, R2, RZ, PT", "1 @P0 LDS.128 R4, [R1]"], "unknown"),
        # Whichever way is taken to a place, and only what can be.
        (["1 @P0 BRA `(.L_x)", "1 IMAD.SHL.U32 R1, R0, 0x80, RZ", ".L_x:", "1 LDS.128 R4, [R1]"], "unknown"),
        (["1 @P0 BRA `(.L_x)", "1 IADD3 R1, R1, 0x100, RZ", ".L_x:", "1 LDS.128 R4, [R1]"], "proven"),
        (["1 BRA `(.L_x)", "1 IMAD.SHL.U32 R1, R0, 0x80, RZ", ".L_x:", "1 LDS.128 R4, [R1]"], "proven"),
        (["1 HFMA2.MMA R2, -RZ, RZ, 0, 5.960464477539063e-08", "1 LDS.128 R4, [R1+R2.X16]"], "proven"),
        (["1 LOP3.LUT P0, R2, R1, 0x1f0, RZ, 0xc0, !PT", "1 LDS.128 R4, [R2]"], "proven"),
        ([GUARDED, "1 LOP3.LUT P0, R2, R0, 0x1, RZ, 0xc0, !PT", "1 @P0 LDS.128 R4, [R1]"], "unknown"),
        (["1 CS2R R2, SRZ", "1 IADD3 R1, R1, R3, RZ", "1 LDS.128 R4, [R1]"], "proven"),
        # A subroutine leaves anything in the registers that it writes.
        (
            ["1 CALL.REL.NOINC `($f)", "1 LDS.128 R4, [R1]", "1 EXIT", "$f:", "1 MOV R2, R0", "1 RET R6"],
            "proven",
        ),
        (
            ["1 CALL.REL.NOINC `($f)", "1 LDS.128 R4, [R1]", "1 EXIT", "$f:", "1 MOV R1, R0", "1 RET R6"],
            "unknown",
        ),
    ],
)
def test_addresses_are_followed_through_the_code(lines, found):
    function = code(*LANE_ADDRESS, *lines, "1 EXIT")
    addresses = {i.address for i in function.instructions if i.name == "LDS"}
    conflicts, unknown = shared_accesses(function, control_flow(function), 32, addresses)
    assert (len(conflicts), len(unknown)) == (int("way" in found), int(found == "unknown"))
    assert all(found in text for text in conflicts)


DISASSEMBLY = """
	.section	.nv.info.kernel,"",@"SHT_CUDA_INFO"
	//----- nvinfo : EIATTR_MAX_THREADS
        /*00dc*/ 	.byte	0x04, 0x05
        /*00e0*/ 	.word	0x00000040
        /*00e4*/ 	.word	0x00000002
        /*00e8*/ 	.word	0x00000001
	//----- nvinfo : EIATTR_CRS_STACK_SIZE
        /*00f0*/ 	.word	0x00000000
	.section	.text.kernel,"ax",@progbits
	.sectioninfo	@"SHI_REGISTERS=229"
	.align	128
.text.kernel:
	//## File "/src/tile/fragment.cuh", line 60
        /*0000*/              @!P0 LDSM.16.M88.4 R4, [R20+0x400] ;     /* 0x000400001404783b */
                                                                       /* 0x000e2a0000000200 */
.L_x_1:
        /*0010*/                   EXIT ;                              /* 0x000000000000794d */
                                                                       /* 0x001fea0003800000 */
"""


def test_parse_reads_scheduling_fields_lines_labels_and_launch_bounds():
    function = parse(DISASSEMBLY)["kernel"]
    assert (function.threads, function.labels) == (128, {".L_x_1": 1})
    load, end = function.instructions
    assert (load.predicate, load.name, load.operands) == ("@!P0", "LDSM", "R4, [R20+0x400]")
    assert (load.stall, load.result_board, load.operand_board, load.waits) == (5, 0, 7, 0)
    assert (load.source, end.waits, end.stall) == ("fragment.cuh:60", 1, 5)


def test_only_what_addresses_in_shared_memory_depend_on_is_followed():
    """Round the loop too, through a predicated write, and as the second register of a pair."""
    out, stays = 0, 1  # as addresses, which do not matter here
    blocks = {
        0: [
            (out, "MOV", "R0, R30", ""),  # overwritten before it is read
            (stays, "S2R", "R0, SR_TID.X", ""),
            (stays, "IMAD.WIDE", "R1, R3, R4, R5", ""),  # R2
            (stays, "MOV", "R6, R20", ""),
            (out, "MOV", "R8, RZ", ""),
        ],
        1: [
            (stays, "LDS", "R9, [R0+UR4]", ""),
            (out, "FFMA", "R8, R9, R9, R8", ""),
            (stays, "MOV", "R6, R7", "@P0"),
            (stays, "IADD3", "R0, R6, R2, RZ", ""),
        ],
        2: [(stays, "STS.64", "[R0], R8", ""), (out, "MOV", "R0, R8", ""), (out, "STG", "[R0], R8", "")],
    }
    kept = addresses_alone(blocks, [[1], [1, 2], []])
    assert kept == {block: [line for line in lines if line[0] == stays] for block, lines in blocks.items()}


def test_a_cubin_is_built_anew_when_an_included_file_changes(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "compiler_version", lambda: "one")
    (tmp_path / "tile").mkdir()
    source, header, inner = tmp_path / "k.cu", tmp_path / "tile" / "a.cuh", tmp_path / "tile" / "b.cuh"
    source.write_text('#include "tile/a.cuh"\n#include <cstdint>\n')
    header.write_text('  #include "b.cuh"\n')
    inner.write_text("// 1\n")
    keys = [build.content_key(source, "sm_80", tmp_path)]
    inner.write_text("// 2\n")
    keys.append(build.content_key(source, "sm_80", tmp_path))
    keys.append(build.content_key(source, "sm_90", tmp_path))
    monkeypatch.setattr(build, "compiler_version", lambda: "two")
    keys.append(build.content_key(source, "sm_90", tmp_path))
    assert len(set(keys)) == 4


def kernel(name, *, cycles, latency=None, hmma=128, gpu=A100, stack=0, conflicts=(), unknown=(), shared=0):
    """A Kernel of 4 warps whose main loop takes so many cycles for each HMMA."""
    counts = {"HMMA": hmma, "MUFU": 64, "LDSM": 32}
    costs = dataclasses.replace(
        tally(code("1 EXIT").instructions),
        instructions=444, counts=counts, tensor=float(hmma), stall_cycles=round(cycles * hmma),
        shared_wavefronts=128,
    )  # fmt: skip
    latency_cycles = (latency or cycles) * hmma
    loop = MainLoop(
        ".L", costs, float(hmma), costs.stall_cycles, latency_cycles, latency_cycles, conflicts, unknown, 40
    )
    return Kernel(name, gpu, Resources(200, stack, 0, 128, shared), 0, 0, loop, ())


@pytest.mark.parametrize(
    ("between", "main"), [("9 BAR.SYNC", ".L_outer"), ("9 @P1 BRA `(.L_inner)", ".L_inner")]
)
def test_the_main_loop_holds_no_other_loop_with_products(between, main):
    """Products and exponentials in one loop; or, where a product is a loop of its own, that one."""
    function = code(
        ".L_outer:",
        "1 MUFU.EX2 R1, R1",
        ".L_inner:",
        "8 HMMA.16816.F32 R4, R8, R12, R4",
        between,
        "7 @P2 BRA `(.L_outer)",
        "1 EXIT",
    )
    found = read_kernel(function, Resources(100, 0, 0, 128, 0), A100)
    assert found.main_loop.label == main
    assert found.main_loop.latency_cycles is not None


def test_peaks_follow_from_the_datasheets():
    for gpu, tflops in (("A100", 312.0), ("H100", 989.4), ("RTX 4090", 165.2)):
        assert GPUS[gpu].peak_tflops == pytest.approx(tflops, rel=1e-3)
    assert A100.tensor_cycles == 8


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (3, 7), (7, 3), (5, 5)])
def test_causal_pairs_are_those_of_the_mask(queries, keys):
    visible = sum(j <= i + keys - queries for i, j in itertools.product(range(queries), range(keys)))
    problem = Problem(2, 6, 3, queries, keys, 64, causal=True)
    assert problem.pairs == 2 * 6 * visible
    assert problem.flops == 4 * 64 * problem.pairs
    assert dataclasses.replace(problem, direction="backward").flops == 10 * 64 * problem.pairs


def test_bytes_count_every_tensor_once_and_grouped_heads_once():
    p = Problem(2, 8, 2, 100, 300, 64)
    q, kv, rows = 2 * 8 * 100 * 64 * 2, 2 * 2 * 300 * 64 * 2, 2 * 8 * 100 * 4
    assert p.dram_bytes("attn_fwd_sm80_f16_d64") == 2 * q + 2 * kv + rows
    assert p.dram_bytes("attn_bwd_dkdv_sm80_f16_d64") == 2 * q + 4 * kv + 2 * rows
    assert p.dram_bytes("attn_bwd_dq_sm80_f16_d64") == 3 * q + 2 * kv + 2 * rows


def test_a_prediction_is_the_dearest_limit():
    p = Problem(1, 27, 27, 4096, 4096, 64)
    prediction = predict(kernel("attn_fwd_sm80_f16_d64", cycles=9, latency=10), p)
    # 27 x 4096 x 4096 pairs are 3538944 tiles of 16 x 8, of 8 HMMA each, on 432 sub-partitions at 1.41 GHz.
    hmma_seconds = 3538944 * 8 / 432 / 1.41e9
    assert prediction.seconds["tensor"] == pytest.approx(8 * hmma_seconds)
    assert prediction.seconds["latency"] == pytest.approx(10 * hmma_seconds / OVERLAP)
    assert prediction.seconds["mufu"] == pytest.approx(64 * 8 / 128 * hmma_seconds)
    assert prediction.seconds["shared"] == pytest.approx(128 * 4 / 128 * hmma_seconds)
    assert prediction.seconds["warps"] == pytest.approx(9 * hmma_seconds / 2)  # 2 blocks of 4 warps an SM
    assert prediction.binds == "latency"
    seconds, tflops = total(p, [prediction])
    assert tflops == pytest.approx(312 * 8 / 10 * OVERLAP, rel=1e-3)
    assert seconds == prediction.time


def test_a_decode_step_is_bound_by_memory_and_large_blocks_by_their_warps():
    p = Problem(16, 32, 8, 1, 8192, 128)
    prediction = predict(kernel("attn_fwd_sm80_f16_d128", cycles=9), p)
    assert prediction.binds == "DRAM"
    assert prediction.time == pytest.approx(p.dram_bytes("attn_fwd") / 2039e9)
    p = Problem(16, 32, 32, 4096, 4096, 128)
    one_block = kernel("attn_fwd_sm80_f16_d128", cycles=9, latency=9, shared=100 * 1024)
    assert predict(one_block, p).binds == "warps"
    with pytest.raises(ValueError, match="fits"):
        predict(kernel("attn_fwd_sm80_f16_d128", cycles=9, shared=200 * 1024), p)


# Published measurements of the kernels in baselines.json, TFLOP/s at 16k tokens (docs/machine_code.md).
FA2_MEASURED = [
    ("A100", ["fwd-d128-full-even"], 230),
    ("A100", ["fwd-d64-full-even", "bwd-d64-full-even"], 176),
    ("A100", ["fwd-d64-causal-even", "bwd-d64-causal-even"], 171),
    ("A100", ["fwd-d128-full-even", "bwd-d128-full-even"], 203),
    ("A100", ["fwd-d128-causal-even", "bwd-d128-causal-even"], 189),
    ("H100", ["fwd-d64-full-even-sm90"], 324),
    ("H100", ["fwd-d128-full-even-sm90"], 370),
    ("H100", ["fwd-d64-full-even-sm90", "bwd-d64-full-even-sm90"], 296),
    ("H100", ["fwd-d128-full-even-sm90", "bwd-d128-full-even-sm90"], 338),
]


@pytest.mark.parametrize(("gpu", "names", "measured"), FA2_MEASURED)
def test_the_overlap_factor_predicts_published_measurements(gpu, names, measured):
    """Forward and backward together do 2 + 5 products; the time of each is its products over its rate."""
    time = products = 0
    for name in names:
        row = gates.baselines()[f"fa2-{name}"]
        fraction = row["hmma"] * GPUS[gpu].tensor_cycles / row["latency_cycles"]
        n = 5 if name.startswith("bwd") else 2
        time += n / (OVERLAP * fraction * GPUS[gpu].peak_tflops)
        products += n
    assert measured == pytest.approx(products / time, rel=0.08)


def limit(kernels, baseline, most):
    return gates.Limit(tuple(kernels), baseline, most)


def test_a_forward_compares_cycles_and_a_backward_all_its_products():
    fa2 = gates.baselines()
    theirs = fa2["fa2-fwd-d64-full-uneven"]["cycles"] / 256
    ours = kernel("attn_fwd_sm80_f16_d64", cycles=theirs / 2)
    cycles, latency = gates.compare(limit([ours.name], "fa2-fwd-d64-full-uneven", 0.5), {ours.name: ours})
    assert cycles.ratio == pytest.approx(0.5, rel=1e-2)
    assert cycles.ratio == pytest.approx(cycles.ratio_per_unit)
    assert latency.ratio == pytest.approx(ours.main_loop.latency_cycles / 128 / (4469 / 256))
    # Two kernels with 4 and 3 products at FA2's own cycles for each HMMA need 7/5 of its cycles for a pair.
    theirs = fa2["fa2-bwd-d128-full-uneven"]["cycles"] / 320
    parts = [kernel(f"attn_bwd_{part}_sm80_f16_d128", cycles=theirs, hmma=320) for part in ("dkdv", "dq")]
    names = [k.name for k in parts]
    both = gates.compare(limit(names, "fa2-bwd-d128-full-uneven", 0.95), dict(zip(names, parts, strict=True)))
    assert both[0].ratio_per_unit == pytest.approx(1)
    assert both[0].ratio == pytest.approx(7 / 5)
    assert not both[0].holds


def test_a_limit_may_be_on_the_cheapest_trips():
    theirs = gates.baselines()["fa3-bwd-d64-full"]
    ours = kernel("attn_bwd_sm90_f16_d64", cycles=theirs["cheapest_cycles"] / 320, hmma=320)
    masked = dataclasses.replace(ours.main_loop.costs, stall_cycles=9999)  # in all alternatives together
    ours = dataclasses.replace(ours, main_loop=dataclasses.replace(ours.main_loop, costs=masked))
    cheapest = dataclasses.replace(limit([ours.name], "fa3-bwd-d64-full", 1.0), cheapest=True)
    cycles, latency = gates.compare(cheapest, {ours.name: ours})
    assert cycles.ratio == pytest.approx(1)
    assert latency.ratio == pytest.approx(theirs["cheapest_cycles"] / theirs["latency_cycles"])


def test_every_limit_names_a_baseline_and_missing_kernels_fail():
    assert {each.baseline for each in gates.LIMITS} <= set(gates.baselines())
    lines, failures = tables.comparison_table({})
    assert len(failures) == len(gates.LIMITS) == 44
    assert len(lines) == 1  # the titles
    assert "attn_fwd_sm80_f16_d64 is not there" in failures[0]


def test_faults_of_single_kernels():
    good = kernel("attn_fwd_sm80_f16_d64", cycles=9)
    assert gates.faults(good) == []
    bad = kernel("attn_fwd_sm80_f16_d64", cycles=9, stack=8, conflicts=("LDSM: 2-way",), unknown=("LDS",))
    assert [rule for rule, _ in gates.faults(bad)] == ["local memory", "conflict", "not analysed"]
    for moved in ("local_store_bytes", "local_load_bytes"):
        assert [rule for rule, _ in gates.faults(dataclasses.replace(good, **{moved: 4}))] == ["local memory"]
    simt = kernel("attn_fwd_simt_f32", cycles=9, unknown=("LDS",))
    assert gates.faults(simt) == []  # unproven is a fault only of the kernels held beside FlashAttention-2
    assert [rule for rule, _ in gates.faults(kernel("attn_fwd_simt_f32", cycles=9, shared=200 * 1024))] == [
        "launch"
    ]


def test_an_accepted_fault_is_accepted_for_that_kernel_and_rule_alone(monkeypatch):
    monkeypatch.setattr(gates, "ACCEPTED", (("attn_fwd_simt_.*", "local memory", "outside of loops"),))
    assert gates.faults(kernel("attn_fwd_simt_f32", cycles=9, stack=8)) == []
    assert gates.faults(kernel("attn_fwd_sm80_f16_d64", cycles=9, stack=8))
    assert gates.faults(kernel("attn_fwd_simt_f32", cycles=9, stack=8, conflicts=("LDS: 2-way",)))


def test_tables_show_what_was_found():
    kernels = [
        kernel("attn_fwd_sm80_f16_d64", cycles=9.4, latency=9.75, unknown=("LDS",)),
        dataclasses.replace(kernel("attn_bwd_rows_f16", cycles=9), main_loop=None),
    ]
    _titles, first, second = tables.kernel_table(kernels)
    assert "9.40" in first
    assert "9.75" in first
    assert "0 of 39 (1?)" in first
    assert "no multiply-adds" in second
    by_name = {k.name: k for k in kernels}
    problems = [Problem(1, 8, 8, 4096, 4096, 50), Problem(1, 8, 8, 4096, 4096, 50, direction="backward")]
    lines = tables.prediction_table(problems, "f16", by_name)
    assert "latency" in lines[1]
    assert "attn_bwd_dkdv_sm80_f16_d64 is not there" in lines[2]
    json.dumps([dataclasses.asdict(k) for k in kernels])  # as --json writes it


def test_a_problem_on_the_command_line():
    wanted = Problem(4, 16, 8, 128, 256, 96, causal=True, direction="backward")
    assert sass_report.parse_problem("4,16,8,128,256,96,causal,backward") == wanted
    for wrong in ("1,2,3", "4,16,8,128,256,96,lower,backward", "a,16,8,128,256,96,full,forward"):
        with pytest.raises(sass_report.argparse.ArgumentTypeError, match="B,H,Hkv"):
            sass_report.parse_problem(wrong)
