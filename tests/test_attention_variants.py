"""Linear-cost variants beside the formulas of their papers, written naively."""

import copy
import math
import pickle

import pytest
import torch
from torch import nn

from attn_ext.modules import LinearAttention, LinformerAttention, MixedAttention, linear_attention

F64 = {"dtype": torch.float64}
PADDING = torch.tensor([[False] * 7, [False] * 4 + [True] * 3])


def randn(*shape, seed=0, **options):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, **F64).to(options.get("dtype", torch.float64))


def naive_linear_attention(q, k, v, causal=False, mask=None):
    """Every pair's similarity, normalised by row."""
    similarity = (nn.functional.elu(q) + 1) @ (nn.functional.elu(k) + 1).mT
    if causal:
        similarity = similarity.tril()
    if mask is not None:
        similarity = similarity * mask[..., None, :]
    total = similarity.sum(-1, keepdim=True)
    return similarity @ v / torch.where(total == 0, 1, total)


@pytest.mark.parametrize("length", [1, 7, 8, 9, 33])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_linear_attention(length, causal, masked):
    q, k, v = (randn(2, 3, length, d, seed=d).requires_grad_() for d in (4, 5, 6))
    k = randn(2, 3, length, 4, seed=9).requires_grad_()
    mask = None
    if masked:
        mask = torch.rand(2, 1, length, generator=torch.Generator().manual_seed(1)) > 0.5
        mask[1] = False  # a sample without a key
    results = []
    for out in (
        linear_attention(q, k, v, causal=causal, mask=mask, chunk_size=8),
        naive_linear_attention(q, k, v, causal, mask),
    ):
        results.append((out, *torch.autograd.grad(out.sin().sum(), (q, k, v))))
    torch.testing.assert_close(*results)


def test_linear_attention_of_more_keys_than_queries_and_another_feature_map():
    q, k, v = randn(1, 2, 3, 4), randn(1, 2, 6, 4, seed=1), randn(1, 2, 6, 5, seed=2)
    out = linear_attention(q, k, v, feature_map=torch.exp)
    similarity = q.exp() @ k.exp().mT
    torch.testing.assert_close(out, similarity @ v / similarity.sum(-1, keepdim=True))


def test_features_far_below_zero_keep_their_ratios():
    """elu(-40) + 1 is 0 in float32; exp(-40) is not."""
    q = torch.zeros(1, 1, 1, 2)
    k = torch.tensor([-40.0, -41.0])[None, None, :, None].expand(1, 1, 2, 2)
    out = linear_attention(q, k, torch.tensor([[1.0], [0.0]])[None, None])
    torch.testing.assert_close(out.item(), 1 / (1 + math.exp(-1)), rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_linear_attention_of_half_types_is_computed_in_float32(dtype):
    q, k, v = (randn(1, 1, 3000, 4, seed=n).to(dtype) for n in range(3))  # sums beyond what float16 counts
    expected = naive_linear_attention(q.double(), k.double(), v.double(), causal=True)
    out = linear_attention(q, k, v, causal=True)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-3)
    with torch.autocast("cpu", torch.bfloat16):
        again = linear_attention(q.float(), k.float(), v.float(), causal=True)
    torch.testing.assert_close(again.double(), expected, rtol=1e-4, atol=1e-5)


def split(x, heads):
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


@pytest.mark.parametrize("causal", [False, True])
def test_linear_attention_module(causal):
    torch.manual_seed(0)
    module = LinearAttention(12, 3, causal=causal, **F64)
    x = randn(2, 7, 12)
    q, k, v = (split(t, 3) for t in module.in_proj(x).chunk(3, -1))
    expected = naive_linear_attention(q, k, v, causal, ~PADDING[:, None])
    torch.testing.assert_close(module(x, PADDING), module.out_proj(expected.transpose(1, 2).flatten(2)))


@pytest.mark.parametrize("sharing", ["heads", "keys_values", None])
@pytest.mark.parametrize("padded", [False, True])
def test_linformer(sharing, padded):
    """softmax(Q (E K)^T / sqrt(D)) (F V), head by head; a sequence shorter than max_len."""
    torch.manual_seed(0)
    module = LinformerAttention(12, 3, max_len=10, num_mixtures=4, sharing=sharing, **F64)
    x = randn(2, 7, 12)
    q, k, v = (split(t, 3) for t in module.in_proj(x).chunk(3, -1))
    if padded:
        k, v = (t * ~PADDING[:, None, :, None] for t in (k, v))
    heads = []
    for h in range(3):
        e = module.key_mixing[h if sharing is None else 0, :, :7]
        f = e if sharing == "keys_values" else module.value_mixing[h if sharing is None else 0, :, :7]
        weights = (q[:, h] @ (e @ k[:, h]).mT / 2).softmax(-1)
        heads.append(weights @ (f @ v[:, h]))
    expected = module.out_proj(torch.cat(heads, -1))
    torch.testing.assert_close(module(x, PADDING if padded else None), expected)


