"""Known faults in dropout: another mask in the backward, lost scaling, correlations, generators, statistics.

References are issues of other projects in which users met the fault.
"""

import math

import pytest
import torch
from oracle import DTYPES, check, dropout_factors, oracle, qkv, randn
from torch.autograd import gradcheck, gradgradcheck
from torch.utils.checkpoint import checkpoint

from attn_ext import attention, scaled_dot_product_attention


def seeded(seed=1):
    return torch.Generator().manual_seed(seed)


def test_dropout_is_applied_always_also_without_gradients():
    # pytorch#124464, timm#1978, torchtune#1791: the functional has no training flag; p means p
    q, k, v = qkv()
    with torch.no_grad():
        assert not torch.equal(attention(q, k, v, dropout_p=0.5), attention(q, k, v))
        assert not torch.equal(scaled_dot_product_attention(q, k, v, None, 0.5), attention(q, k, v))
        assert torch.equal(attention(q, k, v, dropout_p=0.0), attention(q, k, v))


@pytest.mark.parametrize("p", [0.1, 0.3, 0.5, 0.9])
@pytest.mark.parametrize("dtype", DTYPES)
def test_forward_and_backward_use_the_same_mask(p, dtype):
    # flash-attention#1251, #612, #771: other tiles, other offset; apex#816: 1 / (1 - p) forgotten
    for sizes in ((5, 7), (3, 300), (130, 131)):
        keep = dropout_factors(2, 4, *sizes, p, seed=1)
        q, k, v = qkv(2, 4, *sizes, heads_kv=2, dtype=dtype)
        check(q, k, v, keep=keep, dropout_p=p, generator=seeded(), causal=True)


def test_gradcheck_with_a_fixed_seed():
    # apex#816, nki-samples#81
    inputs = [t.requires_grad_() for t in qkv(1, 2, 3, 4, 3)]
    run = lambda *x: attention(*x, dropout_p=0.5, generator=seeded(), return_lse=True)  # noqa: E731
    assert gradcheck(run, inputs)
    assert gradgradcheck(run, inputs)


def test_lse_and_weights_are_those_of_the_undropped_probabilities():
    q, k, v = qkv()
    lse, weights = attention(q, k, v, dropout_p=0.5, return_lse=True, return_weights="full")[1:]
    torch.testing.assert_close(lse, oracle(q, k, v)[1])
    torch.testing.assert_close(weights, oracle(q, k, v)[2])


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_keep_rate_and_independence(p):
    # flash-attention#771 and own reasoning: rate off; correlated over heads, samples, rows, keys or calls
    batch, heads, len_q, len_k = 4, 8, 128, 256  # 2^20 numbers
    torch.manual_seed(5)
    kept = []
    for _ in range(2):
        q, k = (torch.zeros(batch, heads, n, 1) for n in (len_q, len_k))
        identity = torch.eye(len_k).expand(batch, heads, -1, -1)
        kept.append(attention(q, k, identity, dropout_p=p) > 0)
    x = kept[0]
    sigma = math.sqrt(p * (1 - p))
    assert abs(x.double().mean() - (1 - p)) < 5 * sigma / math.sqrt(x.numel())
    centred = [(t.double() - (1 - p)) / sigma for t in kept]
    for name, a, b in [
        ("calls", *centred),
        ("samples", centred[0][1:], centred[0][:-1]),
        ("heads", centred[0][:, 1:], centred[0][:, :-1]),
        *((f"rows {d}", centred[0][:, :, d:], centred[0][:, :, :-d]) for d in (1, 2, 4, 64)),
        *((f"keys {d}", centred[0][..., d:], centred[0][..., :-d]) for d in (1, 2, 4, 8, 128)),
    ]:
        assert abs((a * b).mean()) < 5 / math.sqrt(a.numel()), name
    rows = x.double().mean(-1)  # each row has the right rate, within what len_k numbers allow
    assert abs(rows - (1 - p)).max() < 6 * sigma / math.sqrt(len_k) + 1e-9


def test_expectation_is_the_undropped_result():
    q, k, v = qkv(1, 1, 2, 6)
    samples = attention(*(t.expand(4000, 1, -1, -1) for t in (q, k, v)), dropout_p=0.5, generator=seeded())
    error = samples.mean(0, keepdim=True) - attention(q, k, v)
    assert (error.abs() < 5 * samples.std(0) / math.sqrt(4000)).all()


def test_generators_seed_advance_and_reproduce():
    # flash-attention#771: manual_seed must govern, and two calls must differ
    q, k, v = qkv(len_q=20, len_k=20)
    for call in (attention, scaled_dot_product_attention):
        torch.manual_seed(3)
        first, second = call(q, k, v, dropout_p=0.5), call(q, k, v, dropout_p=0.5)
        torch.manual_seed(3)
        assert torch.equal(call(q, k, v, dropout_p=0.5), first)
        assert torch.equal(call(q, k, v, dropout_p=0.5), second)
        assert not torch.equal(first, second)
    generator = seeded(3)
    state = torch.get_rng_state()
    first, second = (attention(q, k, v, dropout_p=0.5, generator=generator) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), state)  # a generator that was given leaves the global one alone
    assert not torch.equal(first, second)
    assert torch.equal(attention(q, k, v, dropout_p=0.5, generator=seeded(3)), first)
    attention(q, k, v)
    assert torch.equal(torch.get_rng_state(), state)  # no dropout, nothing drawn
    assert not torch.equal(attention(q, k, v, dropout_p=0.5, generator=seeded(4)), first)


