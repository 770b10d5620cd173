"""One kernel bound for one shape of block: register file, memory layout, instruction closures, error reports.

A straight-line instruction is bound to a closure f(m), m = True (all threads) or a bool mask.  A control
instruction is bound to c(m, pc) -> next pc for the whole group, or -1 when it stored per-thread pcs and
statuses itself.  scheduler.py runs them; a machine is reset and used again for the next launch.
"""

import numpy as np

from . import batches, ops, scheduler  # noqa: F401 - ops registers the handlers
from .errors import BarrierError, PtxError, Unsupported
from .instr import SIZE, Sym, leaves
from .operands import Operands
from .registry import CONTROL, EXITED, SMEM_BASE, STRAIGHT, Park, short
from .sanitize import Doubt, Sanitizer

SMEM_ALIGN = 1024  # the largest alignment that a swizzle pattern asks of dynamic shared memory
SCRATCH = 1 << 21  # bytes: a batch of 64 mma on 128 threads gathers 320 KiB


class Machine(Operands):
    """resident: so many blocks run together, as if they were one with separate shared memories."""

    def __init__(self, module, func, block, dyn_smem, sanitize=True, resident=1):
        self.module, self.prog, self.func = module, module.prog, func
        self.ntid, self.resident = block, resident
        self.grid = None  # until a launch
        self.nthreads = block[0] * block[1] * block[2]
        self.block_threads = -(-self.nthreads // 32) * 32
        self.T = T = self.block_threads * resident
        self.W = T // 32
        self.tid = np.arange(T)
        self.lane = self.tid & 31
        self.slot = self.tid // self.block_threads
        self.block_ids = np.zeros(T, np.int64)
        self.base = self  # the machine behind the lanes: lanes.Lanes has another
        self._scratch = np.empty(SCRATCH, np.uint8)
        self._tiled, self._tiles = None, {}  # the latest mask that batches ran under, k times in a row
        self.return_pcs = {}  # function -> where each thread goes on after it
        self.carry = np.zeros(T, np.uint64)  # the condition code register
        self.state = {}  # per-block state of instruction families
        self.code_used = [
            i
            for f in sorted({func.name} | module.callees(func))
            for i in self.prog.code[self.prog.funcs[f].start : self.prog.funcs[f].end]
        ]
        self._specials()
        self._layout(dyn_smem)
        self._registers()
        self.san = None
        if sanitize:
            self.san = Sanitizer(T, resident, self.smem_stride, _granule(self.code_used), self)
        self._bind()

    # -- set-up ---------------------------------------------------------------------------
    def _specials(self):
        t, (nx, ny, _) = self.tid % self.block_threads, self.ntid

        def full(v):
            return np.full(self.T, v, np.uint32)

        lane = (t & 31).astype(np.uint32)
        one = np.uint32(1)
        bit = one << lane
        sp = {"tid.x": t % nx, "tid.y": t // nx % ny, "tid.z": t // (nx * ny)}
        sp |= {
            "laneid": lane,
            "warpid": t >> 5,
            "nwarpid": full(self.block_threads // 32),
            "smid": full(0),
            "nsmid": full(132),
        }
        sp |= {"lanemask_eq": bit, "lanemask_lt": bit - one, "lanemask_le": bit | (bit - one)}
        sp |= {"lanemask_gt": ~(bit | (bit - one)), "lanemask_ge": ~(bit - one)}
        sp |= {"gridid": full(0), "clock": full(0), "clock_hi": full(0)}
        sp |= {"cluster_ctarank": full(0), "cluster_nctarank": full(1), "is_explicit_cluster": full(0)}
        sp |= {"dynamic_smem_size": full(0), "total_smem_size": full(0)}
        for i, d in enumerate("xyz"):
            sp[f"ntid.{d}"], sp[f"nctaid.{d}"], sp[f"ctaid.{d}"] = full(self.ntid[i]), full(0), full(0)
            sp[f"cluster_ctaid.{d}"], sp[f"cluster_nctaid.{d}"] = full(0), full(1)
            sp[f"clusterid.{d}"], sp[f"nclusterid.{d}"] = full(0), full(0)
        self.special = {"%" + k: v.astype(np.uint32) for k, v in sp.items()}
        self.special |= {"%clock64": np.zeros(self.T, np.uint64), "%globaltimer": np.zeros(self.T, np.uint64)}

    def _layout(self, dyn_smem):
        """Addresses of all variables: shared offsets, local offsets, param/const/global host addresses."""
        self.addr = {}
        live = {x.var for ins in self.code_used for x in leaves(ins.args) if isinstance(x, Sym)}
        size = {"shared": SMEM_BASE, "local": 0, "param": 0}
        dynamic = []
        for v in self.prog.vars:
            if v in self.module.var_addr:
                self.addr[v] = self.module.var_addr[v]
            elif v.space == "shared" and v in live and v.size == 0:
                dynamic.append(v)
            elif v.space == "param" or (v.space in size and v in live):
                at = -(-size[v.space] // v.align) * v.align
                self.addr[v], size[v.space] = at, at + v.size
        end = size["shared"]
        if dynamic:
            a = max(16, *(v.align for v in dynamic))
            end = -(-end // a) * a
            for v in dynamic:
                self.addr[v] = end
        end += dyn_smem
        self.special["%dynamic_smem_size"][:] = dyn_smem
        self.special["%total_smem_size"][:] = end - SMEM_BASE
        self.smem_end = end
        self.smem_stride = -(-end // SMEM_ALIGN) * SMEM_ALIGN
        self.region = self.slot * self.smem_stride  # of each thread's block in smem
        raw = np.zeros(self.smem_stride * self.resident + SMEM_ALIGN, np.uint8)
        self.smem = raw[-raw.ctypes.data % SMEM_ALIGN :][: self.smem_stride * self.resident]
        self.local = np.zeros((self.T, max(-(-size["local"] // 16) * 16, 16)), np.uint8)
        self.pmem = np.zeros((self.T, max(-(-size["param"] // 16) * 16, 16)), np.uint8)
        o = 0
        for p in self.func.params:
            o = -(-o // p.align) * p.align
            self.addr[p] = o
            o += p.size
        raw = np.zeros(o + 256, np.uint8)
        self.pbuf = raw[-raw.ctypes.data % 128 :][: max(o, 1)]  # __grid_constant__ tensor maps: 128 bytes
        for p in self.func.params:
            self.addr[p] += self.pbuf.ctypes.data

    def _registers(self):
        """One array (registers, T) per register size.

        Registers that instructions of one kind define lie side by side in program order: a batch of such
        instructions finds them in one piece."""
        first = {}  # register -> the kind of instruction that mentions it first
        for ins in self.code_used:
            for r in [*ins.registers(), *([ins.guard] if ins.guard else [])]:
                first.setdefault(r.key, (r.type, (ins.op, *ins.mods)))
        kinds = {}
        for key, (t, kind) in first.items():
            kinds.setdefault((SIZE[t] if t != "pred" else 0, kind), []).append(key)
        by_size = {}
        for (size, _), keys in kinds.items():
            by_size.setdefault(size, []).extend(keys)
        self.files, self.row = {}, {}
        for size, keys in by_size.items():
            n = len(keys)
            self.files[size] = np.zeros(
                (n, self.T, 2) if size == 16 else (n, self.T), f"u{min(size, 8)}" if size else "?"
            )
            self.row.update((k, (size, i)) for i, k in enumerate(keys))

    def reg(self, o):
        size, i = self.row[o.key]
        return self.files[size][i]

    reg_out = reg

    def stack(self, operands):
        """(array (n, T) of 32-bit values, row of each operand in it, function that fills it in)"""
        values = [self.src(o, "b32") for o in operands]
        buf = np.empty((len(values), self.T), np.uint32)

        def fill():
            for row, v in zip(buf, values, strict=True):
                row[:] = v

        return buf, np.arange(len(values)), fill

    def stack_out(self, operands):
        """Writable arrays of 32-bit registers."""
        return [self.dst(o, "b32") for o in operands]

    def scratch(self, offset, nbytes):
        """Bytes of the memory that all batches use, or new ones where it is too small."""
        if offset + nbytes > SCRATCH:
            return np.empty(nbytes, np.uint8)
        return self._scratch[offset : offset + nbytes]

    def _bind(self):
        n = len(self.prog.code)
        self.hits = np.zeros(n, np.int64)  # executions per instruction (groups)
        self.run_ops, self.ctl = [None] * n, [None] * n
        for ins in self.code_used:
            self._bind1(ins)
        self.next_ctl = [0] * n
        at = n
        for pc in range(n - 1, -1, -1):
            if self.ctl[pc]:
                at = pc
            self.next_ctl[pc] = at
        self.constants = batches.constants(self.code_used)
        self.runs, self.plans = {}, {}  # (first pc, end pc) -> times it ran, its batches: scheduler.py

    def _bind1(self, ins):
        try:
            c = CONTROL[ins.op](self, ins) if ins.op in CONTROL else None
            if c is not None:
                self.ctl[ins.pc] = c if not ins.guard or ins.op == "bra" else self._guard_control(ins, c)
                return
            if ins.op not in STRAIGHT:
                raise Unsupported(f"unknown instruction {'.'.join([ins.op, *ins.mods])}")
            f = STRAIGHT[ins.op](self, ins)
            self.run_ops[ins.pc] = self._guard(ins, f) if ins.guard else f
        except PtxError as e:
            e.where = e.where or self.where(ins.pc)
            raise
        except (KeyError, IndexError, AttributeError, ValueError, TypeError, StopIteration) as e:
            u = Unsupported(f"cannot bind: {type(e).__name__} {e}")
            u.where = self.where(ins.pc)
            raise u from e

    def _guard(self, ins, f):
        p, neg = self.reg(ins.guard), ins.neg

        def guarded(m):
            q = ~p if neg else p.copy()
            if m is not True:
                q &= m
            if q.any():
                f(q)

        return guarded

    def _guard_control(self, ins, c):
        p, neg = self.reg(ins.guard), ins.neg

        def guarded(m, pc):
            q = ~p if neg else p.copy()
            if m is not True:
                q &= m
            if not q.any():
                return pc + 1
            rest = ~q if m is True else m & ~q
            if not rest.any():
                return c(m, pc)
            self.pcs[rest] = pc + 1
            r = c(q, pc)
            if r >= 0:
                self.pcs[q] = r
            return -1

        return guarded

    def reset(
        self, grid, params, mem, *, on_error, block_races, max_instr, initcheck, batch, collectives_order
    ):
        """As newly bound, for a launch with this grid, these parameters and this memory."""
        self.grid, self.mem, self.on_error, self.batch = grid, mem, on_error, batch
        self.block_races, self.max_instr, self.initcheck = block_races, max_instr, initcheck
        self.reports, self.seen = [], set()
        self.n_group = self.n_thread = 0
        for i, d in enumerate("xyz"):
            self.special[f"%nctaid.{d}"][:] = self.special[f"%nclusterid.{d}"][:] = grid[i]
        self.pbuf[: len(params)] = np.frombuffer(params, np.uint8)
        for size, file in self.files.items():
            if size:
                file.view("u1")[:] = 0xFF  # uninitialised registers hold NaN
            else:
                file[:] = False
        self.pmem[:] = 0
        self.hits[:] = 0
        if self.san:
            self.san.reset(collectives_order)

    def launch(self, order):
        """Runs these blocks one after another; the seconds it took."""
        return scheduler.launch(self, order)

    def unexecuted(self):
        """PTX lines of the kernel and its functions that no thread reached, in the order of the code."""
        pcs = np.array([i.pc for i in self.code_used])
        return [self.prog.code[pc].line for pc in pcs[self.hits[pcs] == 0]]

    def threads_of(self, slot):
        """The threads of one of the blocks that run together."""
        return slice(slot * self.block_threads, (slot + 1) * self.block_threads)

    # -- masks and warps ------------------------------------------------------------------
    def active(self, m):
        """Mask -> thread index array."""
        return self.tid if m is True else np.flatnonzero(m)

    def tiled(self, m, k):
        """The mask m, k times in a row."""
        if self._tiled is not m:
            self._tiled, self._tiles = m, {}
        if k not in self._tiles:
            self._tiles[k] = np.tile(m, k)
        return self._tiles[k]

    def threads(self, ix):
        """Lane indices -> thread indices: the same but for lanes.Lanes."""
        return ix

    def whole_warps(self, m, what):
        """Warps of a collective (.aligned) op: None for all, else an index array.  Parks partial warps."""
        if m is True:
            if self.san:
                self.san.collective(slice(None))
            return None
        c = m.reshape(-1, 32)
        n = c.sum(1)
        w = np.flatnonzero(n)
        part = w[n[w] != 32]
        if len(part):
            raise self._partial(part, c, what)
        if self.san:
            self.san.collective(w)
        return w

    def _partial(self, part, c, what):
        st = self.status.reshape(-1, 32)
        for w in part:
            gone = np.flatnonzero((st[w] == EXITED) & ~c[w])
            if len(gone):
                return BarrierError(
                    f"{what} by warp {w} needs all 32 lanes but lanes {gone.tolist()} have exited"
                )
        park = np.zeros_like(c)
        park[part] = c[part]
        return Park(park.ravel())

    # -- reports --------------------------------------------------------------------------
    def where(self, pc):
        ins = self.prog.code[pc]
        block = ""
        if self.grid:
            at = np.unravel_index(self.block_ids[0], self.grid[::-1])[::-1]
            block = f" block {tuple(int(x) for x in at)}"
        return f"kernel {self.func.name}{block} PTX line {ins.line}: {short(ins.text)}"

    def report(self, cls, msg, pc=None, other=None):
        """Raises an error found at pc, or keeps it (on_error='collect').  other: pc of the earlier access."""
        if self.resident > 1:
            raise Doubt
        if other is not None and other >= 0:
            o = self.prog.code[other]
            msg += f"\n    earlier access: PTX line {o.line}: {short(o.text)}"
        e = cls(msg)
        if pc is not None:
            e.where = self.where(pc)
        if self.on_error == "raise":
            raise e
        key = cls, pc, other
        if key not in self.seen:
            self.seen.add(key)
            self.reports.append(e)


def _granule(code):
    """Narrowest access to shared (or generic) memory in the kernel, at most 16 bytes (all are aligned)."""
    g = 16
    for i in code:
        if i.op in ("ld", "st", "atom", "red") and not i.has("param", "global", "local", "const"):
            types = [SIZE[m] for m in i.mods if m in SIZE]
            vector = next((int(m[1]) for m in i.mods if m in ("v2", "v4", "v8")), 1)
            if types:
                g = min(g, types[-1] * vector)
        elif i.op == "mbarrier" or (i.op == "cp" and i.has("mbarrier")):
            g = min(g, 8)
        elif i.op == "cp" and not i.has("bulk") and len(i.args) > 2:
            g = min(g, int(i.args[2].value))
    return g
