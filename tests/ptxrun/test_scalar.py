"""Arithmetic, conversions, memory and control flow of single threads, against Python and numpy."""

import math

import numpy as np
import nvcc
import pytest

from ptxrun.toys import HALF, bf16, build, rng, run, signed, unbf16

pytestmark = nvcc.needed

INT = {  # CUDA expression on (a, b, c) -> Python on ints (unbounded; masked afterwards)
    "a + b": lambda a, b, c: a + b,
    "a - b": lambda a, b, c: a - b,
    "a * b + c": lambda a, b, c: a * b + c,
    "(u32)((u64)a * b >> 32)": lambda a, b, c: a * b >> 32,
    "a / (b | 1)": lambda a, b, c: a // (b | 1),
    "a % (b | 1)": lambda a, b, c: a % (b | 1),
    "a & b | ~c ^ a": lambda a, b, c: a & b | ~c ^ a,
    "a << (b & 31)": lambda a, b, c: a << (b & 31),
    "a >> (b & 31)": lambda a, b, c: a >> (b & 31),
    "min(a, b) ^ max(b, c)": lambda a, b, c: min(a, b) ^ max(b, c),
    "__popc(a)": lambda a, b, c: bin(a).count("1"),
    "__clz(a >> (b & 31))": lambda a, b, c: 32 - (a >> (b & 31)).bit_length(),
    "__brev(a)": lambda a, b, c: int(f"{a:032b}"[::-1], 2),
    "__funnelshift_l(a, b, c)": lambda a, b, c: ((b << 32 | a) << (c & 31)) >> 32,
    "__funnelshift_r(a, b, c)": lambda a, b, c: (b << 32 | a) >> (c & 31),
    "__funnelshift_rc(a, b, c & 63)": lambda a, b, c: (b << 32 | a) >> min(c & 63, 32),
    "a < b ? a : c": lambda a, b, c: a if a < b else c,
    "(u32)(a == b) + 2 * (a >= c)": lambda a, b, c: (a == b) + 2 * (a >= c),
    "__ffs(a & 0xfff0)": lambda a, b, c: ((a & 0xFFF0) & -(a & 0xFFF0)).bit_length(),
    "__usad(a, b, c)": lambda a, b, c: abs(a - b) + c,
}


def divide(a, b):
    """As C does: towards zero."""
    q = abs(a) // abs(b)
    return q if (a < 0) == (b < 0) else -q


SIGNED_INT = {
    "x / (y | 1)": lambda x, y, z: divide(x, y | 1),
    "x % (y | 1)": lambda x, y, z: x - divide(x, y | 1) * (y | 1),
    "x >> (y & 31)": lambda x, y, z: x >> (y & 31),
    "__mulhi(x, y)": lambda x, y, z: x * y >> 32,
    "min(x, y) + max(y, z)": lambda x, y, z: min(x, y) + max(y, z),
    "abs(x) - (-y)": lambda x, y, z: abs(x) + y,
    "x < y ? 1 : z": lambda x, y, z: 1 if x < y else z,
    "(int)(int8_t)x + (int16_t)y": lambda x, y, z: ((x & 255) ^ 128) - 128 + ((y & 65535) ^ 32768) - 32768,
    "(int)((i64)x * y >> 17)": lambda x, y, z: x * y >> 17,
    "(int)(uint8_t)(x >> 3)": lambda x, y, z: (x >> 3) & 255,
}


def wide_product(a, b, c):
    return (b << 32 | a) * (a << 32 | c) >> 64


def permuted_bytes(a, b, c):
    out = 0
    for i in range(4):
        selector = c >> 4 * i & 15
        byte = (b << 32 | a) >> 8 * (selector & 7) & 255
        out |= (0xFF * (byte >> 7) if selector & 8 else byte) << 8 * i
    return out


def looked_up(a, b, c):
    index = [(a >> i & 1) * 4 + (b >> i & 1) * 2 + (c >> i & 1) for i in range(32)]
    return sum((0xE2 >> n & 1) << i for i, n in enumerate(index))


