"""The list of compiled files, csrc/sources.txt."""

from pathlib import Path


def read(path: Path) -> dict[str, list[str]]:
    """The sections of csrc/sources.txt: {section: [path relative to the project, ...]}.

    A line with a ``*`` stands for the files that it matches, in alphabetical order.
    """
    project = path.resolve().parents[1]
    sections: dict[str, list[str]] = {}
    for raw in path.read_text().splitlines():
        line = raw.split("#")[0].strip()
        if line.endswith(":"):
            files = sections.setdefault(line[:-1], [])
        elif "*" in line:
            files.extend(str(match.relative_to(project)) for match in sorted(project.glob(line)))
        elif line:
            files.append(line)
    return sections
