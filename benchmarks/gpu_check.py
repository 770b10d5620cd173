"""Checks attn_ext on this machine's NVIDIA GPU in under 8 minutes: the CUDA tests, then speed beside torch.

    python benchmarks/gpu_check.py                     everything; writes gpu_check.json and gpu_check.txt
    python benchmarks/gpu_check.py --no-tests --only 'D128.*backward'

Builds nothing: it uses the attn_ext that Python imports (PYTHONPATH=. for one that was built in place).
Needs torch 2.10 or newer, and pytest for the tests. Exit status: 0 all right, 1 something failed or was
wrong, 2 this machine cannot run it.

How it measures:

- attn_ext and each of torch's SDPA back ends (flash, cudnn, efficient, math), in turns, in one process.
- CUDA events around one call, median of the samples. Before each, a write of twice the size of the L2 cache
  empties it and keeps the GPU busy while Python queues the call: only longer launch costs count.
- TFLOP/s count 4 D operations for each visible (query, key) pair forward, 10 D backward; GB/s count every
  tensor once. Prefill has 16384 tokens and 2048 features, whatever the length; "tf32" is float32 with torch's
  switch on.
- The ratio is the time of torch's fastest back end over ours: above 1, attn_ext is faster.
- On a Hopper GPU "attn_ext" has the kernels for sm_80, the default, and "sm90" those that
  ATTN_EXT_KERNELS=sm90 chooses; the table's end says which should be the default.
- Results are compared before they are timed: what differs is reported as WRONG and fails the check.

Each part has its share of the time; what was not reached is listed. A kernel that hangs or crashes costs its
own case, and results are written as they come.
"""

import argparse
import json
import math
import subprocess
import sys
import time
from pathlib import Path

from gpu.cases import Case, all_right, cases, render, row
from gpu.watch import run_tests, watch

ROOT = Path(__file__).resolve().parents[1]
TEST_ARGUMENTS = ("-m", "gpu", "tests")
ALL_SECONDS = 450  # half a minute of the 8 minutes for the start, and for processes to end
TEST_SECONDS = 150
DECODE_SECONDS = 60  # prefill has what is left


def cannot_run() -> str:
    """Why this machine cannot run the check; "" where it can."""
    try:
        import torch

        from attn_ext import _info
    except ImportError as error:
        return str(error)
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA: install a CUDA build of torch"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no NVIDIA GPU here that it can use"
    major, minor = torch.cuda.get_device_capability()
    if major < 8:
        name = torch.cuda.get_device_name()
        return f"{name} is sm_{major}{minor}: attn_ext's CUDA kernels need sm_80 (Ampere) or newer"
    module, problem = _info.load_cuda()
    return "" if module else f"attn_ext's CUDA kernels: {problem}"


def environment() -> dict[str, str]:
    import torch

    import attn_ext

    def output(*command: str) -> str:
        try:
            return subprocess.run(
                command, capture_output=True, text=True, cwd=ROOT, check=False
            ).stdout.strip()
        except OSError:
            return ""

    device = torch.cuda.get_device_properties(0)
    state = "driver_version,clocks.max.sm,clocks.sm,power.limit,temperature.gpu"
    return {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "GPU": f"{device.name}, sm_{device.major}{device.minor}, {device.multi_processor_count} SMs, "
        f"{device.total_memory / 2**30:.0f} GiB",
        "nvidia-smi": f"{state}: "
        + output("nvidia-smi", "-i", "0", f"--query-gpu={state}", "--format=csv,noheader"),
        "attn_ext": f"{attn_ext.__version__} {output('git', 'describe', '--always', '--dirty')}",
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}",
    }


def work() -> None:
    """The measuring process: a list of cases on its input, a line of JSON for each on its output."""
    from gpu.measure import measure

    for values in json.loads(sys.stdin.read()):
        print(json.dumps({"case": values, **measure(Case(*values), "cuda")}), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=ALL_SECONDS, help="for all; default %(default)s")
    parser.add_argument("--no-tests", action="store_true", help="measure only")
    parser.add_argument("--only", default="", metavar="REGEX", help="cases whose name, as printed, has this")
    parser.add_argument("--json", type=Path, default=Path("gpu_check.json"), metavar="FILE")
    parser.add_argument("--table", type=Path, default=Path("gpu_check.txt"), metavar="FILE")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work()
        return 0
    start = time.monotonic()
    if reason := cannot_run():
        print(f"gpu_check: {reason}", file=sys.stderr)
        return 2

    tests = {"passed": True, "says": "not run"}
    report: dict = {"environment": environment(), "tests": tests, "results": [], "not_reached": []}

    def save() -> None:
        args.json.write_text(json.dumps(report, indent=1))
        args.table.write_text(render(report))

    def take(result: dict) -> None:
        report["results"].append(result)
        print(row(Case(*result["case"]), result), flush=True)
        save()

    if not args.no_tests:
        report["tests"] = run_tests(TEST_ARGUMENTS, ROOT, min(TEST_SECONDS, args.seconds / 3))
        print(f"tests: {report['tests']['says']}", flush=True)
        save()
    command = [sys.executable, str(Path(__file__).resolve()), "--worker"]
    for section, seconds in (("decode", DECODE_SECONDS), ("prefill", math.inf)):
        todo = [case for case in cases(args.only) if case.section == section]
        deadline = min(time.monotonic() + seconds, start + args.seconds)
        report["not_reached"] += map(str, watch(command, todo, deadline, take))
        save()
    print(f"\n{render(report)}\n{time.monotonic() - start:.0f} s; see {args.json} and {args.table}")
    return 0 if all_right(report) else 1


if __name__ == "__main__":
    sys.exit(main())
