"""What the tests of ptxrun share: small CUDA kernels from source text, and bfloat16 in numpy."""

import numpy as np
import nvcc

import ptxrun
from ptxrun import lanes, scheduler

HEAD = """
#include <cstdint>
using u32 = uint32_t; using u64 = unsigned long long; using i64 = long long;
__device__ inline u32 smem_u32(const void *p) { return (u32)__cvta_generic_to_shared(p); }
#define K extern "C" __global__ void
"""
HALF = """
#include <cuda_fp16.h>
#include <cuda_bf16.h>
"""


def build(src, arch="sm_80", flags=()):
    return ptxrun.Module(nvcc.ptx_of_text(HEAD + src, arch, flags))


def run(src, *args, grid=1, block=32, name="k", arch="sm_80", flags=(), **options):
    """Runs kernel `name` of a CUDA source."""
    return build(src, arch, flags).launch(name, grid, block, list(args), **options)


def batch_always(monkeypatch):
    """Plans batches from the first run on, however small they are."""
    monkeypatch.setattr(scheduler, "PLAN_LENGTH", 1)
    monkeypatch.setattr(scheduler, "PLAN_AFTER", 0)
    monkeypatch.setattr(lanes, "WORTH", {})
    monkeypatch.setattr(lanes, "WORTH_OTHERS", 1)


def rng(seed=0):
    return np.random.default_rng(seed)


def bf16(x):
    """f32 -> bf16 bits, by nearest-even on the top half (independent of the tool)."""
    u = np.asarray(x, np.float32).view(np.uint32).astype(np.uint64)
    low, high = u & 0xFFFF, u >> 16
    up = (low > 0x8000) | ((low == 0x8000) & (high & 1 == 1))
    return (high + up).astype(np.uint16)


def unbf16(u):
    return (np.asarray(u).astype(np.uint32) << 16).view(np.float32)


def signed(x):
    """32 bits as an int."""
    return x - (1 << 32) if x >> 31 else x
