"""RotaryEmbedding beside complex numbers, the formulas of its scalings, and transformers' where installed."""

import math

import pytest
import torch
from multihead_modes import F64, TOLERANCE

import attn_ext
from attn_ext import MultiHeadAttention, RotaryEmbedding
from attn_ext.positions.rotary import inverse_frequencies

pytestmark = pytest.mark.filterwarnings("ignore:heads of")
B, H, N, D = 2, 3, 5, 12


def by_hand(x, positions, theta, dim, interleaved=False, factor=1.0):
    """Each pair as a complex number a + ib, times e^(i pos theta); x (B, H, N, D), positions (..., N)."""
    out = x.clone()
    positions = positions.double().expand(x.shape[0], -1)
    for i, t in enumerate(theta):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + dim // 2)
        turn = factor * torch.exp(1j * positions * float(t))[:, None]
        pair = torch.complex(x[..., a].double(), x[..., b].double()) * turn
        out[..., a], out[..., b] = pair.real.to(x.dtype), pair.imag.to(x.dtype)
    return out


def plain_theta(dim, base=10000.0):
    return [base ** (-2 * i / dim) for i in range(dim // 2)]


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dim", [12, 6, 2])
@pytest.mark.parametrize(
    "positions", ["default", "offset", "offset in a tensor", "ids", "ids of each sample"]
)
def test_rotation(positions, dim, interleaved):
    x = torch.randn(B, H, N, D, **F64)
    argument, expected = {
        "default": ((), torch.arange(N)),
        "offset": ((1000,), torch.arange(1000, 1000 + N)),
        "offset in a tensor": ((torch.tensor(1000),), torch.arange(1000, 1000 + N)),
        "ids": ((torch.tensor([4, 0, 0, -2, 99]),), torch.tensor([4, 0, 0, -2, 99])),
        "ids of each sample": ((torch.arange(2 * N).view(2, N),), torch.arange(2 * N).view(2, N)),
    }[positions]
    rope = RotaryEmbedding(dim, interleaved=interleaved)
    wanted = by_hand(x, expected, plain_theta(dim), dim, interleaved)
    torch.testing.assert_close(rope(x, *argument), wanted, **TOLERANCE)
    assert torch.equal(rope(x, *argument)[..., dim:], x[..., dim:])


def test_decoding_a_step_at_a_time_is_the_whole():
    rope = RotaryEmbedding(D)
    x = torch.randn(B, H, N, D)
    steps = torch.cat([rope(x[:, :, t : t + 1], t) for t in range(N)], 2)
    torch.testing.assert_close(steps, rope(x))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_half_types_far_out(dtype):
    """Known fault: positions or angles in half precision, or cast along with the model."""
    rope = RotaryEmbedding(D).to(dtype)
    x = torch.randn(B, H, N, D).to(dtype)
    expected = by_hand(x.double(), torch.arange(100_000, 100_000 + N), plain_theta(D), D)
    out = rope(x, 100_000)
    assert out.dtype == dtype
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), expected, rtol=eps, atol=4e-6 if dtype == torch.float32 else eps)


def test_gradients():
    rope = RotaryEmbedding(
        6, scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
    )
    x = torch.randn(1, 2, 3, 8, requires_grad=True, **F64)
    assert torch.autograd.gradcheck(lambda x: rope(x, 3), (x,), check_forward_ad=True)


# ---- scaling ----

DYNAMIC = {"rope_type": "dynamic", "factor": 3.0, "original_max_position_embeddings": 16}
SCALINGS = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": DYNAMIC,
    "yarn": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512},
    "yarn, all entries": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "mscale": 0.7,
        "mscale_all_dim": 1.1,
        "truncate": False,
        "attention_factor": None,
    },
    "yarn, attention_factor": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "attention_factor": 1.5,
    },
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}


def frequencies(dim, base, scaling, length=10):
    rope = RotaryEmbedding(dim, base, scaling=scaling)
    return inverse_frequencies(dim, base, rope.scaling, torch.arange(length))


@pytest.mark.parametrize("length", [10, 16, 50])
@pytest.mark.parametrize(("dim", "base"), [(64, 10000.0), (128, 500000.0), (20, 100.0)])
@pytest.mark.parametrize("name", SCALINGS)
def test_frequencies_are_transformers(name, dim, base, length):
    rope_utils = pytest.importorskip("transformers.modeling_rope_utils")
    configuration = pytest.importorskip("transformers").LlamaConfig
    scaling = dict(SCALINGS[name])
    config = configuration(
        hidden_size=2 * dim,
        num_attention_heads=2,
        max_position_embeddings=scaling.get("original_max_position_embeddings", 2048),
        rope_parameters={"rope_theta": base, **scaling},
    )
    theta, factor = frequencies(dim, base, scaling, length)
    if name == "default":
        expected = torch.tensor(plain_theta(dim, base)), 1.0
    else:
        expected = rope_utils.ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, "cpu", seq_len=length)
    torch.testing.assert_close(theta.float(), expected[0], rtol=2e-6, atol=0)
    assert factor == pytest.approx(expected[1], rel=1e-12)


