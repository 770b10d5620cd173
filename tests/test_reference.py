"""attn_ext.reference against formulas written another way: loops over scalars, torch's own attention."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

from attn_ext import reference
from attn_ext.masks import causal

B, H, HKV, NQ, NK, D, DV = 2, 4, 2, 5, 7, 3, 2
F64 = torch.float64


def make_qkv(dtype=F64, nq=NQ, nk=NK):
    return torch.randn(B, H, nq, D, dtype=dtype), *(torch.randn(B, HKV, nk, n, dtype=dtype) for n in (D, DV))


def make_options():
    """Every option of attention, as a value that matters."""
    mask = torch.rand(B, 1, NQ, NK) > 0.3
    mask[0, 0, 2] = False  # a query without keys
    float_mask = torch.randn(NQ, NK, dtype=F64).masked_fill(~mask[0, 0], -math.inf)
    return {
        "mask": [mask, float_mask],
        "bias": [torch.randn(H, 1, NK, dtype=F64)],
        "causal": [True, "upper_left", "lower_right"],
        "window": [(2, None), (-1, 1), (1, 1)],
        "scale": [-0.7, 0.0],
        "softcap": [1.3],
        "alibi_slopes": [torch.rand(H, dtype=F64), torch.rand(B, H, dtype=F64)],
        "sinks": [torch.randn(H, dtype=F64)],
        "key_lengths": [torch.tensor([5, 0]), [7, 3]],
        "query_lengths": [[2, 5]],
    }


def scalar_attention(
    q, k, v, *, mask=None, bias=None, causal=False, window=None, scale=None, softcap=None, alibi_slopes=None,
    sinks=None, key_lengths=None, query_lengths=None,
):  # fmt: skip
    """out, lse, weights by loops over numbers: one row at a time, nothing shared with attn_ext.reference."""
    nq, nk = q.shape[2], k.shape[2]
    scale = 1 / math.sqrt(q.shape[3]) if scale is None else scale
    full = (B, H, nq, nk)
    mask = None if mask is None else mask.expand(full)
    bias = None if bias is None else bias.expand(full)
    slopes = None if alibi_slopes is None else alibi_slopes.expand(B, H)
    out, lse, weights = (
        q.new_zeros(B, H, nq, v.shape[3]),
        q.new_full((B, H, nq), -math.inf),
        q.new_zeros(full),
    )
    for b, h, i in itertools.product(range(B), range(H), range(nq)):
        logits = {}
        for j in range(nk):
            center = i if causal == "upper_left" else i + nk - nq
            visible = not causal or j <= center
            if window is not None:
                visible &= window[0] in (None, -1) or j >= center - window[0]
                visible &= window[1] in (None, -1) or j <= center + window[1]
            visible &= key_lengths is None or j < int(key_lengths[b])
            visible &= query_lengths is None or i < int(query_lengths[b])
            s = scale * sum(
                float(x) * float(y) for x, y in zip(q[b, h, i], k[b, h // (H // HKV), j], strict=True)
            )
            s = softcap * math.tanh(s / softcap) if softcap else s
            if slopes is not None:
                s -= float(slopes[b, h]) * abs(i + nk - nq - j)
            if bias is not None:
                s += float(bias[b, h, i, j])
            if mask is not None and mask.dtype == torch.bool:
                visible &= bool(mask[b, h, i, j])
            elif mask is not None:
                s += float(mask[b, h, i, j])
            if visible and s > -math.inf:
                logits[j] = s
        terms = [*logits.values(), *([] if sinks is None else [float(sinks[h])])]
        if terms:
            lse[b, h, i] = max(terms) + math.log(sum(math.exp(s - max(terms)) for s in terms))
        for j, s in logits.items():
            weights[b, h, i, j] = math.exp(s - float(lse[b, h, i]))
            out[b, h, i] += weights[b, h, i, j] * v[b, h // (H // HKV), j]
    return out, lse, weights


def option_sets():
    """Nothing, each option alone in each form, and twelve random mixtures."""
    generator = torch.Generator().manual_seed(0)
    names = list(make_options())
    sets = [{}] + [{name: n} for name in names for n in range(len(make_options()[name]))]
    for _ in range(12):
        chosen = [name for name in names if torch.rand((), generator=generator) < 0.5]
        sets.append(
            {name: int(torch.randint(len(make_options()[name]), (), generator=generator)) for name in chosen}
        )
    return sets


@pytest.mark.parametrize(
    "choice", option_sets(), ids=lambda c: "-".join(f"{k}{v}" for k, v in c.items()) or "plain"
)
def test_agrees_with_loops_over_scalars(choice):
    """Catches slips in the order of operations, alignment, GQA head order, polarity, window ends."""
    torch.manual_seed(1)
    q, k, v = make_qkv()
    options = {name: make_options()[name][n] for name, n in choice.items()}
    out, lse = reference.attention(q, k, v, **options)
    expected = scalar_attention(q, k, v, **options)
    # float64 sums of at most 7 terms: rounding is below 1e-14
    torch.testing.assert_close(
        (out, lse, reference.weights(q, k, **options)), expected, rtol=1e-13, atol=1e-13
    )


@pytest.mark.parametrize("causal", [True, "upper_left"])
def test_alignment_with_more_queries_than_keys(causal):
    """Catches a diagonal counted from the wrong end: with lower right, the first queries see nothing."""
    q, k, v = make_qkv(nq=6, nk=3)
    visible = reference.visibility(6, 3, causal=causal)
    first_key_seen_by = {True: 3, "upper_left": 0}[causal]
    assert visible[:, 0].tolist() == [i >= first_key_seen_by for i in range(6)]
    torch.testing.assert_close(
        reference.attention(q, k, v, causal=causal)[0], scalar_attention(q, k, v, causal=causal)[0]
    )


def test_window_counts_its_own_key():
    """window=(2, 0) shows three keys: off-by-one is the commonest fault of sliding windows."""
    visible = reference.visibility(6, 6, causal=True, window=(2, 0))
    assert visible[4].nonzero().flatten().tolist() == [2, 3, 4]
    rows = reference.visibility(8, 3, causal=True, window=(0, 0)).sum(-1)
    assert rows.tolist() == [0] * 5 + [1] * 3


@pytest.mark.parametrize(
    ("kind", "is_causal"), [("no", False), ("no", True), ("bool", False), ("float", False)]
)
def test_agrees_with_torch(kind, is_causal):
    """Torch's documented contract: default scale, True = may attend, additive masks, upper-left causal."""
    q, k, v = make_qkv()
    k, v = (x.repeat_interleave(H // HKV, 1) for x in (k, v))
    masks = {"no": None, "bool": torch.rand(NQ, NK) > 0.3, "float": torch.randn(B, 1, NQ, NK, dtype=F64)}
    mask = masks[kind]
    out, _ = reference.attention(q, k, v, mask=mask, causal="upper_left" if is_causal else False)
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal))


