"""What ptxrun complains about: planted faults, each beside the right version of the same kernel."""

import numpy as np
import nvcc
import pytest

import ptxrun
from ptxrun import AccessError, BarrierError, Deadlock, InitError, RaceError, Trap, Unsupported
from ptxrun.toys import build, rng, run

pytestmark = nvcc.needed

COPIES = """
template <int N> __device__ void cp(void *d, const void *s, int n) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" :: "r"(smem_u32(d)), "l"(s), "n"(N), "r"(n)); }
#define STEP(W, I) asm volatile("cp.async.wait_group " #W ";"); SYNC; acc += s[I][t ^ 127] * (I + 1);
K k(const int *in, int *o, int n) {
  __shared__ __align__(16) int s[3][128]; int t = threadIdx.x;
  for (int i = 0; i < 3; i++) {
    int left = n - 4 * t;
    if (t < 32) cp<16>(&s[i][4 * t], in + (left > 0 ? i * 128 + 4 * t : 0), left > 0 ? min(16, 4 * left) : 0);
    asm volatile("cp.async.commit_group;"); }
  int acc = 0;
  STEP(WAIT, 0) STEP(1, 1) STEP(0, 2)
  o[t] = acc; }
"""


def run_copies(sync="__syncthreads()", wait="2"):
    source = rng(14).integers(0, 1000, (3, 128)).astype(np.int32)
    o = np.zeros(128, np.int32)
    m = build(COPIES.replace("SYNC", sync).replace("WAIT", wait))
    m.launch("k", 1, 128, [m.mem.array(source), o, 101])
    z = source.copy()
    z[:, 101:] = 0
    np.testing.assert_array_equal(o, (z[:, np.arange(128) ^ 127] * np.array([[1], [2], [3]])).sum(0))


def test_cp_async_zero_fill():
    run_copies()


def test_cp_async_missing_wait():
    with pytest.raises(RaceError, match="in flight"):
        run_copies(wait="3")


def test_cp_async_missing_barrier():
    with pytest.raises(RaceError, match="not ordered"):
        run_copies(sync="")


def test_cp_async_reads_its_size_and_no_more():
    # Fault: an access of fewer than 16 bytes that is checked as 16, or the reverse.
    source = """K k(const char *in, int *o, int n) {
      __shared__ __align__(16) int s[4];
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(smem_u32(s)), "l"(in), "r"(n));
      asm volatile("cp.async.wait_all;");
      o[0] = s[0]; o[1] = s[1]; }"""
    m = build(source)
    data = m.mem.array(np.array([0x04030201, 0x08070605], np.uint32), align=16)
    o = np.zeros(2, np.uint32)
    m.launch("k", 1, 1, [data, o, 6])
    assert o.tolist() == [0x04030201, 0x0605]
    with pytest.raises(AccessError, match="out of bounds"):
        m.launch("k", 1, 1, [data, o, 9])


def test_cp_async_twice_to_one_place():
    source = """K k(const char *in) {
      __shared__ __align__(16) char s[64];
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(smem_u32(s)), "l"(in));
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(smem_u32(s + OFFSET)), "l"(in));
      asm volatile("cp.async.wait_all;"); }"""
    for offset in ("16", "0"):
        m = build(source.replace("OFFSET", offset))
        data = m.mem.array(np.zeros(16, np.uint8))
        if offset == "16":
            m.launch("k", 1, 1, [data])
        else:
            with pytest.raises(RaceError, match="in flight"):
                m.launch("k", 1, 1, [data])


ROTATE = """K k(int *o) {
  __shared__ int s[128]; int t = threadIdx.x;
  %s s[t] = t;
  %s
  o[t] = s[(t + %s) %% 128];
  %s }"""
PAIR_BARRIER = 'asm volatile("bar.sync %0, 64;" :: "r"(1 + t / 64));'


