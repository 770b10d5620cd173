"""The tutorial's code runs and its assertions hold; the translation has the same code."""

import re
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"


def code(name):
    return re.findall(r"```python\n(.*?)```", (DOCS / name).read_text(encoding="utf-8"), re.DOTALL)


def without_comments(block):
    return re.sub(r"\s*#.*| *\"\"\".*\"\"\"", "", block)


def test_the_code_runs():
    names = {}
    blocks = code("tutorial.md")
    assert len(blocks) == 8
    for block in blocks:
        exec(compile(block, "tutorial.md", "exec"), names)


def test_the_translation_has_the_same_code():
    """Comments and docstrings are translated, too."""
    pairs = zip(code("tutorial.md"), code("tutorial.zh-CN.md"), strict=True)
    for original, translated in pairs:
        assert without_comments(translated) == without_comments(original)
