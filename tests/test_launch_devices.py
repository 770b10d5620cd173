"""Known faults with several GPUs: work done on the current device, and launches whose errors are lost."""

import subprocess

import nvcc
import pytest
import torch

from attn_ext import attention, ops, scaled_dot_product_attention

EXPECTED = """\
device 1
allow 65536 bytes on 1
launch 1 on 1, stream 101
launch 2 on 1, stream 101
device 0
allow 65536 bytes on 0
launch 1 on 0, stream 100
launch 2 on 0, stream 100
device 1
launch 1 on 1, stream 101
device 0
attn_ext: cannot launch some_kernel (grid 1, block 128, 65536 bytes of shared memory): invalid configuration
current: 0
"""


@nvcc.needed
def test_a_plan_runs_on_the_device_of_its_tensors(tmp_path):
    # flashinfer#452, #924, flash-attention#1793; pytorch#142228: an error of a launch that nobody asked for
    program = tmp_path / "launch_on_devices"
    sources = (nvcc.CSRC / "cuda" / "launch.cu", nvcc.ROOT / "tests" / "cpp" / "launch_on_devices.cpp")
    command = [nvcc.compiler()[0], "-x", "c++", "-std=c++17", "-cudart", "none", "-I", nvcc.CSRC]
    subprocess.run([*command, "-o", program, *sources], check=True, capture_output=True, timeout=120)
    assert subprocess.check_output(program, text=True, timeout=60) == EXPECTED


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("function", [attention, scaled_dot_product_attention])
def test_tensors_of_two_devices_are_refused(function, place, monkeypatch):
    monkeypatch.setattr(ops, "CUDA_PROBLEM", "")
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):  # no such device is needed
        tensors = [torch.empty(1, 1, 2, 4, device=f"cuda:{int(n == place)}") for n in range(3)]
        with pytest.raises(TypeError, match=r"same device, got .*cuda:1"):
            function(*tensors)
