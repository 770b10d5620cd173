"""The benchmarks run and measure what they name, as a developer starts them. No time is asserted."""

import json
import re
from pathlib import Path

import pytest
import torch
from other_python import run_python

import attn_ext
from attn_ext import __main__, bench

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def run(script, *arguments):
    result = run_python(BENCHMARKS / script, *arguments)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_cpu_bench_times_every_kind_of_case_on_one_instruction_set(tmp_path):
    path = tmp_path / "times.json"
    tiny = "--quick --threads 1 --lengths 16 --head-dims 8 --seconds 0 --dtype float32 bfloat16"
    isa = "avx2" if "avx2" in attn_ext._C.cpu_isas() else "native"
    out = run("cpu_bench.py", *tiny.split(), "--isa", isa, "--json", str(path))
    assert isa == "native" or "attn_ext avx2, torch AVX2" in out
    results = json.loads(path.read_text())["results"]
    kinds = {tuple(row["case"].split()[:2]) for row in results}
    assert kinds == {
        (dtype, kind)
        for dtype in ("float32", "bfloat16")
        for kind in (
            *("full", "causal", "window", "mask", "bias", "decode8", "decode32", "gqa"),
            *("small", "module", "weights"),
        )
    }
    assert {row["function"] for row in results} == {"attn_ext", "attn_ext.attention"}
    assert all(row["case"].strip() in out and row["ratio"] > 0 for row in results)
    timed = [row for row in results if row["kind"] not in ("small", "module", "weights")]
    assert all(0 < share < 1000 for row in timed for share in row["percent_of_limit"])

    pytest.importorskip("matplotlib")
    *table, full, causal = run("cpu_report.py", path, tmp_path / "cpu").splitlines()
    assert (full, causal) == (f"{tmp_path}/cpu_full.png", f"{tmp_path}/cpu_causal.png")
    assert all(Path(picture).stat().st_size > 1000 for picture in (full, causal))
    first = next(row for row in results if row["kind"] == "full" and row["direction"] == "forward")
    line = next(line for line in table if line.startswith("| full | 16, 8 |"))
    assert f"= **{first['ratio']:.2f}** ({first['percent_of_limit'][0]:.0f}%)" in line.split(" | ")[2]
    assert sum(line.startswith("| ") for line in table) == 3 + 11  # three heads, and each kind


def test_memory_measures_in_processes_of_their_own():
    out = run("memory.py", "--length", "64", "--cases", "plain", "--only", "attn_ext")
    assert out.splitlines()[-1].split()[:3] == ["plain", "forward,", "backward"]
    assert (
        int(out.split()[-1]) < 100
    )  # MiB; a number, not an error, and nowhere near what importing torch takes


def test_bench_command_times_every_row(monkeypatch, capsys):
    monkeypatch.setattr(bench, "ROWS", [row._replace(queries=5, keys=7, head_dim=8) for row in bench.ROWS])
    monkeypatch.setattr(bench, "SECONDS", 0.0)
    monkeypatch.setattr("sys.argv", ["attn_ext", "bench"])
    __main__.main()
    lines = capsys.readouterr().out.splitlines()
    assert torch.__version__ in lines[0]
    rows = [line for line in lines if any(line.startswith(row.name) for row in bench.ROWS)]
    assert len(rows) == 3 * len(bench.ROWS)  # dtypes
    for row in rows:
        ours, theirs, ratio = map(float, row.split()[-3:])
        assert min(ours, theirs, ratio) > 0


def test_bench_refuses_to_time_wrong_results():
    right, wrong = (lambda: (torch.ones(2),)), (lambda: (torch.zeros(2),))
    with pytest.raises(RuntimeError, match="wrong and torch differ by 1 of 1 in: here"):
        bench.check_agreement("here", torch.float32, {"torch": right, "wrong": wrong})


def test_block_mask_measures_every_pattern_after_comparing_results():
    out = run("block_mask.py", "--length", "200", "--rounds", "1", "--threads", "1", "--no-flex")
    rows = [line for line in out.splitlines() if re.search(r"\d%", line)]
    names = [re.match(r"\S+", line)[0] for line in rows]
    assert names == ["causal=True", "window", "longformer", "BigBird", "documents", "fixed"]
    for line in rows[
        1:
    ]:  # visible, partial, build; block, us a block, dense, torch: forward, and with backward
        numbers = [float(n) for n in re.findall(r"(?<= )[\d.]+(?=%| |$)", line[16:])]
        assert len(numbers) == 11
        assert all(n > 0 for n in numbers[3:])