@pytest.mark.parametrize(
    ("guard", "sync", "shift", "after", "error"),
    [
        ("", "__syncthreads();", "33", "", None),
        ("", "", "33", "", "not ordered"),  # other warp, no barrier
        ("", "", "1", "", "not ordered"),  # same warp, no __syncwarp
        ("", "__syncwarp();", "1 - 32 * (t % 32 == 31)", "", None),
        ("", "__syncwarp();", "33", "", "not ordered"),
        ("", "__syncthreads();", "33", "s[t] = 1;", "not ordered after the read"),  # write after read
        ("if (t < 64)", "__syncthreads();", "33", "", "uninitialised"),
        ("", 'asm volatile("bar.sync 1, 128;");', "33", "", None),
        ("", PAIR_BARRIER, "32 - 64 * (t % 64 >= 32)", "", None),
        ("", PAIR_BARRIER, "64", "", "not ordered"),
    ],
)
def test_race_detector(guard, sync, shift, after, error):
    o = np.zeros(128, np.int32)
    source = ROTATE % (guard, sync, shift, after)
    if error:
        with pytest.raises((RaceError, InitError), match=error) as caught:
            run(source, o, block=128)
        assert "PTX line" in str(caught.value)
    else:
        run(source, o, block=128)
        assert o.tolist() == [(t + int(eval(shift, {"t": t}))) % 128 for t in range(128)]


def test_syncwarp_in_one_warp_does_not_hide_or_break_another():
    source = """K k(int *o) { __shared__ int s[64]; int t = threadIdx.x; s[t] = t;
      if (t < 32) { __syncwarp(); o[t] = s[t ^ 1]; } else { o[t] = 1; %s o[t] += s[t ^ 1]; } }"""
    o = np.zeros(64, np.int32)
    run(source % "__syncwarp();", o, block=64)
    assert o.tolist() == [t ^ 1 for t in range(32)] + [1 + (t ^ 1) for t in range(32, 64)]
    with pytest.raises(RaceError, match="not ordered"):
        run(source % "", o, block=64)


def test_ldmatrix_orders_its_warp_but_the_isa_does_not_promise_it():
    source = """K k(u32 *o) {
      __shared__ __align__(16) u32 s[32]; int t = threadIdx.x; u32 r;
      s[t] = t;
      SYNC
      asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];"
        : "=r"(r) : "r"(smem_u32(s) + t % 8 * 16));
      s[t ^ 1] = r; o[t] = r; }"""
    o = np.zeros(32, np.uint32)
    reading = source.replace("s[t ^ 1] = r;", "")
    run(reading.replace("SYNC", "__syncwarp();"), o, collectives_order=False)
    assert o.tolist() == list(range(32))
    run(reading.replace("SYNC", ""), o)
    with pytest.raises(RaceError, match=r"read of .* not ordered after the write"):
        run(reading.replace("SYNC", ""), o, collectives_order=False)
    with pytest.raises(RaceError, match=r"write of .* not ordered after the read"):
        run(source.replace("SYNC", "__syncwarp();"), o)


def test_collect_mode_and_unsanitized():
    o = np.zeros(128, np.int32)
    r = run(ROTATE % ("", "", "33", ""), o, block=128, on_error="collect")
    assert [type(x) for x in r.reports] == [RaceError]
    assert run(ROTATE % ("", "", "33", ""), o, block=128, sanitize=False).reports == []


def test_producer_consumer_named_barriers():
    def bar(what, first):
        return f'asm volatile("bar.{what} %0, 128;" :: "r"({first} + (i & 1)) : "memory");'

    source = f"""K k(int *o) {{
      __shared__ int s[2][64]; int t = threadIdx.x;
      if (t < 64) for (int i = 0; i < 6; i++) {{
        if (i >= 2) {bar("sync", 3)}
        s[i & 1][t] = i * 100 + t;
        {bar("arrive", 1)} }}
      else for (int i = 0; i < 6; i++) {{
        {bar("sync", 1)}
        o[i * 64 + t - 64] = s[i & 1][127 - t];
        if (i < 4) {bar("arrive", 3)} }} }}"""
    o = np.zeros((6, 64), np.int32)
    run(source, o, block=128)
    np.testing.assert_array_equal(o, np.arange(6)[:, None] * 100 + 63 - np.arange(64))
    never_freed = source.replace("if (i >= 2) " + bar("sync", 3), "").replace(
        "if (i < 4) " + bar("arrive", 3), ""
    )
    with pytest.raises((RaceError, BarrierError)):
        run(never_freed, o, block=128)


