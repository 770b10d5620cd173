"""flash-attn's grid of problems under flash-attn's rule of acceptance, on the CPU.

The whole product of the axes is 25,344 problems, hours of work. A random part of it, always the same, is run:
the first problems by default, the rest with `-m slow`.
"""

import itertools
import random

import flash_attn_formula as by_hand
import oracle
import pytest
import torch

from attn_ext.integrations.flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
)

HEAD_DIMS = (32, 40, 59, 64, 80, 96, 111, 128, 160, 192, 224, 256)
LENGTHS = (
    *((1, 147), (113, 203), (128, 217), (113, 211), (108, 256), (256, 512), (512, 256)),
    *((1024, 1024), (1023, 1024), (1024, 1023), (128, 128)),
)
HEADS_KV = {"mha": 4, "mqa": 1, "gqa": 2}  # of 4 query heads
AXES = {
    "head_dim": HEAD_DIMS,
    "lengths": LENGTHS,
    "heads": HEADS_KV,
    "causal": (False, True),
    "local": (False, True),
    "alibi": (False, True),
    "softcap": (0.0, 50.0),
    "dropout_p": (0.0, 0.17),
    "dtype": (torch.float16, torch.bfloat16),
}
BY_DEFAULT, IN_ALL = 160, 700


def grid():
    problems = list(itertools.product(*AXES.values()))
    problems = random.Random(0).sample(problems, IN_ALL)
    # The quick ones first, but for a few, and all values of all axes among them.
    small = [p for p in problems if p[1][0] * p[1][1] <= 128 * 256]
    large = [p for p in problems if p not in small]
    problems = large[:8] + small + large[8:]
    return [
        pytest.param(
            *problem,
            id="-".join(str(value).replace("torch.", "") for value in problem),
            marks=[pytest.mark.slow] if n >= BY_DEFAULT else [],
        )
        for n, problem in enumerate(problems)
    ]


@pytest.mark.parametrize(AXES, grid())
def test_grid(head_dim, lengths, heads, causal, local, alibi, softcap, dropout_p, dtype):
    batch, heads_q, (len_q, len_k) = 2, 4, lengths
    rng = random.Random(head_dim * len_k)
    shapes = [(len_q, heads_q), (len_k, HEADS_KV[heads]), (len_k, HEADS_KV[heads])]
    tensors = [oracle.randn(batch, *shape, head_dim, dtype=dtype, seed=n) for n, shape in enumerate(shapes)]
    if softcap:
        # So that there is something to cap: logits of up to 60. Larger ones leave probabilities below 1e-38,
        # with which torch's matrix products take a hundred times as long.
        tensors[0] = tensors[0] * (softcap / 4)
    options = {
        "causal": causal,
        "window_size": (rng.randrange(len_k), rng.randrange(len_k)) if local else (-1, -1),
        "softcap": softcap,
        "alibi_slopes": torch.rand(batch, heads_q, generator=torch.Generator().manual_seed(2)) * 0.3
        if alibi
        else None,
    }
    kept = oracle.dropout_factors(batch, heads_q, len_q, len_k, dropout_p, seed=0) if dropout_p else None

    def function(q, k, v):
        torch.manual_seed(0)
        if dropout_p or softcap or len_q != len_k:
            return flash_attn_func(q, k, v, dropout_p, **options)
        if heads == "mha":
            return flash_attn_qkvpacked_func(torch.stack((q, k, v), 2), dropout_p, **options)
        return flash_attn_kvpacked_func(q, torch.stack((k, v), 2), dropout_p, **options)

    def formula(*tensors, reordered=False):
        return by_hand.attention(*tensors, **options, kept=kept, reordered=reordered)[0]

    by_hand.assert_as_good_as(formula, function, tensors)
