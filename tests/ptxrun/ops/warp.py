"""Warp-level operations: shfl, vote, match, redux, activemask, elect, bar.warp.sync, ldmatrix, stmatrix."""

import numpy as np

from ..errors import BarrierError, Unsupported
from ..instr import SINK, Pair, Vec
from ..registry import EXITED, Park, batched, op
from .mem import check_shared, physical

BIT = np.uint32(1) << np.arange(32, dtype=np.uint32)
FULL = np.uint32(0xFFFFFFFF)
WARP_BARRIER = "bar.warp.sync"


def bits_of(q):
    """Bool (T,) -> one u32 per warp."""
    return np.packbits(q.reshape(-1, 32), axis=1, bitorder="little").view(np.uint32).ravel()


def members(M, m, mask, what):
    """Check that the active lanes of each warp are exactly those named in membermask.

    mask: u32 per thread (array or scalar).  Exited lanes are ignored; early warps are parked."""
    full = (mask == FULL).all()
    ordering = M.san and (M.san.collectives or what == WARP_BARRIER)
    if m is True and full:
        if ordering:
            M.san.warp_sync(slice(None))
        return
    act = np.ones(M.T, bool) if m is True else m
    bits, live = bits_of(act), bits_of(M.status != EXITED)
    warps = np.flatnonzero(bits)
    if full:
        need = np.full(M.W, FULL)
    else:
        mk = np.where(act, mask, np.uint32(0)).reshape(-1, 32)
        bad = act & ((np.broadcast_to(mask, M.T) & np.tile(BIT, M.W)) == 0)
        if bad.any():
            t = int(bad.argmax())
            raise BarrierError(
                f"{what}: lane {t & 31} of warp {t >> 5} executes it but is not in its own membermask"
            )
        need = np.bitwise_or.reduce(mk, axis=1)
    missing = (bits != 0) & ((need & live & ~bits) != 0)
    if missing.any():
        raise Park(act & np.repeat(missing, 32))
    if ordering:
        whole = warps[(bits & live)[warps] == live[warps]]
        if len(whole) < len(warps):
            sub_sync(M, act.reshape(-1, 32), np.setdiff1d(warps, whole))
        if len(whole):
            M.san.warp_sync(whole)


def sub_sync(M, act, warps):
    """Synchronise only the active lanes of some warps."""
    for w in warps:
        ix = np.flatnonzero(act[w]) + 32 * w
        M.san.acquire(ix, M.san.release(ix))


@op("shfl")
def shfl(M, ins):
    exchange = shuffle(M, ins)
    mask = M.src(ins.args[4], "u32")

    def run(m):
        members(M, m, mask, "shfl.sync")
        exchange(m)

    return run


@batched("shfl")
def shuffle(M, ins):
    """The exchange itself."""
    mode = next(x for x in ins.mods if x in ("up", "down", "bfly", "idx"))
    d, p = (ins.args[0].a, ins.args[0].b) if isinstance(ins.args[0], Pair) else (ins.args[0], None)
    dst = M.dst(d, "b32")
    pd = None if p is None or p == SINK else M.dst(p, "pred")
    a, b, c = (M.src(x, "u32") for x in ins.args[1:4])
    lane = M.lane
    base = np.arange(M.T) & ~31

    def lanes():
        """(whose value each lane gets, is that lane within the segment?)"""
        bv, cv = np.int64(b) & 31, np.int64(c)
        seg, cl = (cv >> 8) & 31, cv & 31
        mx, mn = (lane & seg) | (cl & ~seg), lane & seg
        if mode == "up":
            j = lane - bv
            ok = j >= mx
        elif mode == "down":
            j = lane + bv
            ok = j <= mx
        elif mode == "bfly":
            j = lane ^ bv
            ok = j <= mx
        else:
            j = mn | (bv & ~seg)
            ok = j <= mx
        return base + np.where(ok, j, lane), ok

    fixed = lanes() if not np.ndim(b) and not np.ndim(c) else None

    def run(m):
        J, ok = fixed or lanes()
        if m is not True:
            bad = m & ~m[J]
            if bad.any():
                t = int(bad.argmax())
                message = f"shfl: thread {t} reads inactive lane {int(J[t]) & 31}"
                M.report(BarrierError, message, ins.pc)
        np.copyto(dst, a[J] if np.ndim(a) else a, where=m)
        if pd is not None:
            np.copyto(pd, ok, where=m)

    return run


def ballot(M, q):
    """Bool (T,) -> u32 ballot of the own warp, per thread."""
    return np.repeat(bits_of(q), 32)


@op("vote")
def vote(M, ins):
    mode = next(x for x in ins.mods if x in ("all", "any", "uni", "ballot"))
    pr = M.pred(ins.args[1])
    mask = M.src(ins.args[2], "u32") if len(ins.args) > 2 else FULL
    d = M.dst(ins.args[0], "b32" if mode == "ballot" else "pred")

    def run(m):
        if len(ins.args) > 2:
            members(M, m, mask, "vote.sync")
        act = np.ones(M.T, bool) if m is True else m
        yes, alive = ballot(M, pr() & act), ballot(M, act)
        mk = mask & alive
        yes = yes & mk
        r = {
            "ballot": lambda: yes,
            "all": lambda: yes == mk,
            "any": lambda: yes != 0,
            "uni": lambda: (yes == mk) | (yes == 0),
        }[mode]()
        np.copyto(d, r, where=m)

    return run


