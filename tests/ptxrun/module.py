"""A parsed PTX file and the launch of its kernels."""

import contextlib
import re
from dataclasses import dataclass

import numpy as np

from .errors import PtxError, Unsupported
from .instr import Name
from .machine import Machine
from .memory import Memory
from .parse import Program
from .sanitize import Doubt

MACHINES_KEPT = 4  # bound kernels kept per module: binding costs as much as running a small problem
TOGETHER = 1024  # threads of blocks that run together: numpy's own overhead is small by then
MOST_WRITABLE = 1 << 26  # bytes: more is not copied to be able to start again


@dataclass
class Result:
    seconds: float
    blocks: int
    instructions: int  # instructions issued for groups of threads
    thread_instructions: int
    reports: list  # collected errors (on_error='collect')
    unexecuted: list  # PTX lines of this kernel never reached (coverage of the check)


class Module:
    """A parsed PTX file.  mem: the Memory registry used by default."""

    def __init__(self, ptx_text, mem=None):
        self.prog = Program(ptx_text)
        self.mem = mem or Memory()
        self.var_addr, self._callees, self._machines = {}, {}, {}
        self._variables = Memory()  # module-scope variables: every launch may touch them
        self._place_variables()

    def _place_variables(self):
        """Gives the variables their memory and initial values, those of functions when they are loaded."""
        stored = [v for v in self.prog.vars if v.space in ("global", "const") and v.size]
        new = [v for v in stored if v not in self.var_addr]
        for v in new:
            a = self._variables.alloc(v.size, f".{v.space} {v.name}", max(v.align, 16), fill=0)
            if v.init:
                a[: len(v.init)] = np.frombuffer(v.init, np.uint8)
            self.var_addr[v] = a.ctypes.data
        by_name = {v.name: v for v in self.var_addr}
        for v in new:
            for off, ref in v.refs:
                name = re.sub(r"generic\s*\(\s*([\w$]+)\s*\)", r"\1", ref)
                if name in by_name:
                    pointer = np.uint64(self.var_addr[by_name[name]]).tobytes()
                    self._variables.keep[self.var_addr[v]][off : off + 8] = np.frombuffer(pointer, np.uint8)

    @property
    def kernels(self):
        return [n for n, f in self.prog.funcs.items() if f.entry and f.body is not None]

    def find(self, name):
        """The kernel of this name, or whose name alone contains it."""
        hits = [name] if name in self.prog.funcs else [n for n in self.kernels if name in n]
        if len(hits) != 1:
            raise KeyError(f"{name!r} matches {hits or 'no kernel'}; kernels: {self.kernels}")
        return self._loaded(self.prog.funcs[hits[0]])

    def _loaded(self, f):
        self.prog.load(f)
        self._place_variables()
        return f

    def callees(self, f):
        """Names of the functions that f calls, directly or not."""
        if f.name not in self._callees:
            out, todo = set(), [f]
            while todo:
                g = todo.pop()
                for i in self.prog.code[g.start : g.end]:
                    if i.op == "call":
                        n = next((a.name for a in i.args if isinstance(a, Name)), None)
                        h = self.prog.funcs.get(n)
                        if n == g.name:
                            raise Unsupported(f"recursive function {n}")
                        if h and h.body is not None and n not in out:
                            out.add(n)
                            todo.append(self._loaded(h))
            self._callees[f.name] = out
        return self._callees[f.name]

    def pack(self, f, args, mem):
        """The kernel's parameter bytes."""
        if len(args) != len(f.params):
            raise TypeError(f"{f.name} takes {len(f.params)} arguments, got {len(args)}")
        buf = bytearray()
        for a, p in zip(args, f.params, strict=True):
            buf += bytes(-len(buf) % p.align)
            if isinstance(a, np.ndarray):
                a = mem.register(a)
            if hasattr(a, "handle"):  # TensorMap
                b = bytes(a.handle)
            elif isinstance(a, (bytes, bytearray, memoryview)):
                b = bytes(a)
            elif isinstance(a, np.generic):
                b = a.tobytes()
            elif isinstance(a, float):
                b = np.array(a, {"f32": "f4", "f64": "f8", "b32": "f4", "b64": "f8"}[p.type]).tobytes()
            else:
                b = (int(a) & ((1 << 8 * p.size) - 1)).to_bytes(p.size, "little")
            if len(b) != p.size:
                raise TypeError(f"{f.name} parameter {p.name}: {p.size} bytes expected, got {len(b)}")
            buf += b
        return bytes(buf)

    def launch(
        self,
        name,
        grid,
        block,
        args,
        dynamic_smem=0,
        mem=None,
        *,
        sanitize=True,
        on_error="raise",
        shuffle=None,
        block_races=False,
        initcheck=True,
        max_instr=None,
        blocks=None,
        batch=True,
        together=True,
        collectives_order=True,
    ):
        """Run a kernel.

        name: mangled name or a unique part of it.  args: ints/floats, numpy scalars, numpy arrays
        (registered, passed as pointers), bytes (by-value structs), TensorMap.  mem: the memory that it may
        touch besides the module's own variables.  sanitize: shared-memory checks.  on_error: 'raise' or
        'collect' (race, init and barrier reports only).  shuffle: seed for a random block order.  blocks: run
        only these linear block ids.  block_races: report a block that, without atomics, writes or reads a
        byte that another one wrote, or writes one that another read.  initcheck=False: allow reads of
        unwritten shared memory (it holds NaN, so use of them still shows).  max_instr: Deadlock after so many
        instructions.  collectives_order: mma, shfl, ldmatrix and the like order the shared accesses of their
        warp, as on hardware; False holds the kernel against the PTX ISA, which promises that of bar.warp.sync
        alone.

        Slower, with the same results: batch=False, one instruction at a time in program order (batches.py);
        together=False, one block after another even where several can run as if they were one large block.
        """
        mem = mem or self.mem
        f, grid, block = self.find(name), _dim3(grid), _dim3(block)
        threads = block[0] * block[1] * block[2]
        if not 0 < threads <= 1024 or (f.maxntid and threads > f.maxntid):
            raise PtxError(f"block of {threads} threads not allowed for {f.name} (maxntid {f.maxntid})")
        if f.cluster > 1:
            raise Unsupported(f"{f.name} needs clusters of {f.cluster} blocks")
        params = self.pack(f, args, mem)
        n = grid[0] * grid[1] * grid[2]
        order = np.arange(n) if blocks is None else np.asarray(blocks)
        if shuffle is not None:
            order = np.random.default_rng(shuffle).permutation(order)
        options = {"on_error": on_error, "block_races": block_races, "max_instr": max_instr}
        options |= {"initcheck": initcheck, "batch": batch, "collectives_order": collectives_order}

        def run(resident):
            m = self._machine(f, block, dynamic_smem, sanitize, resident)
            m.reset(grid, params, mem, **options)
            mem.owner.clear()
            mem.add(m.pbuf.ctypes.data, m.pbuf.nbytes, f"parameters of {f.name}", writable=False)
            try:
                seconds = m.launch(order)
            finally:
                mem.remove(m.pbuf.ctypes.data)
            return Result(seconds, len(order), m.n_group, m.n_thread, m.reports, m.unexecuted())

        with self._variables_in(mem):
            resident = min(len(order), TOGETHER // (-(-threads // 32) * 32)) if together else 1
            before = mem.snapshot(MOST_WRITABLE) if resident > 1 and self._independent(f) else None
            if before is not None:
                try:
                    return run(resident)
                except (Doubt, PtxError) as e:  # something is wrong: once more, for the exact report
                    mem.restore(before)
                    result = run(1)
                    if not result.reports:
                        raise RuntimeError(
                            f"ptxrun: {f.name} fails only where its blocks run together"
                        ) from e
                    return result
            return run(1)

    @contextlib.contextmanager
    def _variables_in(self, mem):
        """The module's own variables are part of mem meanwhile."""
        v = self._variables
        own = [(s, e - s, n) for s, e, n in zip(v.starts, v.ends, v.names, strict=True)]
        for ptr, nbytes, label in own:
            mem.add(ptr, nbytes, label)
        try:
            yield
        finally:
            for ptr, _, _ in own:
                mem.remove(ptr)

    def _independent(self, f):
        """May blocks of the kernel run together?

        Not where an order among them may show in the result, nor with instructions that know one block."""
        functions = [f, *(self.prog.funcs[n] for n in self.callees(f))]
        code = [i for g in functions for i in self.prog.code[g.start : g.end]]
        return not any(
            i.op in ("atom", "red", "mbarrier", "wgmma")
            or (i.op == "cp" and i.has("bulk", "mbarrier"))
            or (i.op == "barrier" and i.has("cluster"))
            or i.has("volatile", "relaxed", "acquire", "release")
            for i in code
        )

    def _machine(self, f, block, dynamic_smem, sanitize, resident):
        """The kernel bound for this shape of block; the latest few are kept."""
        key = f.name, block, dynamic_smem, sanitize, resident
        m = self._machines.pop(key, None) or Machine(self, f, block, dynamic_smem, sanitize, resident)
        self._machines[key] = m
        while len(self._machines) > MACHINES_KEPT:
            self._machines.pop(next(iter(self._machines)))
        return m


def _dim3(d):
    return (*d, *(1,) * (3 - len(d))) if isinstance(d, (tuple, list)) else (int(d), 1, 1)
