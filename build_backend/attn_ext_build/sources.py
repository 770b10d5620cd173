"""The list of compiled files, csrc/sources.txt."""

from pathlib import Path


def read(path: Path) -> dict[str, list[str]]:
    """The sections of csrc/sources.txt: {section: [path relative to the project, ...]}."""
    sections: dict[str, list[str]] = {}
    for raw in path.read_text().splitlines():
        line = raw.split("#")[0].strip()
        if line.endswith(":"):
            files = sections.setdefault(line[:-1], [])
        elif line:
            files.append(line)
    return sections
