"""attn_ext.replace_attention: the same model, parameters and results, with our modules in it, and back."""

import copy
import io
import warnings

import pytest
import torch
from multihead_modes import F64, MODES, TOLERANCE, in_mode
from torch import nn
from torch.nn.utils import parametrize, prune

from attn_ext import MultiHeadAttention, replace_attention

X, MEMORY = torch.randn(2, 5, 8, **F64), torch.randn(2, 6, 8, **F64)
PADDING = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
CAUSAL = torch.triu(torch.ones(5, 5, dtype=torch.bool), 1)


class Model(nn.Module):
    """A translator in small: encoder, decoder, and one attention that two places share."""

    def __init__(self):
        super().__init__()
        options = {"dropout": 0.0, "batch_first": True, **F64}
        layer = nn.TransformerEncoderLayer(8, 2, 16, **options)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.decoder = nn.TransformerDecoderLayer(8, 2, 16, **options)
        self.pool = nn.MultiheadAttention(8, 4, batch_first=True, **F64)
        self.tied = nn.ModuleDict({"pool": self.pool, "other": nn.Linear(8, 8, **F64)})

    def forward(self, x, target, src_mask=None, padding=None):
        memory = self.encoder(x, mask=src_mask, src_key_padding_mask=padding)
        y = self.decoder(target, memory, tgt_mask=CAUSAL, tgt_is_causal=True, memory_key_padding_mask=padding)
        pooled, weights = self.tied["pool"](y, memory, memory, key_padding_mask=padding)
        return self.tied["other"](pooled), weights


NAMES = [
    "encoder.layers.0.self_attn",
    "encoder.layers.1.self_attn",
    "decoder.self_attn",
    "decoder.multihead_attn",
    "pool",
]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("masks", [{}, {"padding": PADDING}, {"src_mask": CAUSAL, "padding": PADDING}])
def test_results_gradients_and_undo(mode, masks):
    """Encoder and decoder layers and a shared module, in train, eval, and eval without gradients, where
    torch's encoder layer would hand the weights to an operator of its own."""
    model = Model()
    outputs = []
    replaced = None
    for step in ("before", "replaced", "undone"):
        if step == "replaced":
            replaced = replace_attention(model)
        elif step == "undone":
            replaced.undo()
        with in_mode(model, mode):
            out, weights = model(X, X.flip(1), **masks)
        real = ~PADDING
        grads = ()
        if mode != "eval_no_grad":
            loss = out.sin().sum() + weights.cos().sum()
            grads = torch.autograd.grad(loss, list(model.parameters()))
        outputs.append((out[real], weights[real], grads))
    torch.testing.assert_close(outputs[1], outputs[0], **TOLERANCE)
    torch.testing.assert_close(outputs[2], outputs[0], rtol=0, atol=0)


def test_report():
    model = Model()
    replaced = replace_attention(model)
    assert replaced.replaced == NAMES
    assert replaced.skipped == {}
    assert [n for n, m in model.named_modules() if type(m) is MultiHeadAttention] == NAMES
    assert not any(isinstance(m, nn.MultiheadAttention) for m in model.modules())
    assert model.tied["pool"] is model.pool
    text = repr(replaced)
    assert "5 replaced, 0 skipped" in text
    assert all(name in text for name in NAMES)
    again = replace_attention(model)  # nothing is left to do
    assert (again.replaced, again.skipped) == ([], {})
    assert "patch_sdpa" in repr(again)
    replaced.undo()
    replaced.undo()
    assert [n for n, m in model.named_modules() if type(m) is nn.MultiheadAttention] == NAMES


def test_nothing_of_the_module_is_lost_or_left():
    """Parameters, their order, state_dict, buffers, mode, flags: the same objects; after undo every attribute
    is as it was."""
    model = Model()
    model.pool.eval()
    model.pool.in_proj_bias.requires_grad_(False)
    parameters, state = list(model.named_parameters()), list(model.state_dict())
    before = {name: dict(vars(m)) for name, m in model.named_modules()}
    replaced = replace_attention(model)
    assert all(
        a[0] == b[0] and a[1] is b[1] for a, b in zip(parameters, model.named_parameters(), strict=True)
    )
    assert list(model.state_dict()) == state
    assert not model.pool.training
    assert model.encoder.training
    replaced.undo()
    for name, module in model.named_modules():
        assert vars(module).keys() == before[name].keys()
        assert all(vars(module)[key] is value for key, value in before[name].items()), name


@pytest.mark.parametrize("options", [{}, {"kdim": 6, "vdim": 7}, {"kdim": 8, "vdim": 7}])
def test_undo_knows_which_projection_the_module_has(options):
    """`_qkv_same_embed_dim` chooses torch's path: wrong, and it would look for a weight that is not there."""
    module = nn.MultiheadAttention(8, 2, batch_first=True, **options, **F64).eval()
    key, value = torch.randn(2, 6, module.kdim, **F64), torch.randn(2, 6, module.vdim, **F64)
    before = module(X, key, value)
    replaced = replace_attention(module)
    torch.testing.assert_close(module(X, key, value), before, **TOLERANCE)
    replaced.undo()
    assert all(torch.equal(a, b) for a, b in zip(module(X, key, value), before, strict=True))


