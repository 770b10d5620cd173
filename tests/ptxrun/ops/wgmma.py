"""wgmma: warpgroup matrix multiply with shared-memory descriptors.

Products are computed at issue into a hidden accumulator; the D registers hold NaN until a
wait_group covers the operation (so that an early read shows).  Shared reads belong to the async
agent ('wgmma', warpgroup) until then."""

import numpy as np

from ..errors import BarrierError, RaceError, Unsupported
from ..instr import Vec
from ..numeric import fp8_decode
from ..registry import EXITED, Park, op
from ..tensormap import swizzle_address
from .mem import check_shared
from .mma import frag_a, unpack

BYTES = {"f16": 2, "bf16": 2, "tf32": 4, "e4m3": 1, "e5m2": 1, "s8": 1, "u8": 1}
_OFF = {}


def offsets(major, sw, lbo, sbo, n, kbytes):
    """16-byte chunk offsets of an operand of n rows (M or N) by kbytes, before swizzling.

    major 0 (K-major): (n, kbytes/16).  major 1 (MN-major, 16-bit types): (k, n/8)."""
    key = major, sw, lbo, sbo, n, kbytes
    if key not in _OFF:
        w = {0: 1, 1: 2, 2: 4, 3: 8}[sw]  # chunks per swizzle row
        if major == 0:
            r, c = np.arange(n)[:, None], np.arange(kbytes // 16)[None, :]
            o = (r % 8) * 16 * w + (r // 8) * sbo + (c * lbo if sw == 0 else c * 16)
        else:
            k, j = np.arange(kbytes // 2)[:, None], np.arange(n // 8)[None, :]
            if sw == 0:
                o = j * sbo + (k % 8) * 16 + (k // 8) * lbo
            else:
                o = (j % w) * 16 + (j // w) * lbo + (k % 8) * 16 * w + (k // 8) * sbo
        _OFF[key] = o.astype(np.int64)
    return _OFF[key]


def decode(d):
    """Descriptor -> (start, lbo, sbo, swizzle mode 0..3)."""
    start, lbo, sbo = (d & 0x3FFF) << 4, (d >> 16 & 0x3FFF) << 4, (d >> 32 & 0x3FFF) << 4
    if d >> 49 & 7:
        raise Unsupported("wgmma descriptor base offset")
    return start, lbo, sbo, {0: 0, 1: 3, 2: 2, 3: 1}[d >> 62 & 3]


def operand(M, d, major, n, kbytes, t, tid):
    """Shared operand -> (float matrix (n, K), addresses of its 16-byte chunks)."""
    start, lbo, sbo, sw = decode(d)
    a = swizzle_address(start + offsets(major, sw, lbo, sbo, n, kbytes), sw)
    flat = a.ravel()
    check_shared(M, flat, 16, np.full(len(flat), tid), "wgmma read")
    rows = M.smem.view(np.uint32).reshape(-1, 4)[a >> 4]
    if major == 0:
        x = rows.reshape(n, kbytes // 4)
        return (
            unpack(x, t).reshape(n, -1) if t in ("f16", "bf16", "tf32") else _bytes(x, t).reshape(n, -1)
        ), flat
    return unpack(rows.reshape(kbytes // 2, n // 2), t).reshape(kbytes // 2, n).T, flat


def _bytes(x, t):
    b = np.ascontiguousarray(x).view(np.uint8)
    return fp8_decode(b, t) if t[0] == "e" else (b.view(np.int8) if t == "s8" else b).astype(np.float32)


def warpgroups(M, m, what):
    ws = M.whole_warps(m, what)
    if M.W % 4:
        raise BarrierError(f"{what}: block is no whole number of warpgroups")
    if ws is None:
        return list(range(M.W // 4))
    out, park = [], np.zeros((M.W, 32), bool)
    for g in np.unique(ws // 4):
        have = ws[ws // 4 == g]
        if len(have) == 4:
            out.append(int(g))
        elif (M.status[128 * g : 128 * g + 128] == EXITED).any():
            raise BarrierError(f"{what}: warps of warpgroup {g} have exited")
        else:
            park[have] = True
    if park.any():
        raise Park(park.ravel())
    return out


class Pipe:
    """In-flight wgmmas of one warpgroup."""

    def __init__(self):
        self.seq = 0
        self.acc = {}  # D register keys -> [group, float32 (128, n) accumulator, registers]
        self.owner = {}  # register key -> acc key
        self.reads = []  # (group, column, time)
        self.frags = []  # (group, A registers, their values at issue, pc)


def pipe(M, g):
    return M.state.setdefault("wgmma", {}).setdefault(g, Pipe())


@op("wgmma")
def wgmma(M, ins):
    if ins.has("fence"):
        return lambda m: warpgroups(M, m, "wgmma.fence") and None
    if ins.has("commit_group"):

        def commit(m):
            for g in warpgroups(M, m, "wgmma.commit_group"):
                pipe(M, g).seq += 1
                if M.san:
                    M.san.now += 1

        return commit
    if ins.has("wait_group"):
        n = int(ins.args[0].value)
        return lambda m: [retire(M, g, n) for g in warpgroups(M, m, "wgmma.wait_group")] and None
    return mma_async(M, ins)


def retire(M, g, n):
    p = pipe(M, g)
    lim = p.seq - n
    for key, (seq, acc, regs) in list(p.acc.items()):
        if seq < lim:
            s = slice(128 * g, 128 * g + 128)
            for r, v in zip(regs, acc, strict=True):
                r[s] = v
            del p.acc[key]
    for seq, a, old, pc in p.frags:
        now = slice(128 * g, 128 * g + 128)
        if seq < lim and any((r[now] != v).any() for r, v in zip(a, old, strict=True)):
            message = f"A registers of a wgmma of warpgroup {g} were changed before it was waited for"
            M.report(RaceError, message, pc)
    p.frags = [x for x in p.frags if x[0] >= lim]
    if M.san:
        done = [x for x in p.reads if x[0] < lim]
        p.reads = [x for x in p.reads if x[0] >= lim]
        if done:
            c, t = done[-1][1], max(x[2] for x in done)
            k = M.san.K[128 * g : 128 * g + 128, c]
            np.maximum(k, t, out=k)


def mma_async(M, ins):
    if ins.has("sp"):
        raise Unsupported("sparse wgmma")
    shape = next(x for x in ins.mods if x.startswith("m64"))
    N, Kd = (int(x) for x in shape[4:].split("k"))
    td, ta, tb = [x for x in ins.mods if x in BYTES or x in ("f32", "s32")][:3]
    if td != "f32":
        raise Unsupported(f"wgmma accumulator {td}")
    args = ins.args
    D = args[0].items
    dkey = tuple(r.key for r in D)
    regs = [M.dst(r, "f32") for r in D]
    areg = isinstance(args[1], Vec)
    A = [M.src(x, "b32") for x in args[1].items] if areg else M.src(args[1], "u64")
    B = M.src(args[2], "u64")
    sd = M.pred(args[3])
    imm = [int(x.value) for x in args[4:]]
    sa, sb = imm[0], imm[1]
    rest = imm[2:]
    ta_major = rest.pop(0) if not areg and len(rest) > 1 else 0
    tb_major = rest.pop(0) if rest else 0
    kb = Kd * BYTES[ta]
    if kb != 32:
        raise Unsupported(f"wgmma {shape} {ta}")

    def uniform(x, g, what):
        if not np.ndim(x):
            return int(x)
        v = x[128 * g : 128 * g + 128]
        if (v != v[0]).any():
            raise BarrierError(f"wgmma: {what} differs between threads of warpgroup {g}")
        return int(v[0])

    def run(m):
        for g in warpgroups(M, m, "wgmma.mma_async"):
            s, t0, p = slice(128 * g, 128 * g + 128), 128 * g, pipe(M, g)
            b, addr = operand(M, uniform(B, g, "B descriptor"), tb_major, N, kb, tb, t0)
            if areg:
                u = np.stack([r[s] for r in A]).reshape(4, 4, 32)
                p.frags.append((p.seq, A, u.reshape(4, 128), ins.pc))
                x = unpack(u, ta) if ta in ("f16", "bf16", "tf32") else _bytes(u, ta).reshape(4, 4, 32, 4)
                a = frag_a(x).reshape(64, -1)
            else:
                a, aa = operand(M, uniform(A, g, "A descriptor"), ta_major, 64, kb, ta, t0)
                addr = np.concatenate([addr, aa])
            if M.san:
                gr = ((addr // M.san.g)[:, None] + M.san.span[16]).ravel()
                c = M.san.async_read(t0, ("wgmma", g), gr, ins.pc)
                p.reads.append((p.seq, c, M.san.now))
            d = a.astype(np.float32) @ b.T.astype(np.float32)
            if sa * sb < 0:
                d = -d
            d = d.reshape(4, 2, 8, N // 8, 4, 2)  # w, rowhalf, g, chunk, q, col
            d = d.transpose(3, 1, 5, 0, 2, 4).reshape(N // 2, 128)
            if uniform(sd(), g, "scale-d"):
                d = d + (p.acc[dkey][1] if dkey in p.acc else np.stack([r[s] for r in regs]))
            if any(k != dkey and set(k) & set(dkey) for k in p.acc):
                message = "wgmma accumulators overlap those of one in flight in another shape"
                M.report(RaceError, message, ins.pc)
            p.acc[dkey] = [p.seq, d, regs]
            for r in regs:
                r[s] = np.float32(np.nan)

    return run
