"""Encodings that are added to inputs and biases of the logits, each beside its formula; RotaryEmbedding has a
file of its own."""

import copy
import math
import pickle
from typing import ClassVar

import pytest
import torch
from multihead_modes import F64, TOLERANCE
from torch.utils._python_dispatch import TorchDispatchMode

import attn_ext
from attn_ext import (
    ALiBi,
    LearnedPositionalEncoding,
    MultiHeadAttention,
    RelativePositionBias2D,
    RotaryEmbedding,
    SinusoidalPositionalEncoding,
    T5RelativePositionBias,
    alibi_slopes,
)

pytestmark = pytest.mark.filterwarnings("ignore:heads of")
N, L, E, H = 2, 5, 24, 3

# ---- added to the input ----


def sinusoid(position, d_model, base=10000.0):
    """The paper's formula, a number at a time."""
    angle = [position / base ** (2 * (c // 2) / d_model) for c in range(d_model)]
    return torch.tensor([math.cos(a) if c % 2 else math.sin(a) for c, a in enumerate(angle)], **F64)


def rows(positions, d_model):
    return torch.stack([sinusoid(p, d_model) for p in positions])


@pytest.mark.parametrize("d_model", [1, 7, 8])
@pytest.mark.parametrize("batch_first", [False, True])
def test_sinusoidal(batch_first, d_model):
    encoding = SinusoidalPositionalEncoding(d_model, batch_first=batch_first)
    x = torch.randn(N, L, d_model, **F64)
    ids = torch.tensor([[0, 3, 1, 2, 9], [5, 5, 5, 5, 4]])
    for positions, expected in (
        (0, rows(range(L), d_model)),
        (70_000, rows(range(70_000, 70_000 + L), d_model)),
        (ids[0], rows(ids[0].tolist(), d_model)),
        (ids, torch.stack([rows(line, d_model) for line in ids.tolist()])),
    ):
        given = x if batch_first else x.transpose(0, 1)
        out = encoding(given, positions)
        torch.testing.assert_close(out if batch_first else out.transpose(0, 1), x + expected, **TOLERANCE)
    torch.testing.assert_close(
        encoding(x[0], ids[:1])[None], x[:1] + rows(ids[0].tolist(), d_model), **TOLERANCE
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_sinusoidal_in_half_types_far_out(dtype):
    """Known fault: angles in half precision, or a table that .half() rounds; the sum is rounded once."""
    encoding = SinusoidalPositionalEncoding(8).to(dtype)
    x = torch.randn(L, 8).to(dtype)
    expected = x.double() + rows(range(100_000, 100_000 + L), 8)
    out = encoding(x, 100_000)
    assert out.dtype == dtype
    error = (out.double() - expected).abs().max()
    assert error <= 4 * torch.finfo(dtype).eps / 2 + 1e-6  # |sum| < 4: half a unit in the last place


def test_the_encoding_holds_no_state():
    encoding = SinusoidalPositionalEncoding(8, 0.5)
    assert not list(encoding.state_dict())
    assert not list(encoding.buffers())
    x = torch.zeros(1000, 8)
    dropped = encoding(x) == 0
    assert 0.4 < dropped.float().mean() < 0.6
    assert not (encoding.eval()(x[1:], 1) == 0).any()


@pytest.mark.parametrize("batch_first", [False, True])
def test_learned(batch_first):
    torch.manual_seed(0)
    encoding = LearnedPositionalEncoding(8, 6, batch_first=batch_first, **F64)
    assert list(encoding.state_dict()) == ["weight"]
    assert 0.01 < encoding.weight.std() < 0.03
    x = torch.randn(N, L, 8, **F64)
    ids = torch.tensor([[0, 3, 1, 2, 5], [5, 5, 5, 5, 4]])
    for positions, expected in (
        (0, encoding.weight[:L]),
        (1, encoding.weight[1:]),
        (ids[0], encoding.weight[ids[0]]),
        (ids, encoding.weight[ids]),
    ):
        given = x if batch_first else x.transpose(0, 1)
        out = encoding(given, positions)
        torch.testing.assert_close(out if batch_first else out.transpose(0, 1), x + expected, **TOLERANCE)
    encoding(x if batch_first else x.transpose(0, 1), ids).sum().backward()
    assert torch.equal(encoding.weight.grad[:, 0], torch.bincount(ids.flatten(), minlength=6).double())


@pytest.mark.parametrize(
    ("positions", "length", "ran"),
    [(0, 7, "0 to 6"), (3, 4, "3 to 6"), (-1, 2, "-1 to 0"), (torch.tensor([0, 6]), 2, "0 to 6")],
)
def test_lengths_beyond_the_learned_table(positions, length, ran):
    encoding = LearnedPositionalEncoding(8, 6)
    with pytest.raises(ValueError, match=rf"positions must lie in 0 ... 5: .* max_len=6 rows; .* {ran}"):
        encoding(torch.randn(length, 8), positions)


@pytest.mark.parametrize(
    ("arguments", "shape", "message"),
    [
        ({}, (8,), r"x must be \(L, N, d_model\) or unbatched .* d_model=8, got \(8,\)"),
        ({}, (1, 2, 3, 8), "got"),
        ({"batch_first": True}, (2, 3, 7), r"x must be \(N, L, d_model\) .* got \(2, 3, 7\)"),
    ],
)
@pytest.mark.parametrize("kind", [SinusoidalPositionalEncoding, LearnedPositionalEncoding])
def test_encodings_name_shapes_that_do_not_fit(kind, arguments, shape, message):
    encoding = kind(8, **({"max_len": 5} if kind is LearnedPositionalEncoding else {}), **arguments)
    with pytest.raises(ValueError, match=message):
        encoding(torch.randn(shape))


def test_encodings_refuse_bad_sizes():
    for build, message in (
        (lambda: SinusoidalPositionalEncoding(0), "d_model must be greater than 0"),
        (lambda: SinusoidalPositionalEncoding(8, base=0), "base must be"),
        (lambda: SinusoidalPositionalEncoding(8, 1.5), "dropout must be a probability"),
        (lambda: LearnedPositionalEncoding(8, 0), "max_len must be"),
    ):
        with pytest.raises(ValueError, match=message):
            build()


# ---- added to the logits ----


def slopes_by_the_paper(heads):
    """Section 3 of the paper, and what its authors do for other numbers than powers of two."""
    if heads & (heads - 1) == 0:
        return [2 ** (-8 * (h + 1) / heads) for h in range(heads)]
    below = 2 ** math.floor(math.log2(heads))
    return slopes_by_the_paper(below) + slopes_by_the_paper(2 * below)[::2][: heads - below]


@pytest.mark.parametrize("heads", [1, 2, 3, 5, 8, 12, 16, 20, 71, 128])
def test_alibi_slopes(heads):
    slopes = alibi_slopes(heads, dtype=torch.float64)
    assert slopes.tolist() == pytest.approx(slopes_by_the_paper(heads), rel=1e-14)
    assert alibi_slopes(heads).dtype == torch.float32


def test_alibi_slopes_refuse_no_heads():
    with pytest.raises(ValueError, match="num_heads must be greater than 0, got 0"):
        alibi_slopes(0)
    with pytest.raises(ValueError, match="num_heads"):
        ALiBi(-1)


def t5_bucket(distance, buckets, reach, bidirectional):
    """The paper's description for one distance j - i. Borders are where the logarithm steps."""
    first = 0
    if bidirectional:
        buckets //= 2
        first = buckets if distance > 0 else 0
        distance = abs(distance)
    else:
        distance = max(-distance, 0)
    exact = buckets // 2
    if distance < exact:
        return first + distance
    share = math.log(distance / exact) / math.log(reach / exact)
    return first + min(exact + int(share * (buckets - exact) + 1e-9), buckets - 1)


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(7, 7), (3, 8), (8, 3), (1, 5), (5, 1)])
def test_t5_bias(queries, keys, bidirectional):
    module = T5RelativePositionBias(H, 8, 9, bidirectional, **F64)
    weight = module.relative_attention_bias.weight
    bias = module(queries, keys)
    expected = torch.empty(1, H, queries, keys, **F64)
    counts = torch.zeros(8, **F64)
    for i in range(queries):
        for j in range(keys):
            bucket = t5_bucket(j - (i + keys - queries), 8, 9, bidirectional)
            expected[0, :, i, j] = weight[bucket].detach()
            counts[bucket] += 1
    assert torch.equal(bias, expected)
    bias.sum().backward()
    assert torch.equal(weight.grad, counts[:, None].expand(-1, H))


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize(("buckets", "reach"), [(32, 128), (16, 64), (10, 100)])
def test_t5_buckets_are_transformers(buckets, reach, bidirectional):
    """Each border must fall on the same side, or a checkpoint's table is read a row off."""
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5").T5Attention
    module = T5RelativePositionBias(1, buckets, reach, bidirectional)
    distances = torch.arange(-1000, 1000)
    theirs = t5._relative_position_bucket(distances, bidirectional, buckets, reach)
    assert torch.equal(module._bucket(distances), theirs)


@pytest.mark.parametrize(("queries", "keys"), [(0, 3), (3, 0), (0, 0)])
def test_t5_bias_of_nothing(queries, keys):
    assert T5RelativePositionBias(H)(queries, keys).shape == (1, H, queries, keys)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_buckets": 7}, "num_buckets must be even and at least 4, got 7"),
        ({"num_buckets": 1, "bidirectional": False}, "num_buckets must be at least 2, got 1"),
        ({"max_distance": 8}, "max_distance must be greater than the 8 distances"),
    ],
)
def test_t5_refuses_bad_sizes(arguments, message):
    with pytest.raises(ValueError, match=message):
        T5RelativePositionBias(2, **arguments)


