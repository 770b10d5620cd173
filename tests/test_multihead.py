"""MultiHeadAttention: what it adds to torch.nn.MultiheadAttention; memory, numerics, masks.

"Known fault" in a docstring is a failure that users met in other libraries and the test guards against.
"""

import itertools
import math
import warnings

import pytest
import torch
from multihead_modes import F64, MODES, TOLERANCE, in_mode
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from attn_ext import MultiHeadAttention


def by_hand(module, query, key, value, allow=None, logit_bias=0.0):
    """Output and per-head weights of a batch_first module without extra keys, by its docstring's formulas."""
    heads, kv_heads, dim = module.num_heads, module.num_kv_heads, module.head_dim
    sizes = (heads * dim, kv_heads * dim, kv_heads * dim)
    weights, biases = module.in_proj_weight.split(sizes), module.in_proj_bias.split(sizes)
    projections = zip((query, key, value), weights, biases, strict=True)
    q, k, v = (nn.functional.linear(x, w, b).unflatten(-1, (-1, dim)) for x, w, b in projections)
    if module.qk_norm is not None:
        q, k = (normalise(module.qk_norm, x) for x in (q, k))
        q, k = q * module.q_norm.weight, k * module.k_norm.weight
    k, v = (x.repeat_interleave(heads // kv_heads, dim=2) for x in (k, v))
    logits = torch.einsum("nlhd,nshd->nhls", q, k) / math.sqrt(dim)
    if module.softcap is not None:
        logits = module.softcap * torch.tanh(logits / module.softcap)
    logits = logits + logit_bias
    if allow is not None:
        logits = logits.masked_fill(~allow, -torch.inf)
    weights = logits.softmax(-1)
    return module.out_proj(torch.einsum("nhls,nshd->nlhd", weights, v).flatten(2)), weights


def normalise(kind, x):
    if kind == "layer":
        x = x - x.mean(-1, keepdim=True)
    return x / torch.sqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def randomised(module):
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn_like(p) / 2)
    return module


# ---- the extras ----

EXTRAS = {
    "gqa": {"num_kv_heads": 2},
    "mqa": {"num_kv_heads": 1},
    "head_dim": {"head_dim": 5},
    "softcap": {"softcap": 0.7},
    "rms": {"qk_norm": "rms"},
    "layer": {"qk_norm": "layer"},
    "all": {"num_kv_heads": 2, "head_dim": 5, "softcap": 0.7, "qk_norm": "rms"},
}


@pytest.mark.parametrize("name", EXTRAS)
def test_extras_follow_their_formulas(name):
    module = randomised(MultiHeadAttention(8, 4, batch_first=True, **EXTRAS[name], **F64))
    query, memory = torch.randn(2, 3, 8, **F64), torch.randn(2, 6, 8, **F64)
    forbid = torch.rand(3, 6) < 0.4
    forbid[:, 0] = False
    actual = module(query, memory, memory, attn_mask=forbid, average_attn_weights=False)
    expected = by_hand(module, query, memory, memory, ~forbid)
    torch.testing.assert_close(actual, expected, **TOLERANCE)
    parameters = list(module.parameters())
    grads = [
        torch.autograd.grad(out.sin().sum() + w.cos().sum(), parameters) for out, w in (actual, expected)
    ]
    torch.testing.assert_close(*grads, **TOLERANCE)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("extra_keys", [False, True])
def test_window(is_causal, extra_keys):
    module = randomised(MultiHeadAttention(8, 4, batch_first=True, window=(2, 1), **F64))
    x = torch.randn(2, 7, 8, **F64)
    distance = torch.arange(7)[:, None] - torch.arange(7)
    allow = (distance <= 2) & (distance >= (0 if is_causal else -1))
    expected, weights = by_hand(module, x, x, x, allow)
    if extra_keys:  # every query sees them; with zero attention each row gains one logit of 0 and no value
        plain, module = (
            module,
            MultiHeadAttention(8, 4, batch_first=True, window=(2, 1), add_zero_attn=True, **F64),
        )
        module.load_state_dict(plain.state_dict())
        padded = nn.functional.pad(allow, (0, 1), value=True)
        no_window = MultiHeadAttention(8, 4, batch_first=True, add_zero_attn=True, **F64)
        no_window.load_state_dict(plain.state_dict())
        expected, weights = no_window(x, x, x, attn_mask=~allow, average_attn_weights=False)
        assert weights.masked_select(~padded).eq(0).all()
    actual = module(x, x, x, is_causal=is_causal, average_attn_weights=False)
    torch.testing.assert_close(actual, (expected, weights), **TOLERANCE)


def test_qk_norm_includes_the_learned_key():
    torch.manual_seed(0)  # with other numbers a key's variance may be small beside eps
    module = randomised(MultiHeadAttention(8, 4, batch_first=True, qk_norm="layer", add_bias_kv=True, **F64))
    x = torch.randn(2, 5, 8, **F64)
    _, weights = module(x, x, x, average_attn_weights=False)
    with torch.no_grad():
        module.bias_k.mul_(2)  # normalised away, but for eps = 1e-6 beside a variance of about 1/4
    torch.testing.assert_close(module(x, x, x, average_attn_weights=False)[1], weights, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("shape", [(), (6,), (3, 1), (4, 3, 6), (2, 1, 1, 6), (1, 4, 3, 1), (2, 4, 3, 6)])
@pytest.mark.parametrize("masks", ["none", "padding", "attn", "both_bool", "both_float", "mixed"])
def test_attn_bias_of_any_shape_beside_any_mask(shape, masks):
    module = randomised(MultiHeadAttention(8, 4, batch_first=True, **F64))
    query, memory = torch.randn(2, 3, 8, **F64), torch.randn(2, 6, 8, **F64)
    bias = torch.randn(shape, requires_grad=True, **F64)
    padding = torch.tensor([[False] * 6, [False] * 4 + [True] * 2])
    forbid = torch.rand(3, 6) < 0.4
    forbid[:, 0] = False
    options, allow, float_terms = {}, torch.ones(2, 1, 3, 6, dtype=torch.bool), 0.0
    if masks in ("padding", "both_bool", "mixed"):
        options["key_padding_mask"] = padding
        allow = allow & ~padding[:, None, None]
    elif masks == "both_float":
        options["key_padding_mask"] = torch.randn(2, 6, **F64)
        float_terms = float_terms + options["key_padding_mask"][:, None, None]
    if masks in ("attn", "both_bool"):
        options["attn_mask"] = forbid
        allow = allow & ~forbid
    elif masks in ("both_float", "mixed"):
        options["attn_mask"] = torch.randn(2 * 4, 3, 6, **F64)
        float_terms = float_terms + options["attn_mask"].unflatten(0, (2, 4))
    actual = module(query, memory, memory, attn_bias=bias, average_attn_weights=False, **options)
    expected = by_hand(module, query, memory, memory, allow, float_terms + bias)
    torch.testing.assert_close(actual, expected, **TOLERANCE)
    grads = [torch.autograd.grad((out.sin().sum()), bias) for out, _ in (actual, expected)]
    torch.testing.assert_close(*grads, **TOLERANCE)


def test_gradcheck_through_bias_padding_and_extra_keys():
    module = randomised(
        MultiHeadAttention(4, 2, add_bias_kv=True, add_zero_attn=True, softcap=2.0, batch_first=True, **F64)
    )
    padding = torch.tensor([[False, False, False, True], [True] * 4])  # the second sample is all padding
    inputs = (torch.randn(2, 3, 4, **F64), torch.randn(2, 4, 4, **F64), torch.randn(2, 3, 4, **F64))
    names = [name for name, _ in module.named_parameters()]

    def call(x, memory, bias, *parameters):
        options = {"key_padding_mask": padding, "attn_bias": bias}
        arguments = (x, memory, memory)
        parameters = dict(zip(names, parameters, strict=True))
        return torch.func.functional_call(module, parameters, arguments, options)

    bias = torch.randn(2, 1, 4, **F64)
    leaves = [t.detach().requires_grad_() for t in (*inputs[:2], bias, *module.parameters())]
    assert torch.autograd.gradcheck(call, leaves)


# ---- memory ----


class LargestOutput(TorchDispatchMode):
    """The number of elements of the largest tensor that any operator returns, views by their storage."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in torch.utils._pytree.tree_leaves(result):
            if isinstance(x, torch.Tensor):
                self.numel = max(self.numel, x.untyped_storage().nbytes() // x.element_size())
        return result


@pytest.mark.parametrize("name", ["plain", "causal", "padding", "extra_keys", "window_gqa_dropout"])
def test_without_weights_nothing_of_size_n_by_n_is_allocated(name):
    """Forward and backward; 2 samples of 512 x 512 pairs beside 2 * 512 * 16 features."""
    constructor = {"extra_keys": {"add_bias_kv": True, "add_zero_attn": True}}
    constructor["window_gqa_dropout"] = {"window": (5, 5), "num_kv_heads": 1, "dropout": 0.5}
    module = MultiHeadAttention(16, 2, batch_first=True, **constructor.get(name, {}))
    x = torch.randn(2, 512, 16, requires_grad=True)
    options = {}
    if name == "causal":
        options["is_causal"] = True
    elif name != "plain":
        options["key_padding_mask"] = torch.rand(2, 512) < 0.5
    with LargestOutput() as largest:
        out, _ = module(x, x, x, need_weights=False, **options)
        out.sum().backward()
    assert largest.numel <= 2 * 512 * 3 * 16  # the packed projection
    assert largest.numel < 512 * 512 / 4


class Copies(TorchDispatchMode):
    """How many operators ran that only copy."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket.__name__ in ("clone", "copy_", "_to_copy")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("batch_first", "qk_norm"), [(True, None), (True, "rms"), (False, None)])
def test_nothing_is_copied_between_projections_and_attention(batch_first, qk_norm):
    module = MultiHeadAttention(16, 4, batch_first=batch_first, qk_norm=qk_norm)
    x = torch.randn(2, 5, 16)
    with Copies() as copies:
        module(x, x, x, need_weights=False)
    assert copies.count == 0


def test_masks_are_not_expanded():
    """A padding mask (N, S) beside an attention mask (L, S) makes no (N, L, S), the smallest merged size."""
    module = MultiHeadAttention(16, 4, batch_first=True)
    x = torch.randn(8, 128, 16)
    padding, forbid = torch.rand(8, 128) < 0.5, torch.rand(128, 128) < 0.5
    floats = torch.randn(8, 128), torch.randn(128, 128)
    for kpm, mask in itertools.product((padding, floats[0]), (forbid, floats[1])):
        with LargestOutput() as largest:
            module(x, x, x, kpm, need_weights=False, attn_mask=mask)
        assert largest.numel <= 8 * 128 * 3 * 16  # the packed projection, 3/8 of N * L * S


def test_averaged_weights_do_not_hold_every_head():
    """Known fault: need_weights=True is the default, and users get H * L * S memory unknowingly."""
    module = MultiHeadAttention(16, 8)
    x = torch.randn(512, 1, 16)
    with LargestOutput() as largest:
        module(x, x, x)[1].sum().backward()
    assert largest.numel <= 512 * 512 * 2  # of 512 * 512 * 8


# ---- numerics ----


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("as_float", [True, False])
def test_fully_padded_sample(mode, need_weights, as_float):
    """Known fault: one sample that is all padding turns the model NaN, through the weight gradients."""
    module = randomised(MultiHeadAttention(8, 2, batch_first=True, **F64))
    x = torch.randn(2, 4, 8, **F64)
    padding = torch.tensor([[False] * 4, [True] * 4])
    if as_float:
        padding = torch.zeros(2, 4, **F64).masked_fill(padding, -torch.inf)
    with in_mode(module, mode):
        out, weights = module(x, x, x, padding, need_weights)
        alone, _ = module(x[:1], x[:1], x[:1], None, need_weights)
    torch.testing.assert_close(out[1], module.out_proj.bias.expand(4, 8), **TOLERANCE)
    torch.testing.assert_close(out[:1], alone, **TOLERANCE)
    if need_weights:
        assert weights[1].eq(0).all()
    if mode != "eval_no_grad":
        parameters = list(module.parameters())
        grads, expected = (torch.autograd.grad(o[0].sum(), parameters) for o in (out, alone))
        torch.testing.assert_close(grads, expected, **TOLERANCE)
        everything = torch.autograd.grad(module(x, x, x, padding, need_weights)[0].sum(), parameters)
        assert all(g.isfinite().all() for g in everything)


@pytest.mark.parametrize("need_weights", [True, False])
def test_float16_logits_beyond_65504(need_weights):
    """Known fault: q . k overflows in half precision before the scale is applied."""
    module = MultiHeadAttention(64, 1, bias=False, dtype=torch.float16)
    with torch.no_grad():
        module.in_proj_weight.copy_(torch.eye(64).repeat(3, 1))
        module.out_proj.weight.copy_(torch.eye(64))
    x = torch.full((4, 1, 64), 400.0, dtype=torch.float16)  # q . k = 1e7
    out, _ = module(x, x, x, need_weights=need_weights)
    torch.testing.assert_close(out, x)


def test_float_sliding_window_mask_gives_the_same_rows_for_any_length():
    """Known fault: in eval mode, beyond 1024 keys, the last rows were wrong."""
    module = MultiHeadAttention(24, 4, batch_first=True, dropout=0.1).eval()
    x = torch.randn(1, 1200, 24)

    def masked(x):
        distance = torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])
        return torch.zeros(distance.shape).masked_fill((distance < 0) | (distance > 100), -torch.inf)

    with torch.no_grad():
        long, _ = module(x, x, x, attn_mask=masked(x), need_weights=False)
        suffix = x[:, -300:]
        short, _ = module(suffix, suffix, suffix, attn_mask=masked(suffix), need_weights=False)
    torch.testing.assert_close(long[:, -200:], short[:, -200:], atol=1e-5, rtol=1e-5)
    with_grad, _ = module(x, x, x, attn_mask=masked(x), need_weights=False)
    torch.testing.assert_close(long, with_grad)