@op("activemask")
def activemask(M, ins):
    d = M.dst(ins.args[0], "b32")
    return lambda m: np.copyto(d, ballot(M, np.ones(M.T, bool) if m is True else m), where=m)


@op("elect")
def elect(M, ins):
    d, p = ins.args[0].a, ins.args[0].b
    dd = None if d == SINK else M.dst(d, "b32")
    pd = M.dst(p, "pred")
    mask = M.src(ins.args[1], "u32")

    def run(m):
        members(M, m, mask, "elect.sync")
        act = np.ones(M.T, bool) if m is True else m
        b = ballot(M, act)
        first = b & (~b + np.uint32(1))
        ld = np.uint32(np.frexp(np.float64(first))[1] - 1)
        if dd is not None:
            np.copyto(dd, ld, where=m)
        np.copyto(pd, M.lane == ld, where=m)

    return run


@op("match")
def match(M, ins):
    all_ = ins.has("all")
    d, p = (ins.args[0].a, ins.args[0].b) if isinstance(ins.args[0], Pair) else (ins.args[0], None)
    t = "u32" if ins.has("b32") else "u64"
    a, mask, dst = M.src(ins.args[1], t), M.src(ins.args[2], "u32"), M.dst(d, "b32")

    def run(m):
        members(M, m, mask, "match.sync")
        act = np.ones(M.T, bool) if m is True else m
        v = np.broadcast_to(a, M.T).reshape(-1, 32)
        eq = (v[:, :, None] == v[:, None, :]) & act.reshape(-1, 1, 32)
        r = (eq * BIT).sum(2).astype(np.uint32).ravel()
        if all_:
            ok = r == ballot(M, act)
            r = np.where(ok, r, np.uint32(0))
            if p is not None:
                np.copyto(M.dst(p, "pred"), ok, where=m)
        np.copyto(dst, r, where=m)

    return run


@op("redux")
def redux(M, ins):
    o, t = ins.mods[1], ins.mods[-1]
    a, mask, d = M.src(ins.args[1], t), M.src(ins.args[2], "u32"), M.dst(ins.args[0], t)
    uf = {
        "add": np.add,
        "min": np.minimum,
        "max": np.maximum,
        "and": np.bitwise_and,
        "or": np.bitwise_or,
        "xor": np.bitwise_xor,
    }[o]

    def run(m):
        members(M, m, mask, "redux.sync")
        v = np.broadcast_to(a, M.T).reshape(-1, 32)
        act = (np.ones(M.T, bool) if m is True else m).reshape(-1, 32)
        r = np.zeros(M.W, v.dtype)
        for w in np.flatnonzero(act.any(1)):
            r[w] = uf.reduce(v[w][act[w]], dtype=v.dtype)
        np.copyto(d, np.repeat(r, 32), where=m)

    return run


def warp_rows(x, ws):
    """Per-thread array -> (warps, 32, ...)."""
    x = x.reshape(-1, 32, *x.shape[1:])
    return x if ws is None else x[ws]


def warp_put(d, ws, v):
    """Store v (warps, 32) into a register."""
    if ws is None:
        d[:] = v.reshape(-1)
    else:
        d.reshape(-1, 32)[ws] = v.reshape(-1, 32)


@op("ldmatrix stmatrix", batched=True)
def ldmatrix(M, ins):
    if not ins.has("m8n8"):
        raise Unsupported("ldmatrix shape")
    n = next(int(x[1]) for x in ins.mods if x in ("x1", "x2", "x4"))
    trans, load = ins.has("trans"), ins.op == "ldmatrix"
    vec, mem = (ins.args[0], ins.args[1]) if load else (ins.args[1], ins.args[0])
    regs = vec.items if isinstance(vec, Vec) else [vec]
    regs = M.stack_out(regs) if load else [M.src(r, "b32") for r in regs]
    addr = M.addr_fn(mem)
    rows = M.smem.view(np.uint32).reshape(-1, 4)
    lanes = np.arange(M.T).reshape(-1, 32)[:, : 8 * n]  # those that supply row addresses

    def run(m):
        ws = M.whole_warps(m, ins.op)
        ix = (lanes if ws is None else lanes[ws]).ravel()
        a = addr(ix) & 0xFFFFFFFFFFFFFFF
        check_shared(M, a, 16, ix, ins.op)
        a = physical(M, a, ix)
        if load:
            if M.san:
                M.san.read(ix, a, 16, ins.pc)
            v = rows[a >> 4].reshape(-1, n, 8, 4)
            if trans:
                v = np.ascontiguousarray(v.view(np.uint16).swapaxes(2, 3)).view(np.uint32)
            for j in range(n):
                warp_put(regs[j], ws, v[:, j])
        else:
            if M.san:
                M.san.write(ix, a, 16, ins.pc)
            v = np.stack([warp_rows(r, ws) for r in regs], 1).reshape(-1, n, 8, 4)
            if trans:
                v = np.ascontiguousarray(np.ascontiguousarray(v).view(np.uint16).swapaxes(2, 3)).view(
                    np.uint32
                )
            rows[a >> 4] = v.reshape(-1, 4)

    return run


@op("movmatrix")
def movmatrix(M, ins):
    a, d = M.src(ins.args[1], "b32"), M.dst(ins.args[0], "b32")

    def run(m):
        ws = M.whole_warps(m, "movmatrix")
        v = np.ascontiguousarray(warp_rows(a, ws).reshape(-1, 8, 4)).view(np.uint16)
        warp_put(d, ws, np.ascontiguousarray(v.swapaxes(1, 2)).view(np.uint32))

    return run
