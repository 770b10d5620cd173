"""Random attention problems: shapes, strides and options in every combination, for Hypothesis to draw and
shrink.
"""

import dataclasses
import random

import torch
from hypothesis import strategies as st

import attn_ext
from attn_ext import reference

# Around the edges of the kernels: vectors of 2 to 16 lanes, register blocks of 6 rows, panels of 4 to 64
# columns, tiles of 48, 96 and 192 queries and of 128 and 256 keys.
LENGTHS = [0, 1, 2, 3, 4, 5, 7, 16, 17, 47, 49, 97, 127, 129, 193, 257, 300]
HEAD_DIMS = [1, 2, 3, 5, 8, 16, 17, 31, 33, 64, 65, 80, 129]


@dataclasses.dataclass
class Problem:
    tensors: dict  # name -> tensor or None, differentiable: q, k, v, bias, mask, alibi_slopes, sinks
    options: dict  # the other keyword arguments of attn_ext.attention

    def run(self):
        """(out, lse) of the fused kernels."""
        return attn_ext.attention(**self.tensors, **self.options, return_lse=True)

    def run_reference(self, dtype=torch.float64):
        """(out, lse) of the reference on the same numbers in ``dtype``, and the tensors that took part."""
        tensors = {}
        for name, t in self.tensors.items():
            tensors[name] = t
            if t is not None and t.is_floating_point():
                tensors[name] = t.detach().to(dtype).requires_grad_(t.requires_grad)
        options = {n: x for n, x in self.options.items() if n != "generator"}
        if options.get("dropout_p", 0) > 0:
            generator = torch.Generator().manual_seed(self.options["generator"].initial_seed())
            options["rng_state"] = torch.randint(-(2**63), 2**63 - 1, (2,), generator=generator)
        return reference.attention(**tensors, **options), tensors


@st.composite
def problems(draw, dtype=torch.float64):
    """A Problem of the given dtype; its tensors require gradients."""
    pick = lambda *values: draw(st.sampled_from(values))  # noqa: E731
    batch, heads_kv, group = pick(1, 2, 3), pick(1, 2, 3), pick(1, 2, 4)
    heads = heads_kv * group
    len_q, len_k = draw(st.sampled_from(LENGTHS)), draw(st.sampled_from(LENGTHS))
    head_dim, value_dim = draw(st.sampled_from(HEAD_DIMS)), draw(st.sampled_from(HEAD_DIMS))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    order = random.Random(draw(st.integers(0, 2**32)))

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    def heads_tensor(h, n, d):
        """(B, H, N, D) in one of the layouts that models make, as a leaf that keeps its strides."""
        axes = order.choice([(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3), (0, 1, 3, 2)])
        shape = [(batch, h, n, d)[axis] for axis in axes]
        inverse = [axes.index(axis) for axis in range(4)]
        pad = order.choice([0, 0, 3])  # a slice of something wider
        return (
            normal(*shape[:-1], shape[-1] + pad)[..., : shape[-1]].permute(inverse).detach().requires_grad_()
        )

    def term(rank):
        return [pick(1, n) for n in (batch, heads, len_q, len_k)][4 - rank :]

    mask_kind = pick(None, "bool", "float")
    mask = None
    if mask_kind == "bool":
        mask = torch.rand(term(pick(2, 4)), generator=generator) > pick(0.1, 0.5, 0.9)
    elif mask_kind == "float":
        mask = normal(*term(pick(1, 3, 4)))
        mask = mask.masked_fill(mask > 1.5, -torch.inf).requires_grad_()
    lengths = lambda n: torch.randint(0, n + 1, (batch,), generator=generator)  # noqa: E731
    tensors = {
        "q": heads_tensor(heads, len_q, head_dim),
        "k": heads_tensor(heads_kv, len_k, head_dim),
        "v": heads_tensor(heads_kv, len_k, value_dim),
        "mask": mask,
        "bias": normal(*term(pick(2, 3, 4))).requires_grad_() if pick(True, False) else None,
        "alibi_slopes": normal(*pick((heads,), (batch, heads))).mul_(0.1).requires_grad_()
        if pick(True, False)
        else None,
        "sinks": normal(heads).requires_grad_() if pick(True, False) else None,
    }
    options = {
        "causal": pick(False, True, "upper_left"),
        "window": pick(None, None, (0, 0), (5, None), (None, 3), (40, 1)),
        "scale": pick(None, None, -0.3, 0.0),
        "softcap": pick(None, None, 3.0),
        "key_lengths": lengths(len_k) if pick(False, False, True) else None,
        "query_lengths": lengths(len_q) if pick(False, False, True) else None,
        "dropout_p": pick(0.0, 0.0, 0.1, 0.5, 1.0),
        "generator": torch.Generator().manual_seed(draw(st.integers(0, 2**32))),
    }
    return Problem(tensors, options)


def gradients(outputs, tensors, seed):
    """Gradients of a random linear function of (out, lse) with respect to the tensors that require them, by
    name.
    """
    generator = torch.Generator().manual_seed(seed)
    loss = 0
    for x in outputs:
        weight = torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype)
        loss = loss + (torch.where(x == -torch.inf, 0, x) * weight).sum()
    wanted = {name: t for name, t in tensors.items() if t is not None and t.requires_grad}
    grads = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)
    return {
        name: torch.zeros_like(t) if g is None else g
        for (name, t), g in zip(wanted.items(), grads, strict=True)
    }
