"""Comparison, selection and moves."""

import numpy as np

from ..errors import Unsupported
from ..instr import SINK, SIZE, Pair, Reg, Vec
from ..numeric import LOAD, unpair
from ..operands import NP
from ..registry import op
from .alu import FLOAT, put, put_ufunc, typ

COMPARE = {
    **{"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater},
    **{"ge": np.greater_equal, "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal},
}


def compare(name, t):
    def unordered(a, b):
        return np.isnan(a) | np.isnan(b)

    if name == "nan":
        return unordered
    if name == "num":
        return lambda a, b: ~unordered(a, b)
    if name == "ne" and t in FLOAT:
        return lambda a, b: (a != b) & ~unordered(a, b)
    if name in COMPARE:
        return COMPARE[name]
    base = COMPARE[name[:-1]]  # equ, neu, ltu, ...
    return lambda a, b: base(a, b) | unordered(a, b)


@op("setp set", batched=True)
def set_predicate(M, ins):
    name = ins.mods[0]
    t = typ(ins)
    if name in ("lo", "ls", "hi", "hs"):
        t = "u" + t[1:]
    boolop = next((m for m in ins.mods if m in ("and", "or", "xor")), None)
    a, b = M.src(ins.args[1], t), M.src(ins.args[2], t)
    load, on_values = LOAD.get(t), compare(name, t)
    f = (lambda x, y: on_values(load(x), load(y))) if load else on_values
    if ins.op == "set":
        return _set(M, ins, t, f, a, b, boolop)
    dst = ins.args[0]
    if "x2" in t:
        return _two_predicates(M, dst, f, a, b, boolop)
    c = M.pred(ins.args[3]) if boolop else None
    combine = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}.get(boolop)
    if not isinstance(dst, Pair):
        d = M.dst(dst, "pred")
        if combine:
            return put(d, lambda: combine(f(a, b), c()))
        if isinstance(f, np.ufunc) and (np.ndim(a) or np.ndim(b)):
            return put_ufunc(d, f, a, b)
        return put(d, f, a, b)
    p, q = (M.dst(x, "pred") for x in dst)

    def run(m):
        r = f(a, b)
        x, y = (combine(r, c()), combine(~r, c())) if combine else (r, ~r)
        np.copyto(p, x, where=m)
        np.copyto(q, y, where=m)

    return run


def _set(M, ins, t, f, a, b, boolop):
    name = next(m for m in ins.mods if m in NP)
    d = M.dst(ins.args[0], name)
    if boolop:
        raise Unsupported("set with a boolean operation")
    if "x2" in t:  # per half: 1.0 or all ones
        one = np.uint16({"f16x2": 0x3C00, "bf16x2": 0x3F80}.get(name, 0xFFFF))
        return put(d, lambda: unpair(np.where(f(a, b), one, np.uint16(0))))
    one = {"f32": 1.0, "f16": 1.0, "bf16": 0x3F80}.get(name, -1)
    return put(d, lambda: np.where(f(a, b), one, 0))


def _two_predicates(M, dst, f, a, b, boolop):
    if not isinstance(dst, Pair) or boolop:
        raise Unsupported("setp x2 form")
    p, q = (M.dst(x, "pred") for x in dst)

    def run(m):
        r = f(a, b)
        np.copyto(p, r[..., 0], where=m)
        np.copyto(q, r[..., 1], where=m)

    return run


@op("selp slct", batched=True)
def choose(M, ins):
    if ins.op == "slct":
        t, ct = [m for m in ins.mods if m in NP]
        a, b, c = M.src(ins.args[1], t), M.src(ins.args[2], t), M.src(ins.args[3], ct)
        return put(M.dst(ins.args[0], t), lambda: np.where(c >= 0, a, b))
    t = typ(ins)
    a, b, p = M.src(ins.args[1], t), M.src(ins.args[2], t), M.pred(ins.args[3])
    return put(M.dst(ins.args[0], t), lambda: np.where(p(), a, b))


@op("testp", batched=True)
def has_property(M, ins):
    t = typ(ins)
    tiny = np.finfo(NP[t]).tiny
    f = {
        "finite": np.isfinite,
        "infinite": np.isinf,
        "number": lambda x: ~np.isnan(x),
        "notanumber": np.isnan,
        "normal": lambda x: np.isfinite(x) & (np.abs(x) >= tiny),
        "subnormal": lambda x: (x != 0) & (np.abs(x) < tiny),
    }[ins.mods[0]]
    return put(M.dst(ins.args[0], "pred"), f, M.src(ins.args[1], t))


@op("mov", batched=True)
def move(M, ins):
    t = typ(ins)
    d, s = ins.args
    if t == "b128" or (isinstance(d, Reg) and SIZE.get(d.type) == 16):
        raise Unsupported("b128 mov")
    if isinstance(d, Vec) or isinstance(s, Vec):
        return _repack(M, d, s, SIZE[t])
    if t != "pred" and isinstance(s, Reg):
        t = "u" + str(8 * SIZE[t])
    return put(M.dst(d, t), lambda x: x, M.src(s, t))


def _repack(M, d, s, nbytes):
    """mov of a register to several narrower ones, or back."""
    to = d.items if isinstance(d, Vec) else [d]
    parts = s.items if isinstance(s, Vec) else [s]
    su, du = f"u{8 * nbytes // len(parts)}", f"u{8 * nbytes // len(to)}"
    sources = [M.src(x, su) for x in parts]
    results = [None if x == SINK else M.dst(x, du) for x in to]

    def run(m):
        buf = np.empty((M.T, len(parts)), NP[su])
        for i, x in enumerate(sources):
            buf[:, i] = x
        v = buf.view(NP[du])
        for i, r in enumerate(results):
            if r is not None:
                np.copyto(r, v[:, i], where=m)

    return run
