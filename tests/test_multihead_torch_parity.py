"""MultiHeadAttention against torch.nn.MultiheadAttention: parameters, checkpoints, forward, gradients.

Everything is float64, where both are exact to rounding: the tolerance 1e-12 is some thousand units in the
last place of values of order one. torch is asked with need_weights=True, its path by the formula.
"""

import itertools
import warnings

import pytest
import torch
from torch import nn

from attn_ext import MultiHeadAttention

N, L, S, E, H = 2, 3, 5, 8, 2
TOLERANCE = {"atol": 1e-12, "rtol": 1e-12}

CONSTRUCTORS = {
    "default": {},
    "no_bias": {"bias": False},
    "bias_kv": {"add_bias_kv": True},
    "zero_attn": {"add_zero_attn": True},
    "bias_kv_zero_attn": {"add_bias_kv": True, "add_zero_attn": True},
    "kdim": {"kdim": 6},
    "vdim": {"vdim": 7},
    "kdim_vdim_everything": {"kdim": 6, "vdim": 7, "bias": False, "add_bias_kv": True, "add_zero_attn": True},
    "one_head_each_feature": {"num_heads": 8},
}


def make_pair(seed=0, **arguments):
    """Ours and torch's module from the same seed; zero biases are replaced, or they would test nothing."""
    arguments = {"embed_dim": E, "num_heads": H, "dtype": torch.float64, **arguments}
    torch.manual_seed(seed)
    ours = MultiHeadAttention(**arguments)
    torch.manual_seed(seed)
    theirs = nn.MultiheadAttention(**arguments)
    with torch.no_grad():
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            if not a.any():
                a.copy_(torch.randn_like(a))
            b.copy_(a)
    return ours, theirs


def make_inputs(module, batched=True, self_attention=False, length=L):
    """query, key, value in the module's layout."""

    def tensor(length, features):
        shape = (N, length, features) if module.batch_first else (length, N, features)
        return torch.randn(shape if batched else (length, features), dtype=torch.float64, requires_grad=True)

    query = tensor(length, module.embed_dim)
    if self_attention:
        return query, query, query
    return query, tensor(S, module.kdim), tensor(S, module.vdim)


def make_masks(padding, attn, batched=True, heads=H, length=L, keys=S):
    """key_padding_mask and attn_mask of the kinds named; bool ones leave each query a key."""
    batch = N if batched else 1
    kpm = mask = None
    if padding is not None:
        kpm = torch.zeros(batch, keys, dtype=torch.bool)
        kpm[0, -2:] = True
        if padding == "float":
            kpm = torch.randn(batch, keys, dtype=torch.float64).masked_fill(kpm, -torch.inf)
        kpm = kpm if batched else kpm[0]
    if attn is not None:
        shape = (length, keys) if attn.endswith("2d") else (batch * heads, length, keys)
        mask = torch.rand(shape) < 0.4
        mask[..., 0] = False
        if attn.startswith("float"):
            mask = torch.randn(shape, dtype=torch.float64).masked_fill(mask, -torch.inf)
    return {"key_padding_mask": kpm, "attn_mask": mask}


