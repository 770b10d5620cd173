"""A data set for test_training.py: a module of its own, which a spawned worker can import."""

import torch

import attn_ext


class Attended(torch.utils.data.Dataset):
    """A data set that computes attention in the loader's workers."""

    def __len__(self):
        return 4

    def __getitem__(self, n):
        torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
        x = torch.full((1, 2, 33, 8), float(n)) + torch.arange(8)
        return attn_ext.attention(x, x.flip(-1), x, causal=True)
