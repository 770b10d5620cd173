"""How fast this machine multiplies and reads now: the limits that cpu_bench.py sets its rates beside.

Virtual machines change their speed within seconds, with what their neighbours do. A rate alone says little
then: the share of what plain loops reach just before and after it says more. The loops are in cpu_limits.cpp,
which g++ (or $CXX) compiles when this is first asked for.
"""

import ctypes
import functools
import os
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

SOURCE = Path(__file__).with_suffix(".cpp")
VECTOR_BYTES = {"avx2": 32, "avx512": 64, "amx": 64}  # by what attn_ext._C.cpu_isa() says
ROUNDS = 100_000  # about a millisecond


@functools.cache
def _loops() -> ctypes.CDLL:
    with tempfile.TemporaryDirectory() as directory:
        library = Path(directory) / "limits.so"
        flags = ["-std=c++17", "-O3", "-shared", "-fPIC", "-ffp-contract=fast", "-Wno-psabi"]
        subprocess.run([os.environ.get("CXX", "g++"), *flags, str(SOURCE), "-o", str(library)], check=True)
        loops = ctypes.CDLL(str(library))  # stays usable when the file is gone
    for name in ("fma_avx2", "fma_avx512", "read_memory"):
        getattr(loops, name).restype = ctypes.c_double
    loops.fma_per_round.restype = ctypes.c_int64
    return loops


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads)


def fma_rate(isa: str, threads: int) -> float:
    """GFLOP/s of float32 multiply-adds on so many threads, in the vectors of "avx2", "avx512" or "amx"."""
    loops, width = _loops(), VECTOR_BYTES[isa]
    loop = loops.fma_avx2 if width == 32 else loops.fma_avx512

    def work(_: int) -> float:
        sink = ctypes.c_float()
        seconds = loop(ctypes.c_int64(ROUNDS), ctypes.byref(sink))
        return 2 * ROUNDS * loops.fma_per_round(width) / seconds / 1e9

    return sum(_pool(threads).map(work, range(threads)))


def read_rate(tensor: torch.Tensor, threads: int) -> float:
    """GB/s at which so many threads read the memory of a contiguous tensor, each its part."""
    loops, size = _loops(), tensor.numel() * tensor.itemsize // threads // 256 * 256

    def work(thread: int) -> float:
        sink = ctypes.c_int64()
        address = ctypes.c_void_p(tensor.data_ptr() + thread * size)
        return size / loops.read_memory(address, ctypes.c_int64(size), ctypes.byref(sink)) / 1e9

    return sum(_pool(threads).map(work, range(threads)))
