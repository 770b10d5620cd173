"""What an instruction's operands are while it runs: numpy arrays with one element a lane, or scalars."""

import numpy as np

from .errors import Unsupported
from .instr import SINK, Imm, Not, Reg, Special, Sym, Vec

NP = {
    "pred": "?",
    **{"b8": "u1", "u8": "u1", "s8": "i1"},
    **{"b16": "u2", "u16": "u2", "s16": "i2", "f16": "f2", "bf16": "u2", "e4m3x2": "u2", "e5m2x2": "u2"},
    **{"b32": "u4", "u32": "u4", "s32": "i4", "f32": "f4", "f16x2": "u4", "bf16x2": "u4", "tf32": "f4"},
    **{"b64": "u8", "u64": "u8", "s64": "i8", "f64": "f8"},
}
NP = {k: np.dtype(v) for k, v in NP.items()}
# One value for the whole grid, or one that changes from block to block: read as they are, never copied.
PER_LAUNCH = ("%ctaid", "%clusterid", "%cluster_ctaid", "%nctaid", "%nclusterid")


class Operands:
    """Finds the arrays of operands.  Needs: T lanes, special, addr (Var -> address) and reg()."""

    def reg(self, o):
        """The array of a register."""
        raise NotImplementedError

    def reg_out(self, o):
        """The same for writing."""
        raise NotImplementedError

    def src(self, o, t):
        """Array (or numpy scalar) holding operand o read as type t (low bits of a wider register)."""
        dt = NP[t]
        if isinstance(o, Reg):
            return _low(self.reg(o), o, t)
        if isinstance(o, Imm):
            return immediate(o, t)
        if isinstance(o, Special):
            return self._special(o.name, dt)
        if isinstance(o, Sym):
            v = (self.addr[o.var] + o.off) & ((1 << 8 * dt.itemsize) - 1)
            return np.array(v, f"u{dt.itemsize}").view(dt)[()]
        if isinstance(o, Vec) and t == "b128":
            raise Unsupported("b128 vector")
        raise Unsupported(f"operand {o}")

    def _special(self, name, dt):
        if name not in self.special:
            raise Unsupported(f"special register {name}")
        r = self.special[name]
        if name in ("%clock", "%clock64", "%globaltimer"):
            return r.view(dt)
        if dt.itemsize == 8:
            if name.startswith(PER_LAUNCH):
                raise Unsupported(f"64-bit read of {name}")
            return r.astype(np.uint64).view(dt)
        return r.view(dt) if dt.itemsize == 4 else r.view(dt)[:: 4 // dt.itemsize]

    def dst(self, o, t):
        """Writable array for results of type t; a wider register is viewed so that assignment extends."""
        if o == SINK:
            return np.zeros(self.T, NP[t])
        r, dt = self.reg_out(o), NP[t]
        if r.dtype.itemsize < dt.itemsize:
            raise Unsupported(f"{t} written to narrower register {o.key[1]}")
        if r.dtype == np.bool_ or r.dtype.itemsize == dt.itemsize:
            return r.view(dt)
        return r.view(("i" if dt.kind == "i" else "u") + str(r.dtype.itemsize))

    def pred(self, o):
        """Predicate operand -> function returning a bool array."""
        if isinstance(o, Not):
            r = self.reg(o.op)
            return lambda: ~r
        if isinstance(o, Imm):
            v = np.full(self.T, bool(o.value))
            return lambda: v
        r = self.reg(o)
        return lambda: r

    def addr_of(self, o):
        """Mem operand -> (array of register values or None, offset; an array of offsets for lanes.Lanes)."""
        if isinstance(o.base, Reg):
            r = self.reg(o.base)
            if r.dtype.itemsize not in (4, 8):
                raise Unsupported("address register width")
            return r, o.off
        if isinstance(o.base, Sym):
            return None, self.addr[o.base.var] + o.base.off + o.off
        if isinstance(o.base, Imm):
            return None, o.base.value + o.off
        raise Unsupported(f"address {o}")

    def addr_fn(self, o):
        """Mem operand -> f(ix or None) returning int64 addresses of those lanes."""
        r, off = self.addr_of(o)
        if r is None:
            full = np.full(self.T, off, np.int64)
            return lambda ix: full if ix is None else full[ix]
        s = r.view(np.int64) if r.dtype.itemsize == 8 else r

        def addresses(ix):
            if ix is None:
                return s.astype(np.int64) + off
            return s[ix].astype(np.int64) + (off[ix] if np.ndim(off) else off)

        return addresses


def _low(r, o, t):
    """Register array r read as type t: the low bits where the register is wider."""
    dt = NP[t]
    if r.dtype == np.bool_ or dt == np.bool_:
        if r.dtype != dt:
            raise Unsupported(f"predicate/data mix in {o}")
        return r
    k = r.dtype.itemsize // dt.itemsize
    if k == 0:
        raise Unsupported(f"{t} read from narrower register {o.key[1]}")
    v = r.view(dt)
    return v[::k] if k > 1 else v


def immediate(o, t):
    """Immediate as a numpy scalar of type t."""
    v, dt = o.value, NP[t]
    if dt == np.bool_:
        return np.bool_(v)
    if isinstance(v, tuple):
        b = np.array(v[1], f"u{v[2] // 8}").view(f"f{v[2] // 8}")
        if dt.kind == "f":
            with np.errstate(all="ignore"):
                return b.astype(dt)[()]
        if dt.itemsize * 8 == v[2]:
            return b.view(dt)[()]
        if v[2] == 64:  # decimal literal in a .b32/.f32-like slot
            return b.astype(f"f{dt.itemsize}").view(dt)[()]
        raise Unsupported(f"float immediate for {t}")
    if dt.kind == "f":
        return np.array(v, dt)[()]
    return np.array(v & ((1 << 8 * dt.itemsize) - 1), f"u{dt.itemsize}").view(dt)[()]
