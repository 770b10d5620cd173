"""What gpu_check measures, and the table it prints."""

import itertools
import re
import statistics
from typing import NamedTuple

BACKENDS = {  # torch's, by the name in torch.nn.attention.SDPBackend
    "flash": "FLASH_ATTENTION",
    "cudnn": "CUDNN_ATTENTION",
    "efficient": "EFFICIENT_ATTENTION",
    "math": "MATH",
}
# Ours, and what ATTN_EXT_KERNELS chooses for them; on Hopper half types have kernels of their own.
OURS = {"attn_ext": "sm80", "sm90": "sm90"}
PROVIDERS = (*OURS, *BACKENDS)


class Case(NamedTuple):
    """q (B, H, Nq, D), k and v (B, Hkv, Nk, D)."""

    section: str  # decode, prefill, float32, or tf32: float32 with torch's switch on
    direction: str  # forward or backward
    dtype: str
    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    head_dim: int
    causal: bool  # aligned to the lower right, with Nq <= Nk: the last query sees every key

    def __str__(self) -> str:
        lengths = f"N{self.queries}x{self.keys} D{self.head_dim}"
        heads = f"B{self.batch} H{self.heads}/{self.kv_heads}"
        mask = "causal" if self.causal else "full"
        return f"{self.section:7} {self.dtype:8} {heads:11} {lengths:17} {mask:6} {self.direction:8}"

    @property
    def flops(self) -> int:
        hidden = self.queries * (self.queries - 1) // 2 if self.causal else 0
        pairs = self.queries * self.keys - hidden
        return self.batch * self.heads * pairs * self.head_dim * (10 if self.direction == "backward" else 4)

    @property
    def bytes(self) -> int:
        """q, k, v and out once; backward q, k, v, out and grad_out read, three gradients written."""
        size = 4 if self.dtype == "float32" else 2
        q = self.batch * self.heads * self.queries * self.head_dim * size
        kv = self.batch * self.kv_heads * self.keys * self.head_dim * size
        return 4 * q + 4 * kv if self.direction == "backward" else 2 * q + 2 * kv


def cases(only: str = "") -> list[Case]:
    """Those whose name matches, in order of importance: where time runs out, the last are left out."""
    found = [
        Case("decode", "forward", "bfloat16", batch, 32, kv_heads, queries, keys, 128, False)
        for batch, keys in ((1, 16384), (16, 8192), (1, 131072), (64, 4096))
        for queries, kv_heads in ((1, 8), (4, 8), (1, 32))
    ]
    prefill = {
        n: [
            Case("prefill", direction, dtype, 16384 // n, 2048 // d, 2048 // d, n, n, d, causal)
            for dtype in ("bfloat16", "float16")
            for direction in ("forward", "backward")
            for d in (64, 128)
            for causal in (False, True)
        ]
        for n in (4096, 1024, 16384, 2048, 512, 8192)
    }
    found += prefill.pop(4096) + prefill.pop(1024)
    found += [
        Case(section, direction, "float32", 2, 2048 // d, 2048 // d, 2048, 2048, d, causal)
        for section in ("float32", "tf32")
        for direction in ("forward", "backward")
        for d in (64, 128)
        for causal in (False, True)
    ]
    found += itertools.chain.from_iterable(prefill.values())
    return [case for case in found if re.search(only, str(case))]


def best_ratio(milliseconds: dict[str, float]) -> dict:
    """{"best": torch's fastest back end, "ratio": its time over ours}, empty where one side is missing."""
    theirs = {name: ms for name, ms in milliseconds.items() if name not in OURS}
    if not theirs or "attn_ext" not in milliseconds:
        return {}
    best = min(theirs, key=theirs.__getitem__)
    return {"best": best, "ratio": theirs[best] / milliseconds["attn_ext"]}


def row(case: Case, result: dict) -> str:
    """One line of the table: our milliseconds and GB/s, each provider's rate, torch's best time over ours."""
    if "failed" in result:
        return f"{case}  FAILED: {result['failed']}"
    milliseconds = result["milliseconds"]
    rates = "".join(rate(case, milliseconds.get(provider)) for provider in PROVIDERS)
    ours = milliseconds["attn_ext"]
    ratio = f"{result['ratio']:7.2f} {result['best']}" if "ratio" in result else f"{'-':>7}"
    wrong = f"  WRONG: {result['wrong']}" if result["wrong"] else ""
    return f"{case} {ours:9.3f} {case.bytes / ours / 1e6:7.0f} {rates} {ratio}{wrong}"


def rate(case: Case, milliseconds: float | None) -> str:
    """TFLOP/s; GB/s of a decode step, which is bound by memory."""
    if milliseconds is None:
        return f"{'-':>10}"
    done = case.bytes / 1e6 if case.section == "decode" else case.flops / 1e9
    return f"{done / milliseconds:10.1f}"


def summary(results: list[dict]) -> list[str]:
    """Geometric means of the ratios, by kind of case."""
    groups: dict[tuple, list[float]] = {}
    for result in results:
        case = Case(*result["case"])
        if "ratio" in result and not result["wrong"]:
            mask = "causal" if case.causal else "full"
            kind = (case.section, case.direction, f"D{case.head_dim}", mask)
            groups.setdefault(kind, []).append(result["ratio"])
    return [
        f"{' '.join(kind):32} {statistics.geometric_mean(ratios):6.2f}"
        f"  ({min(ratios):.2f} to {max(ratios):.2f}, {len(ratios)} cases)"
        for kind, ratios in sorted(groups.items())
    ]


def verdict(results: list[dict]) -> list[str]:
    """Which kernels should be a Hopper GPU's default: geometric means of the default's time over sm90's."""
    groups: dict[tuple, list[float]] = {}
    for result in results:
        case, ms = Case(*result["case"]), result.get("milliseconds", {})
        if ms.keys() >= OURS.keys() and not result["wrong"]:
            kind = (case.section, case.direction, f"D{case.head_dim}", "causal" if case.causal else "full")
            groups.setdefault(kind, []).append(ms["attn_ext"] / ms["sm90"])
    lines = []
    for kind, ratios in sorted(groups.items()):
        mean = statistics.geometric_mean(ratios)
        better = "sm90" if mean > 1 else "sm80"
        lines.append(f"{' '.join(kind):32} {mean:6.2f}  the default should be {better} ({len(ratios)} cases)")
    return lines


def render(report: dict) -> str:
    lines = [f"{name:12} {text}" for name, text in report["environment"].items()]
    lines += [f"{'tests':12} {report['tests']['says']}"]
    for section in ("decode", "prefill", "float32", "tf32"):
        unit = "GB/s" if section == "decode" else "TFLOP/s"
        rows = [row(Case(*r["case"]), r) for r in report["results"] if r["case"][0] == section]
        if rows:
            titles = "".join(f"{provider:>10}" for provider in PROVIDERS)
            lines += ["", f"{f'{section}, {unit}':61}    our ms    GB/s {titles}   ratio to", *rows]
    if means := summary(report["results"]):
        lines += ["", "torch's best time / ours, geometric means", *means]
    if choices := verdict(report["results"]):
        lines += ["", "time of the kernels for sm_80 / of those for Hopper, geometric means", *choices]
    if missing := report["not_reached"]:
        lines += ["", f"not reached in time: {len(missing)} cases", *missing]
    return "\n".join(lines) + "\n"


def all_right(report: dict) -> bool:
    return report["tests"]["passed"] and not any("failed" in r or r["wrong"] for r in report["results"])