@pytest.mark.parametrize("window", [(2, 3), (3, 1), (1, 1)])
def test_relative_position_bias_2d(window):
    height, width = window
    module = RelativePositionBias2D(H, window, **F64)
    table = module.relative_position_bias_table
    expected = torch.empty(1, H, height * width, height * width, **F64)
    for q in range(height * width):
        for k in range(height * width):
            down, right = q // width - k // width, q % width - k % width
            expected[0, :, q, k] = table[(down + height - 1) * (2 * width - 1) + right + width - 1].detach()
    assert torch.equal(module(), expected)
    assert torch.autograd.gradcheck(lambda t: torch.func.functional_call(module, {_TABLE: t}, ()), (table,))


_TABLE = "relative_position_bias_table"


def test_relative_position_bias_2d_is_timms():
    layers = pytest.importorskip("timm.layers")
    ours, theirs = RelativePositionBias2D(H, (4, 3)), layers.RelPosBias((4, 3), H)
    theirs.load_state_dict(ours.state_dict())
    assert torch.equal(ours(), theirs.get_bias())


def test_relative_position_bias_2d_refuses_bad_sizes():
    with pytest.raises(ValueError, match=r"window_size must be \(height, width\), both > 0, got \(0, 3\)"):
        RelativePositionBias2D(2, (0, 3))
    module = MultiHeadAttention(E, H, position=RelativePositionBias2D(H, (2, 2)))
    x = torch.randn(5, N, E)
    with pytest.raises(ValueError, match=r"must hold the 4 tokens of window_size=\(2, 2\), got 5 and 5"):
        module(x, x, x)


