"""PEP 517 and PEP 660 build backend: setuptools, against the torch that is already installed.

Build isolation hides the environment's packages from the build, and a requirement "torch" would download a
second one, perhaps of another kind (CUDA, CPU). So the build hooks look for the environment's own torch and
append its directories at the end of sys.path: setuptools and ninja still come from the isolated environment.
torch becomes a build requirement only where there is none. Metadata and sdist need no torch.
"""

import sys

from setuptools import build_meta
from setuptools.build_meta import (  # noqa: F401  (hooks that need nothing of ours)
    build_sdist,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

from . import find_torch


def get_requires_for_build_wheel(config_settings=None):
    return _torch_requirement() + build_meta.get_requires_for_build_wheel(config_settings)


def get_requires_for_build_editable(config_settings=None):
    return _torch_requirement() + build_meta.get_requires_for_build_editable(config_settings)


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    _make_torch_importable()
    return build_meta.build_wheel(wheel_directory, config_settings, metadata_directory)


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    _make_torch_importable()
    return build_meta.build_editable(wheel_directory, config_settings, metadata_directory)


def _torch_requirement() -> list[str]:
    torch = find_torch.importable() or find_torch.of_environment()[0]
    if torch is None:
        return [find_torch.REQUIREMENT]
    find_torch.require_supported(torch)
    return []


def _make_torch_importable() -> None:
    if find_torch.importable() is None:
        sys.path.extend(p for p in find_torch.of_environment()[1] if p not in sys.path)
