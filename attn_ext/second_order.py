"""Derivatives of derivatives: torch differentiates the reference formula, a block of the problem at a time.

Attention falls into blocks: a sample, a KV head with its query heads, a range of queries. Each result is a
sum over blocks (the gradient of k, say) or belongs to one block (the gradient of q), and so do derivatives of
the results. Those of one block come from torch.func over :mod:`attn_ext.reference`, exactly and with every
option, and only that block's scores are in memory: O(N * block) in all.

    gradients   (q, k, v, ..., grad_out, grad_lse)  ->  gradients of q, k, v, ...   as the backward op
    tangents    (q, k, v, ..., and their tangents)  ->  tangents of out and lse     as forward mode

:func:`pull` has the reverse-mode derivative of either, :func:`push` the forward-mode one. Third derivatives
in reverse mode differentiate the whole of a second one, in O(Nq * Nk) memory.
"""

from typing import NamedTuple

import torch

from . import reference
from .masks import BlockMask

# Scores of a block: 2^22 make 32 MiB a copy in float64, of which about ten live at a time.
BLOCK_SCORES = 1 << 22

INPUTS = ("q", "k", "v", "bias", "float_mask", "alibi_slopes", "sinks")  # what has derivatives


class Problem(NamedTuple):
    """What has no derivative, and where in the whole problem this one lies."""

    bool_mask: torch.Tensor | None
    key_lengths: torch.Tensor | None
    query_lengths: torch.Tensor | None
    rng_state: torch.Tensor | None
    block_map: torch.Tensor | None
    block_tiles: torch.Tensor | None
    options: tuple  # autograd.Options
    corner: tuple = (0, 0, 0)  # sample, query head, query
    of_queries: int | None = None

    def attention(self, tensors):
        """{"out", "lse"} of the tensors called INPUTS."""
        float_mask, o = tensors.get("float_mask"), self.options
        mask = self.bool_mask if float_mask is None else float_mask
        blocks = None
        if self.block_map is not None:
            len_q = tensors["q"].shape[2] if self.of_queries is None else self.of_queries
            blocks = BlockMask(self.block_map, self.block_tiles, len_q, tensors["k"].shape[2])
        if float_mask is not None and self.bool_mask is not None:
            mask = float_mask.masked_fill(~self.bool_mask, -torch.inf)
        out, lse = reference.attention(
            tensors["q"], tensors["k"], tensors["v"], mask=mask, bias=tensors.get("bias"), block_mask=blocks,
            alibi_slopes=tensors.get("alibi_slopes"), sinks=tensors.get("sinks"), **o.of_scores(),
            key_lengths=self.key_lengths, query_lengths=self.query_lengths, dropout_p=o.dropout_p,
            rng_state=self.rng_state, corner=self.corner, of_queries=self.of_queries,
        )  # fmt: skip
        # The LSE of a row that sees nothing is -inf, whatever the inputs are.
        return {"out": out, "lse": lse.masked_fill(lse == -torch.inf, 0.0)}


def forward(problem, tensors, results):
    """Those of "out" and "lse" that ``results`` names."""
    both = problem.attention(tensors)
    return {n: both[n] for n in results}


def gradients(problem, tensors, results):
    """The gradients of those INPUTS that ``results`` names, given grad_out, and grad_lse or not."""

    def of_inputs(*inputs):
        return forward(problem, {**tensors, **dict(zip(results, inputs, strict=True))}, given)

    given = [n for n in ("out", "lse") if tensors.get("grad_" + n) is not None]
    _, pull_back = torch.func.vjp(of_inputs, *(tensors[n] for n in results))
    return dict(zip(results, pull_back({n: tensors["grad_" + n] for n in given}), strict=True))


def tangents(problem, tensors, results):
    """The tangents of "out" and "lse", as ``results`` says, given tangent_<name> of some INPUTS."""

    def of_inputs(*inputs):
        return forward(problem, {**tensors, **dict(zip(moving, inputs, strict=True))}, results)

    moving = [n for n in INPUTS if tensors.get("tangent_" + n) is not None]
    return linearized(of_inputs, [tensors[n] for n in moving], [tensors["tangent_" + n] for n in moving])


