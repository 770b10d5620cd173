"""Cubins of the instantiation files: compiled once for each content, or those in the installed attn_ext."""

import concurrent.futures
import dataclasses
import functools
import hashlib
import importlib.util
import os
import re
import tempfile
from pathlib import Path

from .disassembly import Function, ToolError, disassemble, parse, run_tool
from .gpus import GPU, HOPPER
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


def target(source: Path, gpu: GPU) -> tuple[GPU, str]:
    """(GPU, architecture) that a file is built for: what is for Hopper alone is built for that."""
    return (HOPPER, "sm_90a") if "_sm90_" in source.stem else (gpu, gpu.arch)


def sources(only: str = "") -> list[Path]:
    return [path for path in sorted(INSTANTIATIONS.glob("*.cu")) if re.search(only, path.stem)]


def build(source: Path, arch: str, cache: Path = CACHE, include: Path = ROOT / "csrc") -> Path:
    """The cubin of a source file. Raises ToolError with nvcc's message, or if wgmmas wait for each other."""
    key = content_key(source, arch, include)
    cubin = cache / arch / f"{source.stem}-{key}.cubin"
    if not cubin.exists():
        cubin.parent.mkdir(parents=True, exist_ok=True)
        for old in cubin.parent.glob(f"{source.stem}-{'?' * len(key)}.cubin"):
            old.unlink(missing_ok=True)
        with tempfile.TemporaryDirectory(dir=cubin.parent) as folder:  # another process may build the same
            made = Path(folder) / "made.cubin"
            command = ("-cubin", f"-arch={arch}", *FLAGS, "-I", include, "-o", made, source)
            if waits := re.search(r"\(C75\d\d\).*", run_tool("nvcc", *command).stderr):
                raise ToolError(f"ptxas waits after each wgmma: {waits[0]}")
            made.rename(cubin)
    return cubin


def installed_library() -> Path:
    """The shared object with the CUDA kernels of the attn_ext that Python imports."""
    try:
        found = importlib.util.find_spec("attn_ext._C_cuda")
    except ImportError as error:  # of attn_ext itself, or of torch
        raise ToolError(f"attn_ext cannot be imported: {error}") from error
    if found is None:
        raise ToolError("the attn_ext that is installed was built without CUDA")
    return Path(found.origin)


def extract(library: Path, folder: Path) -> None:
    """Writes every cubin in a shared object to `folder`, as <name of the source file>.<arch>.cubin."""
    run_tool("cuobjdump", "-xelf", "all", library.resolve(), cwd=folder)


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


def resources(cubin: Path) -> dict[str, Resources]:
    """What each kernel takes of a multiprocessor; the launch is not known here."""
    usage = re.compile(r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+)")
    found = usage.findall(run_tool("cuobjdump", "-res-usage", cubin).stdout)
    return {
        name: Resources(
            registers=int(registers),
            stack_bytes=int(stack),
            static_shared_bytes=int(shared),
            threads=0,
            dynamic_shared_bytes=None,
        )
        for name, registers, stack, shared in found
    }


def read(cubin: Path, gpu: GPU, launches: dict[str, Launch]) -> list[Kernel]:
    """Every kernel of a cubin that was built for `gpu`."""
    functions, used = parse(disassemble(cubin)), resources(cubin)
    if functions.keys() != used.keys():
        raise ToolError(f"nvdisasm shows {sorted(functions)}, cuobjdump {sorted(used)}")
    return [
        read_kernel(function, launched(used[name], function, launches.get(name)), gpu)
        for name, function in functions.items()
    ]


def read_source(source: Path, gpu: GPU, launches: dict[str, Launch], extracted: Path | None) -> list[Kernel]:
    """Every kernel of a source file: of its cubin in `extracted`, or compiled where that is None."""
    gpu, arch = target(source, gpu)
    if extracted is None:
        return read(build(source, arch), gpu, launches)
    cubin = extracted / f"{source.stem}.{arch}.cubin"
    if not cubin.exists():
        raise ToolError(f"not in the installed attn_ext for {arch}")
    return read(cubin, gpu, launches)


def launched(resources: Resources, function: Function, launch: Launch | None) -> Resources:
    threads = launch.threads if launch else function.threads
    if threads is None:
        raise ToolError(f"{function.name}: no __launch_bounds__ and no launch plan say its block size")
    dynamic = launch.dynamic_shared_bytes if launch else None
    return dataclasses.replace(resources, threads=threads, dynamic_shared_bytes=dynamic)


def read_all(
    paths: list[Path],
    gpu: GPU,
    launches: dict[str, Launch],
    extracted: Path | None = None,
    jobs: int | None = None,
) -> tuple[list[Kernel], list[str]]:
    """(the kernels of these files, what went wrong with a file), several files at a time."""
    kernels, problems = [], []
    with concurrent.futures.ProcessPoolExecutor(jobs or os.cpu_count()) as pool:
        futures = {path: pool.submit(read_source, path, gpu, launches, extracted) for path in paths}
        for path, future in futures.items():
            try:
                kernels += future.result()
            except ToolError as error:
                first = next((line for line in str(error).splitlines() if "error" in line), str(error))
                problems.append(f"{path.name}: {first}")
    return kernels, problems
