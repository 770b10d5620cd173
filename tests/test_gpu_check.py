"""benchmarks/gpu_check.py without a GPU: what it would measure, how it shows it, and that it always ends."""

import itertools
import json
import os
import sys
import time
from pathlib import Path

import gpu_check
import pytest
import torch
from gpu import measure as gpu_measure
from gpu.cases import PROVIDERS, Case, all_right, best_ratio, cases, render, row, verdict
from gpu.watch import run_tests, watch
from other_python import IMPORT_FROM, run_python

import attn_ext

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "gpu_check.py"


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.setenv("ATTN_EXT_KERNELS", "sm80")  # measuring sets it: given back after each test


SMALL = Case("prefill", "forward", "bfloat16", 1, 2, 2, 16, 16, 32, True)


def test_cases_cover_what_the_check_promises():
    found = cases()
    assert len(found) == len(set(found)) == len({str(case) for case in found})
    prefill = {case[1:3] + case[6:] for case in found if case.section == "prefill"}
    lengths = (512, 1024, 2048, 4096, 8192, 16384)
    kinds = itertools.product(
        ("forward", "backward"), ("float16", "bfloat16"), lengths, (64, 128), (False, True)
    )
    assert prefill == {(way, dtype, n, n, d, causal) for way, dtype, n, d, causal in kinds}
    assert all(case.batch * case.queries == 16384 for case in found if case.section == "prefill")
    assert {case.section for case in found} == {"decode", "prefill", "float32", "tf32"}
    assert any(case.queries == 1 and case.heads > case.kv_heads for case in found)  # grouped decoding
    assert all("D128" in str(case) for case in cases("D128.*backward"))


@pytest.mark.parametrize("causal", [False, True])
def test_operations_are_those_of_the_visible_pairs(causal):
    pairs = sum(not causal or j <= i + 9 - 5 for i, j in itertools.product(range(5), range(9)))
    case = Case("prefill", "forward", "float16", 3, 4, 2, 5, 9, 64, causal)
    assert case.flops == 3 * 4 * pairs * 64 * 4
    assert case._replace(direction="backward").flops == 3 * 4 * pairs * 64 * 10


def test_a_decode_step_is_judged_by_the_bytes_of_keys_and_values():
    case = Case("decode", "forward", "bfloat16", 2, 32, 8, 1, 4096, 128, False)
    assert case.bytes == 2 * 2 * (2 * 8 * 4096 * 128) + 2 * 2 * (2 * 32 * 128)
    result = {"milliseconds": {"attn_ext": 0.01, "flash": 0.02}, "skipped": {}, "wrong": ""}
    result |= best_ratio(result["milliseconds"])
    ours, flash = (f"{case.bytes / 1e6 / ms:.1f}" for ms in (0.01, 0.02))
    assert row(case, result).split()[-8:] == [ours, "-", flash, "-", "-", "-", "2.00", "flash"]


@pytest.mark.parametrize("section", ["float32", "tf32"])
def test_float32_with_and_without_tf32(section):
    case = Case(section, "backward", "float32", 1, 2, 2, 16, 16, 32, True)
    assert case.bytes == 2 * SMALL._replace(direction="backward").bytes
    before = torch.get_float32_matmul_precision()
    try:
        result = gpu_measure.measure(case, "cpu")
        assert torch.get_float32_matmul_precision() == ("high" if section == "tf32" else "highest")
    finally:
        torch.set_float32_matmul_precision(before)
    assert result["wrong"] == ""
    assert {"attn_ext", "math"} <= set(result["milliseconds"])


def report(results, tests_passed=True):
    return {
        "environment": {"GPU": "NVIDIA H200"},
        "tests": {"passed": tests_passed, "says": "12 passed"},
        "results": results,
        "not_reached": [],
    }


def result(case=SMALL, wrong="", **milliseconds):
    found = {"case": list(case), "milliseconds": milliseconds, "skipped": {}, "wrong": wrong}
    return found | best_ratio(milliseconds)


