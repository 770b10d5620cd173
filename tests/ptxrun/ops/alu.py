"""Arithmetic on integers and floats."""

import numpy as np

from ..errors import Unsupported
from ..instr import SIZE
from ..numeric import LOAD, STORE, directed, div_trunc, fma64, mulhi
from ..operands import NP
from ..registry import op

HALF = ("f16", "bf16", "f16x2", "bf16x2")
FLOAT = (*HALF, "f32", "f64")
DIRECTED = ("rz", "rm", "rp")
TINY = np.finfo(np.float32).tiny


def typ(ins):
    return next(m for m in reversed(ins.mods) if m in NP)


def put(d, f, *a):
    """Closure: f(*a) -> d under the mask, for any function."""

    def run(m):
        if m is True:  # most often, and numpy's masks cost more than the arithmetic
            d[:] = f(*a)
        else:
            np.copyto(d, f(*a), where=m, casting="unsafe")

    return run


def put_ufunc(d, f, *a):
    """The same for a numpy function whose result is of d's type."""

    def run(m):
        if m is True:
            f(*a, out=d)
        else:
            f(*a, out=d, where=m)

    return run


def ufunc(M, ins, uf, t, args):
    """Closure that applies a numpy function, straight into the result where the types allow it."""
    d = M.dst(ins.args[0], t)
    same = d.dtype == NP[t] and all(getattr(a, "dtype", None) == d.dtype for a in args)
    if isinstance(uf, np.ufunc) and same and any(np.ndim(a) for a in args):
        return put_ufunc(d, uf, *args)
    return put(d, uf, *args)


def small_float(M, ins, t, f, args):
    """f16/bf16 (x2): compute wider, round once."""
    load, store = LOAD[t], STORE[t]
    d = M.dst(ins.args[0], t)
    sat, relu = ins.has("sat"), ins.has("relu")

    def run(m):
        r = f(*[load(a) for a in args])
        if sat:
            r = np.clip(np.nan_to_num(r, nan=0.0, posinf=np.inf, neginf=-np.inf), 0, 1)
        if relu:
            r = np.where(np.isnan(r), r, np.maximum(r, 0))
        np.copyto(d, store(r), where=m)

    return run


def generic(M, ins, t, uf, args):
    """Binary/unary float or int op by type."""
    if t in HALF:
        return small_float(M, ins, t, uf, args)
    if ins.has("sat"):
        d = M.dst(ins.args[0], t)
        if t in ("f32", "f64"):
            return put(d, lambda *a: _sat(uf(*a)), *args)
        if t == "s32":
            i = np.iinfo(np.int32)
            return put(d, lambda *a: np.clip(uf(*[np.int64(x) for x in a]), i.min, i.max), *args)
        raise Unsupported("sat")
    mode = _directed_mode(ins)
    if mode and t == "f32":
        return put(M.dst(ins.args[0], t), lambda *a: directed(uf(*[np.float64(x) for x in a]), mode), *args)
    if mode and t == "f64":
        raise Unsupported(f"{mode} on f64")
    return ufunc(M, ins, uf, t, args)


def _directed_mode(ins):
    return next((m for m in ins.mods if m in DIRECTED), None)


def _sat(x):
    return np.where(np.isnan(x), 0, np.clip(x, 0, 1))


@op("add sub mul div rem addc", batched=True)
def arithmetic(M, ins):
    t, o = typ(ins), ins.op
    if ins.has("cc") or o == "addc":
        return carry(M, ins, t)
    if ins.has("wide"):
        return multiply_wide(M, ins, t)
    a, b = M.src(ins.args[1], t), M.src(ins.args[2], t)
    if ins.has("hi"):
        return put(M.dst(ins.args[0], t), mulhi(t), a, b)
    if o in ("div", "rem") and t not in FLOAT:
        return put(M.dst(ins.args[0], t), div_trunc(o, NP[t]), a, b)
    uf = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide}[o]
    return generic(M, ins, t, uf, (a, b))


def multiply_wide(M, ins, t):
    w = t[0] + str(2 * int(t[1:]))
    a, b = M.src(ins.args[1], t), M.src(ins.args[2], t)
    dt = NP[w]
    d = M.dst(ins.args[0], w)
    if np.ndim(a) or np.ndim(b):
        return lambda m: np.multiply(a, b, d, where=m, dtype=dt)
    return lambda m: np.copyto(d, dt.type(a) * dt.type(b), where=m)


def carry(M, ins, t):
    """add.cc / addc / sub.cc (one carry flag per thread, kept in the machine)."""
    w = NP[t].itemsize * 8
    if w == 64:
        raise Unsupported("64-bit carry")
    u = f"u{w}"
    a, b, d = M.src(ins.args[1], u), M.src(ins.args[2], u), M.dst(ins.args[0], u)
    sub, use, setcc = ins.op == "sub", ins.op == "addc", ins.has("cc")

    def run(m):
        x, y = np.uint64(a), np.uint64(b)
        r = x - y if sub else x + y + (M.carry if use else np.uint64(0))
        if setcc:
            np.copyto(M.carry, (r >> np.uint64(w)) & np.uint64(1), where=m)
        np.copyto(d, r, where=m, casting="unsafe")

    return run


