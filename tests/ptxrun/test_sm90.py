"""Instructions of sm_90a: mbarrier, TMA, bulk copies and wgmma."""

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import nvcc
import pytest

import ptxrun
from ptxrun import Deadlock, RaceError, TensorMap
from ptxrun.toys import bf16, build, rng, run, unbf16

pytestmark = nvcc.needed

SM90 = """
#ifndef INIT_FENCE
#define INIT_FENCE asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory")
#endif
struct alignas(64) Map { char b[128]; };
__device__ inline void mb_init(u64 *b, int n) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(smem_u32(b)), "r"(n) : "memory");
  INIT_FENCE; }
__device__ inline void mb_expect(u64 *b, int n) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
    :: "r"(smem_u32(b)), "r"(n) : "memory"); }
__device__ inline void mb_arrive(u64 *b) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(smem_u32(b)) : "memory"); }
__device__ inline void mb_wait(u64 *b, int phase) {
  asm volatile("{ .reg .pred P; L: mbarrier.try_wait.parity.shared::cta.b64 P, [%0], %1;"
    "@P bra D; bra L; D: }" :: "r"(smem_u32(b)), "r"(phase) : "memory"); }
__device__ inline void tma2(void *d, const Map *m, int x, int y, u64 *b) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
    "[%0], [%1, {%2, %3}], [%4];"
    :: "r"(smem_u32(d)), "l"(m), "r"(x), "r"(y), "r"(smem_u32(b)) : "memory"); }
__device__ inline void tma2_store(const Map *m, int x, int y, void *s) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];"
    :: "l"(m), "r"(x), "r"(y), "r"(smem_u32(s)) : "memory");
  asm volatile("cp.async.bulk.commit_group;"); }
#define FENCE asm volatile("fence.proxy.async.shared::cta;" ::: "memory")
"""


def build90(source):
    return build(SM90 + source, "sm_90a")


COPY = """
K k(const __grid_constant__ Map in, const __grid_constant__ Map out, int x, int y, uint16_t *raw) {
  extern __shared__ __align__(1024) uint16_t s[]; __shared__ u64 bar; int t = threadIdx.x;
  if (t == 0) { mb_init(&bar, 1); }
  BEFORE; __syncthreads();
  if (t == 0) { mb_expect(&bar, 64 * 32 * 2); tma2(s, &in, x, y, &bar); }
  WAIT;
  for (int i = t; i < 2048; i += blockDim.x) raw[i] = s[i];
  for (int i = t; i < 2048; i += blockDim.x) s[i] += 1;
  FENCE1; SYNC;
  if (t == 0) { tma2_store(&out, x, y, s); asm volatile("cp.async.bulk.wait_group 0;"); }
}"""


def tma_copy(
    swizzle, x, y, wait="mb_wait(&bar, 0)", fence="FENCE", sync="__syncthreads()", before="", first=""
):
    """Copies the box at (x, y) through shared memory, adding 1."""
    a = np.arange(100 * 96, dtype=np.uint16).reshape(100, 96)
    source = COPY.replace("WAIT", wait).replace("FENCE1", fence).replace("SYNC", sync)
    m = build(first + SM90 + source.replace("BEFORE", before), "sm_90a")
    g, o, raw = m.mem.array(a), m.mem.array(np.zeros_like(a)), np.zeros(2048, np.uint16)
    maps = [TensorMap.for_array(z, [64, 32], swizzle) for z in (g, o)]
    m.launch("k", 1, 128, [*maps, np.int32(x), np.int32(y), raw], dynamic_smem=4096)
    padded = np.zeros((300, 300), np.uint16)
    padded[100:200, 100:196] = a
    byte = np.arange(2048) * 2
    linear = byte ^ ((byte >> 7 & 7) << 4) if swizzle == "128B" else byte
    box = padded[100 + y : 132 + y, 100 + x : 164 + x]
    np.testing.assert_array_equal(raw[linear // 2].reshape(32, 64), box)
    expected = np.zeros_like(a)
    inside = slice(max(y, 0), y + 32), slice(max(x, 0), x + 64)
    expected[inside] = a[inside] + 1
    np.testing.assert_array_equal(o, expected)


@pytest.mark.parametrize("swizzle", ["none", "128B"])
@pytest.mark.parametrize("xy", [(0, 0), (40, 80), (-8, -5)])
def test_tma_copy_with_bounds_and_swizzle(swizzle, xy):
    tma_copy(swizzle, *xy)


def test_a_tma_copy_may_overwrite_what_was_written_before_a_fence():
    tma_copy("128B", 0, 0, before="s[t] = 0; FENCE")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"wait": "__syncthreads()"}, "not ordered after the write by async"),
        ({"wait": "if (t < 32) mb_wait(&bar, 0)"}, "not ordered"),
        ({"fence": ""}, r"fence\.proxy\.async"),
        ({"fence": 'asm volatile("fence.proxy.async.global;" ::: "memory")'}, r"fence\.proxy\.async"),
        ({"sync": ""}, "not ordered"),
        ({"first": "#define INIT_FENCE\n"}, r"without fence\.mbarrier_init"),
        ({"before": "s[t] = 0"}, r"async-proxy write .* without fence\.proxy\.async"),
    ],
)
def test_tma_faults(change, message):
    with pytest.raises(RaceError, match=message):
        tma_copy("128B", 0, 0, **change)


