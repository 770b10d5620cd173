"""Runs the threads of a block: groups of threads with the same pc, the lowest pc first."""

import time

import numpy as np

from . import lanes
from .errors import BarrierError, Deadlock, PtxError
from .registry import BLOCKED, EXITED, PARKED, RUN, Park, short
from .sanitize import Doubt

STARVED = 2000  # scheduling rounds: then a thread that others overtake at lower pcs (they spin) runs once
PLAN_AFTER = 1  # runs of a stretch of code before it pays to plan its batches
PLAN_LENGTH = 8  # and the fewest instructions that are worth it


def launch(M, order):
    t0 = time.perf_counter()
    with np.errstate(all="ignore"):
        for i in range(0, len(order), M.resident):
            run_blocks(M, order[i : i + M.resident])
    return time.perf_counter() - t0


def run_blocks(M, blocks):
    """Runs at most M.resident blocks, together."""
    M.block_ids[:] = blocks[0]
    for slot, block in enumerate(blocks):
        M.block_ids[M.threads_of(slot)] = block
    at = np.unravel_index(M.block_ids, M.grid[::-1])[::-1]
    for i, d in enumerate("xyz"):
        M.special["%ctaid." + d][:] = M.special["%clusterid." + d][:] = at[i]
        M.special["%cluster_ctaid." + d][:] = 0
    M.state.clear()
    M.smem[:] = 0xFF  # NaN in every float format
    M.local[:] = 0xFF
    if M.san:
        M.san.new_blocks()
    M.pcs = np.full(M.T, M.func.start, np.int64)
    M.status = np.zeros(M.T, np.int8)
    M.status[M.tid % M.block_threads >= M.nthreads] = EXITED
    for slot in range(len(blocks), M.resident):
        M.status[M.threads_of(slot)] = EXITED
        if M.san:
            M.san.finished(slot)
    tick, ran = 0, np.zeros(M.T, np.int64)
    while True:
        runnable = M.status == RUN
        if not runnable.any():
            if (M.status == EXITED).all():
                break
            _deadlock(M)
        pcs = M.pcs
        pc = int(pcs[runnable].min())
        tick += 1
        starved = int(np.where(runnable, ran, tick).argmin())
        if tick - ran[starved] > STARVED:
            pc = int(pcs[starved])
        m = (pcs == pc) & (M.status != EXITED) & (M.status != BLOCKED)
        M.status[m] = RUN
        rest = ~m & ((M.status == RUN) | (M.status == PARKED))
        stops = np.unique(pcs[rest]) if rest.any() else None
        ran[m | ~runnable] = tick
        _run_group(M, pc, True if m.all() else m, stops)


def _run_group(M, pc, m, stops):
    """Runs the threads of m from pc until they wait, exit, part, or reach a pc in stops."""
    threads = M.T if m is True else int(m.sum())
    batched = M.batch and lanes.whole_warps_only(m)
    steps = 0
    while True:
        end = M.next_ctl[pc]
        if stops is not None:
            k = int(np.searchsorted(stops, pc, "right"))
            # at a pc where others wait: merge (but not on the very first step)
            if steps and k and stops[k - 1] == pc:
                M.pcs[m] = pc
                return
            if k < len(stops) and stops[k] <= end:
                end = int(stops[k])
        if not _run_straight(M, pc, end, m, batched):
            return
        M.hits[pc : end + 1] += 1
        M.n_group += end - pc + 1
        M.n_thread += (end - pc + 1) * threads
        steps += 1
        if M.max_instr and M.n_group > M.max_instr:
            raise Deadlock(f"instruction limit {M.max_instr} reached at {M.where(pc)}")
        pc = end
        if M.ctl[pc] is None or (stops is not None and end in stops):  # stopped where others wait
            M.pcs[m] = pc
            return
        try:
            new = M.ctl[pc](m, pc)
        except PtxError as e:
            e.where = e.where or M.where(pc)
            raise
        if new < 0:
            return
        if stops is not None and (new <= pc or new > stops[0]):
            M.pcs[m] = new  # let min-pc scheduling decide
            return
        pc = new


def _run_straight(M, pc, end, m, batched):
    """Runs the straight-line instructions pc..end-1.  False where threads were parked."""
    at = pc
    try:
        for at, f in _steps(M, pc, end, batched):  # noqa: B007 - at is for the messages
            f(m)
    except Park as e:
        M.hits[pc:at] += 1
        M.pcs[m] = at
        M.status[e.args[0]] = PARKED
        return False
    except PtxError as e:
        e.where = e.where or M.where(at)
        raise
    except Doubt:
        raise
    except Exception as e:  # a bug of the executor, no PtxError: it says nothing about the kernel
        raise RuntimeError(f"ptxrun failed at {M.where(at)}") from e
    return True


def _steps(M, pc, end, batched):
    """(pc, closure) pairs that do what the instructions pc..end-1 do."""
    if batched and end - pc >= PLAN_LENGTH:
        plan = M.plans.get((pc, end))
        if plan is None:
            M.runs[pc, end] = M.runs.get((pc, end), 0) + 1
            if M.runs[pc, end] > PLAN_AFTER:
                plan = M.plans[pc, end] = lanes.plan(M, pc, end)
        if plan is not None:
            return plan
    return zip(range(pc, end), M.run_ops[pc:end], strict=True)


def _deadlock(M):
    lines = []
    for st, name in ((BLOCKED, "waiting"), (PARKED, "waiting for the rest of their warp")):
        for pc in np.unique(M.pcs[M.status == st]):
            t = np.flatnonzero((M.status == st) & (M.pcs == pc))
            ins = M.prog.code[pc]
            lines.append(
                f"    {len(t)} threads ({t[0]}..{t[-1]}) {name} at PTX line {ins.line}: {short(ins.text)}"
            )
    exited = int((M.status == EXITED)[: M.nthreads].sum())  # where it matters, one block runs
    cls = BarrierError if M.state.get("bar") else Deadlock
    e = cls(f"no thread can continue ({exited} exited):\n" + "\n".join(lines))
    e.where = f"kernel {M.func.name} block {M.block_ids[0]}"
    raise e
