"""python -m attn_ext: what was built and what this machine offers; `bench`: how fast it is beside torch."""

import argparse

from ._info import report


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m attn_ext", description=__doc__)
    parser.add_argument(
        "command",
        nargs="?",
        choices=["info", "bench"],
        default="info",
        help="info: the default; bench: under a minute",
    )
    if parser.parse_args().command == "bench":
        from .bench import main as bench

        bench()
    else:
        print(report())


if __name__ == "__main__":
    main()
