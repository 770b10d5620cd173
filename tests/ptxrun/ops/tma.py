"""Bulk asynchronous copies: cp.async.bulk (linear), .tensor (TMA tiles), reductions, bulk groups.

Data moves at issue; visibility is what the sanitizer models: writes belong to the agent
('tma', mbarrier), reads to ('bulk', thread) until its wait_group."""

import numpy as np

from ..errors import AccessError, Unsupported
from ..instr import Vec
from ..memory import ORIGIN, SHARED_BASE, read_host, view
from ..tensormap import TensorMap, swizzle_address
from . import mbar
from .mem import check_shared

ATOMS = {
    "u32": "u4",
    "s32": "i4",
    "u64": "u8",
    "s64": "i8",
    "f32": "f4",
    "f64": "f8",
    "f16": "f2",
    "bf16": "u2",
}


def tensor_map(M, addr):
    M.mem.check(np.array([addr]), 128, np.array([0]), "tensor map read", align=64)
    try:
        t = TensorMap.decode(read_host(addr, 128))
    except ValueError as e:
        raise AccessError(f"tensor map at {addr:#x}: {e}") from e
    if t is None:
        raise AccessError(f"no ptxrun TensorMap at {addr:#x} (handle not recognised)")
    return t


def tile(t, coord):
    """Box at coord -> (smem element offsets, global byte addresses, valid mask), rows x inner."""
    inner = np.arange(t.box[0])
    rows = np.zeros(1, np.int64)
    ok = np.ones(1, bool)
    for d in range(1, t.rank):  # outer dims, innermost fastest
        c = np.int64(coord[d]) + np.arange(t.box[d])
        v = (c >= 0) & (c < t.dims[d])
        rows = (c[:, None] * t.strides[d - 1] + rows).ravel()
        ok = (v[:, None] & ok).ravel()
    c0 = np.int64(coord[0]) + inner
    v0 = (c0 >= 0) & (c0 < t.dims[0])
    return t.address + rows[:, None] + c0 * t.size, ok[:, None] & v0


def smem_offsets(M, t, dst, tid):
    n = int(np.prod(t.box))
    check_shared(M, np.array([dst]), 1, np.array([tid]), "TMA tile")
    check_shared(M, np.array([dst + n * t.size - 1]), 1, np.array([tid]), "TMA tile")
    if dst % 128:
        raise AccessError(f"TMA shared address {dst:#x} is not 128-byte aligned")
    return swizzle_address(dst + np.arange(n, dtype=np.int64) * t.size, t.swizzle) // t.size


