"""One kernel read from its machine code: resources, main loop, bank conflicts."""

import dataclasses
import functools
import re

from cuxray import archspec, occupancy

from .conflicts import shared_accesses
from .costs import SHARED_MEMORY, Costs, fma_work, replay, tally, tensor_units
from .disassembly import Function, Instruction
from .gpus import GPU
from .loops import Loop, body, control_flow, find_loops, trip

# How many of the N x N products (S = Q K^T, O = P V; backward S, dP, dV, dK, dQ; forward mode S, two for its
# tangent, one each with V and its tangent) a kernel computes for each (query, key) pair, by how its name
# begins.
PRODUCTS = {
    "attn_bwd_dkdv": 4, "attn_bwd_dq": 3, "attn_bwd_bias": 2, "attn_bwd_sm90": 5,
    "attn_fwd": 2, "attn_decode": 2, "attn_jvp": 5
}  # fmt: skip
NAME = re.compile(r"attn_.*?_(?P<dtype>f16|bf16|tf32|f32|f64)(?:_d(?P<head_dim>\d+))?(?:_[a-z]+)?$")


@dataclasses.dataclass(frozen=True)
class Resources:
    """What a kernel takes of a multiprocessor, and a launch of it."""

    registers: int
    stack_bytes: int  # per thread: arrays in local memory, and spills
    static_shared_bytes: int
    threads: int  # of a block
    dynamic_shared_bytes: int | None  # None: not known

    @property
    def shared_bytes(self) -> int:
        return self.static_shared_bytes + (self.dynamic_shared_bytes or 0)


@dataclasses.dataclass(frozen=True)
class MainLoop:
    """Figures of one trip of one warp round the loop that a long problem spends its time in."""

    label: str
    costs: Costs  # every instruction of the body, alternatives too
    work: float  # tensor units; multiply-adds of one lane in a kernel without tensor cores
    cheapest_cycles: int  # stall cycles of the cheapest trip, where the body has alternatives
    latency_cycles: float | None  # replay() of the dearest trip; None: loops with such work lie inside
    cheapest_latency_cycles: float | None  # the same of the cheapest trip
    conflicts: tuple[str, ...]  # shared-memory accesses of any loop with such work, that have bank conflicts
    not_analysed: tuple[str, ...]  # ... whose addresses cuxray could not follow
    accesses: int  # shared-memory accesses in those loops

    @property
    def cycles_per_unit(self) -> float:
        return self.costs.stall_cycles / self.work

    @property
    def cheapest_per_unit(self) -> float:
        return self.cheapest_cycles / self.work

    @property
    def latency_per_unit(self) -> float | None:
        return None if self.latency_cycles is None else self.latency_cycles / self.work


@dataclasses.dataclass(frozen=True)
class Kernel:
    name: str
    gpu: GPU  # built for, and the replay's
    resources: Resources
    local_store_bytes: int  # of a thread, each instruction counted once, as `ptxas -v` counts spills
    local_load_bytes: int
    main_loop: MainLoop | None  # None: no loop with multiply-adds
    other_loops: tuple[str, ...]  # those with multiply-adds, in words

    @functools.cached_property
    def dtype(self) -> str:
        match = NAME.match(self.name)
        return match["dtype"] if match else ""

    @functools.cached_property
    def head_dim(self) -> int | None:
        """The largest that the kernel takes, smaller ones are padded to it. None: any."""
        match = NAME.match(self.name)
        return int(match["head_dim"]) if match and match["head_dim"] else None

    @property
    def products(self) -> int | None:
        return next((n for prefix, n in PRODUCTS.items() if self.name.startswith(prefix)), None)

    @property
    def cycles_per_tile(self) -> float | None:
        """Stall cycles for 16 queries x 8 keys: compares kernels that share out the products differently."""
        return self._per_tile(self.main_loop and self.main_loop.cycles_per_unit)

    @property
    def latency_per_tile(self) -> float | None:
        return self._per_tile(self.main_loop and self.main_loop.latency_per_unit)

    @property
    def cheapest_per_tile(self) -> float | None:
        return self._per_tile(self.main_loop and self.main_loop.cheapest_per_unit)

    @property
    def cheapest_latency_per_tile(self) -> float | None:
        cycles = self.main_loop and self.main_loop.cheapest_latency_cycles
        return self._per_tile(cycles and cycles / self.main_loop.work)

    def _per_tile(self, per_unit: float | None) -> float | None:
        if None in (per_unit, self.products, self.head_dim) or not self.main_loop.costs.tensor:
            return None
        return per_unit * self.products * units_per_product(self.head_dim, self.dtype)

    def blocks_per_sm(self, arch: str) -> int:
        """With this kernel's registers, also for another architecture, whose own build may differ in them."""
        r = self.resources
        spec = archspec.lookup(arch)
        return occupancy.compute(
            spec, r.registers, r.threads, r.static_shared_bytes, r.dynamic_shared_bytes or 0
        ).blocks_per_sm


