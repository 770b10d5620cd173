"""BlockMask: which keys queries may attend to, known for whole blocks, so that kernels skip hidden ones."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
import torch.utils._pytree as _pytree

from ..arguments import ArgumentTypeError, ArgumentValueError
from . import tiles as _tiles
from .inputs import as_grid, call_predicate, check_int, with_data
from .tiles import FULL, HIDDEN, SIZE, block_count

PICTURE = (20, 40)  # most lines and characters of a printed mask: a character is twice as tall as wide
SHADES = "·▒█"  # hidden, partial, full


class BlockCounts(NamedTuple):
    """Blocks of a mask, over its batch and heads. The cost of attention is that of the visible ones."""

    total: int
    visible: int
    full: int
    partial: int


class BlockMask:
    """Which keys each query may attend to, in blocks of 64 x 64 scores: hidden, full, or a tile of bits.

    Made from a predicate, a dense mask or a grid of blocks, or by the functions of :mod:`attn_ext.masks`;
    joined by ``&``, ``|`` and ``~``, over batch and heads as tensors broadcast. It is made once and used in
    many calls: ``attn_ext.attention(q, k, v, block_mask=mask)`` skips the hidden blocks, looks at no bits in
    full ones, and gives what ``mask=mask.to_dense()`` gives, at a cost proportional to the visible blocks.

    Attributes:
        map: int32 (B or 1, H or 1, query blocks, key blocks): 0 hidden, 1 full, n >= 2: the block is tile n.
        tiles: int64 (T, 64), T >= 2: bit j of word i is set iff query i of the block sees key j of it. Tiles
            0 and 1 are all zeros and all ones. Equal tiles are there once, so repeating patterns are small.
        len_q, len_k: the queries and keys that it is for. They need not be multiples of 64.

    Neither tensor is to be written to. Pickling, torch.save, copying and torch.compile work. To torch it is a
    pytree of the two: torch.export and torch.func.vmap take it as an argument.
    """

    def __init__(self, map, tiles, len_q, len_k):
        """Of tensors as described above; the constructors `from_...` make them. Entries are not looked at."""
        len_q, len_k = check_int("len_q", len_q, 0), check_int("len_k", len_k, 0)
        blocks = block_count(len_q), block_count(len_k)
        for name, t, dtype in (("map", map, torch.int32), ("tiles", tiles, torch.int64)):
            if not isinstance(t, torch.Tensor) or t.dtype != dtype:
                got = t.dtype if isinstance(t, torch.Tensor) else type(t).__name__
                raise ArgumentTypeError(f"{name} must be a tensor of {dtype}, got {got}")
        if map.dim() != 4 or map.shape[2:] != blocks:
            raise ArgumentValueError(
                f"map must be (B or 1, H or 1, {blocks[0]}, {blocks[1]}), got {tuple(map.shape)}"
            )
        if tiles.dim() != 2 or tiles.shape[1] != SIZE or len(tiles) < 2:
            raise ArgumentValueError(f"tiles must be (T >= 2, {SIZE}), got {tuple(tiles.shape)}")
        if map.device != tiles.device:
            raise ArgumentTypeError(
                f"map and tiles must be on the same device, got {map.device} and {tiles.device}"
            )
        if not torch.compiler.is_compiling() and map.is_inference():
            with torch.inference_mode(False):  # it is made once, and may serve in training, too
                map, tiles = map.clone(), tiles.clone()
        self.map, self.tiles, self.len_q, self.len_k = map, tiles, len_q, len_k

    # ---- constructors ----

    @classmethod
    def from_predicate(cls, mask_mod, len_q, len_k, *, batch=1, heads=1, device=None):
        """The mask of a function, as torch's flex_attention takes it.

        Args:
            mask_mod: mask_mod(b, h, q_idx, kv_idx) -> bool tensor, True = may attend. It is called for a few
                blocks at a time with int64 tensors that broadcast against each other, so it must work element
                by element: ``&``, ``|``, ``~`` and torch.where, no ``and``, ``or``, ``not`` and ``if``; other
                tensors are indexed by all indices at once, ``ids[b, q_idx]``. Their values are read now; the
                mask does not follow later changes.
            len_q, len_k: queries and keys.
            batch, heads: how many samples and heads differ; 1 where all are the same.
            device: where the indices are and the mask will be; default: torch's.

        Costs one evaluation for every score, in pieces of 4 M. A grid of blocks, a composition of the
        patterns or both joined by ``&`` is faster for long sequences.

        Raises:
            TypeError, ValueError: mask_mod fails on such tensors, or returns something else.
        """
        blocks = block_count(check_int("len_q", len_q, 0)), block_count(check_int("len_k", len_k, 0))
        shape = check_int("batch", batch, 1), check_int("heads", heads, 1), *blocks
        undecided = torch.full(shape, -1, device=with_data(device))
        return cls._decided(undecided, mask_mod, len_q, len_k)

    @classmethod
    def from_dense(cls, mask):
        """Of a boolean mask, True = may attend: (Nq, Nk), (H, Nq, Nk) or (B, H, Nq, Nk)."""
        if not isinstance(mask, torch.Tensor) or mask.dtype != torch.bool:
            got = mask.dtype if isinstance(mask, torch.Tensor) else type(mask).__name__
            raise ArgumentTypeError(f"mask must be a bool tensor, True = may attend, got {got}")
        if mask.dim() not in (2, 3, 4):
            raise ArgumentValueError(
                f"mask must be (Nq, Nk), (H, Nq, Nk) or (B, H, Nq, Nk), got {tuple(mask.shape)}"
            )
        mask = mask[(None,) * (4 - mask.dim())]
        batch, heads, len_q, len_k = mask.shape
        collector = _tiles.Collector(with_data(mask.device))
        rows = []
        for strip in mask.split(SIZE, 2):
            words = _tiles.pack(_tiles.padded(strip, len_k))  # (B, H, <= 64, key blocks)
            words = F.pad(words, (0, 0, 0, SIZE - words.shape[2])).transpose(2, 3)
            rows.append(collector.add(words.reshape(-1, SIZE)).view(batch, heads, 1, words.shape[2]))
        shape = batch, heads, block_count(len_q), block_count(len_k)
        index = torch.cat(rows, 2) if 0 not in shape else torch.zeros(shape, device=mask.device)
        return cls._of(index, collector.candidates(), len_q, len_k)

    @classmethod
    def from_blocks(cls, blocks, len_q, len_k, block_size=SIZE, *, device=None):
        """Of blocks of any size, which need not divide the lengths.

        Args:
            blocks: bool (R, C), (H, R, C) or (B, H, R, C), a tensor or lists: whether the block of queries
                ``r * block_size ...`` and keys ``c * block_size ...`` is visible. R = ceil(len_q /
                block_size), C = ceil(len_k / block_size). Or integers (n, 2): pairs (r, c) of visible blocks.
            len_q, len_k: queries and keys.
            block_size: one size, or that of queries and of keys.
            device: of the mask; default: that of blocks, or torch's.
        """
        len_q, len_k = check_int("len_q", len_q, 0), check_int("len_k", len_k, 0)
        sizes = block_size if isinstance(block_size, (tuple, list)) else (block_size, block_size)
        if len(sizes) != 2:
            raise ArgumentValueError(
                f"block_size must be an int or a pair (of queries, of keys), got {block_size!r}"
            )
        size_q, size_k = (check_int("block_size", n, 1) for n in sizes)
        grid = as_grid(blocks, -(-len_q // size_q), -(-len_k // size_k), device)

        # Of the grid's cells that a block of ours touches, all, none or some are visible: counted by
        # differences of the sums over all cells before a row and a column.
        sums = F.pad(grid.long().cumsum(2).cumsum(3), (1, 0, 1, 0))
        first_q, end_q = _cells(len_q, size_q, grid.device)
        first_k, end_k = _cells(len_k, size_k, grid.device)
        right, left = (sums[:, :, :, k] for k in (end_k, first_k))
        seen = right[:, :, end_q] - right[:, :, first_q] - left[:, :, end_q] + left[:, :, first_q]
        cells = (end_q - first_q)[:, None] * (end_k - first_k)
        index = torch.where(seen == 0, HIDDEN, torch.where(seen == cells, FULL, -1))

        def in_grid(b, h, q_idx, kv_idx):
            return grid[b, h, q_idx // size_q, kv_idx // size_k]

        return cls._decided(index, in_grid, len_q, len_k)

    @classmethod
    def _of(cls, index, candidates, len_q, len_k):
        return cls(*_tiles.canonical(index, candidates, len_q, len_k), len_q, len_k)

    @classmethod
    def _decided(cls, index, mask_mod, len_q, len_k):
        """Of blocks (B, H, query blocks, key blocks) that are HIDDEN, FULL or -1: mask_mod decides those."""
        collector = _tiles.Collector(index.device)
        for blocks in (index < 0).nonzero().split(_tiles.CHUNK):
            # a copy: a predicate may write to its indices, `h //= 4`
            b, h, query_block, key_block = (n.view(-1, 1, 1) for n in blocks.clone().unbind(1))
            within = torch.arange(SIZE, device=index.device)
            # indices beyond the lengths repeat the last one: a predicate may use them to index
            q_idx = (query_block * SIZE + within[:, None]).clamp(max=len_q - 1)
            kv_idx = (key_block * SIZE + within).clamp(max=len_k - 1)
            visible = call_predicate(mask_mod, b, h, q_idx, kv_idx).expand(len(blocks), SIZE, SIZE)
            index[tuple(blocks.unbind(1))] = collector.add(_tiles.pack(visible))
        return cls._of(index, collector.candidates(), len_q, len_k)

    # ---- what it is ----

    @property
    def shape(self):
        """(B or 1, H or 1, Nq, Nk)"""
        return torch.Size((*self.map.shape[:2], self.len_q, self.len_k))

    @property
    def device(self):
        return self.map.device

    def counts(self):
        """:class:`BlockCounts`. On a GPU this waits for it."""
        full, visible = (self.map == FULL).sum().item(), (self.map != HIDDEN).sum().item()
        return BlockCounts(self.map.numel(), visible, full, visible - full)

    def visible_fraction(self):
        """Visible blocks in all blocks: what attention costs beside that without a mask. Waits for a GPU."""
        counts = self.counts()
        return counts.visible / max(counts.total, 1)

    def to_dense(self, first_query=0, num_queries=None):
        """bool (B or 1, H or 1, Nq, Nk), True = may attend: `mask` of attn_ext.attention.

        Of num_queries queries from first_query on; None: of all that follow.
        """
        if num_queries is None:
            num_queries = self.len_q - first_query
        if first_query < 0 or num_queries < 0 or first_query + num_queries > self.len_q:
            raise ArgumentValueError(
                f"first_query and num_queries must lie within the {self.len_q} queries, got {first_query} "
                f"and {num_queries}"
            )
        first, begin = divmod(first_query, SIZE)
        rows = self.map[:, :, first : block_count(first_query + num_queries)]
        scores = _tiles.unpack(self.tiles[rows])  # (B, H, query blocks, key blocks, 64, 64)
        scores = scores.transpose(3, 4).flatten(4, 5).flatten(2, 3)
        return scores[:, :, begin : begin + num_queries, : self.len_k]

    def to(self, device):
        """On another device; itself where it is there already."""
        map, tiles = self.map.to(device), self.tiles.to(device)
        return self if map is self.map else BlockMask(map, tiles, self.len_q, self.len_k)

    def __repr__(self):
        if self.device.type == "meta":
            return f"BlockMask(shape={tuple(self.shape)}, device='meta')"
        counts = self.counts()
        full, partial, hidden = (
            f"{100 * n / max(counts.total, 1):.3g} %"
            for n in (counts.full, counts.partial, counts.total - counts.visible)
        )
        return (
            f"BlockMask(shape={tuple(self.shape)}, device='{self.device}', {counts.total} blocks: "
            f"{full} full, {partial} partial, {hidden} hidden)"
        )

    def __str__(self):
        """With a picture of the first sample's first head: █ full, ▒ partial, · hidden."""
        if self.device.type == "meta" or 0 in self.map.shape:
            return repr(self)
        blocks = self.map[:1, 0]
        size = [min(n, most) for n, most in zip(blocks.shape[1:], PICTURE, strict=True)]
        some, all_full = (
            F.adaptive_avg_pool2d(which.float(), size)[0] for which in (blocks != HIDDEN, blocks == FULL)
        )
        shades = (some > 0).int() + (all_full == 1).int()
        lines = ("".join(SHADES[n] for n in row) for row in shades.tolist())
        return "\n".join((repr(self), *lines))

    def plot(self, **options):
        """A picture in three shades: :func:`attn_ext.viz.plot_mask`, which the options go to."""
        from ..viz import plot_mask

        return plot_mask(self, **options)

    # ---- composition ----

    def __and__(self, other):
        return self._with(other, "&", torch.bitwise_and)

    def __or__(self, other):
        return self._with(other, "|", torch.bitwise_or)

    def __invert__(self):
        return BlockMask._of(self.map, ~self.tiles, self.len_q, self.len_k)

    def _with(self, other, symbol, operation):
        if not isinstance(other, BlockMask):
            return NotImplemented
        if (self.len_q, self.len_k) != (other.len_q, other.len_k):
            raise ArgumentValueError(
                f"block masks joined by {symbol} must be for the same lengths, got "
                f"{(self.len_q, self.len_k)} and {(other.len_q, other.len_k)}"
            )
        if self.device != other.device:
            raise ArgumentTypeError(
                f"block masks joined by {symbol} must be on the same device, got {self.device} and "
                f"{other.device}"
            )
        for n, name in enumerate(("batch", "heads")):
            sizes = self.map.shape[n], other.map.shape[n]
            if sizes[0] != sizes[1] and 1 not in sizes:
                raise ArgumentValueError(
                    f"block masks joined by {symbol} must have the same {name} or 1, got {sizes[0]} and "
                    f"{sizes[1]}"
                )
        pairs, index = (self.map.long() * len(other.tiles) + other.map).unique(return_inverse=True)
        mine, others = self.tiles[pairs // len(other.tiles)], other.tiles[pairs % len(other.tiles)]
        return BlockMask._of(index, operation(mine, others), self.len_q, self.len_k)


def _flatten(mask):
    return [mask.map, mask.tiles], (mask.len_q, mask.len_k)


def _flatten_with_keys(mask):
    tensors, lengths = _flatten(mask)
    keys = (_pytree.GetAttrKey("map"), _pytree.GetAttrKey("tiles"))
    return list(zip(keys, tensors, strict=True)), lengths


def _unflatten(values, lengths):
    mask = BlockMask.__new__(BlockMask)  # unchecked: on their way through torch the tensors may be anything
    (mask.map, mask.tiles), (mask.len_q, mask.len_k) = values, lengths
    return mask


_pytree.register_pytree_node(
    BlockMask, _flatten, _unflatten, flatten_with_keys_fn=_flatten_with_keys,
    serialized_type_name="attn_ext.masks.BlockMask", to_dumpable_context=list, from_dumpable_context=tuple,
)  # fmt: skip
torch.serialization.add_safe_globals([BlockMask])  # torch.load reads it, as it reads tensors


def _cells(length, size, device):
    """The first and the end of the cells of a size that each block of 64 positions touches."""
    first = torch.arange(block_count(length), device=device) * SIZE
    return first // size, (first + SIZE - 1).clamp(max=length - 1) // size + 1