def test_the_stub_of_the_driver_writes_the_same_handle(tmp_path):
    compiler = os.environ.get("CXX") or shutil.which("c++")
    if not compiler:
        pytest.skip("needs a C++ compiler ($CXX or c++ on PATH)")
    stub = Path(ptxrun.__file__).with_name("tensormap_stub.h")
    source, library = tmp_path / "stub.cpp", tmp_path / "stub.so"
    source.write_text(
        f'#include "{stub}"\nextern "C" int encode(void *map, int dtype, uint32_t rank, const void *address,'
        "const uint64_t *dims, const uint64_t *strides, const uint32_t *box, int swizzle) {"
        "return ptxrun_tensormap_encode(map, dtype, rank, address, dims, strides, box, 0, 0, swizzle, 0); }"
    )
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True)
    m = TensorMap("bf16", 1 << 40, [64, 100, 3], [128, 12800], [64, 32, 1], "128B")
    handle = (ctypes.c_ubyte * 128)()
    dims, strides = (ctypes.c_uint64 * 3)(*m.dims), (ctypes.c_uint64 * 2)(*m.strides)
    box, address = (ctypes.c_uint32 * 3)(*m.box), ctypes.c_void_p(m.address)
    failed = ctypes.CDLL(str(library)).encode(handle, 9, 3, address, dims, strides, box, m.swizzle)
    assert not failed
    assert bytes(handle) == m.handle


PIPELINE = """
K k(const __grid_constant__ Map in, int *o, int n) {
  extern __shared__ __align__(1024) int s[]; __shared__ u64 full[2], empty[2]; int t = threadIdx.x;
  if (t == 0) for (int i = 0; i < 2; i++) { mb_init(full + i, 1); mb_init(empty + i, 2); }
  __syncthreads();
  if (t >= 64) {
    if (t == 64) for (int i = 0; i < n; i++) {
      if (i >= 2) mb_wait(empty + i % 2, (i / 2 - 1) & 1);
      mb_expect(full + i % 2, 32 * 32 * 4); tma2(s + i % 2 * 1024, &in, 0, i * 32, full + i % 2); }
  } else {
    int acc = 0;
    for (int i = 0; i < n; i++) {
      mb_wait(full + i % 2, i / 2 & 1);
      for (int j = 0; j < 32; j++) acc += s[i % 2 * 1024 + j * 32 + t % 32] * (t / 32 + 1);
      __syncwarp();
      if (t % 32 == 0) mb_arrive(empty + i % 2); }
    o[t] = acc; } }"""


def test_tma_pipeline_and_missing_empty_barrier():
    a = rng(20).integers(0, 100, (7 * 32, 32)).astype(np.int32)

    def go(source):
        m = build90(source)
        g, o = m.mem.array(a), np.zeros(64, np.int32)
        m.launch("k", 1, 96, [TensorMap.for_array(g, [32, 32]), o, 7], dynamic_smem=8192)
        return o

    assert go(PIPELINE).tolist() == np.concatenate([a.sum(0), 2 * a.sum(0)]).tolist()
    with pytest.raises(RaceError, match=r"async tma|not ordered after the read"):
        go(PIPELINE.replace("if (i >= 2) mb_wait(empty + i % 2, (i / 2 - 1) & 1);", ""))
    with pytest.raises(RaceError, match="not ordered after the read"):
        go(PIPELINE.replace("__syncwarp();", ""))
    with pytest.raises(Deadlock, match=r"mbarrier\.try_wait"):
        go(PIPELINE.replace("mb_arrive(empty + i % 2);", ";"))


BULK = """K k(const float *in, float *o, float *acc) {
  __shared__ __align__(128) float s[256]; __shared__ u64 bar; int t = threadIdx.x; u32 a = smem_u32(s);
  if (t == 0) { mb_init(&bar, 1); mb_expect(&bar, 1024);
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], 1024, [%2];"
      :: "r"(a), "l"(in), "r"(smem_u32(&bar)) : "memory"); }
  __syncthreads(); mb_wait(&bar, 0); s[t] *= 2; FENCE; __syncthreads();
  if (t == 0) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], 1024;"
      :: "l"(o), "r"(a) : "memory");
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], 1024;"
      :: "l"(acc), "r"(a) : "memory");
    asm volatile("cp.async.bulk.commit_group; cp.async.bulk.wait_group.read 0;"); }
  __syncthreads(); s[t] = 0; }"""


