"""The report's tables: kernels, main loops, FlashAttention beside ours, predictions."""

from collections.abc import Iterable

from . import gates
from .gpus import GPUS
from .kernel import Kernel
from .roofline import Problem, predict, total

HEAD_DIM_BUCKETS = (32, 64, 96, 128, 192, 256)


def align(rows: list[list[str]]) -> list[str]:
    """The first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows
    ]


def kernel_table(kernels: list[Kernel]) -> list[str]:
    titles = ["kernel", "regs", "local st/ld", "stack", "shared", "/".join(GPUS), "loop", "work"]
    titles += ["local", "cycles", "cheapest", "latency", "instr", "busiest", "conflicts"]
    return align([titles, *([k.name, *_resources(k), *_loop(k)] for k in kernels)])


def _resources(k: Kernel) -> list[str]:
    r = k.resources
    unknown = "+?" if r.dynamic_shared_bytes is None else ""
    return [
        str(r.registers),
        f"{k.local_store_bytes}/{k.local_load_bytes}",
        str(r.stack_bytes),
        f"{r.shared_bytes}{unknown}",
        "/".join(str(k.blocks_per_sm(gpu.arch)) for gpu in GPUS.values()),
    ]


def _loop(k: Kernel) -> list[str]:
    loop = k.main_loop
    if loop is None:
        return ["no multiply-adds in a loop", *[""] * 8]
    pipes = loop.costs.pipes(k.gpu)
    core = pipes.pop("tensor") or max(pipes["fma"], pipes["double"])
    busiest = max(pipes, key=pipes.__getitem__)
    proven = loop.accesses - len(loop.not_analysed)
    return [
        f"{loop.costs.instructions}",
        f"{loop.work:g} {'HMMA' if loop.costs.tensor else 'FMA'}",
        f"{loop.costs.local_bytes}",
        *(
            [f"{loop.cycles_per_unit:.2f}", f"{loop.cheapest_per_unit:.2f}", f"{loop.latency_per_unit:.2f}"]
            if loop.latency_per_unit
            else ["nested"] * 3
        ),
        f"{loop.costs.instructions / loop.work:.2f}",
        f"{busiest} {pipes[busiest] / core:.2f}",
        f"{len(loop.conflicts)} of {proven}" + (f" ({len(loop.not_analysed)}?)" if loop.not_analysed else ""),
    ]


def loop_details(kernels: list[Kernel]) -> list[str]:
    lines = []
    for k in kernels:
        if loop := k.main_loop:
            counts = sorted(loop.costs.counts.items(), key=lambda item: -item[1])
            pipes = loop.costs.pipes(k.gpu)
            core = pipes["tensor"] or max(pipes["fma"], pipes["double"])
            shares = (f"{name} {cycles / core:.2f}" for name, cycles in pipes.items())
            lines += [f"{k.name}: {loop.label}"]
            lines += ["  instructions: " + "  ".join(f"{name} {n}" for name, n in counts)]
            lines += [
                f"  busy / {'tensor' if pipes['tensor'] else 'multiply-add'} busy: " + "  ".join(shares)
            ]
            lines += [f"  other loop: {text}" for text in k.other_loops]
            lines += [f"  bank conflict: {text}" for text in loop.conflicts]
            lines += [f"  not analysed: {text}" for text in loop.not_analysed]
    return lines


def fault_lines(kernel: Kernel) -> list[str]:
    """What gates.faults() finds, one line for each rule."""
    found: dict[str, list[str]] = {}
    for rule, text in gates.faults(kernel):
        found.setdefault(rule, []).append(text)
    return [
        f"{kernel.name}: {rule}: {texts[0]}" + (f", and {len(texts) - 1} more" if len(texts) > 1 else "")
        for rule, texts in found.items()
    ]


def comparison_table(kernels: dict[str, Kernel]) -> tuple[list[str], list[str]]:
    """The table and what fails. Every limit is looked at: a missing kernel fails."""
    titles = ["ours", "FlashAttention", "metric", "per HMMA", "theirs", "ratio", "per 16x8 pairs", "theirs"]
    rows, failures = [[*titles, "ratio", "limit", ""]], []
    for limit in gates.LIMITS:
        ours = " + ".join(limit.kernels).replace("attn_", "")
        try:
            compared = gates.compare(limit, kernels)
        except ValueError as error:
            failures.append(f"{ours} beside {limit.baseline}: {error}")
            continue
        for c in compared:
            units = [f"{c.per_unit[0]:.2f}", f"{c.per_unit[1]:.2f}", f"{c.ratio_per_unit:.3f}"]
            tiles = [f"{c.per_tile[0]:.1f}", f"{c.per_tile[1]:.1f}", f"{c.ratio:.3f}"]
            over = "" if c.holds else "OVER"
            rows.append([ours, limit.baseline, c.metric, *units, *tiles, f"{c.most:.2f}", over])
            if not c.holds:
                failures.append(f"{ours}: {c.metric} {c.ratio:.3f} of {limit.baseline}'s, at most {c.most}")
    return align(rows), failures


def prediction_table(problems: Iterable[Problem], dtype: str, kernels: dict[str, Kernel]) -> list[str]:
    """Of the lean tensor-core kernels: TFLOP/s and ms of the whole; ms that each limit alone would take."""
    rows = [["problem", "TFLOP/s", "ms", "kernel", "limits, ms: the first binds"]]
    for p in problems:
        sizes = f"B {p.batch} H {p.heads}/{p.kv_heads} N {p.queries}x{p.keys} D {p.head_dim}"
        name = f"{p.direction:8} {'causal' if p.causal else 'full':6} {sizes}"
        try:
            found = [predict(kernel, p) for kernel in _solvers(p, dtype, kernels)]
        except ValueError as error:
            rows.append([name, "-", "-", "", str(error)])
            continue
        seconds, tflops = total(p, found)
        for each in found:
            limits = sorted(each.seconds.items(), key=lambda item: -item[1])
            text = "  ".join(f"{limit} {s * 1e3:.2f}" for limit, s in limits if s)
            part = each.kernel.removeprefix("attn_").partition("_sm80")[0]
            rows.append([name, f"{tflops:.0f}", f"{seconds * 1e3:.2f}", part, text])
    lines = align([row[:-1] for row in rows])
    return [f"{line}  {row[-1]}" for line, row in zip(lines, rows, strict=True)]


def _solvers(problem: Problem, dtype: str, kernels: dict[str, Kernel]) -> list[Kernel]:
    bucket = next((d for d in HEAD_DIM_BUCKETS if d >= problem.head_dim), None)
    parts = ("fwd",) if problem.direction == "forward" else ("bwd_dkdv", "bwd_dq")
    names = [f"attn_{part}_sm80_{dtype}_d{bucket}" for part in parts]
    for name in names:
        if name not in kernels:
            raise ValueError(f"{name} is not there")
    return [kernels[name] for name in names]
