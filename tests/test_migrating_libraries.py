"""The code in docs/migrating/flash_attn.md and xformers.md runs, and computes what the text says."""

import inspect
import re
import sys
from pathlib import Path

import flash_attn_formula as by_hand
import pytest
import torch
from oracle import randn

from attn_ext.integrations import flash_attn as api

DOCS = Path(__file__).parents[1] / "docs" / "migrating"


def blocks(page, fence="python"):
    """The code blocks of a page: ``python`` has new code, ``py`` what was there before."""
    return re.findall(rf"```{fence}\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)


def run(page, names, fence="python"):
    """What ``out`` is after each block; the blocks share their names, as the reader's file would."""
    outs = []
    for code in blocks(page, fence):
        names.pop("out", None)
        exec(compile(code, page, "exec"), names)
        outs.append(names.get("out"))
    return outs


def test_flash_attn_page(monkeypatch):
    q, k, v = (randn(2, 200, heads, 32, seed=n) for n, heads in enumerate((4, 2, 2)))
    q = q[:, :150]
    lengths = torch.tensor([3, 7])
    k_cache, v_cache = (randn(2, 9, 2, 32, seed=n) for n in (5, 6))
    k_new, v_new, q_new = (randn(2, 1, heads, 32, seed=7 + n) for n, heads in enumerate((2, 2, 4)))
    caches = [t.clone() for t in (k_cache, v_cache)]
    names = {
        "torch": torch,
        "q": q,
        "k": k,
        "v": v,
        "lengths": lengths,
        "k_cache": k_cache,
        "v_cache": v_cache,
    }
    names |= {"k_new": k_new, "v_new": v_new, "q_new": q_new}
    monkeypatch.setitem(sys.modules, "flash_attn", None)  # as on a machine without it
    after, choice, own, step, results, packed = run("flash_attn.md", names)

    expected, _ = by_hand.attention(q, k, v, causal=True, window_size=(127, 0))
    torch.testing.assert_close(after, expected)
    assert torch.equal(own, after)
    assert choice is packed is None
    assert names["flash_attn_func"] is api.flash_attn_func
    for b, n in enumerate(lengths.tolist()):
        keys, values = (
            torch.cat([t[b : b + 1, :n], new[b : b + 1]], 1)
            for t, new in zip(caches, (k_new, v_new), strict=True)
        )
        torch.testing.assert_close(step[b : b + 1], by_hand.attention(q_new[b : b + 1], keys, values)[0])
    torch.testing.assert_close((results, names["softmax_lse"]), by_hand.attention(q, k, v, causal=True))
    x = names["x"][None]
    for part in (slice(0, 5), slice(5, 12)):
        one, _ = by_hand.attention(x[:, part], x[:, part], x[:, part], causal=True)
        torch.testing.assert_close(names["packed"][None, part], one)

    monkeypatch.setitem(sys.modules, "flash_attn", api)  # the code from before runs with ours
    (before,) = run("flash_attn.md", {"q": q, "k": k, "v": v}, "py")
    assert torch.equal(before, after)


def masked(query, key, value, seen, bias=0.0):
    """Attention of (B, M, H, K) where ``seen`` (Mq, Mk) says which pairs there are."""
    s = torch.einsum("bihd,bjhd->bhij", query, key) * query.shape[-1] ** -0.5 + bias
    p = torch.softmax(s.masked_fill(~seen, -torch.inf), -1).masked_fill(~seen, 0.0)
    return torch.einsum("bhij,bjhd->bihd", p, value)


def test_xformers_page():
    """Each mask against its matrix, made as xformers defines it: by tril and triu, block by block."""
    query, key, value = (randn(2, n, 4, 16, seed=n) for n in (6, 9, 9))
    packed_query = randn(1, 6, 4, 16, seed=1)
    packed_key, packed_value = (randn(1, 8, 4, 16, seed=n) for n in (2, 3))
    padded_key, padded_value = (randn(1, 24, 4, 16, seed=n) for n in (4, 5))
    names = {"torch": torch, "query": query, "key": key, "value": value, "packed_query": packed_query}
    names |= {"packed_key": packed_key, "packed_value": packed_value}
    names |= {"padded_key": padded_key, "padded_value": padded_value}
    with torch.random.fork_rng():
        torch.set_default_dtype(torch.float64)  # the page's bias is made by torch.randn
        try:
            outs = run("xformers.md", names)
        finally:
            torch.set_default_dtype(torch.float32)

    ones, shift = torch.ones(6, 9, dtype=torch.bool), 9 - 6
    upper_left, lower_right = ones.tril(), ones.tril(shift)
    single = (t[:, :, :1].expand_as(t) for t in (key, value))
    group = (t[:, :, [0, 0, 2, 2]] for t in (key, value))
    pieces = [torch.ones(n, m, dtype=torch.bool) for n, m in ((3, 4), (1, 2), (2, 2))]
    causal_pieces = [t.tril(t.shape[1] - t.shape[0]) for t in pieces]
    padded = torch.block_diag(*(torch.arange(8)[None] < n for n in (8, 5, 1))).bool()
    packed = (packed_query, packed_key, packed_value)
    expected = [
        masked(query, key, value, upper_left),
        masked(query, key, value, upper_left, names["bias"]),
        masked(query, key, value, lower_right),
        masked(query, key, value, lower_right.triu(shift - 4 + 1)),
        masked(query, key, value, ones.triu(shift - 2).tril(shift + 1)),
        masked(query, *single, ones),
        masked(query, *group, ones).unflatten(2, (2, 2)),
        masked(*packed, torch.block_diag(*pieces).bool()),
        masked(*packed, torch.block_diag(*causal_pieces).bool()),
        masked(packed_query[:, :3], padded_key, padded_value, padded),
    ]
    for got, want in zip(outs, expected, strict=True):
        torch.testing.assert_close(got, want)
    assert names["bias"].requires_grad


@pytest.mark.parametrize("function", [name for name in dir(api) if name.startswith("flash_attn_")])
def test_every_argument_is_on_the_page(function):
    """In backquotes; a new argument must not go undocumented."""
    page = (DOCS / "flash_attn.md").read_text()
    for name in inspect.signature(getattr(api, function)).parameters:
        assert re.search(rf"`{name}\b", page), name