def test_the_mask_does_not_depend_on_threads_lengths_dtype_or_neighbours():
    # flash-attention#612: another tiling, another mask
    keep = dropout_factors(2, 2, 200, 300, 0.4, seed=2)
    for len_q, len_k in ((1, 300), (200, 7), (97, 129)):
        assert torch.equal(
            dropout_factors(2, 2, len_q, len_k, 0.4, seed=2) > 0, keep[:, :, :len_q, :len_k] > 0
        )
    assert torch.equal(dropout_factors(1, 1, 200, 300, 0.4, seed=2) > 0, keep[:1, :1] > 0)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            assert torch.equal(dropout_factors(2, 2, 200, 300, 0.4, seed=2), keep)
    finally:
        torch.set_num_threads(threads)


def test_philox_by_python_integers():
    # flash-attention#612 and design: the mask is a function of seed, offset and place
    def philox(counter, key):
        for _ in range(10):
            high0, low0 = divmod(0xD2511F53 * counter[0], 2**32)
            high1, low1 = divmod(0xCD9E8D57 * counter[2], 2**32)
            counter = (high1 ^ counter[1] ^ key[0], low1, high0 ^ counter[3] ^ key[1], low0)
            key = ((key[0] + 0x9E3779B9) % 2**32, (key[1] + 0xBB67AE85) % 2**32)
        return counter

    # The known answer that Random123 publishes.
    assert philox((0, 0, 0, 0), (0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    p, seed = 0.3, 11
    state = torch.randint(-(2**63), 2**63 - 1, (2,), generator=seeded(seed)).tolist()
    key = (state[0] + state[1] * 0x9E3779B97F4A7C15) % 2**64
    keep = dropout_factors(2, 3, 4, 300, p, seed=seed)
    for b, h, i, j in (
        (0, 0, 0, 0),
        (1, 2, 3, 299),
        (0, 1, 2, 17),
        (1, 0, 3, 128),
        (1, 1, 1, 255),
        (0, 2, 0, 256),
    ):
        word = philox((j // 8, i, h, b), (key % 2**32, key >> 32))[j % 8 // 2]
        number = word >> 16 if j % 2 else word % 2**16
        threshold = round(p * 65536)
        factor = 65536 / (65536 - threshold) if number >= threshold else 0.0
        assert keep[b, h, i, j].item() == pytest.approx(factor, rel=1e-12)


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("call", [attention, scaled_dot_product_attention])
def test_checkpointing_recomputes_with_the_same_mask(use_reentrant, call):
    # OLMo-core#828, torchtitan#1323, pytorch#190717: the recomputed mask differs
    inputs = [t.requires_grad_() for t in qkv(len_q=30, len_k=40, dtype=torch.float32)]
    run = lambda *x: call(*x, dropout_p=0.3).square()  # noqa: E731
    torch.manual_seed(7)
    expected = torch.autograd.grad(run(*inputs).sum(), inputs)
    after = torch.get_rng_state()
    torch.manual_seed(7)
    checkpoint(run, *inputs, use_reentrant=use_reentrant).sum().backward()
    assert torch.equal(torch.get_rng_state(), after)
    assert all(torch.equal(t.grad, g) for t, g in zip(inputs, expected, strict=True))


@pytest.mark.parametrize("p", [1.5, -0.1, math.nan, math.inf, "0.1", None, 1 + 1e-9, 1j])
@pytest.mark.parametrize("call", [attention, scaled_dot_product_attention])
def test_dropout_p_outside_0_and_1_is_refused(call, p):
    # own run: torch's text for -0.1 and NaN misleads
    with pytest.raises((TypeError, ValueError), match=r"dropout_p must be .*between 0 and 1"):
        call(*qkv(), dropout_p=p)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("p", [1, 1.0, 1 - 1e-9])
def test_dropping_everything_gives_zeros(p, dtype):
    # own run: 1 / (1 - p) is infinite, 0 * inf is NaN
    inputs = [t.requires_grad_() for t in qkv(dtype=dtype)]
    out, lse = attention(*inputs, dropout_p=p, return_lse=True, sinks=randn(2, dtype=dtype))
    assert not out.any()
    assert lse.isfinite().all()
    assert not any(g.any() for g in torch.autograd.grad(out.sum(), inputs))
    assert not scaled_dot_product_attention(*inputs, dropout_p=p).any()


def test_a_probability_too_small_for_16_bits_drops_nothing():
    # design: p is rounded to 16 bits, and the scale follows what it was rounded to
    q, k, v = qkv()
    assert torch.equal(attention(q, k, v, dropout_p=1e-6), attention(q, k, v))


@pytest.mark.parametrize("generator", [0, "cpu", torch.tensor(1)])
def test_a_generator_of_a_wrong_type_is_refused(generator):
    with pytest.raises(TypeError, match="generator"):
        attention(*qkv(), dropout_p=0.5, generator=generator)
