"""What torch's tests of its transformers ask of scaled_dot_product_attention, of ours beside torch's.

Cases that tests/test_sdpa.py has (shapes, mask shapes, strides, dtypes, misuse) are not repeated.
"""

import copy
import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import attn_ext
from attn_ext import scaled_dot_product_attention

F64 = {"dtype": torch.float64}


def qkv(*batch, queries=5, keys=7, dim=8, dim_v=8):
    return [torch.randn(*batch, n, d, **F64) for n, d in ((queries, dim), (keys, dim), (keys, dim_v))]


def results(f, tensors, **options):
    """(out, gradients of the tensors that are leaves)."""
    tensors = [t.detach().clone().requires_grad_(t.is_floating_point()) for t in tensors]
    with sdpa_kernel(SDPBackend.MATH):
        out = f(*tensors, **options)
    return out, *torch.autograd.grad(out.sin().sum(), [t for t in tensors if t.requires_grad])


def assert_as_torch(tensors, **options):
    ours = results(scaled_dot_product_attention, tensors, **options)
    torch.testing.assert_close(ours, results(F.scaled_dot_product_attention, tensors, **options))
    return ours


@pytest.mark.parametrize("queries", [1, 4, 7, 11])
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_is_causal_equals_its_mask(queries, kind):
    """Upper left, for more queries than keys too."""
    tensors = qkv(2, 3, queries=queries)
    mask = torch.ones(queries, 7, dtype=torch.bool).tril()
    if kind == "float":
        mask = torch.zeros(mask.shape, **F64).masked_fill(~mask, -math.inf)
    causal = assert_as_torch(tensors, is_causal=True)
    masked = results(lambda *x: scaled_dot_product_attention(*x, attn_mask=mask), tensors)
    torch.testing.assert_close(causal, masked)


@pytest.mark.parametrize("shape", [(1, 1, 5, 7), (2, 1, 1, 7), (1, 3, 5, 1), (2, 3, 1, 1)])
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_expanded_masks(shape, kind):
    """Masks whose axes have stride 0, as expand makes them: read in place, gradient for each element."""
    tensors = qkv(2, 3)
    base = torch.rand(shape, **F64)
    if kind == "bool":
        base = base < 0.7
        assert_as_torch(tensors, attn_mask=base.expand(2, 3, 5, 7))
        return
    grads = []
    for f in (scaled_dot_product_attention, F.scaled_dot_product_attention):
        leaf = base.clone().requires_grad_()
        grads.append(torch.autograd.grad(f(*tensors, leaf.expand(2, 3, 5, 7)).sin().sum(), leaf))
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("rows", ["one", "a whole sample", "all"])
def test_rows_that_see_nothing(kind, rows):
    """Torch's formula gives them 0, and gradients 0: so do we, and others are not disturbed."""
    tensors = qkv(2, 3)
    mask = torch.rand(2, 1, 5, 7) < 0.6
    mask[..., 0] = True
    mask[{"one": (0, 0, 2), "a whole sample": 1, "all": ...}[rows]] = False
    seen = mask.any(-1, keepdim=True)
    if kind == "float":
        mask = torch.zeros(mask.shape, **F64).masked_fill(~mask, -math.inf)
    out, grad_q, *_ = assert_as_torch(tensors, attn_mask=mask)
    assert (out.masked_select(~seen) == 0).all()
    assert (grad_q.masked_select(~seen) == 0).all()


@pytest.mark.parametrize("which", range(3))
def test_inputs_with_stride_zero(which):
    """An expanded query, key or value; the gradient adds up in the leaf."""
    tensors = qkv(2, 3)
    tensors[which] = tensors[which][:1, :1]
    ours, theirs = (
        results(lambda *x, f=f: f(*(t.expand(2, 3, -1, -1) for t in x)), tensors)
        for f in (scaled_dot_product_attention, F.scaled_dot_product_attention)
    )
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("axis", range(4))
def test_axes_of_size_one_with_odd_strides(axis):
    """The stride of an axis of size 1 means nothing; a kernel that checks it refuses or reads elsewhere."""
    tensors = []
    for _ in range(3):
        sizes = [2, 3, 5, 8]
        sizes[axis] = 1
        t = torch.randn(sizes, **F64)
        strides = list(t.stride())
        strides[axis] = 3
        tensors.append(t.as_strided(sizes, strides))
    ours = scaled_dot_product_attention(*tensors)
    torch.testing.assert_close(ours, F.scaled_dot_product_attention(*(t.contiguous() for t in tensors)))


