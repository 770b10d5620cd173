"""MultiHeadAttention against torch.nn.MultiheadAttention over the whole space of options, and at its edges.

tests/test_multihead_torch_parity.py goes through chosen options one by one; here they are drawn together:
constructor, layout, masks, mode, which inputs are one tensor, which want gradients.
"""

import copy
import io
import math
import warnings

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from attn_ext import MultiHeadAttention, replace_attention

F64 = {"dtype": torch.float64}
TOLERANCE = {"atol": 1e-11, "rtol": 1e-11}  # float64; logits of a few units, sums of some dozen terms

CONSTRUCTORS = st.fixed_dictionaries(
    {
        "num_heads": st.sampled_from([1, 2, 4]),
        "head_dim": st.integers(1, 5),  # becomes embed_dim
        "bias": st.booleans(),
        "add_bias_kv": st.booleans(),
        "add_zero_attn": st.booleans(),
        "kdim": st.sampled_from([None, None, 3]),
        "vdim": st.sampled_from([None, None, 6]),
        "batch_first": st.booleans(),
        "dropout": st.sampled_from([0.0, 0.3]),  # in train mode only 0
    }
)
CALLS = st.fixed_dictionaries(
    {
        "sizes": st.tuples(st.integers(1, 3), st.integers(1, 6), st.integers(1, 7)),  # N, L, S
        "batched": st.booleans(),
        "shared": st.sampled_from(["none", "key and value", "all"]),
        "padding": st.sampled_from([None, "bool", "float"]),
        "attn": st.sampled_from([None, "bool", "float", "bool 3-D", "float 3-D", "causal", "float causal"]),
        "need_weights": st.booleans(),
        "average_attn_weights": st.booleans(),
        "mode": st.sampled_from(["train", "eval", "no_grad", "inference"]),
        "seed": st.integers(0, 2**16),
    }
)


def build(constructor, mode):
    """Ours and torch's with the same parameters, all of them random."""
    options = dict(constructor)
    options["embed_dim"] = options.pop("head_dim") * options["num_heads"]
    if mode == "train":
        options["dropout"] = 0.0
    ours, theirs = MultiHeadAttention(**options, **F64), nn.MultiheadAttention(**options, **F64)
    with torch.no_grad():
        for p in theirs.parameters():
            p.normal_()
    ours.load_state_dict(theirs.state_dict(), strict=True)
    return ours.train(mode == "train"), theirs.train(mode == "train")


def draw_inputs(module, call):
    """query, key, value, some of them one tensor where the sizes allow it; and the two masks."""
    batch, queries, keys = call["sizes"]
    shared = call["shared"]
    if shared == "all" and not module.kdim == module.vdim == module.embed_dim:
        shared = "key and value"
    if shared == "key and value" and module.kdim != module.vdim:
        shared = "none"
    if shared == "all":
        keys = queries

    def tensor(length, features):
        shape = (batch, length, features) if module.batch_first else (length, batch, features)
        return torch.randn(shape if call["batched"] else (length, features), **F64)

    query = tensor(queries, module.embed_dim)
    key = query if shared == "all" else tensor(keys, module.kdim)
    value = key if shared != "none" else tensor(keys, module.vdim)

    padding = mask = None
    rows = batch if call["batched"] else 1
    if call["padding"]:
        padding = torch.rand(rows, keys) < 0.4
        padding[:, 0] = False  # every query sees key 0: torch gives NaN where one sees none
        if call["padding"] == "float":
            padding = torch.randn(rows, keys, **F64).masked_fill(padding, -math.inf)
        padding = padding if call["batched"] else padding[0]
    kind = call["attn"]
    if kind:
        shape = (rows * module.num_heads, queries, keys) if kind.endswith("3-D") else (queries, keys)
        mask = ~torch.ones(shape, dtype=torch.bool).tril() if "causal" in kind else torch.rand(shape) < 0.4
        mask[..., 0] = False
        if kind.startswith("float"):
            values = torch.zeros(shape, **F64) if "causal" in kind else torch.randn(shape, **F64)
            mask = values.masked_fill(mask, -math.inf)
    return (query, key, value), {"key_padding_mask": padding, "attn_mask": mask}


