"""TensorMap: a stand-in for CUtensorMap.  The 128-byte handle describes itself, so that it can be
copied anywhere (kernel parameter, global memory) and also written by a C stub of
cuTensorMapEncodeTiled (see tensormap_stub.h)."""

import struct

MAGIC = 0x50414D5454585450
FMT = "<QQ4Q5I5H5B5B"
DTYPES = {
    "u8": (0, 1),
    "u16": (1, 2),
    "u32": (2, 4),
    "s32": (3, 4),
    "u64": (4, 8),
    "s64": (5, 8),
    "f16": (6, 2),
    "f32": (7, 4),
    "f64": (8, 8),
    "bf16": (9, 2),
    "f32_ftz": (10, 4),
    "tf32": (11, 4),
    "tf32_ftz": (12, 4),
}
BY_CODE = {c: (n, s) for n, (c, s) in DTYPES.items()}
SWIZZLE = {"none": 0, "32B": 1, "64B": 2, "128B": 3, None: 0, 0: 0, 32: 1, 64: 2, 128: 3}


class TensorMap:
    """dims/box: innermost dimension first.  strides: bytes for dims 1.. (innermost is contiguous)."""

    def __init__(self, dtype, address, dims, strides, box, swizzle="none", element_strides=None):
        self.dtype, self.address, self.dims, self.strides = dtype, int(address), list(dims), list(strides)
        self.box, self.swizzle = list(box), SWIZZLE[swizzle]
        self.estr = list(element_strides or [1] * len(dims))
        r = self.rank = len(dims)
        if not 1 <= r <= 5 or len(strides) != r - 1 or len(box) != r:
            raise ValueError(f"{r} dimensions with {len(strides)} strides and {len(box)} box sizes")
        self.size = DTYPES[dtype][1]
        self._check()

    def _check(self):
        inner = self.box[0] * self.size
        lim = {1: 32, 2: 64, 3: 128}.get(self.swizzle)
        if lim and inner > lim:
            raise ValueError(f"inner box of {inner} bytes exceeds the {lim}-byte swizzle span")
        if inner % 16 or any(not 1 <= b <= 256 for b in self.box):
            raise ValueError(f"box {self.box} not allowed (inner bytes {inner})")
        if self.address % 16 or any(s % 16 or s >= 1 << 40 for s in self.strides):
            raise ValueError("global address and strides must be multiples of 16 bytes")
        if any(e != 1 for e in self.estr):
            raise ValueError("element strides other than 1 are not supported")

    @property
    def handle(self):
        def pad(x, n, v=0):
            return list(x) + [v] * (n - len(x))

        b = struct.pack(
            FMT,
            MAGIC,
            self.address,
            *pad(self.strides, 4),
            *pad(self.dims, 5, 1),
            *pad(self.box, 5, 1),
            *pad(self.estr, 5, 1),
            self.rank,
            DTYPES[self.dtype][0],
            0,
            self.swizzle,
            0,
        )
        return b + bytes(128 - len(b))

    @classmethod
    def decode(cls, b):
        v = struct.unpack(FMT, b[: struct.calcsize(FMT)])
        if v[0] != MAGIC:
            return None
        rank, code, inter, swz, oob = v[21:26]
        if inter:
            raise ValueError("interleaved tensor maps are not supported")
        if oob:
            raise ValueError("tensor maps that fill with NaN are not supported")
        name = BY_CODE[code][0]
        t = cls(
            name,
            v[1],
            v[6 : 6 + rank],
            v[2 : 2 + rank - 1],
            v[11 : 11 + rank],
            {0: "none", 1: "32B", 2: "64B", 3: "128B"}[swz],
            v[16 : 16 + rank],
        )
        return t

    @classmethod
    def for_array(cls, a, box, swizzle="none", dtype=None, dims=None):
        """Map of a C-contiguous numpy array; box innermost first."""
        d = list(a.shape[::-1])
        return cls(
            dtype or {"f2": "f16", "f4": "f32", "u2": "bf16", "u1": "u8", "i4": "s32"}[a.dtype.str[1:]],
            a.ctypes.data,
            dims or d,
            list(a.strides[::-1][1:]),
            box,
            swizzle,
        )


def swizzle_address(a, mode):
    """Swizzled shared byte addresses; mode 0..3 = none, 32B, 64B, 128B."""
    return a if not mode else a ^ (((a >> 7) & ((1 << mode) - 1)) << 4)