# ---- masks ----


def test_boolean_mask_has_torchs_polarity():
    """Known fault: True = masked out here, True = may attend in scaled_dot_product_attention."""
    module = MultiHeadAttention(8, 2, batch_first=True)
    x = torch.randn(1, 4, 8)
    forbid = ~torch.eye(4, dtype=torch.bool)
    _, weights = module(x, x, x, attn_mask=forbid)
    torch.testing.assert_close(weights[0], torch.eye(4))
    padding = torch.tensor([[False, True, True, True]])
    _, weights = module(x, x, x, padding)
    torch.testing.assert_close(weights[0], torch.eye(4)[:1].expand(4, 4))
    assert "True = may not attend" in MultiHeadAttention.__doc__.splitlines()[0]


@pytest.mark.parametrize("need_weights", [True, False])
def test_wrong_is_causal_hint_does_not_override_the_mask(need_weights):
    """Known fault: with a wrong hint, the result depended on need_weights."""
    module = MultiHeadAttention(8, 2, batch_first=True, **F64)
    x = torch.randn(1, 5, 8, **F64)
    forbid = torch.tril(torch.ones(5, 5, dtype=torch.bool), -1)
    expected = module(x, x, x, attn_mask=forbid)[0]
    out, _ = module(x, x, x, attn_mask=forbid, is_causal=True, need_weights=need_weights)
    torch.testing.assert_close(out, expected, **TOLERANCE)