@op("min max", batched=True)
def extremum(M, ins):
    t, o = typ(ins), ins.op
    a, b = M.src(ins.args[1], t), M.src(ins.args[2], t)
    if t not in FLOAT:
        if "x2" in t:
            raise Unsupported(t)
        return generic(M, ins, t, np.minimum if o == "min" else np.maximum, (a, b))
    number, nan = (np.fmin, np.minimum) if o == "min" else (np.fmax, np.maximum)
    uf = nan if ins.has("NaN") else number
    if len(ins.args) == 4:
        c = M.src(ins.args[3], t)
        return put(M.dst(ins.args[0], t), lambda x, y, z: uf(uf(x, y), z), a, b, c)
    if t in HALF:
        return generic(M, ins, t, uf, (a, b))

    def second(x, y):
        """Which of two zeros wins: -0 < +0, unlike numpy."""
        sx, sy = np.signbit(x), np.signbit(y)
        return sx & ~sy if o == "max" else ~sx & sy

    def f(x, y):
        r = uf(x, y)
        z = r == 0
        return np.where(z & second(x, y), y, r) if z.any() else r

    return put(M.dst(ins.args[0], t), f, a, b)


@op("mad fma madc", batched=True)
def multiply_add(M, ins):
    t = typ(ins)
    if ins.op == "madc" or ins.has("cc"):
        raise Unsupported("carry in mad")
    if ins.has("wide"):
        w = t[0] + str(2 * int(t[1:]))
        dt = NP[w]
        a, b, c = M.src(ins.args[1], t), M.src(ins.args[2], t), M.src(ins.args[3], w)
        return put(M.dst(ins.args[0], w), lambda: np.multiply(a, b, dtype=dt) + c)
    a, b, c = (M.src(x, t) for x in ins.args[1:4])
    if t in HALF:
        return small_float(M, ins, t, lambda x, y, z: np.float64(x) * y + z, (a, b, c))
    d = M.dst(ins.args[0], t)
    if t == "f32":
        return fma32(d, a, b, c, _directed_mode(ins), ins.has("sat"))
    if t == "f64":
        return put(d, fma64, a, b, c)
    if ins.has("hi"):
        high = mulhi(t)
        return put(d, lambda: high(a, b) + c)
    if ins.has("sat"):
        raise Unsupported("mad.sat")
    return put(d, lambda: a * b + c)


def fma32(d, a, b, c, mode, sat):
    def run(m):
        r = np.multiply(a, b, dtype=np.float64) + c
        if mode:
            r = directed(r, mode)
        if sat:
            r = _sat(r)
        if m is True:
            d[:] = r
        else:
            np.copyto(d, r, where=m, casting="unsafe")

    return run


@op("neg abs", batched=True)
def sign(M, ins):
    t = typ(ins)
    if t not in HALF:
        return ufunc(M, ins, np.negative if ins.op == "neg" else np.abs, t, (M.src(ins.args[1], t),))
    u = f"u{8 * SIZE[t]}"
    bit = NP[u].type(0x80008000 if SIZE[t] == 4 else 0x8000)
    x, d = M.src(ins.args[1], u), M.dst(ins.args[0], u)
    return put(d, (lambda v: v ^ bit) if ins.op == "neg" else (lambda v: v & ~bit), x)


@op("copysign", batched=True)
def copysign(M, ins):
    t = typ(ins)
    args = M.src(ins.args[1], t), M.src(ins.args[2], t)
    return generic(M, ins, t, lambda x, y: np.copysign(y, x), args)


FUNCTIONS = {
    "sqrt": np.sqrt,
    "rcp": lambda x: 1 / x,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "ex2": np.exp2,
    "lg2": np.log2,
    "sin": np.sin,
    "cos": np.cos,
    "tanh": np.tanh,
}


@op(" ".join(FUNCTIONS), batched=True)
def function(M, ins):
    t, f = typ(ins), FUNCTIONS[ins.op]
    a = M.src(ins.args[1], t)
    if t in HALF:
        return small_float(M, ins, t, f, (a,))
    mode = _directed_mode(ins)
    ftz = ins.has("ftz") and t == "f32"
    if ftz and ins.op == "ex2":
        return put(M.dst(ins.args[0], t), _ex2_ftz, a)

    def run(x):
        x = np.float64(x)
        if ftz:
            x = np.where(np.abs(x) < TINY, np.copysign(0, x), x)
        r = f(x)
        if ftz:
            r = np.where(np.abs(r) < TINY, np.copysign(0, r), r)
        return directed(r, mode) if mode and t == "f32" else r

    return put(M.dst(ins.args[0], t), run, a)


def _ex2_ftz(x):
    """A subnormal argument gives 1 whether it is flushed or not."""
    r = np.asarray(np.exp2(x, dtype=np.float64))
    r[r < TINY] = 0
    return r


@op("sad dp4a dp2a", batched=True)
def integer_dot(M, ins):
    if ins.op == "sad":
        t = typ(ins)
        a, b, c = (M.src(x, t) for x in ins.args[1:4])
        return put(M.dst(ins.args[0], t), lambda: np.where(a > b, a - b, b - a) + c)
    if ins.op == "dp2a":
        raise Unsupported("dp2a")
    ta, tb = [m for m in ins.mods if m in NP]
    a, b, c = M.src(ins.args[1], "u32"), M.src(ins.args[2], "u32"), M.src(ins.args[3], "u32")

    def parts(x, t):
        x = np.ascontiguousarray(np.broadcast_to(x, M.T))
        return x.view("i1" if t[0] == "s" else "u1").reshape(-1, 4).astype(np.int64)

    return put(M.dst(ins.args[0], "u32"), lambda: (parts(a, ta) * parts(b, tb)).sum(1) + np.int64(c))
