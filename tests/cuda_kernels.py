"""Attention by the CUDA kernels: in ptxrun, which needs no GPU, and on a GPU where there is one.

    @pytest.mark.parametrize("device", cuda_kernels.DEVICES)
    def test_something(device):
        oracle.check(q, k, v, causal=True, call=cuda_kernels.attention_on(device))

In ptxrun the plan of attn_ext.launch_plan is carried out kernel by kernel: the PTX that nvcc emits for the
instantiation file, exactly the memory that the plan names, results and workspace full of NaN before.
"""

import ctypes
import functools
import re

import nvcc
import ptxrun
import pytest
import torch

import attn_ext
from attn_ext.masks import BlockMask

INSTANTIATIONS = nvcc.CSRC / "cuda" / "instantiations"
MODULES_KEPT = 24  # parsed and bound kernels: some 20 MB each
NVCC_FLAGS = ("-lineinfo",)  # as the build; kernel_lines.py reads which source line an instruction is of
MOST_INSTRUCTIONS = (
    20_000_000  # of groups of threads, minutes of work: by then a kernel is in an endless loop
)

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICES = [pytest.param("ptxrun", marks=nvcc.needed), pytest.param("cuda", marks=on_gpu)]

unexecuted = {}  # (kernel, architecture) -> PTX lines that no launch of this process reached: kernel_lines.py


def source_of(kernel):
    """The instantiation file that exports a kernel.

    It spells the kernel's name or, where a macro puts the name together, its own name begins that name.
    """
    files = sorted(INSTANTIATIONS.glob("*.cu"))
    word = re.compile(rf"\b{kernel}\b")
    spelled = [path for path in files if word.search(path.read_text())]
    alike = sorted((path for path in files if kernel.startswith(path.stem)), key=lambda path: len(path.stem))
    if len(spelled) > 1 or not (spelled or alike):
        found = ", ".join(path.name for path in spelled) or "none"
        raise LookupError(f"one file of csrc/cuda/instantiations should export {kernel}, found {found}")
    return (spelled or alike)[-1]


@functools.cache
def ptx(kernel, arch):
    """The PTX of the file that exports a kernel."""
    # wgmma, TMA and setmaxnreg are features of sm_90a, which is sm_90 on the device.
    return nvcc.ptx_of_file(source_of(kernel), "sm_90a" if "_sm90_" in kernel else arch, NVCC_FLAGS)


@functools.lru_cache(MODULES_KEPT)
def module(kernel, arch):
    return ptxrun.Module(ptx(kernel, arch))


def carry_out(plan, arch="sm_80", modules=module, **options):
    """Runs every launch of an attn_ext.LaunchPlan in ptxrun, its tensors being on the CPU.

    modules: function (kernel, arch) -> ptxrun.Module; options: of ptxrun.Module.launch. Returns its Results.
    """
    for t in plan.results.values():
        t.fill_(float("nan"))
    memory = ptxrun.Memory()
    for names, start, end in _disjoint(plan.buffers):
        results = [name for name in names if name == "workspace" or name in plan.results]
        memory.add(start, end - start, "+".join(names), writable=bool(results))
        if names == ["workspace"]:
            ctypes.memset(start, 0xFF, end - start)  # NaN in every float format
    options = {"block_races": True, "max_instr": MOST_INSTRUCTIONS, **options}
    done = []
    for n in plan.launches:
        r = modules(n.kernel, arch).launch(
            n.kernel, n.grid, n.block, [_encoded(n)], n.shared_bytes, memory, **options
        )
        if modules is module:
            lines = unexecuted.setdefault((n.kernel, arch), set(r.unexecuted))
            lines.intersection_update(r.unexecuted)
        done.append(r)
    return done


def _encoded(launch):
    """The params of a launch with its tensor maps, as launch.cu encodes them for a GPU."""
    params = bytearray(launch.params)
    for m in launch.tensor_maps:
        box = (64, m.box_rows, 1, 1)
        handle = ptxrun.TensorMap(m.dtype, m.data_ptr, m.sizes, m.strides, box, "128B").handle
        params[m.params_offset : m.params_offset + len(handle)] = handle
    return bytes(params)


def _disjoint(buffers):
    """[(names, start, end)]: buffers that overlap, such as q, k and v cut from one tensor, as one."""
    merged = []
    for b in sorted(buffers, key=lambda b: b.data_ptr):
        end = b.data_ptr + b.nbytes
        if merged and b.data_ptr < merged[-1][2]:
            names, start, last = merged[-1]
            merged[-1] = [*names, b.name], start, max(end, last)
        elif b.nbytes:
            merged.append(([b.name], b.data_ptr, end))
    return merged


