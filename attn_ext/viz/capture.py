"""capture_attention: the weights of every head of a model, without asking the model for them."""

import contextlib

import torch

from ..arguments import ArgumentTypeError, ArgumentValueError
from ..functional import attention
from ..masks import BlockMask
from ..modules import MultiHeadAttention


class AttentionMap:
    """What one call of a MultiHeadAttention attended to: queries, keys, masks, and each row's LSE.

    The weights, N x N numbers a head, do not exist until :meth:`weights` computes those of the heads that it
    is asked for, one head at a time.

    Attributes:
        shape: (batch, heads, queries, keys) of all weights.
    """

    def __init__(self):
        self._parts = []  # (q, k, options, lse) of each set of keys: the sequence's, then bias_k and zeros

    def _add(self, q, k, options, lse):
        self._parts.append((q, k, options, lse))

    @property
    def shape(self):
        q = self._parts[0][0]
        return (*q.shape[:3], sum(k.shape[2] for _, k, _, _ in self._parts))

    def weights(self, heads=None):
        """The weights before dropout, on the device and in the dtype of the queries.

        Args:
            heads: a head's number, a sequence of them, or None for all.

        Returns:
            (B, Nq, Nk) for one head, else (B, number of heads, Nq, Nk). `bias_k` and `add_zero_attn` are the
            last keys. A query that sees nothing has weights 0.

        Raises:
            ValueError: the map has no such head.
        """
        count = self.shape[1]
        numbers = range(count) if heads is None else [heads] if isinstance(heads, int) else list(heads)
        for head in numbers:
            if not -count <= head < count:
                raise ArgumentValueError(f"heads must lie in 0 ... {count - 1}, got {head}")
        batch, _, len_q, len_k = self.shape
        result = self._parts[0][0].new_empty((batch, len(numbers), len_q, len_k))
        for place, head in enumerate(numbers):
            result[:, place] = self._of_head(head % count)
        return result[:, 0] if isinstance(heads, int) else result

    @torch.no_grad()
    def _of_head(self, head):
        """(B, Nq, Nk) of one head: each set of keys by itself, weighed by its share of the exponentials."""
        lse = torch.stack([lse[:, head] for *_, lse in self._parts])
        shares = (lse - lse.logsumexp(0)).exp().nan_to_num(0.0)  # a query that sees nothing: -inf - -inf
        parts = []
        for (q, k, options, _), share in zip(self._parts, shares, strict=True):
            own = slice(head, head + 1)
            h_kv = head // (q.shape[1] // k.shape[1])
            _, weights = attention(
                q[:, own], k[:, h_kv : h_kv + 1], k[:, h_kv : h_kv + 1, :, :1], return_weights="full",
                **{name: _of_heads(name, value, own) for name, value in options.items()},
            )  # fmt: skip
            parts.append(weights[:, 0] * share[..., None].to(weights.dtype))
        return torch.cat(parts, -1)

    def __repr__(self):
        return (
            f"AttentionMap(batch {self.shape[0]}, heads {self.shape[1]}, {self.shape[2]} x {self.shape[3]})"
        )


def _of_heads(name, value, heads):
    """An option of attention() for some heads: masks and biases (..., H, Nq, Nk), slopes (..., H), blocks."""
    if isinstance(value, BlockMask) and value.shape[1] > 1:
        return BlockMask(value.map[:, heads], value.tiles, value.len_q, value.len_k)
    if not isinstance(value, torch.Tensor):
        return value
    axis = {"mask": -3, "bias": -3, "alibi_slopes": -1}.get(name)
    if axis is None or value.dim() < -axis or value.shape[axis] == 1:
        return value
    return value.narrow(axis, heads.start, heads.stop - heads.start)


def capture_attention(model, *inputs, **options):
    """Run ``model(*inputs, **options)`` and keep what each of its MultiHeadAttention modules attended to.

    The model is not changed, nor what it computes: it needs no ``need_weights`` and its fused kernels run. It
    runs without gradients, in the mode (train or eval) that it is in.

    Args:
        model: an nn.Module that holds attn_ext.MultiHeadAttention, among them SelfAttention and those of the
            transformer layers; :func:`attn_ext.replace_attention` brings them into a model of torch.nn.
        *inputs, **options: what the model takes.

    Returns:
        {name of a module: AttentionMap}, in the order of the calls. A module that is called again in the
        same pass has its later calls under "name #2" and so on.

    Raises:
        TypeError: model is no nn.Module.
        ValueError: it has no such module, or none was called.
    """
    if not isinstance(model, torch.nn.Module):
        raise ArgumentTypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    modules = {name: m for name, m in model.named_modules() if isinstance(m, MultiHeadAttention)}
    if not modules:
        raise ArgumentValueError(
            "model holds no attn_ext.MultiHeadAttention; attn_ext.replace_attention(model) makes those of "
            "torch.nn ours"
        )
    maps = {}
    # Compiled code would be compiled anew for the recording, and once more after it.
    with contextlib.ExitStack() as stack, torch.no_grad(), torch.compiler.set_stance("force_eager"):
        for name, module in modules.items():
            stack.enter_context(_recording(module, name or type(module).__name__, maps))
        model(*inputs, **options)
    if not maps:
        raise ArgumentValueError(f"model called none of its {len(modules)} attention modules")
    return maps


@contextlib.contextmanager
def _recording(module, name, maps):
    """While this holds, the calls of a module add their maps to ``maps``."""
    current = []  # the map of the call that runs now

    def start(module, args, kwargs):
        count = 1 + sum(key == name or key.startswith(f"{name} #") for key in maps)
        current[:] = [AttentionMap()]
        maps[name if count == 1 else f"{name} #{count}"] = current[0]

    def attend(q, k, v, *, return_lse=False, return_weights=None, **options):
        out, lse, *weights = type(module)._attend(
            module, q, k, v, return_lse=True, return_weights=return_weights, **options
        )
        scores = {"softcap": module.softcap, **options}
        current[0]._add(q.detach(), k.detach(), scores, lse)
        results = (out, lse, *weights) if return_lse else (out, *weights)
        return results if len(results) > 1 else out

    handle = module.register_forward_pre_hook(start, with_kwargs=True)
    vars(module)["_attend"] = attend  # found before the class's method
    try:
        yield
    finally:
        handle.remove()
        del vars(module)["_attend"]