EVERYTHING = {
    "causal": True,
    "window": (3, None),
    "softcap": 1.5,
    "key_lengths": [7, 4],
    "query_lengths": [5, 3],
    "dropout_p": 0.3,
    "rng_state": torch.tensor([-5, 1 << 62]),
}


@pytest.mark.parametrize("float_mask", [False, True])
def test_derivatives_of_every_input(float_mask):
    """First and second derivatives, also forward mode, with every option on and rows that see nothing."""
    torch.manual_seed(2)
    options = make_options()
    inputs = [*make_qkv(), options["bias"][0], options["alibi_slopes"][1], options["sinks"][0]]
    inputs = [x.requires_grad_() for x in inputs]
    mask = options["mask"][float_mask]

    def f(q, k, v, bias, slopes, sinks):
        return reference.attention(
            q, k, v, mask=mask, bias=bias, alibi_slopes=slopes, sinks=sinks, **EVERYTHING
        )  # fmt: skip

    assert torch.autograd.gradcheck(f, inputs, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(f, inputs, fast_mode=True)  # one random direction, not each entry


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("kind", ["bool", "float", "bias"])
def test_hidden_rows_and_keys_leave_no_trace(kind, softcap):
    """Catches NaN from empty rows (-inf - -inf) and hidden keys, also through tanh', in both derivatives."""
    q, k, v = make_qkv()
    k[:, :, 5] = math.nan  # padding that was never written
    q[:, :, 1] = math.inf
    hidden = torch.zeros(NQ, NK, dtype=torch.bool)
    hidden[:, 5] = hidden[1] = True
    term = ~hidden if kind == "bool" else torch.zeros(NQ, NK, dtype=F64).masked_fill(hidden, -math.inf)
    if kind != "bool":
        term.requires_grad_()
    inputs = [x.requires_grad_() for x in (q, k, v)] + [term] * (kind != "bool")
    out, lse = reference.attention(q, k, v, softcap=softcap, **{"bias" if kind == "bias" else "mask": term})
    assert (out[:, :, 1] == 0).all()
    assert (lse[:, :, 1] == -math.inf).all()
    loss = out.square().sum() + lse[:, :, 2:].square().sum()
    grads = torch.autograd.grad(loss, inputs, create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in grads), inputs)
    for g in (*grads, *second):
        assert g.isfinite().all()
    assert (grads[1][:, :, 5] == 0).all()
    assert (grads[0][:, :, 1] == 0).all()


