"""mma.sync, ldmatrix and stmatrix, against the fragment tables of the PTX ISA, element by element."""

import numpy as np
import nvcc
import pytest

from ptxrun.toys import bf16, rng, run, unbf16

pytestmark = nvcc.needed


def mma_asm(shape, types, na, nb):
    """Inline PTX of an mma with na and nb 32-bit registers of A and B and four of C."""
    a, b = (f"{{{','.join(f'%{i}' for i in r)}}}" for r in (range(4, 4 + na), range(4 + na, 4 + na + nb)))
    inputs = ", ".join(f'"r"({x}[{i}])' for x, n in (("A", na), ("B", nb)) for i in range(n))
    return (
        f'asm volatile("mma.sync.aligned.{shape}.row.col.{types} '
        f'{{%0,%1,%2,%3}}, {a}, {b}, {{%0,%1,%2,%3}};" : C4 : {inputs});'
    )


CASES = {  # kernel -> (type of the elements, K, registers of A, of B, inline PTX)
    "bf16k16": ("bf16", 16, 4, 2, mma_asm("m16n8k16", "f32.bf16.bf16.f32", 4, 2)),
    "f16k16": ("f16", 16, 4, 2, mma_asm("m16n8k16", "f32.f16.f16.f32", 4, 2)),
    "bf16k8": ("bf16", 8, 2, 1, mma_asm("m16n8k8", "f32.bf16.bf16.f32", 2, 1)),
    "f16k8": ("f16", 8, 2, 1, mma_asm("m16n8k8", "f32.f16.f16.f32", 2, 1)),
    "tf32k8": ("tf32", 8, 4, 2, mma_asm("m16n8k8", "f32.tf32.tf32.f32", 4, 2)),
    "tf32k4": ("tf32", 4, 2, 1, mma_asm("m16n8k4", "f32.tf32.tf32.f32", 2, 1)),
}
MMA = """
#define C4 "+f"(C[0]), "+f"(C[1]), "+f"(C[2]), "+f"(C[3])
#define MMA(name, NA, NB, text) K name(const u32 *a, const u32 *b, const float *c, float *d) { \\
  int t = threadIdx.x; u32 A[NA], B[NB]; float C[4]; \\
  for (int i = 0; i < NA; i++) A[i] = a[t * NA + i]; \\
  for (int i = 0; i < NB; i++) B[i] = b[t * NB + i]; \\
  for (int i = 0; i < 4; i++) C[i] = c[t * 4 + i]; \\
  text \\
  for (int i = 0; i < 4; i++) d[t * 4 + i] = C[i]; }
"""
MMA += "\n".join(f"MMA({name}, {na}, {nb}, {asm})" for name, (_, _, na, nb, asm) in CASES.items())
MMA += """
K s8k32(const u32 *a, const u32 *b, const int *c, int *d) {
  int t = threadIdx.x; a += 4 * t; b += 2 * t; c += 4 * t; d += 4 * t;
  asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.u8.s32 "
    "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
    : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
    : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]),
      "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3])); }
K f16acc(const u32 *a, const u32 *b, const u32 *c, u32 *d) {
  int t = threadIdx.x; a += 4 * t; b += 2 * t; c += 2 * t; d += 2 * t;
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%0,%1}, {%2,%3,%4,%5}, {%6,%7}, {%8,%9};"
    : "=r"(d[0]), "=r"(d[1])
    : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(c[0]), "r"(c[1])); }
K f64k4(const double *a, const double *b, const double *c, double *d) {
  int t = threadIdx.x;
  asm volatile("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0,%1}, {%2}, {%3}, {%4,%5};"
    : "=d"(d[2*t]), "=d"(d[2*t+1]) : "d"(a[t]), "d"(b[t]), "d"(c[2*t]), "d"(c[2*t+1])); }
"""


def pack_ab(A, B, elem, k):
    """Fragments by the tables of the ISA.  elem: numpy storage type; k: columns of A."""
    W = len(A)
    per = 4 // np.dtype(elem).itemsize
    na, nb = 16 * k // 32 // per, 8 * k // 32 // per
    a, b = np.zeros((W, 32, na, per), elem), np.zeros((W, 32, nb, per), elem)
    for w in range(W):
        for lane in range(32):
            g, q = lane >> 2, lane & 3
            for i in range(na * per):
                r, e = divmod(i, per)
                row = g + 8 * (r & 1)
                col = q * per + e + 4 * per * (r >> 1)
                a[w, lane, r, e] = A[w, row, col]
            for i in range(nb * per):
                r, e = divmod(i, per)
                b[w, lane, r, e] = B[w, q * per + e + 4 * per * r, g]
    return a, b


# Row and column of register i of every lane in an accumulator fragment, (32, 4).
LANE, REGISTER = np.arange(32)[:, None], np.arange(4)[None]
ROW, COLUMN = (LANE >> 2) + 8 * (REGISTER >> 1), (LANE & 3) * 2 + (REGISTER & 1)


def product(A, B, C):
    return A.astype("f8") @ B.astype("f8") + C.astype("f8")