# ---- inside MultiHeadAttention ----

POSITIONS = {
    "rotary": lambda: RotaryEmbedding(8),
    "alibi": lambda: ALiBi(H),
    "t5": lambda: T5RelativePositionBias(H, 8, 9, **F64),
    "swin": lambda: RelativePositionBias2D(H, (2, 3), **F64),
}


def as_bias(position, length):
    if isinstance(position, ALiBi):
        distance = (torch.arange(length)[:, None] - torch.arange(length)).abs()
        return -torch.tensor(slopes_by_the_paper(H), **F64)[:, None, None] * distance
    return position(length, length) if isinstance(position, T5RelativePositionBias) else position()


@pytest.mark.parametrize("masks", [0, 1, 2])
@pytest.mark.parametrize("attn_bias", [False, True])
@pytest.mark.parametrize("name", ["alibi", "t5", "swin"])
def test_biases_in_multi_head_attention(name, attn_bias, masks):
    """Beside any other term the same as the whole given as attn_bias; also the table's gradient."""
    torch.manual_seed(0)
    length = 6
    position = POSITIONS[name]()
    module = MultiHeadAttention(E, H, batch_first=True, position=position, **F64)
    plain = MultiHeadAttention(E, H, batch_first=True, **F64)
    plain.load_state_dict(module.state_dict(), strict=False)
    x = torch.randn(N, length, E, **F64)
    bias = torch.randn(N, 1, length, length, **F64) if attn_bias else torch.zeros(1, **F64)
    padding = torch.tensor([[False] * 6, [False] * 4 + [True] * 2]) if masks else None
    mask = torch.randn(length, length, **F64) if masks == 2 else None
    options = {"key_padding_mask": padding, "attn_mask": mask, "average_attn_weights": False}
    actual = module(x, x, x, attn_bias=bias if attn_bias else None, **options)
    expected = plain(x, x, x, attn_bias=bias + as_bias(position, length), **options)
    torch.testing.assert_close(actual, expected, **TOLERANCE)
    if name != "alibi":
        wanted = list(position.parameters())
        grads = [
            torch.autograd.grad(out.sin().sum() + w.cos().sum(), wanted) for out, w in (actual, expected)
        ]
        assert grads[0][0].abs().max() > 0
        torch.testing.assert_close(*grads, **TOLERANCE)


