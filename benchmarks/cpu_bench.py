"""Times attention on the CPU: attn_ext and torch's scaled_dot_product_attention, side by side in one process.

    python benchmarks/cpu_bench.py --threads 2                every case (about 20 minutes)
    python benchmarks/cpu_bench.py --quick --dtype float32    a first impression in seconds
    python benchmarks/cpu_bench.py --isa avx2                 both sides held to AVX2
    python benchmarks/cpu_bench.py --only 'N1024 .*backward'  the cases whose name matches
    python benchmarks/cpu_bench.py --json times.json          for cpu_report.py: tables and pictures

How it measures:

- Interleaved. A round takes one sample of each function, in an order that flips from round to round, so that
  a machine that slows down for seconds slows both. Before each sample the function is called once untimed: it
  then finds its own code and data in the caches, not its peer's.
- A sample is as many calls as take about 20 ms; a case has rounds for --seconds, at least 3. Medians count.
- The ratio, torch's median time over ours, is what to read: times move with the machine's load and frequency,
  which act on both. Above 1, attn_ext is faster. "quartiles" are those of the ratio over the rounds.
- Around each sample a loop of nothing but multiply-adds runs on as many threads (for decoding: a plain read
  of as much memory), see cpu_limits.py. "%" is a sample's rate over that limit, its median over the rounds.
  --no-limit leaves it out, and with it the need for g++; so do machines without AVX2.
- Two threads that wait for each other measure the scheduler once other programs run: then use --threads 1
  --clock cpu, which counts the time that this process was running.
- Results are compared before they are timed, so that nothing wrong is called fast.

"forward" calls the function on tensors without gradient. "training" is that call on tensors that want one: it
includes building the graph. "backward" is the gradient of that call for q, k, v and bias, without the call.
A forward counts 4 D operations for each visible (query, key) pair of a head, a backward 10 D: five products.
What a mask hides is counted, what causal=True or a window hides is not. A decode step, one query for 8192
keys, is judged by the bytes of K and V; "decode8" has 8 heads, "decode32" 32, "gqa" 32 that share 8 KV heads.
"window" sees 256 keys back; torch gets it as a mask, which is all it offers.
"module" and "weights" are MultiHeadAttention and torch.nn.MultiheadAttention in self-attention on a short
sequence, without and with the weights that they return by default: forward in eval mode without gradients,
where torch has a path of its own, the others in training mode; gradients are those of the parameters.

--isa sets the variables below and starts anew: the libraries read them when they are loaded or first used.
"""

import argparse
import functools
import itertools
import json
import math
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import cpu_limits
import torch
import torch.nn.functional as F
from torch.backends.cpu import get_cpu_capability

import attn_ext
from attn_ext.bench import TOLERANCE, Sample, check_agreement, gradient, measure

ISA_VARIABLES = ("ATTN_EXT_CPU_ISA", "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")
ISAS = {
    "native": (),
    "avx512": ("avx512", "avx512", "AVX512_CORE", "AVX512"),  # without AVX512-BF16, AVX512-FP16 and AMX
    "avx2": ("avx2", "avx2", "AVX2", "AVX2"),
}
HEADS = 8
DECODE = {"decode8": (8, 8), "decode32": (32, 32), "gqa": (32, 8)}  # heads, KV heads
DECODE_KEYS = 8192
WINDOW = 256


class Case(NamedTuple):
    kind: str  # full, causal, window, mask, bias, a name in DECODE, small, module, weights
    dtype: torch.dtype
    queries: int
    keys: int
    head_dim: int
    direction: str  # forward, training, backward

    def __str__(self) -> str:
        dtype, size = str(self.dtype).removeprefix("torch."), f"N{self.keys} D{self.head_dim}"
        return f"{dtype:<8} {self.kind:<8} {size:<10} {self.direction:<8}"

    def rate(self, seconds: float) -> float:
        """GFLOP/s; for a decode step GB/s of K and V."""
        if self.kind in DECODE:
            elements = DECODE[self.kind][1] * 2 * self.keys * self.head_dim
            return elements * self.dtype.itemsize / seconds / 1e9
        if self.kind in (
            "module",
            "weights",
        ):  # the four projections, next to which attention is nothing here
            products = 16 if self.direction == "backward" else 8
            return products * self.queries * (HEADS * self.head_dim) ** 2 / seconds / 1e9
        rows = range(self.queries)
        visible = {"causal": lambda i: i + 1, "window": lambda i: min(i, WINDOW) + 1}
        pairs = sum(map(visible.get(self.kind, lambda _: self.keys), rows))
        return HEADS * pairs * self.head_dim * (10 if self.direction == "backward" else 4) / seconds / 1e9