def test_the_model_itself_and_other_references():
    module = nn.MultiheadAttention(8, 2, batch_first=True, **F64)
    elsewhere = [module]
    replaced = replace_attention(module)
    assert replaced.replaced == [""]
    assert "the model itself" in repr(replaced)
    assert type(elsewhere[0]) is MultiHeadAttention


def test_an_optimizer_goes_on():
    """Its parameters and moments are the same objects, so training takes the same course as with torch's."""
    torch.manual_seed(0)
    model = Model()
    twin = copy.deepcopy(model)
    losses = []
    for each, swap_at in ((twin, None), (model, 2)):
        optimizer = torch.optim.AdamW(each.parameters(), lr=1e-2)
        losses.append([])
        for step in range(5):
            if step == swap_at:
                replace_attention(each)
            optimizer.zero_grad()
            loss = each(X, X.flip(1), padding=PADDING)[0].square().mean()
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.detach())
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-9, atol=1e-12)


def test_hooks_and_their_handles_stay():
    module = nn.MultiheadAttention(8, 2, batch_first=True, **F64)
    calls = []
    pre = module.register_forward_pre_hook(lambda m, args: calls.append(("pre", type(m))))
    post = module.register_forward_hook(lambda m, args, out: calls.append(("post", type(m))))
    inner = module.out_proj.register_forward_hook(lambda *_: calls.append(("out_proj", None)))
    replaced = replace_attention(module)
    module(X, X, X)
    assert calls == [("pre", MultiHeadAttention), ("out_proj", None), ("post", MultiHeadAttention)]
    for handle in (pre, inner):
        handle.remove()
    late = module.register_forward_hook(lambda m, args, out: calls.append(("late", type(m))))
    replaced.undo()
    calls.clear()
    module(X, X, X)
    assert calls == [("post", nn.MultiheadAttention), ("late", nn.MultiheadAttention)]
    post.remove()
    late.remove()


class Scaled(nn.Module):
    def forward(self, x):
        return 0.5 * x


def parametrized(module):
    parametrize.register_parametrization(module, "in_proj_weight", Scaled())


def spectral(module):
    torch.nn.utils.parametrizations.spectral_norm(module, "in_proj_weight")
    module.eval()  # in training each reading changes the estimate


def weight_norm(module):
    torch.nn.utils.parametrizations.weight_norm(module, "in_proj_weight")
    torch.nn.utils.parametrizations.weight_norm(module.out_proj)


def old_weight_norm(module):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.nn.utils.weight_norm(module, "in_proj_weight")


def pruned(module):
    prune.l1_unstructured(module, "in_proj_weight", 0.3)
    prune.random_unstructured(module, "in_proj_bias", 0.5)


CHANGES = [parametrized, spectral, weight_norm, old_weight_norm, pruned]


@pytest.mark.parametrize("order", ["first changed, then replaced", "first replaced, then changed"])
@pytest.mark.parametrize("change", CHANGES)
def test_parametrizations_and_pruning(change, order):
    """They hang on the module's class, attributes and hooks; results, gradients, undo, deepcopy."""
    module = nn.MultiheadAttention(8, 2, batch_first=True, **F64)
    if order.startswith("first changed"):
        change(module)
        expected = module(X, X, X)
        replaced = replace_attention(module)
    else:
        replaced = replace_attention(module)
        change(module)
        expected = None
    out = module(X, X, X)
    assert isinstance(module, MultiHeadAttention)
    parameters = list(module.parameters())
    grads = torch.autograd.grad(out[0].sin().sum(), parameters)
    if change in (parametrized, spectral, weight_norm):  # torch cannot copy the others after a forward pass
        torch.testing.assert_close(copy.deepcopy(module)(X, X, X), out, **TOLERANCE)
    replaced.undo()
    assert isinstance(module, nn.MultiheadAttention)
    back = module(X, X, X)
    expected = back if expected is None else expected
    torch.testing.assert_close(out, expected, **TOLERANCE)
    torch.testing.assert_close(back, expected, **TOLERANCE)
    torch.testing.assert_close(grads, torch.autograd.grad(back[0].sin().sum(), parameters), **TOLERANCE)


def test_parametrizations_can_be_removed_afterwards():
    module = nn.MultiheadAttention(8, 2, batch_first=True, **F64)
    parametrized(module)
    replaced = replace_attention(module)
    expected = module(X, X, X)
    parametrize.remove_parametrizations(module, "in_proj_weight")
    assert type(module) is MultiHeadAttention
    torch.testing.assert_close(module(X, X, X), expected, **TOLERANCE)
    replaced.undo()
    assert type(module) is nn.MultiheadAttention
    torch.testing.assert_close(module(X, X, X), expected, **TOLERANCE)


class Sub(nn.MultiheadAttention):
    """Somebody's own attention."""


