"""Tiles: the visibility of 64 x 64 scores as 64 words. Word i belongs to query i, its bit j to key j.

Block masks are built in two steps. Candidates are tiles in any number, alike or not, whose bits beyond the
lengths may be anything; an index says which candidate each block has. `canonical` makes of both the map and
the tiles that :class:`attn_ext.masks.BlockMask` stands for.
"""

import torch
import torch.nn.functional as F

SIZE = 64  # queries and keys of a block: a row is one word, and kernels' tiles are multiples or halves of it
CHUNK = 1024  # blocks that are looked at together: 4 M scores, 32 MiB where a predicate computes in int64
HIDDEN, FULL = 0, 1  # entries of a map, and the first two tiles
PARTIAL = 2  # the first entry that names a tile of its own

# A word's eight bytes, each 0 or 1, times this have them as the bits of their product's highest byte.
_GATHER_BITS = 0x0102040810204080


def block_count(length):
    return -(-length // SIZE)


def pack(bits):
    """bool (..., 64) -> int64 (...): element j is bit j."""
    words = bits.contiguous().view(torch.int64) * _GATHER_BITS >> 56
    return words.to(torch.uint8).view(torch.int64).squeeze(-1)


def unpack(words):
    """int64 (...) -> bool (..., 64)."""
    octets = words.contiguous().unsqueeze(-1).view(torch.uint8).unsqueeze(-1)
    bits = octets >> torch.arange(8, dtype=torch.uint8, device=words.device) & 1
    return bits.flatten(-2).bool()


class Collector:
    """Candidates as they come, equal ones of one call kept once. Candidates 0 and 1 are zeros and ones."""

    def __init__(self, device):
        self._tiles = [torch.tensor([[0], [-1]], device=device).expand(2, SIZE)]
        self._count = 2

    def add(self, tiles):
        """Indices (M,) of the candidates that tiles (M, 64) have become."""
        index, distinct = _numbered(tiles, torch.tensor(-1, device=tiles.device))
        index[index >= PARTIAL] += self._count - PARTIAL
        self._tiles.append(distinct)
        self._count += len(distinct)
        return index

    def candidates(self):
        return torch.cat(self._tiles)


def canonical(index, candidates, len_q, len_k):
    """(map, tiles) of a block mask: index (B, H, query blocks, key blocks) names candidates (M, 64).

    Bits beyond the lengths are cleared, a block without visible keys has entry 0, one that is visible as far
    as the lengths go entry 1, and equal tiles are one, in ascending order: equal masks are equal tensors.
    """
    places, inside = _edges(len_q, len_k, index.device)
    pairs, inverse = (index.long() * len(inside) + places).unique(return_inverse=True)
    candidate, place = pairs // len(inside), pairs % len(inside)
    entries, distinct = _numbered(candidates[candidate] & inside[place], inside[place])
    ends = torch.tensor([[0], [-1]], device=index.device).expand(2, SIZE)
    return entries.int()[inverse], torch.cat([ends, distinct])


def _numbered(tiles, full):
    """Entries (M,) of tiles (M, 64), and the partial ones among them, sorted, each once."""
    is_full = (tiles == full).all(-1)
    partial = (tiles != 0).any(-1) & ~is_full
    distinct, inverse = tiles[partial].unique(dim=0, return_inverse=True)
    entries = is_full.long()
    entries[partial] = PARTIAL + inverse
    return entries, distinct


def _edges(len_q, len_k, device):
    """At which edges each block lies (query blocks, key blocks), and the bits inside the lengths (4, 64).

    Place 1 is the last query block, 2 the last key block, 3 both.
    """
    places = torch.zeros(block_count(len_q), block_count(len_k), dtype=torch.int64, device=device)
    places[-1:] += 1
    places[:, -1:] += 2
    rows, keys = torch.ones(2, 4, SIZE, dtype=torch.bool, device=device)
    rows[1::2, (len_q - 1) % SIZE + 1 :] = False
    keys[2:, (len_k - 1) % SIZE + 1 :] = False
    return places, rows * pack(keys)[:, None]


def padded(t, length, value=False):
    """t (..., N), filled up at its end to whole blocks: (..., blocks, 64)."""
    filled = F.pad(t, (0, block_count(length) * SIZE - length), value=value)
    return filled.unflatten(-1, (block_count(length), SIZE))
