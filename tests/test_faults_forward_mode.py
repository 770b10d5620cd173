"""Known faults in shapes, strides and memory, in forward mode: tangents are inputs with strides of their own.

The same kinds of fault as in test_faults_shapes.py, met by another kernel.
"""

import itertools

import pytest
import torch
from oracle import DTYPES, oracle, qkv, randn
from test_faults_shapes import FAR, GRADIENTS, LAYOUTS, SIZES
from torch.func import jvp

from attn_ext import attention
from attn_ext.autograd import Options


def tangents(inputs, moving, **options):
    """Those of (out, lse) for inputs (q, k, v, ...) by name that move as ``moving`` says."""

    def call(*values):
        out, lse = attention(**dict(zip(inputs, values, strict=True)), **options, return_lse=True)
        return out, lse.masked_fill(lse == -torch.inf, 0.0)

    return jvp(call, tuple(inputs.values()), tuple(moving.values()))[1]


def random_like(tensors, seed=50):
    return {
        name: randn(*t.shape, dtype=t.dtype, seed=seed + n) for n, (name, t) in enumerate(tensors.items())
    }


@pytest.mark.parametrize("layout", [*LAYOUTS, *GRADIENTS])
@pytest.mark.parametrize("len_q", [3, 130])
def test_tangents_in_any_layout(layout, len_q):
    # pytorch#181133, flash-attention#355: read as if contiguous, or with the strides of their tensors
    tensors = dict(zip("qkv", qkv(2, 3, len_q, len_q), strict=True))
    sizes = (2, 3, len_q, 8)
    made = LAYOUTS[layout](*sizes) if layout in LAYOUTS else [GRADIENTS[layout](*sizes)] * 3
    moving = dict(zip("qkv", made, strict=True))
    copies = {name: t.contiguous().clone() for name, t in moving.items()}
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        got, want = (
            tangents(*({n: t.to(dtype) for n, t in x.items()} for x in (tensors, m)), causal=True)
            for m in (moving, copies)
        )
        assert all(map(torch.equal, got, want))


@pytest.mark.parametrize("argument", ["q", "k", "v", "bias"])
@pytest.mark.parametrize("of", ["tensor", "tangent"])
def test_offsets_beyond_2_to_the_31(argument, of):
    # flash-attention#1500, pytorch#162588; 4.3 GB of addresses, of which a few pages are touched. The raw op,
    # since torch.func gives a tangent the memory layout of its tensor, by a copy of all 4.3 GB
    tensors = dict(zip("qkv", qkv(2, 1, 4, 8, dtype=torch.float16), strict=True))
    tensors["bias"] = randn(2, 1, 4, 8, dtype=torch.float16, seed=9)
    moving = random_like(tensors)

    def run():
        q, k, v, bias = tensors.values()
        options = Options(0.4).with_tensors(bias, *[None] * 7)
        out, _, parts = torch.ops.attn_ext.attention_forward(q, k, v, *options)
        more = moving.values(), [None] * 3, options
        return torch.ops.attn_ext.attention_jvp(q, k, v, out, parts, *itertools.chain(*more))

    want = run()
    memory = torch.empty(FAR + 2**16, dtype=torch.float16)
    far = tensors if of == "tensor" else moving
    view = memory.as_strided(far[argument].shape, (FAR, far[argument][0].numel(), 8, 1))
    far[argument] = view.copy_(far[argument])
    assert all(map(torch.equal, run(), want))


@pytest.mark.parametrize("shape", [(70001, 1, 1, 8), (1, 70001, 1, 8), (300, 300, 1, 8)])
def test_more_than_65535_batches_or_heads(shape):
    # pytorch#142228: one key, so out moves as v does
    tensors = {name: randn(*shape, dtype=torch.float32, seed=n) for n, name in enumerate("qkv")}
    moving = random_like(tensors)
    torch.testing.assert_close(tangents(tensors, moving)[0], moving["v"])


@pytest.mark.parametrize("empty", [*SIZES, tuple(SIZES)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_axis_of_size_zero(empty, dtype):
    # pytorch#141218; torch.empty is full of NaN, so what nobody wrote shows
    empty = (empty,) if isinstance(empty, str) else empty
    batch, heads, len_q, len_k, dim, dim_v = (0 if name in empty else n for name, n in SIZES.items())
    shapes = {"q": (len_q, dim), "k": (len_k, dim), "v": (len_k, dim_v), "bias": (len_q, len_k)}
    tensors = {name: randn(batch, heads, *s, dtype=dtype, seed=len(name)) for name, s in shapes.items()}
    moving = random_like(tensors)
    torch.use_deterministic_algorithms(True)
    try:
        for options in ({}, {"causal": True, "softcap": 2.0}, {"window": (1, 0), "key_lengths": [1] * batch}):
            if "key_lengths" in options and len_k == 0:
                continue
            got = tangents(tensors, moving, **options)
            wide = [{n: t.double() for n, t in x.items()} for x in (tensors, moving)]

            def exact(*values, options=options):
                out, lse, _ = oracle(**dict(zip(tensors, values, strict=True)), **options)
                return out, lse.masked_fill(lse == -torch.inf, 0.0)

            want = jvp(exact, *(tuple(x.values()) for x in wide))[1]
            for a, b in zip(got, want, strict=True):
                assert a.shape == b.shape
                torch.testing.assert_close(a.double(), b, atol=8 * torch.finfo(dtype).eps, rtol=0.05)
    finally:
        torch.use_deterministic_algorithms(False)
