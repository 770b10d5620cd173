"""nvcc for the tests: found as the build finds it, and the PTX it emits kept on disk."""

import contextlib
import fcntl
import functools
import hashlib
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CSRC = (ROOT / "csrc").resolve()
FLAGS = ("-ptx", "-std=c++17")

sys.path.insert(0, str(ROOT / "build_backend"))
from attn_ext_build import find_cuda  # noqa: E402


@functools.cache
def compiler():
    """(path of the first nvcc that answers, its version as it tells it) or (None, why)."""
    silent = []
    for nvcc in find_cuda.candidates(os.environ, sys.path):
        try:
            done = subprocess.run([nvcc, "--version"], capture_output=True, text=True, timeout=60)
        except (OSError, subprocess.TimeoutExpired) as error:
            silent.append(f"{nvcc} cannot be run ({error})")
            continue
        if done.returncode == 0 and "release" in done.stdout:
            return nvcc, done.stdout
        silent.append(f"{nvcc} does not answer as nvcc does")
    return None, "; ".join(silent) or "no nvcc in CUDA_HOME, on PATH, in /usr/local/cuda or as a wheel"


needed = pytest.mark.skipif(compiler()[0] is None, reason=f"needs nvcc: {compiler()[1]}")


def ptx_of_text(source, arch="sm_80", flags=()):
    """PTX of CUDA source text."""
    return _emit(_hash(source), source, arch, flags)


def ptx_of_file(path, arch="sm_80", flags=()):
    """PTX of a .cu file of csrc/ as the build compiles it."""
    text = "".join(f"{p.relative_to(CSRC)}\n{p.read_text()}" for p in included(path))
    return _emit(_hash(text), path, arch, ("-I", str(CSRC), *flags))


def ptxas_says(text, arch):
    """What the assembler prints about PTX."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(text)
        command = [compiler()[0], "-cubin", f"-arch={arch}", "-o", source.with_suffix(".cubin"), source]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return done.stdout + done.stderr


def output_of(name, directory, *sources):
    """What tests/cpp/<name>.cpp prints: host code, with these files of csrc/ and without CUDA's runtime."""
    program = directory / name
    files = [ROOT / "tests" / "cpp" / f"{name}.cpp", *(CSRC / source for source in sources)]
    options = ("-x", "c++", "-std=c++17", "-cudart", "none", "-I", CSRC)
    command = [compiler()[0], *options, "-o", program, *files]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    return subprocess.check_output(program, text=True, timeout=60)


def included(path):
    """The file and every file of csrc/ that it includes, directly or not."""
    found, todo = {}, [Path(path).resolve()]
    while todo:
        file = todo.pop()
        if file not in found:
            found[file] = None
            for name in re.findall(r'^\s*#\s*include\s+"([^"]+)"', file.read_text(), re.MULTILINE):
                todo += [p.resolve() for p in (file.parent / name, CSRC / name) if p.exists()][:1]
    return sorted(found)


def cache_directory():
    """A directory for PTX that is this user's own."""
    path = Path(tempfile.gettempdir(), f"attn_ext-ptx-{os.getuid()}")
    path.mkdir(mode=0o700, exist_ok=True)
    if path.stat().st_uid != os.getuid():
        raise PermissionError(f"{path} belongs to somebody else")
    return path


@contextlib.contextmanager
def locked(path):
    """Holds the lock file `path`: pytest-xdist runs several processes."""
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _hash(text):
    return hashlib.sha256(text.encode()).hexdigest()


def _emit(key, source, arch, flags):
    nvcc, version = compiler()
    if nvcc is None:
        raise FileNotFoundError(version)
    name = _hash(f"{key} {version} {arch} {FLAGS} {flags}")[:24]
    kept = cache_directory() / f"{name}.ptx"
    with locked(kept.with_suffix(".lock")):
        if not kept.exists():
            new = kept.with_suffix(".new")
            if isinstance(source, str):
                new.with_suffix(".cu").write_text(source)
                source = new.with_suffix(".cu")
            command = [nvcc, *FLAGS, f"-arch={arch}", *flags, "-o", new, source]
            done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
            if done.returncode != 0:
                raise RuntimeError(f"{' '.join(map(str, command))}\n{done.stderr}")
            new.rename(kept)
    return kept.read_text()
