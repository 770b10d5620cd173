"""ld / st in every state space."""

import numpy as np

from ..errors import AccessError, RaceError, Unsupported
from ..instr import SINK, SIZE, Sym, Vec
from ..memory import ORIGIN, SHARED_BASE, view
from ..operands import NP
from ..registry import SMEM_BASE, op

SPACES = ("param", "global", "shared", "local", "const")


def space_of(ins):
    for m in ins.mods:
        s = m.split("::")[0]
        if s in SPACES:
            return s
    return "generic"


def physical(M, a, ix):
    """Shared addresses in the memory of the blocks that run together."""
    return a if M.base.resident == 1 else a + M.base.region[M.threads(ix)]


def block_of(M, ix):
    """The block of each lane."""
    return M.base.block_ids[M.threads(ix)]


def check_shared(M, a, nbytes, ix, what, align=None):
    """Bounds and alignment of shared addresses a (int64, of threads ix)."""
    if int(np.bitwise_or.reduce(a)) & ((align or nbytes) - 1):
        i = int(((a & ((align or nbytes) - 1)) != 0).argmax())
        raise AccessError(f"misaligned {nbytes}-byte shared {what} at {int(a[i]):#x} by thread {int(ix[i])}")
    if int(np.minimum.reduce(a)) < SMEM_BASE or int(np.maximum.reduce(a)) + nbytes > M.smem_end:
        bad = (a < SMEM_BASE) | (a + nbytes > M.smem_end)
        i = int(bad.argmax())
        raise AccessError(
            f"shared {what} of {nbytes} bytes out of bounds: address {int(a[i]):#x} by thread {int(ix[i])}; "
            f"shared memory is [{SMEM_BASE:#x}, {M.smem_end:#x})"
        )


