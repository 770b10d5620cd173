"""attention(block_mask=...): beside the formula, beside the same mask made dense, and what is left out."""

import pytest
import torch
from oracle import DTYPES, check, dropout_factors, qkv, randn
from torch.autograd import forward_ad

import attn_ext
from attn_ext.masks import BlockMask

SIZES = [(1, 1), (1, 147), (3, 300), (64, 64), (65, 63), (113, 203), (257, 63), (300, 513)]


def random_mask(len_q, len_k, batch=1, heads=1, seed=0):
    """Half of the blocks hidden, the others full or a random tile; the first of many queries see nothing."""
    g = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 5, (batch, heads, -(-len_q // 64), -(-len_k // 64)), generator=g)
    hidden = torch.rand(blocks.shape, generator=g) < 0.5
    blocks[hidden] = 0
    if len_q > 64:
        blocks[:, :, 0] = 0
    tiles = torch.randint(-(2**63), 2**63 - 1, (5, 64), generator=g)
    tiles[0], tiles[1] = 0, -1
    return BlockMask(blocks.int(), tiles, len_q, len_k)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("len_q", "len_k"), SIZES)
def test_against_the_formula(len_q, len_k, dtype):
    q, k, v = qkv(2, 4, len_q, len_k, 24, 9, heads_kv=2, dtype=dtype)
    check(q, k, v, block_mask=random_mask(len_q, len_k, heads=4))


@pytest.mark.parametrize(
    "options",
    [
        {"causal": True},
        {"causal": "upper_left", "window": (90, None)},
        {"window": (100, 40), "softcap": 3.0, "scale": 0.3},
        {"key_lengths": [203, 100], "query_lengths": [113, 70]},
        {"mask": torch.rand(2, 1, 113, 203, generator=torch.Generator().manual_seed(1)) > 0.3},
        {"mask": randn(1, 1, 1, 203), "bias": randn(1, 4, 113, 1, seed=1)},
        {"bias": randn(1, 4, 113, 203), "sinks": randn(4, seed=2)},
        {"alibi_slopes": randn(4).abs(), "bias": randn(2, 4, 113, 203)},
    ],
    ids=lambda o: "-".join(o),
)
@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (1, 4), (2, 4)], ids=str)
def test_with_every_other_option(options, shape):
    q, k, v = qkv(2, 4, 113, 203, 16, heads_kv=2)
    check(q, k, v, block_mask=random_mask(113, 203, *shape), **options)


def test_with_dropout():
    q, k, v = qkv(2, 2, 113, 203, 16)
    keep = dropout_factors(2, 2, 113, 203, 0.3, 5)
    generator = torch.Generator().manual_seed(5)
    check(q, k, v, block_mask=random_mask(113, 203), dropout_p=0.3, generator=generator, keep=keep)


def everything(q, k, v, bias, **options):
    """out, LSE, gradients, and the tangents of out and LSE."""
    leaves = [t.detach().clone().requires_grad_() for t in (q, k, v, bias)]
    out, lse = attn_ext.attention(*leaves[:3], bias=leaves[3], return_lse=True, **options)
    finite = lse.masked_fill(lse == -torch.inf, 0)
    grads = torch.autograd.grad((out.float().sin().sum() + finite.sum()), leaves)
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(t, t.flip(-1)) for t in (q, k, v, bias)]
        pair = attn_ext.attention(*duals[:3], bias=duals[3], return_lse=True, **options)
        tangents = [forward_ad.unpack_dual(t).tangent for t in pair]
    return [out, lse, *grads, *tangents]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [(1, 4, 1, 1), (2, 4, 1, 0), (1, 1, 0, 1)], ids=["all", "keys", "rows"])
@pytest.mark.parametrize(("len_q", "len_k"), SIZES)
def test_same_bits_as_the_dense_mask(len_q, len_k, bias, dtype):
    # what is left out is exactly what would have added nothing
    q, k, v = qkv(2, 4, len_q, len_k, 24, heads_kv=2, dtype=dtype)
    term = randn(*bias[:2], len_q if bias[2] else 1, len_k if bias[3] else 1, dtype=dtype, seed=3)
    mask = random_mask(len_q, len_k, heads=4)
    for causal in (False, True):
        got = everything(q, k, v, term, block_mask=mask, causal=causal)
        want = everything(q, k, v, term, mask=mask.to_dense(), causal=causal)
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads", [1, 8])  # two routes through the backward
def test_blocks_that_nobody_sees_are_not_visited(heads, dtype):
    """A masked value counts with weight 0, and 0 * NaN is NaN: but not where nothing is computed."""
    q, k, v = qkv(1, heads, 200, 640, 16, dtype=dtype)
    mask = BlockMask.from_predicate(lambda b, h, i, j: (j < 64) | (j >= 600), 200, 640)
    want = everything(q, k, v, q.new_zeros(1, 1, 1, 640), block_mask=mask)
    k[:, :, 64:576], v[:, :, 64:576] = torch.nan, torch.nan
    got = everything(q, k, v, q.new_zeros(1, 1, 1, 640), block_mask=mask)
    for n, (a, b) in enumerate(zip(got, want, strict=True)):
        assert torch.equal(a, b), n