def test_bulk_linear_copy_and_reduce():
    a = rng(21).standard_normal(256).astype("f4")

    def go(source):
        m = build90(source)
        o, acc = m.mem.array(a * 0), m.mem.array(a * 0 + 1)
        m.launch("k", 1, 256, [m.mem.array(a), o, acc])
        return o, acc

    o, acc = go(BULK)
    np.testing.assert_array_equal(o, 2 * a)
    np.testing.assert_array_equal(acc, 1 + 2 * a)
    unwaited = BULK.replace("cp.async.bulk.wait_group.read 0;", "")
    with pytest.raises(RaceError, match="exits while its bulk store"):
        go(unwaited.replace("__syncthreads(); s[t] = 0;", ""))
    with pytest.raises(RaceError, match="not ordered after the read by async bulk"):
        go(unwaited)


# A: 64 x 64, B: 32 x 64 (TB = 0) or 64 x 32 in memory (TB = 1); 16-bit; 4 k-steps
WGMMA = """
#define D8(o) "+f"(d[o]), "+f"(d[o+1]), "+f"(d[o+2]), "+f"(d[o+3]), \\
  "+f"(d[o+4]), "+f"(d[o+5]), "+f"(d[o+6]), "+f"(d[o+7])
__device__ inline u64 desc(u32 a, int lbo, int sbo, u64 mode) {
  return (u64)((a & 0x3ffff) >> 4) | (u64)(lbo >> 4) << 16 | (u64)(sbo >> 4) << 32 | mode << 62; }
K k(const uint16_t *a, const uint16_t *b, float *o) {
  extern __shared__ __align__(1024) uint8_t s[]; int t = threadIdx.x; float d[16];
  uint8_t *sa = s, *sb = s + 8192;
  for (int i = t; i < 64 * 64; i += 128) { int r = i / 64, c = i % 64; *(uint16_t*)(sa + OFFA(r, c)) = a[i]; }
  for (int i = t; i < 32 * 64; i += 128) {
    int r = i / (TB ? 32 : 64), c = i % (TB ? 32 : 64); *(uint16_t*)(sb + OFFB(r, c)) = b[i]; }
  FENCE1; __syncthreads();
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
  for (int i = 0; i < 4; i++) {
    u64 da = desc(smem_u32(sa) + STEPA, LBOA, SBOA, MODEA);
    u64 db = desc(smem_u32(sb) + STEPB, LBOB, SBOB, MODEB);
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %18, 0; "
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.TYPE.TYPE "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, %16, %17, p, 1, 1, 0, %19; }"
      : D8(0), D8(8) : "l"(da), "l"(db), "r"(i), "n"(TB)); }
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); WAIT; POST;
  for (int i = 0; i < 16; i++) {
    int row = t / 32 * 16 + t % 32 / 4 + i / 2 % 2 * 8, col = i / 4 * 8 + t % 4 * 2 + i % 2;
    o[row * 32 + col] = d[i]; }
}
"""
# name: (mode bits, byte offset of (r, c) in a K-major tile of R rows x 64 columns, lbo, sbo), written out
LAYOUTS = {
    "128B": (1, "((r) * 128 + (((c) * 2) ^ ((r) % 8 * 16)))", 16, 1024),
    "64B": (2, "((c) / 32 * R * 64 + (r) * 64 + (((c) % 32 * 2) ^ ((r) / 2 % 4 * 16)))", 16, 512),
    "32B": (3, "((c) / 16 * R * 32 + (r) * 32 + (((c) % 16 * 2) ^ ((r) / 4 % 2 * 16)))", 16, 256),
    "none": (0, "((c) / 8 * R * 16 + (r) * 16 + (c) % 8 * 2)", None, 128),
}
STEPS = {
    "128B": "32 * i",
    "64B": "(i % 2 * 32 + i / 2 * R * 64)",
    "32B": "R * 32 * i",
    "none": "2 * R * 16 * i",
}
WAIT = 'asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory")'


def operand(which, layout, rows):
    """The macros of A or B in a K-major layout."""
    mode, offset, lbo, sbo = LAYOUTS[layout]
    return {
        f"OFF{which}(r, c)": offset.replace("R", str(rows)),
        f"STEP{which}": STEPS[layout].replace("R", str(rows)),
        f"LBO{which}": str(lbo or rows * 16),
        f"SBO{which}": str(sbo),
        f"MODE{which}": str(mode),
    }


