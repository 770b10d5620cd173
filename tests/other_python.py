"""Other Python processes that import the very attn_ext under test, installed or built in place."""

import os
import subprocess
import sys
from pathlib import Path

import attn_ext

# `python -c` and `python -m` import from the current directory first. From the repository they would find the
# source tree, which has no compiled module after a plain `pip install .`.
IMPORT_FROM = Path(attn_ext.__file__).parents[1]


def environment(**variables):
    return {**os.environ, "PYTHONPATH": str(IMPORT_FROM), **variables}


def run_python(*arguments, **variables):
    """Runs `python *arguments` with these environment variables to its end, at most five minutes."""
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=IMPORT_FROM,
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def start_python(*arguments, **variables):
    """Starts the same and returns at once; stdout and stderr are pipes."""
    return subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        cwd=IMPORT_FROM,
        env=environment(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