def units_per_product(head_dim: int, dtype: str) -> float:
    """Tensor units of one product over 16 queries x 8 keys: m16n8k16 takes 16 of the head dimension."""
    return head_dim / (8 if dtype == "tf32" else 16)


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A loop with multiply-adds."""

    loop: Loop
    instructions: list[Instruction]
    costs: Costs
    work: float  # tensor units, or multiply-adds of one lane

    def __str__(self) -> str:
        return (
            f"{self.loop.label}: {self.costs.instructions} instructions, {self.work:g} units, "
            f"{self.costs.stall_cycles / self.work:.2f} cycles a unit, all blocks summed"
        )


def read_kernel(function: Function, resources: Resources, gpu: GPU) -> Kernel:
    graph = control_flow(function)
    work = tensor_units if any(map(tensor_units, function.instructions)) else fma_work
    candidates = []
    for loop in find_loops(graph, function.labels):
        instructions = body(graph, loop)
        if amount := sum(map(work, instructions)):
            candidates.append(Candidate(loop, instructions, tally(instructions), amount))
    main, main_loop = pick_main_loop(candidates) if candidates else None, None
    if main:
        inside = [c.loop for c in candidates if c.loop.blocks < main.loop.blocks]
        accesses = {
            i.address for c in candidates for i in c.instructions if i.name in SHARED_MEMORY and i.runs
        }
        dearest, cheapest = (trip(graph, main.loop, inside, work, dearest=which) for which in (True, False))
        conflicts, unknown = shared_accesses(function, graph, resources.threads, accesses)
        main_loop = MainLoop(
            label=main.loop.label,
            costs=main.costs,
            work=main.work,
            cheapest_cycles=sum(i.stall for i in cheapest),
            latency_cycles=replay(dearest, gpu) if not inside else None,
            cheapest_latency_cycles=replay(cheapest, gpu) if not inside else None,
            conflicts=conflicts,
            not_analysed=unknown,
            accesses=len(accesses),
        )
    return Kernel(
        name=function.name,
        gpu=gpu,
        resources=resources,
        local_store_bytes=sum(i.bytes for i in function.instructions if i.name == "STL"),
        local_load_bytes=sum(i.bytes for i in function.instructions if i.name == "LDL"),
        main_loop=main_loop,
        other_loops=tuple(str(c) for c in candidates if c is not main),
    )


def pick_main_loop(candidates: list[Candidate]) -> Candidate:
    """The innermost loop with both tensor products and exponentials; where none has both, with products.

    Of several of like work (within a quarter), as with and without a mask, the cheapest per unit.
    """
    innermost = [c for c in candidates if not any(other.loop.blocks < c.loop.blocks for other in candidates)]
    pool = [c for c in innermost if c.costs.tensor and c.costs.counts.get("MUFU")] or innermost
    most = max(c.work for c in pool)
    alike = [c for c in pool if c.work >= 0.75 * most]
    return min(alike, key=lambda c: c.costs.stall_cycles / c.work)
