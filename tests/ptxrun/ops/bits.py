"""Logic, shifts and bit fields."""

import numpy as np

from ..errors import Unsupported
from ..instr import Pair
from ..operands import NP
from ..registry import op
from .alu import put, typ, ufunc


@op("and or xor", batched=True)
def logic(M, ins):
    t = typ(ins)
    kind = "logical" if t == "pred" else "bitwise"
    return ufunc(M, ins, getattr(np, f"{kind}_{ins.op}"), t, (M.src(ins.args[1], t), M.src(ins.args[2], t)))


@op("not", batched=True)
def invert(M, ins):
    t = typ(ins)
    return ufunc(M, ins, np.logical_not if t == "pred" else np.invert, t, (M.src(ins.args[1], t),))


@op("cnot", batched=True)
def cnot(M, ins):
    t = typ(ins)
    return put(M.dst(ins.args[0], t), lambda x: x == 0, M.src(ins.args[1], t))


@op("popc clz brev bfind", batched=True)
def count(M, ins):
    o = ins.op
    t = ins.mods[-1] if o == "bfind" else typ(ins)
    a = M.src(ins.args[1], t)
    d = M.dst(ins.args[0], t if o == "brev" else "u32")
    if ins.has("shiftamt"):
        none, top = np.uint32(0xFFFFFFFF), np.uint32(NP[t].itemsize * 8 - 1)
        return put(d, lambda x: np.where(_bfind(x) == none, none, top - _bfind(x)), a)
    return put(d, {"popc": np.bitwise_count, "clz": _clz, "brev": _brev, "bfind": _bfind}[o], a)


def _clz(x):
    n = x.dtype.itemsize * 8
    if n < 64:
        f = np.float64(x)
        return np.where(f > 0, n - np.frexp(f)[1], n)
    high, low = np.float64(x >> x.dtype.type(32)), np.float64(x & np.uint64(0xFFFFFFFF))
    return np.where(high > 0, 32 - np.frexp(high)[1], np.where(low > 0, 64 - np.frexp(low)[1], 64))


def _bfind(x):
    if x.dtype.kind == "i":
        x = np.where(x < 0, ~x, x)
    u = x.view(f"u{x.dtype.itemsize}") if np.ndim(x) else x
    r = np.int64(u.dtype.itemsize * 8 - 1) - np.int64(_clz(u))
    return np.where(r < 0, 0xFFFFFFFF, r).astype(np.uint32)


def _brev(x):
    n = x.dtype.itemsize
    b = np.unpackbits(np.ascontiguousarray(x).view(np.uint8).reshape(-1, n), axis=1, bitorder="little")
    return np.packbits(b[:, ::-1], axis=1, bitorder="little").view(x.dtype).ravel()


@op("shl shr", batched=True)
def shift(M, ins):
    t = typ(ins)
    dt = NP[t]
    n = dt.itemsize * 8
    a, b = M.src(ins.args[1], t), M.src(ins.args[2], "u32")
    d = M.dst(ins.args[0], t)
    left = ins.op == "shl"
    uf = np.left_shift if left else np.right_shift
    if not np.ndim(b):
        k = int(b)
        if k >= n:
            if left or dt.kind != "i":
                return lambda m: np.copyto(d, dt.type(0), where=m)
            k = n - 1
        return ufunc(M, ins, uf, t, (a, dt.type(k)))
    most = np.uint32(n - 1 if dt.kind == "i" else n)

    def run(m):
        s = np.minimum(b, most).astype(dt)
        np.copyto(d, uf(a, s), where=m)

    return run


@op("shf", batched=True)
def funnel_shift(M, ins):
    a, b, c = M.src(ins.args[1], "u32"), M.src(ins.args[2], "u32"), M.src(ins.args[3], "u32")
    left, wrap = ins.has("l"), ins.has("wrap")

    def f(a, b, c):
        n = np.uint64(c & np.uint32(31)) if wrap else np.uint64(np.minimum(c, np.uint32(32)))
        v = (np.uint64(b) << np.uint64(32)) | np.uint64(a)
        if left:
            return ((v << n) >> np.uint64(32)) & np.uint64(0xFFFFFFFF)
        return (v >> n) & np.uint64(0xFFFFFFFF)

    return put(M.dst(ins.args[0], "u32"), f, a, b, c)


