"""Branches, calls, exits, CTA barriers."""

import numpy as np

from ..errors import BarrierError, RaceError, Trap, Unsupported
from ..instr import Name, Vec
from ..memory import read_host
from ..registry import BLOCKED, EXITED, RUN, STRAIGHT, control
from .warp import WARP_BARRIER, members


@control("bra")
def bra(M, ins):
    tgt = ins.target
    if not ins.guard:
        return lambda m, pc: tgt
    p, neg = M.reg(ins.guard), ins.neg

    def run(m, pc):
        q = ~p if neg else p
        if m is True:
            if q.all():
                return tgt
            if not q.any():
                return pc + 1
            M.pcs[:] = np.where(q, tgt, pc + 1)
            return -1
        t = m & q
        if not t.any():
            return pc + 1
        n = m & ~q
        if not n.any():
            return tgt
        M.pcs[t], M.pcs[n] = tgt, pc + 1
        return -1

    return run


@control("brx")
def brx(M, ins):
    i = M.src(ins.args[0], "u32")
    tg = np.array(ins.targets)

    def run(m, pc):
        M.pcs[M.active(m)] = tg[i[M.active(m)]]
        return -1

    return run


@control("ret exit")
def ret(M, ins):
    entry = M.prog.funcs[ins.func].entry
    if ins.op == "exit" or entry:

        def leave(m, pc):
            ix = M.active(m)
            M.status[ix] = EXITED
            if M.san and M.resident > 1:
                for slot in np.unique(M.slot[ix]):
                    if (M.status[M.threads_of(slot)] == EXITED).all():
                        M.san.finished(slot)
            for t, g in M.state.get("bulk", {}).items():
                if g.items and M.status[t] == EXITED and t in ix:
                    M.report(
                        RaceError,
                        f"thread {t} exits while its bulk store from shared memory is not waited for",
                        pc,
                        g.items[0][3],
                    )
            for g, p in M.state.get("wgmma", {}).items():
                if p.acc and 128 * g in ix:
                    M.report(RaceError, f"warpgroup {g} exits with a wgmma in flight", pc)
            exited(M)
            return -1

        return leave
    stack = M.return_pcs.setdefault(ins.func, np.zeros(M.T, np.int64))

    def back(m, pc):
        ix = M.active(m)
        M.pcs[ix] = stack[ix]
        return -1

    return back


@control("call")
def call(M, ins):
    name = next((a.name for a in ins.args if isinstance(a, Name)), None)
    f = M.prog.funcs.get(name)
    if f is None:
        raise Unsupported("indirect call")
    vecs = [a for a in ins.args if isinstance(a, Vec)]
    first = isinstance(ins.args[0], Vec)
    rets, params = (vecs[0].items if first else []), (vecs[-1].items if len(vecs) > first else [])
    if f.body is None:
        return external(M, ins, name, rets, params)
    stack = M.return_pcs.setdefault(name, np.zeros(M.T, np.int64))
    frame = M.pmem
    moves = [(M.addr[v], M.addr[p.var], v.size) for v, p in zip(f.params, params, strict=True)]

    def run(m, pc):
        ix = M.active(m)
        for d, s, n in moves:
            frame[ix, d : d + n] = frame[ix, s : s + n]
        stack[ix] = pc + 1
        M.pcs[ix] = f.start
        return -1

    # results are read back from the callee's frame by aliasing the caller's variable to it
    for p, v in zip(rets, f.rets, strict=True):
        M.addr[p.var] = M.addr[v]
    return run


def external(M, ins, name, rets, params):
    if name == "vprintf":

        def pr(m, pc):
            if rets:
                M.pmem[:, M.addr[rets[0].var] :][:, :4] = 0
            return pc + 1

        return pr
    if name in ("__assertfail", "__assert_fail"):

        def fail(m, pc):
            t = int(M.active(m)[0])
            o = M.addr[params[0].var]
            p = int(M.pmem[t, o : o + 8].copy().view(np.int64)[0])
            s = b""
            while p and not s.endswith(b"\0") and len(s) < 200:
                s += read_host(p + len(s), 1)
            raise Trap(
                f"device assertion failed in thread {t}: {s.rstrip(bytes(1)).decode(errors='replace')}"
            )

        return fail
    raise Unsupported(f"call of external function {name}")


@control("trap brkpt")
def trap(M, ins):
    def run(m, pc):
        raise Trap(f"trap executed by thread {int(M.active(m)[0])}")

    return run


# -- CTA barriers -----------------------------------------------------------------------------


class Bar:
    """One phase of a barrier of one block."""

    def __init__(self, T, slot):
        self.slot = slot  # which of the blocks that run together
        self.arrived = np.zeros(T, bool)  # threads counted in this phase
        self.waiting = np.zeros(T, bool)
        self.count = None
        self.lines = {}  # pc -> threads
        self.V = None
        self.red = []


def barriers(M):
    """{(slot of the block, barrier id): Bar}"""
    return M.state.setdefault("bar", {})


def live(M, bar):
    """How many threads of the barrier's block have not exited."""
    return int((M.status[M.threads_of(bar.slot)] != EXITED).sum())


def expected(M, bar):
    return bar.count if bar.count is not None else live(M, bar)