def test_the_table_shows_rates_ratios_and_what_went_wrong():
    ours_faster = result(attn_ext=1.0, flash=3.0, cudnn=2.0)
    alone = result(SMALL._replace(direction="backward"), attn_ext=1.0)
    wrong = result(SMALL._replace(head_dim=64), "out is 1 off flash's", attn_ext=1.0, flash=50.0)
    crashed = {"case": list(SMALL._replace(keys=32)), "failed": "its process ended with status -11"}
    everything = report([ours_faster, alone, wrong, crashed]) | {"not_reached": ["prefill later"]}
    text = render(everything)
    lines = {line.split("  ")[0]: line for line in text.splitlines()}
    assert "NVIDIA H200" in text
    assert "12 passed" in text
    assert "2.00 cudnn" in text
    assert "WRONG: out is 1 off flash's" in text
    assert "FAILED: its process ended with status -11" in text
    assert lines["prefill later"]
    mean = next(line for line in text.splitlines() if line.startswith("prefill forward"))
    assert mean.split()[4:] == [
        "2.00",
        "(2.00",
        "to",
        "2.00,",
        "1",
        "cases)",
    ]  # a wrong result is not averaged
    assert not all_right(everything)
    assert all_right(report([ours_faster, alone]))
    assert not all_right(report([ours_faster], tests_passed=False))
    assert not all_right(report([wrong]))


def test_which_kernels_should_be_the_default_on_hopper():
    backward = SMALL._replace(direction="backward")
    results = [
        result(attn_ext=2.0, sm90=1.0, flash=3.0),
        result(SMALL._replace(keys=32), attn_ext=8.0, sm90=1.0),
        result(SMALL._replace(keys=64), "out is 1 off sm90's", attn_ext=9.0, sm90=1.0),
        result(backward, attn_ext=1.0, sm90=2.0, cudnn=0.5),
        result(SMALL._replace(section="decode"), attn_ext=1.0),
    ]
    assert results[0]["ratio"] == 1.5  # ours is not torch's best
    backwards, forwards = verdict(results)
    assert (
        " ".join(forwards.split()) == "prefill forward D32 causal 4.00 the default should be sm90 (2 cases)"
    )
    assert (
        " ".join(backwards.split()) == "prefill backward D32 causal 0.50 the default should be sm80 (1 cases)"
    )
    assert forwards in render(report(results))
    assert verdict([result(attn_ext=1.0)]) == []


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("kv_heads", [2, 1])
def test_measuring_a_case_times_all_that_take_it(direction, kv_heads, monkeypatch):
    monkeypatch.setattr(gpu_measure, "SAMPLE_SECONDS", 0)
    case = SMALL._replace(direction=direction, kv_heads=kv_heads)
    found = gpu_measure.measure(case, "cpu")
    assert found["wrong"] == ""
    assert {"attn_ext", "math"} <= set(found["milliseconds"])  # torch has flash and math on the CPU
    assert set(found["milliseconds"]) | set(found["skipped"]) == set(PROVIDERS)
    assert all(ms > 0 for ms in found["milliseconds"].values())
    assert found["ratio"] == found["milliseconds"][found["best"]] / found["milliseconds"]["attn_ext"]


@pytest.mark.parametrize("fault", [lambda out: out * 1.1, lambda out: out * float("nan")])
def test_a_wrong_result_is_found(fault, monkeypatch):
    monkeypatch.setattr(gpu_measure, "SAMPLE_SECONDS", 0)
    right = attn_ext.attention
    monkeypatch.setattr(attn_ext, "attention", lambda *args, **options: fault(right(*args, **options)))
    assert "out is" in gpu_measure.measure(SMALL, "cpu")["wrong"]


def test_torchs_unfused_path_is_left_out_where_it_is_too_long(monkeypatch):
    monkeypatch.setattr(gpu_measure, "SAMPLE_SECONDS", 0)
    monkeypatch.setattr(gpu_measure, "MATH_PAIRS", 16 * 16 - 1)
    found = gpu_measure.measure(SMALL, "cpu")
    assert "math" not in found["milliseconds"]
    assert "Nq x Nk" in found["skipped"]["math"]


def test_a_case_that_we_refuse_fails(monkeypatch):
    def refuse(*_, **__):
        raise ValueError("no kernel takes this\nand more")

    monkeypatch.setattr(attn_ext, "attention", refuse)
    assert gpu_measure.measure(SMALL, "cpu") == {"failed": "attn_ext: no kernel takes this"}