def cases(args: argparse.Namespace) -> list[Case]:
    """Every case that the arguments select, by dtype."""
    found = []
    n = min(1024, max(args.lengths))
    sizes = list(itertools.product(args.head_dims, args.lengths, ("full", "causal")))
    sizes += [(d, n, kind) for d in args.head_dims for kind in ("mask", "bias")]
    sizes.append((min(args.head_dims), max(args.lengths), "window"))
    for dtype in (getattr(torch, name) for name in args.dtype):
        for d, n, kind in sizes:
            found += [Case(kind, dtype, n, n, d, direction) for direction in ("forward", "backward")]
        found += [Case(kind, dtype, 1, DECODE_KEYS, 128, "forward") for kind in DECODE]
        found += [
            Case(kind, dtype, 16, 16, 64, direction)
            for kind in ("small", "module", "weights")
            for direction in ("forward", "training", "backward")
        ]
    return [case for case in found if re.search(args.only, str(case))]


def build(case: Case) -> dict[str, Callable]:
    """What to time, by name; each returns the tensors that must agree.

    Shapes: q (1, 8, queries, D), k and v (1, 8, keys, D), for decoding other heads; mask (1, 1, N, N), a
    tenth of it False; bias (1, 8, N, N).
    """
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(case.dtype)

    if case.kind in ("module", "weights"):
        return build_modules(case, randn(1, case.queries, HEADS * case.head_dim))
    heads, kv_heads = DECODE.get(case.kind, (HEADS, HEADS))
    q = randn(1, heads, case.queries, case.head_dim)
    k, v = (randn(1, kv_heads, case.keys, case.head_dim) for _ in range(2))
    leaves = [q, k, v]
    causal, mask = case.kind == "causal", None
    if case.kind == "mask":
        mask = torch.rand(1, 1, case.queries, case.keys, generator=generator) > 0.1
    elif case.kind == "bias":  # its gradient takes torch to its unfused path
        mask = randn(1, HEADS, case.queries, case.keys)
        leaves.append(mask)
    for leaf in leaves:
        leaf.requires_grad_(case.direction != "forward")

    options = {"attn_mask": mask, "is_causal": causal, "enable_gqa": heads != kv_heads}
    calls = {
        "torch": functools.partial(F.scaled_dot_product_attention, q, k, v, **options),
        "attn_ext": functools.partial(attn_ext.scaled_dot_product_attention, q, k, v, **options),
    }
    if case.kind == "window":
        rows, columns = torch.arange(case.queries)[:, None], torch.arange(case.keys)
        band = (columns <= rows) & (columns >= rows - WINDOW)
        calls["torch"] = functools.partial(F.scaled_dot_product_attention, q, k, v, attn_mask=band)
        calls["attn_ext"] = functools.partial(attn_ext.attention, q, k, v, window=(WINDOW, 0))
    if case.kind == "small":  # where the call's own cost is what is measured, so for both of our functions
        calls["attn_ext.attention"] = functools.partial(attn_ext.attention, q, k, v)
    if case.direction != "backward":
        return calls
    return {name: gradient(call(), leaves) for name, call in calls.items()}


def build_modules(case: Case, x: torch.Tensor) -> dict[str, Callable]:
    """The same for the modules; x (1, N, 8 D)."""
    theirs = torch.nn.MultiheadAttention(x.shape[2], HEADS, batch_first=True, dtype=case.dtype)
    modules = {"torch": theirs, "attn_ext": attn_ext.MultiHeadAttention.from_torch(theirs)}

    def call(module: torch.nn.Module) -> torch.Tensor:
        return module(x, x, x, need_weights=case.kind == "weights")[0]

    if case.direction == "forward":
        return {name: torch.no_grad()(functools.partial(call, m.eval())) for name, m in modules.items()}
    if case.direction == "training":
        return {name: functools.partial(call, m) for name, m in modules.items()}
    return {name: gradient(call(m), list(m.parameters())) for name, m in modules.items()}


def limit_of(case: Case, args: argparse.Namespace) -> Callable[[], float]:
    """What the machine could do, in the unit of case.rate()."""
    has_loops = "avx2" in attn_ext._C.cpu_isas()  # what cpu_limits.cpp is written for
    if args.no_limit or not has_loops or case.kind in ("small", "module", "weights"):
        return lambda: math.nan
    if case.kind in DECODE:
        memory = torch.ones(DECODE[case.kind][1], 2 * case.keys, case.head_dim, dtype=case.dtype)
        return functools.partial(cpu_limits.read_rate, memory, args.threads)
    isa = "avx2" if args.isa == "avx2" or "avx512" not in attn_ext._C.cpu_isas() else "avx512"
    return functools.partial(cpu_limits.fma_rate, isa, args.threads)


