"""Known faults of attention modules that no other file of their tests shows: derivatives, no keys, autocast.

References are issues of other projects in which users met the fault.
"""

import copy

import pytest
import torch
from multihead_modes import F64, MODES, in_mode
from torch import nn
from torch.autograd import gradcheck, gradgradcheck

from attn_ext import MultiHeadAttention, replace_attention


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("arguments", [{}, {"add_bias_kv": True, "add_zero_attn": True}], ids=str)
def test_forward_mode_and_second_derivatives(need_weights, arguments):
    # pytorch#128971, #116350: forward mode only with need_weights=True, second derivatives missing
    module = MultiHeadAttention(4, 2, batch_first=True, **arguments, **F64)
    x = torch.randn(2, 3, 4, requires_grad=True, **F64)
    padding = torch.tensor([[False, False, True], [True] * 3])

    def call(x):
        return module(x, x, x, padding, need_weights)[: 1 + need_weights]

    assert gradcheck(call, x, check_forward_ad=True)
    assert gradgradcheck(call, x)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("masks", ["none", "padding", "both"])
def test_no_keys_at_all(need_weights, masks):
    # pytorch#141218: an axis of size 0 crashes or returns memory as it was
    module = MultiHeadAttention(8, 2, batch_first=True)
    nn.init.normal_(module.out_proj.bias)
    query, memory = torch.randn(2, 3, 8), torch.randn(2, 0, 8)
    options = {} if masks == "none" else {"key_padding_mask": torch.zeros(2, 0, dtype=torch.bool)}
    if masks == "both":
        options["attn_mask"] = torch.zeros(3, 0)
    out, weights = module(query, memory, memory, need_weights=need_weights, **options)
    torch.testing.assert_close(out, module.out_proj.bias.expand(2, 3, 8))
    assert weights is None or weights.shape == (2, 3, 0)
    out.sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in module.parameters())
    assert not module.in_proj_weight.grad.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_encoder_layer_under_autocast_in_every_mode(dtype):
    # pytorch#161489, #161936, #111276: eval without gradients casts otherwise than training does, or raises
    theirs = nn.TransformerEncoderLayer(16, 4, 24, dropout=0.0, batch_first=True)
    ours = copy.deepcopy(theirs)
    replace_attention(ours)
    x = torch.randn(3, 6, 16)
    padding = torch.arange(6) >= torch.tensor([[6], [4], [1]])
    exact = theirs(x, src_key_padding_mask=padding)
    outs = []
    for mode in MODES:
        with in_mode(ours, mode), torch.autocast("cpu", dtype):
            outs.append(ours(x, src_key_padding_mask=padding))
    assert all(torch.equal(out, outs[0]) for out in outs)
    # Normalised values of a few units, each rounded half a dozen times on its way through the layer.
    torch.testing.assert_close(outs[0].float(), exact, atol=8 * torch.finfo(dtype).eps, rtol=0)
