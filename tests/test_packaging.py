"""What installs of such libraries break on: isolation, other CUDA or torch versions, effects of an import."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch

import attn_ext

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = Path(attn_ext.__file__).parent
sys.path.insert(0, str(ROOT / "build_backend"))
import attn_ext_build  # noqa: E402
from attn_ext_build import architectures, find_cuda, find_torch, jobs, sources  # noqa: E402


def run_python(code: str, cwd: Path, path: Path = PACKAGE.parent, **env: str) -> subprocess.CompletedProcess:
    """Runs `code` in a new interpreter, away from the source tree, with `path` first on its import path."""
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(path), **env},
        capture_output=True,
        text=True,
        timeout=120,
    )


# The installed library


def test_tests_use_a_compiled_package():
    assert list(PACKAGE.glob("_C.*.so")), f"the tests imported {PACKAGE}, which has no compiled module"


def test_import_initialises_no_cuda_and_survives_fork(tmp_path):
    # Fault: a CUDA call at import breaks forked data loader workers and machines without a driver.
    code = """
import os, sys, torch, attn_ext
assert not torch.cuda.is_initialized()
pid = os.fork()
q = torch.ones(1, 1, 3, 4)
assert torch.equal(attn_ext.attention(q, q, q), q)
if pid == 0:
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
"""
    done = run_python(code, tmp_path, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr


def test_missing_compiled_module_is_loud(tmp_path):
    # Fault: a silent fallback to Python changes speed and rounding without a word.
    shutil.copytree(PACKAGE, tmp_path / "attn_ext", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    done = run_python("import attn_ext", tmp_path, path=tmp_path)
    assert done.returncode != 0
    assert "ImportError" in done.stderr
    assert "pip install ." in done.stderr
    assert "source tree" not in done.stderr.split("It is built")[0]

    # Fault: Python in the repository imports the source tree, not what was installed, and does not say so.
    (tmp_path / "setup.py").touch()
    done = run_python("import attn_ext", tmp_path, path=tmp_path)
    assert f"Python found the source tree in {tmp_path}" in done.stderr


@pytest.mark.skipif(shutil.which("nm") is None, reason="needs nm of binutils")
def test_library_uses_only_the_stable_abi():
    # Fault: "undefined symbol" at import after torch was changed. Stable are the C functions, nothing in C++.
    for library in PACKAGE.glob("_C*.so"):
        listing = subprocess.run(
            ["nm", "-D", "-u", "-C", library], capture_output=True, text=True, check=True
        )
        unstable = re.findall(r"^.*\b(?:c10|at|torch|caffe2)::.*$", listing.stdout, re.MULTILINE)
        assert not unstable, f"{library.name} needs {unstable}"


@pytest.mark.skipif(shutil.which("readelf") is None, reason="needs readelf of binutils")
def test_library_links_nothing_tied_to_a_version():
    for library in PACKAGE.glob("_C*.so"):
        listing = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True)
        needed = re.findall(r"NEEDED.*\[(.+)\]", listing.stdout)
        if library.name.startswith("_C_cuda"):  # for torch's current stream, by the stable C interface
            needed.remove("libtorch_cuda.so")
        tied = [n for n in needed if re.match(r"libc10|libtorch_python|libtorch_cuda|libcudart|libpython", n)]
        assert not tied, f"{library.name} links {tied}"


# Metadata and source distribution


def hook_without_torch(tree: Path, call: str) -> None:
    """Calls a hook of the build backend in `tree`, as a front end would on a machine without torch."""
    code = f"import sys; sys.modules['torch'] = None; import attn_ext_build; attn_ext_build.{call}"
    done = run_python(code, tree, path=tree / "build_backend")
    assert done.returncode == 0, done.stderr


@pytest.fixture
def tree(tmp_path):
    """A copy of the source tree, since setuptools writes into it."""
    leave_out = shutil.ignore_patterns(
        ".git", "build", "dist", "*.so", "*.egg-info", "__pycache__", ".*cache"
    )
    return shutil.copytree(ROOT, tmp_path / "tree", ignore=leave_out)


def test_metadata_needs_no_torch_and_ties_to_no_version(tree, tmp_path):
    hook_without_torch(tree, f"prepare_metadata_for_build_wheel({str(tmp_path)!r})")
    metadata = (tmp_path / "attn_ext-0.1.0.dist-info" / "METADATA").read_text()
    requirements = re.findall(r"^Requires-Dist: (torch\b.*)$", metadata, re.MULTILINE)
    assert requirements == ["torch>=2.10"]
    assert "License-Expression: Apache-2.0" in metadata


def test_sdist_needs_no_torch_and_is_complete(tree, tmp_path):
    hook_without_torch(tree, f"build_sdist({str(tmp_path)!r})")
    with tarfile.open(tmp_path / "attn_ext-0.1.0.tar.gz") as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {"pyproject.toml", "setup.py", "CMakeLists.txt", "README.md", "LICENSE", "csrc/sources.txt"}
    compiled_or_read = {".cpp", ".cu", ".cuh", ".h", ".inl", ".py"}
    for directory in ("attn_ext", "build_backend", "csrc", "tests"):
        files = (p for p in (ROOT / directory).rglob("*") if p.suffix in compiled_or_read)
        wanted |= {str(p.relative_to(ROOT)) for p in files}
    assert wanted - inside == set()


def test_source_list_is_complete():
    listed = [f for files in sources.read(ROOT / "csrc" / "sources.txt").values() for f in files]
    present = [str(p.relative_to(ROOT)) for p in (ROOT / "csrc").rglob("*") if p.suffix in (".cpp", ".cu")]
    assert sorted(listed) == sorted(present)


# Finding torch

# What pip puts on PYTHONPATH under build isolation: it drops the environment's packages from sys.path.
ISOLATION = """
import site, sys, sysconfig
hidden = {*site.getsitepackages(), site.getusersitepackages(), sysconfig.get_path("purelib")}
sys.path[:] = [p for p in sys.path if p not in hidden]
"""


def test_backend_finds_torch_behind_build_isolation(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(ISOLATION)
    for name in ("setuptools", "_distutils_hack"):  # the build requirements that pip fetches
        (tmp_path / name).symlink_to(Path(importlib.util.find_spec(name).origin).parent)
    code = f"""
