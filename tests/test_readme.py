"""The code in README.md runs, and does what its comments say."""

import re
from pathlib import Path

import torch

README = (Path(__file__).parents[1] / "README.md").read_text()


def test_usage_runs():
    torch.manual_seed(0)
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    names = {}
    exec(compile(code, "README.md", "exec"), names)
    assert names["bias"].grad.shape == names["bias"].shape
    assert names["weights"].shape == (2, 8, 10, 10)
    assert len(code.splitlines()) <= 35
