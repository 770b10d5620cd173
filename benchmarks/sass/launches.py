"""Block size and dynamic shared memory of every kernel, as attn_ext's launch planner says."""

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator

from .build import Launch
from .gpus import GPUS

HEAD_DIMS = (32, 64, 96, 128, 192, 256, 320)  # the buckets, and one for kernels that take any


def planned(arch: str) -> tuple[dict[str, Launch], str]:
    """(kernel -> launch, what is not known and why). attn_ext need not be installed to read machine code.

    For kernels that a GPU of this architecture would not be given, as on the others.
    """
    try:
        from attn_ext import launch_plan
    except ImportError as error:
        return {}, f"Dynamic shared memory is not known: {error}"
    found: dict[str, Launch] = {}
    problems: set[str] = set()
    for each in dict.fromkeys((arch, *(gpu.arch for gpu in GPUS.values()))):
        for name, launch in _launches(launch_plan, each, problems).items():
            found.setdefault(name, launch)
    with _environment(ATTN_EXT_KERNELS="sm90"):
        found |= {n: x for n, x in _launches(launch_plan, "sm_90", problems).items() if "_sm90_" in n}
    return found, " ".join(f"launch_plan refuses: {text}" for text in sorted(problems))


@contextlib.contextmanager
def _environment(**variables: str) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _launches(launch_plan: Callable, arch: str, problems: set[str]) -> dict[str, Launch]:
    import torch

    found: dict[str, Launch] = {}
    prefill, decode = (32, 1024, 1024), (4, 1, 8192)  # H, Nq, Nk: tiles for a whole GPU, or one query
    types = {"float16": HEAD_DIMS, "bfloat16": HEAD_DIMS, "float32": HEAD_DIMS, "float64": (64,)}
    for name, head_dims in types.items():
        for d, (heads, queries, keys) in itertools.product(head_dims, (prefill, decode)):
            # Never written, so that these take no memory. No expand(): TMA takes no strides of 0.
            dtype = getattr(torch, name)
            q, k = (torch.empty(1, heads, n, d, dtype=dtype) for n in (queries, keys))
            every_term = {
                "bias": torch.zeros(1, 1, 1, 1, dtype=dtype),
                "alibi_slopes": torch.zeros(heads),
                "sinks": torch.zeros(heads),
            }
            sums = torch.float64 if name == "float64" else torch.float32
            saved = {"out": q, "lse": torch.zeros(1, heads, queries, dtype=sums)}
            directions = (
                {"direction": "forward"},
                {"direction": "backward", **saved, "grad_out": q},
                {"direction": "jvp", **saved},
            )
            tf32 = (False, True) if name == "float32" else (False,)
            for terms, io, allow_tf32 in itertools.product(
                ({}, {"causal": True}, every_term), directions, tf32
            ):
                options = {"arch": arch, "allow_tf32": allow_tf32, **io, **terms}
                try:
                    plan = launch_plan(q, k, k, **options)
                except (RuntimeError, ValueError) as error:  # reported: it is no fault of the machine code
                    problems.add(str(error))
                    continue
                for launch in plan.launches:
                    before = found.get(launch.kernel, Launch(0, 0)).dynamic_shared_bytes
                    most = max(before, launch.shared_bytes)
                    found[launch.kernel] = Launch(launch.block[0], most)
    return found
