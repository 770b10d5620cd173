"""Sees to it that the tests import the attn_ext that was installed or built."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# `python -m pytest` puts the current directory first on sys.path: the source tree, which has no compiled
# module after a plain `pip install .`. After `setup.py build_ext --inplace` it has one and is to be tested.
if not list((ROOT / "attn_ext").glob("_C.*.so")):
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT]

import torch  # noqa: E402

# One thread a process: pytest-xdist runs several processes, and threads that wait for each other across
# processes make tests a hundred times slower. Tests about threads set their own number.
torch.set_num_threads(1)