def test_derivatives_of_all_kinds():
    q, k, v = (t.requires_grad_() for t in qkv(1, 2, 70, 66, 2))
    bias = randn(1, 1, 1, 66).requires_grad_()
    mask = BlockMask.from_predicate(lambda b, h, i, j: ((i - j).abs() <= 3 + h) & (i > 0), 70, 66, heads=2)

    def call(q, k, v, bias):
        return attn_ext.attention(q, k, v, bias=bias, block_mask=mask)

    torch.autograd.gradcheck(
        call, (q, k, v, bias), fast_mode=True, check_forward_ad=True, check_batched_grad=True
    )
    torch.autograd.gradgradcheck(call, (q, k, v, bias), fast_mode=True, check_fwd_over_rev=True)


def test_second_derivatives_take_blocks_of_queries(monkeypatch):
    from attn_ext import second_order

    def hessian_product():
        q, k, v = (t.requires_grad_() for t in qkv(2, 2, 150, 70, 4))
        mask = random_mask(150, 70, batch=2, heads=2, seed=1)
        (grad,) = torch.autograd.grad(
            attn_ext.attention(q, k, v, block_mask=mask).sin().sum(), q, create_graph=True
        )
        return torch.autograd.grad(grad.sin().sum(), (q, k, v))

    whole = hessian_product()
    monkeypatch.setattr(second_order, "BLOCK_SCORES", 30 * 70)  # 30 queries: no multiple of a block
    for a, b in zip(hessian_product(), whole, strict=True):
        torch.testing.assert_close(a, b)


def test_vmap():
    q, k, v = qkv(2, 2, 100, 70, 8)
    mask = random_mask(100, 70, batch=2, heads=2)
    many = torch.stack([q, 2 * q, -q])
    got = torch.vmap(lambda q: attn_ext.attention(q, k, v, block_mask=mask))(many)
    for n in range(3):
        assert torch.equal(got[n], attn_ext.attention(many[n], k, v, block_mask=mask))
    # samples that have masks of their own: maps that differ, and tiles that differ
    masks = [random_mask(100, 70, batch=2, heads=2, seed=seed) for seed in range(3)]
    maps, tiles = (torch.stack([getattr(m, name) for m in masks]) for name in ("map", "tiles"))

    def call(q, map, tiles):
        return attn_ext.attention(q, k, v, block_mask=BlockMask(map, tiles, 100, 70))

    got = torch.vmap(call, in_dims=(0, 0, None))(many, maps, tiles[0])
    assert torch.equal(got[2], call(many[2], maps[2], tiles[0]))
    got = torch.vmap(call)(many, maps, tiles)
    assert torch.equal(got[2], call(many[2], maps[2], tiles[2]))


@pytest.mark.compile
def test_compiled():
    q, k, v = (t.requires_grad_() for t in qkv(1, 2, 100, 70, 8, dtype=torch.float32))
    mask = random_mask(100, 70)
    compiled = torch.compile(lambda q, m: attn_ext.attention(q, k, v, block_mask=m), fullgraph=True)
    assert torch.equal(compiled(q, mask), attn_ext.attention(q, k, v, block_mask=mask))
    got = torch.autograd.grad(compiled(q, mask).sum(), (q, k, v))
    want = torch.autograd.grad(attn_ext.attention(q, k, v, block_mask=mask).sum(), (q, k, v))
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("kind", ["full", "mean_heads", "colsum"])
def test_weights(kind):
    q, k, v = qkv(2, 3, 100, 130, 8)
    mask = random_mask(100, 130, heads=3)
    for more in ({}, {"mask": randn(1, 1, 100, 130)}, {"mask": randn(1, 1, 100, 130) > 0}):
        got = attn_ext.attention(q, k, v, block_mask=mask, return_weights=kind, **more)[1]
        want = attn_ext.reference.weights(q, k, block_mask=mask, **more)
        want = {"full": want, "mean_heads": want.mean(1), "colsum": want.sum(2)}[kind]
        torch.testing.assert_close(got, want)


