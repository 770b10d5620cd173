"""Which CUDA toolkit builds attn_ext._C_cuda, or why none does."""

import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from .find_torch import Torch

DEFAULT_HOME = Path("/usr/local/cuda")


class Toolkit(NamedTuple):
    home: Path  # bin/nvcc is the compiler itself, not a wrapper
    version: tuple[int, int]
    include_dirs: list[str]
    library_dirs: list[str]  # one of them has libcudart_static.a


class Unusable(Exception):
    """Why an nvcc cannot be used, as part of a sentence."""


def choose(torch: Torch, env: Mapping[str, str], site_dirs: Sequence[str]) -> tuple[Toolkit | None, str]:
    """The toolkit to build with, or None, and the reason in one line.

    ATTN_EXT_CUDA=0 builds for the CPU only, ATTN_EXT_CUDA=1 ends the build where CUDA cannot be built.
    """
    wish = env.get("ATTN_EXT_CUDA", "")
    if wish not in ("", "0", "1"):
        raise SystemExit(f"attn_ext: ATTN_EXT_CUDA must be 0, 1 or unset, not {wish!r}")
    if wish == "0":
        return None, "ATTN_EXT_CUDA=0"
    toolkit, reason = find(torch, env, site_dirs)
    if wish == "1" and toolkit is None:
        raise SystemExit(f"attn_ext: ATTN_EXT_CUDA=1, but {reason}")
    return toolkit, reason


def find(torch: Torch, env: Mapping[str, str], site_dirs: Sequence[str]) -> tuple[Toolkit | None, str]:
    """The first nvcc whose CUDA major version is torch's: CUDA is compatible within a major version."""
    if torch.cuda is None:
        return None, f"torch {torch.version} is built without CUDA" + (" (for ROCm)" if torch.hip else "")
    wanted = tuple(map(int, torch.cuda.split(".")[:2]))
    rejected = []
    for nvcc in candidates(env, site_dirs):
        try:
            toolkit = inspect(nvcc)
        except Unusable as reason:
            rejected.append(f"{nvcc} {reason}")
            continue
        number = ".".join(map(str, toolkit.version))
        if toolkit.version[0] != wanted[0]:
            rejected.append(f"{nvcc} is CUDA {number}")
            continue
        found = f"CUDA {number} in {toolkit.home}"
        if toolkit.version != wanted:
            found += f" (torch has {torch.cuda}; minor versions may differ)"
        return toolkit, found
    searched = "; ".join(rejected) or "no nvcc in CUDA_HOME, on PATH, in /usr/local/cuda or as a wheel"
    return None, f"torch {torch.version} needs an nvcc of CUDA {wanted[0]}: {searched}"


def candidates(env: Mapping[str, str], site_dirs: Sequence[str]) -> Iterator[Path]:
    """Every nvcc there is: CUDA_HOME, CUDA_PATH, PATH, /usr/local/cuda, then the nvidia-cuda-nvcc wheel."""
    places = [Path(env[name]) / "bin" / "nvcc" for name in ("CUDA_HOME", "CUDA_PATH") if env.get(name)]
    on_path = shutil.which("nvcc", path=env.get("PATH", ""))
    if on_path:
        places.append(Path(on_path))
    places.append(DEFAULT_HOME / "bin" / "nvcc")
    for site in site_dirs:  # nvidia/cu13/bin/nvcc; before CUDA 13 nvidia/cuda_nvcc/bin/nvcc
        places += sorted(Path(site).glob("nvidia/cu*/bin/nvcc"))
    seen = set()
    for place in places:
        if place.exists() and place.resolve() not in seen:
            seen.add(place.resolve())
            yield place


def inspect(nvcc: Path) -> Toolkit:
    """The toolkit behind `nvcc`, as nvcc itself tells: it may be a wrapper script or a link to one.

    A kernel is compiled on the way, which shows a toolkit that is not complete (nvcc's wheel without those it
    needs) or refuses the host compiler.
    """
    with tempfile.TemporaryDirectory() as directory:
        source = Path(directory, "probe.cu")
        source.write_text("__global__ void probe() {}\n")
        version = _output(nvcc, "--version")
        # -v prints what nvcc.profile sets:  #$ TOP=...  #$ INCLUDES="-I..."  #$ LIBRARIES="-L..."
        log = _output(nvcc, "-v", "-c", str(source), "-o", str(source.with_suffix(".o")))
    release = re.search(r"release (\d+)\.(\d+)", version)
    settings = dict(re.findall(r"^#\$ (\w+)=(.*)$", log, re.MULTILINE))
    if not release or "TOP" not in settings:
        raise Unusable("does not answer as nvcc does")
    home = Path(settings["TOP"]).resolve()
    if not (home / "bin" / "nvcc").exists():
        raise Unusable(f"names {home} as its toolkit, where there is no bin/nvcc")
    include_dirs = [*_directories("-I", settings.get("INCLUDES", "")), str(home / "include")]
    library_dirs = [
        *_directories("-L", settings.get("LIBRARIES", "")),
        str(home / "lib64"),
        str(home / "lib"),
    ]
    include_dirs = [d for d in include_dirs if Path(d, "cuda_runtime_api.h").exists()][:1]
    library_dirs = [d for d in library_dirs if Path(d, "libcudart_static.a").exists()][:1]
    if not include_dirs or not library_dirs:
        raise Unusable("has no cuda_runtime_api.h or no libcudart_static.a beside it")
    return Toolkit(home, (int(release[1]), int(release[2])), include_dirs, library_dirs)


def _directories(flag: str, words: str) -> list[str]:
    return [os.path.realpath(w[len(flag) :]) for w in shlex.split(words) if w.startswith(flag)]


def _output(nvcc: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(
            [str(nvcc), *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unusable(f"cannot be run ({error})") from error
    if done.returncode != 0:
        # nvcc -v prints its plan as lines of "#$ ..."; what is left are complaints, the cause first.
        complaints = [line.strip() for line in done.stderr.splitlines() if not line.startswith("#")]
        raise Unusable("fails: " + next(filter(None, complaints), f"exit status {done.returncode}"))
    return done.stdout + done.stderr