import sys
sys.path.append({str(ROOT / "build_backend")!r})
from attn_ext_build import find_torch
assert find_torch.importable() is None, "the isolation of this test hides nothing"
torch, path = find_torch.of_environment()
print(torch.version)
before = list(sys.path)
sys.path.extend(p for p in path if p not in sys.path)
assert sys.path[: len(before)] == before
assert find_torch.importable() == torch
"""
    done = run_python(code, tmp_path, path=tmp_path, PYTHONNOUSERSITE="1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == torch.__version__


def test_torch_is_a_requirement_only_where_there_is_none(monkeypatch):
    monkeypatch.setattr(find_torch, "importable", lambda: None)
    assert attn_ext_build._torch_requirement() == []
    monkeypatch.setattr(find_torch, "of_environment", lambda: (None, []))
    assert attn_ext_build._torch_requirement() == ["torch>=2.10"]


@pytest.mark.parametrize(
    ("version", "supported"), [("2.9.1+cu128", False), ("2.10.0", True), ("3.0.0a0", True)]
)
def test_old_torch_is_refused_in_one_line(tmp_path, version, supported):
    (tmp_path / "version.py").write_text(f"__version__ = {version!r}\ncuda = None\n")
    found = find_torch._read(tmp_path)
    if supported:
        find_torch.require_supported(found)
    else:
        with pytest.raises(
            SystemExit, match=r"needs torch>=2\.10, but .* is torch 2\.9\.1\+cu128: run +pip install"
        ):
            find_torch.require_supported(found)


# Finding CUDA


def make_toolkit(home: Path, version: str) -> Path:
    """A toolkit that answers as the real one does; returns its nvcc."""
    for name in ("bin", "include", "lib64"):
        (home / name).mkdir(parents=True)
    (home / "include" / "cuda_runtime_api.h").touch()
    (home / "lib64" / "libcudart_static.a").touch()
    return make_script(
        home / "bin" / "nvcc",
        f'[ "$1" = --version ] && echo "Cuda compilation tools, release {version}, V{version}.1" && exit\n'
        f'echo "#\\$ TOP={home}/bin/.." >&2\n'
        f'echo "#\\$ LIBRARIES=  \\"-L{home}/bin/../lib64\\"" >&2\n',
    )


def make_script(path: Path, body: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}")
    path.chmod(0o755)
    return path


TORCH_CUDA = find_torch.Torch("2.14.1+cu130", "13.0", None, Path())
TORCH_CPU = find_torch.Torch("2.14.1+cpu", None, None, Path())


@pytest.fixture(autouse=True)
def no_default_toolkit(monkeypatch, tmp_path):
    monkeypatch.setattr(find_cuda, "DEFAULT_HOME", tmp_path / "usr_local_cuda")


def test_nvcc_on_path_may_be_a_wrapper_or_a_link(tmp_path):
    # Fault: the toolkit's root taken as the directory above the nvcc on PATH.
    nvcc = make_toolkit(tmp_path / "cuda", "13.0")
    wrapper = make_script(tmp_path / "wrapped" / "nvcc", f'exec {nvcc} "$@"\n')
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "nvcc").symlink_to(wrapper)
    for directory in ("wrapped", "linked"):
        env = {"PATH": f"{tmp_path / directory}:{os.defpath}"}
        toolkit, _ = find_cuda.choose(TORCH_CUDA, env, [])
        assert toolkit.home == tmp_path / "cuda"
        assert toolkit.version == (13, 0)
        assert toolkit.library_dirs == [str(tmp_path / "cuda" / "lib64")]


def test_order_of_the_places_for_nvcc(tmp_path, monkeypatch):
    homes = {name: tmp_path / name for name in ("cuda_home", "on_path", "usr_local_cuda")}
    homes["wheel"] = tmp_path / "site-packages" / "nvidia" / "cu13"
    for home in homes.values():
        make_toolkit(home, "13.0")
    env = {"CUDA_HOME": str(homes["cuda_home"]), "PATH": f"{homes['on_path'] / 'bin'}:{os.defpath}"}
    for name, home in homes.items():
        toolkit, _ = find_cuda.choose(TORCH_CUDA, env, [str(tmp_path / "site-packages")])
        assert toolkit.home == home, name
        shutil.rmtree(home)


def test_other_major_version_is_refused_and_other_minor_is_not(tmp_path):
    # Fault: nvcc 12.x refused for torch 12.y although compatible, or 12 linked into 13.
    for version, found in [("12.8", False), ("13.2", True)]:
        make_toolkit(tmp_path / version, version)
        toolkit, reason = find_cuda.choose(TORCH_CUDA, {"CUDA_HOME": str(tmp_path / version)}, [])
        assert (toolkit is not None) == found
        assert version in reason
        assert "13" in reason


def test_a_matching_nvcc_behind_a_wrong_one_is_used(tmp_path):
    make_toolkit(tmp_path / "old", "11.8")
    make_toolkit(tmp_path / "usr_local_cuda", "13.0")
    toolkit, _ = find_cuda.choose(TORCH_CUDA, {"PATH": f"{tmp_path / 'old' / 'bin'}:{os.defpath}"}, [])
    assert toolkit.home == tmp_path / "usr_local_cuda"


def test_nvcc_that_cannot_compile_means_cpu_only(tmp_path):
    # Fault: the build dies on a toolkit that is not complete or that refuses the host compiler.
    complaint = "nvcc fatal   : Could not open cicc"
    body = f'[ "$1" = --version ] && echo "release 13.0, V13.0.1" && exit\necho "{complaint}" >&2\nexit 1\n'
    make_script(tmp_path / "bin" / "nvcc", body)
    toolkit, reason = find_cuda.choose(TORCH_CUDA, {"CUDA_HOME": str(tmp_path)}, [])
    assert toolkit is None
    assert complaint in reason


@pytest.mark.parametrize(
    ("torch_found", "why"), [(TORCH_CPU, "is built without CUDA"), (TORCH_CUDA, "no nvcc in")]
)
def test_cpu_only_says_why_and_forced_cuda_fails_in_one_line(torch_found, why, tmp_path):
    env = {"PATH": str(tmp_path)}
    toolkit, reason = find_cuda.choose(torch_found, env, [])
    assert toolkit is None
    assert why in reason
    with pytest.raises(SystemExit, match=f"ATTN_EXT_CUDA=1, but .*{why}") as failure:
        find_cuda.choose(torch_found, {**env, "ATTN_EXT_CUDA": "1"}, [])
    assert "\n" not in str(failure.value)


def test_cuda_can_be_refused(tmp_path):
    make_toolkit(tmp_path / "cuda", "13.0")
    env = {"CUDA_HOME": str(tmp_path / "cuda"), "ATTN_EXT_CUDA": "0"}
    assert find_cuda.choose(TORCH_CUDA, env, []) == (None, "ATTN_EXT_CUDA=0")
    with pytest.raises(SystemExit, match="must be 0, 1 or unset, not 'yes'"):
        find_cuda.choose(TORCH_CUDA, {"ATTN_EXT_CUDA": "yes"}, [])


# Jobs


@pytest.mark.parametrize(
    ("wish", "most_files", "hopper"),
    [
        (architectures.DEFAULT, "8.0;9.0+PTX", True),
        ("9.0a", "9.0", True),
        ("9.0 9.0a", "9.0", True),
        ("8.0 8.6;9.0", "8.0;8.6;9.0", False),
        ("Hopper;10.0a", "Hopper;10.0a", False),
    ],
)
def test_only_the_kernels_for_hopper_are_compiled_for_its_special_features(wish, most_files, hopper):
    assert architectures.split(wish) == (most_files, hopper)


def test_default_jobs_are_bounded_by_memory_and_cores(monkeypatch):
    # Fault: one compiler a core eats all memory.
    cores = len(os.sched_getaffinity(0))
    for gib, expected in [(0.5, 1), (1.5, 1), (1000, cores)]:
        monkeypatch.setattr(jobs, "available_memory", lambda gib=gib: int(gib * jobs.GIB))
        assert jobs.default_jobs() == expected


@pytest.mark.parametrize("asked", [None, "3"])
def test_jobs_that_are_asked_for_are_taken_and_a_missing_ninja_is_told(tree, tmp_path, asked):
    # Faults: MAX_JOBS overwritten; without ninja the build fails, or takes an hour and does not say why.
    code = """
import os, runpy, sys
sys.modules["ninja"] = None
sys.argv = ["setup.py", "build_ext", "--help"]
try:
    runpy.run_path("setup.py", run_name="__main__")
except SystemExit:
    pass
print("jobs:", os.environ["MAX_JOBS"])
"""
    done = run_python(code, tree, PATH=str(tmp_path), ATTN_EXT_CUDA="0", MAX_JOBS=asked or "")
    assert done.returncode == 0, done.stderr
    taken = int(re.search(r"jobs: (\d+)", done.stdout).group(1))
    assert taken == int(asked) if asked else 1 <= taken <= len(os.sched_getaffinity(0))
    assert "ninja is not installed: compiling one file at a time" in done.stdout + done.stderr
