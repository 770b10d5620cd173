"""Which PTX lines of the CUDA kernels no test reached: `pytest --kernel-lines=FILE` writes them.

A line that no test reaches is a line that nobody has seen work. It is unreached because some branch never
went its way, and what stands behind that branch is unreached with it: the first instructions behind one are a
gate. Gates that are right to stay shut are named in EXPECTED; any other makes the run fail, as does a kernel
that no test launches, and a reason that nothing needs any more.
"""

import functools
import json
import re
from pathlib import Path

import cuda_kernels
import nvcc
import ptxrun

# (regular expression for the whole name of a kernel, regular expression on "file.cuh: source line | PTX
# instruction" of an instruction up to the gate's first branch or, with "behind " before it, of the branch
# that never went there, reason)
EXPECTED = [
    (
        r"attn_\w+",
        r"\| (div|rem)\.[su]64\b",
        "nvcc divides in 32 bits where both numbers fit in them, and those of heads, tiles and blocks do",
    ),
    (
        r"attn_fwd_simt_f64",
        r": log\(total\); \| mul\.f64 .* 0d4350000000000000",
        "log() scales up denormal numbers, but the sum is 0 or, as exp(0) is in it, at least 1",
    ),
    (
        r"attn_fwd_sm90_b?f16_d128",
        r"block_order\.h: const int64_t bytes ",
        "causal calls with a head dim of 128 go to the kernel with smaller tiles",
    ),
    (
        r"attn_bwd_dq_(simt_\w+|tf32_sm80)",
        r"backward_dq\.cuh: for \(int i = i0; i < min\(i0 .* \| bra\.uni",
        "the loop over the queries of a tile always runs: it has at least one",
    ),
    (
        r"attn_bwd_dkdv_simt_b?f16",
        r"behind backward_dkdv\.cuh: if \((does_k|parts\.fused)\) \{",
        "half types come to this kernel with a head dim above 256, and fused blocks take up to 64",
    ),
]
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


def place(origin, number):
    """(file, line number, text) of the source line that a PTX line comes from, by source_lines()."""
    path, at = origin.get(number) or NOWHERE
    return path.name, at, _line(path, at)


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


def gates(text, kernel, lines):
    """For a kernel's unreached lines: [(those of a gate, of the branches to it, how many go with it)]"""
    if not lines:
        return []
    module = ptxrun.Module(text)
    main = module.find(kernel)
    functions = [main, *(module.prog.funcs[name] for name in sorted(module.callees(main)))]
    code = {i.pc: i for f in functions for i in module.prog.code[f.start : f.end]}
    shut = {pc for pc, i in code.items() if i.line in lines}
    after = {pc: [n for n in _successors(i) if n in code] for pc, i in code.items()}
    before = {pc: [] for pc in code}
    for pc, following in after.items():
        for n in following:
            before[n].append(pc)
    found, counted = [], set()
    for gate in sorted(pc for pc in shut if not before[pc] or not shut.issuperset(before[pc])):
        block = [gate]
        while after[block[-1]] == [block[-1] + 1] and len(before[block[-1] + 1]) == 1:
            block.append(block[-1] + 1)
        behind, todo = set(), [gate]
        while todo:
            pc = todo.pop()
            if pc in shut and pc not in behind:
                behind.add(pc)
                todo += after[pc]
        at = [[code[pc].line for pc in pcs] for pcs in (block, set(before[gate]) - shut)]
        found.append((*at, len({code[pc].line for pc in behind - counted})))
        counted |= behind
    return found


def _successors(i):
    """Where an instruction of ptxrun may go on, in its own function."""
    targets = [i.target] if i.target is not None else i.targets or []
    ends = i.guard is None and i.op in ("bra", "brx", "ret", "exit", "trap")
    return targets if ends else [*targets, i.pc + 1]


def report(merged):
    """(text for people, rows that make the run fail); both empty without nvcc"""
    out, failures, used = [], [], set()
    for (kernel, arch), lines in _same_code(merged).items():
        text = cuda_kernels.ptx(kernel, arch)
        ptx, origin, counts = text.splitlines(), source_lines(text), {}
        for block, branches, behind in gates(text, kernel, lines):
            subjects = [_subject(ptx, origin, n) for n in block]
            subjects += ["behind " + _subject(ptx, origin, n) for n in branches]
            entry = _reason(kernel, subjects)
            used.add(entry)
            name, at, source = place(origin, block[0])
            row = f"{name}:{at}: {source}", entry
            counts[row] = counts.get(row, 0) + behind
        out.append(f"{kernel} ({arch}): {len(lines)} PTX lines never executed")
        out += [f"    {at}  [{n}]" + (f"  {entry[2]}" if entry else "") for (at, entry), n in counts.items()]
        failures += [f"{kernel} ({arch}): {at}  [{n}]" for (at, entry), n in counts.items() if not entry]
    if merged:
        failures += [f"{kernel}: no test launches it" for kernel in _never_launched(merged)]
        failures += [f"EXPECTED: nothing needs {entry[:2]}" for entry in EXPECTED if entry not in used]
    return "\n".join([*out, *failures]), failures


def _subject(ptx, origin, number):
    name, _, source = place(origin, number)
    return f"{name}: {source} | {' '.join(ptx[number - 1].split())}"


def _reason(kernel, subjects):
    """The first entry of EXPECTED that explains a gate, or None."""
    for entry in EXPECTED:
        if re.fullmatch(entry[0], kernel) and any(re.search(entry[1], subject) for subject in subjects):
            return entry
    return None


@functools.lru_cache(1000)
def _line(path, number):
    try:
        return path.read_text().splitlines()[number - 1].strip()
    except (OSError, IndexError):
        return "?"
