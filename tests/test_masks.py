"""Block masks: constructors and patterns against their dense formulas, composition, copies, printing."""

import copy
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import attn_ext
from attn_ext import masks
from attn_ext.masks import BlockMask

LENGTHS = [0, 1, 63, 64, 65, 200]


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def random_mask(*shape, seed=0):
    """bool with hidden, full and partial blocks."""
    coarse = torch.rand(*shape[:-2], 4, 4, generator=generator(seed))
    probability = (coarse * 3 - 1).clamp(0, 1).repeat_interleave(64, -1).repeat_interleave(64, -2)
    return torch.rand(shape, generator=generator(seed + 1)) < probability[..., : shape[-2], : shape[-1]]


def positions(length):
    """i (N, 1) and j (N)"""
    place = torch.arange(length)
    return place[:, None], place


def check(mask, dense):
    """The mask means this, and has the form that kernels rely on."""
    assert mask.to_dense().dtype == torch.bool
    assert torch.equal(mask.to_dense(), dense)
    assert mask.shape == dense.shape
    assert mask.tiles[:2].tolist() == [[0] * 64, [-1] * 64]
    assert mask.map.dtype == torch.int32
    used = mask.map.unique().tolist()
    assert set(range(2, len(mask.tiles))) <= set(used) <= set(range(len(mask.tiles)))
    assert len(mask.tiles.unique(dim=0)) == len(mask.tiles)  # nothing is there twice
    for which, entry in ((dense, 1), (~dense, 0)):  # full and hidden blocks are marked as such, at edges too
        filled = torch.nn.functional.pad(
            which, (0, -dense.shape[3] % 64, 0, -dense.shape[2] % 64), value=True
        )
        alike = filled.unflatten(3, (-1, 64)).unflatten(2, (-1, 64)).all(5).all(3)
        assert torch.equal(mask.map == entry, alike)


# ---- constructors ----


@pytest.mark.parametrize("len_q", LENGTHS)
@pytest.mark.parametrize("len_k", LENGTHS)
def test_dense_masks_and_predicates(len_q, len_k):
    dense = random_mask(2, 3, len_q, len_k)
    check(BlockMask.from_dense(dense), dense)
    check(BlockMask.from_dense(dense[1]), dense[1:])
    check(BlockMask.from_dense(dense[1, 2]), dense[1:, 2:])
    check(
        BlockMask.from_predicate(
            lambda b, h, q_idx, kv_idx: dense[b, h, q_idx, kv_idx], len_q, len_k, batch=2, heads=3
        ),
        dense,
    )


