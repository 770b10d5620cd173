"""What the kernels' machine code must keep to. One table of limits; each says why it is where it is."""

import dataclasses
import functools
import json
import re
from pathlib import Path

from .kernel import Kernel, units_per_product

# No kernel may have a fault, except where this says why it may: (pattern of kernel names, rule, reason).
ACCEPTED: tuple[tuple[str, str, str], ...] = (
    (
        "attn_fwd_sm90_.*",
        "not analysed",
        "the stores of finished rows, in the loop over tiles of rows; that over keys reads by wgmma alone",
    ),
    (
        "attn_bwd_sm90_.*",
        "not analysed",
        "the stores of dS by stmatrix: pieces of eight rows, which the swizzle puts into different banks",
    ),
)


@dataclasses.dataclass(frozen=True)
class Limit:
    """Our kernels' cycles for each (query, key) pair, summed over `kernels`, over FlashAttention's."""

    kernels: tuple[str, ...]
    baseline: str  # a kernel of the same ability: lengths that need not be multiples of its tile
    most: float
    most_latency: float | None = None  # for the replay, where it is another one
    cheapest: bool = False  # compares the cheapest trips: ours has a branch for the mask in its loop


# FA2's backward is one kernel with five products; ours recomputes S and dP in two kernels, seven products in
# all, so that no atomic addition is needed. Cycles per pair charge us for both extra products.
LIMITS = tuple(
    Limit(tuple(name.format(dtype) for name in kernels), f"fa2-{baseline}-{mask}-uneven", most)
    for kernels, baseline, most in (
        # A prototype of the schedule needed 0.67 (0.65 causal); more than 0.72 is a fault in the code.
        (("attn_fwd_sm80_{}_d64",), "fwd-d64", 0.72),
        # The prototype needed 0.75; 32 rows a warp with Q read again from shared memory in each step.
        (("attn_fwd_sm80_{}_d96",), "fwd-d96", 0.80),
        (("attn_fwd_sm80_{}_d128",), "fwd-d128", 0.80),  # the prototype 0.76
        # Bound by shared memory, as FA2's is (1.26 x its tensor time): not slower is what can be asked.
        (("attn_fwd_sm80_{}_d256",), "fwd-d256", 1.00),
        # Seven products against five, so a little less than 0.95 x 5/7 = 0.68 in cycles per HMMA.
        (("attn_bwd_dkdv_sm80_{}_d64", "attn_bwd_dq_sm80_{}_d64"), "bwd-d64", 0.95),
        (("attn_bwd_dkdv_sm80_{}_d128", "attn_bwd_dq_sm80_{}_d128"), "bwd-d128", 0.95),
    )
    for dtype in ("f16", "bf16")
    for mask in ("full", "causal")
) + tuple(
    # Hopper beside FlashAttention-3: a prototype needed 0.92 to 0.96, and 0.84 to 0.91 with latencies.
    Limit((f"attn_fwd_sm90_{dtype}_{kernel}",), f"fa3-fwd-{baseline}", 1.00, 0.92)
    for dtype in ("f16", "bf16")
    for kernel, baseline in (
        ("d64", "d64-full"),
        ("d64", "d64-causal"),
        ("d128", "d128-full"),
        ("d128_banded", "d128-causal"),
        ("d256", "d256-full"),
        ("d256", "d256-causal"),
    )
)
# FA3's backward has five products as ours has, and adds dQ up in any order.
LIMITS += tuple(
    Limit((f"attn_bwd_sm90_{dtype}_{dim}",), f"fa3-bwd-{dim}-{mask}", most, most_latency, cheapest=True)
    for dtype in ("f16", "bf16")
    for dim, mask, most, most_latency in (
        # 1.09 and 0.93. With the second looks at mbarriers, of which ours has fewer, 1.03 in cycles.
        ("d64", "full", 1.12, 0.95),
        ("d64", "causal", 1.12, 0.95),
        ("d128", "full", 1.03, 0.95),  # 1.01 and 0.92; with the second looks 0.94
        ("d128", "causal", 0.90, 0.92),  # theirs takes 64 queries at a time then, ours 80
    )
)


