"""How fast kernels can run a problem on a GPU, and what limits them: machine code x problem x datasheet."""

import dataclasses

from .kernel import Kernel, units_per_product

# FlashAttention-2's kernels ran at 1.1 x the rate that replay() gives one warp alone, within 8%, in the nine
# published measurements that docs/machine_code.md lists: what overlaps between two warps gains a little more
# than barriers, start, end and edge tiles lose. Nothing says that it holds for other kernels.
OVERLAP = 1.1
LSE_BYTES = 4  # float32


@dataclasses.dataclass(frozen=True)
class Problem:
    """q (B, H, Nq, D), k and v (B, Hkv, Nk, D), half types; causal is aligned to the bottom right."""

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    head_dim: int
    causal: bool = False
    direction: str = "forward"

    @property
    def pairs(self) -> int:
        """Visible (query, key) pairs of all heads."""
        per_head = self.queries * self.keys
        if self.causal:  # the last query sees every key, each one before it one fewer
            rows = min(self.queries, self.keys)
            per_head = rows * self.keys - rows * (rows - 1) // 2
        return self.batch * self.heads * per_head

    @property
    def flops(self) -> int:
        """As papers count: 4 D a pair forward, 10 D (five products) backward, whatever is recomputed."""
        return (10 if self.direction == "backward" else 4) * self.head_dim * self.pairs

    def dram_bytes(self, kernel: str) -> int:
        """What a kernel moves at least: every tensor that it reads or writes, once, 2 bytes an element."""
        rows = self.batch * self.heads * self.queries
        q = rows * self.head_dim * 2
        kv = self.batch * self.kv_heads * self.keys * self.head_dim * 2
        if kernel.startswith(("attn_bwd_dkdv", "attn_bwd_sm90")):  # its dQ is added up in L2, as a rule
            return 2 * q + 2 * kv + 2 * rows * LSE_BYTES + 2 * kv  # q, dO; k, v; LSE, delta -> dk, dv
        if kernel.startswith("attn_bwd_dq"):
            return 2 * q + 2 * kv + 2 * rows * LSE_BYTES + q
        return q + 2 * kv + q + rows * LSE_BYTES  # q; k, v -> out, LSE


@dataclasses.dataclass(frozen=True)
class Prediction:
    kernel: str
    seconds: dict[str, float]  # that each limit alone would take

    @property
    def binds(self) -> str:
        return max(self.seconds, key=self.seconds.__getitem__)

    @property
    def time(self) -> float:
        return max(self.seconds.values())


def predict(kernel: Kernel, problem: Problem) -> Prediction:
    """Time on a long problem, on the GPU that the kernel was built for.

    Left out: launch, waves that do not fill the GPU, edge tiles (computed whole, then masked), L2 traffic,
    and clocks below boost.
    """
    loop, gpu = kernel.main_loop, kernel.gpu
    if loop is None or loop.latency_cycles is None or kernel.products is None or not kernel.head_dim:
        raise ValueError(f"{kernel.name}: no single main loop with tensor work, so no prediction")
    units = problem.pairs / (16 * 8) * kernel.products * units_per_product(kernel.head_dim, kernel.dtype)
    trips = units / loop.costs.tensor / (gpu.sms * 4)  # one after another, on each sub-partition
    clock = gpu.ghz * 1e9
    warps = kernel.blocks_per_sm(gpu.arch) * kernel.resources.threads / 32 / 4  # for each scheduler
    if warps == 0:
        raise ValueError(f"{kernel.name}: no block of {kernel.resources} fits an SM of {gpu.name}")
    seconds = {name: trips * cycles / clock for name, cycles in loop.costs.pipes(gpu).items()}
    seconds["warps"] = trips * loop.costs.stall_cycles / clock / warps  # each takes its stall cycles at least
    seconds["latency"] = trips * loop.latency_cycles / clock / OVERLAP
    seconds["DRAM"] = problem.dram_bytes(kernel.name) / (gpu.dram_gbytes * 1e9)
    return Prediction(kernel.name, seconds)


def total(problem: Problem, predictions: list[Prediction]) -> tuple[float, float]:
    """Seconds and TFLOP/s of kernels that run one after the other and together solve the problem."""
    seconds = sum(p.time for p in predictions)
    return seconds, problem.flops / seconds / 1e12