def run(module, inputs, masks, call):
    """(out, weights, gradients of inputs, float masks and parameters)."""
    copies = {id(x): x.clone() for x in inputs}  # what was one tensor stays one
    inputs = [copies[id(x)] for x in inputs]
    masks = {name: m if m is None else m.clone() for name, m in masks.items()}
    floats = [m for m in masks.values() if m is not None and m.is_floating_point()]
    learning = call["mode"] in ("train", "eval")
    leaves = [*copies.values(), *floats]
    for t in leaves:
        t.requires_grad_(learning)
    extra = module.bias_k is not None or module.add_zero_attn
    causal = "causal" in (call["attn"] or "") and not extra  # torch drops the mask then, without weights
    context = {"no_grad": torch.no_grad, "inference": torch.inference_mode}.get(
        call["mode"], torch.enable_grad
    )
    with context(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Support for mismatched")
        out, weights = module(
            *inputs, **masks, need_weights=call["need_weights"], is_causal=causal,
            average_attn_weights=call["average_attn_weights"],
        )  # fmt: skip
    if not learning:
        return out, weights, ()
    loss = out.sin().sum() + (0 if weights is None else (weights * weights).sum())
    parameters = list(module.parameters())
    return out, weights, torch.autograd.grad(loss, leaves + parameters)


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(constructor=CONSTRUCTORS, call=CALLS)
@example(
    constructor={
        "num_heads": 4, "head_dim": 2, "bias": True, "add_bias_kv": False, "add_zero_attn": False,
        "kdim": None, "vdim": None, "batch_first": True, "dropout": 0.3,
    },
    call={
        "sizes": (3, 5, 5), "batched": True, "shared": "all", "padding": "bool", "attn": "bool",
        "need_weights": True, "average_attn_weights": False, "mode": "inference", "seed": 1,
    },
)  # fmt: skip
def test_every_option_together(constructor, call):
    """The example is torch's fused path of eval mode with two masks. Replacing the module does the same."""
    torch.manual_seed(call["seed"])
    ours, theirs = build(constructor, call["mode"])
    inputs, masks = draw_inputs(ours, call)
    expected = run(theirs, inputs, masks, call)
    torch.testing.assert_close(run(ours, inputs, masks, call), expected, **TOLERANCE)
    replaced = replace_attention(theirs)
    torch.testing.assert_close(run(theirs, inputs, masks, call), expected, **TOLERANCE)
    replaced.undo()
    assert type(theirs) is nn.MultiheadAttention


def misuse():
    """What torch.nn.MultiheadAttention refuses: (constructor options, inputs, call options)."""
    x, memory = torch.randn(2, 3, 8), torch.randn(2, 5, 8)
    ones = torch.ones
    return {
        "4-D": ({}, (x[None],) * 3, {}),
        "1-D": ({}, (x[0, 0],) * 3, {}),
        "key of other rank": ({}, (x, memory[0], memory[0]), {}),
        "query features": ({}, (x[..., :7], memory, memory), {}),
        "key features": ({}, (x, memory[..., :7], memory), {}),
        "value features": ({}, (x, memory, memory[..., :7]), {}),
        "kdim": ({"kdim": 6, "vdim": 8}, (x, memory, memory), {}),
        "lengths": ({}, (x, memory, memory[:, :4]), {}),
        "batch of key": ({}, (x, memory[:1], memory[:1]), {}),
        "padding shape": ({}, (x, memory, memory), {"key_padding_mask": ones(5, 2).bool()}),
        "padding length": ({}, (x, memory, memory), {"key_padding_mask": ones(2, 3).bool()}),
        "padding int": ({}, (x, memory, memory), {"key_padding_mask": ones(2, 5).long()}),
        "mask shape": ({}, (x, memory, memory), {"attn_mask": ones(5, 3).bool()}),
        "mask heads": ({}, (x, memory, memory), {"attn_mask": ones(2, 3, 5).bool()}),
        "mask 4-D": ({}, (x, memory, memory), {"attn_mask": ones(2, 2, 3, 5).bool()}),
        "mask uint8": ({}, (x, memory, memory), {"attn_mask": ones(3, 5).byte()}),
        "dtype of query": ({}, (x.double(), memory, memory), {}),
        "dtype of key": ({}, (x, memory.half(), memory), {}),
        "nested with padding": (
            {},
            (torch.nested.nested_tensor([x[0], x[1, :2]]),) * 3,
            {"key_padding_mask": ones(2, 3).bool()},
        ),
    }


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype")
@pytest.mark.parametrize("mode", ["train", "no_grad"])
def test_what_torch_refuses_is_refused(mode):
    """By ValueError or TypeError, which are RuntimeErrors too; torch has AssertionError and RuntimeError."""
    for name, (options, inputs, call) in misuse().items():
        theirs = nn.MultiheadAttention(8, 2, batch_first=True, **options).train(mode == "train")
        ours = MultiHeadAttention.from_torch(theirs)
        with torch.set_grad_enabled(mode == "train"):
            with pytest.raises((AssertionError, RuntimeError, IndexError)):
                theirs(*inputs, **call)
            with pytest.raises((ValueError, TypeError)) as error:
                ours(*inputs, **call)
        assert isinstance(error.value, RuntimeError), name


@pytest.mark.parametrize("options", [{}, {"kdim": 6}, {"add_bias_kv": True}, {"bias": False}], ids=str)
def test_strict_loading(options):
    """The same keys are missing and unexpected in both directions; weights_only loading takes both."""
    ours, theirs = MultiHeadAttention(8, 2, **options), nn.MultiheadAttention(8, 2, **options)
    for source, target in ((ours, theirs), (theirs, ours)):
        buffer = io.BytesIO()
        torch.save(source.state_dict(), buffer)
        buffer.seek(0)
        state = torch.load(buffer, weights_only=True)
        target.load_state_dict(state, strict=True)
        assert all(torch.equal(v, target.state_dict()[k]) for k, v in source.state_dict().items())
    removed = "out_proj.weight"
    reports = []
    for source, target in ((ours, theirs), (theirs, ours)):
        state = source.state_dict()
        state["surplus"] = state.pop(removed)
        with pytest.raises(
            RuntimeError, match=r'Missing key.*"out_proj.weight"(.|\n)*Unexpected key.*"surplus"'
        ):
            target.load_state_dict(state, strict=True)
        reports.append(target.load_state_dict(state, strict=False))
    assert reports[0] == reports[1] == ([removed], ["surplus"])
    wrong = {name: torch.cat([value, value]) for name, value in theirs.state_dict().items()}
    with pytest.raises(RuntimeError, match="size mismatch"):
        ours.load_state_dict(wrong)


def test_parameters_that_are_taken_away_later():
    """Code sets in_proj_bias, out_proj.bias or bias_k to None after construction."""
    ours = MultiHeadAttention(8, 2, add_bias_kv=True, **F64)
    theirs = ours.to_torch()
    x = torch.randn(5, 3, 8, **F64)
    for take in ("in_proj_bias", "bias_k"):
        for module in (ours, theirs):
            setattr(module, take, None)
            if take == "bias_k":
                module.bias_v = None
            else:
                module.out_proj.bias = None
        torch.testing.assert_close(ours(x, x, x), theirs(x, x, x), **TOLERANCE)


def test_3d_mask_is_a_mask_for_each_sample_and_head():
    """A (N H, L, S) mask in one call, and its parts sample by sample and head by head."""
    module = MultiHeadAttention(8, 2, batch_first=True, **F64)
    x = torch.randn(3, 4, 8, **F64)
    mask = torch.rand(3 * 2, 4, 4) < 0.4
    mask[..., 0] = False
    out, weights = module(x, x, x, attn_mask=mask, average_attn_weights=False)
    for n in range(3):
        single = module(x[n], x[n], x[n], attn_mask=mask[2 * n : 2 * n + 2], average_attn_weights=False)
        torch.testing.assert_close((out[n], weights[n]), single, **TOLERANCE)
        assert (weights[n][mask[2 * n : 2 * n + 2]] == 0).all()
    same = torch.rand(4, 4) < 0.4
    same[:, 0] = False
    torch.testing.assert_close(
        module(x, x, x, attn_mask=same), module(x, x, x, attn_mask=same.expand(6, 4, 4)), **TOLERANCE
    )


def test_subclasses_are_called_in_torchs_layers_when_replaced_by_hand():
    """A subclass of ours in place of self_attn, in eval without gradients: not bypassed."""

    class Loud(MultiHeadAttention):
        def forward(self, *args, **kwargs):
            out, weights = super().forward(*args, **kwargs)
            return 2 * out, weights

    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, **F64).eval()
    plain = copy.deepcopy(layer)
    layer.self_attn = Loud.from_torch(layer.self_attn)
    plain.self_attn.out_proj.weight.data.mul_(2)
    plain.self_attn.out_proj.bias.data.mul_(2)
    x = torch.randn(2, 5, 8, **F64)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), plain(x), **TOLERANCE)
