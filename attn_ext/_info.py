"""What was built, what is running, and what this machine offers: the report of `python -m attn_ext`."""

import importlib
from types import ModuleType

import torch

from . import _C


def load_cuda() -> tuple[ModuleType | None, str]:
    """The module of CUDA kernels, or None and a sentence that says why there is none.

    Never raises: without CUDA kernels the CPU ones still work.
    """
    build = _C.build_info()
    if not build["cuda"]:
        return None, f"not built ({build['cuda_detail']})"
    if torch.version.cuda is None:
        return (
            None,
            f"built with CUDA {build['cuda_detail']}, not loaded: torch {torch.__version__} has no CUDA",
        )
    try:
        return importlib.import_module("attn_ext._C_cuda"), ""
    except ImportError as error:
        return None, f"built with CUDA {build['cuda_detail']}, but cannot be loaded: {error}"


def report() -> str:
    """The lines that `python -m attn_ext` prints. Asking for the devices initialises CUDA."""
    build = _C.build_info()
    cuda, devices = _cuda_lines()
    rows = [
        ("attn_ext", build["version"]),
        ("torch", f"{torch.__version__} (built with {build['torch']}, {build['compiler']})"),
        ("CPU", f"{_cpu_isa()}, {torch.get_num_threads()} threads"),
        ("CUDA", cuda),
        *(("device", line) for line in devices),
    ]
    return "\n".join(f"{name:<9} {text}" for name, text in rows)


def _cpu_isa() -> str:
    available = ", ".join(_C.cpu_isas())
    try:
        return f"{_C.cpu_isa()} kernels (this machine runs {available})"
    except RuntimeError as error:  # ATTN_EXT_CPU_ISA names what the machine cannot run
        return f"no kernels ({error})"


def _cuda_lines() -> tuple[str, list[str]]:
    module, problem = load_cuda()
    if module is None:
        return problem, []
    architectures = ", ".join(f"sm_{a}" for a in module.architectures())
    runtime = module.runtime_version()
    found = module.list_devices()
    lines = [_device_line(i, device) for i, device in enumerate(found["devices"])]
    if found["problem"]:
        lines.append(f"none usable: {found['problem']}")
    elif not lines:
        lines.append("none")
    return f"built with CUDA {runtime // 1000}.{runtime % 1000 // 10} for {architectures}", lines


def _device_line(index: int, device: dict) -> str:
    code = device["binary_architecture"]
    runs = f"runs the sm_{code} code" if code else "has no code built for it: add it to TORCH_CUDA_ARCH_LIST"
    memory = device["memory_bytes"] / 2**30
    return f"{index}: {device['name']}, sm_{device['compute_capability']}, {memory:.0f} GiB, {runs}"