def test_float_mask_of_zeros_and_ones_is_added():
    """Known fault: a float mask of 0 and 1 read as boolean, or a boolean one added as 0 and 1."""
    module = MultiHeadAttention(8, 2, batch_first=True, **F64)
    x = torch.randn(1, 2, 8, **F64)
    mask = torch.tensor([[0.0, 1.0], [1.0, 0.0]], **F64)
    added = module(x, x, x, attn_mask=mask, average_attn_weights=False)
    torch.testing.assert_close(added, by_hand(module, x, x, x, logit_bias=mask), **TOLERANCE)
    selected = module(x, x, x, attn_mask=mask.bool(), average_attn_weights=False)
    torch.testing.assert_close(selected, by_hand(module, x, x, x, ~mask.bool()), **TOLERANCE)


@pytest.mark.parametrize("kinds", list(itertools.product(("bool", "float"), repeat=2)), ids="-".join)
def test_3d_mask_with_padding_has_the_order_batch_head(kinds):
    """Known fault: heads and batch swapped when a (N * H, L, S) mask is merged with a padding mask."""
    module = MultiHeadAttention(8, 2, batch_first=True, **F64)
    x = torch.randn(2, 3, 8, **F64)
    forbid = torch.ones(4, 3, 3, dtype=torch.bool)
    for index in range(4):  # mask b * 2 + h leaves key `index % 3` and key 0
        forbid[index, :, [0, index % 3]] = False
    padding = torch.tensor([[False, False, True], [False, False, True]])
    allow = ~forbid.view(2, 2, 3, 3) & ~padding[:, None, None]
    if kinds[0] == "float":
        forbid = torch.zeros(forbid.shape, **F64).masked_fill(forbid, -torch.inf)
    if kinds[1] == "float":
        padding = torch.zeros(padding.shape, **F64).masked_fill(padding, -torch.inf)
    actual = module(x, x, x, padding, attn_mask=forbid, average_attn_weights=False)
    torch.testing.assert_close(actual, by_hand(module, x, x, x, allow), **TOLERANCE)


def test_no_warnings_in_normal_use():
    """Known fault: warnings about mask types on every call."""
    module = MultiHeadAttention(8, 2, batch_first=True).eval()
    x = torch.randn(2, 4, 8)
    padding = torch.tensor([[False] * 4, [False, False, True, True]])
    causal = torch.triu(torch.ones(4, 4, dtype=torch.bool), 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for kpm, mask in itertools.product((None, padding, padding.float()), (None, causal, causal.float())):
            module(x, x, x, kpm, attn_mask=mask)