def test_tf32_operands_have_ten_bits():
    """What stands in the other 13 does not matter: no carry, no rounding."""
    r = rng(12)
    A, B = r.standard_normal((1, 16, 8)).astype("f4"), r.standard_normal((1, 8, 8)).astype("f4")
    results = []
    for low in (0, 0x1FFF):
        a, b = ((x.view("u4") & np.uint32(0xFFFFE000) | np.uint32(low)).view("f4") for x in (A, B))
        c = np.zeros((1, 32, 4), "f4")
        d = np.ones_like(c)
        run(MMA, *pack_ab(a, b, np.float32, 8), c, d, block=32, name="tf32k8")
        results.append(d)
    assert results[0].any()
    np.testing.assert_array_equal(*results)


@pytest.mark.parametrize("name", CASES)
def test_mma(name):
    W = 2
    elem, k = CASES[name][:2]
    r = rng(11)
    A, B = r.standard_normal((W, 16, k)).astype("f4"), r.standard_normal((W, k, 8)).astype("f4")
    C = r.standard_normal((W, 16, 8)).astype("f4")
    if elem == "bf16":
        a, b = pack_ab(bf16(A), bf16(B), np.uint16, k)
        A, B = unbf16(bf16(A)), unbf16(bf16(B))
    elif elem == "f16":
        A, B = A.astype("f2"), B.astype("f2")
        a, b = pack_ab(A, B, np.float16, k)
    else:
        A, B = [(x.view("u4") & np.uint32(0xFFFFE000)).view("f4") for x in (A, B)]
        a, b = pack_ab(A, B, np.float32, k)
    c = np.ascontiguousarray(C[:, ROW, COLUMN])
    d = np.zeros_like(c)
    run(MMA, a, b, c, d, block=32 * W, name=name)
    np.testing.assert_allclose(d, product(A, B, C)[:, ROW, COLUMN], rtol=1e-5, atol=1e-5)


def test_mma_int8():
    r = rng(15)
    A, B = r.integers(-128, 128, (1, 16, 32)).astype("i1"), r.integers(0, 256, (1, 32, 8)).astype("u1")
    a, b = pack_ab(A, B.view("i1"), np.int8, 32)[0], pack_ab(A, B, np.uint8, 32)[1]
    c, d = r.integers(-99, 99, (32, 4)).astype("i4"), np.zeros((32, 4), "i4")
    run(MMA, a, b, c, d, name="s8k32")
    np.testing.assert_array_equal(d, c + (A[0].astype(int) @ B[0].astype(int))[ROW, COLUMN])


def test_mma_f16_accumulator():
    r = rng(12)
    A, B = r.standard_normal((1, 16, 16)).astype("f2"), r.standard_normal((1, 16, 8)).astype("f2")
    C = r.standard_normal((16, 8)).astype("f2")
    a, b = pack_ab(A, B, np.float16, 16)
    c, d = np.ascontiguousarray(C[ROW, COLUMN]), np.zeros((32, 4), "f2")
    run(MMA, a, b, c, d, name="f16acc")
    np.testing.assert_allclose(d, product(A[0], B[0], C)[ROW, COLUMN], rtol=2**-10, atol=1e-3)


def test_mma_f64():
    r = rng(12)
    A, B, C = r.standard_normal((8, 4)), r.standard_normal((4, 8)), r.standard_normal((8, 8))
    D = np.zeros((8, 8))
    run(MMA, A, B.T.copy(), C, D, name="f64k4")
    np.testing.assert_allclose(D, A @ B + C, rtol=1e-13)


def test_ldmatrix_stmatrix():
    source = """K k(const u32 *in, u32 *o) {
      __shared__ __align__(16) u32 s[4 * 32], s2[4 * 32];
      int t = threadIdx.x; u32 r[4];
      for (int i = 0; i < 4; i++) s[i * 32 + t] = in[i * 32 + t];
      __syncwarp();
      u32 a = smem_u32(s) + (t ^ 3) * 16;
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
        : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(a));
      for (int i = 0; i < 4; i++) o[i * 32 + t] = r[i];
      u32 b = smem_u32(s2) + t * 16;
      asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};"
        :: "r"(b), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]));
      __syncwarp();
      for (int i = 0; i < 4; i++) o[128 + i * 32 + t] = s2[i * 32 + t];
      asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];"
        : "=r"(r[0]), "=r"(r[1]) : "r"(a));
      for (int i = 0; i < 2; i++) o[256 + i * 32 + t] = r[i]; }"""
    x = rng(13).integers(0, 1 << 16, (32, 8)).astype(np.uint16)
    o = np.zeros((10, 32, 2), np.uint16)
    run(source, x, o, arch="sm_90")
    rows = x[np.arange(32) ^ 3].reshape(4, 8, 8)
    row, pair = np.arange(32)[:, None] >> 2, (np.arange(32)[:, None] & 3) * 2 + np.arange(2)
    np.testing.assert_array_equal(o[:4], rows[:, row, pair])
    np.testing.assert_array_equal(o[4:8].reshape(32, 8).reshape(4, 8, 8), rows.swapaxes(1, 2))
    np.testing.assert_array_equal(o[8:], rows[:2][:, pair, row])