ASM = {  # inline PTX -> Python on ints
    "prmt.b32 %0, %1, %2, %3;": permuted_bytes,
    "lop3.b32 %0, %1, %2, %3, 0xe2;": looked_up,
    "bfe.u32 %0, %1, 5, 9;": lambda a, b, c: a >> 5 & 511,
    "bfe.s32 %0, %1, 27, 9;": lambda a, b, c: signed(a) >> 27,
    "bfi.b32 %0, %1, %2, 4, 12;": lambda a, b, c: b & ~(0xFFF << 4) | (a & 0xFFF) << 4,
    "{ .reg .u32 t; add.cc.u32 t, %1, %2; addc.u32 %0, %3, 0; }": lambda a, b, c: c + (a + b >> 32),
    "{ .reg .b16 l, h; mov.b32 {l, h}, %1; mov.b32 %0, {h, l}; }": lambda a, b, c: a >> 16 | a << 16,
    "{ .reg .pred p, q; setp.lt.and.u32 p|q, %1, %2, 1; selp.u32 %0, %3, 7, q; }": (
        lambda a, b, c: 7 if a < b else c
    ),
    "shl.b32 %0, %1, %2;": lambda a, b, c: a << b if b < 32 else 0,
    "shr.s32 %0, %1, %2;": lambda a, b, c: signed(a) >> min(b, 31),
    "bfind.u32 %0, %1;": lambda a, b, c: a.bit_length() - 1,
    "mul.hi.s32 %0, %1, %2;": lambda a, b, c: signed(a) * signed(b) >> 32,
    "{ .reg .u64 x, y; mov.b64 x, {%1, %2}; mov.b64 y, {%3, %1};"
    " mul.hi.u64 x, x, y; cvt.u32.u64 %0, x; }": wide_product,
    "dp4a.u32.u32 %0, %1, %2, %3;": (
        lambda a, b, c: sum((a >> 8 * i & 255) * (b >> 8 * i & 255) for i in range(4)) + c
    ),
}


def integers(n=64):
    """(3, n) of u32 with the edges."""
    r = rng(1).integers(0, 1 << 32, (3, n), dtype=np.uint64)
    edge = [0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 2, 31, 32]
    r[0, :8], r[1, :8], r[2, :8] = edge, edge[::-1], edge[3:] + edge[:3]
    r[1, 5] = 7  # INT_MIN / -1 is undefined
    return r.astype(np.uint32)


def check_integers(lines, references):
    """lines: CUDA statements that write o[i * 64 + t]; references: (message, function, convert)."""
    source = (
        "K k(const u32 *in, u32 *o) { int t = threadIdx.x; u32 a = in[t], b = in[64 + t], c = in[128 + t];"
        "int x = a, y = b, z = c;" + "\n".join(lines) + "}"
    )
    abc = integers()
    out = np.zeros((len(lines), 64), np.uint32)
    run(source, abc, out, block=64)
    for row, (message, f, convert) in zip(out, references, strict=True):
        expected = [f(*(convert(int(v)) for v in abc[:, t])) & 0xFFFFFFFF for t in range(64)]
        assert row.tolist() == expected, message


def test_integers():
    lines = [f"o[{i} * 64 + t] = (u32)({e});" for i, e in enumerate([*INT, *SIGNED_INT])]
    references = [(e, f, int) for e, f in INT.items()] + [(e, f, signed) for e, f in SIGNED_INT.items()]
    check_integers(lines, references)


def test_inline_asm_integers():
    operands = ': "=r"(r) : "r"(a), "r"(b), "r"(c)'
    lines = [f'{{ u32 r; asm volatile("{e}" {operands}); o[{i} * 64 + t] = r; }}' for i, e in enumerate(ASM)]
    check_integers(lines, [(e, f, int) for e, f in ASM.items()])


def floats():
    x = rng(2).standard_normal((3, 64)).astype(np.float32)
    x *= np.float32(10) ** rng(3).integers(-6, 6, (3, 64)).astype(np.float32)
    x[0, :6] = [0, -0.0, np.inf, -np.inf, np.nan, 1e-40]
    x[1, :6] = [1, 2.5, -3.5, 0.5, 1, 70000]
    return x


def to_int(a):
    return np.clip(np.nan_to_num(np.trunc(a.astype("f8")), nan=0), -(2**31), 2**31 - 1).astype("f4")


def toward_zero(x):
    r = x.astype("f4")
    return np.where(abs(r.astype("f8")) > abs(x), np.nextafter(r, np.float32(0)), r)


