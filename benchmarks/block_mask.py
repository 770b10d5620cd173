"""Attention with sparse patterns: block masks beside the same masks made dense, on the CPU.

    python benchmarks/block_mask.py                    N 16384, 1 head, D 64, float32
    python benchmarks/block_mask.py --length 2048 --no-flex

For each pattern: what part of the 64 x 64 blocks is visible and partial; how long the mask takes to build;
and milliseconds of attention forward, and forward and backward, by

    block       attn_ext.attention(block_mask=mask)         us/block: its time over the visible blocks
    dense       attn_ext.attention(mask=mask.to_dense())
    torch       scaled_dot_product_attention(attn_mask=mask.to_dense())
    flex        torch's flex_attention, compiled, with its own block mask of the same predicate; on the CPU
                it has no backward. "create" is what create_block_mask, compiled too, takes.

The first line is attn_ext.attention(causal=True), which skips what the diagonal hides without any mask;
torch's there is is_causal=True. Medians of samples that alternate in one process, of which the first does not
count unless it took all of --seconds; results are compared before they are timed. Where cost is proportional
to the visible blocks, us/block is the same on every line.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

import attn_ext
from attn_ext import masks

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}  # of outputs that are about 1 / sqrt(visible keys)


class Pattern(NamedTuple):
    build: Callable[[], masks.BlockMask]
    predicate: Callable  # the same in flex_attention's form


def patterns(length: int) -> dict[str, Pattern]:
    generator = torch.Generator().manual_seed(0)
    cuts = torch.randperm(length - 1, generator=generator)[: max(1, length // 512)].sort().values + 1
    lengths = torch.diff(cuts, prepend=torch.tensor([0]), append=torch.tensor([length]))
    ids = torch.arange(len(lengths)).repeat_interleave(lengths)
    grid = masks.big_bird(length).map[0, 0] > 0
    return {
        "window 256": Pattern(
            lambda: masks.sliding_window(length, 255, 0),
            lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (q_idx - kv_idx < 256),
        ),
        "longformer 512": Pattern(
            lambda: masks.longformer(length, 512, [0]),
            lambda b, h, q_idx, kv_idx: (
                ((q_idx - kv_idx <= 256) & (kv_idx - q_idx <= 256)) | (q_idx == 0) | (kv_idx == 0)
            ),
        ),
        "BigBird": Pattern(
            lambda: masks.big_bird(length), lambda b, h, q_idx, kv_idx: grid[q_idx // 64, kv_idx // 64]
        ),
        "documents": Pattern(
            lambda: masks.documents(lengths), lambda b, h, q_idx, kv_idx: ids[q_idx] == ids[kv_idx]
        ),
        "fixed 128, 8": Pattern(
            lambda: masks.sparse_transformer_fixed(length, 128, 8),
            lambda b, h, q_idx, kv_idx: (
                (q_idx >= kv_idx) & ((q_idx // 128 == kv_idx // 128) | (kv_idx % 128 >= 120))
            ),
        ),
    }


def seconds(function: Callable) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def medians(functions: dict[str, Callable], args: argparse.Namespace) -> dict[str, float]:
    """Milliseconds. The functions take turns; who has had its seconds stops. First samples do not count."""
    samples: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(args.rounds + 1):
        for name, function in functions.items():
            if sum(samples[name]) < args.seconds:
                samples[name].append(seconds(function))
    return {name: statistics.median(s[1:] or s) * 1e3 for name, s in samples.items()}


def with_backward(function: Callable, q, k, v) -> Callable:
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    grad = torch.randn_like(q)
    return lambda: torch.autograd.grad(function(*leaves), leaves, grad)


def compiled_flex(predicate: Callable, length: int):
    """flex_attention, with its mask of the predicate, as a function of q, k, v; the seconds the mask took."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch.compiler.reset()  # each predicate is a program of its own
    create = torch.compile(create_block_mask)
    arguments = (predicate, None, None, length, length, "cpu")
    create(*arguments)
    building = seconds(lambda: create(*arguments))
    mask, attend = create(*arguments), torch.compile(flex_attention)
    return lambda q, k, v: attend(q, k, v, block_mask=mask), building