def pull(function, problem, tensors, wanted, cotangents):
    """{name: gradient} of sum <cotangent, result> for the tensors that ``wanted`` names.

    function: :func:`gradients` or :func:`tangents`; tensors: its arguments by name, None where not given;
    cotangents: those of its results by name, a result without one counting as not used. Differentiable again.
    """
    tensors = {n: t for n, t in tensors.items() if t is not None}
    if not torch.is_grad_enabled():
        return _pull(function, problem, tensors, wanted, cotangents)
    names = (tuple(tensors), tuple(wanted), tuple(cotangents))
    values = (*tensors.values(), *cotangents.values())
    grads = _Pull.apply(function, problem.options, names, *problem[:6], *values)
    return dict(zip(wanted, grads, strict=True))


def push(function, problem, tensors, moving, results):
    """{name: tangent} of those results that ``results`` names; ``moving`` has tangents of tensors."""
    if not moving:
        return {}
    tensors = {n: t for n, t in tensors.items() if t is not None}
    sums = _Sums(tensors)
    with reference.no_autocast(tensors["q"]):
        for block, part, values in _parts(function, problem, tensors, moving, results):
            steps = [block.take(n, t).to(v.dtype) for v, (n, t) in zip(values, moving.items(), strict=True)]
            sums.add(block, linearized(part, values, steps))
    return sums.total()


def linearized(function, primals, tangents):
    """The tangents of function(*primals), {name: tensor}.

    By reverse mode twice: the pull-back is linear, and its own pull-back is what pushes forward.
    torch.func.jvp would refuse to work inside torch.autograd.forward_ad's dual numbers.
    """
    results, pull_back = torch.func.vjp(function, *primals)
    _, push_forward = torch.func.vjp(pull_back, {n: torch.zeros_like(t) for n, t in results.items()})
    return push_forward(tuple(tangents))[0]


def _pull(function, problem, tensors, wanted, cotangents, whole=False):
    sums = _Sums(tensors)
    with reference.no_autocast(tensors["q"]):  # the pull-backs too
        for block, part, values in _parts(function, problem, tensors, wanted, list(cotangents), whole):
            made, pull_back = torch.func.vjp(part, *values)
            given = {n: block.take(n, c).to(made[n].dtype) for n, c in cotangents.items()}
            sums.add(block, dict(zip(wanted, pull_back(given), strict=True)))
    return sums.total()


def _parts(function, problem, tensors, names, results, whole=False):
    """For each block (block, f, values): f(*values) is ``function`` of the block.

    values: the block's parts of the tensors that ``names`` lists, the variables; the others are constants.
    """
    # Half types in float32, which the blocks are summed up in.
    wide = {n: t.to(torch.promote_types(t.dtype, torch.float32)) for n, t in tensors.items()}
    for block in _blocks(tensors, whole):
        part = {n: block.take(n, t) for n, t in wide.items()}
        part_problem = block.problem(problem)

        def of_names(*values, part=part, part_problem=part_problem):
            return function(part_problem, {**part, **dict(zip(names, values, strict=True))}, results)

        yield block, of_names, [part[n] for n in names]


class _Pull(torch.autograd.Function):
    """:func:`pull` without a graph of its blocks; its own derivative takes the whole problem at once."""

    generate_vmap_rule = True

    @staticmethod
    def forward(function, options, names, *tensors):
        fixed, values = tensors[:6], tensors[6:]
        problem = Problem(*fixed, options)
        tensors, cotangents = _named(names, values)
        grads = _pull(function, problem, tensors, names[1], cotangents)
        return tuple(grads[n] for n in names[1])

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.function, ctx.options, ctx.names = inputs[:3]
        ctx.save_for_backward(*inputs[3:])

    @staticmethod
    def backward(ctx, *grads):
        fixed, values = ctx.saved_tensors[:6], ctx.saved_tensors[6:]
        problem = Problem(*fixed, ctx.options)

        def again(*values):
            tensors, cotangents = _named(ctx.names, values)
            made = _pull(ctx.function, problem, tensors, ctx.names[1], cotangents, whole=True)
            return tuple(made[n] for n in ctx.names[1])

        _, pull_back = torch.func.vjp(again, *values)
        return (*(None,) * 9, *pull_back(grads))


def _named(names, values):
    tensors, _, cotangents = names
    return (
        dict(zip(tensors, values[: len(tensors)], strict=True)),
        dict(zip(cotangents, values[len(tensors) :], strict=True)),
    )