class LargestOutput(TorchDispatchMode):
    """The largest number of elements that any operation returned."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


@pytest.mark.parametrize(
    "kind", [T5RelativePositionBias, lambda heads: RelativePositionBias2D(heads, (5, 8))]
)
def test_one_bias_serves_the_batch_and_so_does_its_gradient(kind):
    """Features and batch are so few that a bias for each sample would be the largest tensor by far."""
    batch, length = 4, 40
    module = MultiHeadAttention(H, H, batch_first=True, position=kind(H))
    x = torch.randn(batch, length, H)
    with LargestOutput() as largest:
        module(x, x, x, need_weights=False)[0].sum().backward()
    assert largest.elements == H * length * length


@pytest.mark.parametrize("name", POSITIONS)
def test_copies_and_functional_call(name):
    x = torch.randn(6, N, E, **F64)
    module = MultiHeadAttention(E, H, position=POSITIONS[name](), **F64)
    expected = module(x, x, x)[0]
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(other(x, x, x)[0], expected)
    fresh = MultiHeadAttention(E, H, position=POSITIONS[name](), **F64)
    called = torch.func.functional_call(fresh, dict(module.named_parameters()), (x, x, x))[0]
    assert torch.equal(called, expected)
    fresh.load_state_dict(module.state_dict())
    assert torch.equal(fresh(x, x, x)[0], expected)


@pytest.mark.compile
@pytest.mark.parametrize("name", POSITIONS)
def test_compile_fullgraph(name):
    x = torch.randn(6, N, E, requires_grad=True, **F64)
    module = MultiHeadAttention(E, H, position=POSITIONS[name](), **F64)
    results = []
    for function in (torch.compile(module, fullgraph=True, backend="aot_eager"), module):
        out = function(x, x, x, is_causal=True, need_weights=False)[0]
        results.append((out, torch.autograd.grad(out.sin().sum(), [x, *module.parameters()])))
    torch.testing.assert_close(*results, **TOLERANCE)


@pytest.mark.compile
def test_encodings_compile_fullgraph():
    x = torch.randn(L, N, 8)
    for encoding in (SinusoidalPositionalEncoding(8), LearnedPositionalEncoding(8, 9)):
        compiled = torch.compile(encoding, fullgraph=True, backend="aot_eager")
        for positions in (0, 3, 4, torch.tensor([0, 2, 4, 6, 8])):
            torch.testing.assert_close(compiled(x, positions), encoding(x, positions))


def test_a_position_module_of_ones_own():
    """Any module with attention_terms: here logits that are scaled by 1 / 2."""

    class Halved(torch.nn.Module):
        terms: ClassVar = {"bias": torch.zeros(1, **F64)}  # the same dict each time

        def attention_terms(self, q, k):
            return q / 2, k, self.terms

    x = torch.randn(L, N, E, **F64)
    module = MultiHeadAttention(E, H, position=Halved(), **F64)
    q, k, v = module._project(x, x, x, True)
    expected = attn_ext.attention(q, k, v, scale=0.5 / math.sqrt(8))
    expected = module.out_proj(expected.permute(2, 0, 1, 3).flatten(2))
    for _ in range(2):
        torch.testing.assert_close(module(x, x, x)[0], expected, **TOLERANCE)
    assert list(Halved.terms) == ["bias"]


def test_terms_that_are_the_modules_own_are_not_dropped():
    class Masking(torch.nn.Module):
        def attention_terms(self, q, k):
            return q, k, {"mask": torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)}

    x = torch.randn(L, N, E)
    with pytest.raises(TypeError, match="multiple values for keyword argument 'mask'"):
        MultiHeadAttention(E, H, position=Masking())(x, x, x)


def test_what_is_no_position_module_is_refused():
    for position in (SinusoidalPositionalEncoding(E), "rope"):
        with pytest.raises(TypeError, match="position must be a module with attention_terms"):
            MultiHeadAttention(E, H, position=position)
    x = torch.randn(L, N, E)
    for position in (ALiBi(4), T5RelativePositionBias(4), RelativePositionBias2D(4, (1, 5))):
        module = MultiHeadAttention(E, H, position=position)
        with pytest.raises(ValueError, match="has num_heads=4, the attention 3"):
            module(x, x, x)
    with pytest.raises(ValueError, match=r"torch.nn.MultiheadAttention has no position"):
        MultiHeadAttention(E, H, position=ALiBi(H)).to_torch()
