"""ptxrun: run PTX kernels on the CPU with numpy, with a shared-memory sanitizer.  See README.md."""

from .errors import AccessError, BarrierError, Deadlock, InitError, PtxError, RaceError, Trap, Unsupported
from .memory import Memory
from .module import Module, Result
from .tensormap import TensorMap

__all__ = [
    "AccessError",
    "BarrierError",
    "Deadlock",
    "InitError",
    "Memory",
    "Module",
    "PtxError",
    "RaceError",
    "Result",
    "TensorMap",
    "Trap",
    "Unsupported",
]
