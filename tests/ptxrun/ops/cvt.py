"""cvt, cvta and related."""

import numpy as np

from ..errors import Unsupported
from ..memory import LOCAL_BASE, SHARED_BASE
from ..numeric import LOAD, directed, directed16, f64_to_bf16, fp8_decode, fp8_encode, unpair
from ..operands import NP
from ..registry import op
from .alu import put

F = ("f16", "bf16", "f32", "f64", "tf32")
INT_ROUND = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
ROUNDINGS = ("rn", "rz", "rm", "rp", "rna", *INT_ROUND)


def to_int(x, t):
    """Float -> integer with saturation, NaN -> 0 (x already integral)."""
    dt = NP[t]
    i = np.iinfo(dt)
    lo, hi = float(i.min), float(i.max)
    y = np.where(np.isnan(x), 0.0, np.float64(x))
    big, small = y >= hi, y <= lo
    r = np.where(big | small, 0.0, y)
    r = r.astype(np.uint64 if dt.kind == "u" else np.int64).astype(dt)
    return np.where(big, dt.type(i.max), np.where(small, dt.type(i.min), r))


def to_float(x, t, mode, sat=False, relu=False):
    """f64/f32 array -> storage array of float type t."""
    x = np.asarray(x)
    if sat:
        x = np.where(np.isnan(x), 0, np.clip(x, 0, 1))
    if relu:
        x = np.where(np.isnan(x), x, np.maximum(x, 0))
    if t == "f64":
        return x.astype(np.float64)
    if t == "f32":
        return directed(x, mode) if mode in ("rz", "rm", "rp") else x.astype(np.float32)
    if t == "f16":
        return directed16(x, mode) if mode in ("rz", "rm", "rp") else x.astype(np.float16)
    if t == "bf16":
        if mode == "rz":
            return (directed(x, "rz").view(np.uint32) >> np.uint32(16)).astype(np.uint16)
        return f64_to_bf16(x)
    raise Unsupported(f"cvt to {t}")


@op("cvt", batched=True)
def cvt(M, ins):
    if ins.has("pack"):
        return cvt_pack(M, ins)
    dt, st = [m for m in ins.mods if m in NP or m in ("e4m3", "e5m2")][-2:]
    mode = next((m for m in ins.mods if m in ROUNDINGS), None)
    sat, relu = ins.has("sat"), ins.has("relu")
    if dt in ("f16x2", "bf16x2") and st == "f32":
        return _pair_of_halves(M, ins, dt, mode, sat, relu)
    if dt in ("e4m3x2", "e5m2x2"):
        return _to_fp8(M, ins, dt, st, relu)
    d = M.dst(ins.args[0], dt)
    if st in ("e4m3x2", "e5m2x2"):
        s = M.src(ins.args[1], "u16")

        def from_fp8():
            x = fp8_decode(np.ascontiguousarray(s).view(np.uint8).reshape(-1, 2), st[:-2])
            return unpair(x.astype(np.float16))

        return put(d, from_fp8)
    a = M.src(ins.args[1], st)
    if st in F:
        return _from_float(M, ins, d, a, dt, st, mode, sat, relu)
    if dt in F:
        if dt in ("f32", "f64") and not sat:
            if dt == "f32" and mode in ("rz", "rm", "rp"):
                return put(d, lambda: directed(np.float64(a), mode))
            return put(d, lambda: np.asarray(a).astype(NP[dt]))
        return put(d, lambda: to_float(np.float64(a), dt, mode, sat))
    if sat:
        i = np.iinfo(NP[dt])
        return put(d, lambda: _clip(a, i))
    return put(d, lambda: np.asarray(a).astype(NP[dt]))


def _pair_of_halves(M, ins, t, mode, sat, relu):
    """d = {high: a, low: b}"""
    d = M.dst(ins.args[0], t)
    a, b = M.src(ins.args[1], "f32"), M.src(ins.args[2], "f32")

    def run(m):
        x = np.empty((M.T, 2), np.float32)
        x[:, 1], x[:, 0] = a, b
        np.copyto(d, unpair(to_float(x, t[:-2], mode, sat, relu)), where=m)

    return run


