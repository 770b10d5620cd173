"""Known faults in masks and shapes, in second derivatives: other code than the kernels' computes them."""

import math

import pytest
import torch
from oracle import oracle, qkv, randn
from test_faults_shapes import SIZES

from attn_ext import attention


def fused(*tensors, **options):
    return attention(*tensors, **options, return_lse=True)


def second(function, tensors, **options):
    """Second derivatives: gradients of a random linear function of the gradients of one of (out, lse)."""
    leaves = [t.detach().requires_grad_() for t in tensors]
    out, lse = function(*leaves, **options)[:2]
    loss = (out * randn(*out.shape, seed=5)).sum()
    loss = loss + (lse.masked_fill(lse == -math.inf, 0) * randn(*lse.shape, seed=6)).sum()
    first = torch.autograd.grad(loss, leaves, create_graph=True, materialize_grads=True)
    loss = sum((g * randn(*g.shape, seed=7)).sum() for g in first)
    return torch.autograd.grad(loss, leaves, materialize_grads=True)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("rule", ["bool", "float", "key_lengths"])
@pytest.mark.parametrize("sizes", [(5, 7), (130, 140)])
def test_what_stands_in_a_hidden_key_does_not_matter(sizes, rule, value):
    # pytorch#101967, flash-attention#1745; the second query, or the second sample, sees nothing
    q, k, v = qkv(len_q=sizes[0], len_k=sizes[1])
    seen = torch.ones(sizes, dtype=torch.bool)
    seen[:, 4:] = seen[1] = False
    options = {
        "bool": {"mask": seen},
        "float": {"mask": torch.zeros(sizes, dtype=torch.float64).masked_fill(~seen, -math.inf)},
        "key_lengths": {"key_lengths": [4, 0]},
    }[rule]
    bad_k, bad_v = k.clone(), v.clone()
    bad_k[:, :, 4:] = value
    if rule == "key_lengths":
        bad_k[1] = bad_v[1] = bad_v[:, :, 4:] = value
    got = second(fused, (q, bad_k, bad_v), softcap=3.0, **options)
    torch.testing.assert_close(got, second(oracle, (q, k, v), softcap=3.0, **options))
    assert got[0].any()


@pytest.mark.parametrize("empty", [*SIZES, tuple(SIZES)], ids=str)
@pytest.mark.parametrize("options", [{}, {"causal": True, "softcap": 2.0}], ids=str)
def test_axis_of_size_zero(empty, options):
    # pytorch#141218, #141219
    empty = (empty,) if isinstance(empty, str) else empty
    tensors = qkv(*(0 if name in empty else n for name, n in SIZES.items()))
    torch.testing.assert_close(second(fused, tensors, **options), second(oracle, tensors, **options))