def test_what_is_skipped():
    """A subclass's own code would be lost; a forward on the instance would go on calling torch's."""
    model = nn.ModuleDict({name: nn.MultiheadAttention(8, 2) for name in ("plain", "wrapped")})
    model["sub"], model["parametrized_sub"] = Sub(8, 2), Sub(8, 2)
    parametrized(model["parametrized_sub"])
    model["wrapped"].forward = model["wrapped"].forward
    replaced = replace_attention(model)
    assert replaced.replaced == ["plain"]
    assert set(replaced.skipped) == {"wrapped", "sub", "parametrized_sub"}
    assert "forward" in replaced.skipped["wrapped"]
    assert "Sub" in replaced.skipped["sub"]
    assert "sub: skipped, of the subclass" in repr(replaced)
    assert type(model["sub"]) is Sub


def test_undo_refuses_what_it_cannot_take_back():
    model = nn.ModuleList([nn.MultiheadAttention(8, 2), nn.MultiheadAttention(8, 2)])
    replaced = replace_attention(model)
    model[1].window = (3, 0)
    with pytest.raises(RuntimeError, match="1 uses window, which torch's module has not"):
        replaced.undo()
    assert type(model[0]) is MultiHeadAttention
    model[1].window = None
    model[1].__class__ = type("Other", (MultiHeadAttention,), {})
    with pytest.raises(RuntimeError, match="1 has become a Other"):
        replaced.undo()
    model[1].__class__ = MultiHeadAttention
    replaced.undo()
    assert type(model[0]) is type(model[1]) is nn.MultiheadAttention


def test_not_a_module():
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got list"):
        replace_attention([nn.MultiheadAttention(8, 2)])


def test_copies_and_checkpoints_of_a_replaced_model():
    """state_dict both ways and strictly, weights_only loading, deepcopy, torch.save of the module."""
    model, plain = Model(), Model()
    replace_attention(model)
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    plain.load_state_dict(torch.load(buffer, weights_only=True), strict=True)
    expected = plain(X, X.flip(1))
    whole = io.BytesIO()
    torch.save(model, whole)
    whole.seek(0)
    for other in (model, copy.deepcopy(model), torch.load(whole, weights_only=False)):
        assert type(other.pool) is MultiHeadAttention
        assert other.tied["pool"] is other.pool
        torch.testing.assert_close(other(X, X.flip(1)), expected, **TOLERANCE)
    other = Model()
    model.load_state_dict(other.state_dict(), strict=True, assign=True)
    torch.testing.assert_close(model(X, X.flip(1)), other(X, X.flip(1)), **TOLERANCE)


def test_conversions_after_the_replacement_reach_undo():
    """to() and to_empty() put new tensors into the module; there is but one module."""
    model = Model()
    replaced = replace_attention(model)
    expected = model.float()(X.float(), X.flip(1).float())
    replaced.undo()
    assert model.pool.in_proj_weight.dtype == torch.float32
    torch.testing.assert_close(model(X.float(), X.flip(1).float()), expected)
    meta = nn.MultiheadAttention(8, 2, device="meta")
    replaced = replace_attention(meta)
    meta.to_empty(device="cpu")
    replaced.undo()
    assert meta.in_proj_weight.device.type == "cpu"


def test_random_numbers_are_not_touched():
    model, state = Model(), torch.get_rng_state()
    replace_attention(model).undo()
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype")
@pytest.mark.parametrize("mode", MODES)
def test_encoder_that_makes_nested_tensors(mode):
    """nn.TransformerEncoder's default, in eval without gradients: padded rows become 0 in both."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, **F64)
    encoder = nn.TransformerEncoder(layer, 2)
    outputs = []
    for _ in range(2):
        with in_mode(encoder, mode):
            outputs.append(encoder(X, src_key_padding_mask=PADDING))
        replace_attention(encoder)
    torch.testing.assert_close(*outputs, **TOLERANCE)


@pytest.mark.compile
@pytest.mark.parametrize("mode", ["train", "eval_no_grad"])
def test_compiled_model(mode):
    """Compiled before, replaced, undone: the class is guarded, and gradients are those of eager code."""
    torch._dynamo.reset()
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, **F64)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    calls = []
    replaced = None
    for step in ("before", "replaced", "undone"):
        if step == "replaced":
            replaced = replace_attention(compiled)
            assert replaced.replaced == ["_orig_mod.self_attn"]
        elif step == "undone":
            replaced.undo()
        results = []
        for call in (compiled, layer):
            with in_mode(layer, mode), torch.profiler.profile() as profile:
                out = call(X, src_key_padding_mask=PADDING)
            calls.append(any(e.name == "attn_ext::attention_forward" for e in profile.events()))
            grads = ()
            if out.requires_grad:
                grads = torch.autograd.grad(out.sin().sum(), list(layer.parameters()))
            results.append((out[~PADDING], grads))
        torch.testing.assert_close(*results, **TOLERANCE)
    assert calls == [False, False, True, True, False, False]
