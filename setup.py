"""Builds attn_ext._C (ops and CPU kernels) and, where CUDA can be built, attn_ext._C_cuda.

Environment: ATTN_EXT_CUDA, CUDA_HOME, TORCH_CUDA_ARCH_LIST, MAX_JOBS, CXX (see CONTRIBUTING.md).
Everything that is not about compiling is in pyproject.toml.
"""

import os
import re
import shutil
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build import build

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "build_backend"))
from attn_ext_build import architectures, find_cuda, find_torch, jobs, sources  # noqa: E402

COMMANDS_THAT_COMPILE = {"build", "build_ext", "bdist_wheel", "develop", "editable_wheel", "install"}
SOURCES = sources.read(ROOT / "csrc" / "sources.txt")
# The oldest libtorch that the binary runs under: 2.10, one byte a number from the top.
TORCH_TARGET_VERSION = "0x020a000000000000"

# -fno-math-errno and -ffp-contract=fast allow vector square roots and fused multiply-add; unlike -ffast-math
# they leave NaN and infinity alone. -g0: Python's own flags often hold -g, for a library ten times as large.
CXX_FLAGS = [
    *("-std=c++17", "-O3", "-g0", "-ffp-contract=fast", "-fno-math-errno", "-fvisibility=hidden"),
    # g++ 12 and 13 warn of their own AVX-512 header, where "undefined" is meant (GCC bug 105593).
    *("-Wall", "-Wextra", "-Wno-maybe-uninitialized"),
]
NVCC_FLAGS = ["-std=c++17", "-O3", "-lineinfo", "-Xcompiler", "-fvisibility=hidden"]


def say(text: str) -> None:
    print(f"attn_ext: {text}", file=sys.stderr, flush=True)


def macro(name: str, value: str) -> tuple[str, str]:
    # It passes through ninja, a shell and the preprocessor, each with quoting of its own.
    return name, '"' + re.sub(r"[^\w .,:;()/+=-]", " ", value) + '"'


def extensions(torch: find_torch.Torch, toolkit: find_cuda.Toolkit | None, reason: str) -> list[Extension]:
    include_dirs = [str(ROOT / "csrc")]
    # torch's headers (pybind11's are among them) as system headers: their warnings are not ours.
    cxx_flags = [*CXX_FLAGS, "-isystem", str(torch.directory / "include")]
    headers = [
        str(p.relative_to(ROOT))
        for p in sorted((ROOT / "csrc").rglob("*"))
        if p.suffix in (".h", ".inl", ".cuh")
    ]
    cpu = Extension(
        "attn_ext._C",
        SOURCES["ops"] + SOURCES["python"] + SOURCES["kernels"],
        include_dirs=include_dirs,
        depends=headers,
        language="c++",
        library_dirs=[str(torch.directory / "lib")],
        # Not c10 and not torch_python: no symbol of theirs is stable across versions of torch.
        libraries=["torch", "torch_cpu"],
        define_macros=[
            ("TORCH_TARGET_VERSION", TORCH_TARGET_VERSION),
            macro("ATTN_EXT_BUILD_TORCH_VERSION", torch.version),
            macro("ATTN_EXT_BUILD_CUDA", ".".join(map(str, toolkit.version)) if toolkit else reason),
            ("ATTN_EXT_WITH_CUDA", "1" if toolkit else "0"),
        ],
        extra_compile_args={"cxx": cxx_flags},
    )
    if toolkit is None:
        return [cpu]
    cuda = Extension(
        "attn_ext._C_cuda",
        SOURCES["cuda"] + SOURCES["cuda_python"],
        include_dirs=[*include_dirs, *toolkit.include_dirs],
        depends=headers,
        language="c++",
        library_dirs=[*toolkit.library_dirs, str(torch.directory / "lib")],
        # cudart is static: torch may ship another one or none. torch_cuda gives the current stream.
        libraries=["cudart_static", "rt", "pthread", "dl", "torch_cuda"],
        extra_compile_args={"cxx": cxx_flags, "nvcc": NVCC_FLAGS},
    )
    return [cpu, cuda]


def compiling() -> dict:
    """The arguments of setup() for a command that compiles."""
    found = find_torch.importable()
    if found is None:
        raise SystemExit(
            "attn_ext is built against torch, and there is none: run"
            f"  pip install '{find_torch.REQUIREMENT}'  first, or leave out --no-build-isolation"
        )
    find_torch.require_supported(found)
    toolkit, reason = find_cuda.choose(found, os.environ, sys.path)
    kinds = f"CPU and {reason}" if toolkit else f"CPU only: {reason}"
    say(f"building against torch {found.version} for {kinds}")
    if toolkit:
        os.environ["CUDA_HOME"] = str(toolkit.home)  # torch.utils.cpp_extension reads it when imported
    if not os.environ.get("MAX_JOBS"):
        os.environ["MAX_JOBS"] = str(jobs.default_jobs())
    try:  # the ninja wheel works in an environment that is not activated, too
        import ninja

        os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", os.defpath), ninja.BIN_DIR])
    except ImportError:
        pass

    import torch.utils.cpp_extension as cpp_extension
    from torch.cuda import device_count, get_device_capability

    sm_90a = False
    if toolkit:
        wish = os.environ.get("TORCH_CUDA_ARCH_LIST", "")
        if wish in ("", "native") and device_count() > 0:  # torch takes those of the visible GPUs
            sm_90a = any(get_device_capability(n) == (9, 0) for n in range(device_count()))
        else:
            wish, sm_90a = architectures.split(wish or architectures.DEFAULT)
            os.environ["TORCH_CUDA_ARCH_LIST"] = wish
        say(f"the kernels for Hopper (sm_90a) are {'' if sm_90a else 'not '}built")
    if not cpp_extension.is_ninja_available():
        say("ninja is not installed: compiling one file at a time")

    class Build(build):
        def run(self):
            # What an earlier build left (a module since removed, unwanted CUDA) must not enter the wheel.
            shutil.rmtree(self.build_lib, ignore_errors=True)
            super().run()

    class BuildExtension(cpp_extension.BuildExtension):
        def build_extensions(self):
            for extension in self.extensions:
                extension.define_macros.append(macro("ATTN_EXT_VERSION", self.distribution.get_version()))
            super().build_extensions()

        def build_extension(self, extension):
            if sm_90a and extension.name == "attn_ext._C_cuda":
                flags = dict(extension.extra_compile_args)
                flags["nvcc"] = [
                    *flags["nvcc"],
                    "-gencode=arch=compute_90a,code=sm_90a",
                ]  # instead of torch's
                extension.extra_objects += self.compiler.compile(
                    SOURCES["cuda_sm90a"],
                    output_dir=os.path.join(self.build_temp, "sm_90a"),
                    include_dirs=extension.include_dirs,
                    macros=extension.define_macros,
                    extra_postargs=flags,
                    depends=extension.depends,
                )
            super().build_extension(extension)

    return {
        "ext_modules": extensions(found, toolkit, reason),
        "cmdclass": {"build": Build, "build_ext": BuildExtension},
    }


if COMMANDS_THAT_COMPILE & set(sys.argv):
    setup(**compiling())
else:  # metadata, sdist: an extension without sources tells that the wheel is one of a platform
    setup(ext_modules=[Extension("attn_ext._C", [])])
