"""What was built and what this machine offers; whether its kernels compute right; how fast they are."""

import argparse
import sys

from . import _C, bench, doctor
from ._info import report


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m attn_ext", description=__doc__)
    parser.add_argument(
        "command",
        nargs="?",
        choices=["info", "doctor", "bench"],
        default="info",
        help="info: the default; doctor: every kernel that this machine would use, beside the formula in "
        "float64 (exit status 1 if one is wrong); bench: ours beside torch's on the CPU; each under a minute",
    )
    command = parser.parse_args().command
    if command != "info":
        try:
            _C.cpu_isa()
        except RuntimeError as error:  # ATTN_EXT_CPU_ISA names what the machine cannot run
            parser.exit(1, f"{parser.prog}: error: {error}\n")
    if command == "bench":
        bench.main()
    elif command == "doctor":
        sys.exit(doctor.main())
    else:
        print(report())


if __name__ == "__main__":
    main()
