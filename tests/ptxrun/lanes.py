"""Runs the steps that batches.py planned: k like instructions at once, as one handler on k times the lanes.

A handler that was given a Lanes for its machine finds operands with k * T elements: instruction 0 of all
threads, then instruction 1, ...  Registers that lie side by side in the register file are used where they
are, others are gathered before and scattered after.  Whatever goes wrong in a batch that touches memory goes
wrong before anything was changed; then its instructions run one at a time, for the exact report.
"""

from dataclasses import replace
from functools import cached_property

import numpy as np

from . import batches
from .errors import PtxError
from .instr import Imm, Mem, Not, Pair, Reg, Vec
from .operands import Operands, immediate
from .registry import BATCHED
from .sanitize import Doubt

# Fewest instructions for which gathering, one call and scattering costs less than a call each.
WORTH = {
    "mma": 1,
    "shfl": 1,
    **dict.fromkeys(("ldmatrix", "cp", "ld", "st", "ex2", "cvt", "max", "min", "fma", "selp"), 2),
}
WORTH_OTHERS = 4


def whole_warps_only(m):
    """Is m True or a mask of whole warps?"""
    if m is True:
        return True
    n = m.reshape(-1, 32).sum(1)
    return bool(((n == 0) | (n == 32)).all())


def plan(M, pc, end):
    """[(pc for messages, closure)] that does what the instructions pc..end-1 do."""
    out = []
    for step in batches.plan(M.prog.code[pc:end], M.constants):
        op = step.instrs[0].op if step.instrs else None
        if step.kind == "sync":
            if M.san:
                out.append((pc, lambda m: M.whole_warps(m, "")))
        elif step.kind == "batch" and op in BATCHED and len(step.instrs) >= WORTH.get(op, WORTH_OTHERS):
            out.append((step.instrs[0].pc, Lanes(M, step.instrs).closure()))
        else:
            out += [(ins.pc, M.run_ops[ins.pc]) for ins in step.instrs]
    return out


