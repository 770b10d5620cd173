"""Prints what the CUDA kernels' machine code says of them. Needs `pip install '.[dev]'`, and nvcc where it
compiles; no GPU.

    python benchmarks/sass_report.py                   every kernel, FlashAttention beside it, predictions
    python benchmarks/sass_report.py --only 'fwd.*d64' --loops   some kernels, and what their loops hold
    python benchmarks/sass_report.py --gate            the same for CI: exit status 1 where a gate fails
    python benchmarks/sass_report.py --installed       what the installed attn_ext holds, not compiled anew
    python benchmarks/sass_report.py --gpu H100 --problem 4,16,16,8192,8192,128,causal,backward

docs/machine_code.md explains the figures.
"""

import argparse
import dataclasses
import json
import sys
import tempfile
import time
from pathlib import Path

from sass import build, launches, tables
from sass.disassembly import ToolError, find_tool
from sass.gpus import A100, GPUS
from sass.roofline import Problem

PROBLEMS = [  # 16k tokens and 2048 features, as in FlashAttention's own figures
    Problem(2, 2048 // d, 2048 // d, 8192, 8192, d, causal, direction)
    for direction in ("forward", "backward")
    for d in (64, 128)
    for causal in (False, True)
]


def parse_problem(text: str) -> Problem:
    try:
        *sizes, mask, direction = text.split(",")
        batch, heads, kv_heads, queries, keys, head_dim = map(int, sizes)
    except ValueError:
        mask = direction = ""
    if mask not in ("full", "causal") or direction not in ("forward", "backward"):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not of the form B,H,Hkv,Nq,Nk,D,full|causal,forward|backward"
        )
    return Problem(batch, heads, kv_heads, queries, keys, head_dim, mask == "causal", direction)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", metavar="REGEX", help="instantiation files whose name has this")
    parser.add_argument("--gpu", choices=GPUS, default=A100.name, help="read the code built for this one")
    parser.add_argument("--installed", action="store_true", help="read the installed attn_ext's code")
    parser.add_argument("--gate", action="store_true", help="exit with 1 where a gate fails; A100 only")
    parser.add_argument("--loops", action="store_true", help="print what every main loop holds")
    parser.add_argument(
        "--problem", action="append", type=parse_problem, metavar="B,H,Hkv,Nq,Nk,D,MASK,DIRECTION"
    )
    parser.add_argument("--dtype", choices=("f16", "bf16"), default="f16", help="of the predictions")
    parser.add_argument("--jobs", type=int, help="files built and read at a time; default: one a core")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure to this file")
    args = parser.parse_args()
    gpu, start = GPUS[args.gpu], time.monotonic()
    if args.gate and (gpu is not A100 or args.only):
        parser.error("--gate is about every kernel's code for the A100, as FlashAttention-2's figures are")
    paths = build.sources(args.only)
    if not paths:
        parser.error(f"no file of {build.INSTANTIATIONS} matches {args.only!r}")
    planned, note = launches.planned(gpu.arch)
    try:
        for tool in ("nvdisasm", "cuobjdump", *([] if args.installed else ["nvcc"])):
            find_tool(tool)
        with tempfile.TemporaryDirectory() as folder:
            extracted = Path(folder) if args.installed else None
            if extracted:
                build.extract(build.installed_library(), extracted)
            kernels, failures = build.read_all(paths, gpu, planned, extracted, args.jobs)
    except ToolError as error:
        print(f"sass_report: {error}", file=sys.stderr)
        return 2
    by_name = {kernel.name: kernel for kernel in kernels}

    print(f"{len(kernels)} kernels for {gpu.name} ({gpu.arch}), {time.monotonic() - start:.0f} s. {note}")
    print("\n".join(tables.kernel_table(kernels)))
    if args.loops:
        print("\nMain loops\n" + "\n".join(tables.loop_details(kernels)))
    failures += [line for kernel in kernels for line in tables.fault_lines(kernel)]
    if gpu is A100:
        lines, over = tables.comparison_table(by_name)
        print("\nBeside FlashAttention-2's (on Hopper 3's) kernels for uneven lengths\n" + "\n".join(lines))
        failures += over if not args.only else []
    print(f"\nPredictions for {gpu.name}, {args.dtype}")
    print("\n".join(tables.prediction_table(args.problem or PROBLEMS, args.dtype, by_name)))
    if args.json:
        rows = [dataclasses.asdict(kernel) for kernel in kernels]
        args.json.write_text(json.dumps({"kernels": rows, "failures": failures}, indent=1))
    print("\n" + ("\n".join(["FAULTS", *failures]) if failures else "no faults"))
    return 1 if args.gate and failures else 0


if __name__ == "__main__":
    sys.exit(main())
