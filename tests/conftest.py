"""Sees to it that the tests import the attn_ext that was installed or built."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# `python -m pytest` puts the current directory first on sys.path: the source tree, which has no compiled
# module after a plain `pip install .`. After `setup.py build_ext --inplace` it has one and is to be tested.
if not list((ROOT / "attn_ext").glob("_C.*.so")):
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT]

import torch  # noqa: E402

MOST_PLACES = 100  # that are printed: --kernel-lines

# One thread a process: pytest-xdist runs several processes, and threads that wait for each other across
# processes make tests a hundred times slower. Tests about threads set their own number.
torch.set_num_threads(1)


def pytest_collection_modifyitems(config, items):
    """Tests marked slow run only where -m names them: `pytest -m slow`; those of a CUDA kernel in a row."""
    if "slow" not in config.getoption("markexpr"):
        slow = [item for item in items if item.get_closest_marker("slow")]
        items[:] = [item for item in items if not item.get_closest_marker("slow")]
        config.hook.pytest_deselected(items=slow)
    files = {}
    items.sort(key=lambda item: (files.setdefault(item.path, len(files)), _kernel(item)))


def _kernel(item):
    """The parameters of a test that choose its CUDA kernels, to sort by.

    A kernel's first launch in ptxrun takes several times as long as another one, and few kernels are kept.
    """
    if not item.path.name.startswith("test_cuda_") or not hasattr(item, "callspec"):
        return "", 0, ""
    chosen = item.callspec.params
    width = max(chosen.get(name, 0) for name in ("bucket", "dim", "dim_v"))
    return str(chosen.get("route", chosen.get("kernel", ""))), width, str(chosen.get("dtype", ""))


def pytest_addoption(parser):
    parser.addoption(
        "--kernel-lines", metavar="FILE", help="write which PTX lines of CUDA kernels no test reached"
    )


def pytest_configure(config):
    config.kernel_lines = []  # what each process of pytest-xdist reports


def pytest_sessionfinish(session):
    """See kernel_lines.py."""
    config = session.config
    if not config.getoption("kernel_lines"):
        return
    import kernel_lines

    config.kernel_lines.append(kernel_lines.gathered())
    if hasattr(config, "workeroutput"):
        config.workeroutput["kernel_lines"] = config.kernel_lines
        return
    text, unexplained = kernel_lines.report(kernel_lines.merge(config.kernel_lines))
    Path(config.getoption("kernel_lines")).write_text(text + "\n")
    print(f"\n{len(unexplained)} places in CUDA kernels never executed and not in kernel_lines.EXPECTED")
    print("\n".join(unexplained[:MOST_PLACES]))
    if unexplained and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    """A process of pytest-xdist has ended."""
    node.config.kernel_lines += getattr(node, "workeroutput", {}).get("kernel_lines", [])