def _to_fp8(M, ins, dt, st, relu):
    d, k = M.dst(ins.args[0], dt), dt[:-2]
    if st == "f32":
        a, b = M.src(ins.args[1], "f32"), M.src(ins.args[2], "f32")
    else:
        s = M.src(ins.args[1], st)

    def run(m):
        x, y = (a, b) if st == "f32" else (LOAD[st](s)[..., 1], LOAD[st](s)[..., 0])
        if relu:
            x, y = np.maximum(x, 0), np.maximum(y, 0)
        np.copyto(d, (np.uint16(fp8_encode(x, k)) << np.uint16(8)) | fp8_encode(y, k), where=m)

    return run


def _from_float(M, ins, d, a, dt, st, mode, sat, relu):
    load = LOAD.get(st, lambda x: x)
    if dt not in F:
        return put(d, lambda: to_int(INT_ROUND[mode](load(a)), dt))
    if dt == "tf32":
        return put(M.dst(ins.args[0], "f32"), lambda: to_tf32(np.ascontiguousarray(a), mode))
    if dt == st and mode in INT_ROUND:
        return put(d, lambda: to_float(INT_ROUND[mode](load(a)), dt, "rn", sat))
    return put(d, lambda: to_float(load(a), dt, mode, sat, relu))


def to_tf32(x, mode):
    """f32 with the mantissa rounded to 10 bits: rna (ties away), rn (ties to even) or rz."""
    u = x.view(np.uint32)
    keep = np.uint32(0xFFFFE000)
    if mode == "rz":
        return (u & keep).view(np.float32)
    tie = np.uint32(0x1000) if mode == "rna" else np.uint32(0xFFF) + ((u >> np.uint32(13)) & np.uint32(1))
    return np.where(np.isfinite(x), (u + tie) & keep, u).view(np.float32)


def _clip(a, i):
    a = np.asarray(a)
    lo = max(i.min, np.iinfo(a.dtype).min)
    hi = min(i.max, np.iinfo(a.dtype).max)
    return np.clip(a, a.dtype.type(lo), a.dtype.type(hi))


def cvt_pack(M, ins):
    """cvt.pack.sat.{u8,s8,u16,s16}.s32[.b32] d, a, b[, c]"""
    t = ins.mods[2]
    i, n = np.iinfo(NP[t]), NP[t].itemsize * 8
    a, b = M.src(ins.args[1], "s32"), M.src(ins.args[2], "s32")
    c = M.src(ins.args[3], "u32") if len(ins.args) > 3 else np.uint32(0)
    mask = np.uint32((1 << n) - 1)

    def clipped(x):
        return np.clip(np.asarray(x), i.min, i.max).astype(np.int64).astype(np.uint32) & mask

    def pack():
        high = (c << np.uint32(2 * n)) if n == 8 else np.uint32(0)
        return high | (clipped(a) << np.uint32(n)) | clipped(b)

    return put(M.dst(ins.args[0], "u32"), pack)


@op("cvta", batched=True)
def cvta(M, ins):
    to = ins.has("to")
    spaces = (m.split("::")[0] for m in ins.mods)
    space = next(s for s in spaces if s in ("global", "shared", "local", "const", "param"))
    t = ins.mods[-1]
    a, d = M.src(ins.args[1], t), M.dst(ins.args[0], t)
    base = {"shared": SHARED_BASE, "local": LOCAL_BASE}.get(space, 0)
    if not base or t != "u64":
        return lambda m: np.copyto(d, a, where=m)
    base = np.uint64(base)
    if to:
        return put(d, lambda: a - base)
    return put(d, lambda: a + base)


@op("isspacep", batched=True)
def isspacep(M, ins):
    a = M.src(ins.args[1], "u64")
    k = {"global": 0, "shared": 1, "local": 2, "const": 0, "param": 0}[ins.mods[0].split("::")[0]]
    return put(M.dst(ins.args[0], "pred"), lambda: (a >> np.uint64(60)) == np.uint64(k))