def test_storage_past_the_lengths_is_not_data():
    """NaN in the unused part of a cache must not come out, not even as 0 * NaN."""
    q, k, v = make_qkv()
    k[1, :, 4:] = v[1, :, 4:] = math.nan
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out, _ = reference.attention(q, k, v, key_lengths=[7, 4])
    expected = reference.attention(q[1:], k[1:, :, :4], v[1:, :, :4])[0]
    torch.testing.assert_close(out[1:], expected)
    for g in torch.autograd.grad(out.sum(), inputs):
        assert g.isfinite().all()


def test_nan_of_visible_values_shows_up():
    """Selecting away too much would hide a broken model: what takes part must be seen."""
    q, k, v = make_qkv()
    k[0, 0, 2, 0] = math.nan
    out, lse = reference.attention(q, k, v, causal="upper_left")
    assert out[0, 0, 2:].isnan().all()
    assert lse[0, 0, 2:].isnan().all()
    assert out[0, 0, :2].isfinite().all()
    assert out[1].isfinite().all()


def test_finfo_min_absorbs_and_minus_inf_masks():
    """finfo.min twice is -inf and masks; once it only absorbs, so a row full of it is a plain mean."""
    q, k, v = (torch.randn(1, 1, 4, 4) for _ in range(3))
    low = torch.finfo(torch.float32).min
    once = torch.full((4, 4), low)
    torch.testing.assert_close(
        reference.attention(q, k, v, mask=once)[0], v.mean(2, keepdim=True).expand_as(v)
    )
    out, lse = reference.attention(q, k, v, mask=once, bias=once)
    assert (out == 0).all()
    assert (lse == -math.inf).all()


def test_huge_logits_are_exact():
    """Catches weights taken as exp(s - lse) with a float32 lse: at 3e5 they are off by per cents."""
    q = torch.full((1, 1, 2, 64), 200.0, dtype=torch.float16)
    k, v = torch.full((1, 1, 4, 64), 200.0, dtype=torch.float16), torch.randn(1, 1, 4, 8, dtype=torch.float16)
    assert (reference.weights(q, k) == 0.25).all()
    out, lse = reference.attention(q, k, v)
    assert (out.dtype, lse.dtype) == (torch.float16, torch.float32)
    torch.testing.assert_close(out, v.float().mean(2, keepdim=True).half().expand_as(out))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_does_not_lower_the_precision(dtype):
    """The reference must stay float32 inside: autocast would turn its products into bfloat16."""
    q, k, v = make_qkv(dtype)
    expected = reference.attention(q, k, v)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(reference.attention(q, k, v), expected, rtol=0, atol=0)


@pytest.mark.parametrize("empty", ["B", "H", "Nq", "Nk", "D", "Dv"])
def test_axes_of_size_zero(empty):
    """amax over no keys raises and 1 / sqrt(0) is inf, where neither is allowed for."""
    sizes = {"B": 2, "H": 2, "Nq": 3, "Nk": 4, "D": 5, "Dv": 6, empty: 0}
    b, h, nq, nk, d, dv = sizes.values()
    q, k, v = (torch.randn(b, h, *s, dtype=F64, requires_grad=True) for s in ((nq, d), (nk, d), (nk, dv)))
    out, lse = reference.attention(q, k, v, softcap=2.0)
    assert out.shape == (b, h, nq, dv)
    assert lse.shape == (b, h, nq)
    (out.sum() + lse.masked_fill(lse == -math.inf, 0).sum()).backward()
    if empty == "Nk":
        assert (out == 0).all()
        assert (lse == -math.inf).all()
    if empty == "D":
        torch.testing.assert_close(out, v.mean(2, keepdim=True).expand_as(out))


# Known answers of Philox 4x32-10 (Random123's test vectors): counter, key, result.
PHILOX = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), PHILOX)
def test_philox_known_answers(counter, key, words):
    """A wrong constant or a lost carry still looks random; only known answers tell."""
    result = reference.philox_4x32([torch.tensor(c) for c in counter], [torch.tensor(k) for k in key])
    assert [int(w) for w in result] == words


