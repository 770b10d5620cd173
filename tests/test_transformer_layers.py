"""The transformer layers and stacks beside torch.nn's with the same weights.

torch.nn's modules are the independent formula here: in training mode the plain one, in eval mode without
gradients its fused operator, which torch calls its fast path.
"""

import copy
import inspect
import io
import pickle
import warnings

import pytest
import torch
from multihead_modes import F64, MODES, TOLERANCE, in_mode
from torch import nn

import attn_ext

pytestmark = pytest.mark.filterwarnings(
    "ignore:The PyTorch API of nested tensors is in prototype",
    "ignore:enable_nested_tensor is True, but",
    "ignore:heads of 4 features",
)
N, S, T, E, H = 2, 6, 5, 8, 2
LAYERS = ("TransformerEncoderLayer", "TransformerDecoderLayer")


def pair(name, seed=0, **options):
    """Ours and torch's with the same weights; biases too get random values, which they do not start with."""
    options = {"batch_first": True, "dropout": 0.0, "dim_feedforward": 16, **F64, **options}
    arguments = (E, H) if name in LAYERS else (E, H, 2, 2)
    modules = []
    for library in (attn_ext, nn):
        torch.manual_seed(seed)
        modules.append(getattr(library, name)(*arguments, **options))
    ours, theirs = modules
    with torch.no_grad():
        for p in theirs.parameters():
            p.add_(torch.randn_like(p) / 4)
    assert ours.load_state_dict(theirs.state_dict()).missing_keys == []
    return ours, theirs


def sequence(length, batch_first=True):
    x = torch.randn(N, length, E, **F64)
    return (x if batch_first else x.transpose(0, 1)).detach().requires_grad_()


def padding(length):
    mask = torch.zeros(N, length, dtype=torch.bool)
    mask[1, -2:] = True
    return mask


def causal(length):
    return nn.Transformer.generate_square_subsequent_mask(length, **F64)


def assert_same(ours, theirs, inputs, options):
    """Outputs, and in modes with gradients the gradients of inputs and parameters."""
    results = []
    for module in (ours, theirs):
        out = module(*inputs, **options)
        results.append((out, ()))
        if out.requires_grad:
            wanted = [*inputs, *module.parameters()]
            results[-1] = (out, torch.autograd.grad(out.sin().sum(), wanted))
    torch.testing.assert_close(*results, **TOLERANCE)


# ---- beside torch.nn ----

ENCODER_MASKS = {
    "none": {},
    "padding": {"src_key_padding_mask": padding(S)},
    "causal": {"src_mask": causal(S), "is_causal": True},
    "causal, not said": {"src_mask": causal(S)},
    "bool": {"src_mask": torch.rand(S, S, generator=torch.Generator().manual_seed(1)) < 0.3},
    "both": {"src_mask": causal(S), "src_key_padding_mask": padding(S)},
    "each head": {"src_mask": torch.randn(N * H, S, S, generator=torch.Generator().manual_seed(1), **F64)},
}
ENCODER_MASKS["bool"]["src_mask"].fill_diagonal_(False)


@pytest.mark.filterwarnings("ignore:Support for mismatched")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("name", ENCODER_MASKS)
def test_encoder_layer(name, batch_first, norm_first, mode, monkeypatch):
    if name == "each head":  # torch's fast path takes no such mask and returns NaN
        monkeypatch.setattr(torch.backends.mha, "get_fastpath_enabled", lambda: False)
    ours, theirs = pair("TransformerEncoderLayer", batch_first=batch_first, norm_first=norm_first)
    x = sequence(S, batch_first)
    with in_mode(theirs, mode), in_mode(ours, mode):
        assert_same(ours, theirs, [x], ENCODER_MASKS[name])