def assert_same_forward_and_gradients(ours, theirs, inputs, **options):
    """Output, weights, gradients of inputs and parameters agree. (torch warns of mixed kinds of masks.)"""
    results = []
    for module in (ours, theirs):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Support for mismatched")
            out, weights = module(*inputs, **options)
        leaves = [*dict.fromkeys(inputs), *module.parameters()]
        loss = (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum()
        if weights is not None:
            loss = loss + (weights * torch.linspace(1, 2, weights.numel()).view_as(weights)).sum()
        results.append((out, weights, torch.autograd.grad(loss, leaves)))
    (out, weights, grads), (out_t, weights_t, grads_t) = results
    torch.testing.assert_close(out, out_t, **TOLERANCE)
    torch.testing.assert_close(weights, weights_t, **TOLERANCE)
    torch.testing.assert_close(grads, grads_t, **TOLERANCE)


@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_initialisation_is_bit_identical(name):
    arguments = {"embed_dim": E, "num_heads": H, **CONSTRUCTORS[name]}
    torch.manual_seed(7)
    ours = MultiHeadAttention(**arguments)
    state_ours = torch.get_rng_state()
    torch.manual_seed(7)
    theirs = nn.MultiheadAttention(**arguments)
    assert torch.equal(state_ours, torch.get_rng_state())
    assert list(ours.state_dict()) == list(theirs.state_dict())
    for key, value in theirs.state_dict().items():
        assert torch.equal(value, ours.state_dict()[key]), key
    assert [n for n, _ in ours.named_parameters()] == [n for n, _ in theirs.named_parameters()]


def test_constructor_signature_begins_with_torchs():
    import inspect

    ours = inspect.signature(MultiHeadAttention).parameters
    theirs = inspect.signature(nn.MultiheadAttention).parameters
    assert list(ours)[: len(theirs)] == list(theirs)
    assert all(ours[name].default == theirs[name].default for name in theirs)
    assert all(p.kind is p.KEYWORD_ONLY for name, p in ours.items() if name not in theirs)
    ours = inspect.signature(MultiHeadAttention.forward).parameters
    theirs = inspect.signature(nn.MultiheadAttention.forward).parameters
    assert list(ours)[: len(theirs)] == list(theirs)
    assert all(ours[name].default == theirs[name].default for name in theirs)


@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_state_dict_loads_both_ways(name):
    arguments = {"embed_dim": E, "num_heads": H, **CONSTRUCTORS[name]}
    ours, theirs = MultiHeadAttention(**arguments), nn.MultiheadAttention(**arguments)
    for source, target in ((ours, theirs), (theirs, ours)):
        with torch.no_grad():
            for p in source.parameters():
                p.normal_()
        target.load_state_dict(source.state_dict(), strict=True)
        assert all(torch.equal(a, b) for a, b in zip(source.parameters(), target.parameters(), strict=True))


@pytest.mark.parametrize("name", CONSTRUCTORS)
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("batched", [False, True])
def test_forward_gradients_and_masks(name, batch_first, batched):
    """Also known fault: cross-attention options break with masks (weights are S + 1 or S + 2 wide there)."""
    ours, theirs = make_pair(batch_first=batch_first, **CONSTRUCTORS[name])
    inputs = make_inputs(ours, batched)
    attn_kinds = (None, "bool2d", "bool3d", "float2d", "float3d")
    for (padding, attn), average in zip(
        itertools.product((None, "bool", "float"), attn_kinds), itertools.cycle((True, False))
    ):
        masks = make_masks(padding, attn, batched, ours.num_heads)
        assert_same_forward_and_gradients(ours, theirs, inputs, average_attn_weights=average, **masks)


@pytest.mark.parametrize("name", ["default", "no_bias", "bias_kv_zero_attn"])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("batched", [False, True])
def test_self_attention(name, batch_first, batched):
    ours, theirs = make_pair(batch_first=batch_first, **CONSTRUCTORS[name])
    inputs = make_inputs(ours, batched, self_attention=True, length=S)
    for need_weights, attn in itertools.product((True, False), (None, "bool2d", "float3d")):
        masks = make_masks("bool", attn, batched, length=S)
        assert_same_forward_and_gradients(ours, theirs, inputs, need_weights=need_weights, **masks)


def test_key_and_value_the_same_tensor():
    ours, theirs = make_pair()
    query, key, _ = make_inputs(ours)
    assert_same_forward_and_gradients(ours, theirs, (query, key, key))


@pytest.mark.parametrize("name", ["default", "bias_kv_zero_attn", "kdim"])
def test_without_weights_is_the_same_output(name):
    ours, theirs = make_pair(**CONSTRUCTORS[name])
    inputs = make_inputs(ours)
    for padding, attn in itertools.product((None, "bool", "float"), (None, "bool2d", "float3d")):
        masks = make_masks(padding, attn)
        out, weights = ours(*inputs, need_weights=False, **masks)
        assert weights is None
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Support for mismatched")
            torch.testing.assert_close(out, theirs(*inputs, **masks)[0], **TOLERANCE)


@pytest.mark.parametrize("name", ["default", "bias_kv_zero_attn"])
@pytest.mark.parametrize("need_weights", [False, True])
def test_is_causal_with_the_causal_mask(name, need_weights):
    ours, theirs = make_pair(**CONSTRUCTORS[name])
    inputs = make_inputs(ours, self_attention=True, length=S)
    mask = torch.triu(torch.ones(S, S, dtype=torch.bool), 1)
    options = {"attn_mask": mask, "is_causal": True, "need_weights": need_weights}
    if name == "default":
        assert_same_forward_and_gradients(ours, theirs, inputs, **options)
    expected = theirs(*inputs, attn_mask=mask)[0]
    torch.testing.assert_close(ours(*inputs, **options)[0], expected, **TOLERANCE)
    # without the mask torch refuses; here the diagonal needs no L x S tensor
    out, _ = ours(*inputs, is_causal=True, need_weights=need_weights)
    torch.testing.assert_close(out, expected, **TOLERANCE)


@pytest.mark.parametrize("name", ["default", "bias_kv_zero_attn"])
def test_is_causal_without_mask_of_unequal_lengths_is_upper_left(name):
    ours, theirs = make_pair(**CONSTRUCTORS[name])
    inputs = make_inputs(ours)
    mask = torch.triu(torch.ones(L, S, dtype=torch.bool), 1)
    out, weights = ours(*inputs, is_causal=True)
    expected = theirs(*inputs, attn_mask=mask)
    torch.testing.assert_close((out, weights), expected, **TOLERANCE)


@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_from_torch_and_back(name):
    _, theirs = make_pair(batch_first=True, dropout=0.25, **CONSTRUCTORS[name])
    theirs.eval()
    theirs.out_proj.weight.requires_grad_(False)
    rng = torch.get_rng_state()
    ours = MultiHeadAttention.from_torch(theirs)
    back = ours.to_torch()
    assert torch.equal(rng, torch.get_rng_state())
    inputs = make_inputs(ours)
    expected = theirs(*inputs)
    for module in (ours, back):
        assert not module.training
        assert module.dropout == 0.25
        assert not module.out_proj.weight.requires_grad
        assert module.out_proj.weight.data_ptr() != theirs.out_proj.weight.data_ptr()
        torch.testing.assert_close(module(*inputs), expected, **TOLERANCE)


def test_to_torch_refuses_what_torch_lacks():
    module = MultiHeadAttention(8, 4, num_kv_heads=2, softcap=3.0)
    with pytest.raises(ValueError, match="no num_kv_heads, softcap"):
        module.to_torch()


@pytest.mark.parametrize("sizes", [(0, 3, 5), (2, 0, 5), (0, 0, 0)])
def test_empty_batch_and_empty_query(sizes):
    batch, queries, keys = sizes
    ours, theirs = make_pair(batch_first=True)
    query = torch.randn(batch, queries, E, dtype=torch.float64)
    memory = torch.randn(batch, keys, E, dtype=torch.float64)
    out, weights = ours(query, memory, memory)
    expected = theirs(query, memory, memory)
    assert out.shape == expected[0].shape
    assert weights.shape == expected[1].shape


class Counting(MultiHeadAttention):
    calls = 0

    def forward(self, *args, **kwargs):
        self.calls += 1
        return super().forward(*args, **kwargs)


MODES = ["train", "eval", "eval_no_grad", "eval_inference"]


def in_mode(module, mode):
    module.train(mode == "train")
    if mode in ("train", "eval"):
        return torch.enable_grad()
    return torch.no_grad() if mode == "eval_no_grad" else torch.inference_mode()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("norm_first", [False, True])
def test_in_torchs_encoder_layer_it_is_called_in_every_mode(mode, norm_first):
    """Known fault: in eval the layer hands self_attn's weights to an operator of torch and never calls it."""
    arguments = {"dropout": 0.0, "batch_first": True, "norm_first": norm_first, "dtype": torch.float64}
    layer = nn.TransformerEncoderLayer(E, H, 16, **arguments)
    x = torch.randn(N, S, E, dtype=torch.float64)
    padding = torch.zeros(N, S, dtype=torch.bool)
    padding[0, -2:] = True
    causal = nn.Transformer.generate_square_subsequent_mask(S, dtype=torch.float64)
    with torch.no_grad():
        expected = [
            layer(x),
            layer(x, src_key_padding_mask=padding),
            layer(x, src_mask=causal, is_causal=True),
        ]
    layer.self_attn = Counting.from_torch(layer.self_attn)
    with in_mode(layer, mode):
        out = [layer(x), layer(x, src_key_padding_mask=padding), layer(x, src_mask=causal, is_causal=True)]
    assert layer.self_attn.calls == 3
    torch.testing.assert_close(out, expected, **TOLERANCE)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("swap", ["before", "after"])
def test_in_torchs_encoder(mode, swap):
    """An encoder built before the swap passes padded batches on as nested tensors in eval without grad."""
    layer = nn.TransformerEncoderLayer(E, H, 16, dropout=0.0, batch_first=True, dtype=torch.float64)
    reference = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    x = torch.randn(N, S, E, dtype=torch.float64)
    padding = torch.zeros(N, S, dtype=torch.bool)
    padding[0, -2:] = True
    if swap == "before":
        layer.self_attn = Counting.from_torch(layer.self_attn)
        encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    else:
        encoder = nn.TransformerEncoder(layer, 2)
        for each in encoder.layers:
            each.self_attn = Counting.from_torch(each.self_attn)
    with in_mode(encoder, mode):
        out = encoder(x, src_key_padding_mask=padding)
    assert [each.self_attn.calls for each in encoder.layers] == [1, 1]
    expected = reference(x, src_key_padding_mask=padding)
    torch.testing.assert_close(out[~padding], expected[~padding].to(out.dtype), **TOLERANCE)


@pytest.mark.parametrize("mode", MODES)
def test_in_torchs_decoder_layer(mode):
    layer = nn.TransformerDecoderLayer(E, H, 16, dropout=0.0, batch_first=True, dtype=torch.float64)
    x, memory = torch.randn(N, L, E, dtype=torch.float64), torch.randn(N, S, E, dtype=torch.float64)
    padding = torch.zeros(N, S, dtype=torch.bool)
    padding[0, -2:] = True
    causal = nn.Transformer.generate_square_subsequent_mask(L, dtype=torch.float64)
    options = {"tgt_mask": causal, "tgt_is_causal": True, "memory_key_padding_mask": padding}
    expected = layer(x, memory, **options)
    layer.self_attn = Counting.from_torch(layer.self_attn)
    layer.multihead_attn = Counting.from_torch(layer.multihead_attn)
    with in_mode(layer, mode):
        out = layer(x, memory, **options)
    assert layer.self_attn.calls == layer.multihead_attn.calls == 1
    torch.testing.assert_close(out, expected, **TOLERANCE)


@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_input_bias_of_a_narrower_dtype(dtype, cross):
    """torch promotes it; F.linear by itself refuses some layouts of the input."""
    ours, theirs = make_pair(batch_first=True)
    bias = torch.randn(3 * E).to(dtype)
    for module in (ours, theirs):
        module.in_proj_bias = nn.Parameter(bias.clone())
    inputs = make_inputs(ours, self_attention=not cross)
    results = []
    for module in (ours, theirs):
        out, weights = module(*inputs)
        results.append(
            (out, weights, *torch.autograd.grad(out.sin().sum(), (module.in_proj_bias, inputs[0])))
        )
    assert results[0][2].dtype == dtype
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3 if got.dtype == torch.float16 else 1e-6, atol=1e-6)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype")
def test_nested_samples_without_rows_or_of_other_shapes():
    ours, theirs = make_pair(batch_first=True)
    rows = torch.randn(3, E, dtype=torch.float64)
    for samples in ([rows, rows[:0]], [rows[:0]], [rows[:0], rows[:0]]):
        nested = torch.nested.nested_tensor(samples)
        out, weights = ours(nested, nested, nested)
        longest = max(map(len, samples))
        assert weights.shape == (len(samples), longest, longest)
        for got, sample in zip(out.unbind(), samples, strict=True):
            torch.testing.assert_close(got, theirs(sample, sample, sample)[0] if len(sample) else sample)
    for samples in ([], [rows[0]], [rows[None]]):
        nested = torch.nested.nested_tensor(samples)
        with pytest.raises(
            ValueError, match=r"nested query must hold samples of shape \(length, embed_dim\)"
        ):
            ours(nested, nested, nested)


@pytest.mark.compile
def test_compiled_encoder_with_padding_in_eval_mode():
    """One graph: torch's encoder looks at the values of the padding only where it may take its own path."""
    torch._dynamo.reset()
    layer = nn.TransformerEncoderLayer(E, H, 16, batch_first=True, dtype=torch.float64)
    layer.self_attn = MultiHeadAttention.from_torch(layer.self_attn)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    x = torch.randn(2, 7, E, dtype=torch.float64)
    padding = torch.tensor([[False] * 7, [True, False, True, False, True, True, False]])
    compiled = torch.compile(encoder, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(
        compiled(x, src_key_padding_mask=padding), encoder(x, src_key_padding_mask=padding), **TOLERANCE
    )
