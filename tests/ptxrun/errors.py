"""Everything the executor can complain about."""


class PtxError(Exception):
    """Base class.  `where` (kernel, block, PTX line and text) is filled in by the scheduler."""

    where = ""

    def __str__(self):
        return super().__str__() + (f"\n    at {self.where}" if self.where else "")


class Unsupported(PtxError):
    """An instruction, modifier or operand the executor does not know."""


class AccessError(PtxError):
    """Out-of-bounds or misaligned memory access."""


class InitError(PtxError):
    """Read of shared memory never written."""


class RaceError(PtxError):
    """Two unordered conflicting accesses to shared (or, on request, global) memory."""


class BarrierError(PtxError):
    """Divergent or malformed barrier / warp-collective use."""


class Deadlock(PtxError):
    """No thread of the block can make progress."""


class Trap(PtxError):
    """trap instruction or failed device assert."""