def scalar_keep(seed, offset, p, b, h, i, j):
    """One element of the dropout mask in Python integers."""
    low = (1 << 32) - 1
    key = (seed + offset * 0x9E3779B97F4A7C15) & ((1 << 64) - 1)
    c, k = [j // 8, i, h, b], [key & low, key >> 32]
    for _ in range(10):
        x, y = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(y >> 32) ^ c[1] ^ k[0], y & low, (x >> 32) ^ c[3] ^ k[1], x & low]
        k = [(k[0] + 0x9E3779B9) & low, (k[1] + 0xBB67AE85) & low]
    word = c[j % 8 // 2]
    number = word >> 16 if j % 2 else word & 0xFFFF
    return number >= round(p * 65536)


@pytest.mark.parametrize("state", [(0, 0), (12345, 1), (-(2**63), 2**63 - 1), (2**63 - 1, -1)])
def test_dropout_mask_by_definition(state):
    """The mask is a contract between CPU and CUDA: which word and half belongs to which element."""
    keep = reference.dropout_keep(torch.tensor(state), 0.4, B, H, 3, 19)
    for b, h, i, j in itertools.product(range(B), range(H), range(3), range(19)):
        assert bool(keep[b, h, i, j]) == scalar_keep(*state, 0.4, b, h, i, j)
    corner = reference.dropout_keep(torch.tensor(state), 0.4, 1, H - 1, 3, 19, corner=(1, 1, 0))
    assert torch.equal(corner, keep[1:, 1:])


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_rate_and_scale(p):
    """Keep rate within 5 sigma over 1.3e6 draws, and kept weights scaled by 1 / (1 - p) as p was rounded."""
    state = torch.tensor([7, 8])
    keep = reference.dropout_keep(state, p, 2, 4, 128, 1280)
    drop = round(p * 65536) / 65536
    sigma = math.sqrt(drop * (1 - drop) / keep.numel())
    assert abs(keep.double().mean().item() - (1 - drop)) < 5 * sigma
    q, k = torch.randn(1, 1, 6, D, dtype=F64), torch.randn(1, 1, 9, D, dtype=F64)
    identity = torch.eye(9, dtype=F64)[None, None]
    out, lse = reference.attention(q, k, identity, dropout_p=p, rng_state=state)
    kept = reference.dropout_keep(state, p, 1, 1, 6, 9)
    torch.testing.assert_close(out, reference.weights(q, k) * kept / (1 - drop))
    torch.testing.assert_close(lse, reference.attention(q, k, identity)[1])


def test_dropout_of_everything_and_of_nothing():
    """p = 1 must give zeros with zero gradients, not 0 / 0."""
    q, k, v = (x.requires_grad_() for x in make_qkv())
    out, _ = reference.attention(q, k, v, dropout_p=1.0, rng_state=torch.tensor([1, 2]))
    assert (out == 0).all()
    assert all((g == 0).all() for g in torch.autograd.grad(out.sum(), (q, k, v)))
    assert reference.dropout_keep(torch.tensor([1, 2]), 0.0, 1, 1, 8, 8).all()


@pytest.mark.parametrize("causal", [1, None, "upper-left", "right"])
def test_unknown_alignment_is_refused(causal):
    """causal=1 must not pass for a number of one of the ops' alignments."""
    with pytest.raises(ValueError, match="causal must be"):
        reference.visibility(2, 2, causal=causal)


def test_func_transforms():
    """vmap, grad and jvp see plain operations: no data-dependent Python, no in-place writes."""
    q, k, v = make_qkv()
    options = {"causal": True, "softcap": 2.0, "key_lengths": torch.tensor([7, 4])}

    def one(q, k, v, n):
        return reference.attention(q[None], k[None], v[None], **{**options, "key_lengths": n[None]})[0][0]

    expected, _ = reference.attention(q, k, v, **options)
    torch.testing.assert_close(torch.func.vmap(one)(q, k, v, options["key_lengths"]), expected)
    grad = torch.func.grad(lambda q: reference.attention(q, k, v, **options)[0].square().sum())(q)
    (want,) = torch.autograd.grad(
        reference.attention(q.requires_grad_(), k, v, **options)[0].square().sum(), q
    )
    torch.testing.assert_close(grad, want)


@pytest.mark.compile
def test_compiles_without_graph_breaks():
    """The second derivative of a compiled model runs this code inside the graph."""
    q, k, v = (x.requires_grad_() for x in make_qkv())
    options = make_options()

    def f(q, k, v):
        terms = {"mask": options["mask"][0], "bias": options["bias"][0], "sinks": options["sinks"][0]}
        return reference.attention(q, k, v, **terms, **EVERYTHING)

    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, k, v), f(q, k, v))


def test_meta_tensors():
    """Shapes without data, on a device that autocast does not know."""
    q, k, v = (x.to("meta") for x in make_qkv())
    out, lse = reference.attention(
        q, k, v, causal=True, dropout_p=0.5, rng_state=torch.empty(2).long().to("meta")
    )
    assert (out.shape, lse.shape) == ((B, H, NQ, DV), (B, H, NQ))


def test_block_masks_for_other_lengths_are_refused():
    q, k = torch.ones(1, 1, 5, 2), torch.ones(1, 1, 9, 2)
    with pytest.raises(ValueError, match="made for 5 queries and 9 keys, got one for 9 and 9"):
        reference.attention(q, k, k, block_mask=causal(9))