# 64 (k) x 32 (n) in memory, 64-byte swizzle: rows of 64 bytes
TRANSPOSED_B = {
    "OFFB(r, c)": "((r) * 64 + (((c) * 2) ^ ((r) / 2 % 4 * 16)))",
    "STEPB": "1024 * i",
    "LBOB": "16",
    "SBOB": "512",
    "MODEB": "2",
}


def wgmma(layout, dtype="bf16", trans_b=False, fence="FENCE", wait=WAIT, post=""):
    """Runs A B^T in this layout and compares."""
    words = operand("A", layout, 64) | (TRANSPOSED_B if trans_b else operand("B", layout, 32))
    words |= {"TB": str(int(trans_b)), "TYPE": dtype, "FENCE1": fence, "WAIT": wait, "POST": post}
    source = SM90 + WGMMA
    for word, text in words.items():
        source = source.replace(word, text)
    r = rng(30)
    A, B = r.standard_normal((64, 64)).astype("f4"), r.standard_normal((32, 64)).astype("f4")
    if dtype == "bf16":
        a, b = bf16(A), bf16(B)
        A, B = unbf16(a), unbf16(b)
    else:
        a, b = A.astype("f2").view("u2"), B.astype("f2").view("u2")
        A, B = a.view("f2"), b.view("f2")
    o = np.zeros((64, 32), "f4")
    b = b.T.copy() if trans_b else b
    run(source, a, b, o, block=128, dynamic_smem=8192 + 4096, arch="sm_90a")
    np.testing.assert_allclose(o, A.astype("f8") @ B.astype("f8").T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_wgmma_descriptors(layout, dtype):
    wgmma(layout, dtype)


def test_wgmma_transposed_b():
    wgmma("128B", trans_b=True)


def test_wgmma_faults():
    with pytest.raises(RaceError, match=r"fence\.proxy\.async"):
        wgmma("128B", fence="")
    with pytest.raises(RaceError, match="exits with a wgmma in flight"):
        wgmma("128B", wait="")
    keep = 'float keep; asm volatile("mov.f32 %0, %1;" : "=f"(keep) : "f"(d[0]))'
    with pytest.raises(AssertionError):  # accumulators read before the wait are NaN
        wgmma("128B", wait=keep, post=WAIT + "; d[0] = keep")
    with pytest.raises(RaceError, match="not ordered after the read by async wgmma"):
        wgmma("128B", wait="sa[t * 64] = 0", post=WAIT)


def test_elect_and_setmaxnreg():
    source = """K k(int *o) {
      unsigned p;
      asm volatile("{ .reg .pred P; .reg .b32 r; elect.sync r|P, 0xffffffff; selp.u32 %0, 1, 0, P; }"
        : "=r"(p));
      asm volatile("setmaxnreg.inc.sync.aligned.u32 160;");
      o[threadIdx.x] = p; }"""
    o = np.full(128, -1, np.int32)
    run(source, o, block=128, arch="sm_90a")
    assert o.sum() == 4
    assert (o.reshape(4, 32).sum(1) == 1).all()


def test_cp_async_arrives_on_mbarrier_and_test_wait_token():
    source = """K k(const int *in, int *o) {
      __shared__ __align__(16) int s[128]; __shared__ u64 bar, bar2; int t = threadIdx.x;
      if (t == 0) { mb_init(&bar, 32); mb_init(&bar2, 64); }
      __syncthreads();
      if (t < 32) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
          :: "r"(smem_u32(s + 4 * t)), "l"(in + 4 * t));
        asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];"
          :: "r"(smem_u32(&bar)) : "memory"); }
      mb_wait(&bar, 0);
      int v = s[t] + s[127 - t]; u64 token;
      asm volatile("mbarrier.arrive.shared::cta.b64 %0, [%1];"
        : "=l"(token) : "r"(smem_u32(&bar2)) : "memory");
      asm volatile("{ .reg .pred P; L: mbarrier.test_wait.shared::cta.b64 P, [%0], %1; @!P bra L; }"
        :: "r"(smem_u32(&bar2)), "l"(token) : "memory");
      s[t] = v; o[t] = v; }"""
    a, o = rng(40).integers(0, 99, 128).astype(np.int32), np.zeros(64, np.int32)
    m = build90(source)
    m.launch("k", 1, 64, [m.mem.array(a), o])
    assert o.tolist() == (a[:64] + a[127 - np.arange(64)]).tolist()
    m = build90(source.replace("mb_wait(&bar, 0);", ""))
    with pytest.raises(RaceError):
        m.launch("k", 1, 64, [m.mem.array(a), o])
