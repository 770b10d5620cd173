"""Batches, and blocks that run together, give what instructions and blocks give one by one."""

import random

import numpy as np
import pytest

import ptxrun
from ptxrun import batches
from ptxrun.parse import Program
from ptxrun.toys import batch_always

HEAD = """.version 8.0
.target sm_80
.address_size 64
.visible .entry k(.param .u64 k_out, .param .u32 k_n) {
  .shared .align 16 .b8 s[8192];
  .reg .pred %p<6>; .reg .b32 %r<20>; .reg .f32 %f<12>; .reg .b64 %rd<6>;
"""
SLOTS = 8  # shared and global words of each thread


@pytest.fixture(autouse=True)
def order_of_execution(monkeypatch):
    batch_always(monkeypatch)


def program(body):
    """PTX of a kernel: %rd1 is the thread's part of the output, %r1 its part of shared memory."""
    return (
        HEAD
        + """
  ld.param.u64 %rd0, [k_out];
  mov.u32 %r0, %tid.x;
  mov.u32 %r1, %ctaid.x;
  mov.u32 %r2, %ntid.x;
  mad.lo.u32 %r2, %r1, %r2, %r0;
  mul.wide.u32 %rd1, %r2, 32;
  add.s64 %rd1, %rd0, %rd1;
  mul.lo.u32 %r1, %r0, 32;
  mov.u32 %r2, s;
  add.s32 %r1, %r1, %r2;
"""
        + "\n".join(body)
        + "\n  ret;\n}\n"
    )


def random_body(seed):
    """Statements on registers 4.. and the thread's own memory, some for one warp only."""
    pick = random.Random(seed)

    def r():
        return f"%r{pick.randrange(4, 20)}"

    def f():
        return f"%f{pick.randrange(12)}"

    def p():
        return f"%p{pick.randrange(1, 6)}"

    def slot(base):
        return f"[{base}+{4 * pick.randrange(SLOTS)}]"

    def value():
        return pick.choice([r(), str(pick.randrange(1000))])

    kinds = [
        lambda: f"add.s32 {r()}, {r()}, {value()};",
        lambda: f"xor.b32 {r()}, {r()}, {value()};",
        lambda: f"mad.lo.s32 {r()}, {r()}, {value()}, {r()};",
        lambda: f"mov.u32 {r()}, {value()};",
        lambda: f"shl.b32 {r()}, {r()}, {pick.randrange(31)};",
        lambda: f"max.s32 {r()}, {r()}, {r()};",
        lambda: f"setp.lt.s32 {p()}, {r()}, {value()};",
        lambda: f"selp.b32 {r()}, {r()}, {value()}, {p()};",
        lambda: f"@{pick.choice(['', '!'])}{p()} add.s32 {r()}, {r()}, {r()};",
        lambda: f"fma.rn.f32 {f()}, {f()}, {f()}, {f()};",
        lambda: f"ex2.approx.ftz.f32 {f()}, {f()};",
        lambda: f"max.f32 {f()}, {f()}, {f()};",
        lambda: f"cvt.rn.f16x2.f32 {r()}, {f()}, {f()};",
        lambda: f"mov.b32 {r()}, {f()};",
        lambda: f"cvt.rn.f32.s32 {f()}, {r()};",
        lambda: f"st.shared.u32 {slot('%r1')}, {r()};",
        lambda: f"ld.shared.u32 {r()}, {slot('%r1')};",
        lambda: f"st.global.u32 {slot('%rd1')}, {r()};",
        lambda: f"ld.global.u32 {r()}, {slot('%rd1')};",
        lambda: (
            f"shfl.sync.bfly.b32 {r()}, {r()}, {1 << pick.randrange(5)}, 31, {pick.choice(['-1', '%r3'])};"
        ),
        lambda: (
            f"mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {{%f0,%f1,%f2,%f3}}, "
            f"{{{r()},{r()},{r()},{r()}}}, {{{r()},{r()}}}, {{{f()},{f()},{f()},{f()}}};"
        ),
    ]
    weights = [1] * (len(kinds) - 1) + [0.3]
    body = ["mov.u32 %r3, -1;"] if seed % 2 else ["sub.s32 %r3, %r1, %r1;", "not.b32 %r3, %r3;"]
    body += ["mov.u32 %r4, %ctaid.x;", *(f"mad.lo.s32 %r{i}, %r0, {17 * i}, %r4;" for i in range(5, 20))]
    body += [f"cvt.rn.f32.s32 %f{i}, %r{i + 4};" for i in range(12)]
    body += [f"st.shared.u32 [%r1+{4 * i}], %r{4 + i};" for i in range(SLOTS)]
    body += [f"setp.ne.s32 %p{i}, %r{i}, {i};" for i in range(1, 6)]
    for part in range(3):
        body += [k() for k in pick.choices(kinds, weights, k=40)]
        # Some warps leave this out, in the last part some blocks.
        who = "%r0" if part < 2 else "%ctaid.x"
        body += [f"setp.lt.u32 %p0, {who}, {32 * (part + 1) if part < 2 else 2};", f"@%p0 bra L{part};"]
        body += [k() for k in pick.choices(kinds, weights, k=40)]
        body += [f"L{part}:"]
    body += [f"st.global.u32 [%rd1+{4 * i}], %r{4 + i};" for i in range(SLOTS)]
    body += [f"mov.b32 %r{12 + i}, %f{i};" for i in range(8)]
    return [*body, *(f"st.global.u32 [%rd1+{4 * i}], %r{12 + i};" for i in range(0, SLOTS, 2))]


