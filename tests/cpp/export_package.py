"""Writes what tests/cpp/run_package.cpp runs: python export_package.py DIRECTORY

model.pt2          attention exported with dynamic shapes, compiled by AOTInductor
x_N.bin, y_N.bin   float32 input (2, N, 16) and what eager Python computes from it, for two lengths
"""

import sys
from pathlib import Path

import torch

import attn_ext


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = attn_ext.MultiHeadAttention(16, 4, batch_first=True, num_kv_heads=2)

    def forward(self, x):
        y = self.attention(x, x, x, need_weights=False)[0][:, None]
        return attn_ext.attention(y, y, y, causal=True, window=(6, 0), softcap=5.0)[:, 0]


def main():
    directory = Path(sys.argv[1])
    directory.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    model = Model().eval()
    length = torch.export.Dim("length", min=2, max=64)
    with torch.no_grad():
        program = torch.export.export(model, (torch.randn(2, 9, 16),), dynamic_shapes=[{1: length}])
        torch._inductor.aoti_compile_and_package(program, package_path=str(directory / "model.pt2"))
        for n in (9, 30):
            x = torch.randn(2, n, 16)
            x.numpy().tofile(directory / f"x_{n}.bin")
            model(x).contiguous().numpy().tofile(directory / f"y_{n}.bin")


if __name__ == "__main__":
    main()
