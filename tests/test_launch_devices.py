"""Known faults with several GPUs: work done on the current device, and launches whose errors are lost."""

import nvcc
import ptxrun
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


LAUNCHER = ("cuda/launch.cu", "cuda/tensor_map.cu")  # built with a CUDA runtime of the program's own


@nvcc.needed
def test_a_plan_runs_on_the_device_of_its_tensors(tmp_path):
    # flashinfer#452, #924, flash-attention#1793; pytorch#142228: an error of a launch that nobody asked for
    assert nvcc.output_of("launch_on_devices", tmp_path, *LAUNCHER) == EXPECTED


@nvcc.needed
def test_tensor_maps_are_encoded_at_launch_and_old_drivers_are_told_apart(tmp_path):
    output = nvcc.output_of("launch_tensor_maps", tmp_path, *LAUNCHER)
    old_driver, params, refused, not_built = output.splitlines()
    assert "no cuTensorMapEncodeTiled" in old_driver
    assert "ATTN_EXT_KERNELS" in old_driver
    params = bytes.fromhex(params)
    box = (64, 176, 1, 1)  # columns, rows, head, batch
    wanted = ptxrun.TensorMap("bf16", 0x1000, (59, 48, 2, 3), (256, 128, 12288), box, "128B")
    assert (params[:8], params[-8:]) == (b"p" * 8, b"p" * 8)
    assert params[8:-8] == wanted.handle
    assert "refuses a tensor (CUresult 1)" in refused
    assert "attn_fwd_sm90_f16_d64: rebuild with 9.0a in TORCH_CUDA_ARCH_LIST" in not_built


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("function", [attention, scaled_dot_product_attention])
def test_tensors_of_two_devices_are_refused(function, place, monkeypatch):
    monkeypatch.setattr(ops, "CUDA_PROBLEM", "")
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):  # no such device is needed
        tensors = [torch.empty(1, 1, 2, 4, device=f"cuda:{int(n == place)}") for n in range(3)]
        with pytest.raises(TypeError, match=r"same device, got .*cuda:1"):
            function(*tensors)