def test_a_rotated_query_is_transformers():
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    q, k = torch.randn(B, H, 40, 64), torch.randn(B, 1, 40, 64)
    theta = torch.tensor(plain_theta(64))
    angles = torch.cat([torch.arange(40)[:, None] * theta] * 2, -1)[None]
    expected = llama.apply_rotary_pos_emb(q, k, angles.cos(), angles.sin())
    rope = RotaryEmbedding(64)
    torch.testing.assert_close((rope(q), rope(k)), expected, rtol=1e-5, atol=1e-5)


def test_linear_and_ntk_by_their_formulas():
    for i, (linear, ntk, plain) in enumerate(
        zip(
            frequencies(16, 100.0, {"rope_type": "linear", "factor": 4.0})[0],
            frequencies(16, 100.0, {"rope_type": "ntk", "factor": 4.0})[0],
            plain_theta(16, 100.0),
            strict=True,
        )
    ):
        assert linear.item() == pytest.approx(plain / 4, rel=1e-13)
        assert ntk.item() == pytest.approx((100 * 4 ** (16 / 14)) ** (-i / 8), rel=1e-13)
    assert ntk.item() == pytest.approx(plain / 4, rel=1e-12)  # the lowest frequency is divided by the factor


def test_dynamic_grows_with_the_highest_position():
    within, at, beyond = (frequencies(16, 100.0, DYNAMIC, n)[0] for n in (3, 16, 48))
    assert torch.equal(within, at)
    assert within.tolist() == pytest.approx(plain_theta(16, 100.0), rel=1e-13)
    assert beyond.tolist() == pytest.approx(plain_theta(16, 100 * 7 ** (16 / 14)), rel=1e-12)  # 3 * 48/16 - 2
    rope = RotaryEmbedding(D, scaling=DYNAMIC)
    x = torch.randn(B, H, N, D, **F64)
    theta = frequencies(D, 10000.0, DYNAMIC, 100 + N)[0]
    torch.testing.assert_close(rope(x, 100), by_hand(x, torch.arange(100, 100 + N), theta, D), **TOLERANCE)
    assert rope(x[:, :, :0]).shape == (B, H, 0, D)


def test_yarn_by_its_formula():
    """Equations 17 to 20 of the paper over the dimension's index, with the published rounding of its ends."""
    dim, base, s, trained = 64, 10000.0, 16.0, 2048
    scaling = {"rope_type": "yarn", "factor": s, "original_max_position_embeddings": trained}
    theta, factor = frequencies(dim, base, scaling)
    turns = [trained * t / (2 * math.pi) for t in plain_theta(dim)]
    first = max(i for i in range(32) if turns[i] >= 32)
    last = min(i for i in range(32) if turns[i] <= 1)
    for i, (scaled, plain) in enumerate(zip(theta.tolist(), plain_theta(dim), strict=True)):
        interpolated = min(max((i - first) / (last - first), 0), 1)
        assert scaled == pytest.approx(plain * (1 - interpolated) + plain / s * interpolated, rel=1e-12)
    assert factor == pytest.approx(0.1 * math.log(16) + 1)
    x = torch.randn(B, H, N, D, **F64)
    rope = RotaryEmbedding(D, scaling=scaling)
    wanted = by_hand(x, torch.arange(N), frequencies(D, base, scaling)[0], D, factor=factor)
    torch.testing.assert_close(rope(x), wanted, **TOLERANCE)


def test_llama3_by_its_formula():
    theta, _ = frequencies(128, 500000.0, SCALINGS["llama3"])
    for scaled, plain in zip(theta.tolist(), plain_theta(128, 500000.0), strict=True):
        wavelength = 2 * math.pi / plain
        if wavelength < 8192 / 4:
            expected = plain
        elif wavelength > 8192:
            expected = plain / 8
        else:
            smooth = (8192 / wavelength - 1) / 3
            expected = (1 - smooth) * plain / 8 + smooth * plain
        assert scaled == pytest.approx(expected, rel=1e-12)


# ---- inside MultiHeadAttention ----