ONE_LINE_FAULTS = {
    "past the end": (
        "a[t + 4] = 1;",
        {"block": 64},
        AccessError,
        r"out of bounds.*thread 60",
    ),
    "misaligned": ("*(int2*)(a + t) = make_int2(1, 2);", {"block": 2}, AccessError, "misaligned"),
    "shared past the end": (
        "extern __shared__ int s[]; s[t + a[0]] = 1;",
        {"block": 64, "dynamic_smem": 252},
        AccessError,
        r"shared.*out of bounds",
    ),
    "barrier for some": (
        "if (t < 40) { a[t] = 1; __syncthreads(); } a[t] += 2; if (a[0] == 77) __syncthreads();",
        {"block": 64},
        BarrierError,
        "without reaching it|no thread can continue|lanes of warp",
    ),
    "two barriers for one": (
        "if (t < 40) { a[t] = 1; __syncthreads(); } else { a[t] = 5; __syncthreads(); a[t] = 3; }",
        {"block": 64},
        BarrierError,
        "lanes of warp",
    ),
    "trap": ("if (a[t] == 0) __trap();", {"block": 64}, Trap, "trap executed"),
    "endless loop": ("while (*(volatile int*)a == 0);", {"max_instr": 20000}, Deadlock, "limit"),
    "inactive lane": (
        "if (t < 8) a[t] = __shfl_sync(0xff, t, 9);",
        {},
        BarrierError,
        r"inactive lane|needs all|no thread|Deadlock",
    ),
}


@pytest.mark.parametrize("fault", ONE_LINE_FAULTS)
def test_faults(fault):
    body, options, error, message = ONE_LINE_FAULTS[fault]
    with pytest.raises(error, match=message):
        run(f"K k(int *a) {{ int t = threadIdx.x; {body} }}", np.zeros(64, np.int32), **options)


def test_two_blocks_write_one_byte():
    source = "K k(int *a) { a[threadIdx.x + blockIdx.x * 63] = 1; }"
    with pytest.raises(RaceError, match="already written by block"):
        run(source, np.zeros(200, np.int32), grid=2, block=64, block_races=True)


def test_a_block_reads_what_another_wrote():
    source = "K k(int *a) { int i = threadIdx.x + 64 * blockIdx.x; a[i + 64] = a[i]; }"
    with pytest.raises(RaceError, match=r"read of .*already written by block 0"):
        run(source, np.zeros(200, np.int32), grid=2, block=64, block_races=True)


def test_a_block_writes_what_another_read():
    source = (
        "K k(int *a) { if (blockIdx.x == 0) a[64 + threadIdx.x] = a[threadIdx.x]; else a[threadIdx.x] = 1; }"
    )
    with pytest.raises(RaceError, match=r"write to .*already read by block 0"):
        run(source, np.zeros(200, np.int32), grid=2, block=64, block_races=True)


def test_a_byte_that_two_blocks_read_at_once(monkeypatch):
    # Fault: of two blocks that read a byte in one instruction one is forgotten.
    monkeypatch.setattr(ptxrun.module, "TOGETHER", 1024)
    source = "K k(int *a) { int v = a[0]; if (blockIdx.x == 1) a[0] = v + 1; else a[64 + threadIdx.x] = v; }"
    with pytest.raises(RaceError, match=r"write to .*already read by several blocks"):
        run(source, np.zeros(200, np.int32), grid=2, block=1, block_races=True)


