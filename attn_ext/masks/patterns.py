"""Sparse patterns from the literature. Each is a BlockMask, built from rules for whole blocks and diagonals.

Lengths are those of self-attention: query i and key i are the same position. Patterns are joined by ``&``,
``|`` and ``~``: ``longformer(n, 512, [0]) & causal(n)``.
"""

import functools
import numbers
import operator

import torch

from ..arguments import ArgumentValueError, window_sides
from . import tiles as _tiles
from .block_mask import BlockMask
from .inputs import as_integers, as_tensor, check_int, check_range, with_data
from .tiles import FULL, HIDDEN, SIZE, block_count


def causal(length, *, device=None):
    """Query i sees key j iff j <= i. For joining; alone, attention's causal=True needs no mask."""
    return sliding_window(length, None, 0, device=device)


def sliding_window(length, left, right, *, device=None):
    """Local attention: query i sees key j iff i - left <= j <= i + right.

    Args:
        length: N, queries and keys.
        left, right: keys before and after the query's own; None or -1: all. W keys that end with the query's
            own: (W - 1, 0), as `window` of attn_ext.attention, which needs no mask for this alone.

    Source: Beltagy et al. 2020, Longformer (arXiv 2004.05150), section 3.1.
    """
    left, right = window_sides((left, right), "(left, right)")

    def near(distance):
        visible = torch.ones_like(distance, dtype=torch.bool)
        if left >= 0:
            visible &= distance <= left
        if right >= 0:
            visible &= distance >= -right
        return visible

    return _of_distance(near, length, device)


def sparse_transformer_strided(length, stride, *, part=None, device=None):
    """The strided pattern of Sparse Transformers, causal: the last keys, and every stride-th before them.

        part 1: i - stride <= j <= i        part 2: (i - j) mod stride = 0 and j <= i

    Args:
        length: N.
        stride: l >= 1; the paper takes about sqrt(N), or the width of a picture read row by row.
        part: 1 or 2; None: either ("merged heads", section 5.1, where layers or heads also take turns).

    Source: Child et al. 2019 (arXiv 1904.10509), section 4.3. Part 2 has a pair in every causal block where
    the stride is below 128, and skips nothing then.
    """
    stride = check_int("stride", stride, 1)
    return _parts(
        part,
        lambda: sliding_window(length, stride, 0, device=device),
        lambda: _of_distance(lambda distance: (distance % stride == 0) & (distance >= 0), length, device),
    )


