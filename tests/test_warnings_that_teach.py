"""Warnings for what is legal and most likely not meant."""

import warnings

import pytest
import torch

import attn_ext
from attn_ext.modules import multihead


@pytest.fixture(autouse=True)
def _as_in_a_new_process():
    multihead._warn_of_small_heads.cache_clear()


def caught(function):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        function()
    return [str(w.message) for w in found]


def test_small_heads_are_warned_of_once():
    found = caught(lambda: [attn_ext.MultiHeadAttention(64, 4) for _ in range(3)])
    assert len(found) == 1
    assert "heads of 16 features" in found[0]
    assert caught(lambda: attn_ext.MultiHeadAttention(64, 4)) == []
    assert caught(lambda: attn_ext.MultiHeadAttention(64, 2)) == []  # heads of 32
    assert len(caught(lambda: attn_ext.TransformerEncoderLayer(64, 8))) == 1


@pytest.mark.parametrize("shape", [(5, 5), (2, 1, 1, 5), (2, 4, 5, 5), (5,)])
def test_a_mask_that_hides_everything(shape):
    q = torch.randn(2, 4, 5, 8)
    mask = torch.zeros(shape, dtype=torch.bool)
    for function, name in (
        (attn_ext.attention, "mask"),
        (attn_ext.scaled_dot_product_attention, "attn_mask"),
    ):
        (message,) = caught(lambda: function(q, q, q, **{name: mask}))  # noqa: B023
        assert message.startswith(f"{name} hides every key from every query")
        assert "pass ~mask" in message
    flat = mask.view(-1)
    flat[-1] = True  # a last row that sees something
    assert caught(lambda: attn_ext.attention(q, q, q, mask=mask)) == []


def test_a_module_mask_of_the_other_convention():
    module = attn_ext.MultiHeadAttention(64, 2)
    x = torch.randn(5, 2, 64)
    sdpa_style = torch.ones(5, 5, dtype=torch.bool)  # "all may attend" in SDPA, "all masked out" here
    (message,) = caught(lambda: module(x, x, x, attn_mask=sdpa_style, need_weights=False))
    assert "masked out in MultiHeadAttention" in message
    assert caught(lambda: module(x, x, x, key_padding_mask=torch.tensor([[True] * 5, [False] * 5]))) == []


@pytest.mark.compile
def test_masks_are_not_looked_at_while_compiling_or_under_vmap():
    q = torch.randn(2, 4, 5, 8)
    mask = torch.zeros(5, 5, dtype=torch.bool)

    def call(mask):
        return attn_ext.attention(q, q, q, mask=mask)

    assert caught(lambda: torch.compile(call, fullgraph=True, backend="eager")(mask)) == []
    assert caught(lambda: torch.func.vmap(call)(torch.stack([mask, ~mask]))) == []
