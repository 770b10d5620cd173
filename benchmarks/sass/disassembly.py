"""A cubin as instructions: one nvdisasm call, parsed."""

import dataclasses
import functools
import math
import os
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path


class ToolError(RuntimeError):
    """A CUDA tool is missing or failed; the message says which and what to do."""


@functools.cache
def find_tool(name: str) -> str:
    """Path of a CUDA tool: in $CUDA_HOME/bin, on PATH, from its PyPI wheel, in /usr/local/cuda/bin."""
    wheels = Path(sysconfig.get_paths()["purelib"]) / "nvidia" / "cu13" / "bin"
    folders = [*os.environ.get("PATH", "").split(os.pathsep), wheels, "/usr/local/cuda/bin"]
    if home := os.environ.get("CUDA_HOME"):
        folders.insert(0, Path(home) / "bin")
    found = shutil.which(name, path=os.pathsep.join(map(str, folders)))
    if found is None:
        raise ToolError(
            f"{name} was not found: it is part of the CUDA toolkit; set CUDA_HOME or PATH, or "
            "run  pip install '.[dev]'  for nvdisasm and cuobjdump"
        )
    return found


def run_tool(name: str, *arguments: object, cwd: Path | None = None) -> subprocess.CompletedProcess:
    command = [find_tool(name), *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False, cwd=cwd)
    if result.returncode:
        raise ToolError(f"{' '.join(command)} failed:\n{result.stderr.strip()[-2000:]}")
    return result


@dataclasses.dataclass(frozen=True, slots=True)
class Instruction:
    address: int  # bytes from the start of the function
    predicate: str  # "@P0", "@!PT" (never executed), or "" for none
    opcode: str  # with modifiers: "HMMA.16816.F32"
    operands: str
    stall: int  # cycles until the warp may issue its next instruction
    waits: int  # bit i: waits for scoreboard i before issuing
    result_board: int  # scoreboard that the result's arrival releases; 7: none
    operand_board: int  # scoreboard that reading the operands releases; 7: none
    source: str  # "forward.cuh:123", or "" where it is not known

    @property
    def name(self) -> str:
        return self.opcode.partition(".")[0]

    @property
    def runs(self) -> bool:
        return self.predicate != "@!PT"

    @property
    def bytes(self) -> int:
        """How many bytes one lane's memory access moves."""
        widths = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}
        return next((widths[part] for part in self.opcode.split(".") if part in widths), 4)


@dataclasses.dataclass
class Function:
    name: str
    instructions: list[Instruction] = dataclasses.field(default_factory=list)
    labels: dict[str, int] = dataclasses.field(default_factory=dict)  # label -> index of its instruction
    threads: int | None = None  # a block's, from __launch_bounds__; None: the kernel declares none


_INSTRUCTION = re.compile(
    r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:(@!?\w+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;\s*/\* 0x[0-9a-f]{16} \*/"
)
_SECOND_WORD = re.compile(r"^\s*/\* (0x[0-9a-f]{16}) \*/\s*$")
_LABEL = re.compile(r"^(\.L_[\w$]+|\$[\w$]+):")
_SOURCE = re.compile(r'^\s*//## File "([^"]+)", line (\d+)')
_SECTION = re.compile(r"^\s*\.section\s+\.(text|nv\.info)\.([^\s,]+),")


def disassemble(cubin: Path) -> str:
    return run_tool("nvdisasm", "-hex", "-g", cubin).stdout  # -g: source lines, where nvcc noted them


def parse(text: str) -> dict[str, Function]:
    """`nvdisasm -hex -g` -> the kernels by name.

    The scheduling fields are bits 41 to 61 of an instruction's second word, from the lowest: stall count 4,
    yield 1, result scoreboard 3, operand scoreboard 3, wait mask 6. (Jia et al., "Dissecting the NVIDIA Volta
    GPU Architecture via Microbenchmarking", arXiv 1804.06826, section 2.1; the same up to Hopper.)
    """
    functions: dict[str, Function] = {}
    threads: dict[str, list[int]] = {}
    code: Function | None = None  # the kernel whose .text section this is
    launch_bounds: list[int] | None = None  # x, y, z still to be read
    info, pending, source = "", None, ""
    for line in text.splitlines():
        if section := _SECTION.match(line):
            kind, name = section.groups()
            code, source = (functions.setdefault(name, Function(name)) if kind == "text" else None), ""
            info, launch_bounds = (name if kind == "nv.info" else ""), None
        elif line.lstrip().startswith(".section\t"):
            code, info, launch_bounds = None, "", None
        elif info:
            if "EIATTR_" in line:
                wanted = "EIATTR_MAX_THREADS" in line or "EIATTR_REQNTID" in line
                launch_bounds = threads.setdefault(info, []) if wanted else None
            elif launch_bounds is not None and len(launch_bounds) < 3 and ".word" in line:
                launch_bounds.append(int(line.split()[-1], 16))
        elif code is None:
            continue
        elif match := _INSTRUCTION.match(line):
            pending = match.groups(default="")
        elif pending and (match := _SECOND_WORD.match(line)):
            bits = int(match[1], 16) >> 41
            address, predicate, opcode, operands = pending
            code.instructions.append(
                Instruction(
                    address=int(address, 16),
                    predicate=predicate,
                    opcode=opcode,
                    operands=operands,
                    stall=max(bits & 15, 1),  # 0 is issued back to back, which takes its issue cycle
                    waits=bits >> 11 & 63,
                    result_board=bits >> 5 & 7,
                    operand_board=bits >> 8 & 7,
                    source=source,
                )
            )
            pending = None
        elif match := _SOURCE.match(line):
            source = f"{Path(match[1]).name}:{match[2]}"
        elif match := _LABEL.match(line):
            code.labels[match[1]] = len(code.instructions)
    for name, sizes in threads.items():
        if name in functions:
            functions[name].threads = math.prod(sizes)
    return functions
