"""Shared-memory sanitizer: initcheck, cp.async/TMA visibility and a happens-before race detector.

Time is one counter `now`, advanced at each synchronisation event.  An access is tagged with its
agent (thread, or an async column: TMA via one mbarrier, wgmma of one warpgroup, bulk store of one
thread) and `now`.  K[t, c] is the latest time such that everything agent c did up to then
happens-before thread t's current point.  Full-block barriers only raise `floor` (all know all).
`ws[w]` is the time of warp w's last warp-level sync.  Shadow state is kept per granule (the
narrowest shared access in the kernel); readers are kept per warp (last reading lane).
"""

import numpy as np

from .errors import InitError, RaceError


class Doubt(Exception):
    """A batch of instructions would need a report: they are to run one at a time."""


POISON = np.int32(2**31 - 1)  # never written
PENDING = np.int32(2**31 - 2)  # cp.async in flight
FINISHED = np.int32(2**31 - 3)  # later than everything that is no such mark


class Sanitizer:
    def __init__(self, T, blocks, smem_bytes, granule, machine, n_async=96):
        """T: threads of all blocks that run together; smem_bytes: shared memory of each, a multiple of 16."""
        self.T, self.W, self.g, self.m = T, T // 32, granule, machine
        self.n_async = n_async
        self.block_threads, self.block_granules = T // blocks, smem_bytes // granule
        n = self.block_granules * blocks
        self.wtime = np.full(n, POISON, np.int32)
        self.wt = np.zeros(n, np.int32)
        self.wpc = np.zeros(n, np.int32)
        self.rows = self.W // blocks  # readers: a row for each warp of a block, then for async agents
        self.rtag = np.zeros((self.rows + n_async, n), np.int32)  # now * 32 + lane
        self.rpc = np.zeros(n, np.int32)
        self.atomic = np.zeros(n, bool)
        self._mark = np.zeros(n, np.int32)
        self.K = np.zeros((T, T + n_async), np.int32)
        self.ws = np.zeros(self.W, np.int32)
        self.fence = np.zeros(T, np.int32)  # last fence.proxy.async
        self.init_fence = np.zeros(T, np.int32)  # last fence.mbarrier_init, or fence.proxy.async
        self.dirty = np.zeros(self.W, bool)
        self.floor = np.zeros(blocks, np.int32)  # of each block
        self.low, self.now = 0, 1  # low: the least floor
        self.cols, self.most_cols = {}, 0
        self.last = 0  # tag of the latest access
        self.row = (np.arange(T) % self.block_threads) >> 5
        self.block = np.arange(T + n_async) // self.block_threads  # async agents: kernels with one block
        self.block[T:] = 0
        self.span = {k: np.arange(max(k // granule, 1)) for k in (1, 2, 4, 8, 16, 32)}

    def new_blocks(self):
        self.wtime[:] = POISON
        self.atomic[:] = False
        self.floor[:] = self.low = self.now
        self.now += 1
        self.dirty[:] = False
        self.cols.clear()
        self.fence[:] = self.init_fence[:] = self.low

    def reset(self, collectives):
        """As new, for another launch.  collectives: do they order their warp's accesses?"""
        self.collectives = collectives
        self.rtag[: self.rows + self.most_cols] = 0
        self.K[:] = 0
        self.ws[:] = 0
        self.floor[:] = self.low = 0
        self.now, self.last = 1, 0
        self.strict = False

    def _report(self, *report):
        if self.strict or self.m.resident > 1:
            raise Doubt
        self.m.report(*report)

    # -- shadow accesses ------------------------------------------------------------------
    def _idx(self, addr, nbytes):
        return (addr // self.g)[:, None] + self.span[nbytes] if nbytes > self.g else (addr // self.g)[:, None]

    def overlap(self, addr):
        """Do two of these (aligned, equally wide) accesses touch the same bytes?"""
        i, order = addr // self.g, np.arange(len(addr))
        self._mark[i] = order
        return bool((self._mark[i] != order).any())

    def known(self, t, agent, time):
        """Does access (agent, time) happen-before thread t's current point?  Broadcasts."""
        return (
            (agent == t)
            | (time <= self.floor[self.block[t]])
            | (self.K[t, agent] >= time)
            | ((agent >> 5 == t >> 5) & (agent < self.T) & (time <= self.ws[t >> 5]))
        )

    def read(self, tids, addr, nbytes, pc, atomic=False, step=0):
        """step: how many warp-level synchronisations lie between the first of these reads and each one."""
        idx = self._idx(addr, nbytes)
        wt = self.wtime[idx]
        if wt.max() > self.low:
            self._check_w(tids, addr, idx, wt, pc, "read", atomic)
        if not atomic:
            self.rtag[self.row[tids][:, None], idx] = ((self.now + step) * 32 + (tids & 31))[:, None]
            self.rpc[idx] = pc
            self.last = self.now

    def write(self, tids, addr, nbytes, pc, atomic=False, pending=False):
        idx = self._idx(addr, nbytes)
        wt = self.wtime[idx]
        if ((wt > self.low) & (wt != POISON)).any():
            self._check_w(tids, addr, idx, wt, pc, "write", atomic)
        self._check_r(tids, addr, idx, pc)
        self.wtime[idx] = PENDING if pending else self.now
        self.wt[idx] = tids[:, None]
        self.wpc[idx] = pc
        self.atomic[idx] = atomic
        self.last = self.now

    def land(self, tids, addr, nbytes):
        """cp.async data of `tids` became visible to their own threads."""
        idx = self._idx(addr, nbytes)
        self.wtime[idx] = self.now
        self.last = self.now

    def _check_w(self, tids, addr, idx, wt, pc, what, atomic):
        t = np.broadcast_to(tids[:, None], idx.shape)
        w = self.wt[idx]
        if what == "read" and self.m.initcheck and (wt == POISON).any():
            i = np.argwhere(wt == POISON)[0]
            self._report(
                InitError,
                f"read of uninitialised shared memory at {int(idx[tuple(i)]) * self.g:#x} "
                f"by thread {int(t[tuple(i)])}",
                pc,
                None,
            )
        bad = wt == PENDING
        if bad.any():
            i = tuple(np.argwhere(bad)[0])
            self._report(
                RaceError,
                f"{what} of shared {int(idx[i]) * self.g:#x} by thread {int(t[i])} while a "
                f"cp.async of thread {int(w[i])} to it is in flight (not waited for)",
                pc,
                int(self.wpc[idx[i]]),
            )
        bad = (wt > self.low) & (wt < PENDING)
        bad &= ~self.known(t, w, wt)
        if atomic:
            bad &= ~self.atomic[idx]
        if bad.any():
            i = tuple(np.argwhere(bad)[0])
            self._report(
                RaceError,
                f"{what} of shared {int(idx[i]) * self.g:#x} by {self.agent(int(t[i]))} is not ordered "
                f"after the write by {self.agent(int(w[i]))}",
                pc,
                int(self.wpc[idx[i]]),
            )

    def _check_r(self, tids, addr, idx, pc):
        r = self.rtag[: self.rows + len(self.cols), idx]  # (rows, n, k)
        late = (r >> 5) > self.low
        if not late.any():
            return
        row, i, k = np.nonzero(late)
        tag = r[row, i, k]
        first = self.block[tids[i]] * self.block_threads
        ag = np.where(row < self.rows, first + row * 32 + (tag & 31), self.T + row - self.rows)
        bad = ~self.known(tids[i], ag, tag >> 5)
        if bad.any():
            j = int(bad.argmax())
            self._report(
                RaceError,
                f"write of shared {int(idx[i[j], k[j]]) * self.g:#x} by {self.agent(int(tids[i[j]]))} "
                f"is not ordered after the read by {self.agent(int(ag[j]))}",
                pc,
                int(self.rpc[idx[i[j], k[j]]]),
            )

    # -- async agents ---------------------------------------------------------------------
    def col(self, key):
        """Column of the async agent `key` (e.g. ('tma', mbarrier address))."""
        if key not in self.cols:
            if len(self.cols) >= self.n_async:
                raise RaceError("too many async agents for the sanitizer (raise n_async)")
            self.cols[key] = self.T + len(self.cols)
            self.most_cols = max(self.most_cols, len(self.cols))
        return self.cols[key]

    def agent(self, a):
        if a < self.T:
            return f"thread {a}"
        return "async " + next((f"{k[0]}[{k[1]}]" for k, v in self.cols.items() if v == a), str(a))

    def granules(self, addr, nbytes=16):
        """Unique granule indices covered by accesses of nbytes at addr."""
        a = np.unique(addr // self.g)
        return a if nbytes <= self.g else np.unique((a[:, None] + self.span[nbytes]).ravel())

    def async_read(self, tid, key, gr, pc, proxy=True):
        """Async-proxy read of granules gr issued by thread `tid` (wgmma, TMA store)."""
        wt = self.wtime[gr]
        if wt.max() > self.low:
            self._check_w(np.array([tid]), None, gr[None, :], wt[None, :], pc, "read", False)
        if proxy:
            self._check_proxy(tid, gr, wt, pc, "read")
        c = self.col(key)
        self.rtag[self.rows + c - self.T, gr] = self.now * 32
        self.rpc[gr] = pc
        self.last = self.now
        return c

    def _check_proxy(self, tid, gr, wt, pc, what):
        """Thread `tid` lets the async proxy at granules: it or their writer must have fenced the write."""
        self._check_fence(self.fence, tid, gr, wt, pc, f"async-proxy {what}", "fence.proxy.async")

    def signalled(self, tid, addr, pc):
        """A copy issued by thread `tid` will arrive at the mbarrier at addr."""
        gr = self.granules(np.array([addr]), 8)
        self._check_fence(
            self.init_fence, tid, gr, self.wtime[gr], pc, "signal to the mbarrier", "fence.mbarrier_init"
        )

    def _check_fence(self, last, tid, gr, wt, pc, what, fence):
        w = self.wt[gr]
        generic = (w < self.T) & (wt < PENDING)
        bad = generic & (last[np.where(generic, w, 0)] < wt) & (last[tid] < wt)
        if bad.any():
            i = int(bad.argmax())
            self._report(
                RaceError,
                f"{what} of shared {int(gr[i]) * self.g:#x} without {fence} after the generic write by "
                f"thread {int(w[i])}",
                pc,
                int(self.wpc[gr[i]]),
            )

    def async_write(self, tid, key, gr, pc):
        wt = self.wtime[gr][None, :]
        t = np.array([tid])
        if ((wt > self.low) & (wt != POISON)).any():
            self._check_w(t, None, gr[None, :], wt, pc, "write", False)
        self._check_r(t, None, gr[None, :], pc)
        self._check_proxy(tid, gr, wt[0], pc, "write")
        c = self.col(key)
        self.wtime[gr], self.wt[gr], self.wpc[gr] = self.now, c, pc
        self.atomic[gr] = False
        self.last = self.now
        return c

    # -- synchronisation events -----------------------------------------------------------
    def full_barrier(self, block):
        """All live threads of a block synchronise.  Async agents are NOT covered."""
        if len(self.cols):
            self._floor_threads()
        else:
            self.floor[block] = self.now
            self.now += 1
            self.low = int(self.floor.min())

    def finished(self, block):
        """Its threads have exited: nothing of it is looked at any more."""
        self.floor[block] = FINISHED
        self.low = int(self.floor.min())

    def _floor_threads(self):
        K = self.K[:, self.T :].max(0)
        self.K[:, : self.T] = self.now
        self.K[:, self.T :] = K
        self.dirty[:] = False
        self.ws[:] = self.now
        self.now += 1

    def collective(self, warps):
        """Warps whose lanes all executed mma, shfl, ldmatrix or the like."""
        if self.collectives:
            self.warp_sync(warps)

    def warp_sync(self, warps):
        """warps: slice or index array of warps whose lanes all synchronised."""
        if not self.dirty.any() and (self.last <= self.low or self.last <= self.ws[warps].min()):
            return
        self.ws[warps] = self.now
        self.now += 1
        if self.dirty.any():
            for w in np.flatnonzero(self.dirty):
                if isinstance(warps, slice) or w in warps:
                    s = slice(w * 32, w * 32 + 32)
                    self.K[s] = self.K[s].max(0)
                    self.dirty[w] = False

    def more_syncs(self, warps, n):
        """n more synchronisations of these warps with an access after each: those that `step` counted."""
        if n:
            self.ws[warps] = self.now + n - 1
            self.now += n
        self.last = self.now

    def release(self, ix):
        """Knowledge vector published by threads ix (everything they know and did so far)."""
        V = self.K[ix].max(0) if len(ix) > 1 else self.K[ix[0]].copy()
        for w in np.unique(ix >> 5):
            s = slice(w * 32, w * 32 + 32)
            np.maximum(V[s], self.ws[w], out=V[s])
        V[ix] = self.now
        self.now += 1
        return V

    def acquire(self, ix, V):
        self.K[ix] = np.maximum(self.K[ix], V)
        n = np.bincount(ix >> 5, minlength=self.W)
        self.dirty |= (n > 0) & (n < 32)
