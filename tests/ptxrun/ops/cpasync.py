"""cp.async (non-bulk).  Data is captured at issue, lands when the issuing thread waits."""

import numpy as np

from ..errors import AccessError, Unsupported
from ..instr import Mem, Reg
from ..memory import ORIGIN, view
from ..registry import op
from . import tma
from .mem import block_of, check_shared, physical


class Queue:
    def __init__(self, T):
        self.seq = np.zeros(T, np.int64)  # groups committed so far, per thread
        self.pending = []  # [threads, group, smem address, rows of bytes, size]


def queue(M):
    q = M.state.get("cpq")
    if q is None:
        q = M.state["cpq"] = Queue(M.base.T)
    return q


def land(M, ix, keep):
    """Make visible every copy of threads ix whose group index is < keep (array over all threads)."""
    q = queue(M)
    if not q.pending:
        return
    sel = np.zeros(M.T, bool)
    sel[ix] = True
    rest = []
    for rec in q.pending:
        t, g, a, data, n = rec
        done = sel[t] & (g < keep[t])
        if not done.any():
            rest.append(rec)
            continue
        if not done.all():
            rest.append((t[~done], g[~done], a[~done], data[~done], n))
            t, a, data = t[done], a[done], data[done]
        M.smem.view(f"u{n}" if n < 16 else "u8").reshape(-1, *data.shape[1:])[a // n] = data
        if M.san:
            M.san.land(t, a, n)
    q.pending = rest


@op("cp", batched=True)
def cp(M, ins):
    if ins.has("bulk"):
        return tma.bulk(M, ins)
    if ins.mods[0] != "async":
        raise Unsupported("cp")
    if ins.has("commit_group"):

        def commit(m):
            queue(M).seq[M.active(m)] += 1

        return commit
    if ins.has("wait_group", "wait_all"):
        n = int(ins.args[0].value) if ins.has("wait_group") else None

        def wait(m):
            q = queue(M)
            land(M, M.active(m), q.seq + 1 if n is None else q.seq - n)

        return wait
    if ins.has("mbarrier"):
        from .mbar import cp_arrive

        return cp_arrive(M, ins)
    dst, src = ins.args[0], ins.args[1]
    n = int(ins.args[2].value)
    if ins.has("cg") and n != 16:
        raise Unsupported("cp.async.cg needs 16 bytes")
    rest = ins.args[3:]
    size, pred = n, None
    if rest and not isinstance(rest[0], Mem):
        if isinstance(rest[0], Reg) and rest[0].type == "pred":
            pred = M.pred(rest[0])
        elif ins.has("L2::cache_hint") and len(rest) == 1:
            pass
        else:
            size = M.src(rest[0], "u32")
    da, sa = M.addr_fn(dst), M.addr_fn(src)
    whole = view(n, 1) if n < 16 else view(8, 2)

    def read(s, nbytes, ix):
        """Checks a read of so many bytes from each address."""
        k = M.mem.check(s, nbytes, ix, "cp.async read", align=n)
        if M.block_races:
            M.mem.own_read(k, s, nbytes, block_of(M, ix), M.threads(ix))

    def partial(s, sizes, ix):
        """Sources of various sizes, the rest of each zero."""
        if (sizes > n).any():
            raise AccessError(f"cp.async src-size {int(sizes.max())} > cp-size {n}")
        raw = np.zeros((len(ix), n), np.uint8)
        for k in np.unique(sizes[sizes > 0]):
            e = sizes == k
            read(s[e], int(k), ix[e])
            if k == n:
                words = raw.view("u8") if n == 16 else raw.view(f"u{n}").ravel()
                words[e] = whole[(s[e] - ORIGIN) // n]
                continue
            raw[e, :k] = view(1, 1)[(s[e] - ORIGIN)[:, None] + np.arange(k)]
        return raw.view("u8") if n == 16 else raw.view(f"u{n}").ravel()

    def run(m):
        full = m is True
        ix = M.active(m)
        d, s = da(None if full else ix), sa(None if full else ix)
        check_shared(M, d, n, ix, "cp.async write")
        d = physical(M, d, ix)
        sizes = np.broadcast_to(np.where(pred(), 0, n) if pred else size, M.T)[ix]
        if (sizes == n).all():
            read(s, n, ix)
            data = whole[(s - ORIGIN) // n]
        else:
            data = partial(s, sizes.astype(np.int64), ix)
        if M.san:
            M.san.write(ix, d, n, ins.pc, pending=True)
        q = queue(M)
        t = M.threads(ix)
        q.pending.append((t, q.seq[t], d, data, n))

    return run