class Access:
    """Vectorised load/store of `vec` elements of `esz` bytes for one instruction."""

    def __init__(self, M, pc, esz, vec, atomic=False):
        self.M, self.pc, self.esz, self.vec, self.n = M, pc, esz, vec, esz * vec
        self.g = view(esz, vec)
        self.sh = self._rows(M.smem)
        self.atomic = atomic

    def _rows(self, buf):
        v = buf.view(f"u{self.esz}") if buf.ndim == 1 else buf.view(f"u{self.esz}").ravel()
        return v if self.vec == 1 else v[: len(v) // self.vec * self.vec].reshape(-1, self.vec)

    def load(self, space, a, ix):
        M, n = self.M, self.n
        if space == "global":
            k = M.mem.check(a, n, ix, "read")
            if M.block_races and not self.atomic:
                M.mem.own_read(k, a, n, block_of(M, ix), M.threads(ix))
            return self.g[(a - ORIGIN) // n]
        if space == "shared":
            check_shared(M, a, n, ix, "read")
            a = physical(M, a, ix)
            if M.san:
                M.san.read(ix, a, n, self.pc, self.atomic)
            return self.sh[a // n]
        return self._rows(self._thread_buf(space))[self._thread_idx(space, a, ix, "read")]

    def store(self, space, a, ix, v):
        M, n = self.M, self.n
        if space == "global":
            k = M.mem.check(a, n, ix, "write", write=True)
            if M.block_races and not self.atomic:
                M.mem.own(k, a, n, block_of(M, ix), M.threads(ix))
            self.g[(a - ORIGIN) // n] = v
        elif space == "shared":
            check_shared(M, a, n, ix, "write")
            a = physical(M, a, ix)
            if M.san:
                M.san.write(ix, a, n, self.pc, self.atomic)
            k = a // n
            self.sh[k] = v
            if M.san and not self.atomic and len(k) > 1 and (self.sh[k] != v).any():
                bad = self.sh[k] != v
                i = int((bad if bad.ndim == 1 else bad.any(1)).argmax())
                M.report(
                    RaceError,
                    f"threads of one instruction write different values to shared {int(a[i]):#x} "
                    f"(thread {int(ix[i])} lost)",
                    self.pc,
                )
        else:
            self._rows(self._thread_buf(space))[self._thread_idx(space, a, ix, "write")] = v

    def _thread_buf(self, space):
        return self.M.local if space == "local" else self.M.pmem

    def _thread_idx(self, space, a, ix, what):
        buf, n = self._thread_buf(space), self.n
        if (a & (n - 1)).any() or int(a.min()) < 0 or int(a.max()) + n > buf.shape[1]:
            raise AccessError(
                f"{space} {what} of {n} bytes at offset {int(a.max()):#x} misaligned or out of bounds "
                f"(frame {buf.shape[1]} bytes)"
            )
        return (ix * buf.shape[1] + a) // n


def split_generic(a):
    """Generic addresses -> [(space, selector, address in that space)]."""
    k = a >> 60
    k0 = int(k[0])
    if (k == k0).all():
        return [(("global", "shared", "local")[k0], slice(None), a & (SHARED_BASE - 1) if k0 else a)]
    return [
        (s, k == j, a[k == j] & (SHARED_BASE - 1))
        for j, s in enumerate(("global", "shared", "local"))
        if (k == j).any()
    ]


def elem(ins):
    t = next(m for m in reversed(ins.mods) if m in NP or m == "b128")
    vec = next((int(m[1]) for m in ins.mods if m in ("v2", "v4", "v8")), 1)
    return t, vec


@op("ld ldu", batched=True)
def ld(M, ins):
    t, vec = elem(ins)
    space = space_of(ins)
    dst, mem = ins.args[0], ins.args[1]
    outs = dst.items if isinstance(dst, Vec) else [dst]
    if t == "b128":
        raise Unsupported("b128 load")
    esz = SIZE[t]
    ds = [None if o == SINK else M.dst(o, t) for o in outs]
    dt = NP[t]
    if space == "param" and isinstance(mem.base, Sym) and mem.base.var.space == "kparam":  # launch constant
        at = M.addr[mem.base.var] + mem.base.off + mem.off - M.pbuf.ctypes.data
        values = M.pbuf[at : at + esz * vec].view(dt)

        def const(m):
            for d, x in zip(ds, values, strict=True):
                if d is not None:
                    np.copyto(d, x, where=m, casting="unsafe")

        return const
    if space == "param":
        local = isinstance(mem.base, Sym) or not M.prog.funcs[ins.func].entry
        space = "pframe" if local else "global"
    if space == "const":
        space = "global"
    acc = Access(M, ins.pc, esz, vec, ins.has("volatile", "relaxed", "acquire"))
    addr = M.addr_fn(mem)

    def put(ix, full, v):
        v = v.view(dt)
        for j, d in enumerate(ds):
            if d is not None:
                col = v if vec == 1 else v[:, j]
                if full:
                    d[:] = col
                else:
                    d[ix] = col

    def run(m):
        full = m is True
        ix = M.active(m)
        a = addr(None if full else ix)
        if space != "generic":
            put(ix, full, acc.load(space, a, ix))
            return
        for s, sel, b in split_generic(a):
            put(ix[sel], full and isinstance(sel, slice), acc.load(s, b, ix[sel]))

    return run


@op("st", batched=True)
def st(M, ins):
    t, vec = elem(ins)
    space = space_of(ins)
    mem, srcv = ins.args[:2]
    if t == "b128":
        raise Unsupported("b128 store")
    esz = SIZE[t]
    u = f"u{8 * esz}"
    ss = [M.src(o, t) for o in (srcv.items if isinstance(srcv, Vec) else [srcv])]
    if space == "param":
        space = "pframe"
    acc = Access(M, ins.pc, esz, vec, ins.has("volatile", "relaxed", "release"))
    addr = M.addr_fn(mem)
    dt, ut = NP[t], NP[u]

    def gather(ix):
        if vec == 1:
            s = ss[0]
            return (np.ascontiguousarray(s[ix]) if np.ndim(s) else np.full(len(ix), s, dt)).view(ut)
        v = np.empty((len(ix), vec), dt)
        for j, s in enumerate(ss):
            v[:, j] = s[ix] if np.ndim(s) else s
        return v.view(ut)

    def run(m):
        full = m is True
        ix = M.active(m)
        a = addr(None if full else ix)
        v = gather(ix)
        if space != "generic":
            acc.store(space, a, ix, v)
            return
        for s, sel, b in split_generic(a):
            acc.store(s, b, ix[sel], v[sel])

    return run


@op("prefetch prefetchu discard applypriority griddepcontrol setmaxnreg pmevent nanosleep membar")
def nothing(M, ins):
    return lambda m: None


@op("createpolicy")
def cache_policy(M, ins):
    d = M.dst(ins.args[0], "b64")
    return lambda m: np.copyto(d, np.uint64(0), where=m)


@op("fence")
def fence(M, ins):
    proxy = ins.has("proxy") and ins.has("async", "async::shared::cta", "async.shared::cta")
    proxy = proxy and not ins.has("global")  # the sanitizer watches shared memory
    if not M.san or not (proxy or ins.has("mbarrier_init")):
        return lambda m: None
    fenced = (M.san.fence, M.san.init_fence) if proxy else (M.san.init_fence,)

    def run(m):
        for last in fenced:
            last[M.active(m)] = M.san.now

    return run
