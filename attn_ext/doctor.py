"""`python -m attn_ext doctor`: every kernel that this machine would use, beside the formula in float64.

Small problems, chosen so that together they launch each kernel that this GPU can be given (and on the CPU
each kind of call); results, gradients and tangents are held against :mod:`attn_ext.reference`. On a Hopper
GPU it is done twice, with the kernels for sm_80 and with those that ATTN_EXT_KERNELS=sm90 chooses.
"""

import contextlib
import os
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch.autograd import forward_ad

from . import _C, reference
from .functional import attention
from .masks import sliding_window
from .plan import MULTIPROCESSORS, launch_plan

# Largest error, relative to the largest value or 1: some roundings of the type; a wrong result is far off.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
TF32_TOLERANCE = 5e-3
BATCH, HEADS, HEADS_KV, QUERIES, KEYS = 2, 4, 2, 150, 200  # some tiles each way, the last ones not whole


class Case(NamedTuple):
    """One problem. What it has besides q, k and v says which kernels it needs."""

    kind: str  # plain, causal, options, broadcast bias, block mask, decode
    dtype: torch.dtype
    head_dim: int
    tf32: bool = False

    def __str__(self) -> str:
        dtype = "tf32" if self.tf32 else str(self.dtype).removeprefix("torch.")
        return f"{dtype} D {self.head_dim}, {self.kind}"


def cases(cuda: bool) -> Iterator[Case]:
    """All of them for a CPU or a GPU."""
    for dtype in (torch.float16, torch.bfloat16):
        for head_dim in (32, 64, 96, 128, 192, 256, 300) if cuda else (64, 300):
            for kind in ("plain", "causal", "options", "broadcast bias", "block mask"):
                yield Case(kind, dtype, head_dim)
            yield Case("decode", dtype, head_dim)
    for dtype, tf32 in (
        (torch.float32, False),
        *(((torch.float32, True),) if cuda else ()),
        (torch.float64, False),
    ):
        for kind in ("plain", "causal", "options", "broadcast bias", "block mask", "decode"):
            yield Case(kind, dtype, 72, tf32)


def problem(case: Case, device: torch.device) -> tuple[dict, dict]:
    """(tensors by name, options of attention())."""
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, case.dtype)

    queries, keys = (2, 2000) if case.kind == "decode" else (QUERIES, KEYS)
    tensors = {
        "q": randn(BATCH, HEADS, queries, case.head_dim),
        "k": randn(BATCH, HEADS_KV, keys, case.head_dim),
        "v": randn(BATCH, HEADS_KV, keys, case.head_dim),
    }
    options = {}
    if case.kind == "causal":
        options = {"causal": True, "key_lengths": torch.tensor([keys, keys - 37], device=device)}
    elif case.kind == "options":
        tensors["bias"] = randn(BATCH, HEADS, queries, keys)
        tensors["alibi_slopes"], tensors["sinks"] = randn(HEADS).abs() / 16, randn(HEADS)
        hidden = torch.rand(BATCH, 1, queries, keys, generator=generator) < 0.2
        options = {"mask": ~hidden.to(device), "softcap": 20.0, "window": (120, 60)}
    elif case.kind == "broadcast bias":
        tensors["bias"] = randn(1, HEADS, 1, keys)
    elif case.kind == "block mask":
        options = {"block_mask": sliding_window(keys, 70, 10, device=device)}
        tensors["q"] = randn(BATCH, HEADS, keys, case.head_dim)
    return tensors, options


def results(function, tensors: dict, options: dict) -> dict[str, torch.Tensor]:
    """Output, LSE, gradients and tangents, by name, in float64; function(q, k, v, ...) -> (out, lse)."""
    leaves = {name: t.detach().requires_grad_() for name, t in tensors.items()}
    out, lse = function(**leaves, **options)
    found = {"out": out, "lse": lse}
    # LSEs of rows that see nothing are -inf for all: they have no part in the loss.
    loss = (out.double() * torch.linspace(-1, 1, out.numel(), device=out.device).view_as(out)).sum()
    loss = loss + lse.double().masked_fill(lse == -torch.inf, 0.0).sin().sum()
    for name, grad in zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True):
        found[f"gradient of {name}"] = grad
    with torch.no_grad(), forward_ad.dual_level():
        duals = {name: forward_ad.make_dual(t.detach(), t.detach().flip(-1)) for name, t in leaves.items()}
        for name, dual in zip(("out", "lse"), function(**duals, **options), strict=True):
            found[f"tangent of {name}"] = forward_ad.unpack_dual(dual).tangent
    return {name: t.detach().double() for name, t in found.items()}