def _blocks(tensors, whole=False):
    """Blocks of at most BLOCK_SCORES scores, or of one query: samples, then KV heads, then queries."""
    batch, heads_q, len_q, _ = tensors["q"].shape
    heads_kv, len_k = tensors["k"].shape[1:3]
    group = heads_q // heads_kv if heads_kv else 1
    room = max(1, BLOCK_SCORES // max(1, group * len_k))  # rows of a KV head and its query heads
    rows = min(max(1, len_q), room)
    heads = min(max(1, heads_kv), max(1, room // rows)) if rows == len_q else 1
    samples = min(max(1, batch), max(1, room // (rows * heads))) if heads == heads_kv else 1
    if whole or batch * heads_q * len_q * len_k == 0:
        rows, heads, samples = max(1, len_q), max(1, heads_kv), max(1, batch)
    for b in range(0, max(1, batch), samples):
        for h in range(0, max(1, heads_kv), heads):
            for i in range(0, max(1, len_q), rows):
                yield _Block(
                    slice(b, b + samples), slice(h, h + heads), slice(h * group, (h + heads) * group),
                    slice(i, i + rows), len_q,
                )  # fmt: skip


class _Block(NamedTuple):
    batch: slice
    heads_kv: slice
    heads_q: slice
    rows: slice
    of_queries: int

    def axes(self, name, t):
        """{axis: slice}: where tensors of this name and shape are cut."""
        name = name.removeprefix("tangent_")
        if name in ("k", "v"):
            return {0: self.batch, 1: self.heads_kv}
        if name == "block_map":  # whose rows are blocks of queries: all of them stay
            return {axis: cut for axis, cut in enumerate((self.batch, self.heads_q)) if t.shape[axis] > 1}
        if name in ("bias", "float_mask", "bool_mask"):
            cuts = {0: self.batch, 1: self.heads_q, 2: self.rows}
            return {axis: cut for axis, cut in cuts.items() if t.shape[axis] > 1}
        if name in ("alibi_slopes", "sinks"):  # (Hq,) or (B, Hq)
            return {0: self.heads_q} if t.dim() == 1 else {0: self.batch, 1: self.heads_q}
        return {0: self.batch, 1: self.heads_q, 2: self.rows}  # q, out, lse and their gradients

    def take(self, name, t):
        """The block's part of a tensor."""
        for axis, cut in self.axes(name, t).items():
            if cut.start > 0 or cut.stop < t.shape[axis]:
                t = t.narrow(axis, cut.start, min(cut.stop, t.shape[axis]) - cut.start)
        return t

    def problem(self, whole):
        """The block's part of a Problem."""
        lengths = whole.query_lengths
        return whole._replace(
            bool_mask=None if whole.bool_mask is None else self.take("bool_mask", whole.bool_mask),
            block_map=None if whole.block_map is None else self.take("block_map", whole.block_map),
            key_lengths=None if whole.key_lengths is None else whole.key_lengths[self.batch],
            query_lengths=None if lengths is None else lengths[self.batch],
            corner=(self.batch.start, self.heads_q.start, self.rows.start),
            of_queries=self.of_queries,
        )


class _Sums:
    """Results of blocks, added up where blocks share them and put side by side where not."""

    def __init__(self, tensors):
        self._tensors, self._parts = tensors, {}

    def add(self, block, results):
        for name, part in results.items():
            like = self._tensors.get(name)
            axes = block.axes(name, part if like is None else like)
            pieces, _ = self._parts.setdefault(name, ({}, list(axes)))
            place = tuple(cut.start for cut in axes.values())
            pieces[place] = pieces[place] + part if place in pieces else part

    def total(self):
        """{name: tensor}; what has the name of an argument has its dtype too."""
        whole = {name: self._join(*parts) for name, parts in self._parts.items()}
        return {n: t.to(self._tensors[n].dtype) if n in self._tensors else t for n, t in whole.items()}

    @staticmethod
    def _join(pieces, axes):
        for n in reversed(range(len(axes))):  # the innermost loop of _blocks first
            rows = {}
            for place in sorted(pieces):
                rows.setdefault(place[:n], []).append(pieces[place])
            pieces = {k: r[0] if len(r) == 1 else torch.cat(r, axes[n]) for k, r in rows.items()}
        return pieces[()]
