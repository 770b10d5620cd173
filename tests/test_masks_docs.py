"""The code in docs/masks.md runs, and prints what the page shows."""

import re
import textwrap
from pathlib import Path

PAGE = (Path(__file__).parents[1] / "docs" / "masks.md").read_text(encoding="utf-8")


def test_the_page_runs(capsys):
    names = {}
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) == 3
    for code in blocks:
        exec(compile(code, "masks.md", "exec"), names)
    assert textwrap.indent(capsys.readouterr().out, "    ") in PAGE
    assert names["joined"].shape == (1, 4, 1000, 1000)


def test_the_page_lists_every_pattern():
    from attn_ext import masks

    listed = set(re.findall(r"^\| `(\w+)\(", PAGE, re.MULTILINE))
    assert listed == {name for name in masks.__all__ if name.islower()}
