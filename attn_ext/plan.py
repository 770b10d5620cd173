"""What a GPU would be told to do for a call of attention(): for debugging, tests and the curious."""

import json
from dataclasses import dataclass

import torch

from . import arguments, functional

# Multiprocessors of a typical GPU of each architecture; they decide how keys are split among blocks.
MULTIPROCESSORS = {
    "sm_80": 108,  # A100
    "sm_86": 84,  # A10, RTX 3090
    "sm_89": 128,  # RTX 4090
    "sm_90": 132,  # H100, H200
    "sm_100": 148,  # B200
    "sm_120": 170,  # RTX 5090
}


@dataclass(frozen=True)
class TensorMap:
    """A tensor as Hopper's copy engine (TMA) reads it, to be encoded by the driver at launch."""

    params_offset: int  # where in the launch's params the 128 bytes of the encoded map belong
    dtype: str  # "f16" or "bf16"
    data_ptr: int
    sizes: tuple[int, int, int, int]  # of column, row, head, batch
    strides: tuple[int, int, int]  # of row, head, batch, in bytes
    box_rows: int  # rows of one copy; 64 columns


@dataclass(frozen=True)
class Launch:
    """One kernel launch."""

    kernel: str  # the exported name, as profilers show it
    grid: tuple[int, int, int]  # blocks
    block: tuple[int, int, int]  # threads of a block
    shared_bytes: int  # dynamic shared memory of a block
    params: bytes  # the kernel's one argument, passed by value
    tensor_maps: tuple[TensorMap, ...] = ()  # to be written into it


@dataclass(frozen=True)
class Buffer:
    """A range of memory that the kernels may touch."""

    name: str
    data_ptr: int
    nbytes: int


@dataclass(frozen=True)
class LaunchPlan:
    """Launches in order, the memory they may touch, and the tensors that would hold the results.

    ``results``: "out", "lse", "lse_parts"; or "tangent_out", "tangent_lse"; or "grad_q", "grad_k", "grad_v"
    and those of "grad_bias", "grad_float_mask", "grad_alibi_slopes", "grad_sinks" that were given.
    Uninitialised until the kernels run.
    """

    launches: tuple[Launch, ...]
    buffers: tuple[Buffer, ...]
    results: dict[str, torch.Tensor]
    _alive: tuple[torch.Tensor, ...]  # memory behind the buffers: inputs, copies of them, workspace

    def __str__(self):
        lines = [
            f"{n.kernel}  grid {n.grid[0]}, block {n.block[0]}, {n.shared_bytes} bytes of shared memory"
            for n in self.launches
        ]
        return "\n".join(lines) or "nothing to launch"