def sparse_transformer_fixed(length, stride, summary=1, *, part=None, device=None):
    """The fixed pattern of Sparse Transformers, causal: one's own block, and the last keys of each block.

        part 1: floor(j / stride) = floor(i / stride)        part 2: j mod stride >= stride - summary
        both with j <= i

    Args:
        length: N.
        stride: l >= 1, the size of a block; the paper takes 128 and 256.
        summary: c in 1 ... l: the positions at each block's end that all later queries see; there 8 to 32.
        part: 1 or 2; None: either.

    Source: Child et al. 2019 (arXiv 1904.10509), section 4.3. Strides up to 64 have a summary in every block
    of keys, and skip nothing.
    """
    length, stride = check_int("length", length, 0), check_int("stride", stride, 1)
    if check_int("summary", summary, 1) > stride:
        raise ArgumentValueError(f"summary must be at most stride, {stride}, got {summary}")
    place = torch.arange(length, device=with_data(device))
    either = _parts(
        part,
        lambda: documents(ids=place // stride),
        lambda: _keys((place % stride >= stride - summary)[None]),
    )
    return either & causal(length, device=device)


def longformer(length, window, global_tokens=(), *, device=None):
    """A sliding window, and tokens that see all and are seen by all: |i - j| <= window / 2, or i or j global.

    Args:
        length: N.
        window: w >= 0, keys beside the query's own, half on each side (512 in the paper).
        global_tokens: positions, a list or tensor of int; or bool (N,), or (B, N) where samples differ.

    For a decoder ``longformer(...) & causal(length)``. Source: Beltagy et al. 2020 (arXiv 2004.05150),
    section 3.1, without its dilated windows and its second set of projections for global tokens.
    """
    length, half = check_int("length", length, 0), check_int("window", window, 0) // 2
    chosen = _chosen("global_tokens", global_tokens, length, device)
    local = sliding_window(length, half, half, device=chosen.device)
    return local | _keys(chosen) | _queries(chosen)


def big_bird(
    length, block_size=64, window_blocks=3, global_blocks=2, random_blocks=3, *, heads=1, seed=0, device=None
):
    """BigBird: blocks near the diagonal, global first blocks, and random ones. With m, n the blocks of i, j:

        |m - n| <= (window_blocks - 1) / 2, or m < global_blocks, or n < global_blocks, or n is one of the
        random_blocks that m drew among its other blocks

    Args:
        length: N; block_size need not divide it.
        block_size, window_blocks (odd), global_blocks, random_blocks: b, w, g and r, the paper's defaults.
        heads: H; each draws its own random blocks.
        seed: of the draw, which depends on nothing else and is the same on every device.

    Source: Zaheer et al. 2020 (arXiv 2007.14062), section 2 (the internal construction, BIGBIRD-ITC) and
    appendix D (blocks). Holds (H, N / b, N / b) numbers while it draws.
    """
    length, size = check_int("length", length, 0), check_int("block_size", block_size, 1)
    heads, count = check_int("heads", heads, 1), check_int("random_blocks", random_blocks, 0)
    near, first = check_int("window_blocks", window_blocks, 1), check_int("global_blocks", global_blocks, 0)
    if near % 2 == 0:
        raise ArgumentValueError(f"window_blocks must be odd, one's own and as many on each side, got {near}")
    place = torch.arange(-(-length // size), device="cpu")
    distance = (place[:, None] - place).abs()
    fixed = (distance <= near // 2) | (place < first) | (place[:, None] < first)
    generator = torch.Generator().manual_seed(check_int("seed", seed, 0))
    lots = torch.rand((heads, *fixed.shape), generator=generator, device="cpu")
    # the largest are drawn; where fewer blocks than that are left, fixed ones, which changes nothing
    drawn = lots.masked_fill_(fixed, -1.0).topk(min(count, len(place))).indices
    grid = fixed.repeat(heads, 1, 1).scatter_(-1, drawn, True)
    return BlockMask.from_blocks(grid, length, length, size, device=with_data(device))


def documents(lengths=None, *, ids=None, causal=False, device=None):
    """Several documents packed one after the other: a token sees those of its own document.

    Args:
        lengths: (documents,), or (B, documents) with equal sums: integers >= 0, a list or tensor.
        ids: (N,) or (B, N) instead: integers that are equal within a document, in any order; negative:
            padding, which neither sees nor is seen.
        causal: also only those before it.

    Of `cu_seqlens`: ``documents(cu_seqlens.diff())``. Source: packing in Krell et al. 2021 (arXiv
    2107.02027), section 3.2.
    """
    if (lengths is None) == (ids is None):
        raise ArgumentValueError("either lengths or ids must be given")
    ids = _of_lengths(lengths, device) if ids is None else as_integers("ids", ids, device)
    length = ids.shape[1]
    place = torch.arange(block_count(length) * SIZE, device=ids.device).clamp(max=length - 1)
    blocks = ids[:, place].unflatten(1, (block_count(length), SIZE))
    least, most = blocks.amin(2), blocks.amax(2)
    apart = (most[:, :, None] < least[:, None]) | (least[:, :, None] > most[:, None])
    apart |= (most[:, :, None] < 0) | (most[:, None] < 0)
    one = (least == most) & (least >= 0)
    alike = one[:, :, None] & one[:, None] & ~apart
    index = torch.where(apart, HIDDEN, torch.where(alike, FULL, -1))[:, None]

    def same(b, h, q_idx, kv_idx):
        return (ids[b, q_idx] == ids[b, kv_idx]) & (ids[b, q_idx] >= 0)

    packed = BlockMask._decided(index, same, length, length)
    return packed & sliding_window(length, None, 0, device=ids.device) if causal else packed


def prefix_lm(length, prefix_lengths, *, device=None):
    """A prefix that all see, causal after it: query i sees key j iff j < prefix or j <= i.

    Args:
        length: N.
        prefix_lengths: an int, or B of them (list or tensor) where samples differ; each in 0 ... N.

    Source: Raffel et al. 2020, T5 (arXiv 1910.10683), section 3.2.1 (after Liu et al. 2018).
    """
    length = check_int("length", length, 0)
    if isinstance(prefix_lengths, numbers.Integral):
        prefix_lengths = [prefix_lengths]
    prefix = as_integers("prefix_lengths", prefix_lengths, device)
    if len(prefix) != 1:
        raise ArgumentValueError(f"prefix_lengths must be an int or B of them, got {tuple(prefix.shape)}")
    check_range("prefix_lengths", prefix, length)
    place = torch.arange(length, device=prefix.device)
    return _keys(place < prefix.view(-1, 1)) | causal(length, device=prefix.device)


# ---- what they are built from ----


def _of_distance(visible, length, device):
    """Where query i sees key j iff visible(i - j): blocks on the same diagonal are alike."""
    count = block_count(check_int("length", length, 0))
    within = torch.arange(SIZE, device=with_data(device))
    distance = within[:, None] - within
    diagonals = torch.arange(-count, count, device=within.device) * SIZE  # one too many: count may be 0
    candidates = torch.cat(
        [_tiles.pack(visible(d[:, None, None] + distance)) for d in diagonals.split(_tiles.CHUNK)]
    )
    block = torch.arange(count, device=within.device)
    return BlockMask._of((block[:, None] - block + count)[None, None], candidates, length, length)


def _keys(chosen):
    """Where all queries see the chosen keys: bool (B, N)."""
    words = _tiles.pack(_tiles.padded(chosen, chosen.shape[1]))  # (B, blocks)
    index = torch.arange(words.numel(), device=words.device).view(*words.shape)[:, None, None]
    return BlockMask._of(
        index.expand(-1, -1, words.shape[1], -1), words.reshape(-1, 1).expand(-1, SIZE), *chosen.shape[1:] * 2
    )


def _queries(chosen):
    """Where the chosen queries see all keys: bool (B, N)."""
    words = -_tiles.padded(chosen, chosen.shape[1]).long()  # (B, blocks, 64)
    count = words.shape[1]
    index = torch.arange(len(words) * count, device=words.device).view(len(words), 1, count, 1)
    return BlockMask._of(index.expand(-1, -1, -1, count), words.view(-1, SIZE), *chosen.shape[1:] * 2)


def _parts(part, *makers):
    """What the maker of this part (1 or 2) makes; None: both joined."""
    if part is not None and (not isinstance(part, int) or part not in (1, 2)):
        raise ArgumentValueError(f"part must be None, 1 or 2, got {part!r}")
    chosen = makers if part is None else makers[part - 1 : part]
    return functools.reduce(operator.or_, (make() for make in chosen))


# ---- arguments ----


def _of_lengths(lengths, device):
    """The ids (B or 1, N) of documents (B or 1, n)."""
    lengths = as_integers("lengths", lengths, device)
    sums = lengths.sum(1).tolist()
    check_range("lengths", lengths, max(sums))
    if len(set(sums)) > 1:
        raise ArgumentValueError(f"lengths must have the same sum for each sample, got {sums}")
    document = torch.arange(lengths.shape[1], device=lengths.device)
    return torch.stack([document.repeat_interleave(sample) for sample in lengths])


def _chosen(name, tokens, length, device):
    """bool (B or 1, N) of positions, or of bool (N,) or (B, N)."""
    tokens = as_tensor(name, tokens, device)
    if tokens.dtype == torch.bool:
        empty_batch = tokens.dim() == 2 and len(tokens) == 0
        if tokens.dim() not in (1, 2) or tokens.shape[-1] != length or empty_batch:
            raise ArgumentValueError(
                f"{name} must be bool ({length},) or (B, {length}), got {tuple(tokens.shape)}"
            )
        return tokens if tokens.dim() == 2 else tokens[None]
    positions = as_integers(name, tokens, device)
    if len(positions) != 1:
        raise ArgumentValueError(f"{name} must be positions (n,) or bool, got {tuple(tokens.shape)}")
    check_range(name, positions, length - 1)
    chosen = torch.zeros(1, length, dtype=torch.bool, device=positions.device)
    return chosen.index_fill_(1, positions[0], True)
