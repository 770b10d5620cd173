"""vmap: the samples of a vmapped call become further batch elements, or further heads, of one call.

    batch    (V, B, H, N, D) -> (V * B, H, N, D)    the usual way
    heads    (V, B, H, N, D) -> (B, V * H, N, D)    where sinks, which a head has but a batch element has not,
                                                    differ from sample to sample
    loop     one call a sample                      with dropout, whose random numbers depend on an element's
                                                    place, for sinks and lengths that both differ, and for
                                                    block masks with tiles that differ

A tensor that all samples share is repeated in memory where it has a batch axis (a head axis), and stays as it
is where it has none.
"""

from typing import NamedTuple

import torch

# What the tensors among an op's arguments and results are; None: not a tensor.
HEADS = "heads"  # (B, H, N, D) or (B, H, N)
SCORES = "scores"  # broadcasts to (B, H, Nq, Nk), each axis of full size or 1
SLOPES = "slopes"  # (H,) or (B, H)
SINKS = "sinks"  # (H,)
LENGTHS = "lengths"  # (B,)
RANDOM = "random"  # (2,), the state of dropout
TILES = "tiles"  # (T, 64) of a block mask, which all batch elements and heads share; its map is a score term

NUMBERS = (None,) * 6
TENSORS = (SCORES, SCORES, SCORES, SLOPES, SINKS, LENGTHS, LENGTHS, RANDOM, SCORES, TILES)
INPUTS = (HEADS, HEADS, HEADS, SCORES, SCORES, SLOPES, SINKS)  # what has derivatives


class Signature(NamedTuple):
    """What an op's arguments and results are, by position."""

    arguments: tuple
    results: tuple
    like: tuple = ()  # the argument whose shape the n-th result has, where there is one
    q: int = 0


FORWARD = Signature((*(HEADS,) * 3, *NUMBERS, *TENSORS, None), (HEADS,) * 3)
BACKWARD = Signature((*(HEADS,) * 7, None, *NUMBERS, *TENSORS, None), INPUTS, (2, 3, 4, 14, 15, 17, 18), q=2)
TANGENTS = Signature((*(HEADS,) * 5, *INPUTS, *NUMBERS, *TENSORS, None), (HEADS,) * 2)


def call(function, signature, info, in_dims, args, own=()):
    """(results, the axis of each along which the samples lie) of a vmapped function(*args).

    own: positions of arguments of which each sample needs one of its own, also where all share it: a result
    has its shape, or another argument, which differs, must have it too.
    """
    size, kinds = info.batch_size, signature.arguments
    mapped = [axis is not None for axis in in_dims]
    args = [t.movedim(axis, 0) if axis is not None else t for t, axis in zip(args, in_dims, strict=True)]
    own = {n for n in own if args[n] is not None}
    differ = {kinds[n] for n, m in enumerate(mapped) if m or n in own}
    drops = args[kinds.index(RANDOM)] is not None
    if size > 0 and (drops or {SINKS, LENGTHS} <= differ or TILES in differ):
        return _loop(function, size, args, mapped)
    if drops:  # no sample, no random number
        args[kinds.index(RANDOM)] = torch.zeros(2, dtype=torch.int64, device=args[signature.q].device)
    samples = [_Samples(t, m, size) if k is not None and t is not None else None
               for k, t, m in zip(kinds, args, mapped, strict=True)]  # fmt: skip
    batch, heads = samples[signature.q].shape[:2]
    fold = (_Heads if SINKS in differ else _Batch)(size, batch, heads)
    folded = [
        t if s is None or k in (RANDOM, TILES) else fold.put(k, s, m or n in own)
        for n, (k, t, s, m) in enumerate(zip(kinds, args, samples, mapped, strict=True))
    ]
    results, axes = [], []
    for n, t in enumerate(function(*folded)):
        like = signature.like[n] if signature.like else None
        if like is not None and like not in own:  # not asked for
            results.append(t)
            axes.append(None)
            continue
        t, axis = fold.take(signature.results[n], t, None if like is None else samples[like].shape)
        results.append(t)
        axes.append(axis)
    return tuple(results), tuple(axes)


class _Samples:
    """A tensor of all samples, (V, *shape), which those that share it only seem to have."""

    def __init__(self, t, mapped, size):
        self.shared = None if mapped else t
        self.shape = t.shape[1:] if mapped else t.shape
        self.all = t if mapped else t.expand(size, *t.shape)


class _Batch(NamedTuple):
    """Samples as batch elements."""

    samples: int
    batch: int
    heads: int

    def put(self, kind, t, own):
        x = t.all
        if kind == SINKS or (
            not own and ((kind == SCORES and t.shape[0] == 1) or (kind == SLOPES and len(t.shape) == 1))
        ):
            return t.shared  # has no batch axis
        if kind == SCORES:
            x = x.expand(-1, self.batch, -1, -1, -1)
        if kind == SLOPES and len(t.shape) == 1:
            x = x[:, None].expand(-1, self.batch, -1)
        return x.flatten(0, 1)

    def take(self, kind, t, shape):
        t = t.unflatten(0, (self.samples, self.batch))
        if kind == SCORES and shape[0] != self.batch:
            t = t.sum(1, keepdim=True)
        if kind == SLOPES and len(shape) == 1:
            t = t.sum(1)
        return t, 0


class _Heads(NamedTuple):
    """Samples as heads."""

    samples: int
    batch: int
    heads: int

    def put(self, kind, t, own):
        x = t.all
        if kind == LENGTHS or (kind == SCORES and t.shape[1] == 1 and not own):
            return t.shared  # has no head axis
        if kind == SCORES:
            x = x.expand(-1, -1, self.heads, -1, -1)
        if len(t.shape) == 1:  # slopes or sinks
            return x.flatten(0, 1)
        return x.movedim(0, 1).flatten(1, 2)

    def take(self, kind, t, shape):
        if t.dim() == 1:  # slopes or sinks
            return t.unflatten(0, (self.samples, self.heads)), 0
        t = t.unflatten(1, (self.samples, t.shape[1] // max(1, self.samples)))
        if kind == SCORES and shape[1] != self.heads:
            t = t.sum(2, keepdim=True)
        return t, 1


def _loop(function, size, args, mapped):
    calls = [function(*(t[n] if m else t for t, m in zip(args, mapped, strict=True))) for n in range(size)]
    results = tuple(None if r[0] is None else torch.stack(r) for r in zip(*calls, strict=True))
    return results, tuple(None if r is None else 0 for r in results)