DECODER_MASKS = {
    "none": {},
    "usual": {"tgt_mask": causal(T), "tgt_is_causal": True, "memory_key_padding_mask": padding(S)},
    "padding": {"tgt_key_padding_mask": padding(T)},
    "memory": {"memory_mask": torch.randn(T, S, generator=torch.Generator().manual_seed(1), **F64)},
    "memory is causal": {"memory_mask": causal(S)[:T], "memory_is_causal": True},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("name", DECODER_MASKS)
def test_decoder_layer(name, batch_first, norm_first, mode):
    ours, theirs = pair("TransformerDecoderLayer", batch_first=batch_first, norm_first=norm_first)
    inputs = [sequence(T, batch_first), sequence(S, batch_first)]
    with in_mode(theirs, mode), in_mode(ours, mode):
        assert_same(ours, theirs, inputs, DECODER_MASKS[name])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", ["gelu", nn.SiLU()])
def test_other_constructor_arguments(activation, bias, mode):
    options = {"bias": bias, "activation": activation, "layer_norm_eps": 0.1}
    for name, inputs in (
        ("TransformerEncoderLayer", [sequence(S)]),
        ("TransformerDecoderLayer", [sequence(T), sequence(S)]),
        ("Transformer", [sequence(S), sequence(T)]),
    ):
        ours, theirs = pair(name, **options)
        with in_mode(theirs, mode), in_mode(ours, mode):
            assert_same(ours, theirs, inputs, {})


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
def test_transformer(batch_first, norm_first, mode):
    ours, theirs = pair("Transformer", batch_first=batch_first, norm_first=norm_first)
    inputs = [sequence(S, batch_first), sequence(T, batch_first)]
    masks = {
        "tgt_mask": causal(T),
        "tgt_is_causal": True,
        "src_key_padding_mask": padding(S),
        "memory_key_padding_mask": padding(S),
        "tgt_key_padding_mask": padding(T).to(torch.float64) * -3,
    }
    with in_mode(theirs, mode), in_mode(ours, mode):
        assert_same(ours, theirs, inputs, masks)
        assert_same(ours, theirs, [x[0] if batch_first else x[:, 0] for x in inputs], {})


@pytest.mark.parametrize("name", [*LAYERS, "Transformer"])
def test_causal_without_a_mask(name):
    """What torch.nn refuses: is_causal alone, which needs no mask of the size of the logits."""
    ours, theirs = pair(name)
    x, memory = sequence(T), sequence(S)
    inputs = {"TransformerEncoderLayer": [x], "TransformerDecoderLayer": [x, memory]}.get(name, [memory, x])
    flag, mask = {
        "TransformerEncoderLayer": ("is_causal", "src_mask"),
        "TransformerDecoderLayer": ("tgt_is_causal", "tgt_mask"),
        "Transformer": ("tgt_is_causal", "tgt_mask"),
    }[name]
    expected = theirs(*inputs, **{mask: causal(T)})
    torch.testing.assert_close(ours(*inputs, **{flag: True}), expected, **TOLERANCE)
    assert not torch.allclose(ours(*inputs), expected)


def test_every_mask_and_flag_reaches_its_attention():
    ours, theirs = pair("Transformer")
    inputs = [sequence(S), sequence(T)]
    masks = {
        "src_mask": torch.randn(S, S, **F64),
        "tgt_mask": torch.randn(T, T, **F64),
        "memory_mask": torch.randn(T, S, **F64),
        "src_key_padding_mask": torch.randn(N, S, **F64),
        "tgt_key_padding_mask": torch.randn(N, T, **F64),
        "memory_key_padding_mask": torch.randn(N, S, **F64),
    }
    assert_same(ours, theirs, inputs, masks)
    upper_left = {"src": causal(S), "tgt": causal(T), "memory": causal(S)[:T]}
    for part, mask in upper_left.items():
        expected = theirs(*inputs, **{f"{part}_mask": mask})
        torch.testing.assert_close(ours(*inputs, **{f"{part}_is_causal": True}), expected, **TOLERANCE)


def test_torchs_other_paths_are_not_taken(monkeypatch):
    """Known fault: in eval mode torch's layers compute with an operator of their own and nested tensors."""

    def refuse(*args, **kwargs):
        raise AssertionError("torch's own path")

    encoder = attn_ext.TransformerEncoder(
        attn_ext.TransformerEncoderLayer(E, H, 16, batch_first=True), 2
    ).eval()
    calls = []
    for layer in encoder.layers:
        layer.self_attn.register_forward_hook(lambda *_: calls.append(1))
    for name in (
        "_transformer_encoder_layer_fwd",
        "_native_multi_head_attention",
        "_nested_tensor_from_mask",
    ):
        monkeypatch.setattr(torch, name, refuse)
    monkeypatch.setattr(nn.functional, "multi_head_attention_forward", refuse)
    with torch.inference_mode():
        encoder(torch.randn(N, S, E), src_key_padding_mask=padding(S))
        assert len(calls) == 2
        for layer in encoder.layers:  # no hooks: they would keep torch's layer from its path
            layer.self_attn._forward_hooks.clear()
        encoder(torch.randn(N, S, E), src_key_padding_mask=padding(S))


def test_nested_input():
    ours, theirs = pair("TransformerEncoderLayer")
    x = torch.nested.nested_tensor([torch.randn(n, E, **F64) for n in (3, 5)])
    with torch.no_grad():
        out, expected = ours.eval()(x), theirs.eval()(x)
    assert out.is_nested
    torch.testing.assert_close(out.unbind(), expected.unbind(), **TOLERANCE)


def test_a_padded_sample_does_not_spoil_the_batch():
    """Known fault: torch.nn gives NaN to a sample without a visible key, and so to all gradients."""
    layer = attn_ext.TransformerEncoderLayer(E, H, 16, batch_first=True)
    mask = torch.tensor([[False] * S, [True] * S])
    layer(torch.randn(N, S, E), src_key_padding_mask=mask).square().sum().backward()
    assert all(p.grad.isfinite().all() for p in layer.parameters())


# ---- constructors, checkpoints, copies ----


@pytest.mark.parametrize("name", [*LAYERS, "TransformerEncoder", "TransformerDecoder", "Transformer"])
def test_signatures_begin_with_torchs(name):
    for method in ("__init__", "forward"):
        ours, theirs = (inspect.signature(getattr(getattr(m, name), method)) for m in (attn_ext, nn))
        if (name, method) == ("Transformer", "forward"):
            continue  # passes torch's arguments on
        listed = [(p.name, p.default, p.kind) for p in theirs.parameters.values()]
        assert [(p.name, p.default, p.kind) for p in ours.parameters.values()][: len(listed)] == listed


@pytest.mark.parametrize("name", [*LAYERS, "Transformer"])
def test_the_same_seed_gives_the_same_parameters_and_checkpoints_load_both_ways(name):
    modules = []
    for library in (attn_ext, nn):
        torch.manual_seed(3)
        modules.append(getattr(library, name)(E, H, batch_first=True))
    ours, theirs = modules
    states = ours.state_dict(), theirs.state_dict()
    assert list(states[0]) == list(states[1])
    assert all(torch.equal(a, b) for a, b in zip(*(s.values() for s in states), strict=True))
    theirs.load_state_dict(ours.state_dict())
    ours.load_state_dict(theirs.state_dict())


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_device_and_dtype(device):
    model = attn_ext.Transformer(E, H, 1, 1, 16, device=device, dtype=torch.bfloat16, qk_norm="rms")
    assert {(p.device.type, p.dtype) for p in model.parameters()} == {(device, torch.bfloat16)}


def test_encoder_gives_no_warning_and_takes_torchs_flags():
    layer = attn_ext.TransformerEncoderLayer(E, H, 16, batch_first=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        encoder = attn_ext.TransformerEncoder(layer, 2, enable_nested_tensor=True, mask_check=False).eval()
        with torch.no_grad():
            encoder(torch.randn(N, S, E), causal(S).bool(), padding(S))  # kinds may differ


@pytest.mark.parametrize("copier", ["deepcopy", "pickle", "save"])
def test_copies(copier):
    model = attn_ext.Transformer(
        E, H, 1, 1, 16, dropout=0.0, qk_norm="layer", position=attn_ext.T5RelativePositionBias(H)
    )
    if copier == "deepcopy":
        other = copy.deepcopy(model)
    elif copier == "pickle":
        other = pickle.loads(pickle.dumps(model))
    else:
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        other = torch.load(buffer, weights_only=False)
    src, tgt = torch.randn(S, N, E), torch.randn(T, N, E)
    assert torch.equal(other(src, tgt), model(src, tgt))


def test_functional_call():
    ours, theirs = pair("Transformer")
    other, _ = pair("Transformer", seed=1)
    inputs = sequence(S), sequence(T)
    out = torch.func.functional_call(other, dict(ours.named_parameters()), inputs)
    torch.testing.assert_close(out, theirs(*inputs), **TOLERANCE)


def assert_compiled_is_the_same(model, calls, **options):
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", **options)
    for inputs, masks in calls:
        results = []
        for function in (compiled, model):
            out = function(*inputs, **masks)
            results.append((out, torch.autograd.grad(out.sin().sum(), [*inputs, *model.parameters()])))
        torch.testing.assert_close(*results, **TOLERANCE)


@pytest.mark.compile
def test_compile_fullgraph():
    """Known fault: torch.nn's stacks compare the mask with the causal one, where Dynamo has to break."""
    model, _ = pair("Transformer", norm_first=True)
    masks = {"tgt_mask": causal(T), "src_key_padding_mask": padding(S)}
    assert_compiled_is_the_same(model, [((sequence(S), sequence(T)), masks)])


@pytest.mark.compile
def test_compile_with_dynamic_lengths():
    layer = attn_ext.TransformerEncoderLayer(
        E, H, 16, dropout=0.0, batch_first=True, position=attn_ext.RotaryEmbedding(4), **F64
    )
    encoder = attn_ext.TransformerEncoder(layer, 1)
    calls = [((sequence(n),), {"mask": causal(n), "src_key_padding_mask": padding(n)}) for n in (S, S + 3)]
    assert_compiled_is_the_same(encoder, calls, dynamic=True)


# ---- the extras of the attention ----


def test_extras_reach_the_attentions():
    position = attn_ext.RotaryEmbedding(4)
    extras = {"qk_norm": "rms", "num_kv_heads": 1, "softcap": 5.0}
    layer = attn_ext.TransformerDecoderLayer(E, H, 16, position=position, window=(2, 0), **extras, **F64)
    assert layer.self_attn.position is position
    assert layer.self_attn.window == (2, 0)
    assert layer.multihead_attn.position is layer.multihead_attn.window is None
    for attention in (layer.self_attn, layer.multihead_attn):
        assert (attention.qk_norm, attention.num_kv_heads, attention.softcap) == ("rms", 1, 5.0)
    with pytest.raises(TypeError, match="positon"):
        attn_ext.TransformerEncoderLayer(E, H, positon=position)


def test_a_position_module_is_copied_with_the_layer_and_can_be_shared():
    bias = attn_ext.T5RelativePositionBias(H, **F64)
    layer = attn_ext.TransformerEncoderLayer(E, H, 16, position=bias, dropout=0.0, **F64)
    encoder = attn_ext.TransformerEncoder(layer, 3)
    x = sequence(S, batch_first=False)
    expected = encoder(x)
    assert sum("relative_attention_bias" in name for name, _ in encoder.named_parameters()) == 3
    for each in encoder.layers:
        each.self_attn.position = bias
    assert sum("relative_attention_bias" in name for name, _ in encoder.named_parameters()) == 1
    torch.testing.assert_close(encoder(x), expected, **TOLERANCE)


@pytest.mark.parametrize(
    ("src", "tgt"),
    [((S, E), (T, N, E)), ((S, N, E + 1), (T, N, E)), ((S, N, E), (T, N + 1, E)), ((E,), (E,))],
)
def test_transformer_names_shapes_that_do_not_fit(src, tgt):
    model = attn_ext.Transformer(E, H, 1, 1, 16)
    with pytest.raises(ValueError, match=r"src and tgt must be \(length, N, d_model\)") as caught:
        model(torch.randn(src), torch.randn(tgt))
    assert f"got {src} and {tgt}" in str(caught.value)


@pytest.mark.parametrize("name", [*LAYERS, "Transformer"])
@pytest.mark.parametrize("sizes", [(10, 4), (8, 0), (0, 2)])
def test_sizes_that_do_not_divide_are_named(sizes, name):
    with pytest.raises(ValueError, match=rf"d_model must be a multiple .* got {sizes[0]} and {sizes[1]}"):
        getattr(attn_ext, name)(*sizes)


def test_custom_stacks_are_used_and_refuse_options_that_could_not_be():
    whole = attn_ext.Transformer(E, H, 1, 1, 16)
    model = attn_ext.Transformer(E, H, custom_encoder=whole.encoder, custom_decoder=whole.decoder)
    assert (model.encoder, model.decoder) == (whole.encoder, whole.decoder)
    with pytest.raises(ValueError, match="qk_norm would have no effect: custom_encoder"):
        attn_ext.Transformer(E, H, custom_encoder=whole.encoder, custom_decoder=whole.decoder, qk_norm="rms")
