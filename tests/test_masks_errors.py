"""What block masks refuse, and how they say so."""

import re

import pytest
import torch

from attn_ext import masks
from attn_ext.masks import BlockMask

predicate = BlockMask.from_predicate


def ok(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def with_if(b, h, q_idx, kv_idx):
    if q_idx > kv_idx:
        return q_idx > 0
    return kv_idx > 0


ON_META = torch.ones(9, dtype=torch.bool, device="meta")
SMALL = masks.causal(9)


@pytest.mark.parametrize(
    ("make", "kind", "problem"),
    [
        (lambda: predicate(with_if, 9, 9), ValueError, r"mask_mod failed .* in the place of and, or"),
        (lambda: predicate(lambda b, q: b, 9, 9), ValueError, "mask_mod failed .*positional"),
        (
            lambda: predicate(lambda b, h, q, k: SMALL.map[b, h, q, k] > 0, 99, 99),
            ValueError,
            "mask_mod failed .* out of bounds",
        ),
        (lambda: predicate(lambda b, h, q, k: q.item() > 0, 9, 9), ValueError, "mask_mod failed"),
        (lambda: predicate(lambda b, h, q, k: q.position > k, 9, 9), ValueError, "mask_mod failed.*position"),
        (lambda: SMALL.to_dense(-1), ValueError, "within the 9 queries, got -1 and 10"),
        (lambda: SMALL.to_dense(5, 5), ValueError, "within the 9 queries, got 5 and 5"),
        (lambda: masks.sparse_transformer_strided(9, 2**70), ValueError, r"stride must be below 2\*\*63"),
        (lambda: masks.sparse_transformer_strided(9, 3, part=1.0), ValueError, "part must be None, 1 or 2"),
        (
            lambda: predicate(lambda b, h, q, k: q - k, 9, 9),
            TypeError,
            "must return a bool tensor, True = may attend, got a tensor of torch.int64",
        ),
        (lambda: predicate(lambda b, h, q, k: True, 9, 9), TypeError, "bool tensor.* got bool"),
        (
            lambda: predicate(lambda b, h, q, k: torch.ones(9, 9) > 0, 9, 9),
            ValueError,
            r"broadcasts to the shape of its indices together, \(1, 64, 64\), got \(9, 9\)",
        ),
        (lambda: predicate(lambda b, h, q, k: (q >= k)[None], 9, 9), ValueError, "broadcasts to"),
        (
            lambda: predicate(lambda b, h, q, k: ON_META[:1], 9, 9),
            TypeError,
            "must return a tensor on the mask's device, cpu, got one on meta",
        ),
        (lambda: predicate("causal", 9, 9), TypeError, "mask_mod must be a function of .*'causal'"),
        (lambda: predicate(ok, 9.0, 9), TypeError, "len_q must be an int, got 9.0 of type float"),
        (lambda: predicate(ok, 9, -1), ValueError, "len_k must be at least 0, got -1"),
        (lambda: predicate(ok, 9, True), TypeError, "len_k must be an int, got True"),
        (lambda: predicate(ok, 9, 9, batch=0), ValueError, "batch must be at least 1, got 0"),
        (lambda: predicate(ok, 9, 9, heads=None), TypeError, "heads must be an int, got None"),
        (lambda: predicate(ok, 9, 9, device="meta"), TypeError, "device must be one with data"),
        (
            lambda: BlockMask.from_dense(torch.ones(9)),
            TypeError,
            "mask must be a bool tensor.* got torch.float32",
        ),
        (lambda: BlockMask.from_dense([[True]]), TypeError, "mask must be a bool tensor.* got list"),
        (lambda: BlockMask.from_dense(ON_META), ValueError, r"mask must be \(Nq, Nk\), .* got \(9,\)"),
        (lambda: BlockMask.from_dense(ON_META[None]), TypeError, "one with data"),
        (
            lambda: BlockMask.from_blocks([[True]], 9, 9, 0),
            ValueError,
            "block_size must be at least 1, got 0",
        ),
        (
            lambda: BlockMask.from_blocks([[True]], 9, 9, (9, 2.0)),
            TypeError,
            "block_size must be an int, got 2.0",
        ),
        (lambda: BlockMask.from_blocks([[True]], 9, 9, (9,)), ValueError, r"a pair .* got \(9,\)"),
        (
            lambda: BlockMask.from_blocks([[True]], 9, 9, 8),
            ValueError,
            r"blocks must be \(..., 2, 2\).*got \(1, 1\)",
        ),
        (
            lambda: BlockMask.from_blocks([[2, 0]], 9, 9, 8),
            ValueError,
            r"blocks must lie in 0 ... 1 and .*\[2, 0\]",
        ),
        (
            lambda: BlockMask.from_blocks([[0, -1]], 9, 9, 8),
            ValueError,
            r"blocks must lie in .* got \[0, -1\]",
        ),
        (lambda: BlockMask.from_blocks([1, 0], 9, 9), ValueError, r"pairs of integers \(n, 2\), got \(2,\)"),
        (lambda: BlockMask.from_blocks([[0.5]], 9, 9), TypeError, "blocks must be bool, or integer pairs"),
        (lambda: BlockMask.from_blocks([[True], []], 9, 9), TypeError, "lists of equal lengths"),
        (
            lambda: BlockMask(SMALL.map.long(), SMALL.tiles, 9, 9),
            TypeError,
            "map must be a tensor of torch.int32",
        ),
        (lambda: BlockMask(SMALL.map, None, 9, 9), TypeError, "tiles must be .* torch.int64, got NoneType"),
        (
            lambda: BlockMask(SMALL.map, SMALL.tiles, 9, 65),
            ValueError,
            r"\(B or 1, H or 1, 1, 2\), got \(1, 1, 1, 1\)",
        ),
        (
            lambda: BlockMask(SMALL.map, SMALL.tiles[:1], 9, 9),
            ValueError,
            r"tiles must be \(T >= 2, 64\), got \(1, 64\)",
        ),
        (
            lambda: BlockMask(SMALL.map, SMALL.tiles.to("meta"), 9, 9),
            TypeError,
            "same device, got cpu and meta",
        ),
        (
            lambda: SMALL & masks.causal(10),
            ValueError,
            r"joined by & .* same lengths, got \(9, 9\) and \(10, 10\)",
        ),
        (lambda: SMALL | SMALL.to("meta"), TypeError, r"joined by \| .* same device, got cpu and meta"),
        (
            lambda: masks.prefix_lm(9, [1, 2]) & masks.prefix_lm(9, [1, 2, 3]),
            ValueError,
            "same batch or 1, got 2 and 3",
        ),
        (
            lambda: masks.big_bird(9, heads=2) & masks.big_bird(9, heads=3),
            ValueError,
            "same heads or 1, got 2 and 3",
        ),
        (lambda: SMALL & SMALL.to_dense(), TypeError, "unsupported operand"),
        (lambda: masks.causal(2.5), TypeError, "length must be an int, got 2.5"),
        (lambda: masks.sliding_window(-1, 1, 1), ValueError, "length must be at least 0, got -1"),
        (
            lambda: masks.sliding_window(9, -2, 1),
            ValueError,
            r"\(left, right\) must hold integers >= 0.* got \(-2, 1\)",
        ),
        (lambda: masks.sparse_transformer_strided(9, 0), ValueError, "stride must be at least 1, got 0"),
        (
            lambda: masks.sparse_transformer_strided(9, 2, part=3),
            ValueError,
            "part must be None, 1 or 2, got 3",
        ),
        (
            lambda: masks.sparse_transformer_fixed(9, 2, 3),
            ValueError,
            "summary must be at most stride, 2, got 3",
        ),
        (lambda: masks.longformer(9, -1), ValueError, "window must be at least 0, got -1"),
        (
            lambda: masks.longformer(9, 2, [9]),
            ValueError,
            r"global_tokens must lie in 0 ... 8, got \[\[9\]\]",
        ),
        (
            lambda: masks.longformer(9, 2, [0.5]),
            TypeError,
            "global_tokens must be integers, got torch.float32",
        ),
        (lambda: masks.longformer(9, 2, [[0], [1]]), ValueError, r"positions \(n,\) or bool, got \(2, 1\)"),
        (
            lambda: masks.longformer(9, 2, torch.ones(8) > 0),
            ValueError,
            r"bool \(9,\) or \(B, 9\), got \(8,\)",
        ),
        (lambda: masks.longformer(9, 2, ON_META), TypeError, "one with data"),
        (lambda: masks.big_bird(9, 0), ValueError, "block_size must be at least 1, got 0"),
        (lambda: masks.big_bird(9, window_blocks=2), ValueError, "window_blocks must be odd.* got 2"),
        (lambda: masks.big_bird(9, random_blocks=-1), ValueError, "random_blocks must be at least 0, got -1"),
        (lambda: masks.big_bird(9, heads=0), ValueError, "heads must be at least 1, got 0"),
        (lambda: masks.documents(), ValueError, "either lengths or ids must be given"),
        (lambda: masks.documents([9], ids=[0] * 9), ValueError, "either lengths or ids must be given"),
        (lambda: masks.documents([3, -1]), ValueError, r"lengths must lie in 0 ... 2, got \[\[3, -1\]\]"),
        (lambda: masks.documents([[1, 2], [3, 4]]), ValueError, r"same sum for each sample, got \[3, 7\]"),
        (
            lambda: masks.documents([[1, 2], [3]]),
            TypeError,
            "lengths must be a tensor or lists of equal lengths",
        ),
        (lambda: masks.documents(ids=torch.ones(9)), TypeError, "ids must be integers, got torch.float32"),
        (
            lambda: masks.documents(ids=torch.zeros(1, 1, 9).long()),
            ValueError,
            r"ids must be .* got \(1, 1, 9\)",
        ),
        (
            lambda: masks.prefix_lm(9, [3, 10]),
            ValueError,
            r"prefix_lengths must lie in 0 ... 9, got \[\[3, 10\]\]",
        ),
        (lambda: masks.prefix_lm(9, 1.5), TypeError, "prefix_lengths must be integers"),
        (
            lambda: masks.prefix_lm(9, [[1], [2]]),
            ValueError,
            r"prefix_lengths must be an int or B of them, got \(2, 1\)",
        ),
    ],
)
def test_errors(make, kind, problem):
    with pytest.raises(kind, match=re.compile(problem, re.DOTALL)) as info:
        make()
    assert "unsupported operand" in problem or isinstance(
        info.value, RuntimeError
    )  # as all errors of arguments


def test_an_error_of_a_predicate_keeps_its_cause():
    with pytest.raises(ValueError, match="mask_mod failed") as info:
        predicate(with_if, 9, 9)
    assert "ambiguous" in str(info.value.__cause__)
