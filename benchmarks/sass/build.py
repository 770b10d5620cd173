"""Cubins of the instantiation files, with what ptxas said of them; built once for each content."""

import concurrent.futures
import dataclasses
import functools
import hashlib
import os
import re
import tempfile
from pathlib import Path

from .disassembly import Function, ToolError, disassemble, parse, run_tool
from .gpus import GPU
from .kernel import Kernel, Resources, read_kernel

ROOT = Path(__file__).resolve().parents[2]
INSTANTIATIONS = ROOT / "csrc" / "cuda" / "instantiations"
CACHE = ROOT / "build" / "sass"
FLAGS = (
    "-std=c++17",
    "-O3",
    "-lineinfo",
)  # as setup.py builds the extension; -lineinfo names conflicts' lines


@dataclasses.dataclass(frozen=True)
class Launch:
    """What the launch planner says a kernel is launched with."""

    threads: int
    dynamic_shared_bytes: int


def sources(only: str = "") -> list[Path]:
    return [path for path in sorted(INSTANTIATIONS.glob("*.cu")) if re.search(only, path.stem)]


def build(source: Path, arch: str, cache: Path = CACHE, include: Path = ROOT / "csrc") -> tuple[Path, str]:
    """The cubin of a source file and the output of `ptxas -v`. Raises ToolError with nvcc's message."""
    key = content_key(source, arch, include)
    cubin = cache / arch / f"{source.stem}-{key}.cubin"
    log = cubin.with_suffix(".log")
    if not log.exists():  # written last
        cubin.parent.mkdir(parents=True, exist_ok=True)
        for old in cubin.parent.glob(f"{source.stem}-{'?' * len(key)}.*"):
            old.unlink(missing_ok=True)
        with tempfile.TemporaryDirectory(dir=cubin.parent) as folder:  # another process may build the same
            made = Path(folder) / "made.cubin"
            options = ("-cubin", f"-arch={arch}", "-Xptxas", "-v", *FLAGS, "-I", include)
            said = run_tool("nvcc", *options, "-o", made, source).stderr
            made.rename(cubin)
            (Path(folder) / "log").write_text(said)
            (Path(folder) / "log").rename(log)
    return cubin, log.read_text()


def content_key(source: Path, arch: str, include: Path) -> str:
    """Of the file, all that it includes from csrc, the flags and the compiler."""
    digest = hashlib.sha256(f"{arch} {FLAGS} {compiler_version()}".encode())
    pending, seen = [source], set()
    while pending:
        path = pending.pop()
        if path in seen or not path.exists():
            continue
        seen.add(path)
        text = path.read_bytes()
        digest.update(text)
        for name in re.findall(rb'^\s*#\s*include\s*"([^"]+)"', text, re.MULTILINE):
            pending += [(folder / name.decode()).resolve() for folder in (path.parent, include)]
    return digest.hexdigest()[:16]


@functools.cache
def compiler_version() -> str:
    return run_tool("nvcc", "--version").stdout


def ptxas_resources(said: str) -> dict[str, Resources]:
    """`ptxas -v` -> what it says of each kernel; the launch is not known here."""
    found = {}
    for part in said.split("Compiling entry function '")[1:]:
        name = part.partition("'")[0]
        properties = part.partition(f"Function properties for {name}\n")[2]
        sizes = re.match(
            r"\s*(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", properties
        )
        used = re.search(r"Used (\d+) registers(.*)", properties)
        if not sizes or not used:
            raise ToolError(f"ptxas said nothing of the kind expected about {name}:\n{part[:400]}")
        stack, stores, loads = map(int, sizes.groups())
        shared = re.search(r"(\d+) bytes smem", used[2])
        found[name] = Resources(
            registers=int(used[1]),
            stack_bytes=stack,
            spill_store_bytes=stores,
            spill_load_bytes=loads,
            static_shared_bytes=int(shared[1]) if shared else 0,
            threads=0,
            dynamic_shared_bytes=None,
        )
    return found


def read(source: Path, gpu: GPU, launches: dict[str, Launch]) -> list[Kernel]:
    """Every kernel of a source file, built for `gpu`."""
    cubin, said = build(source, gpu.arch)
    functions, kernels = parse(disassemble(cubin)), []
    for name, resources in ptxas_resources(said).items():
        resources = launched(resources, functions[name], launches.get(name))
        kernels.append(read_kernel(functions[name], resources, gpu))
    return kernels


def launched(resources: Resources, function: Function, launch: Launch | None) -> Resources:
    threads = launch.threads if launch else function.threads
    if threads is None:
        raise ToolError(f"{function.name}: no __launch_bounds__ and no launch plan say its block size")
    dynamic = launch.dynamic_shared_bytes if launch else None
    return dataclasses.replace(resources, threads=threads, dynamic_shared_bytes=dynamic)


def read_all(
    paths: list[Path], gpu: GPU, launches: dict[str, Launch], jobs: int | None = None
) -> tuple[list[Kernel], list[str]]:
    """(the kernels of these files, what went wrong with a file), several files at a time."""
    kernels, problems = [], []
    with concurrent.futures.ProcessPoolExecutor(jobs or os.cpu_count()) as pool:
        futures = {path: pool.submit(read, path, gpu, launches) for path in paths}
        for path, future in futures.items():
            try:
                kernels += future.result()
            except ToolError as error:
                first = next((line for line in str(error).splitlines() if "error" in line), str(error))
                problems.append(f"{path.name}: {first}")
    return kernels, problems
