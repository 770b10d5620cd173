"""atom / red on global and shared memory: sequential semantics, vectorised over distinct addresses."""

import numpy as np

from ..instr import SINK, SIZE, Vec
from ..numeric import LOAD, STORE
from ..operands import NP
from ..registry import op
from .mem import Access, space_of, split_generic


def function(o, t):
    if o == "add":
        if t in LOAD:
            return lambda x, y: STORE[t](LOAD[t](x) + LOAD[t](y))
        return lambda x, y: x + y
    if o in ("min", "max"):
        uf = (
            {"min": np.minimum, "max": np.maximum}[o] if t[0] in "us" else {"min": np.fmin, "max": np.fmax}[o]
        )
        if t in LOAD:
            return lambda x, y: STORE[t](uf(LOAD[t](x), LOAD[t](y)))
        return uf
    return {
        "and": lambda x, y: x & y,
        "or": lambda x, y: x | y,
        "xor": lambda x, y: x ^ y,
        "exch": lambda x, y: y,
        "inc": lambda x, y: np.where(x >= y, 0, x + np.uint32(1)).astype(x.dtype),
        "dec": lambda x, y: np.where((x == 0) | (x > y), y, x - np.uint32(1)).astype(x.dtype),
        "cas": lambda x, y, z: np.where(x == y, z, x),
    }[o]


@op("atom red")
def atom(M, ins):
    o = next(
        m for m in ins.mods if m in ("add", "min", "max", "and", "or", "xor", "exch", "inc", "dec", "cas")
    )
    t = next(m for m in reversed(ins.mods) if m in NP)
    vec = next((int(m[1]) for m in ins.mods if m in ("v2", "v4", "v8")), 1)
    space = space_of(ins)
    args = list(ins.args)
    dst = None if ins.op == "red" else args.pop(0)
    mem, ops = args[0], args[1:]
    f = function(o, t)
    cols = [x.items if isinstance(x, Vec) else [x] for x in ops]
    srcs = [[M.src(x, t) for x in c] for c in cols]
    douts = dst.items if isinstance(dst, Vec) else [dst]
    dsts = [None if x is None or x == SINK else M.dst(x, t) for x in douts] if dst is not None else []
    esz, dt = SIZE[t], NP[t]
    acc = Access(M, ins.pc, esz, 1, atomic=True)
    addr = M.addr_fn(mem)

    def one(space, a, ix, j, full):
        vals = [s[j][ix] if np.ndim(s[j]) else np.full(len(ix), s[j], dt) for s in srcs]
        old = np.empty(len(ix), dt)
        todo = np.arange(len(ix))
        while len(todo):  # first occurrence of each address per round
            _, k = np.unique(a[todo], return_index=True)
            k = todo[k]
            x = acc.load(space, a[k], ix[k]).view(dt)
            old[k] = x
            r = f(x, *[v[k] for v in vals])
            acc.store(space, a[k], ix[k], np.ascontiguousarray(r.astype(dt, copy=False)).view(f"u{esz}"))
            todo = np.setdiff1d(todo, k, assume_unique=True)
        if dsts and dsts[j] is not None:
            dsts[j][ix] = old

    def run(m):
        full = m is True
        ix = M.tid if full else np.flatnonzero(m)
        a = addr(None if full else ix)
        for s, sel, b in [(space, slice(None), a)] if space != "generic" else split_generic(a):
            for j in range(vec):
                one(s, b + j * esz, ix[sel], j, full)

    return run
