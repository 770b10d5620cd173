"""Number formats and exact-enough helpers."""

import numpy as np


def bf16_to_f32(u):
    return (
        (np.uint32(u) << np.uint32(16)).view(np.float32)
        if np.ndim(u)
        else (np.array(np.uint32(u) << np.uint32(16)).view(np.float32)[()])
    )


def f32_to_bf16(x):
    """Round to nearest even; NaN -> 0x7fff."""
    x = np.asarray(x, np.float32)
    u = x.view(np.uint32)
    r = (u + np.uint32(0x7FFF) + ((u >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(x), np.uint32(0x7FFF), r).astype(np.uint16)


def f64_to_bf16(x):
    """Round-to-odd into f32 first, so that the result is rounded once."""
    x = np.asarray(x)
    if x.dtype == np.float32:
        return f32_to_bf16(x)
    y = x.astype(np.float32)
    u = y.view(np.uint32).copy()
    inexact = (y != x) & np.isfinite(y)
    away = inexact & (np.abs(y.astype(np.float64)) > np.abs(x))
    u = np.where(away, u - np.uint32(1), u)
    u = np.where(inexact, u | np.uint32(1), u)
    return f32_to_bf16(u.astype(np.uint32).view(np.float32))


def pair(u32, dt):
    """b32 array/scalar -> (..., 2) array of 16-bit elements."""
    if np.ndim(u32) == 0:
        return np.array([u32], np.uint32).view(dt)
    return np.ascontiguousarray(u32).view(dt).reshape(-1, 2)


def unpair(x16):
    x16 = np.ascontiguousarray(x16)
    return x16.view(np.uint32).reshape(x16.shape[:-1])


LOAD = {
    "f16": lambda a: np.float32(a),
    "bf16": bf16_to_f32,
    "f16x2": lambda a: pair(a, np.float16).astype(np.float32),
    "bf16x2": lambda a: bf16_to_f32(pair(a, np.uint16)),
}
STORE = {
    "f16": lambda r: np.asarray(r).astype(np.float16),
    "bf16": f64_to_bf16,
    "f16x2": lambda r: unpair(np.asarray(r).astype(np.float16)),
    "bf16x2": lambda r: unpair(f64_to_bf16(r)),
}


def directed(x, mode):
    """f64 array -> f32 rounded toward zero / down / up."""
    x = np.asarray(x, np.float64)
    r = x.astype(np.float32)
    b = r.astype(np.float64)
    inf = np.float32(np.inf)
    if mode == "rz":
        return np.where(np.abs(b) > np.abs(x), np.nextafter(r, np.float32(0)), r)
    if mode == "rm":
        return np.where(b > x, np.nextafter(r, -inf), r)
    return np.where(b < x, np.nextafter(r, inf), r)


def directed16(x, mode):
    x = np.asarray(x, np.float64)
    r = x.astype(np.float16)
    b = r.astype(np.float64)
    tgt = {"rz": lambda: np.float16(0), "rm": lambda: np.float16(-np.inf), "rp": lambda: np.float16(np.inf)}[
        mode
    ]()
    bad = {"rz": np.abs(b) > np.abs(x), "rm": b > x, "rp": b < x}[mode]
    return np.where(bad, np.nextafter(r, tgt), r)


def fma64(a, b, c):
    """f64 fma through error-free product and sum (last-bit double rounding is possible)."""
    p = a * b
    k = np.float64(134217729.0)
    ah = a * k - (a * k - a)
    bh = b * k - (b * k - b)
    al, bl = a - ah, b - bh
    e = ((ah * bh - p) + ah * bl + al * bh) + al * bl
    s = p + c
    z = s - p
    e2 = (p - (s - z)) + (c - z)
    r = s + (e + e2)
    return np.where(np.isfinite(r), r, p + c)


def div_trunc(op, dt):
    """C semantics for integer div/rem; division by zero gives all ones / the dividend."""
    if op == "rem":
        return lambda a, b: np.where(b == 0, a, np.fmod(a, np.where(b == 0, dt.type(1), b)))
    ones = np.array((1 << 8 * dt.itemsize) - 1, f"u{dt.itemsize}").view(dt)[()]

    def f(a, b):
        d = np.where(b == 0, dt.type(1), b)
        return np.where(b == 0, ones, (a - np.fmod(a, d)) // d)

    return f


def mulhi(t):
    n = int(t[1:])
    if n <= 32:
        w = np.int64 if t[0] == "s" else np.uint64
        return lambda a, b: (
            (np.multiply(a, b, dtype=w) >> w(n)) if np.ndim(a) or np.ndim(b) else (w(a) * w(b)) >> w(n)
        )

    def hi(a, b):
        a, b = np.asarray(a), np.asarray(b)
        ua, ub = a.astype(np.uint64), b.astype(np.uint64)
        m, s = np.uint64(0xFFFFFFFF), np.uint64(32)
        a0, a1, b0, b1 = ua & m, ua >> s, ub & m, ub >> s
        t0 = a0 * b0
        t1 = a1 * b0 + (t0 >> s)
        t2 = a0 * b1 + (t1 & m)
        r = a1 * b1 + (t1 >> s) + (t2 >> s)
        if t[0] == "s":
            r = r - np.where(a < 0, ub, np.uint64(0)) - np.where(b < 0, ua, np.uint64(0))
            return r.view(np.int64) if np.ndim(r) else np.int64(np.array(r).view(np.int64))
        return r

    return hi


def fp8_decode(u, kind):
    """e4m3 / e5m2 bytes -> f32 via a table."""
    return _FP8[kind][np.asarray(u, np.uint8)]


def _table(kind):
    out = np.zeros(256, np.float32)
    eb, mb, bias = (4, 3, 7) if kind == "e4m3" else (5, 2, 15)
    for i in range(256):
        s, e, m = i >> 7, (i >> mb) & ((1 << eb) - 1), i & ((1 << mb) - 1)
        if kind == "e4m3" and (i & 0x7F) == 0x7F:
            v = np.nan
        elif kind == "e5m2" and e == 31:
            v = np.inf if m == 0 else np.nan
        else:
            v = (m / (1 << mb)) * 2.0 ** (1 - bias) if e == 0 else (1 + m / (1 << mb)) * 2.0 ** (e - bias)
        out[i] = -v if s else v
    return out


_FP8 = {k: _table(k) for k in ("e4m3", "e5m2")}


def fp8_encode(x, kind):
    """f32 -> fp8, round to nearest even, saturating to the largest finite value."""
    x = np.asarray(x, np.float64)
    t = _FP8[kind][:128].astype(np.float64)
    n = 0x7F if kind == "e4m3" else 0x7C  # first non-finite code
    fin = t[:n]
    a = np.minimum(np.abs(x), fin[-1])
    hi = np.clip(np.searchsorted(fin, a), 1, n - 1)
    lo = hi - 1
    dl, dh = a - fin[lo], fin[hi] - a
    code = np.where(dl < dh, lo, np.where(dh < dl, hi, np.where(lo % 2 == 0, lo, hi)))
    code = np.where(np.isnan(x), 0x7F, code)
    return (code | np.where(np.signbit(x), 0x80, 0)).astype(np.uint8)