FLOAT = {
    "a + b": lambda a, b, c: a + b,
    "fmaf(a, b, -c)": lambda a, b, c: (a.astype("f8") * b - c).astype("f4"),
    "fmaxf(a, b)": lambda a, b, c: np.fmax(a, b),
    "fminf(a, fabsf(c))": lambda a, b, c: np.fmin(a, abs(c)),
    "a / b": lambda a, b, c: a / b,
    "sqrtf(fabsf(a))": lambda a, b, c: np.sqrt(abs(a)),
    "floorf(a) + ceilf(b)": lambda a, b, c: np.floor(a) + np.ceil(b),
    "rintf(c) + truncf(b)": lambda a, b, c: np.rint(c) + np.trunc(b),
    "a < b ? a : (b != c ? c : a)": lambda a, b, c: np.where(a < b, a, np.where(b != c, c, a)),
    "(float)(int)a": lambda a, b, c: to_int(a),
    "(float)(double)(a) * 0.5f": lambda a, b, c: a * np.float32(0.5),
    "__half2float(__float2half_rn(a))": lambda a, b, c: a.astype("f2").astype("f4"),
    "__bfloat162float(__float2bfloat16_rn(b))": lambda a, b, c: unbf16(bf16(b)),
    "copysignf(a, c)": lambda a, b, c: np.copysign(a, c),
    "__fadd_rz(b, c)": lambda a, b, c: toward_zero(b.astype("f8") + c),
    "(float)(a > b || isnan(a))": lambda a, b, c: ((a > b) | np.isnan(a)).astype("f4"),
    "__int2float_rn((int)b) + __uint2float_rn((u32)fabsf(b))": lambda a, b, c: np.trunc(b) + np.trunc(abs(b)),
}
APPROXIMATE = {
    "__expf(b * 1e-4f)": lambda a, b, c: np.exp(b * np.float32(1e-4)),
    "exp2f(b * 1e-4f)": lambda a, b, c: np.exp2(b * np.float32(1e-4)),
    "__logf(fabsf(b))": lambda a, b, c: np.log(abs(b)),
    "rsqrtf(fabsf(b))": lambda a, b, c: 1 / np.sqrt(abs(b)),
    "expf(b * 1e-4f)": lambda a, b, c: np.exp(b * np.float32(1e-4)),
    "tanhf(b)": lambda a, b, c: np.tanh(b),
    "sinf(b * 1e-3f)": lambda a, b, c: np.sin(b * np.float32(1e-3)),
    "__fdividef(b, c)": lambda a, b, c: b / c,
    "erff(c)": lambda a, b, c: np.vectorize(math.erf)(c),
    "powf(fabsf(b) + 1, 0.3f)": lambda a, b, c: (abs(b) + 1) ** 0.3,
    "__frcp_rn(c)": lambda a, b, c: 1 / c,
}


@pytest.mark.parametrize("flags", [(), ("-use_fast_math",)])
def test_floats(flags):
    expressions = {**APPROXIMATE} if flags else {**FLOAT, **APPROXIMATE}
    lines = [f"o[{i} * 64 + t] = {e};" for i, e in enumerate(expressions)]
    source = (
        HALF + "K k(const float *in, float *o) { int t = threadIdx.x;"
        "float a = in[t], b = in[64 + t], c = in[128 + t];" + "\n".join(lines) + "}"
    )
    x = floats()
    out = np.zeros((len(lines), 64), np.float32)
    run(source, x, out, block=64, flags=flags)
    # The approximation error of the hardware is not modelled; fast math rearranges more.
    relative, absolute = (2e-5, 1e-5) if flags else (2e-6, 1e-6)
    with np.errstate(all="ignore"):
        for row, (e, f) in zip(out, expressions.items(), strict=True):
            expected = np.asarray(f(*x), np.float32)
            if e in APPROXIMATE:
                np.testing.assert_allclose(row, expected, relative, absolute, err_msg=e)
            else:
                np.testing.assert_array_equal(row, expected, err_msg=e)


