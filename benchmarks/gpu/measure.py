"""The measuring process of gpu_check. How it measures is said at the top of gpu_check.py."""

import functools
import math
import os
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import attn_ext

from .cases import BACKENDS, OURS, PROVIDERS, Case, best_ratio

MATH_PAIRS = 2048**2  # torch's unfused path holds (B, H, Nq, Nk): with 16k x 16k tens of GB
SAMPLE_SECONDS = 0.1  # of measuring, for each provider and case
SAMPLES = (5, 50)
ROUNDS = 3  # of turns between the providers
# Largest difference from torch's, relative to the largest value: a few roundings of the type.
TOLERANCE = {"float16": 1e-2, "bfloat16": 5e-2, "float32": 1e-4, "tf32": 1e-2}


def measure(case: Case, device: str) -> dict:
    """Milliseconds of every provider that takes the case, why others do not, and what differs."""
    torch.set_float32_matmul_precision("high" if case.section == "tf32" else "highest")
    calls, results, skipped = {}, {}, {}
    for name in PROVIDERS:
        if name == "math" and case.queries * case.keys > MATH_PAIRS:
            skipped[name] = "too long for a path that holds the Nq x Nk matrix"
            continue
        if name == "sm90" and not has_hopper_kernels(case, device):
            skipped[name] = "for half types on Hopper, not for decoding"
            continue
        try:
            call = build(case, name, device)
            results[name] = call()
            calls[name] = call
        except (RuntimeError, ValueError) as error:  # running out of memory is a RuntimeError
            if "CUDA error" in str(error):
                raise  # every later call would fail too: the watching process starts a new one
            skipped[name] = str(error).strip().partition("\n")[0][:200]
    if "attn_ext" in skipped:
        return {"failed": f"attn_ext: {skipped['attn_ext']}"}
    wrong = differences(case, results)
    results.clear()
    times = sample(calls, device)
    milliseconds = {name: statistics.median(values) for name, values in times.items()}
    return {"milliseconds": milliseconds, "skipped": skipped, "wrong": wrong, **best_ratio(milliseconds)}


def has_hopper_kernels(case: Case, device: str) -> bool:
    return (
        case.dtype != "float32"
        and case.section != "decode"
        and device != "cpu"
        and torch.cuda.get_device_capability(device) == (9, 0)
    )


def build(case: Case, provider: str, device: str) -> Callable[[], tuple[torch.Tensor, ...]]:
    """What to time; returns (out,) or (dq, dk, dv). Every provider gets the same numbers."""
    generator = torch.Generator(device).manual_seed(0)

    def randn(heads: int, length: int) -> torch.Tensor:
        shape, dtype = (case.batch, heads, length, case.head_dim), getattr(torch, case.dtype)
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    q, k, v = (randn(*size) for size in ((case.heads, case.queries), *[(case.kv_heads, case.keys)] * 2))

    def forward() -> torch.Tensor:
        if provider in OURS:
            os.environ["ATTN_EXT_KERNELS"] = OURS[provider]
            return attn_ext.attention(q, k, v, causal=case.causal)
        with sdpa_kernel([getattr(SDPBackend, BACKENDS[provider])]):
            grouped = case.heads != case.kv_heads
            return F.scaled_dot_product_attention(q, k, v, is_causal=case.causal, enable_gqa=grouped)

    if case.direction == "forward":
        return lambda: (forward(),)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    grad, out = randn(case.heads, case.queries), forward()

    def backward() -> tuple[torch.Tensor, ...]:
        if provider in OURS:
            os.environ["ATTN_EXT_KERNELS"] = OURS[provider]
        return torch.autograd.grad(out, leaves, grad, retain_graph=True)

    return backward


def differences(case: Case, results: dict[str, tuple[torch.Tensor, ...]]) -> str:
    """In which tensors ours is further from another's than rounding explains, in words."""
    names = ("out",) if case.direction == "forward" else ("dq", "dk", "dv")
    ours, found = results["attn_ext"], []
    tolerance = TOLERANCE["tf32" if case.section == "tf32" else case.dtype]
    for provider, theirs in results.items():
        for name, a, b in zip(names, ours, theirs, strict=True):
            error, largest = (a.float() - b.float()).abs().max().item(), b.abs().max().item()
            if not error <= tolerance * largest:  # so that NaN counts
                found.append(f"{name} is {error:.2g} off {provider}'s, whose largest value is {largest:.2g}")
    return "; ".join(found)


def sample(calls: dict[str, Callable], device: str) -> dict[str, list[float]]:
    """Milliseconds of single calls by provider."""
    clock = time_on_cpu  # for the tests of this file
    if device != "cpu":
        l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        clock = functools.partial(time_on_gpu, torch.empty(2 * l2_bytes, dtype=torch.uint8, device=device))
    fewest, most = SAMPLES
    counts = {}
    for name, call in calls.items():
        wanted = SAMPLE_SECONDS * 1e3 / clock(call, 1)[0]
        counts[name] = math.ceil(min(max(wanted, fewest), most) / ROUNDS)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            times[name] += clock(call, counts[name])
    return times


def time_on_gpu(flush: torch.Tensor, call: Callable, count: int) -> list[float]:
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
    for start, end in events:
        flush.zero_()
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in events]


def time_on_cpu(call: Callable, count: int) -> list[float]:
    times = []
    for _ in range(count):
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e3)
    return times
