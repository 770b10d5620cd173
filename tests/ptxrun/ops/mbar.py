"""mbarrier objects.  Waiting threads are parked until some phase completes; transaction counts are bytes."""

import numpy as np

from ..errors import BarrierError, Unsupported
from ..instr import SINK
from ..memory import SHARED_BASE
from ..registry import BLOCKED, RUN, STRAIGHT, control
from .mem import check_shared

TEST_SPINS = 4  # test_wait: answers false this often before it parks


class MBar:
    def __init__(self, addr, count, T):
        self.addr, self.count = addr, count
        self.pending, self.tx, self.phase = count, 0, 0
        self.V = self.done = None  # sanitizer knowledge: accumulating / of completed phases


def table(M):
    return M.state.setdefault("mbar", {})


def get(M, a, t):
    b = table(M).get(a)
    if b is None:
        raise BarrierError(f"thread {t} uses an mbarrier at shared {a:#x} that was never initialised")
    return b


def merge(b, V):
    b.V = V if b.V is None else np.maximum(b.V, V)


def advance(M, b):
    """Complete the phase when nothing is pending."""
    if b.pending or b.tx:
        return
    b.phase += 1
    b.pending = b.count
    if M.san and b.V is not None:
        b.done = b.V if b.done is None else np.maximum(b.done, b.V)
        b.V = None
    w = M.state.get("mwait")
    if w is not None and w.any():
        M.status[w & (M.status == BLOCKED)] = RUN
        w[:] = False


def arrive(M, b, n, ix):
    if n > b.pending:
        raise BarrierError(
            f"mbarrier at {b.addr:#x}: {n} arrivals by threads {ix[:4].tolist()}.. but only {b.pending} of "
            f"{b.count} pending in phase {b.phase}"
        )
    if M.san:
        merge(b, M.san.release(ix))
    b.pending -= n


def complete_tx(M, b, nbytes, col=None):
    """Asynchronous bytes arrived."""
    b.tx -= nbytes
    if M.san and col is not None:
        V = np.zeros(M.san.K.shape[1], np.int32)
        V[col] = M.san.now
        M.san.now += 1
        merge(b, V)
    advance(M, b)


def local_addr(a):
    return a & (SHARED_BASE - 1)


def by_address(M, fn, m):
    ix = M.active(m)
    a = local_addr(fn(ix))
    check_shared(M, a, 8, ix, "mbarrier access")
    for v in np.unique(a):
        yield int(v), ix[a == v]


def is_wait(ins):
    return ins.has("try_wait", "test_wait")


@control("mbarrier")
def wait(M, ins):
    if not is_wait(ins):
        return None
    pred = M.dst(ins.args[0], "pred")
    addr = M.addr_fn(ins.args[1])
    parity = ins.has("parity")
    st = M.src(ins.args[2], "u32" if parity else "u64")
    test = ins.has("test_wait")

    def run(m, pc):
        stay = []
        for a, t in by_address(M, addr, m):
            b = get(M, a, int(t[0]))
            if M.san:  # a wait must see mbarrier.init: a barrier or fence has to lie between
                M.san.read(t, np.full(len(t), a), 8, ins.pc, atomic=True)
            s = st[t] if np.ndim(st) else np.full(len(t), st)
            if parity:
                if (s > 1).any():
                    raise BarrierError("mbarrier parity must be 0 or 1")
                ok = (b.phase & 1) != s
            else:
                ok = b.phase > s.astype(np.int64)
            pred[t[ok]] = True
            if M.san and ok.any() and b.done is not None:
                M.san.acquire(t[ok], b.done)
            if not ok.all():
                pred[t[~ok]] = False
                stay.append(t[~ok])
        if not stay:
            return pc + 1
        stay = np.concatenate(stay)
        if test:
            k = M.state["spin", pc] = M.state.get(("spin", pc), 0) + 1
            if k < TEST_SPINS:
                return pc + 1
            M.state["spin", pc] = 0
        M.pcs[M.active(m)] = pc + 1
        M.pcs[stay] = pc
        M.status[stay] = BLOCKED
        M.state.setdefault("mwait", np.zeros(M.T, bool))[stay] = True
        return -1

    return run


def straight(M, ins):
    args = list(ins.args)
    if ins.has("init"):
        addr, cnt = M.addr_fn(args[0]), M.src(args[1], "u32")

        def init(m):
            for a, t in by_address(M, addr, m):
                c = int(cnt[t[0]] if np.ndim(cnt) else cnt)
                if c == 0:
                    raise BarrierError("mbarrier.init with count 0")
                table(M)[a] = MBar(a, c, M.T)
                if M.san:
                    M.san.write(t[:1], np.array([a]), 8, ins.pc, atomic=False)

        return init
    if ins.has("inval"):
        addr = M.addr_fn(args[0])

        def inval(m):
            for a, _ in by_address(M, addr, m):
                table(M).pop(a, None)

        return inval
    if ins.has("pending_count"):
        raise Unsupported("mbarrier.pending_count")
    if not ins.has("arrive", "arrive_drop", "expect_tx", "complete_tx"):
        raise Unsupported("mbarrier variant")
    dst = None
    if not hasattr(args[0], "off"):  # state token
        d = args.pop(0)
        dst = None if d == SINK else M.dst(d, "b64")
    addr = M.addr_fn(args[0])
    val = M.src(args[1], "u32") if len(args) > 1 else None
    exp = ins.has("expect_tx")
    arr = ins.has("arrive", "arrive_drop")

    def run(m):
        for a, t in by_address(M, addr, m):
            b = get(M, a, int(t[0]))
            if M.san:
                M.san.read(t, np.full(len(t), a), 8, ins.pc, atomic=True)
            if dst is not None:
                dst[t] = b.phase
            v = np.broadcast_to(1 if val is None else val, M.T)[t].astype(np.int64)
            if exp:
                b.tx += int(v.sum())
            elif ins.has("complete_tx"):
                complete_tx(M, b, int(v.sum()))
                continue
            if ins.has("arrive_drop"):
                b.count -= len(t)
            if arr:
                # one by one only when the threads span several phases
                n = len(t) if exp else int(v.sum())
                if n <= b.pending:
                    arrive(M, b, n, t)
                    advance(M, b)
                else:
                    for x, c in zip(t, v, strict=True):
                        arrive(M, b, 1 if exp else int(c), np.array([x]))
                        advance(M, b)

    return run


STRAIGHT["mbarrier"] = straight


def cp_arrive(M, ins):
    """cp.async.mbarrier.arrive[.noinc]: triggers when the thread's earlier cp.async copies have landed."""
    addr, noinc = M.addr_fn(ins.args[0]), ins.has("noinc")

    def run(m):
        from .cpasync import land, queue

        q = queue(M)
        land(M, M.active(m), q.seq + 1)
        for a, t in by_address(M, addr, m):
            b = get(M, a, int(t[0]))
            if not noinc:
                b.pending += len(t)
            arrive(M, b, len(t), t)
            advance(M, b)

    return run