def complete(M, key, bar):
    """Release the barrier when enough threads arrived."""
    bid = key[1]
    if int(bar.arrived.sum()) < expected(M, bar):
        return
    w = bar.waiting
    if len(bar.lines) > 1:  # one warp from different instructions?
        for warp in np.unique(np.flatnonzero(bar.arrived) >> 5):
            pcs = [pc for pc, t in bar.lines.items() if t[warp * 32 : warp * 32 + 32].any()]
            if len(pcs) > 1 and bar.aligned:
                M.report(
                    BarrierError,
                    f"lanes of warp {warp} reach barrier {bid} through different instructions: PTX lines "
                    f"{[M.prog.code[p].line for p in pcs]}",
                    pcs[0],
                )
    gone = M.nthreads - live(M, bar)
    if bar.count is None and gone and not M.state.get("early_exit"):
        M.state["early_exit"] = True
        message = f"barrier {bid} completes although {gone} threads of the block exited without reaching it"
        M.report(BarrierError, message, next(iter(bar.lines)))
    san = M.san
    if san:
        if bar.count is None or int(w.sum()) == live(M, bar):
            san.full_barrier(bar.slot)
        else:
            V = san.release(np.flatnonzero(w))
            if bar.V is not None:
                V = np.maximum(V, bar.V)
            san.acquire(np.flatnonzero(w), V)
    if bar.red:
        allp = np.concatenate([v for _, v, _, _ in bar.red])
        for t, _, d, how in bar.red:
            d[t] = {"popc": allp.sum(), "and": allp.all(), "or": allp.any()}[how]
    M.status[w] = RUN
    del barriers(M)[key]


def exited(M):
    for key, bar in list(barriers(M).items()):
        if bar.count is None and bar.arrived.any():
            complete(M, key, bar)


@control("bar barrier")
def bar(M, ins):
    if ins.has("warp"):
        return None  # straight-line: _warp_sync below
    if ins.has("cluster"):
        return cluster(M, ins)
    arrive, red = ins.has("arrive"), ins.has("red")
    aligned = ins.op == "bar" or ins.has("aligned")
    args = list(ins.args)
    how = d = pr = None
    if red:
        how = next(m for m in ins.mods if m in ("popc", "and", "or"))
        d = M.dst(args.pop(0), "u32" if how == "popc" else "pred")
        pr = M.pred(args.pop())
    ident = M.src(args[0], "u32")
    count = M.src(args[1], "u32") if len(args) > 1 else None

    def reach(slot, b, t, pc):
        """Threads t of one block reach its barrier b."""
        if b > 15:
            raise BarrierError(f"barrier id {b} out of range")
        br = barriers(M).get((slot, b))
        if br is None:
            br = barriers(M)[slot, b] = Bar(M.T, slot)
            br.aligned = aligned
        if count is not None:
            c = count[t] if np.ndim(count) else np.array([count])
            if (c != c[0]).any() or (br.count is not None and br.count != int(c[0])):
                raise BarrierError(f"barrier {b}: conflicting thread counts")
            br.count = int(c[0])
            if br.count % 32 or br.count == 0:
                raise BarrierError(f"barrier {b}: thread count {br.count} is no positive multiple of 32")
        if br.arrived[t].any():
            twice = int(t[br.arrived[t]][0])
            raise BarrierError(f"thread {twice} arrives twice at barrier {b} before it completes")
        br.arrived[t] = True
        br.lines.setdefault(pc, np.zeros(M.T, bool))[t] = True
        arrived = int(br.arrived.sum())
        if arrived > expected(M, br):
            raise BarrierError(f"barrier {b}: {arrived} threads arrive, {expected(M, br)} expected")
        if arrive:
            if M.san:
                V = M.san.release(t)
                br.V = V if br.V is None else np.maximum(br.V, V)
        else:
            br.waiting[t] = True
            M.status[t] = BLOCKED
        if red:
            br.red.append((t, pr()[t].copy(), d, how))
        complete(M, (slot, b), br)

    def run(m, pc):
        ix = M.active(m)
        M.pcs[ix] = pc + 1
        for slot in range(M.resident):
            own = ix if M.resident == 1 else ix[M.slot[ix] == slot]
            for b in np.unique(ident[own]) if np.ndim(ident) else [ident]:
                t = own[ident[own] == b] if np.ndim(ident) else own
                if len(t):
                    reach(slot, int(b), t, pc)
        return -1

    return run


def cluster(M, ins):
    """barrier.cluster with cluster size 1: arrive is free, wait is a block barrier with release semantics."""
    if ins.has("arrive"):

        def arrive(m, pc):
            M.state.setdefault("cl", np.zeros(M.T, bool))[M.active(m)] = True
            if M.san:
                V = M.san.release(M.active(m))
                M.state["clV"] = np.maximum(V, M.state["clV"]) if "clV" in M.state else V
            if M.state["cl"][M.status != EXITED].all():
                M.state["clgen"] = M.state.pop("clV", None)
                del M.state["cl"]
                M.state["clphase"] = M.state.get("clphase", 0) + 1
                w = M.state.pop("clwait", None)
                if w is not None:
                    M.status[w] = RUN
            return pc + 1

        return arrive

    def wait(m, pc):
        ix = M.active(m)
        pend = M.state.get("cl")
        if pend is not None and pend[ix].any():  # the phase these threads arrived at is incomplete
            M.pcs[ix] = pc
            M.status[ix] = BLOCKED
            w = M.state.setdefault("clwait", np.zeros(M.T, bool))
            w[ix] = True
            return -1
        if M.san and M.state.get("clgen") is not None:
            M.san.acquire(ix, M.state["clgen"])
        return pc + 1

    return wait


def _warp_sync(M, ins):
    mask = M.src(ins.args[0], "u32")
    return lambda m: members(M, m, mask, WARP_BARRIER)


STRAIGHT["bar"] = STRAIGHT["barrier"] = _warp_sync