def launch_plan(
    q, k, v, *, direction="forward", arch="sm_80", multiprocessors=None, out=None, lse=None, grad_out=None,
    grad_lse=None, gradients=None, tangents=None, allow_tf32=None, **options,
):  # fmt: skip
    """Which CUDA kernels a call of :func:`attn_ext.attention` would launch, and how. Launches nothing.

    Args:
        q, k, v: as for attention(), on the CPU or a GPU. Results and workspaces are allocated beside them.
        direction: "forward", "backward" or "jvp" (forward-mode AD).
        arch: "sm_80" and so on: the GPU that is planned for. For "sm_90", the environment variable
            ATTN_EXT_KERNELS chooses the kernels for Hopper where they can ("sm90") or never ("sm80", unset).
            Forward mode has none.
        multiprocessors: how many it has; default: as many as a common GPU of that architecture. They decide
            how keys are split among blocks.
        out, lse: backward and jvp: what the forward returned. lse is (B, Hq, Nq), or (B, Hq, Nq, 2): the two
            parts of it that attention's own backward uses, ``results["lse_parts"]`` of a forward plan.
        grad_out, grad_lse: backward only: their gradients; grad_lse may be None.
        gradients: backward only: whose gradients are wanted, names among q, k, v, bias, mask, alibi_slopes
            and sinks; None: those of all that are given.
        tangents: jvp only: {name of an argument: its tangent} for any of the same, each of the argument's
            shape; those left out are zero. A mask has a gradient or tangent if it is one of floats.
        allow_tf32: whether products of float32 may be in TF32; None: as torch's switch says
            (``torch.backends.cuda.matmul.allow_tf32``), whatever device the tensors are on.
        **options: those of attention() that shape the result (mask, bias, causal, dropout_p, ...).

    Returns:
        LaunchPlan.

    Raises:
        TypeError, ValueError: as attention() does, and for an unknown direction, arch or tangent.
        RuntimeError: for another value of ATTN_EXT_KERNELS.
    """
    if arch not in MULTIPROCESSORS:
        raise arguments.ArgumentValueError(f"arch must be one of {', '.join(MULTIPROCESSORS)}, got {arch!r}")
    block_mask = options.pop("block_mask", None)
    q, k, v, terms, rng_state, numbers = functional.resolve(q, k, v, **options)
    blocks = functional.blocks_of(block_mask, q, k.shape[2])
    if allow_tf32 is None:
        allow_tf32 = arguments.tf32_switch()
    elif not isinstance(allow_tf32, bool):
        raise arguments.ArgumentValueError(f"allow_tf32 must be None, True or False, got {allow_tf32!r}")
    call = numbers._replace(allow_tf32=allow_tf32).with_tensors(*terms, rng_state, *blocks)
    if multiprocessors is None:
        multiprocessors = MULTIPROCESSORS[arch]
    elif not isinstance(multiprocessors, int) or multiprocessors < 1:
        raise arguments.ArgumentValueError(f"multiprocessors must be an int > 0, got {multiprocessors!r}")
    target = (int(arch.removeprefix("sm_")), multiprocessors)
    bias, float_mask, _, alibi_slopes, sinks, *_ = terms
    given = dict(zip(_DIFFERENTIABLE, (q, k, v, bias, float_mask, alibi_slopes, sinks), strict=True))
    if direction == "forward":
        encoded, *tensors = torch.ops.attn_ext.attention_forward_plan(q, k, v, *target, *call)
        names = ("out", "lse", "lse_parts")
    elif direction == "backward":
        parts = _saved(direction, out=out, lse=lse, grad_out=grad_out)
        wanted = [name for name, t in given.items() if t is not None]
        if gradients is not None:
            _check_names("gradients", gradients, given)
            wanted = gradients
        output_mask = sum(1 << n for n, name in enumerate(given) if name in wanted)
        encoded, *tensors = torch.ops.attn_ext.attention_backward_plan(
            grad_out, grad_lse, q, k, v, out, parts, output_mask, *target, *call
        )
        names = (
            "grad_q", "grad_k", "grad_v", "grad_bias", "grad_float_mask", "grad_alibi_slopes", "grad_sinks"
        )  # fmt: skip
        call = (*call, out, parts, grad_out, grad_lse)
    elif direction == "jvp":
        parts = _saved(direction, out=out, lse=lse)
        moving = _moving(tangents or {}, given)
        encoded, *tensors = torch.ops.attn_ext.attention_jvp_plan(
            q, k, v, out, parts, *moving, *target, *call
        )
        names = ("tangent_out", "tangent_lse")
        call = (*call, out, parts, *moving)
    else:
        raise arguments.ArgumentValueError(
            f"direction must be 'forward', 'backward' or 'jvp', got {direction!r}"
        )
    plan = json.loads(bytes(encoded.tolist()))
    results = {
        name: t for name, t in zip(names, tensors, strict=False) if t.numel() or not name.startswith("grad_")
    }
    inputs = [t for t in (q, k, v, *call) if isinstance(t, torch.Tensor)]
    launches = (
        Launch(
            step["kernel"],
            (step["grid"], 1, 1),
            (step["block"], 1, 1),
            step["shared_bytes"],
            bytes.fromhex(step["params"]),
            tuple(_tensor_map(**each) for each in step["tensor_maps"]),
        )
        for step in plan["launches"]
    )
    return LaunchPlan(
        tuple(launches),
        tuple(Buffer(**buffer) for buffer in plan["buffers"]),
        results,
        (*inputs, *tensors),
    )


def _tensor_map(sizes, strides, **fields):
    return TensorMap(sizes=tuple(sizes), strides=tuple(strides), **fields)


def _saved(direction, *, lse, **tensors):
    """The two parts of lse, once it is sure that everything is there."""
    for name, t in (*tensors.items(), ("lse", lse)):
        if t is None:
            raise arguments.ArgumentTypeError(f"{name} is needed for direction={direction!r}, got None")
    return lse if lse.dim() == 4 else torch.stack([lse, torch.zeros_like(lse)], dim=-1)


_DIFFERENTIABLE = ("q", "k", "v", "bias", "mask", "alibi_slopes", "sinks")


def _check_names(what, names, given):
    allowed = [name for name, t in given.items() if t is not None]
    for name in names:
        if name not in allowed:
            raise arguments.ArgumentValueError(
                f"{what} may name {', '.join(allowed)} in this call, got {name!r}"
            )


def _moving(tangents, given):
    """The tangents in the ops' order and in the shapes of their tensors; None where there is none."""
    _check_names("tangents", tangents, given)
    for name, t in tangents.items():
        if t.numel() != given[name].numel():
            raise arguments.ArgumentValueError(
                f"the tangent of {name} must have its shape {tuple(given[name].shape)}, got {tuple(t.shape)}"
            )
    return [tangents[name].reshape(t.shape) if name in tangents else None for name, t in given.items()]
