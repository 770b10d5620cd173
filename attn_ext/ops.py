"""torch.ops.attn_ext.*: what the compiled ops return, for tensors without data (meta, fake, symbolic shapes).

Torch leaves out arguments at the end that have their default, so those have one here too.
The schemas and kernels are registered by ``attn_ext._C`` (csrc/torch_ops.cpp, csrc/torch_cuda.cpp); for
CUDA tensors it calls the kernels of ``attn_ext._C_cuda``, which is loaded here. The ops take canonical
arguments; :mod:`attn_ext.autograd` registers their derivatives.

* ``attention_forward(q, k, v, <options>) -> (out, lse, lse_parts)``: lse_parts (B, Hq, Nq, 2) is each row's
  maximum and the log of its sum relative to that, for the backward; lse is the rounded sum of the two.
  ``attention_forward_plain(q, k, v, scale, causal) -> (out, lse_parts)`` is the same, cheaper to call, for
  :func:`attn_ext.autograd.plain_attention`; it has no derivative (torch warns who asks for one) and no fake.
* ``attention_backward(grad_out, grad_lse, q, k, v, out, lse_parts, output_mask, <options>)`` -> gradients of
  q, k, v, bias, float_mask, alibi_slopes, sinks. Bit n of ``output_mask`` asks for the n-th; the others come
  back with 0 elements. ``attention_backward_plain(grad_out, q, k, v, out, lse_parts, output_mask, scale,
  causal) -> (grad_q, grad_k, grad_v)``, likewise without derivative and fake.
* ``attention_weights(q, k, lse_parts, scale, causal, mean_heads)`` -> (B, Hq, Nq, Nk), with mean_heads
  (B, 1, Nq, Nk), the probabilities, in eager code on the CPU; likewise without derivative and fake.
* ``attention_jvp(q, k, v, out, lse_parts, <tangents>, <options>) -> (tangent_out, tangent_lse)``: forward
  mode. The tangents are those of q, k, v, bias, float_mask, alibi_slopes, sinks; None: zero.

<options> are the numbers of :class:`attn_ext.autograd.Options`, then bias, float_mask, bool_mask,
alibi_slopes, sinks, key_lengths, query_lengths, rng_state, block_map and block_tiles (those of a
:class:`attn_ext.masks.BlockMask`), allow_tf32 (only float32 on CUDA looks at it).
out and its tangent have their axes in memory in the order of q's, gradients in that of their tensor.
"""

import sys

import torch

from . import _C, _info


def _load_cuda():
    """Hand the CUDA kernels to the ops; why there are none, or an empty string."""
    module, problem = _info.load_cuda()
    if module is not None:
        _C.set_cuda_backend(module.backend())
    return problem


CUDA_PROBLEM = _load_cuda()


def _empty_rows(like, width):
    """(B, H, N, width) in the memory order of like: Memory::empty_rows (csrc/torch_problem.cpp) in Python."""
    keys, outside = [], sys.maxsize
    for size, stride in zip(like.shape[:3], like.stride()[:3], strict=True):
        outside = outside if _known(size <= 1) or _known(stride == 0) else stride
        keys.append(outside)
    order = [0, 1, 2, 3]
    for i in (0, 1, 0):
        if _known(keys[order[i]] < keys[order[i + 1]]):
            order[i : i + 2] = order[i + 1], order[i]
    shape = (*like.shape[:3], width)
    return like.new_empty([shape[axis] for axis in order]).permute([order.index(axis) for axis in range(4)])


def _known(condition):
    """Whether it holds; of sizes that depend on data, whether it holds for all of them."""
    if isinstance(condition, bool):
        return condition
    from torch.fx.experimental.symbolic_shapes import guard_or_false  # there already, where sizes are symbols

    return guard_or_false(condition)


def _check_devices(q, *rest):
    """For a CPU q beside a meta tensor torch calls what is below, and would return memory as it is."""
    for t in rest:
        if isinstance(t, torch.Tensor) and t.device != q.device:
            raise RuntimeError(
                f"attn_ext: all tensors must be on the device of q, {q.device}, got {t.device}"
            )


def _lse_dtype(q):
    return torch.float64 if q.dtype == torch.float64 else torch.float32


@torch.library.register_fake("attn_ext::attention_forward")
def _(q, k, v, *options):
    _check_devices(q, k, v, *options)
    b, hq, nq, _ = q.shape
    return (
        _empty_rows(q, v.shape[-1]),
        q.new_empty((b, hq, nq), dtype=_lse_dtype(q)),
        q.new_empty((b, hq, nq, 2), dtype=_lse_dtype(q)),
    )


@torch.library.register_fake("attn_ext::attention_backward")
def _(
    grad_out, grad_lse, q, k, v, out, lse_parts, output_mask, scale=1.0, causal=0, softcap=0.0,
    window_left=-1, window_right=-1, dropout_p=0.0, bias=None, float_mask=None, bool_mask=None,
    alibi_slopes=None, sinks=None, *rest,
):  # fmt: skip
    _check_devices(
        q, k, v, grad_out, grad_lse, out, lse_parts, bias, float_mask, bool_mask, alibi_slopes, sinks, *rest
    )
    grads = []
    for bit, t in enumerate((q, k, v, bias, float_mask, alibi_slopes, sinks)):
        if not output_mask >> bit & 1:
            grads.append(q.new_empty(0))
        elif bit < 3:
            grads.append(_empty_rows(t, t.shape[-1]))
        else:
            grads.append(t.new_empty(t.shape))
    return tuple(grads)


@torch.library.register_fake("attn_ext::attention_jvp")
def _(q, k, v, out, lse_parts, *rest):
    _check_devices(q, k, v, out, lse_parts, *rest)
    b, hq, nq, dv = out.shape
    return _empty_rows(q, dv), q.new_empty((b, hq, nq), dtype=_lse_dtype(q))