class Lanes(Operands):
    """The machine that a handler of a batch sees."""

    def __init__(self, M, instrs):
        self.base, self.instrs, self.k = M, instrs, len(instrs)
        self.T, self.W = self.k * M.T, self.k * M.W
        self.loads, self.stores, self.used = [], [], 0
        self.special, self.addr = M.special, M.addr
        self.alike = {}  # stand-in register -> the k operands it stands for
        self.syncing = instrs[0].op in batches.SYNCING
        self.san = _LaneSanitizer(self) if M.san else None

    def __getattr__(self, name):
        return getattr(self.base, name)

    @cached_property
    def tid(self):
        return np.tile(self.base.tid, self.k)

    @cached_property
    def lane(self):
        return np.tile(self.base.lane, self.k)

    @cached_property
    def index(self):
        return np.arange(self.T)

    @cached_property
    def step(self):
        """Which of the k instructions a lane runs."""
        return np.repeat(np.arange(self.k), self.base.T)

    @cached_property
    def pcs(self):
        return np.repeat([i.pc for i in self.instrs], self.base.T)

    # -- operands -------------------------------------------------------------------------
    def _merge(self, xs):
        """k operands of one shape -> one operand."""
        x = xs[0]
        if isinstance(x, Reg) or (isinstance(x, Imm) and any(y != x for y in xs)):
            stand_in = Reg((self, len(self.alike)), getattr(x, "type", None))
            self.alike[stand_in.key] = xs
            return stand_in
        if isinstance(x, Mem):
            if isinstance(x.base, Reg):
                base, offs = self._merge([y.base for y in xs]), [y.off for y in xs]
            else:
                base, offs = None, [self.addr[y.base.var] + y.base.off + y.off for y in xs]
            return Mem(base, offs, [self._merge(ys) for ys in zip(*(y.rest for y in xs), strict=True)])
        if isinstance(x, Vec):
            return Vec([self._merge(ys) for ys in zip(*(y.items for y in xs), strict=True)])
        if isinstance(x, (Not, Pair)):
            return type(x)(*(self._merge(ys) for ys in zip(*xs, strict=True)))
        return x

    def src(self, o, t):
        if isinstance(o, Reg) and isinstance(self.alike[o.key][0], Imm):
            return np.repeat([immediate(x, t) for x in self.alike[o.key]], self.base.T)
        return super().src(o, t)

    def _rows(self, operands):
        """(register file, rows in it) of stand-in registers, one after another."""
        at = [self.base.row[r.key] for o in operands for r in self.alike[o.key]]
        return self.base.files[at[0][0]], np.array([i for _, i in at])

    def _buffer(self, rows, dtype):
        """Scratch memory (rows, T of a thread block), shared by all batches."""
        nbytes = len(rows) * self.base.T * np.dtype(dtype).itemsize
        a = self.base.scratch(self.used, nbytes)
        self.used += -(-nbytes // 64) * 64
        return a.view(dtype).reshape(len(rows), self.base.T)

    def _array(self, file, rows, out):
        """These rows of a register file, (rows, T): part of it where they lie side by side, else a copy."""
        if (np.diff(rows) == 1).all():
            return file[rows[0] : rows[0] + len(rows)]
        buf = self._buffer(rows, file.dtype)
        (self.stores if out else self.loads).append((file, rows, buf))
        return buf

    def reg(self, o):
        return self._array(*self._rows([o]), False).reshape(-1)

    def reg_out(self, o):
        return self._array(*self._rows([o]), True).reshape(-1)

    def stack(self, operands):
        """Machine.stack, with k rows for each operand, (operands, k); each register is read once."""
        file, rows = self._rows(operands)
        unique, at = np.unique(rows, return_inverse=True)
        return self._array(file, unique, False), at.reshape(len(operands), self.k), _filled

    def stack_out(self, operands):
        return list(self._array(*self._rows(operands), True).reshape(len(operands), self.T))

    def addr_of(self, o):
        return None if o.base is None else self.reg(o.base), np.repeat(np.array(o.off, np.int64), self.base.T)

    # -- what handlers ask of a machine -----------------------------------------------------
    def active(self, m):
        return self.index if m is True else np.flatnonzero(m)

    def threads(self, ix):
        return self.tid[ix]

    def whole_warps(self, m, what):
        ws = None if m is True else np.flatnonzero(m.reshape(-1, 32)[:, 0])
        if self.syncing and self.san:
            self.base.san.collective(slice(None) if ws is None else ws[: len(ws) // self.k])
        return ws

    def report(self, cls, msg, pc=None, other=None):
        raise Doubt

    def closure(self):
        """f(m) that runs the batch."""
        M, k, first = self.base, self.k, self.instrs[0]
        args = [self._merge(xs) for xs in zip(*(i.args for i in self.instrs), strict=True)]
        f = BATCHED[first.op](self, replace(first, args=args))
        loads, stores = self.loads, self.stores

        def run(m):
            for file, rows, buf in loads:
                file.take(rows, 0, buf, "clip")
            if m is not True:
                for file, rows, buf in stores:
                    file.take(rows, 0, buf, "clip")
                m = M.tiled(m, k)
            f(m)
            for file, rows, buf in stores:
                file[rows] = buf

        if first.op in batches.PURE or first.op in batches.SPLIT:
            return run

        def checked(m):
            try:
                if M.san:
                    M.san.strict = True
                run(m)
            except (Doubt, PtxError):
                if M.san:
                    M.san.strict = False
                self._one_by_one(m)
            finally:
                if M.san:
                    M.san.strict = False

        return checked

    def _one_by_one(self, m):
        for ins in self.instrs:
            try:
                self.base.run_ops[ins.pc](m)
            except PtxError as e:
                e.where = e.where or self.base.where(ins.pc)
                raise


def _filled():
    """What a batch gathers is there before its handler runs."""


class _LaneSanitizer:
    """The sanitizer's reads and writes, for lanes instead of threads."""

    def __init__(self, lanes):
        self.lanes = lanes

    def read(self, ix, addr, nbytes, pc, atomic=False):
        lanes, san = self.lanes, self.lanes.base.san
        pcs = lanes.pcs[ix][:, None]
        if not (lanes.syncing and san.collectives):
            san.read(lanes.tid[ix], addr, nbytes, pcs, atomic)
            return
        t = lanes.tid[ix]
        san.read(t, addr, nbytes, pcs, atomic, lanes.step[ix])
        warps = np.zeros(san.W, bool)
        warps[t >> 5] = True
        san.more_syncs(warps, lanes.k - 1)

    def write(self, ix, addr, nbytes, pc, atomic=False, pending=False):
        lanes = self.lanes
        if lanes.base.san.overlap(addr):  # then their order matters
            raise Doubt
        lanes.base.san.write(lanes.tid[ix], addr, nbytes, lanes.pcs[ix][:, None], atomic, pending)
