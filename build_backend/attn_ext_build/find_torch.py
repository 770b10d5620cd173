"""Which torch the extension is built against, found without importing it."""

import importlib.util
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

MINIMUM = (2, 10)  # the stable ABI that csrc/ is written against (TORCH_TARGET_VERSION in setup.py)
REQUIREMENT = "torch>=2.10"

# Prints [torch's directory or null, the import path] of the interpreter as its user would start it.
PROBE = """
import importlib.util, json, sys
sys.path = [p for p in sys.path if p]
spec = importlib.util.find_spec("torch")
print(json.dumps([spec.origin if spec else None, sys.path]))
"""


class Torch(NamedTuple):
    version: str
    cuda: str | None  # the CUDA version torch was built with, e.g. "13.0"
    hip: str | None
    directory: Path


def importable() -> Torch | None:
    """The torch that `import torch` would give here and now."""
    spec = importlib.util.find_spec("torch")
    return _read(Path(spec.origin).parent) if spec and spec.origin else None


def of_environment() -> tuple[Torch | None, list[str]]:
    """The torch of the environment that pip installs into, and the import path on which it lives.

    pip runs a build backend with that environment's interpreter but hides its packages through PYTHONPATH (a
    sitecustomize) and PYTHONNOUSERSITE. A child of the same interpreter without them sees what the user sees:
    the virtual environment, the system's packages below it, and the user site. Under a front end that makes a
    virtual environment for the build (build, uv) the child finds nothing, and torch becomes a requirement.
    """
    hidden = ("PYTHONPATH", "PYTHONNOUSERSITE", "PYTHONHOME")
    env = {name: value for name, value in os.environ.items() if name not in hidden}
    answer = subprocess.run(
        [sys.executable, "-c", PROBE], env=env, capture_output=True, text=True, check=True
    )
    origin, path = json.loads(answer.stdout.splitlines()[-1])
    return (_read(Path(origin).parent), path) if origin else (None, [])


def require_supported(torch: Torch) -> None:
    """Ends the build with one line if `torch` is older than MINIMUM."""
    number = re.match(r"(\d+)\.(\d+)", torch.version)
    if number and tuple(map(int, number.groups())) < MINIMUM:
        raise SystemExit(
            f"attn_ext needs {REQUIREMENT}, but {torch.directory} is torch {torch.version}: "
            f"run  pip install --upgrade '{REQUIREMENT}'  first"
        )


def _read(directory: Path) -> Torch:
    # version.py holds plain assignments; importing torch for them would take seconds.
    facts = runpy.run_path(str(directory / "version.py"))
    return Torch(facts["__version__"], facts.get("cuda"), facts.get("hip"), directory)