def granules(M, lo, n):
    return np.arange(lo // M.san.g, (lo + n - 1) // M.san.g + 1)


def swizzled_granules(M, t, dst):
    """All granules of the tile (swizzling permutes within the tile when it is aligned to its pattern)."""
    n = int(np.prod(t.box)) * t.size
    a = swizzle_address(dst + np.arange(0, n, 16, dtype=np.int64), t.swizzle)
    return ((a // M.san.g)[:, None] + M.san.span[16]).ravel()


class Groups:
    """Bulk groups of one thread."""

    def __init__(self):
        self.seq, self.items = 0, []


def groups(M, t):
    return M.state.setdefault("bulk", {}).setdefault(int(t), Groups())


def bulk(M, ins):
    if ins.has("commit_group"):

        def commit(m):
            for t in M.active(m):
                groups(M, t).seq += 1

        return commit
    if ins.has("wait_group"):
        n = int(ins.args[0].value)

        def wait(m):
            for t in M.active(m):
                g = groups(M, t)
                done = [x for x in g.items if x[0] < g.seq - n]
                g.items = [x for x in g.items if x[0] >= g.seq - n]
                if M.san and done:
                    c = done[-1][1]
                    M.san.K[t, c] = max(M.san.K[t, c], max(x[2] for x in done))
                    M.san.dirty[t >> 5] = True

        return wait
    if ins.has("prefetch"):
        return lambda m: None
    tensor = ins.has("tensor")
    spaces = [x.split("::")[0] for x in ins.mods if x.split("::")[0] in ("shared", "global")]
    red = (
        next((x for x in ins.mods if x in ("add", "min", "max", "and", "or", "xor", "inc", "dec")), None)
        if ins.has("reduce")
        else None
    )
    if spaces == ["shared", "global"]:
        return load(M, ins, tensor)
    if spaces == ["global", "shared"]:
        return store(M, ins, tensor, red)
    raise Unsupported(f"bulk copy {spaces}")


def coords(M, mem):
    v = mem.rest[0]
    c = [M.src(x, "s32") for x in (v.items if isinstance(v, Vec) else [v])]
    return lambda t: [int(x[t]) if np.ndim(x) else int(x) for x in c]


def load(M, ins, tensor):
    if any(x.startswith("im2col") for x in ins.mods):
        raise Unsupported("im2col")
    da, sa = M.addr_fn(ins.args[0]), M.addr_fn(ins.args[1])
    if tensor:
        cf, mb = coords(M, ins.args[1]), M.addr_fn(ins.args[2])
    else:
        size, mb = M.src(ins.args[2], "u32"), M.addr_fn(ins.args[3])

    def run(m):
        for t in M.active(m):
            one = np.array([t])
            dst, src, ba = (int(f(one)[0]) for f in (da, sa, mb))
            dst, ba = dst & (SHARED_BASE - 1), ba & (SHARED_BASE - 1)
            bar = mbar.get(M, ba, int(t))
            if M.san:
                M.san.signalled(int(t), ba, ins.pc)
            if tensor:
                tm = tensor_map(M, src)
                ga, ok = tile(tm, cf(t))
                k = smem_offsets(M, tm, dst, int(t))
                gr = swizzled_granules(M, tm, dst) if M.san else None
                n = ok.size * tm.size
                data = np.zeros(ok.size, f"u{tm.size}")
                okf = ok.ravel()
                if okf.any():
                    a = ga.ravel()[okf]
                    M.mem.check(a, tm.size, np.full(len(a), t), "TMA read")
                    data[okf] = view(tm.size, 1)[(a - ORIGIN) // tm.size]
                col = M.san.async_write(int(t), ("tma", hex(ba)), gr, ins.pc) if M.san else None
                M.smem.view(data.dtype)[k] = data
            else:
                n = int(size[t] if np.ndim(size) else size)
                if n % 16 or src % 16 or dst % 16:
                    raise AccessError(
                        f"bulk copy of {n} bytes from {src:#x} to {dst:#x} is not 16-byte aligned"
                    )
                check_shared(M, np.array([dst, dst + n - 16]), 16, np.array([t, t]), "bulk write")
                M.mem.check(np.array([src]), n, one, "bulk read", align=16)
                col = (
                    M.san.async_write(int(t), ("tma", hex(ba)), granules(M, dst, n), ins.pc)
                    if M.san
                    else None
                )
                M.smem[dst : dst + n] = np.frombuffer(read_host(src, n), np.uint8)
            mbar.complete_tx(M, bar, n, col)

    return run


def combine(red, t):
    from .atom import function

    return function(red, t)


def store(M, ins, tensor, red):
    da, sa = M.addr_fn(ins.args[0]), M.addr_fn(ins.args[1])
    cf = coords(M, ins.args[0]) if tensor else None
    size = None if tensor else M.src(ins.args[2], "u32")
    rt = next((x for x in reversed(ins.mods) if x in ATOMS), None)

    def put(addr, data, t, esz, tid):
        tids = np.full(len(addr), tid)
        k = M.mem.check(addr, esz, tids, "bulk write", write=True)
        g = view(esz, 1)
        i = (addr - ORIGIN) // esz
        if red:
            dt = np.dtype(ATOMS[t])
            data = combine(red, t)(g[i].view(dt), data.view(dt)).astype(dt)
            data = np.ascontiguousarray(data).view(f"u{esz}")
        elif M.block_races:
            M.mem.own(k, addr, esz, M.block_ids[0], tids)
        g[i] = data

    def run(m):
        for t in M.active(m):
            one = np.array([t])
            dst, src = int(da(one)[0]), int(sa(one)[0]) & (SHARED_BASE - 1)
            if tensor:
                tm = tensor_map(M, dst)
                ga, ok = tile(tm, cf(t))
                k = smem_offsets(M, tm, src, int(t))
                gr = swizzled_granules(M, tm, src) if M.san else None
                col = M.san.async_read(int(t), ("bulk", int(t)), gr, ins.pc) if M.san else None
                okf = ok.ravel()
                if okf.any():
                    put(ga.ravel()[okf], M.smem.view(f"u{tm.size}")[k[okf]], tm.dtype, tm.size, int(t))
            else:
                n = int(size[t] if np.ndim(size) else size)
                if n % 16 or src % 16 or dst % 16:
                    raise AccessError(
                        f"bulk copy of {n} bytes from {src:#x} to {dst:#x} is not 16-byte aligned"
                    )
                check_shared(M, np.array([src, src + n - 16]), 16, np.array([t, t]), "bulk read")
                col = (
                    M.san.async_read(int(t), ("bulk", int(t)), granules(M, src, n), ins.pc) if M.san else None
                )
                esz = np.dtype(ATOMS[rt]).itemsize if red else 8
                a = dst + np.arange(0, n, esz, dtype=np.int64)
                put(a, M.smem[src : src + n].copy().view(f"u{esz}"), rt, esz, int(t))
            g = groups(M, t)
            if M.san:
                g.items.append((g.seq, col, M.san.now, ins.pc))
                M.san.now += 1

    return run
