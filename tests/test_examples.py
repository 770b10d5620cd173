"""The examples run, as a user starts them; small, because what they must show needs minutes."""

import re
from pathlib import Path

import pytest
from other_python import run_python

SCRIPT = Path(__file__).parents[1] / "examples" / "train_char_lm.py"
SMALL = "--steps 3 --batch 4 --context 16 --width 16 --heads 2 --depth 2 --evaluation-batches 2 --sample 20"


def run(*arguments):
    result = run_python(SCRIPT, *SMALL.split(), *arguments)
    assert result.returncode == 0, result.stderr
    assert "3/3" in result.stderr or "--steps" in arguments
    return result.stdout


def test_char_lm_compared_with_torch_saved_and_loaded(tmp_path):
    saved = tmp_path / "model.pt"
    out = run("--compare", "torch", "--save", str(saved))
    rows = re.findall(r"^(attn_ext|torch) +([\d.]+) +([\d.]+) +[\d.]+$", out, re.MULTILINE)
    assert [row[0] for row in rows] == ["attn_ext", "torch"]
    # float32 rounds the two in different orders; three steps leave no time to diverge beyond 1e-4
    assert float(re.search(r"validation losses differ by (\S+)", out)[1]) < 1e-4
    before, after = re.findall(r"validation loss .*  ([\d.]+)$", out, re.MULTILINE)[:2]
    assert float(after) < float(before)

    again = run("--load", str(saved), "--steps", "0")
    assert f"before training  {after}" in again
    sample = re.compile(r"--- sample ---\n(.*)\n-{14}", re.DOTALL)
    assert sample.search(again)[1] == sample.search(out)[1]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_char_lm_in_mixed_precision(dtype):
    out = run("--amp", dtype, "--compare", "torch", "--dropout", "0.1")
    assert "validation losses differ by" in out