@pytest.mark.parametrize("seed", range(40))
def test_random_programs(seed):
    text = program(random_body(seed))
    results = []
    for options in ({"batch": False, "together": False}, {"batch": True, "together": False}, {}):
        m = ptxrun.Module(text)
        out = m.mem.array(np.arange(13 * 96 * SLOTS, dtype=np.uint32))
        r = m.launch("k", 13, 96, [out, 0], block_races=True, **options)  # 10 blocks together, then 3
        results.append((out.tobytes(), r.unexecuted))
    assert results[0] == results[1] == results[2]


def steps(body):
    """The plan of some statements: (kind, their texts)."""
    parsed = Program(program(body))
    parsed.load(parsed.funcs["k"])
    code = [i for i in parsed.code if i.op != "ret"][10:]
    planned = batches.plan(code, batches.constants(parsed.code))
    return [(s.kind, [i.text for i in s.instrs]) for s in planned]


def test_independent_instructions_run_together():
    pairs = [(f"add.s32 %r{i + 4}, %r0, {i};", f"mov.u32 %r{i + 8}, %r{i + 4};") for i in range(4)]
    found = steps([text for pair in pairs for text in pair])
    assert [(kind, len(texts)) for kind, texts in found] == [("batch", 4), ("batch", 4)]


def test_dependent_instructions_keep_their_order():
    chain = ["add.s32 %r4, %r0, 1;", "add.s32 %r5, %r4, 1;", "add.s32 %r4, %r5, 1;"]
    assert [texts for _, texts in steps(chain)] == [[t.rstrip(";")] for t in chain]


def test_memory_keeps_its_order_and_like_accesses_run_together():
    stores = ["st.shared.u32 [%r1], %r0;", "st.shared.u32 [%r1+4], %r0;"]
    found = steps([*stores, "ld.shared.u32 %r4, [%r1];", "st.shared.u32 [%r1], %r4;"])
    assert [(texts[0][:2], len(texts)) for _, texts in found] == [("st", 2), ("ld", 1), ("st", 1)]


# Lane exchanges whose membermask is an immediate, a register that is always the same, and one that is not.
EXCHANGES = [
    ["shfl.sync.bfly.b32 %r4, %r0, 1, 31, -1;"],
    ["mov.b32 %r18, -1;", "shfl.sync.bfly.b32 %r4, %r0, 1, 31, %r18;"],
    ["mov.b32 %r18, 0;", "not.b32 %r18, %r18;", "shfl.sync.bfly.b32 %r4, %r0, 1, 31, %r18;"],
]


@pytest.mark.parametrize("exchange", EXCHANGES[:2])
def test_a_collective_orders_memory_where_it_stands(exchange):
    # Fault: the arithmetic of shfl or mma moves, and with it the order that it gives to its warp's accesses.
    found = steps(["st.shared.u32 [%r1], %r0;", *exchange, "ld.shared.u32 %r5, [%r1];"])
    order = [texts[0][:2] if texts else kind for kind, texts in found]
    assert order.index("st") < order.index("sync") < order.index("ld")


@pytest.mark.parametrize("exchange", [[], *EXCHANGES])
def test_races_are_found_in_batches(exchange):
    # Fault: reads of a batch that are not ordered after another lane's write, with other reads that are.
    body = ["st.shared.u32 [%r1], %r0;", "xor.b32 %r5, %r1, 32;", *exchange]
    body += [f"ld.shared.u32 %r{6 + i}, [%r{1 if i % 2 else 5}];" for i in range(6)]
    body += [f"st.global.u32 [%rd1+{4 * i}], %r{6 + i};" for i in range(6)]
    m = ptxrun.Module(program(body))
    out = m.mem.array(np.zeros(64 * SLOTS, np.uint32))
    if not exchange:
        with pytest.raises(ptxrun.RaceError, match=r"ld\.shared\.u32 %r6"):
            m.launch("k", 1, 64, [out, 0])
        return
    m.launch("k", 1, 64, [out, 0])
    t = np.arange(64)
    np.testing.assert_array_equal(out.reshape(64, SLOTS)[:, :2], np.stack([t ^ 1, t], 1))
    with pytest.raises(ptxrun.RaceError, match="not ordered after the write"):
        m.launch("k", 1, 64, [out, 0], collectives_order=False)