@op("bfe", batched=True)
def extract_field(M, ins):
    t = typ(ins)
    n = NP[t].itemsize * 8
    a, b, c = M.src(ins.args[1], t), M.src(ins.args[2], "u32"), M.src(ins.args[3], "u32")

    def f(a, b, c):
        pos, ln = np.int64(b & np.uint32(255)), np.int64(c & np.uint32(255))
        u = np.uint64(a if a.dtype.kind == "u" else a.astype(f"u{n // 8}"))
        ln = np.where(pos >= n, 0, ln)
        body = np.where(pos < n, u >> np.uint64(np.minimum(pos, 63)), np.uint64(0))
        r = np.where(ln >= 64, body, body & ((np.uint64(1) << np.uint64(np.minimum(ln, 63))) - np.uint64(1)))
        if t[0] == "s":
            top = np.minimum(pos + ln - 1, n - 1)
            sign = np.where(ln > 0, (u >> np.uint64(np.maximum(top, 0))) & np.uint64(1), np.uint64(0))
            width = np.minimum(ln, n - np.minimum(pos, n))
            ext = np.where(width >= 64, np.uint64(0), ~np.uint64(0) << np.uint64(np.minimum(width, 63)))
            r = np.where(sign == 1, r | ext, r)
            r = np.where(ln == 0, np.uint64(0), r)
        return r

    return put(M.dst(ins.args[0], t), f, a, b, c)


@op("bfi", batched=True)
def insert_field(M, ins):
    t = typ(ins)
    n = NP[t].itemsize * 8
    a, b = M.src(ins.args[1], t), M.src(ins.args[2], t)
    c, length = M.src(ins.args[3], "u32"), M.src(ins.args[4], "u32")

    def f(a, b, c, length):
        pos, ln = np.uint64(np.minimum(c & np.uint32(255), 63)), np.uint64(length & np.uint32(255))
        one = np.uint64(1)
        mask = np.where(ln >= 64, ~np.uint64(0), (one << np.minimum(ln, np.uint64(63))) - one)
        mask = np.where((c & np.uint32(255)) >= n, np.uint64(0), mask << pos)
        return (np.uint64(b) & ~mask) | ((np.uint64(a) << pos) & mask)

    return put(M.dst(ins.args[0], t), f, a, b, c, length)


@op("prmt", batched=True)
def permute_bytes(M, ins):
    if len(ins.mods) > 1:
        raise Unsupported("prmt mode")
    a, b, c = (M.src(x, "u32") for x in ins.args[1:4])

    def f(a, b, c):
        v = np.uint64(a) | (np.uint64(b) << np.uint64(32))
        r = np.uint64(0)
        for i in range(4):
            s = np.uint64((c >> np.uint32(4 * i)) & np.uint32(15))
            byte = (v >> ((s & np.uint64(7)) << np.uint64(3))) & np.uint64(255)
            sign = np.where(byte & np.uint64(128), np.uint64(255), np.uint64(0))
            r = r | (np.where(s & np.uint64(8), sign, byte) << np.uint64(8 * i))
        return r

    return put(M.dst(ins.args[0], "u32"), f, a, b, c)


@op("lop3", batched=True)
def lookup3(M, ins):
    a, b, c = (M.src(x, "u32") for x in ins.args[1:4])
    lut = int(ins.args[4].value)
    if isinstance(ins.args[0], Pair):
        raise Unsupported("lop3 with predicate")

    def f(a, b, c):
        r = np.uint32(0)
        for i in range(8):
            if lut >> i & 1:
                r = r | ((a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c))
        return r

    return put(M.dst(ins.args[0], "u32"), f, a, b, c)
