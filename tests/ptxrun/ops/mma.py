"""mma.sync: fragments are gathered into small matrices per warp, multiplied, and scattered back.

Lane l = 4g + q.  In every fragment a register of a pair of narrow elements covers columns
2q, 2q+1 of row g (A, C/D) or rows 2q, 2q+1 of column g (B)."""

import functools

import numpy as np

from ..errors import Unsupported
from ..numeric import bf16_to_f32
from ..registry import batched, op
from .warp import warp_put, warp_rows


def unpack(u, t):
    """b32 (..., ) -> (..., elements) float32"""
    if t == "f16":
        return u.view(np.float16).reshape(*u.shape, 2).astype(np.float32)
    if t == "bf16":
        return bf16_to_f32(u.view(np.uint16).reshape(*u.shape, 2))
    if t == "s8":
        return u.view(np.int8).reshape(*u.shape, 4).astype(np.float64)
    if t == "u8":
        return u.view(np.uint8).reshape(*u.shape, 4).astype(np.float64)
    # tf32: hardware ignores the low bits. The assembler counts on that: between a cvt.rna.tf32.f32 and an mma
    # it leaves out the mask that clears them (ptxas 13.0, sm_80 to sm_120).
    v = (u & np.uint32(0xFFFFE000)).view(np.float32)
    return v.reshape(*u.shape, 1)


def frag_a(x):
    """Unpacked elements (R, W, 32, e) -> (W, 16, K).  R = 2 (one k-half) or 4 registers (two k-halves)."""
    R, W, _, e = x.shape
    x = x.reshape(R // 2, 2, W, 8, 4, e)  # khalf, rowhalf, w, g, q, e
    return x.transpose(2, 1, 3, 0, 4, 5).reshape(W, 16, R // 2 * 4 * e)


def frag_b(x):
    """Unpacked elements (R, W, 32, e) -> (W, K, 8)."""
    R, W, _, e = x.shape
    x = x.reshape(R, W, 8, 4, e)
    return x.transpose(1, 0, 3, 4, 2).reshape(W, R * 4 * e, 8)


def frag_c(c, W):
    """four values (4, W, 32) -> (W, 16, 8)"""
    x = c.reshape(2, 2, W, 8, 4)  # rowhalf, col, w, g, q
    return x.transpose(2, 0, 3, 4, 1).reshape(W, 16, 8)


def unfrag_c(D):
    """(W, 16, 8) -> (4, W, 32)"""
    W = D.shape[0]
    return D.reshape(W, 2, 8, 4, 2).transpose(1, 4, 0, 2, 3).reshape(4, W, 32)


def widen(h):
    """16-bit elements (f16 or the bits of bf16) -> float32."""
    if h.dtype == np.float16:
        return h.astype(np.float32)
    u = h.astype(np.uint32)
    u <<= np.uint32(16)
    return u.view(np.float32)


SHAPES = {
    "m16n8k16": ("f16", "bf16", "s8", "u8"),
    "m16n8k8": ("f16", "bf16", "tf32"),
    "m16n8k4": ("tf32",),
    "m16n8k32": ("s8", "u8"),
}


@op("mma")
def mma(M, ins):
    compute = product(M, ins)

    def run(m):
        compute(m, M.whole_warps(m, "mma.sync"))

    return run


@batched("mma")
def mma_batch(M, ins):
    compute = product(M, ins)
    return lambda m: compute(m, M.whole_warps(m, "mma.sync"))


def product(M, ins):
    """f(mask, warps or None): D = A B + C of those warps."""
    shape = next(x for x in ins.mods if x[0] == "m" and x[1].isdigit())
    types = [x for x in ins.mods if x in ("f16", "bf16", "tf32", "f32", "f64", "s8", "u8", "s32")]
    td, ta, tb, tc = types[-4:]
    if shape == "m8n8k4" and td == "f64":
        return product_f64(M, ins)
    if ta not in SHAPES.get(shape, ()) or not (ins.has("row") and ins.has("col")):
        raise Unsupported(f"mma {shape} {ta}")
    D, A, B, C = (x.items for x in ins.args[:4])
    ab, rows, fill_ab = M.stack(A + B)
    c, rows_c, fill_c = M.stack(C)
    outs = M.stack_out(D)
    na = len(A)
    if td == tc == "f32" and ta in ("f16", "bf16"):
        multiply = _multiply_16bit(M, ab, rows, na, np.uint16 if ta == "bf16" else np.float16)
    else:

        def multiply(ws):
            x = ab[rows].reshape(len(rows), M.W, 32)
            x = x if ws is None else x[:, ws]
            return unfrag_c(frag_a(unpack(x[:na], ta)) @ frag_b(unpack(x[na:], tb)))

    def run(m, ws):
        fill_ab()
        fill_c()
        r = multiply(ws)
        n = r.shape[1]
        acc = c[rows_c].reshape(len(rows_c), M.W, 32)
        acc = acc if ws is None else acc[:, ws]
        if tc == "f16":
            acc = unpack(acc, "f16").transpose(0, 3, 1, 2).reshape(4, n, 32)
        r += acc.view({"f32": np.float32, "s32": np.int32}.get(tc, acc.dtype))
        if td == "f16":
            h = r.astype(np.float16).reshape(2, 2, n, 32).transpose(0, 2, 3, 1)
            r = np.ascontiguousarray(h).view(np.uint32).reshape(2, n, 32)
        elif td == "s32":
            r = r.astype(np.int64).astype(np.int32)
        for d, v in zip(outs, r, strict=True):
            warp_put(d.view(v.dtype), ws, v)

    return run


def _multiply_16bit(M, ab, rows, na, dtype):
    """f(warps or None) -> A B as fragments (4, warps, 32), the registers of A and B being rows of ab."""
    ia, ib, out = _gathers(rows.astype(np.int64).tobytes(), len(rows), na, ab.shape[1], M.W)

    def multiply(ws):
        x = widen(ab.reshape(-1).view(dtype))  # every element once, however many matrices it is in
        if ws is None:
            return (x.take(ia) @ x.take(ib)).reshape(-1).take(out)
        return unfrag_c(x.take(ia[ws]) @ x.take(ib[ws]))

    return multiply


@functools.lru_cache(256)
def _gathers(rows, operands, na, threads, warps):
    """Flat indices of A's and B's elements in their registers, and of D's fragments in the product.

    They are what the fragment functions above yield when they are applied to the indices themselves."""
    rows = np.frombuffer(rows, np.int64).reshape(operands, -1, 1)
    word = rows * threads + np.arange(threads)
    at = (2 * word[..., None] + np.arange(2)).reshape(operands, warps, 32, 2)
    out = unfrag_c(np.arange(warps * 128).reshape(warps, 16, 8))
    return tuple(np.ascontiguousarray(x) for x in (frag_a(at[:na]), frag_b(at[na:]), out))


def product_f64(M, ins):
    D, A, B, C = (x.items if hasattr(x, "items") and not hasattr(x, "key") else [x] for x in ins.args[:4])
    a, b = M.src(A[0], "f64"), M.src(B[0], "f64")
    c, d = [M.src(x, "f64") for x in C], [M.dst(x, "f64") for x in D]

    def run(m, ws):
        x, y = warp_rows(a, ws).reshape(-1, 8, 4), warp_rows(b, ws).reshape(-1, 8, 4).swapaxes(1, 2)
        z = np.stack([warp_rows(v, ws) for v in c], -1).reshape(-1, 8, 8)
        r = (x @ y + z).reshape(-1, 32, 2)
        for i in range(2):
            warp_put(d[i], ws, r[..., i])

    return run
