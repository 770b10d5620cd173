"""The code in the migration guides runs, and does what its comments say."""

import re
from pathlib import Path

import pytest

GUIDES = Path(__file__).parents[1] / "docs" / "migrating"


@pytest.mark.parametrize("name", ["torch_sdpa", "multihead_attention", "flex_attention"])
def test_examples_run(name, capsys):
    names = {}
    text = (GUIDES / f"{name}.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) >= 2
    for code in blocks:
        exec(compile(code, name, "exec"), names)
    printed = capsys.readouterr().out
    if name == "multihead_attention":
        assert printed.splitlines()[0] in text
        assert "layers.1.self_attn" in printed