def test_an_error_of_the_device_ends_the_process(monkeypatch):
    def crash(*_, **__):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(attn_ext, "attention", crash)
    with pytest.raises(RuntimeError, match="illegal"):
        gpu_measure.measure(SMALL, "cpu")


# Answers each case by its number of keys; what the last number stands for happens at that case.
WORKER = """
import json, os, sys, time
for values in json.loads(sys.stdin.read()):
    keys = values[7]
    if keys == 2: os.abort()
    if keys == 3: sys.exit("a message")
    if keys == 4: time.sleep(60)
    print("noise of a library")
    print(json.dumps({"case": values, "keys": keys}), flush=True)
"""


def watched(keys, seconds=60.0, silence=20.0):
    taken = []
    todo = [SMALL._replace(keys=k) for k in keys]
    start = time.monotonic()
    left = watch([sys.executable, "-c", WORKER], todo, start + seconds, taken.append, silence, 20.0)
    return taken, [case.keys for case in left], time.monotonic() - start


def test_every_case_is_answered_once():
    taken, left, _ = watched([10, 11, 12])
    assert [result["keys"] for result in taken] == [10, 11, 12]
    assert left == []


def test_a_crash_costs_its_case_and_says_how():
    taken, left, _ = watched([10, 2, 11, 3])
    assert [result.get("keys") for result in taken] == [10, None, 11, None]
    assert "status -6" in taken[1]["failed"]
    assert taken[3]["failed"] == "its process ended with status 1: a message"
    assert left == []


def test_a_hang_costs_its_case_and_the_deadline_holds():
    taken, left, _ = watched([10, 4, 11], silence=2.0)
    assert [result.get("keys") for result in taken] == [10, None, 11]
    assert "no answer in 2 s" in taken[1]["failed"]
    taken, left, seconds = watched([10, 4, 11], seconds=5.0)
    assert [result["keys"] for result in taken] == [10]
    assert left == [4, 11]
    assert seconds < 10
    assert watched([10], seconds=-1.0)[:2] == ([], [10])


def test_the_tests_are_counted_and_stopped_in_time(tmp_path):
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    file = tmp_path / "test_some.py"
    header = "import pytest, time\n"
    good = "def test_good(): pass\n@pytest.mark.skip\ndef test_skipped(): pass\n"
    file.write_text(header + good)
    assert run_tests((file.name,), tmp_path, 60)["says"].startswith("1 passed, 0 failed, 1 skipped")
    file.write_text(header + good + "def test_bad(): assert 'why' == ''\n")
    bad = run_tests((file.name,), tmp_path, 60)
    assert not bad["passed"]
    assert "why" in bad["output"]
    file.write_text(header + good + "def test_long(): time.sleep(60)\n")
    stopped = run_tests((file.name,), tmp_path, 15)
    assert stopped["passed"]
    assert "1 passed" in stopped["says"]
    assert "stopped after 15 s" in stopped["says"]
    file.write_text(header)
    assert not run_tests((file.name,), tmp_path, 60)["passed"]  # nothing ran


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_what_fails_is_written_and_fails_the_check(tmp_path, monkeypatch):
    """Its own measuring process, which finds no GPU: every case fails, none stops the rest."""
    monkeypatch.setattr(gpu_check, "cannot_run", lambda: "")
    monkeypatch.setattr(gpu_check, "environment", lambda: {"GPU": "none"})
    monkeypatch.setenv("PYTHONPATH", str(IMPORT_FROM))
    files = [tmp_path / "a.json", tmp_path / "a.txt"]
    few = "H32/8 +N1x16384|bfloat16.*N512x512 D64 +causal"
    options = ["--no-tests", "--json", files[0], "--table", files[1], "--only", few]
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", *map(str, options)])
    assert gpu_check.main() == 1
    written = json.loads(files[0].read_text())
    assert len(written["results"]) == 1 + 2
    assert all("failed" in each for each in written["results"])
    assert written["not_reached"] == []
    assert files[1].read_text().count("FAILED: ") == 3


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(tmp_path):
    done = run_python(SCRIPT, "--json", tmp_path / "a.json", "--table", tmp_path / "a.txt")
    assert done.returncode == 2
    assert done.stderr.startswith("gpu_check: ")
    assert "CUDA" in done.stderr or "GPU" in done.stderr
    assert "Traceback" not in done.stderr
    assert os.listdir(tmp_path) == []