@functools.cache
def baselines() -> dict[str, dict]:
    """FlashAttention-2's kernels as bundled with torch 2.14.1 (CUDA 13.0), read with these very modules.

    And FlashAttention-3's for Hopper, of its build with CUDA 12.9. Cycles and instructions of one trip of a
    warp round the main loop; the f16 and bf16 builds have the same.
    """
    return json.loads(Path(__file__).with_name("baselines.json").read_text())


def faults(kernel: Kernel) -> list[tuple[str, str]]:
    """(rule, what was found) for everything that is wrong with one kernel by itself and not accepted.

    Bank conflicts count in every loop with multiply-adds, not only in the main one.
    """
    r, loop, found = kernel.resources, kernel.main_loop, []
    if r.stack_bytes or kernel.local_store_bytes or kernel.local_load_bytes:
        moved = f"{kernel.local_store_bytes} B of stores, {kernel.local_load_bytes} B of loads"
        what = f"{r.stack_bytes} B of stack, {moved}: spills, or an array that is indexed"
        found.append(("local memory", what))
    if loop:
        found += [("conflict", text) for text in loop.conflicts]
        if any(kernel.name in limit.kernels for limit in LIMITS):  # these are to be proven free of conflicts
            found += [("not analysed", text) for text in loop.not_analysed]
    if kernel.blocks_per_sm(kernel.gpu.arch) == 0:
        found.append(("launch", f"no block of {r} fits an SM of {kernel.gpu.name}"))
    return [
        (rule, text)
        for rule, text in found
        if not any(rule == name and re.fullmatch(pattern, kernel.name) for pattern, name, _ in ACCEPTED)
    ]


@dataclasses.dataclass(frozen=True)
class Comparison:
    limit: Limit
    metric: str  # "cycles": the compiler's stall counts. "latency": the replay
    per_unit: tuple[float, float]  # ours and FlashAttention's, for each HMMA
    per_tile: tuple[float, float]  # for 16 queries x 8 keys

    @property
    def ratio_per_unit(self) -> float:
        return self.per_unit[0] / self.per_unit[1]

    @property
    def ratio(self) -> float:
        return self.per_tile[0] / self.per_tile[1]

    @property
    def holds(self) -> bool:
        return self.ratio <= self.most

    @property
    def most(self) -> float:
        latency = self.limit.most_latency if self.metric == "latency" else None
        return latency or self.limit.most


def compare(limit: Limit, kernels: dict[str, Kernel]) -> list[Comparison]:
    """Both metrics of one limit. Raises ValueError where a kernel or its figure is missing."""
    ours = [_measured(kernels, name) for name in limit.kernels]
    row = baselines()[limit.baseline]
    head_dim = int(re.search(r"-d(\d+)", limit.baseline)[1])
    products = 5 if "-bwd-" in limit.baseline else 2
    units = sum(k.products * units_per_product(k.head_dim, k.dtype) for k in ours)
    columns = (
        ("cycles", "cycles", [k.cycles_per_tile for k in ours]),
        ("latency", "latency_cycles", [k.latency_per_tile for k in ours]),
    )
    if limit.cheapest:
        columns = (
            ("cycles", "cheapest_cycles", [k.cheapest_per_tile for k in ours]),
            ("latency", "latency_cycles", [k.cheapest_latency_per_tile for k in ours]),
        )
    result = []
    for metric, column, per_tile in columns:
        theirs = row[column] / row["hmma"]
        theirs_per_tile = theirs * products * units_per_product(head_dim, "f16")
        per_unit = (sum(per_tile) / units, theirs)
        result.append(Comparison(limit, metric, per_unit, (sum(per_tile), theirs_per_tile)))
    return result


def _measured(kernels: dict[str, Kernel], name: str) -> Kernel:
    if name not in kernels:
        raise ValueError(f"{name} is not there")
    if kernels[name].latency_per_tile is None:
        raise ValueError(f"{name} has no single main loop with tensor work to measure")
    return kernels[name]
