"""One module per instruction family; importing this package registers all handlers."""

from . import alu, atom, bits, control, cpasync, cvt, mbar, mem, mma, select, tma, warp, wgmma  # noqa: F401
