"""Global memory = host memory.  Every access is checked against registered allocations."""

import bisect
import ctypes

import numpy as np

from .errors import AccessError, RaceError

ORIGIN = 4096  # host address of element 0 of the views below
SHARED_BASE = 1 << 60  # generic-address windows
LOCAL_BASE = 2 << 60
SEVERAL = -1  # more than one block


def host_view(dtype, vec=1):
    """A numpy view over the whole user address space; only checked addresses are ever indexed."""
    dt = np.dtype(dtype)
    shape = ((1 << 47) // dt.itemsize,) if vec == 1 else ((1 << 47) // dt.itemsize // vec, vec)

    class AddressSpace:
        @property
        def __array_interface__(self):
            return {"data": (ORIGIN, False), "shape": shape, "typestr": dt.str, "version": 3}

    return np.asarray(AddressSpace())


_VIEWS = {}


def view(nbytes_elem, vec):
    k = nbytes_elem, vec
    if k not in _VIEWS:
        _VIEWS[k] = host_view(f"<u{nbytes_elem}", vec)
    return _VIEWS[k]


class Memory:
    """Registry of host allocations a kernel may touch."""

    def __init__(self):
        self.starts, self.ends, self.names, self.writable, self.keep = [], [], [], [], {}
        self.owner = {}  # start -> shadows, 1 + the block that wrote, that read a byte (optional check)
        self._rebuild()

    def _rebuild(self):
        self.s = np.array(self.starts or [0], np.int64)
        self.e = np.array(self.ends or [0], np.int64)

    def add(self, ptr, nbytes, name="", keep=None, *, writable=True):
        """Register [ptr, ptr+nbytes), for reading alone if not writable.  Returns ptr."""
        i = bisect.bisect(self.starts, ptr)
        if (i and self.ends[i - 1] > ptr) or (i < len(self.starts) and self.starts[i] < ptr + nbytes):
            raise ValueError(f"allocation {name or hex(ptr)} overlaps a registered one")
        self.starts.insert(i, ptr)
        self.ends.insert(i, ptr + nbytes)
        self.names.insert(i, name or f"alloc@{ptr:#x}")
        self.writable.insert(i, writable)
        self.keep[ptr] = keep
        self._rebuild()
        return ptr

    def register(self, array, name=""):
        """Register a (contiguous) numpy array; returns its address.  Registering twice is fine."""
        ptr, n = array.ctypes.data, array.nbytes
        if not array.flags.c_contiguous:
            raise ValueError("array must be contiguous")
        i = bisect.bisect(self.starts, ptr) - 1
        if i >= 0 and self.starts[i] <= ptr and ptr + n <= self.ends[i]:
            return ptr
        return self.add(ptr, n, name, array)

    def alloc(self, nbytes, name="", align=256, fill=0xA5):
        """Aligned host buffer (uint8 array) registered exactly at its size; poisoned with `fill`."""
        raw = np.empty(nbytes + align, np.uint8)
        o = -raw.ctypes.data % align
        a = raw[o : o + nbytes]
        a[:] = fill
        self.add(a.ctypes.data, nbytes, name, a)
        return a

    def array(self, value, name="", align=256):
        """Aligned registered copy of a numpy array (same dtype and shape)."""
        value = np.ascontiguousarray(value)
        a = (
            self.alloc(max(value.nbytes, 1), name, align)[: value.nbytes]
            .view(value.dtype)
            .reshape(value.shape)
        )
        a[...] = value
        return a

    def remove(self, ptr):
        i = self.starts.index(ptr)
        for column in (self.starts, self.ends, self.names, self.writable):
            del column[i]
        self.keep.pop(ptr, None)
        self._rebuild()

    def check(self, addr, nbytes, tids, what, align=None, write=False):
        """Are these accesses aligned, and inside what may be read (written)?  addr: int64, one a thread.

        Returns the allocation they are in, or one for each where they are in several.
        """
        if int(np.bitwise_or.reduce(addr)) & ((align or nbytes) - 1):
            i = int(((addr & ((align or nbytes) - 1)) != 0).argmax())
            raise AccessError(
                f"misaligned {nbytes}-byte global {what} at {int(addr[i]):#x} by thread {int(tids[i])}"
            )
        lo = int(np.minimum.reduce(addr))
        k = bisect.bisect(self.starts, lo) - 1
        if k >= 0 and int(np.maximum.reduce(addr)) + nbytes <= self.ends[k]:
            if write and not self.writable[k]:
                raise AccessError(
                    f"global {what} to {self.names[k]} by thread {int(tids[0])}: it is read-only"
                )
            return k
        k = np.searchsorted(self.s, addr, "right") - 1
        bad = (k < 0) | (addr + nbytes > self.e[k])
        if bad.any():
            i = int(bad.argmax())
            raise AccessError(
                f"global {what} of {nbytes} bytes out of bounds: address {int(addr[i]):#x} by thread "
                f"{int(tids[i])} ({int(bad.sum())} threads bad); {self.describe(int(addr[i]))}"
            )
        bad = ~np.array(self.writable)[k]
        if write and bad.any():
            i = int(bad.argmax())
            raise AccessError(
                f"global {what} to {self.names[k[i]]} by thread {int(tids[i])}: it is read-only"
            )
        return k

    def describe(self, a):
        k = bisect.bisect(self.starts, a) - 1
        out = []
        if k >= 0:
            size = self.ends[k] - self.starts[k]
            out.append(f"{a - self.ends[k]} bytes past the end of {self.names[k]} ({size} bytes)")
        if k + 1 < len(self.starts):
            out.append(f"{self.starts[k + 1] - a} bytes before {self.names[k + 1]}")
        return "nearest: " + "; ".join(out) if out else "no allocation registered"

    def own(self, k, addr, nbytes, blocks, tids):
        """Optional check across blocks: bytes are written, without atomics, that another block wrote or read.

        k: what check() returned for these accesses; blocks: the block of each, or one for all.
        """
        for j, at, block, t in self._parts(k, addr, nbytes, blocks, tids):
            written, read = self._shadows(j)
            self._foreign(written[at], block, j, at, t, "write to", "written")
            self._foreign(read[at], block, j, at, t, "write to", "read")
            written[at] = block
            self._foreign(written[at], block, j, at, t, "write to", "written")  # within this instruction

    def own_read(self, k, addr, nbytes, blocks, tids):
        """The same for a read of what another block wrote."""
        for j, at, block, t in self._parts(k, addr, nbytes, blocks, tids):
            if self.writable[j]:
                written, read = self._shadows(j)
                self._foreign(written[at], block, j, at, t, "read of", "written")
                read[at] = np.where((read[at] == 0) | (read[at] == block), block, SEVERAL)
                clash = read[at] != block  # another block within this instruction, or one before
                read[at[clash]] = SEVERAL

    @staticmethod
    def _parts(k, addr, nbytes, blocks, tids):
        """For each allocation: it, its bytes (n, nbytes), 1 + block (n, 1) and threads of the accesses."""
        blocks = np.broadcast_to(blocks, len(addr)) + 1
        for j in [k] if np.ndim(k) == 0 else np.unique(k).tolist():
            part = slice(None) if np.ndim(k) == 0 else k == j
            yield j, addr[part, None] + np.arange(nbytes), blocks[part, None], tids[part]

    def _shadows(self, j):
        """The blocks that wrote and that read each byte of an allocation, by the byte's address."""
        start, size = self.starts[j], self.ends[j] - self.starts[j]
        if start not in self.owner:
            self.owner[start] = np.zeros(size, np.int32), np.zeros(size, np.int32)
        return [_Shadow(x, start) for x in self.owner[start]]

    def _foreign(self, others, block, j, at, tids, what, done):
        bad = (others != 0) & (others != block)
        if bad.any():
            i = int(bad.any(1).argmax())
            other = int(others[bad][0]) - 1
            by = f"block {other}" if other >= 0 else "several blocks"
            place = f"{self.names[j]}+{int(at[i, 0]) - self.starts[j]}"
            me = f"block {int(block[i, 0]) - 1} thread {int(tids[i])}"
            raise RaceError(f"global {what} {place} by {me}: already {done} by {by}")

    def snapshot(self, most):
        """[(address, bytes)] of what may be written; None where that is more than `most` bytes."""
        ranges = [(s, e - s) for s, e, w in zip(self.starts, self.ends, self.writable, strict=True) if w]
        if sum(n for _, n in ranges) > most:
            return None
        return [(start, read_host(start, n)) for start, n in ranges]

    @staticmethod
    def restore(snapshot):
        for start, data in snapshot:
            ctypes.memmove(start, data, len(data))


class _Shadow:
    """An array over an allocation, indexed by addresses."""

    def __init__(self, array, start):
        self.array, self.start = array, start

    def __getitem__(self, at):
        return self.array[at - self.start]

    def __setitem__(self, at, value):
        self.array[at - self.start] = value


def read_host(ptr, n):
    return ctypes.string_at(ptr, n)