@pytest.mark.parametrize(("batch", "order"), [
    ((), (0, 1)), ((4,), (0, 1, 2)), ((4,), (1, 0, 2)), ((2, 4), (0, 1, 2, 3)), ((2, 4), (0, 2, 1, 3)),
    ((2, 4), (2, 0, 1, 3)), ((2, 4), (1, 0, 2, 3)), ((3, 2, 4), (0, 1, 2, 3, 4)),
])  # fmt: skip
def test_the_result_lies_in_memory_as_query(batch, order):
    """Code that calls view() on it relies on that. order: of the axes in memory, outermost first."""
    query, key, value = qkv(*batch)
    query = query.permute(order).contiguous().permute([order.index(axis) for axis in range(len(order))])
    out = scaled_dot_product_attention(query, key, value)
    assert out.stride() == query.stride()
    if order != (1, 0, 2) or torch.__version__ >= "2.14":  # torch 2.13 gives that one back contiguous
        assert F.scaled_dot_product_attention(query, key, value).stride() == query.stride()


@pytest.mark.parametrize("batch", [(0, 3), (2, 0), (0,), (0, 2, 3)])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"attn_mask": torch.zeros(5, 7, **F64)}])
def test_empty_batches(batch, options):
    assert assert_as_torch(qkv(*batch), **options)[0].numel() == 0


@pytest.mark.parametrize("wanted", list(itertools.product([True, False], repeat=4)))
def test_only_some_inputs_want_gradients(wanted):
    """Each of the 16 choices of query, key, value and mask."""
    values = [*qkv(1, 2), torch.randn(5, 7, **F64)]
    grads = []
    for f in (scaled_dot_product_attention, F.scaled_dot_product_attention):
        tensors = [t.clone().requires_grad_(want) for t, want in zip(values, wanted, strict=True)]
        with sdpa_kernel(SDPBackend.MATH):
            out = f(*tensors)
        assert out.requires_grad == any(wanted)
        leaves = [t for t in tensors if t.requires_grad]
        grads.append(torch.autograd.grad(out.sin().sum(), leaves) if leaves else ())
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("heads", [(8, 2), (6, 1), (4, 4), (9, 3)])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"attn_mask": "bool"}, {"attn_mask": "float"}])
def test_gqa_equals_repeated_heads(heads, options):
    query = torch.randn(2, heads[0], 5, 8, **F64)
    key, value = (torch.randn(2, heads[1], 7, d, **F64) for d in (8, 3))
    masks = {"bool": torch.rand(5, 7) < 0.8, "float": torch.randn(heads[0], 5, 7, **F64)}
    options = {name: masks.get(value, value) for name, value in options.items()}
    ours = assert_as_torch((query, key, value), enable_gqa=True, **options)
    repeated = [t.repeat_interleave(heads[0] // heads[1], 1) for t in (key, value)]
    torch.testing.assert_close(ours[0], scaled_dot_product_attention(query, *repeated, **options))


@pytest.mark.parametrize("scale", [0.37, -1.5, 0.0, 40.0])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}])
def test_scale(scale, options):
    assert_as_torch(qkv(2, 3), scale=scale, **options)


def test_no_alias_and_no_change_of_the_inputs():
    """Torch's kernels pad and reshape in places; the caller's tensors must stay."""
    tensors = [*qkv(2, 3, dim=5, dim_v=5), torch.randn(5, 7, **F64)]
    before = copy.deepcopy(tensors)
    out = scaled_dot_product_attention(*tensors)
    out.zero_()
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))


def test_equal_weights_of_many_keys_in_bfloat16():
    """All logits 0: each of n keys weighs 1/n. Summed in bfloat16 the parts would stop adding up at 256."""
    n = 4099
    q, k = torch.zeros(2, 1, 2, n, 16, dtype=torch.bfloat16).unbind(0)
    v = torch.ones(1, 2, n, 16, dtype=torch.bfloat16)
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    out = scaled_dot_product_attention(q, k, v, torch.ones(1, n, dtype=torch.bool))
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    torch.testing.assert_close(out, torch.ones_like(out))
    torch.testing.assert_close(dv, torch.ones_like(v))
    assert not dq.any()
    assert not dk.any()


@pytest.mark.parametrize("bias", [causal_upper_left(5, 5), causal_lower_right(5, 5)], ids=["upper", "lower"])
def test_causal_bias_together_with_is_causal_is_refused(bias):
    with pytest.raises(ValueError, match="attn_mask must be None when is_causal=True"):
        scaled_dot_product_attention(*qkv(1, 2, keys=5), attn_mask=bias, is_causal=True)


