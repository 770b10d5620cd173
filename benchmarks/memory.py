"""Memory that attention needs beyond its tensors: attn_ext and torch's scaled_dot_product_attention, CPU.

    python benchmarks/memory.py                         N = 32768, 1 head, D 64, float32
    python benchmarks/memory.py --length 4096 --only attn_ext

Each number comes from its own process, which makes its tensors, notes its resident memory, runs forward (or
forward and backward) once and reads its peak from getrusage. Shown is what the peak grew by, less the tensors
that came out: the output and the gradients. Mask and bias are (1, 1, 1, N), the same for every query: a bool
padding mask and a bias that wants a gradient. For the bias torch holds three N x N tensors, 12 GiB at the
default length, so it is measured only with --cases bias.
"""

import argparse
import json
import os
import resource
import subprocess
import sys

# torch is imported in the children only: a child's peak starts at the size that its parent had.

HEAD_DIM = 64
MIB = 2**20
CASES = ("plain", "mask", "bias")


def measure(function: str, case: str, length: int, backward: bool) -> float:
    """MiB over the tensors, in this process."""
    import torch
    import torch.nn.functional as F

    import attn_ext

    sdpa = {"attn_ext": attn_ext, "torch": F}[function].scaled_dot_product_attention

    def tensors(n: int) -> tuple[list[torch.Tensor], torch.Tensor | None, torch.Tensor]:
        leaves = [torch.randn(1, 1, n, HEAD_DIM, requires_grad=backward) for _ in range(3)]
        mask = None
        if case == "mask":
            mask = torch.arange(n).lt(n - n // 8).view(1, 1, 1, n)
        elif case == "bias":
            mask = torch.randn(1, 1, 1, n, requires_grad=backward)
            leaves.append(mask)
        return leaves, mask, torch.randn(1, 1, n, HEAD_DIM)

    def run(leaves: list[torch.Tensor], mask: torch.Tensor | None, grad: torch.Tensor) -> list[torch.Tensor]:
        out = sdpa(*leaves[:3], mask)
        return [out, *torch.autograd.grad(out, leaves, grad)] if backward else [out]

    run(*tensors(256))  # loads libraries, starts threads
    inputs = tensors(length)
    with open("/proc/self/statm") as statm:
        before = int(statm.read().split()[1]) * resource.getpagesize()
    results = run(*inputs)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return (peak - before - sum(t.nbytes for t in results)) / MIB


def measure_in_child(function: str, case: str, length: int, backward: bool) -> str:
    """MiB as text, or how it failed."""
    task = json.dumps([function, case, length, backward])
    child = subprocess.run([sys.executable, __file__, "--child", task], capture_output=True, text=True)
    if child.returncode == 0:
        return str(round(float(child.stdout)))
    last = (child.stderr.strip().splitlines() or [""])[-1]
    return "out of memory" if "allocate" in last or child.returncode == -9 else last


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--length", type=int, default=32768)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=["plain", "mask"])
    parser.add_argument("--only", choices=("attn_ext", "torch"))
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(measure(*json.loads(args.child)))
        return
    functions = [args.only] if args.only else ["attn_ext", "torch"]
    n = args.length
    print(f"float32, B 1, H 1, N {n}, D {HEAD_DIM}, {os.cpu_count()} cores; MiB over the tensors")
    print(f"(a tensor {n * HEAD_DIM * 4 // MIB} MiB, an N x N one {n * n * 4 // MIB} MiB)\n")
    print(f"{'':<24}" + "".join(f"{function:>14}" for function in functions))
    for case in args.cases:
        for backward in (False, True):
            cells = [measure_in_child(function, case, n, backward) for function in functions]
            name = f"{case} {'forward, backward' if backward else 'forward'}"
            print(f"{name:<24}" + "".join(f"{cell:>14}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