TOGETHER = """K k(int *o, int bad) {
  __shared__ int s[64]; int t = threadIdx.x, b = blockIdx.x;
  int rounds = b % 3;                               // blocks part and meet again
  s[t] = t + b;
  if (b == 5) return;
  for (int i = 0; i <= rounds; i++) {
    __syncthreads();
    int v = s[(t + 33) % 64];
    if (b != bad) __syncthreads();
    s[t] = v + 1; }
  o[64 * b + t] = s[t]; }"""


def test_blocks_that_run_together_have_their_own_barriers_and_memory(monkeypatch):
    monkeypatch.setattr(ptxrun.module, "TOGETHER", 1024)
    o, alone = np.zeros(20 * 64, np.int32), np.zeros(20 * 64, np.int32)
    m = build(TOGETHER)
    r = m.launch("k", 20, 64, [o, -1], block_races=True)
    one_by_one = m.launch("k", 20, 64, [alone, -1], block_races=True, together=False)
    assert o.tolist() == alone.tolist()
    assert r.instructions < one_by_one.instructions / 2
    for b in (0, 1, 2, 5, 19):
        t = np.arange(64)
        expected = 0 * t if b == 5 else (t + 33 * (b % 3 + 1)) % 64 + b + b % 3 + 1
        assert o[64 * b : 64 * b + 64].tolist() == expected.tolist()


def test_a_fault_of_one_block_among_many_is_reported_as_if_it_ran_alone(monkeypatch):
    monkeypatch.setattr(ptxrun.module, "TOGETHER", 1024)
    messages, left = [], []
    for together in (True, False):
        o = np.zeros(20 * 64, np.int32)
        with pytest.raises(RaceError, match=r"block \(7, 0, 0\)") as caught:
            build(TOGETHER).launch("k", 20, 64, [o, 7], together=together)
        messages.append(str(caught.value))
        left.append(o.tolist())
    assert messages[0] == messages[1]
    assert left[0] == left[1]  # what the blocks before it wrote, and no more


def test_read_only_memory():
    m = build("K k(int *a, int *b) { b[threadIdx.x] = a[threadIdx.x]; }")
    a, b, mem = np.arange(64, dtype=np.int32), np.zeros(64, np.int32), ptxrun.Memory()
    mem.add(a.ctypes.data, a.nbytes, "a", writable=False)
    mem.add(b.ctypes.data, b.nbytes, "b")
    m.launch("k", 1, 64, [a.ctypes.data, b.ctypes.data], mem=mem)
    assert (a == b).all()
    with pytest.raises(AccessError, match="write to a by thread 0: it is read-only"):
        m.launch("k", 1, 64, [b.ctypes.data, a.ctypes.data], mem=mem)


def test_unknown_instruction_is_named():
    source = """K k(int *a) { asm volatile("mma.sync.aligned.m16n8k256.row.col.s32.b1.b1.s32.xor.popc "
      "{%0,%0,%0,%0}, {%0,%0,%0,%0}, {%0,%0}, {%0,%0,%0,%0};" : "+r"(a[0])); }"""
    with pytest.raises(Unsupported, match="PTX line"):
        run(source, np.zeros(4, np.int32))


@pytest.mark.parametrize("flags", [("-lineinfo",), ("-G",), ("-O1", "-Xcicc", "-O0")])
def test_other_compiler_modes(flags):
    o = np.zeros(128, np.int32)
    run(ROTATE % ("", "__syncthreads();", "33", ""), o, block=128, flags=flags)
    assert o.tolist() == [(t + 33) % 128 for t in range(128)]


def test_a_failed_launch_leaves_nothing_behind():
    # Fault: a machine that is used again keeps registers, reports or shadow memory of the launch before.
    m = build(ROTATE % ("if (o[t] == 0)", "__syncthreads();", "33", ""))
    full, empty = np.zeros(128, np.int32), np.ones(128, np.int32)
    with pytest.raises(InitError):
        m.launch("k", 1, 128, [empty.copy()])
    first = m.launch("k", 1, 128, [full])
    assert full.tolist() == [(t + 33) % 128 for t in range(128)]
    assert first.reports == []
    with pytest.raises(InitError):
        m.launch("k", 1, 128, [empty.copy()])
