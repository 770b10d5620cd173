"""What the tests of the kernels for Hopper share: where they run, and problems of both directions."""

import cuda_kernels
import pytest
import torch

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
DEVICES = [
    cuda_kernels.DEVICES[0],
    pytest.param("cuda", marks=pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")),
]
on_each_device = pytest.mark.parametrize("device", DEVICES)

# name: ((queries, keys), options)
OPTIONS = {
    "causal": ((257, 363), {"causal": True}),
    "a window that most rows see nothing in": ((300, 70), {"window": (30, 0), "causal": "upper_left"}),
    "lengths and a band": (
        (203, 330),
        {"causal": True, "key_lengths": [128, 300], "query_lengths": [0, 203]},
    ),
}


def rows_first(*tensors):
    """The same numbers as views of (B, N, H, D) memory."""
    return [t.transpose(1, 2).contiguous().transpose(1, 2) for t in tensors]
