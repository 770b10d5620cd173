"""Which PTX lines of the CUDA kernels no test reached: `pytest --kernel-lines=FILE` writes them.

A line that no test reaches is a line that nobody has seen work. Those that are right to stay unreached are
named in EXPECTED; any other makes the run fail.
"""

import functools
import json
import re
from pathlib import Path

import cuda_kernels
import nvcc

# (regular expression on "file.cuh: source line | PTX instruction", reason)
EXPECTED = []
NOWHERE = Path("?"), 0  # of lines that the compiler made


def gathered():
    """This process's part, as text for another process."""
    return json.dumps([[*key, sorted(lines)] for key, lines in cuda_kernels.unexecuted.items()])


def merge(parts):
    """{(kernel, arch): lines that no process reached}"""
    merged = {}
    for text in parts:
        for kernel, arch, lines in json.loads(text):
            merged.setdefault((kernel, arch), set(lines)).intersection_update(lines)
    return merged


def source_lines(text):
    """{PTX line: (file, line)} by the .loc directives that -lineinfo leaves.

    What is inlined from a header of CUDA counts as the line of csrc/ that calls it.
    """
    files = dict(re.findall(r'^\s*\.file\s+(\d+)\s+"([^"]+)"', text, re.MULTILINE))
    files = {n: _in_this_tree(path) for n, path in files.items()}
    ours = {n for n, path in files.items() if path.is_relative_to(nvcc.CSRC)}
    where, found = None, {}
    for number, line in enumerate(text.splitlines(), 1):
        m = re.match(r"\s*\.loc\s+(\d+)\s+(\d+)(?:.*\binlined_at\s+(\d+)\s+(\d+))?", line)
        if m and m[2] != "0":  # line 0: made by the compiler
            file, at = (m[1], m[2]) if m[1] in ours or not m[3] else (m[3], m[4])
            where = files[file], int(at)
        found[number] = where
    return found


def _in_this_tree(path):
    """A file that PTX names. nvcc.py keeps PTX by what was compiled: in which tree, it does not know."""
    here = nvcc.CSRC / path.rpartition("/csrc/")[2]
    return here.resolve() if "/csrc/" in path and here.exists() else Path(path)


def described(text, number):
    """The source line of a PTX line: "file.cuh:12: its text"."""
    path, line = source_lines(text).get(number) or NOWHERE
    return f"{path.name}:{line}: {_line(path, line)}"


def _same_code(merged):
    """Architectures between which nvcc makes no difference count as one: reached by one is reached."""
    first, joined = {}, {}
    for (kernel, arch), lines in sorted(merged.items()):
        code = re.sub(r"^\s*\.(target|file)\b.*$", "", cuda_kernels.ptx(kernel, arch), flags=re.MULTILINE)
        key = first.setdefault((kernel, code), (kernel, arch))
        joined[key] = joined.get(key, lines) & lines
    return joined


def _never_launched(merged):
    """Kernels that no test launched at all."""
    files = cuda_kernels.INSTANTIATIONS.glob("*.cu")
    texts = [nvcc.ptx_of_file(path, flags=cuda_kernels.NVCC_FLAGS) for path in sorted(files)]
    kernels = {name for text in texts for name in re.findall(r"\.entry\s+(\w+)", text)}
    return sorted(kernels - {kernel for kernel, _ in merged})


def report(merged):
    """(text for people, rows that no pattern of EXPECTED explains); both empty without nvcc"""
    out, unexplained = [], []
    for (kernel, arch), lines in _same_code(merged).items():
        text = cuda_kernels.ptx(kernel, arch)
        ptx, origin = text.splitlines(), source_lines(text)
        counts = {}
        for number in sorted(lines, key=lambda n: (origin.get(n) or NOWHERE, n)):
            path, line = origin.get(number) or NOWHERE
            subject = f"{path.name}: {_line(path, line)} | {ptx[number - 1].strip()}"
            reason = next((why for pattern, why in EXPECTED if re.search(pattern, subject)), None)
            row = f"{path.name}:{line}: {_line(path, line)}", reason
            counts[row] = counts.get(row, 0) + 1
        out.append(f"{kernel} ({arch}): {len(lines)} PTX lines never executed")
        out += [f"    {where}  [{n}]" + (f"  {why}" if why else "") for (where, why), n in counts.items()]
        unexplained += [f"{kernel} ({arch}): {at}  [{n}]" for (at, why), n in counts.items() if not why]
    never = [f"{kernel}: no test launches it" for kernel in (_never_launched(merged) if merged else [])]
    return "\n".join(out + never), unexplained + never


@functools.lru_cache(1000)
def _line(path, number):
    try:
        return path.read_text().splitlines()[number - 1].strip()
    except (OSError, IndexError):
        return "?"
