"""Leaves out each barrier, wait, commit and fence of a CUDA kernel in turn: does a test notice?

    python tests/kernel_mutations.py attn_fwd_sm80_f16_d64

A synchronisation that nobody misses is either redundant, and then it does not belong into the source, or it
guards against something that the cases do not show. Runs in ptxrun, some seconds a synchronisation.
"""

import argparse
import ctypes
import itertools
import os
import re
from typing import NamedTuple

import cuda_kernels
import nvcc
import oracle
import ptxrun
import torch
from kernel_lines import place, source_lines
from ptxrun import mutate

DTYPES = {
    **{"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32, "f64": torch.float64},
    "tf32": torch.float32,
}


class Mutation(NamedTuple):
    line: int  # of the PTX
    instruction: str
    source: str  # "file.cuh: text of the source line"
    outcome: str  # how it was noticed, "not executed" or "not noticed"

    def __str__(self):
        return f"PTX line {self.line}: {self.instruction}  ({self.source}): {self.outcome}"


class _Recorder:
    """A ptxrun.Module that keeps the lines that none of its launches reached."""

    def __init__(self, module):
        self.module, self.unexecuted = module, None

    def launch(self, *args, **options):
        r = self.module.launch(*args, **options)
        lines = set(r.unexecuted)
        self.unexecuted = lines if self.unexecuted is None else self.unexecuted & lines
        return r


class _Earlier:
    """A ptxrun.Module whose launch is carried out once; `kept` then holds what it left in the results."""

    def __init__(self, module, kept):
        self.module, self.kept = module, kept

    def launch(self, name, grid, block, args, shared_bytes, memory, **options):
        ranges = zip(memory.names, memory.starts, memory.ends, memory.writable, strict=True)
        results = {buffer: (start, end - start) for buffer, start, end, writable in ranges if writable}
        if not self.kept:
            self.module.launch(name, grid, block, args, shared_bytes, memory, **options)
            self.kept.update({buffer: ctypes.string_at(*extent) for buffer, extent in results.items()})
        for buffer, (start, size) in results.items():
            ctypes.memmove(start, self.kept[buffer], size)


def mutations(kernel, cases, arch="sm_80"):
    """Tries every synchronisation of a kernel.

    cases: functions of an attention function (see cuda_kernels.attention_on) that fail where it is wrong.
    Yields a Mutation each.
    """
    text = cuda_kernels.ptx(kernel, arch)
    origin = source_lines(text)
    recorder, earlier = _Recorder(ptxrun.Module(text)), {}
    _run(kernel, recorder, cases, arch, earlier)
    if recorder.unexecuted is None:
        raise LookupError(f"no case launches {kernel}")
    function = recorder.module.find(kernel)
    first, last = (recorder.module.prog.code[i].line for i in (function.start, function.end - 1))
    for line, instruction in mutate.synchronisations(text, range(first, last + 1)):
        if line in recorder.unexecuted:
            outcome = "not executed"
        else:
            without = mutate.without(text, line)
            outcome = _outcome(kernel, ptxrun.Module(without), cases, arch, earlier)
            if outcome == "not noticed" and instruction.startswith("wgmma.fence"):
                # ptxrun has no order of registers; the assembler has, and then waits after each product.
                serialised = re.search(r"C75\d\d.*", nvcc.ptxas_says(without, "sm_90a"))
                outcome = f"ptxas: {serialised[0]}" if serialised else outcome
        file, at, source = place(origin, line)
        yield Mutation(line, instruction, f"{file}:{at}: {source}", outcome)


def _outcome(kernel, module, cases, arch, earlier):
    try:
        _run(kernel, module, cases, arch, earlier)
    except ptxrun.PtxError as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    except AssertionError as error:
        return f"wrong result: {str(error).splitlines()[0]}"
    return "not noticed"


def _run(kernel, module, cases, arch, earlier):
    """Runs the cases with `module` for a kernel; `earlier` keeps what the launches before it leave."""

    def run(number, case):
        launches, reached = itertools.count(), []

        def modules(name, architecture):
            launch = next(launches)
            if name == kernel:
                reached.append(launch)
                return module
            other = cuda_kernels.module(name, architecture)
            return other if reached else _Earlier(other, earlier.setdefault((number, launch), {}))

        # Few multiprocessors: decoding is split into pieces of several tiles.
        options = {"multiprocessors": 8, "modules": modules, "allow_tf32": "tf32" in kernel}
        if "_sm90_" in kernel:  # one block, which then has several tiles; stmatrix orders no memory
            options |= {"multiprocessors": 1, "collectives_order": False}
        on = cuda_kernels.tangents_on if "_jvp_" in kernel else cuda_kernels.attention_on
        case(on("ptxrun", arch, **options))

    for number, case in enumerate(cases):
        run(number, case)


def cases_of(dtype, sizes, *, direction, full, tf32=False, more=()):
    """Problems of several tiles in both directions, ragged, in and outside a band, and without a query.

    sizes: (B, Nq, Nk, D, Dv); direction: that of launch_plan; more: options of further cases.
    """
    batch, len_q, len_k, dim, dim_v = sizes
    given = oracle.qkv(batch, 2, len_q, len_k, dim, dim_v, heads_kv=1, dtype=dtype)
    some = max(1, len_q - 30)  # which leaves a tile of queries without any
    options = [
        {},
        {"window": (len_k // 4, 0), "query_lengths": [some] * batch},
        {"causal": True, "key_lengths": [len_k - 43] * batch},
        *more,
    ]
    if full:
        bias = oracle.randn(1, 1, len_q, len_k, dtype=dtype)  # broadcast over heads, then over queries too
        terms = [{"bias": bias}, {"bias": bias[:, :, :1]}, {"bias": bias, "mask": bias < 1}]
        heads = {
            "alibi_slopes": torch.tensor([[0.5, 0.1], [0.3, 0.2]], dtype=dtype)[:batch],
            "sinks": torch.tensor([1.0, -2.0], dtype=dtype),
        }
        options = [{**heads, **t, **o} for t, o in zip(terms, options, strict=True)]

    def case(chosen):
        def run(call):
            if direction == "jvp":
                tensors = dict(zip("qkv", given, strict=True)) | chosen
                oracle.check_tangents(*given, oracle.tangents_of(tensors), call=call, tf32=tf32, **chosen)
                return
            judge = oracle.check if direction == "backward" else oracle.check_forward
            judge(*given, call=call, tf32=tf32, **chosen)

        return run

    return [case(o) for o in options]


def hopper_backward_cases(dtype, dim):
    """Several tiles of queries for their ring of two stages, and blocks that add to a tile of dQ in turn.

    Lengths or a band end inside the last tile, inside the first, and nowhere. What nobody sees is infinite or
    NaN.
    """

    def case(len_q, len_k, unseen_q=slice(0), unseen_k=slice(0), **options):
        q, k, v = oracle.qkv(1, 2, len_q, len_k, dim, heads_kv=1, dtype=dtype)
        q[:, :, unseen_q], k[:, :, unseen_k] = float("inf"), float("nan")
        if "key_lengths" in options:
            v[:, :, unseen_k] = float("nan")
        return lambda call: oracle.check(q, k, v, call=call, **options)

    whole = 384 if dim == 64 else 240  # three tiles
    ends = {"query_lengths": [260], "key_lengths": [230]}
    return [
        case(290, 273, slice(260, None), slice(230, None), **ends),
        case(290, 150, unseen_q=slice(140), causal=True),  # query 140 is the first to see a key
        case(whole, 256),
    ]


def cases_for(kernel):
    """Cases that launch a kernel, by its name."""
    words = kernel.split("_")
    dtype = next(DTYPES[w] for w in words if w in DTYPES)
    tf32 = "tf32" in words
    dim = next((int(w[1:]) for w in words if w[0] == "d" and w[1:].isdigit()), 40)
    sizes, more = (1, 150, 333, dim, dim), ()
    if "sm90" in words and "bwd" in words:
        return hopper_backward_cases(dtype, dim)
    if "decode" in words:
        sizes = 1, 3, 1100, dim, dim
    elif "sm90" in words:  # five tiles of keys: each loop goes round its ring of two stages
        sizes = 1, 150, {64: 600, 192: 525, 256: 375}.get(dim, 830), dim, dim
        # Rows of a warpgroup that do not exist; two tiles of keys, as the ring has stages, so that the next
        # rows' meet them. A window that hides nothing chooses the kernel for bands.
        band = {"window": (999, 999)} if "banded" in words else {}
        two_tiles = {64: 200, 192: 200, 256: 150}.get(dim, 200 if band else 300)
        more = [{**band, "query_lengths": [60]}, {**band, "key_lengths": [two_tiles]}]
    elif "simt" in words or tf32:
        # Under the window the first queries see nothing of the last tile of keys: dK and dV mark such rows.
        sizes = 1, 70, 115, dim, dim
        if dtype in oracle.HALF:  # up to 256 dimensions these run on tensor cores
            sizes = 1, 70, 115, 8, 260
    elif "sums" in words:
        sizes = 2, 40, 70, dim, dim  # two batch elements with slopes of their own: one sum after another
    full = not {"full", "bias", "sums", "simt", "tf32"}.isdisjoint(words)
    direction = {"bwd": "backward", "jvp": "jvp"}.get(words[1], "forward")
    return cases_of(dtype, sizes, direction=direction, full=full, tf32=tf32, more=more)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kernel", nargs="+")
    parser.add_argument("--arch", default="sm_80", help="sm_90 for kernels with sm90 in their names")
    arguments = parser.parse_args()
    os.environ["ATTN_EXT_KERNELS"] = "sm90" if arguments.arch == "sm_90" else ""
    found = itertools.chain.from_iterable(
        mutations(kernel, cases_for(kernel), arguments.arch) for kernel in arguments.kernel
    )
    missed = 0
    for mutation in found:
        print(mutation, flush=True)
        missed += mutation.outcome in ("not executed", "not noticed")
    print(f"{missed} synchronisations that no case needs")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
