"""`python -m attn_ext bench`: attention on this machine's CPU, ours beside torch's, in under a minute.

The measuring is that of benchmarks/cpu_bench.py, which has more cases: both sides in one process, sample by
sample in turns, so that a machine that slows down slows both; medians; results compared before anything is
timed. For GPUs there is benchmarks/gpu_check.py.
"""

import functools
import math
import os
import platform
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from . import _C
from .functional import scaled_dot_product_attention

SAMPLE_SECONDS = 0.02  # of calls in a sample: far above the timer's resolution and a thread switch
MIN_ROUNDS = 3
SECONDS = 0.5  # of rounds in a row of the table
HEADS = 8
# Largest difference, relative to the largest value: a few roundings of the type; a wrong result is far off.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


class Row(NamedTuple):
    name: str
    queries: int
    keys: int
    head_dim: int
    causal: bool = False
    backward: bool = False


ROWS = (
    Row("short", 16, 16, 64),
    Row("forward", 512, 512, 64),
    Row("forward, causal", 2048, 2048, 64, causal=True),
    Row("backward", 512, 512, 64, backward=True),
    Row("backward, causal", 2048, 2048, 64, causal=True, backward=True),
    Row("decode", 1, 8192, 128),
)


class Sample(NamedTuple):
    seconds: float  # a call
    limit: float  # what `limit` said around it, or NaN


def measure(
    functions: dict[str, Callable],
    seconds: float,
    clock: Callable[[], float] = time.perf_counter,
    limit: Callable[[], float] = lambda: math.nan,
) -> dict[str, list[Sample]]:
    """Samples of each function by name, one a round.

    A round takes one sample of each function, in an order that flips from round to round. Before each sample
    the function is called once untimed, to find its own code and data in the caches, not its peer's. limit(),
    what the machine could do at that moment, is asked before and after; its mean counts.
    """

    def sample(f: Callable, calls: int) -> float:
        start = clock()
        for _ in range(calls):
            f()
        return (clock() - start) / calls

    calls = {name: math.ceil(SAMPLE_SECONDS / sample(f, 1)) for name, f in functions.items()}
    order, samples = list(functions), {name: [] for name in functions}
    end = clock() + seconds
    while len(samples[order[0]]) < MIN_ROUNDS or clock() < end:
        for name in order:
            before = limit()
            functions[name]()
            taken = sample(functions[name], calls[name])
            samples[name].append(Sample(taken, (before + limit()) / 2))
        order.reverse()
    return samples


def check_agreement(what: str, dtype: torch.dtype, functions: dict[str, Callable]) -> None:
    """RuntimeError if some function's results differ from those of the one called "torch"."""
    results = {name: f() for name, f in functions.items()}
    expected = results.pop("torch")
    for name, got in results.items():
        for a, b in zip(got, expected, strict=True):
            error, scale = (a - b).abs().max().item(), b.abs().max().item()
            if not error <= TOLERANCE[dtype] * scale:
                raise RuntimeError(f"{name} and torch differ by {error:.2g} of {scale:.2g} in: {what}")


def gradient(out: torch.Tensor, leaves: list[torch.Tensor]) -> Callable:
    """The backward of out alone, as often as wanted."""
    grad = torch.linspace(-1, 1, out.numel()).view_as(out).to(out.dtype)  # float16 cannot count the elements
    return functools.partial(torch.autograd.grad, out, leaves, grad, retain_graph=True)


def functions_of(row: Row, dtype: torch.dtype) -> dict[str, Callable]:
    """What a row times, by name."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, HEADS, n, row.head_dim, generator=generator).to(dtype).requires_grad_(row.backward)
        for n in (row.queries, row.keys, row.keys)
    )
    calls = {
        name: functools.partial(f, q, k, v, is_causal=row.causal)
        for name, f in (
            ("torch", F.scaled_dot_product_attention),
            ("attn_ext", scaled_dot_product_attention),
        )
    }
    return {name: gradient(call(), [q, k, v]) for name, call in calls.items()} if row.backward else calls


def main() -> None:
    """Print the table."""
    print(
        f"{platform.machine()} ({_C.cpu_isa()}), {torch.get_num_threads()} threads; "
        f"attn_ext {_C.build_info()['version']}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}"
    )
    if (load := os.getloadavg()[0]) > 1:
        print(f"other programs are running (load {load:.1f}): threads wait for each other, times mean little")
    print(f"1 sample, {HEADS} heads; milliseconds a call, medians; ratio: torch / attn_ext, above 1 is ours")
    print(
        f"\n{'':<18}{'queries':>8}{'keys':>6}{'D':>5}  {'dtype':<9}{'attn_ext':>10}{'torch':>10}{'ratio':>7}"
    )
    for row in ROWS:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            functions, name = functions_of(row, dtype), str(dtype).removeprefix("torch.")
            check_agreement(f"{row.name} {name}", dtype, functions)
            samples = measure(functions, SECONDS)
            ours, theirs = (
                statistics.median(s.seconds for s in samples[side]) for side in ("attn_ext", "torch")
            )
            print(
                f"{row.name:<18}{row.queries:>8}{row.keys:>6}{row.head_dim:>5}  {name:<9}"
                f"{ours * 1e3:>10.3f}{theirs * 1e3:>10.3f}{theirs / ours:>7.2f}",
                flush=True,
            )