# ---- torch's encoder and decoder, whose internals call it, with our attention ----


def encoder_pair(layers=2, **options):
    """torch's nn.TransformerEncoder, and a copy with ours in it."""
    layer = nn.TransformerEncoderLayer(12, 4, 16, **{"dropout": 0.0, "batch_first": True, **F64, **options})
    theirs = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
    ours = copy.deepcopy(theirs)
    attn_ext.replace_attention(ours)
    return ours, theirs


PADDING = torch.tensor([[False] * 6, [False] * 4 + [True] * 2, [False] + [True] * 5])
SQUARE = torch.triu(torch.ones(6, 6, dtype=torch.bool), 1)
SOURCE_MASKS = {
    "none": None,
    "bool": SQUARE,
    "float": torch.zeros(6, 6, **F64).masked_fill(SQUARE, -math.inf),
    "3-D": (torch.rand(3 * 4, 6, 6) < 0.3).logical_and(~torch.eye(6, dtype=torch.bool)),
}
PADDINGS = {
    "none": None,
    "bool": PADDING,
    "float": torch.zeros(3, 6, **F64).masked_fill(PADDING, -math.inf),
}


@pytest.mark.filterwarnings("ignore:Support for mismatched")
@pytest.mark.parametrize(
    "options", [{}, {"norm_first": True, "activation": "gelu"}, {"bias": False}], ids=str
)
@pytest.mark.parametrize("mode", ["train", "eval", "no_grad", "inference", "frozen"])
def test_encoder_with_every_pair_of_masks(mode, options):
    """Where torch takes its fused path (no gradients wanted, or all parameters frozen) and where not."""
    ours, theirs = encoder_pair(**options)
    for module in (ours, theirs):
        module.train(mode == "train").requires_grad_(mode != "frozen")
    x = torch.randn(3, 6, 12, **F64)
    context = {"no_grad": torch.no_grad, "inference": torch.inference_mode}.get(mode, torch.enable_grad)
    for (mask_name, mask), (padding_name, padding) in itertools.product(
        SOURCE_MASKS.items(), PADDINGS.items()
    ):
        with context():
            outs = [m(x, mask=mask, src_key_padding_mask=padding) for m in (ours, theirs)]
        rows = ~PADDING if padding is not None else slice(None)
        sees = torch.isfinite(outs[1]).all(-1, keepdim=True)  # torch: NaN where masks leave a row nothing
        assert sees[rows].any()
        torch.testing.assert_close(
            outs[0].where(sees, 0)[rows], outs[1].where(sees, 0)[rows], msg=f"{mask_name}, {padding_name}"
        )
        assert torch.isfinite(outs[0]).all()


@pytest.mark.parametrize("training", [True, False])
def test_decoder_with_masks_and_padding(training):
    layer = nn.TransformerDecoderLayer(12, 4, 16, dropout=0.0, batch_first=True, **F64)
    theirs = nn.TransformerDecoder(layer, 2).train(training)
    ours = copy.deepcopy(theirs)
    assert len(attn_ext.replace_attention(ours).replaced) == 4
    target, memory = torch.randn(3, 6, 12, **F64), torch.randn(3, 6, 12, **F64)
    options = {
        "tgt_mask": SQUARE,
        "tgt_is_causal": True,
        "tgt_key_padding_mask": PADDINGS["bool"],
        "memory_mask": SOURCE_MASKS["3-D"],
        "memory_key_padding_mask": torch.tensor([[False] * 6, [False] * 6, [False] * 6]),
    }
    outs, grads = [], []
    for module in (ours, theirs):
        out = module(target, memory, **options)
        outs.append(out)
        grads.append(torch.autograd.grad(out[~PADDING].sin().sum(), list(module.parameters())))
    torch.testing.assert_close(*outs)
    torch.testing.assert_close(*grads)


def test_training_with_padding_learns_the_same():
    """Ten steps of AdamW: losses equal to torch's to rounding."""
    ours, theirs = encoder_pair()
    x, losses = torch.randn(3, 6, 12, **F64), []
    for module in (ours, theirs):
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
        losses.append([])
        for _ in range(10):
            optimizer.zero_grad()
            loss = (module(x, src_key_padding_mask=PADDING)[~PADDING] - 1).square().mean()
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)
    assert losses[0][-1] < 0.9 * losses[0][0]
