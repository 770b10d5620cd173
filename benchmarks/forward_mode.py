"""Forward mode (torch.func.jvp): attn_ext beside the plain formula, which is all that torch has for it. CPU.

    python benchmarks/forward_mode.py                    N 512 to 4096, 8 heads, D 64, float32

Tangents of q, k and v. Times: medians of samples that alternate in one process, in milliseconds; "ratio" is
the formula's time over ours. Memory: what one call adds to a process of its own at its peak, with results.
"""

import argparse
import resource
import statistics
import subprocess
import sys
import time

HEADS, HEAD_DIM = 8, 64


def problem(length: int):
    """{name: function of no arguments that computes out and its tangent}"""
    import torch
    from torch.func import jvp

    import attn_ext

    torch.manual_seed(0)
    x, t = (tuple(torch.randn(1, HEADS, length, HEAD_DIM) for _ in range(3)) for _ in range(2))

    def formula(q, k, v):
        return torch.softmax(q @ k.mT / HEAD_DIM**0.5, -1) @ v

    def ours(q, k, v):
        return attn_ext.attention(q, k, v)

    return {"attn_ext": lambda: jvp(ours, x, t), "formula": lambda: jvp(formula, x, t)}


def medians(length: int, seconds: float) -> list[float]:
    functions = list(problem(length).values())
    for f in functions:
        f()
    samples: list[list[float]] = [[], []]
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(samples[0]) < 3:
        for f, s in zip(functions, samples, strict=True):
            start = time.perf_counter()
            f()
            s.append(time.perf_counter() - start)
    return [statistics.median(s) * 1e3 for s in samples]


def growth(name: str, length: int) -> float:
    """MiB of the peak of this process over what it held before one call."""
    problem(64)[name]()  # loads libraries
    f = problem(length)[name]
    with open("/proc/self/statm") as statm:
        before = int(statm.read().split()[1]) * resource.getpagesize()
    f()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 - before / 2**20


def in_child(task: str, *arguments: object) -> list[float]:
    """What a process of its own prints. torch is imported there only: a peak starts at that of the parent."""
    command = [sys.executable, __file__, "--child", task, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [float(word) for word in done.stdout.split()]


def child(task: str, length: str, *arguments: str) -> None:
    import torch

    if task == "growth":
        print(growth(arguments[0], int(length)))
        return
    torch.set_num_threads(int(arguments[0]))
    print(*medians(int(length), float(arguments[1])))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(*args.child)
        return
    print(f"float32, B 1, H {HEADS}, D {HEAD_DIM}, {args.threads} threads")
    print(f"{'N':>6}{'attn_ext ms':>14}{'formula ms':>14}{'ratio':>8}{'attn_ext MiB':>15}{'formula MiB':>14}")
    for n in args.lengths:
        ours, formula = in_child("time", n, args.threads, args.seconds)
        memory = [in_child("growth", n, name)[0] for name in ("attn_ext", "formula")]
        print(
            f"{n:>6}{ours:>14.1f}{formula:>14.1f}{formula / ours:>8.2f}{memory[0]:>15.0f}{memory[1]:>14.0f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