def test_predicates_of_flex_attention():
    """Functions as they are written for torch.nn.attention.flex_attention, and its own mask of them."""
    from torch.nn.attention.flex_attention import and_masks, create_mask, noop_mask, or_masks

    ids = torch.randint(0, 3, (2, 200), generator=generator()).sort(1).values
    lengths = torch.tensor([150, 7])

    def causal(b, h, q_idx, kv_idx):
        return q_idx >= kv_idx

    def document(b, h, q_idx, kv_idx):
        return ids[b, q_idx] == ids[b, kv_idx]

    def padding(b, h, q_idx, kv_idx):
        return kv_idx < lengths[b]

    def dilated(b, h, q_idx, kv_idx):
        return torch.where(h == 0, (q_idx - kv_idx) % 3 == 0, q_idx // 7 == kv_idx // 7)

    for mask_mod in (
        causal, document, padding, dilated, noop_mask, and_masks(causal, document),
        or_masks(padding, dilated), lambda b, h, q_idx, kv_idx: q_idx > 100,
    ):  # fmt: skip
        mask = BlockMask.from_predicate(mask_mod, 200, 200, batch=2, heads=2)
        check(mask, create_mask(mask_mod, 2, 2, 200, 200, device="cpu"))


def test_a_predicate_is_asked_for_few_scores_at_a_time():
    asked = []

    def mask_mod(b, h, q_idx, kv_idx):
        asked.append(torch.broadcast_shapes(*(t.shape for t in (b, h, q_idx, kv_idx))).numel())
        assert q_idx.max() < 5000
        assert kv_idx.max() < 3000
        return (q_idx * kv_idx) % 4099 < q_idx  # nearly no two tiles are alike

    mask = BlockMask.from_predicate(mask_mod, 5000, 3000)
    assert len(asked) > 1
    assert max(asked) <= 2**22
    i, j = torch.arange(5000)[:, None], torch.arange(3000)
    check(mask, ((i * j) % 4099 < i)[None, None])


@pytest.mark.parametrize("sizes", [1, 7, 64, 100, 128, (32, 3), [200, 64]])
@pytest.mark.parametrize(("len_q", "len_k"), [(0, 65), (1, 1), (63, 200), (200, 65)])
def test_blocks_of_any_size(sizes, len_q, len_k):
    size_q, size_k = sizes if not isinstance(sizes, int) else (sizes, sizes)
    grid = torch.rand(2, 1, -(-len_q // size_q), -(-len_k // size_k), generator=generator()) < 0.6
    dense = grid.repeat_interleave(size_q, 2).repeat_interleave(size_k, 3)[:, :, :len_q, :len_k]
    check(BlockMask.from_blocks(grid, len_q, len_k, sizes), dense)
    pairs = grid[0, 0].nonzero()
    for same in (pairs, pairs.int(), grid[0, 0], grid[0]) + ((pairs.tolist(),) if len(pairs) else ()):
        check(BlockMask.from_blocks(same, len_q, len_k, sizes), dense[:1])


# ---- patterns, each against its formula ----


@pytest.mark.parametrize("length", LENGTHS)
def test_windows(length):
    i, j = positions(length)
    check(masks.causal(length), (j <= i)[None, None])
    for left, right in [(0, 0), (3, 0), (0, 70), (64, 5), (1000, 1), (63, 64)]:
        check(masks.sliding_window(length, left, right), ((i - left <= j) & (j <= i + right))[None, None])
    check(masks.sliding_window(length, None, 2), (j <= i + 2)[None, None])
    check(masks.sliding_window(length, 2, -1), (j >= i - 2)[None, None])


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("stride", [1, 5, 64, 100])
def test_sparse_transformer(length, stride):
    i, j = positions(length)
    near, far = (j <= i) & (i - j <= stride), (j <= i) & ((i - j) % stride == 0)
    for part, dense in ((1, near), (2, far), (None, near | far)):
        check(masks.sparse_transformer_strided(length, stride, part=part), dense[None, None])
    for summary in {1, stride}:
        own = (j <= i) & (i // stride == j // stride)
        ends = (j <= i) & (j % stride >= stride - summary)
        for part, dense in ((1, own), (2, ends), (None, own | ends)):
            mask = masks.sparse_transformer_fixed(length, stride, summary, part=part)
            check(mask, dense[None, None])


@pytest.mark.parametrize("length", LENGTHS)
def test_longformer(length):
    i, j = positions(length)
    near = (i - j).abs() <= 7
    check(masks.longformer(length, 15), near[None, None])
    chosen = torch.rand(2, length, generator=generator()) < 0.03
    dense = near | chosen[:, :, None] | chosen[:, None]
    check(masks.longformer(length, 14, chosen), dense[:, None])
    for tokens in (chosen[1], chosen[1].nonzero()[:, 0], chosen[1].nonzero()[:, 0].tolist()):
        check(masks.longformer(length, 14, tokens), dense[1:, None])


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("size", [16, 64, 70])
def test_big_bird(length, size):
    options = {"block_size": size, "window_blocks": 3, "global_blocks": 1, "random_blocks": 2}
    mask = masks.big_bird(length, heads=3, seed=1, **options)
    again, other = (masks.big_bird(length, heads=3, seed=seed, **options) for seed in (1, 2))
    i, j = positions(length)
    m, n = i // size, j // size
    fixed = ((m - n).abs() <= 1) | (m == 0) | (n == 0)
    blocks = -(-length // size)
    dense = mask.to_dense()
    assert bool(dense[:, :, fixed].all())
    drawn = (dense & ~fixed)[0, :, ::size, ::size]  # one element of each block stands for it
    fixed_blocks = fixed[::size, ::size]
    check(
        mask,
        fixed | drawn.repeat_interleave(size, 1).repeat_interleave(size, 2)[None, :, :length, :length],
    )
    available = (~fixed_blocks).sum(1)
    assert torch.equal(drawn.sum(2), available.clamp(max=2).expand(3, blocks))
    assert torch.equal(dense, again.to_dense())
    if blocks > 8:  # with many to choose from, heads and seeds differ
        assert not torch.equal(drawn[0], drawn[1])
        assert not torch.equal(dense, other.to_dense())


def test_big_bird_draws_every_block_alike():
    """200 heads of 12 blocks: each block outside the window is drawn about equally often."""
    mask = masks.big_bird(12 * 64, window_blocks=1, global_blocks=0, random_blocks=2, heads=200)
    often = (mask.map[0] == 1).float().mean(0)[~torch.eye(12, dtype=torch.bool)]
    # 2 of 11; a binomial's standard deviation is 0.027, and 132 of them stay within five
    assert (often - 2 / 11).abs().max() < 5 * 0.027


@pytest.mark.parametrize("causal", [False, True])
def test_documents(causal):
    for lengths in ([200], [1, 63, 0, 64, 65, 7], [3] * 66, [], [0]):
        ids = torch.tensor([n for n, count in enumerate(lengths) for _ in range(count)], dtype=torch.int64)
        i, j = positions(len(ids))
        dense = ((ids[:, None] == ids) & ((j <= i) | (not causal)))[None, None]
        check(masks.documents(lengths, causal=causal), dense)
        check(masks.documents(torch.tensor(lengths, dtype=torch.int32), causal=causal), dense)
        check(masks.documents(ids=ids, causal=causal), dense)


def test_documents_of_several_samples():
    lengths = [[100, 30, 70], [64, 64, 72]]
    ids = torch.stack([torch.arange(3).repeat_interleave(torch.tensor(row)) for row in lengths])
    check(masks.documents(lengths), (ids[:, :, None] == ids[:, None])[:, None])
    ids = torch.randint(-1, 4, (2, 200), generator=generator())  # in no order, with padding
    ids[1, 64:192] = torch.tensor([5, -3]).repeat_interleave(64)
    check(masks.documents(ids=ids), ((ids[:, :, None] == ids[:, None]) & (ids >= 0)[:, None])[:, None])


@pytest.mark.parametrize("length", LENGTHS)
def test_prefix_lm(length):
    i, j = positions(length)
    prefix = [0, length // 3, length]
    dense = torch.stack([(j < n) | (j <= i) for n in prefix])[:, None]
    check(masks.prefix_lm(length, prefix), dense)
    check(masks.prefix_lm(length, torch.tensor(prefix)), dense)
    check(masks.prefix_lm(length, prefix[1]), dense[1:2])


# ---- composition ----


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_composition_is_that_of_dense_masks(data):
    lengths = data.draw(st.tuples(*[st.sampled_from([0, 1, 63, 64, 65, 130, 200])] * 2))
    shapes = [data.draw(st.tuples(st.sampled_from([1, 2]), st.sampled_from([1, 3]))) for _ in range(2)]
    a, b = (random_mask(*shape, *lengths, seed=data.draw(st.integers(0, 99))) for shape in shapes)
    x, y = BlockMask.from_dense(a), BlockMask.from_dense(b)
    check(x & y, a & b)
    check(x | y, a | b)
    check(~x, ~a)
    for same, expected in ((~(x & y), ~x | ~y), (x & (x | y), (x | y) & x), (~~x, x)):
        assert torch.equal(same.map, expected.map)  # what means the same is the same
        assert torch.equal(same.tiles, expected.tiles)
    check(x & ~x & y, torch.zeros_like(a & b))
    check(~x | x | y, torch.ones_like(a | b))


@pytest.mark.parametrize("shape", [(0, 2, 70, 70), (2, 0, 70, 70), (0, 1, 0, 5)])
def test_empty_dense_masks(shape):
    assert BlockMask.from_dense(torch.ones(shape, dtype=torch.bool)).shape == shape


def test_a_predicate_may_write_to_its_indices():
    def of_group(b, h, q_idx, kv_idx):
        h //= 2
        return (h == 0) & (q_idx >= kv_idx)

    mask = BlockMask.from_predicate(of_group, 100, 100, heads=4)
    i, j = positions(100)
    check(mask, (torch.arange(4) < 2)[None, :, None, None] & (i >= j))


def test_rows_of_a_dense_mask():
    dense = random_mask(2, 3, 200, 130)
    mask = BlockMask.from_dense(dense)
    for first, count in [(0, 200), (0, 64), (64, 64), (10, 1), (63, 2), (150, 50), (70, 0), (200, 0)]:
        assert torch.equal(mask.to_dense(first, count), dense[:, :, first : first + count])
    assert torch.equal(mask.to_dense(65), dense[:, :, 65:])


def test_patterns_join_over_batch_and_heads():
    heads = torch.rand(4, 1, 1, generator=generator()) < 0.5
    by_head = BlockMask.from_blocks(heads, 100, 100, 100)
    mask = masks.prefix_lm(100, [5, 90]) & (by_head | masks.sliding_window(100, 9, 9))
    i, j = positions(100)
    prefix = torch.stack([(j < n) | (j <= i) for n in (5, 90)])[:, None]
    check(mask, prefix & (heads | ((i - j).abs() <= 9)))


# ---- copies, devices, compilers ----


@pytest.mark.parametrize(
    "copied",
    [copy.copy, copy.deepcopy, lambda mask: pickle.loads(pickle.dumps(mask)), lambda mask: mask.to("cpu")],
)
def test_copies(copied):
    dense = random_mask(2, 1, 70, 200)
    check(copied(BlockMask.from_dense(dense)), dense)


def test_torch_load_and_save(tmp_path):
    dense = random_mask(2, 1, 70, 200)
    mask = BlockMask.from_dense(dense)
    torch.save({"map": mask.map, "tiles": mask.tiles}, tmp_path / "mask.pt")
    check(BlockMask(**torch.load(tmp_path / "mask.pt", weights_only=True), len_q=70, len_k=200), dense)
    torch.save(mask, tmp_path / "mask.pt")
    check(torch.load(tmp_path / "mask.pt", weights_only=True), dense)


def test_masks_made_in_inference_mode_serve_in_training():
    with torch.inference_mode():
        mask = masks.causal(70)
    q = torch.randn(1, 1, 70, 8, generator=generator(), requires_grad=True)
    grad, expected = (
        torch.autograd.grad(attn_ext.attention(q, q, q, **rule).sin().sum(), q)[0]
        for rule in ({"block_mask": mask}, {"mask": mask.to_dense()})
    )
    assert torch.equal(grad, expected)


def test_devices():
    mask = masks.causal(100)
    assert mask.to("cpu") is mask
    meta = mask.to("meta")
    assert (meta.device.type, meta.shape, meta.map.dtype) == ("meta", mask.shape, torch.int32)
    assert repr(meta) == str(meta) == "BlockMask(shape=(1, 1, 100, 100), device='meta')"
    assert meta.to_dense().shape == mask.shape


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu():
    for make in (
        lambda device: masks.longformer(200, 20, [3], device=device) & masks.causal(200, device=device),
        lambda device: masks.documents([20, 180], device=device),
        lambda device: masks.big_bird(200, 16, device=device),
        lambda device: masks.sparse_transformer_fixed(200, 20, 3, device=device),
        lambda device: ~masks.prefix_lm(200, [3, 100], device=device),
        lambda device: BlockMask.from_predicate(lambda b, h, q, k: q % 7 >= k % 5, 200, 100, device=device),
        lambda device: BlockMask.from_dense(random_mask(2, 3, 70, 200).to(device)),
        lambda device: BlockMask.from_blocks([[0, 1]], 200, 200, 50, device=device),
    ):
        mask = make("cuda")
        assert mask.device.type == "cuda"
        check(mask.to("cpu"), make("cpu").to_dense())
        assert torch.equal(mask.to_dense().cpu(), mask.to("cpu").to_dense())


def visible_keys(x, mask):
    """Any function that reads a mask's tensors."""
    return x + (mask.tiles[mask.map] != 0).sum() + mask.len_k


@pytest.mark.compile
@pytest.mark.parametrize("dynamic", [None, True])
def test_compiled_functions_take_masks(dynamic):
    """As an argument, closed over, as a module's attribute; another mask gives another result."""
    x = torch.zeros(3)
    first, second = masks.causal(100), masks.sliding_window(130, 5, 5)
    expected = [visible_keys(x, mask) for mask in (first, second)]
    assert not torch.equal(*expected)
    compiled = torch.compile(visible_keys, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for mask, value in zip((first, second, first), (*expected, expected[0]), strict=True):
        torch.testing.assert_close(compiled(x, mask), value)

    class Module(torch.nn.Module):
        def __init__(self, mask):
            super().__init__()
            self.mask = mask

        def forward(self, x):
            return visible_keys(x, self.mask) + (first.to_dense() & (first | first).to_dense()).sum() * 0

    closed = torch.compile(lambda x: visible_keys(x, second), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(closed(x), expected[1])
    module = torch.compile(Module(second), backend="aot_eager")
    torch.testing.assert_close(module(x), expected[1])


def test_exported_modules_keep_their_mask():
    class Module(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.mask = masks.causal(100)

        def forward(self, x):
            return visible_keys(x, self.mask)

    x = torch.zeros(3)
    exported = torch.export.export(Module(), (x,))
    torch.testing.assert_close(exported.module()(x), Module()(x))


def test_exported_modules_take_masks(tmp_path):
    class Module(torch.nn.Module):
        def forward(self, x, mask):
            return attn_ext.attention(x, x, x, block_mask=mask)

    x = torch.randn(1, 2, 130, 8, generator=generator())
    first, second = masks.causal(130), masks.longformer(130, 6, [70])
    tiles = torch.export.Dim("tiles", min=2, max=1000)
    exported = torch.export.export(
        Module(), (x, first), dynamic_shapes={"x": None, "mask": [None, {0: tiles}]}
    )
    torch.export.save(exported, tmp_path / "module.pt2")
    loaded = torch.export.load(tmp_path / "module.pt2").module()
    for mask in (first, second):
        torch.testing.assert_close(loaded(x, mask), Module()(x, mask))


def test_vmap_over_masks():
    x = torch.randn(1, 2, 130, 8, generator=generator())
    some = [masks.causal(130), ~masks.causal(130)]
    both = torch.utils._pytree.tree_map(lambda *each: torch.stack(each), *some)
    got = torch.func.vmap(lambda mask: attn_ext.attention(x, x, x, block_mask=mask))(both)
    torch.testing.assert_close(
        got, torch.stack([attn_ext.attention(x, x, x, block_mask=mask) for mask in some])
    )


# ---- what it says about itself ----


def test_counts():
    mask = masks.causal(200)  # 4 x 4 blocks: the last one, of 8 queries and keys, is partial as the others
    assert mask.counts() == masks.BlockCounts(total=16, visible=10, full=6, partial=4)
    assert mask.visible_fraction() == 10 / 16
    assert masks.causal(0).visible_fraction() == 0
    assert (mask.len_q, mask.len_k, mask.device) == (200, 200, torch.device("cpu"))


def test_printed():
    mask = masks.causal(200)
    header = (
        "BlockMask(shape=(1, 1, 200, 200), device='cpu', 16 blocks: 37.5 % full, 25 % partial, 37.5 % hidden)"
    )
    assert repr(mask) == header
    assert str(mask).splitlines() == [header, "▒···", "█▒··", "██▒·", "███▒"]
    lines = str(masks.sliding_window(16384, 2000, 0)).splitlines()[1:]
    assert len(lines) == 20
    assert {len(line) for line in lines} == {40}
    assert all(line[2 * n] == "▒" for n, line in enumerate(lines))
    assert lines[19].startswith("·" * 30)
    assert str(masks.causal(0)) == repr(masks.causal(0))
    assert "0 blocks: 0 % full" in repr(masks.causal(0))


def test_attn_ext_has_it():
    assert attn_ext.BlockMask is BlockMask
    assert attn_ext.masks is masks
