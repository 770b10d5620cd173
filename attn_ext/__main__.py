"""python -m attn_ext: what was built and what this machine offers."""

import argparse

from ._info import report


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m attn_ext", description=__doc__)
    parser.add_argument("command", nargs="?", choices=["info"], default="info", help="info (the default)")
    parser.parse_args()
    print(report())


if __name__ == "__main__":
    main()