def test_linformer_sees_everything_with_as_many_mixtures_as_positions():
    """With E = F = 1 it is attention."""
    module = LinformerAttention(12, 3, max_len=7, num_mixtures=7, sharing="keys_values", **F64)
    module.key_mixing.data[0] = torch.eye(7, **F64)
    x = randn(2, 7, 12)
    q, k, v = (split(t, 3) for t in module.in_proj(x).chunk(3, -1))
    expected = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    torch.testing.assert_close(module(x), module.out_proj(expected))


def test_mixed_attention_is_convberts():
    transformers = pytest.importorskip("transformers")
    from transformers.models.convbert.modeling_convbert import ConvBertSelfAttention

    torch.manual_seed(0)
    config = transformers.ConvBertConfig(
        hidden_size=24, num_attention_heads=4, head_ratio=2, conv_kernel_size=5, embedding_size=24,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    theirs = ConvBertSelfAttention(config).double()
    nn.init.normal_(theirs.key_conv_attn_layer.bias)
    ours = MixedAttention(24, 2, kernel_size=5, **F64)
    pairs = [(getattr(ours, n), getattr(theirs, n)) for n in ("query", "key", "value")]
    pairs += [(ours.kernel, theirs.conv_kernel_layer), (ours.conv, theirs.conv_out_layer)]
    pairs += [(ours.depthwise, theirs.key_conv_attn_layer.depthwise)]
    for mine, other in pairs:
        mine.load_state_dict(other.state_dict())
    ours.pointwise.weight.data = theirs.key_conv_attn_layer.pointwise.weight.data
    ours.pointwise.bias.data = theirs.key_conv_attn_layer.bias.data[:, 0]
    x = randn(2, 7, 24)
    torch.testing.assert_close(ours(x), ours.out_proj(theirs(x)[0]))


def test_mixed_attention_does_not_see_padding():
    """A padded sample gives at its own positions what it gives alone."""
    torch.manual_seed(0)
    module = MixedAttention(24, 2, kernel_size=5, **F64)
    x = randn(2, 7, 24)
    out = module(x, PADDING)
    torch.testing.assert_close(out[1:, :4], module(x[1:, :4]))
    torch.testing.assert_close(out[:1], module(x[:1]))


MODULES = [
    lambda: LinearAttention(32, 1, causal=True),
    lambda: LinformerAttention(32, 1, 16, 4, dropout=0.1),
    lambda: MixedAttention(64, 1, 3, dropout=0.1),
]


@pytest.mark.parametrize("make", MODULES)
def test_modules_copy_save_and_train_under_autocast(make):
    torch.manual_seed(0)
    module = make()
    x = torch.randn(2, 9, module.embed_dim)
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            loss = module(x).float().square().mean()
        grads = torch.autograd.grad(loss, list(module.parameters()))
        assert all(g.isfinite().all() for g in grads)
    module.eval()
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        torch.testing.assert_close(other(x), module(x))


@pytest.mark.compile
@pytest.mark.parametrize("make", MODULES)
def test_modules_compile(make):
    torch._dynamo.reset()
    module = make().eval()
    x = torch.randn(2, 9, module.embed_dim)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), module(x))


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        (lambda: LinearAttention(10, 3), "embed_dim must be a multiple of num_heads"),
        (lambda: LinformerAttention(10, 3, 4), "embed_dim must be a multiple of num_heads"),
        (lambda: LinformerAttention(9, 3, 0), "max_len must be at least 1, got 0"),
        (lambda: LinformerAttention(9, 3, 4, sharing="layers"), "sharing must be"),
        (lambda: LinformerAttention(8, 2, 4)(torch.randn(1, 5, 8)), "at most max_len=4 positions, got 5"),
        (lambda: MixedAttention(12, 4), r"multiple of 2 \* num_heads"),
        (lambda: MixedAttention(12, 3, 4), "kernel_size must be odd"),
        (lambda: MixedAttention(12, 3)(torch.randn(2, 12)), r"x must be \(N, L, 12\), got \(2, 12\)"),
        (
            lambda: LinearAttention(8, 2)(torch.randn(1, 5, 8), torch.zeros(1, 5)),
            "key_padding_mask must be bool",
        ),
        (
            lambda: LinearAttention(8, 2)(torch.randn(1, 5, 8), torch.zeros(5, 1, dtype=torch.bool)),
            r"key_padding_mask must be \(N, L\) = \(1, 5\), got \(5, 1\)",
        ),
        (lambda: linear_attention(*[torch.randn(2, 3, 4)] * 3), r"q, k and v must be \(B, H, Nq, D\)"),
        (
            lambda: linear_attention(*(torch.randn(1, 1, n, 4) for n in (3, 5, 5)), causal=True),
            "as many queries as keys, got 3 and 5",
        ),
        (lambda: linear_attention(*[torch.ones(1, 1, 2, 4).int()] * 3), "one floating dtype"),
        (
            lambda: linear_attention(*[torch.ones(1, 1, 2, 4)] * 3, chunk_size=0),
            "chunk_size must be at least 1",
        ),
    ],
)
def test_errors(call, problem):
    with pytest.raises((TypeError, ValueError), match=problem):
        call()