def summarize(case: Case, samples: dict[str, list[Sample]]) -> list[dict]:
    """One row for each of our functions, with all samples for whoever wants another statistic."""

    def share(side: list[Sample]) -> float:
        return statistics.median(100 * case.rate(s.seconds) / s.limit for s in side)

    theirs = samples.pop("torch")
    t_torch = statistics.median(s.seconds for s in theirs)
    rows = []
    for name, ours in samples.items():
        t_ours = statistics.median(s.seconds for s in ours)
        pairs = zip(ours, theirs, strict=True)
        quartiles = statistics.quantiles([b.seconds / a.seconds for a, b in pairs], n=4)
        row = {"case": str(case), **case._asdict(), "dtype": str(case.dtype).removeprefix("torch.")}
        row |= {"function": name, "samples": [ours, theirs]}
        row["milliseconds"] = [t_ours * 1e3, t_torch * 1e3]
        row["rates"] = [case.rate(t_ours), case.rate(t_torch)]
        row["limit"] = statistics.median(s.limit for s in [*ours, *theirs])
        row["percent_of_limit"] = [share(ours), share(theirs)]
        row["ratio"], row["ratio_quartiles"] = t_torch / t_ours, quartiles[::2]
        rows.append(row)
    return rows


def show(case: Case, row: dict) -> None:
    times, rates = "{:9.3f} {:9.3f}".format(*row["milliseconds"]), "{:8.1f} {:8.1f}".format(*row["rates"])
    shares = "{:4.0f} {:4.0f}".format(*row["percent_of_limit"])
    quartiles = "{:.2f}-{:.2f}".format(*row["ratio_quartiles"])
    unit = "GB/s" if case.kind in DECODE else "GFLOP/s"
    note = "attention()" if row["function"] == "attn_ext.attention" else ""
    line = f"{case} {times} {rates} {unit:<7} {shares} {row['ratio']:6.2f} {quartiles:<11} {note}"
    print(line.rstrip(), flush=True)


def environment(args: argparse.Namespace) -> dict[str, str]:
    """Where and of what the numbers are."""
    cpuinfo = dict(re.findall(r"^([\w ]+?)\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE))
    units = [flag for flag in ("avx512_bf16", "avx512_fp16", "amx_bf16") if flag in cpuinfo["flags"].split()]
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--exclude=*"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip() or "unknown"
    return {
        "date": time.strftime("%Y-%m-%d"),
        "cpu": f"{cpuinfo['model name']} (family {cpuinfo['cpu family']}, model {cpuinfo['model']}), "
        f"{os.cpu_count()} cores, {' '.join(units) or 'no half-type instructions'}",
        "isa": f"{args.isa}: attn_ext {attn_ext._C.cpu_isa()}, torch {get_cpu_capability()}",
        "versions": f"attn_ext {attn_ext.__version__} ({commit}), torch {torch.__version__}",
        "threads": f"{args.threads}, {args.clock} clock",
        "load": f"{os.getloadavg()[0]:.1f} over the minute before the start (quiet: 0)",
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    dtypes = [str(dtype).removeprefix("torch.") for dtype in TOLERANCE]
    parser.add_argument("--dtype", nargs="+", choices=dtypes, default=dtypes)
    parser.add_argument("--lengths", nargs="+", type=int, help="N; default 128 512 1024 2048 4096")
    parser.add_argument("--head-dims", nargs="+", type=int, help="D; default 64 128")
    parser.add_argument("--only", default="", help="regular expression that a case's name, as printed, has")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--isa", choices=ISAS, default="native")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="cpu: see above; one thread")
    parser.add_argument("--seconds", type=float, help="for each case; default 2, with --quick 0.2")
    parser.add_argument("--quick", action="store_true", help="N 128 and 512, D 64 only, and fewer rounds")
    parser.add_argument("--no-limit", action="store_true", help="do not measure what the machine could do")
    parser.add_argument("--json", type=Path, help="write everything, with all samples, to this file")
    args = parser.parse_args()
    held = os.environ | dict(zip(ISA_VARIABLES, ISAS[args.isa], strict=False))
    if held != os.environ:
        os.execve(sys.executable, sys.orig_argv, held)
    if args.clock == "cpu" and args.threads != 1:
        parser.error("--clock cpu needs --threads 1: it would count threads that wait as working")
    args.lengths = args.lengths or ([128, 512] if args.quick else [128, 512, 1024, 2048, 4096])
    args.head_dims = args.head_dims or ([64] if args.quick else [64, 128])
    seconds = args.seconds if args.seconds is not None else (0.2 if args.quick else 2.0)

    torch.set_num_threads(args.threads)
    about = environment(args)
    print("\n".join(f"{name:<9} {text}" for name, text in about.items()))
    print(f"\n{'B 1, H 8':<37}        ms              rate              % of limit  torch / attn_ext")
    print(f"{'':<37}  attn_ext     torch attn_ext    torch         ours torch ratio quartiles", flush=True)
    clock = {"wall": time.perf_counter, "cpu": time.process_time}[args.clock]
    results = []
    for case in cases(args):
        functions = build(case)
        check_agreement(str(case), case.dtype, functions)
        rows = summarize(case, measure(functions, seconds, clock, limit_of(case, args)))
        results += rows
        for row in rows:
            show(case, row)
    if args.json:
        args.json.write_text(json.dumps({"environment": about, "results": results}, indent=1))


if __name__ == "__main__":
    main()