def examine(case: Case, device: torch.device) -> tuple[float, str]:
    """(the largest error over what is allowed, the result that has it). Above 1 something is wrong."""
    tensors, options = problem(case, device)
    with _tf32(case.tf32):
        got = results(lambda **call: attention(**call, return_lse=True), tensors, options)
    truth = results(reference.attention, {name: t.double() for name, t in tensors.items()}, options)
    allowed = TF32_TOLERANCE if case.tf32 else TOLERANCE[case.dtype]
    worst = (0.0, "")
    for name, expected in truth.items():
        if not torch.equal(got[name].isfinite(), expected.isfinite()):
            return float("inf"), name
        finite = expected.isfinite()
        error = (got[name] - expected)[finite].abs().max() / expected[finite].abs().max().clamp_min(1.0)
        worst = max(worst, (error.item() / allowed, name))
    return worst


def kernels(case: Case, device: torch.device, arch: str, multiprocessors: int | None = None) -> list[str]:
    """The CUDA kernels that :func:`examine` launches there."""
    tensors, options = problem(case, device)
    with _tf32(case.tf32):
        call = {**tensors, **options, "arch": arch, "multiprocessors": multiprocessors}
        forward = launch_plan(**call)
        saved = {"out": forward.results["out"], "lse": forward.results["lse_parts"]}
        backward = launch_plan(
            **call, **saved, direction="backward",
            grad_out=saved["out"], grad_lse=forward.results["lse"],
        )  # fmt: skip
        tangents = launch_plan(**call, **saved, direction="jvp", tangents=tensors)
    return [step.kernel for plan in (forward, backward, tangents) for step in plan.launches]


@contextlib.contextmanager
def _tf32(allowed: bool):
    """torch's switch for it, set and given back."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


@contextlib.contextmanager
def _kernels_for(choice: str | None):
    """ATTN_EXT_KERNELS, set and given back; None: as it is."""
    before = os.environ.get("ATTN_EXT_KERNELS")
    if choice is not None:
        os.environ["ATTN_EXT_KERNELS"] = choice
    try:
        yield
    finally:
        if choice is not None:
            os.environ.pop("ATTN_EXT_KERNELS")
            if before is not None:
                os.environ["ATTN_EXT_KERNELS"] = before


def check_device(device: torch.device, choice: str | None = None) -> int:
    """Print a line for each case; how many failed."""
    cuda = device.type == "cuda"
    arch = None
    if cuda:
        major, minor = torch.cuda.get_device_capability(device)
        arch = f"sm_{major}{minor}"
    failures = 0
    with _kernels_for(choice):
        for case in cases(cuda):
            used = f"CPU kernels ({_C.cpu_isa()})"
            try:
                if cuda:  # of an architecture that the planner has no name for, nothing is told
                    known = kernels(case, device, arch) if arch in MULTIPROCESSORS else []
                    used = ", ".join(dict.fromkeys(known))
                excess, where = examine(case, device)
                verdict = "pass" if excess <= 1 else "FAIL"
                told = f"{excess:.2f} of the allowed error, in {where}"
            except RuntimeError as error:  # of the launch, say; all later ones may then fail as well
                verdict, told = "FAIL", str(error).splitlines()[0]
            failures += verdict == "FAIL"
            print(f"{verdict}  {case!s:<36}  {told:<58}  {used}", flush=True)
    return failures


def main() -> int:
    """Check the CPU and every GPU; the exit status."""
    failures = check_device(torch.device("cpu"))
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        capability = torch.cuda.get_device_capability(device)
        print(f"\n{torch.cuda.get_device_name(device)}, compute capability {capability[0]}.{capability[1]}")
        if capability == (9, 0):
            for choice in ("sm80", "sm90"):
                print(f"ATTN_EXT_KERNELS={choice}")
                failures += check_device(device, choice)
        else:
            failures += check_device(device)
    if not torch.cuda.device_count():
        print("\nno GPU is visible: the CUDA kernels were not checked")
    print(f"{failures} failed" if failures else "all passed")
    return 1 if failures else 0
