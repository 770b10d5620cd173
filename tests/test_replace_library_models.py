"""attn_ext.replace_attention with models of timm and of Hugging Face transformers.

Both are optional: `pip install timm transformers`. No weights are downloaded.
"""

import copy
import pickle

import pytest
import torch
from kernel_calls import Calls
from torch import nn

from attn_ext import replace_attention

IMAGES = torch.randn(2, 3, 32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
TOKENS = torch.arange(14).reshape(2, 7)


def results(model, *inputs):
    """(output, parameter gradients), and how often our kernel ran."""
    with Calls() as seen:
        out = model(*inputs)
        out = getattr(out, "logits", out)
        grads = torch.autograd.grad(out.sin().sum(), list(model.parameters()), allow_unused=True)
    return (out, grads), seen.number


def vision_transformer(name="vit_tiny_patch16_224", **options):
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    options = {"img_size": 32, "num_classes": 5, "embed_dim": 24, "num_heads": 3, "depth": 2, **options}
    return timm.create_model(name, **options).double()


def language_model(attn_implementation="eager"):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=20, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, attn_implementation=attn_implementation,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).double()


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "beit_base_patch16_224", "deit_tiny_patch16_224"])
def test_timm(name):
    model = vision_transformer(name)
    expected, none = results(model, IMAGES)
    replaced = replace_attention(model)
    assert replaced.replaced == ["blocks.0.attn", "blocks.1.attn"]
    assert replaced.skipped == {}
    ours, calls = results(model, IMAGES)
    torch.testing.assert_close(ours, expected)
    assert (none, calls) == (0, 2)
    replaced.undo()
    replaced.undo()  # without effect
    undone, none = results(model, IMAGES)
    torch.testing.assert_close(undone, expected, rtol=0, atol=0)
    assert none == 0


def test_timm_without_fused_attention():
    model = vision_transformer()
    model.blocks[1].attn.fused_attn = False
    replaced = replace_attention(model)
    assert replaced.replaced == ["blocks.0.attn"]
    assert list(replaced.skipped) == ["blocks.1.attn"]
    assert "fused_attn is off" in str(replaced)


def test_timm_module_with_a_forward_of_its_own():
    model = vision_transformer()
    attention = model.blocks[0].attn
    attention.forward = lambda x, **options: x
    assert "forward was replaced" in replace_attention(model).skipped["blocks.0.attn"]
    other = vision_transformer()
    replaced = replace_attention(other)
    other.blocks[1].attn.forward = attention.forward
    with pytest.raises(RuntimeError, match=r"blocks\.1\.attn has got another forward: it cannot be undone"):
        replaced.undo()


def test_timm_in_compiled_code():
    model = vision_transformer().eval()
    expected, _ = results(model, IMAGES)
    replace_attention(model)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(IMAGES), expected[0])
    with torch.profiler.profile() as seen:  # dispatch modes are refused in compiled code
        compiled(IMAGES)
    assert sum(event.name == "attn_ext::attention_forward" for event in seen.events()) == 2


def test_timm_copies():
    """Copies have our attention, and their own parameters."""
    model = vision_transformer().eval()
    replace_attention(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        nn.init.zeros_(model.blocks[0].attn.qkv.weight)
        nn.init.ones_(other.blocks[0].attn.qkv.weight)
        plain = vision_transformer().eval()
        plain.load_state_dict(other.state_dict())
        ours, calls = results(other, IMAGES)
        assert calls == 2
        torch.testing.assert_close(ours, results(plain, IMAGES)[0])


def test_transformers():
    model = language_model()
    expected, none = results(model, TOKENS)
    replaced = replace_attention(model)
    assert replaced.replaced == [""]
    ours, calls = results(model, TOKENS)
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)  # eager's softmax is in float32
    assert (none, calls) == (0, 2)
    assert "uses attn_ext already" in str(replace_attention(model))
    replaced.undo()
    assert model.config._attn_implementation == "eager"
    undone, none = results(model, TOKENS)
    torch.testing.assert_close(undone, expected, rtol=0, atol=0)
    assert none == 0


def test_transformers_model_in_parts():
    """Each part gets its own implementation back."""
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.CLIPConfig(
        text_config={**small, "vocab_size": 20, "eos_token_id": 1},
        vision_config={**small, "image_size": 32, "patch_size": 16},
        attn_implementation={"": "sdpa", "text_config": "eager", "vision_config": "sdpa"},
    )
    parts = nn.ModuleDict({"clip": transformers.CLIPModel(config), "pool": nn.MultiheadAttention(8, 2)})
    replaced = replace_attention(parts)
    assert replaced.replaced == ["clip", "pool"]
    configs = (config, config.text_config, config.vision_config)
    assert [c._attn_implementation for c in configs] == ["attn_ext"] * 3
    replaced.undo()
    assert [c._attn_implementation for c in configs] == ["sdpa", "eager", "sdpa"]
    assert type(parts["pool"]) is nn.MultiheadAttention


def test_transformers_changed_since():
    model = language_model()
    replaced = replace_attention(model)
    model.set_attn_implementation("sdpa")
    with pytest.raises(RuntimeError, match=r"\(the model itself\) uses sdpa now: it cannot be undone"):
        replaced.undo()


def test_transformers_model_that_cannot_change():
    transformers = pytest.importorskip("transformers")
    config = transformers.BloomConfig(vocab_size=20, hidden_size=16, n_layer=1, n_head=2)
    replaced = replace_attention(transformers.BloomForCausalLM(config))
    assert replaced.replaced == []
    assert replaced.skipped == {"": "transformers cannot change the attention of BloomForCausalLM"}