def attention_on(
    device, arch="sm_80", multiprocessors=None, modules=module, allow_tf32=False, **launch_options
):
    """A function like attn_ext.attention(..., return_lse=True) that runs on "ptxrun" or "cuda".

    Tensors are on the CPU. allow_tf32: torch's switch. For ptxrun only: arch and multiprocessors as for
    launch_plan, modules and launch_options as for carry_out.
    """
    if device == "cuda":
        return functools.partial(_on_cuda, allow_tf32)

    def run(plan):
        carry_out(plan, arch, modules, **launch_options)
        return plan.results

    def attention(q, k, v, *, return_lse=True, **options):
        tensors = {"q": q, "k": k, "v": v}
        for name in ("mask", "bias", "alibi_slopes", "sinks"):
            if options.get(name) is not None:
                tensors[name] = options.pop(name)
        target = {"arch": arch, "multiprocessors": multiprocessors, "allow_tf32": allow_tf32}
        return _Planned.apply(run, {**options, **target}, tuple(tensors), *tensors.values())

    return attention


def tangents_on(
    device, arch="sm_80", multiprocessors=None, modules=module, allow_tf32=False, **launch_options
):
    """A function (q, k, v, tangents, **options) -> the tangents of out and lse, by the kernels.

    tangents: {name of a tensor: its tangent}, as attn_ext.launch_plan's; the rest as attention_on.
    """

    def in_ptxrun(q, k, v, tangents, **options):
        draws = options.get("generator")
        state = draws.get_state() if draws else None
        results = {}
        for direction in ("forward", "jvp"):
            if draws:  # both draw the same random numbers
                draws.set_state(state)
            saved = {"out": results["out"], "lse": results["lse_parts"]} if results else {}
            plan = attn_ext.launch_plan(
                q, k, v, direction=direction, arch=arch, multiprocessors=multiprocessors,
                allow_tf32=allow_tf32, tangents=tangents, **saved, **options,
            )  # fmt: skip
            carry_out(plan, arch, modules, **launch_options)
            results.update(plan.results)
        return results["tangent_out"], results["tangent_lse"]

    def on_cuda(q, k, v, tangents, **options):
        tensors = {"q": q, "k": k, "v": v, **options}
        still = {n: t for n, t in tensors.items() if n not in tangents}

        def call(*moving):
            return _on_cuda(allow_tf32, **dict(zip(tangents, moving, strict=True)), **still)

        primals = tuple(tensors[n] for n in tangents)
        return torch.func.jvp(call, primals, tuple(tangents.values()))[1]

    return on_cuda if device == "cuda" else in_ptxrun


def _on_cuda(allow_tf32, q, k, v, *, return_lse=True, **options):
    options = {n: x.to("cuda") if isinstance(x, (torch.Tensor, BlockMask)) else x for n, x in options.items()}
    if options.get("generator") is not None:
        options["generator"] = generator("cuda", options["generator"].initial_seed())
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if allow_tf32 else "highest")
    try:
        out, lse = attn_ext.attention(q.cuda(), k.cuda(), v.cuda(), return_lse=True, **options)[:2]
    finally:
        torch.set_float32_matmul_precision(before)
    return out.cpu(), lse.cpu()


class _Planned(torch.autograd.Function):
    """The kernels of the two plans: forward and backward."""

    @staticmethod
    def forward(ctx, run, options, names, *tensors):
        ctx.run, ctx.options, ctx.names = run, options, names
        results = run(ctx_plan(ctx, tensors))
        out, lse = results["out"], results["lse"]
        ctx.save_for_backward(out, results["lse_parts"], *tensors)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_out, grad_lse):
        out, parts, *tensors = ctx.saved_tensors
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        given = {"out": out, "lse": parts, "grad_out": grad_out, "grad_lse": grad_lse}
        needed = zip(ctx.names, ctx.needs_input_grad[3:], strict=True)
        given["gradients"] = [name for name, wanted in needed if wanted]
        results = ctx.run(ctx_plan(ctx, tensors, direction="backward", **given))
        grads = []
        for name, t in zip(ctx.names, tensors, strict=True):
            g = results.get("grad_" + ("float_mask" if name == "mask" else name))
            grads.append(None if g is None else g.reshape(t.shape).to(t.dtype))
        return None, None, None, *grads


def ctx_plan(ctx, tensors, **direction):
    """The plan of a call: every plan of it draws the same random numbers."""
    draws = ctx.options.get("generator")
    state = draws.get_state() if draws else None
    plan = attn_ext.launch_plan(**dict(zip(ctx.names, tensors, strict=True)), **ctx.options, **direction)
    if draws:
        draws.set_state(state)
    return plan


def generator(device, seed):
    return torch.Generator("cuda" if device == "cuda" else "cpu").manual_seed(seed)


def dropout_factors(device, batch, heads, len_q, len_k, p, seed):
    """0 or 1 / (1 - p) for each probability of a call with generator(device, seed).

    Equal logits and an identity for V show what dropout does. For ptxrun the CPU kernels tell it.
    """
    place = {"device": "cuda" if device == "cuda" else "cpu", "dtype": torch.float64}
    q, k = (torch.zeros(batch, heads, n, 1, **place) for n in (len_q, len_k))
    identity = torch.eye(len_k, **place).expand(batch, heads, -1, -1)
    out = attn_ext.attention(q, k, identity, dropout_p=p, generator=generator(device, seed))
    return (out * len_k).cpu()
