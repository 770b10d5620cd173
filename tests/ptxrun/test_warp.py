"""Warp collectives and atomics."""

import numpy as np
import nvcc

from ptxrun.toys import HALF, rng, run, signed

pytestmark = nvcc.needed


def test_warp_ops():
    source = """K k(const u32 *in, u32 *o) {
      int t = threadIdx.x; u32 v = in[t]; int n = 64;
      o[t] = __shfl_xor_sync(~0u, v, 5);
      o[n + t] = __shfl_up_sync(~0u, v, 3, 16);
      o[2*n + t] = __shfl_down_sync(~0u, v, 9);
      o[3*n + t] = __shfl_sync(~0u, v, t * 7, 8);
      o[4*n + t] = __ballot_sync(~0u, v & 1);
      o[5*n + t] = __any_sync(~0u, v == in[3]) + 2 * __all_sync(~0u, v > 5);
      o[6*n + t] = __reduce_add_sync(~0u, v);
      o[7*n + t] = __reduce_max_sync(~0u, (int)v);
      o[8*n + t] = __match_any_sync(~0u, v & 3);
      u32 x = 0;
      if (t & 1) x = __shfl_xor_sync(0xaaaaaaaa, v, 2); else x = __activemask();
      o[9*n + t] = x;
      u64 d = __shfl_down_sync(~0u, (u64)v << 20, 1); o[10*n + t] = d >> 24; }"""
    v = rng(10).integers(0, 1 << 32, 64, dtype=np.uint64).astype(np.uint32)
    o = np.zeros((11, 64), np.uint32)
    run(source, v, o, block=64)
    for t in range(64):
        lane = t & 31
        w = [int(x) for x in v[t - lane : t - lane + 32]]
        expected = [
            w[lane ^ 5],
            w[lane - 3] if (lane % 16) >= 3 else w[lane],
            w[lane + 9] if lane + 9 < 32 else w[lane],
            w[(lane & ~7) | (t * 7 & 7)],
            sum((x & 1) << i for i, x in enumerate(w)),
            int(int(v[3]) in w) + 2 * all(x > 5 for x in w),
            sum(w) & 0xFFFFFFFF,
            max(signed(x) for x in w) & 0xFFFFFFFF,
            sum(((x & 3) == (w[lane] & 3)) << i for i, x in enumerate(w)),
            w[lane ^ 2] if lane & 1 else 0x55555555,
            ((w[lane + 1] if lane < 31 else w[lane]) << 20) >> 24 & 0xFFFFFFFF,
        ]
        assert o[:, t].tolist() == expected, t


def test_divergent_shfl_waits_for_members():
    source = """K k(int *o) {
      int t = threadIdx.x, v = t;
      if (t % 2) { for (int i = 0; i < t; i++) v += o[i] + i; } else v -= 3;
      o[64 + t] = __shfl_xor_sync(~0u, v, 1); }"""
    o = np.zeros(128, np.int32)
    run(source, o, block=64)
    v = [t + t * (t - 1) // 2 if t % 2 else t - 3 for t in range(64)]
    assert o[64:].tolist() == [v[t ^ 1] for t in range(64)]


def test_atomics():
    source = """K k(u32 *g, float *f, u64 *d, __half2 *h, double *dd) {
      __shared__ u32 s[4]; int t = threadIdx.x;
      if (t < 4) s[t] = 0;
      __syncthreads();
      atomicAdd(&s[t & 3], t); atomicMax(&g[1], t * 7 % 50); atomicMin((int*)&g[2], -t);
      atomicAdd(f, 0.5f); atomicAdd(d, 1ull << 33); atomicAdd(dd, 0.25);
      u32 old = atomicAdd(&g[0], 1); g[8 + old] = 1;
      atomicAdd(h, __half2(__half(1), __half(2))); atomicOr(&g[3], 1u << (t & 31));
      u32 e = g[4], a; do { a = e; e = atomicCAS(&g[4], a, a + 3); } while (e != a);
      atomicInc(&g[6], 9);
      __syncthreads();
      if (t < 4) atomicAdd(&g[5], s[t]);
      atomicExch(&g[7], 42); }"""
    n = 96
    g, f, d = np.zeros(8 + n, np.uint32), np.zeros(1, "f4"), np.zeros(1, "u8")
    h, dd = np.zeros(2, "f2"), np.zeros(1)
    run(HALF + source, g, f, d, h, dd, block=n)
    largest, smallest = max(t * 7 % 50 for t in range(n)), (1 - n) & 0xFFFFFFFF
    assert g[:8].tolist() == [n, largest, smallest, 0xFFFFFFFF, 3 * n, n * (n - 1) // 2, n % 10, 42]
    assert (g[8:] == 1).all()
    assert [f[0], d[0], dd[0]] == [n / 2, n << 33, n / 4]
    assert h.tolist() == [n, 2 * n]