def check(functions: dict[str, Callable], q, k, v) -> None:
    first, *others = (function(q, k, v) for function in functions.values())
    for name, other in zip(list(functions)[1:], others, strict=True):
        error = (first - other).abs().max().item()
        if error > TOLERANCE[q.dtype]:
            raise SystemExit(f"{name} differs from {next(iter(functions))} by {error}")


def measure(functions: dict[str, Callable], q, k, v, args: argparse.Namespace):
    """Medians forward, and with the backward where there is one."""
    check(functions, q, k, v)
    forward = {name: lambda f=f: f(q, k, v) for name, f in functions.items()}
    both = {name: with_backward(f, q, k, v) for name, f in functions.items() if name != "flex"}
    return medians(forward, args), medians(both, args)


def row(name: str, mask: masks.BlockMask, forward: dict, both: dict, building: dict[str, float]) -> None:
    counts = mask.counts()
    cells = [f"{name:<16}{counts.visible / counts.total:>9.2%}{counts.partial / counts.total:>9.2%}"]
    cells += [f"{building[key] * 1e3:>9.0f}" if key in building else " " * 9 for key in ("build", "create")]
    for times, names in ((forward, ("block", "dense", "torch", "flex")), (both, ("block", "dense", "torch"))):
        cells.append(f"{times['block']:>10.1f}{times['block'] / counts.visible * 1e3:>9.1f}")
        cells += [f"{times[key]:>9.1f}" if key in times else " " * 9 for key in names[1:]]
    print("".join(cells), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--length", type=int, default=16384)
    parser.add_argument("--heads", type=int, default=1)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5, help="most samples of each function")
    parser.add_argument("--seconds", type=float, default=10.0, help="after which a function gets no more")
    parser.add_argument("--only", nargs="+", help="patterns by the beginnings of their names")
    parser.add_argument("--no-flex", action="store_true", help="without flex_attention: nothing is compiled")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    shape = (1, args.heads, args.length, args.head_dim)
    q, k, v = (torch.randn(shape, dtype=getattr(torch, args.dtype)) for _ in range(3))

    print(f"N {args.length}, H {args.heads}, D {args.head_dim}, {args.dtype}, {args.threads} threads; ms")
    print(f"{'':<16}{'':>36}{'forward':>19}{'':>27}{'forward and backward':>19}")
    print(
        f"{'pattern':<16}{'visible':>9}{'partial':>9}{'build':>9}{'create':>9}{'block':>10}{'us/block':>9}"
        f"{'dense':>9}{'torch':>9}{'flex':>9}{'block':>10}{'us/block':>9}{'dense':>9}{'torch':>9}"
    )
    causal = {
        "block": lambda q, k, v: attn_ext.attention(q, k, v, causal=True),
        "torch": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
    }
    row("causal=True", masks.causal(args.length), *measure(causal, q, k, v, args), {})
    for name, pattern in patterns(args.length).items():
        if args.only and not any(name.startswith(start) for start in args.only):
            continue
        mask, dense = pattern.build(), pattern.build().to_dense()
        building = {"build": seconds(pattern.build)}
        functions = {
            "block": lambda q, k, v, mask=mask: attn_ext.attention(q, k, v, block_mask=mask),
            "dense": lambda q, k, v, dense=dense: attn_ext.attention(q, k, v, mask=dense),
            "torch": lambda q, k, v, dense=dense: F.scaled_dot_product_attention(q, k, v, dense),
        }
        if not args.no_flex:
            functions["flex"], building["create"] = compiled_flex(pattern.predicate, args.length)
        row(name, mask, *measure(functions, q, k, v, args), building)


if __name__ == "__main__":
    main()
