"""SelfAttention and CrossAttention beside torch.nn.MultiheadAttention with the same weights."""

import pytest
import torch
from multihead_modes import F64, TOLERANCE
from torch import nn

import attn_ext

pytestmark = pytest.mark.filterwarnings("ignore:heads of 4 features")
N, S, T, E, H = 2, 6, 5, 8, 2


def sequence(length):
    return torch.randn(N, length, E, **F64)


def padding():
    mask = torch.zeros(N, S, dtype=torch.bool)
    mask[1, -2:] = True
    return mask


@pytest.mark.parametrize("masks", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
def test_self_attention(is_causal, masks):
    torch.manual_seed(0)
    ours = attn_ext.SelfAttention(E, H, causal=is_causal, batch_first=True, **F64)
    theirs = nn.MultiheadAttention(E, H, batch_first=True, **F64)
    theirs.load_state_dict(ours.state_dict())
    x = sequence(S)
    kpm = padding() if masks else None
    forbid = (torch.rand(S, S) < 0.3).fill_diagonal_(False) if masks else None
    all_masks = (
        torch.ones(S, S, dtype=torch.bool).triu(1) if is_causal else torch.zeros(S, S, dtype=torch.bool)
    )
    all_masks = all_masks | forbid if masks else all_masks
    expected = theirs(x, x, x, kpm, attn_mask=all_masks, average_attn_weights=False)
    torch.testing.assert_close(ours(x, kpm, forbid, need_weights=True), expected, **TOLERANCE)
    torch.testing.assert_close(ours(x, kpm, forbid), expected[0], **TOLERANCE)
    if not is_causal:
        converted = attn_ext.SelfAttention.from_torch(theirs)
        torch.testing.assert_close(converted(x, kpm, forbid), expected[0], **TOLERANCE)


def test_causal_self_attention_keeps_a_window():
    layer = attn_ext.SelfAttention(E, H, causal=True, window=(2, 3), **F64)
    weights = layer(sequence(S)[0], need_weights=True)[1]
    distance = torch.arange(S)[:, None] - torch.arange(S)
    assert torch.equal(weights[0] > 0, (distance >= 0) & (distance <= 2))


@pytest.mark.parametrize("context_dim", [None, 5])
def test_cross_attention(context_dim):
    torch.manual_seed(0)
    ours = attn_ext.CrossAttention(E, H, context_dim=context_dim, batch_first=True, **F64)
    theirs = nn.MultiheadAttention(E, H, kdim=context_dim, vdim=context_dim, batch_first=True, **F64)
    theirs.load_state_dict(ours.state_dict())
    x, context = sequence(T), torch.randn(N, S, context_dim or E, **F64)
    expected = theirs(x, context, context, padding(), average_attn_weights=False)
    torch.testing.assert_close(ours(x, context, padding(), need_weights=True), expected, **TOLERANCE)
    for module in (ours, attn_ext.CrossAttention.from_torch(theirs)):
        torch.testing.assert_close(module(x, context, padding()), expected[0], **TOLERANCE)