def test_half_and_bf16_arithmetic():
    source = """
    K k(const __half2 *h, const __nv_bfloat162 *b, __half2 *oh, __nv_bfloat162 *ob, u32 *pk) {
      int t = threadIdx.x;
      __half2 x = h[t], y = h[32 + t];
      __nv_bfloat162 u = b[t], v = b[32 + t];
      oh[t] = __hadd2(x, y); oh[32 + t] = __hfma2(x, y, x);
      oh[64 + t] = __hmax2(x, __hneg2(y)); oh[96 + t] = h2exp2(x);
      ob[t] = __hadd2(u, v); ob[32 + t] = __hfma2(u, v, u);
      ob[64 + t] = __hmul2(u, v); ob[96 + t] = __hmin2(u, v);
      float a = __low2float(x), c = __high2float(y);
      asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pk[t]) : "f"(a), "f"(c));
      asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pk[32 + t]) : "f"(a), "f"(c));
      asm("cvt.rz.f16.f32 %0, %1;" : "=h"(((uint16_t*)pk)[128 + t]) : "f"(a * 1.001f));
      pk[96 + t] = __heq2(x, x).x == __half(1.0f) ? __half2int_rz(x.x) : 0;
    }"""
    h = rng(4).standard_normal((2, 32, 2)).astype(np.float16)
    b = bf16(rng(5).standard_normal((2, 32, 2)).astype(np.float32))
    oh, ob = np.zeros((4, 32, 2), np.float16), np.zeros((4, 32, 2), np.uint16)
    packed = np.zeros((4, 32), np.uint32)
    run(HALF + source, h, b, oh, ob, packed)
    x, y = h.astype("f8")
    for got, r in zip(oh, [x + y, x * y + x, np.maximum(x, -y), np.exp2(x)], strict=True):
        np.testing.assert_array_equal(got, r.astype(np.float16))
    u, v = unbf16(b).astype("f8")
    for got, r in zip(ob, [u + v, u * v + u, u * v, np.minimum(u, v)], strict=True):
        np.testing.assert_array_equal(got, bf16(r.astype("f4")))
    a, c = h[0, :, 0].astype("f4"), h[1, :, 1].astype("f4")
    halves = packed[0].view(np.float16).reshape(32, 2)
    np.testing.assert_array_equal(halves, np.stack([c, a], 1).astype(np.float16))
    np.testing.assert_array_equal(packed[1].view(np.uint16).reshape(32, 2), bf16(np.stack([c, a], 1)))
    s = (a * np.float32(1.001)).astype("f8")
    r = packed[2].view(np.float16)[:32].astype("f8")
    assert (abs(r) <= abs(s)).all()
    assert (abs(r - s) <= abs(s) * 2**-10 + 2.0**-24).all()
    assert packed[3].view(np.int32).tolist() == np.trunc(h[0, :, 0]).astype(int).tolist()


def test_double_and_int64():
    source = """K k(const double *a, double *o, i64 *q) {
      int t = threadIdx.x; double x = a[t], y = a[32 + t];
      o[t] = fma(x, y, 1.0) / y; o[32 + t] = sqrt(fabs(x)) + exp(y); o[64 + t] = (double)(i64)(x * 1e6);
      q[t] = (i64)(x * 1e12) / ((i64)(y * 1e3) | 1); q[32 + t] = (i64)(x * 1e12) % 1000003;
      q[64 + t] = __mul64hi((i64)(x * 1e18), (i64)(y * 1e18)); }"""
    a = rng(6).standard_normal((2, 32))
    o, q = np.zeros((3, 32)), np.zeros((3, 32), np.int64)
    run(source, a, o, q)
    x, y = a
    np.testing.assert_allclose(o[0], (x * y + 1) / y, rtol=1e-14)
    np.testing.assert_allclose(o[1], np.sqrt(abs(x)) + np.exp(y), rtol=1e-14)
    np.testing.assert_array_equal(o[2], np.trunc(x * 1e6))
    X, Y = [int(v) for v in np.trunc(x * 1e12)], [int(v) | 1 for v in np.trunc(y * 1e3)]
    assert q[0].tolist() == [divide(p, r) for p, r in zip(X, Y, strict=True)]
    assert q[1].tolist() == [p - divide(p, 1000003) * 1000003 for p in X]
    assert q[2].tolist() == [int(p * 1e18) * int(r * 1e18) >> 64 for p, r in zip(x, y, strict=True)]


