"""Operands, instructions and functions of a parsed PTX file."""

from dataclasses import dataclass, field
from typing import NamedTuple

SIZE = {
    "pred": 1,
    "b8": 1,
    "u8": 1,
    "s8": 1,
    "b16": 2,
    "u16": 2,
    "s16": 2,
    "f16": 2,
    "bf16": 2,
    "b32": 4,
    "u32": 4,
    "s32": 4,
    "f32": 4,
    "f16x2": 4,
    "bf16x2": 4,
    "tf32": 4,
    "b64": 8,
    "u64": 8,
    "s64": 8,
    "f64": 8,
    "b128": 16,
    "e4m3": 1,
    "e5m2": 1,
    "e4m3x2": 2,
    "e5m2x2": 2,
}


class Reg(NamedTuple):
    key: tuple  # (function, scope, name)
    type: str


class Imm(NamedTuple):
    value: object  # int, or ('f', bits, 32|64)


class Special(NamedTuple):
    name: str  # '%tid.x'


class Sym(NamedTuple):
    var: object  # Var
    off: int


class Mem(NamedTuple):
    base: object  # Reg | Sym | Imm
    off: int
    rest: list  # further operands inside the brackets (TMA coordinates)


class Vec(NamedTuple):
    items: list


class Not(NamedTuple):
    op: object


class Pair(NamedTuple):
    a: object
    b: object


class Name(NamedTuple):
    name: str  # an identifier that is no register or variable (function, label)


SINK = Name("_")


@dataclass(eq=False)
class Var:
    name: str
    space: str
    type: str
    align: int
    size: int  # bytes; 0 for extern []
    init: bytes = None
    func: str = None
    refs: list = field(default_factory=list)  # [(byte offset, symbol name)] in the initialiser


@dataclass(eq=False)
class Instr:
    line: int
    source: str
    op: str
    mods: tuple
    guard: object = None  # Reg or None
    neg: bool = False
    args: list = field(default_factory=list)
    target: int = None  # bra
    targets: list = None  # brx.idx
    func: str = None  # enclosing function
    pc: int = None
    _registers: tuple = None

    @property
    def text(self):
        return " ".join(self.source.split())

    def has(self, *mods):
        return not set(mods).isdisjoint(self.mods)

    def registers(self, first=None):
        """The registers among its operands, in order: first=0 of the first one only, 1 of all others."""
        if self._registers is None:
            each = [_registers(a) for a in self.args]
            self._registers = (
                [r for part in each for r in part],
                each[0] if each else [],
                [r for part in each[1:] for r in part],
            )
        return self._registers[0 if first is None else 1 + first]


def leaves(x):
    """Every operand inside x that holds no others, in order."""
    if isinstance(x, (list, Vec, Mem, Not, Pair)):
        for y in x:
            yield from leaves(y)
    else:
        yield x


def _registers(x):
    return [y for y in leaves(x) if isinstance(y, Reg)]


@dataclass(eq=False)
class Func:
    name: str
    entry: bool
    params: list
    rets: list
    body: tuple = None  # where it lies in the text; None for a prototype
    scope: object = None
    start: int = None  # its part of Program.code, once it is loaded
    end: int = None
    maxntid: int = None
    cluster: int = 1
