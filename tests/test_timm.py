"""timm's vision transformers on our attention: they call F.scaled_dot_product_attention.

timm is optional: `pip install timm`. No weights are downloaded.
"""

import contextlib

import pytest
import torch
from kernel_calls import Calls
from torch import nn

import attn_ext

timm = pytest.importorskip("timm")


SMALL = {"img_size": 32, "num_classes": 5}
# name, options, calls of attention in a forward pass
MODELS = [
    ("vit_tiny_patch16_224", {"embed_dim": 24, "num_heads": 3, "depth": 2}, 2),
    ("vit_tiny_patch16_224", {"embed_dim": 24, "num_heads": 3, "depth": 2, "qk_norm": True}, 2),
    ("vit_tiny_patch16_224", {"embed_dim": 24, "num_heads": 3, "depth": 1, "global_pool": "map"}, 2),
    ("deit_tiny_patch16_224", {"embed_dim": 24, "num_heads": 3, "depth": 2}, 2),
    ("beit_base_patch16_224", {"embed_dim": 24, "num_heads": 3, "depth": 2}, 2),  # a relative bias, learned
    ("eva02_tiny_patch14_224", {"img_size": 28, "embed_dim": 24, "num_heads": 3, "depth": 2}, 2),  # rotary
    ("cait_xxs24_224", {"embed_dim": 24, "num_heads": 3, "depth": 1}, None),
]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("name", "options", "calls"), MODELS)
def test_patch_sdpa(name, options, calls, training):
    """The same logits and parameter gradients, and our kernel did it."""
    torch.manual_seed(0)
    model = timm.create_model(name, **{**SMALL, **options}).double().train(training)
    x = torch.randn(2, 3, model.patch_embed.img_size[0], model.patch_embed.img_size[0], dtype=torch.float64)
    parameters = [p for p in model.parameters() if p.requires_grad]

    def run():
        out = model(x)
        return out, torch.autograd.grad(out.sin().sum(), parameters, allow_unused=True)

    expected = run()
    with attn_ext.patch_sdpa(), Calls() as seen:
        results = run()
    torch.testing.assert_close(results, expected)
    assert seen.number > 0
    if calls is not None:
        assert seen.number == calls


def test_replace_attention_says_that_there_is_nothing_to_replace():
    report = attn_ext.replace_attention(timm.create_model("resnet18", num_classes=5))  # no attention in it
    assert report.replaced == []
    assert "attn_ext.patch_sdpa()" in repr(report)


def test_a_timm_block_beside_torchs_module():
    """A model of both kinds: both are replaced, and patch_sdpa besides changes nothing."""
    block = timm.layers.Attention(24, num_heads=3, qkv_bias=True)
    model = nn.ModuleList([block, nn.MultiheadAttention(24, 3, batch_first=True)]).eval()
    x = torch.randn(2, 5, 24)
    with torch.no_grad():
        expected = model[0](x), model[1](x, x, x)
        assert sorted(attn_ext.replace_attention(model).replaced) == ["0", "1"]
        for patch in (contextlib.nullcontext, attn_ext.patch_sdpa):
            with patch(), Calls() as seen:
                results = model[0](x), model[1](x, x, x)
            assert seen.number == 2
            torch.testing.assert_close(results, expected)
