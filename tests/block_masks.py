"""Block masks made of a map by hand, for the tests of the CUDA kernels."""

import torch

from attn_ext.masks import BlockMask


def mask_of(blocks, len_q, len_k):
    """blocks (B or 1, H or 1, query and key blocks): 0 hidden, 1 full, 2 and 3 with a third of the keys"""
    tiles = torch.ones(4, 64, 64, dtype=torch.bool)
    tiles[0] = False
    tiles[2:] = torch.rand(2, 64, 64, generator=torch.Generator().manual_seed(1)) < 1 / 3
    words = (tiles.long() << torch.arange(64)).sum(2)
    return BlockMask(torch.as_tensor(blocks, dtype=torch.int32), words, len_q, len_k)