@pytest.mark.parametrize("lengths", [(5, 5), (2, 5), (5, 3)])
@pytest.mark.parametrize("options", [{}, {"num_kv_heads": 1, "qk_norm": "rms"}])
def test_in_multi_head_attention(options, lengths):
    """Queries and keys are rotated after their norm; the last query stands where the last key does."""
    rope = RotaryEmbedding(4)
    module = MultiHeadAttention(24, 4, batch_first=True, position=rope, **options, **F64)
    length, keys = lengths
    query, memory = torch.randn(B, length, 24, **F64), torch.randn(B, keys, 24, **F64)
    q, k, v = module._project(query, memory, memory, True)
    if options:
        q, k = module.q_norm(q), module.k_norm(k)
    q = by_hand(q, torch.arange(keys - length, keys), plain_theta(4), 4)
    k = by_hand(k, torch.arange(keys), plain_theta(4), 4)
    logits = q @ k.repeat_interleave(4 // k.shape[1], 1).mT / math.sqrt(6)
    heads = logits.softmax(-1) @ v.repeat_interleave(4 // v.shape[1], 1)
    out, weights = module(query, memory, memory, average_attn_weights=False)
    torch.testing.assert_close(weights, logits.softmax(-1), **TOLERANCE)
    torch.testing.assert_close(out, module.out_proj(heads.transpose(1, 2).flatten(2)), **TOLERANCE)


def test_only_distances_matter():
    x = torch.randn(B, 9, 24, **F64)
    module = MultiHeadAttention(24, 4, batch_first=True, position=RotaryEmbedding(6), **F64)
    whole = module(x, x, x, is_causal=True, need_weights=False)[0]
    last = module(x[:, -1:], x, x, need_weights=False)[0]  # decoding without a cache
    torch.testing.assert_close(last, whole[:, -1:], **TOLERANCE)


def test_extra_keys_have_no_position():
    """A query meets them unrotated: their weights do not depend on where it stands."""
    module = MultiHeadAttention(24, 4, batch_first=True, add_bias_kv=True, position=RotaryEmbedding(6), **F64)
    x = torch.randn(1, 1, 24, **F64).expand(1, 7, -1)
    _, weights = module(x, x[:, :1], x[:, :1], average_attn_weights=False)
    q, k, _ = module._project(x, x, x, True)
    extra = (q * module.bias_k.view(1, 4, 1, 6)).sum(-1) / math.sqrt(6)
    turned = by_hand(q, torch.arange(-6, 1), plain_theta(6), 6)
    main = (turned * k[:, :, :1]).sum(-1) / math.sqrt(6)
    torch.testing.assert_close(weights, torch.stack([main, extra], -1).softmax(-1), **TOLERANCE)


@pytest.mark.compile
@pytest.mark.parametrize("scaling", [None, DYNAMIC])
def test_compile_fullgraph(scaling):
    rope = RotaryEmbedding(8, scaling=scaling)
    compiled = torch.compile(rope, fullgraph=True, backend="aot_eager")
    x = torch.randn(B, H, N, D)
    for positions in (0, 70, 71, torch.arange(N) * 9):
        torch.testing.assert_close(compiled(x, positions), rope(x, positions))


# ---- errors ----


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dim": 7}, "dim must be even and greater than 0 to fall into pairs, got 7"),
        ({"dim": 0}, "dim must be even"),
        ({"base": 1}, "base must be greater than 1"),
        ({"scaling": {"rope_type": "longrope"}}, r'scaling\["rope_type"\] must be one of default, linear'),
        ({"scaling": {"type": "linear", "factor": 2.0}}, "must be one of default, .* got None"),
        ({"scaling": {"rope_type": "linear"}}, r"must have the entries \(factor\)"),
        ({"scaling": {"rope_type": "linear", "factor": 2.0, "factr": 1}}, r"got \(factor, factr\)"),
        ({"scaling": {"rope_type": "linear", "factor": 0.0}}, r'scaling\["factor"\] must be greater than 0'),
        ({"dim": 2, "scaling": DYNAMIC}, "dim must be at least 4"),
        ({"scaling": {**SCALINGS["llama3"], "low_freq_factor": 4.0}}, "low_freq_factor must be less"),
        ({"scaling": "yarn"}, "scaling must be None or a dict, got str"),
    ],
)
def test_clear_constructor_errors(arguments, message):
    with pytest.raises((ValueError, TypeError), match=message):
        RotaryEmbedding(**{"dim": 8, **arguments})


@pytest.mark.parametrize(
    ("shape", "positions", "message"),
    [
        (
            (B, N, D),
            0,
            r"x must be \(batch, heads, length, head_dim\) with head_dim >= dim=8, got \(2, 5, 12\)",
        ),
        ((B, H, N, 6), 0, r"head_dim >= dim=8, got \(2, 3, 5, 6\)"),
        ((B, H, N, D), torch.arange(4), r"positions must have shape \(length,\) = \(5,\) or"),
        ((B, H, N, D), 1.5, "positions must be an int or a tensor, got 1.5"),
        ((B, H, N, D), torch.ones(N, dtype=torch.bool), "positions must be .* got torch.bool"),
    ],
)
def test_clear_errors(shape, positions, message):
    with pytest.raises((ValueError, TypeError), match=message):
        RotaryEmbedding(8)(torch.randn(shape), positions)


def test_a_head_smaller_than_the_rotation_is_named():
    module = attn_ext.MultiHeadAttention(24, 4, position=RotaryEmbedding(8))
    x = torch.randn(N, B, 24)
    with pytest.raises(ValueError, match=r"query's heads must be .* head_dim >= dim=8, got \(2, 4, 5, 6\)"):
        module(x, x, x)