CONTROL_FLOW = """
struct P { int n; const int *in; float s[3]; };
__constant__ int table[4] = {3, 5, 7, -11};
__device__ u64 counter = 5;
__device__ __noinline__ int collatz(int x) {
  int n = 0;
  while (x != 1) { x = x & 1 ? 3 * x + 1 : x / 2; n++; }
  return n;
}
__device__ __noinline__ float2 two(float a, int i) { return make_float2(a * i, a - i); }
K k(P p, int *o, float *f) {
  int t = blockIdx.x * blockDim.x + threadIdx.x;
  if (t >= p.n) return;
  int buf[16];
  for (int i = 0; i < 16; i++) buf[i] = p.in[t] * i;
  int s = 0;
  for (int i = 0; i < 16; i++) s += buf[(i * p.in[t]) & 15];
  switch (t % 7) {
    case 0: s += 1; break;
    case 1: s *= 3; break;
    case 2: s -= 9; break;
    case 3: s ^= 5; break;
    case 4: s = -s; break;
    case 5: s += collatz(t + 1); break;
    default: s = 0;
  }
  o[t] = s + collatz(p.in[t]) + table[t & 3] + (int)counter;
  float2 r = two(p.s[t % 3], t); f[2 * t] = r.x; f[2 * t + 1] = r.y;
}"""


def collatz(x):
    n = 0
    while x != 1:
        x = 3 * x + 1 if x & 1 else x // 2
        n += 1
    return n


def test_control_flow_calls_local_const_params():
    n = 150
    values = rng(7).integers(1, 1000, n).astype(np.int32)
    o, f = np.zeros(n, np.int32), np.zeros((n, 2), np.float32)
    m = build(CONTROL_FLOW)
    m.mem.register(values)
    s = np.array([1.5, 2.5, -3], "f4")
    p = np.zeros(1, np.dtype([("n", "i4"), ("pad", "i4"), ("p", "u8"), ("s", "f4", 3), ("pad2", "f4")]))
    p["n"], p["p"], p["s"] = n, values.ctypes.data, s
    m.launch("k", 3, 64, [p.tobytes(), o, f])
    for t in range(n):
        v = int(values[t])
        r = sum(v * ((i * v) & 15) for i in range(16))
        r = [r + 1, r * 3, r - 9, r ^ 5, -r, r + collatz(t + 1), 0][t % 7]
        assert o[t] == r + collatz(v) + [3, 5, 7, -11][t & 3] + 5
    t = np.arange(n)
    np.testing.assert_array_equal(f, np.stack([s[t % 3] * t, s[t % 3] - t], 1).astype("f4"))


def test_vector_and_narrow_memory():
    source = """K k(const uint4 *a, uint4 *o, const uint8_t *b, int8_t *c, ushort2 *s) { int t = threadIdx.x;
      uint4 v = __ldg(a + t); o[t] = make_uint4(v.w, v.z, v.y, v.x);
      c[t] = (int8_t)(b[t] - 100) >> 1; s[t] = make_ushort2(b[t], v.x >> 16); }"""
    a = rng(8).integers(0, 1 << 32, (32, 4), dtype=np.uint64).astype(np.uint32)
    b = rng(9).integers(0, 256, 32).astype(np.uint8)
    m = build(source)
    a16, o = m.mem.array(a), m.mem.array(np.zeros((32, 4), np.uint32))
    c, s = np.zeros(32, np.int8), np.zeros((32, 2), np.uint16)
    m.launch("k", 1, 32, [a16, o, b, c, s])
    np.testing.assert_array_equal(o, a[:, ::-1])
    np.testing.assert_array_equal(c, (b - np.uint8(100)).view(np.int8) >> 1)
    np.testing.assert_array_equal(s, np.stack([b, a[:, 0] >> 16], 1))


def test_grid_order_and_3d():
    source = """K k(int *o) { int b = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
      int t = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
      o[b * 24 + t] = b * 1000 + t; }"""
    o = np.zeros((2 * 3 * 4, 24), np.int32)
    run(source, o, grid=(2, 3, 4), block=(2, 3, 4), shuffle=3)
    np.testing.assert_array_equal(o, np.arange(24)[:, None] * 1000 + np.arange(24))
