"""`python -m attn_ext`: true, complete, and never an error because of CUDA."""

import importlib

import pytest
import torch
from other_python import run_python

from attn_ext import _C, _info


def test_build_info_names_version_torch_and_cuda():
    info = _C.build_info()
    assert info["version"] == "0.1.0"
    assert info["torch"].split(".")[0].isdigit()
    assert isinstance(info["cuda"], bool)
    assert info["cuda_detail"]


def test_chosen_instruction_set_is_one_the_machine_runs():
    assert _C.cpu_isa() in _C.cpu_isas()
    assert "default" in _C.cpu_isas()


def test_report_names_what_people_ask_for():
    report = _info.report()
    for part in ("0.1.0", torch.__version__, _C.cpu_isa(), f"{torch.get_num_threads()} threads", "CUDA"):
        assert part in report


@pytest.mark.parametrize("env", [{}, {"CUDA_VISIBLE_DEVICES": ""}, {"ATTN_EXT_CPU_ISA": "sse9"}])
def test_command_line(env):
    done = run_python("-m", "attn_ext", **env)
    assert done.returncode == 0, done.stderr
    assert torch.__version__ in done.stdout
    for value in filter(None, env.values()):
        assert value in done.stdout


def test_cuda_that_was_not_built_is_a_sentence(monkeypatch):
    monkeypatch.setattr(_C, "build_info", lambda: {"cuda": False, "cuda_detail": "ATTN_EXT_CUDA=0"})
    assert _info.load_cuda() == (None, "not built (ATTN_EXT_CUDA=0)")


def test_cuda_that_does_not_load_is_a_sentence(monkeypatch):
    def fail(name):
        raise ImportError("libfoo.so: cannot open shared object file")

    monkeypatch.setattr(_C, "build_info", lambda: {"cuda": True, "cuda_detail": "13.0"})
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(importlib, "import_module", fail)
    module, problem = _info.load_cuda()
    assert module is None
    assert "libfoo.so" in problem


def test_cuda_module_reports_devices_without_raising():
    module, problem = _info.load_cuda()
    if module is None:
        pytest.skip(f"CUDA kernels: {problem}")
    found = module.list_devices()
    assert found["devices"] or found["problem"]
    assert all(50 <= architecture < 200 for architecture in module.architectures())
