"""The code in docs/modules.md and in the modules' docstrings runs, and does what is written there."""

import doctest
import importlib
import re
from pathlib import Path

import pytest
import torch

PAGE = (Path(__file__).parents[1] / "docs" / "modules.md").read_text()


def test_the_page_runs():
    names = {}
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) == 2
    for code in blocks:
        exec(compile(code, "modules.md", "exec"), names)
    assert names["out"].shape == names["tgt"].shape
    assert names["y"].shape == (2, 2, 12, 32)


@pytest.mark.parametrize("name", ["modules.self_cross", "positions.rotary"])
def test_docstrings_run(name):
    result = doctest.testmod(importlib.import_module(f"attn_ext.{name}"), extraglobs={"torch": torch})
    assert result.attempted > 0
    assert result.failed == 0