def test_in_the_modules():
    torch.manual_seed(0)
    x = torch.randn(2, 100, 64)
    mask = random_mask(100, 100, heads=2)
    dense = ~mask.to_dense().repeat(2, 1, 1, 1).flatten(0, 1)  # True = may not attend
    for extra in ({}, {"add_bias_kv": True}):
        module = attn_ext.MultiHeadAttention(64, 2, batch_first=True, **extra)
        got, want = module(x, x, x, block_mask=mask), module(x, x, x, attn_mask=dense)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b)
    layer = attn_ext.SelfAttention(64, 2, causal=True, batch_first=True)
    torch.testing.assert_close(layer(x, block_mask=mask), layer(x, attn_mask=dense))
    layer = attn_ext.CrossAttention(64, 2, batch_first=True)
    torch.testing.assert_close(layer(x, x, block_mask=mask), layer(x, x, attn_mask=dense))


def test_no_matrix_of_scores_is_made():
    # 2^17 queries and keys: a dense mask alone would take 16 GiB
    n = 1 << 17
    blocks = torch.zeros(1, 1, n // 64, n // 64, dtype=torch.int32)
    blocks[0, 0].fill_diagonal_(1)
    tiles = torch.tensor([0, -1])[:, None].repeat(1, 64)
    q, k, v = qkv(1, 1, n, n, 8, dtype=torch.float32)
    out = attn_ext.attention(q, k, v, block_mask=BlockMask(blocks, tiles, n, n))
    want = attn_ext.attention(*(t.view(-1, 1, 64, 8) for t in (q, k, v))).view(q.shape)
    torch.testing.assert_close(out, want)


class TestErrors:
    def call(self, block_mask, **options):
        q, k, v = qkv(2, 4, 100, 70, 8)
        return attn_ext.attention(q, k, v, block_mask=block_mask, **options)

    def test_a_tensor(self):
        with pytest.raises(TypeError, match=r"block_mask must be an attn_ext\.masks.BlockMask, got Tensor"):
            self.call(torch.ones(100, 70, dtype=torch.bool))

    def test_flex_attentions(self):
        from torch.nn.attention.flex_attention import create_block_mask

        mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 100, 70, device="cpu")
        with pytest.raises(TypeError, match="from_predicate takes the mask_mod"):
            self.call(mask)

    @pytest.mark.parametrize("shape", [(1, 1, 100, 71), (1, 1, 99, 70), (3, 1, 100, 70), (1, 2, 100, 70)])
    def test_another_shape(self, shape):
        batch, heads, len_q, len_k = shape
        with pytest.raises(
            ValueError, match=r"block_mask must be made for .* = \(2, 4, 100, 70\), got one for"
        ):
            self.call(random_mask(len_q, len_k, batch, heads))

    def test_another_device(self):
        with pytest.raises(TypeError, match="block_mask must be on the device of q, cpu, got meta"):
            self.call(random_mask(100, 70).to("meta"))

    def test_the_op_itself(self):
        q, k, v = qkv(2, 4, 100, 70, 8)
        mask = random_mask(100, 70)
        call = torch.ops.attn_ext.attention_forward
        for wrong in (
            {"block_map": mask.map},
            {"block_map": mask.map.long(), "block_tiles": mask.tiles},
            {"block_map": mask.map[:, :, :1], "block_tiles": mask.tiles},
            {"block_map": mask.map.expand(3, -1, -1, -1), "block_tiles": mask.tiles},
            {"block_map": mask.map, "block_tiles": mask.tiles[:1]},
            {"block_map": mask.map, "block_tiles": mask.tiles[:, :63]},
            {"block_map": mask.map, "block_tiles": mask.tiles.int()},
        ):
            with pytest.raises(RuntimeError, match=r"attn_ext: .*block_(map|tiles)"):
                call(q, k, v, **wrong)
        # entries that name no tile hide, whatever lies beyond the tiles in memory
        broken = torch.where(mask.map == 0, torch.tensor(1 << 30, dtype=torch.int32), mask.map)
        out = call(q, k, v, 0.5, block_map=broken, block_tiles=mask.tiles)[0]
        assert torch.equal(out, call(q, k, v, 0.5, block_map=mask.map, block_tiles=mask.tiles)[0])


def test_the_ops_rules():
    q, k, v = (t.requires_grad_() for t in qkv(1, 2, 70, 66, 4))
    mask = random_mask(70, 66)
    kwargs = {"block_map": mask.map, "block_tiles": mask.tiles}
    torch.library.opcheck(torch.ops.attn_ext.attention_forward.default, (q, k, v), kwargs)
