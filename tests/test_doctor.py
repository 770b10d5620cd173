"""`python -m attn_ext doctor`: it reaches every kernel, and says so when one is wrong."""

import re

import cuda_kernels
import pytest
import torch

from attn_ext import __main__, attention, doctor

CPU = torch.device("cpu")


def exported():
    """Kernels of the instantiation files, by their names."""
    texts = (path.read_text() for path in cuda_kernels.INSTANTIATIONS.glob("*.cu"))
    code = "\n".join(re.sub(r"#include.*|//.*", "", text) for text in texts)
    return set(re.findall(r"\battn_\w+_(?:f16|bf16|f32|f64|tf32)\w*", code))


def test_its_cases_launch_every_kernel():
    launched = set()
    for arch, choice in (("sm_80", None), ("sm_86", None), ("sm_90", "sm90")):  # sm_86: less shared memory
        with doctor._kernels_for(choice):
            for case in doctor.cases(cuda=True):
                launched.update(doctor.kernels(case, CPU, arch))
    assert exported() - launched == set()


def few_cases(cuda):
    return [case for case in ALL_CASES(cuda) if case.dtype == torch.float32]


ALL_CASES = doctor.cases


def test_command(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "cases", few_cases)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr("sys.argv", ["attn_ext", "doctor"])
    with pytest.raises(SystemExit) as done:
        __main__.main()
    lines = capsys.readouterr().out.splitlines()
    assert done.value.code == 0
    assert [line.split()[0] for line in lines[:6]] == ["pass"] * 6
    assert "no GPU is visible" in lines[-2]
    assert lines[-1] == "all passed"


@pytest.mark.parametrize("fault", ["a wrong number", "NaN", "an exception"])
def test_a_wrong_kernel_is_told(monkeypatch, capsys, fault):
    def broken(**call):
        out, lse = attention(**call)
        if call["k"].shape[2] == 2000:  # decoding alone
            if fault == "an exception":
                raise RuntimeError("no such kernel\nand more")
            lse = lse * (1.001 if fault == "a wrong number" else torch.nan)
        return out, lse

    monkeypatch.setattr(doctor, "cases", few_cases)
    monkeypatch.setattr(doctor, "attention", broken)
    assert doctor.check_device(CPU) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["pass"] * 5 + ["FAIL"]
    assert ("no such kernel" if fault == "an exception" else "in lse") in lines[-1]


def test_what_it_sets_is_given_back(monkeypatch):
    monkeypatch.delenv("ATTN_EXT_KERNELS", raising=False)
    before = torch.backends.cuda.matmul.allow_tf32
    with doctor._kernels_for("sm90"), doctor._tf32(not before):
        pass
    assert torch.backends.cuda.matmul.allow_tf32 == before
    assert "ATTN_EXT_KERNELS" not in doctor.os.environ
