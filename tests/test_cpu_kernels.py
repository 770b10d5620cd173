"""What the CPU kernels promise beyond right numbers: one result for any thread count, every build, O(N)
memory.
"""

import os
import threading
from pathlib import Path

import pytest
import torch
from oracle import check, qkv
from other_python import run_python

import attn_ext
from attn_ext import _C

HERE = Path(__file__).parent


def run(threads, q, k, v, bias, **options):
    """All results and gradients, computed with that many threads."""
    torch.set_num_threads(threads)
    try:
        inputs = [t.detach().clone().requires_grad_() for t in (q, k, v, bias)]
        out, lse = attn_ext.attention(
            *inputs[:3],
            bias=inputs[3],
            return_lse=True,
            generator=torch.Generator().manual_seed(1),
            **options,
        )
        return [out, lse, *torch.autograd.grad(out.sin().sum() + lse.sum(), inputs)]
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("batch", "heads_kv"), [(1, 1), (1, 3), (2, 4)])
def test_results_do_not_depend_on_the_number_of_threads(dtype, batch, heads_kv):
    """Few KV heads take another route through the backward than many; the bits must be the same on both."""
    torch.manual_seed(0)
    q = torch.randn(batch, 2 * heads_kv, 400, 40, dtype=dtype)
    k, v = (torch.randn(batch, heads_kv, 421, 40, dtype=dtype) for _ in range(2))
    bias = torch.randn(1, 2 * heads_kv, 400, 421, dtype=dtype)
    options = {"causal": True, "dropout_p": 0.2, "softcap": 4.0}
    want = run(1, q, k, v, bias, **options)
    for threads in (2, 3, 5):
        for a, b in zip(run(threads, q, k, v, bias, **options), want, strict=True):
            assert torch.equal(a, b)


def test_many_python_threads_at_once():
    """Scratch memory shared between threads by mistake would mix up results."""
    torch.manual_seed(0)
    problems = [[torch.randn(1, 2, n, 16, requires_grad=True) for _ in range(3)] for n in (30, 70, 110, 150)]

    def both(inputs):
        out = attn_ext.attention(*inputs, causal=True)
        return [out, *torch.autograd.grad(out.sin().sum(), inputs)]

    want = [both(p) for p in problems]
    wrong = []

    def work(n):
        for _ in range(20):
            if not all(torch.equal(a, b) for a, b in zip(both(problems[n]), want[n], strict=True)):
                wrong.append(n)

    threads = [threading.Thread(target=work, args=(n % 4,)) for n in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


@pytest.mark.parametrize("isa", [isa for isa in _C.cpu_isas() if isa != _C.cpu_isa()])
def test_the_other_instruction_sets(isa):
    """The comparison with the reference again, on every other build that this machine can run."""
    files = [
        str(HERE / name)
        for name in (
            "test_attention.py",
            "test_forward_mode.py",
            "test_block_mask.py",
            "test_cpu_decoding.py",
        )
    ]
    tests = ["-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
    done = run_python(*tests, ATTN_EXT_CPU_ISA=isa)
    assert done.returncode == 0, done.stdout[-3000:]


HALF = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(
    "options", [{}, {"causal": True, "softcap": 5.0}, {"window": (40, 3), "scale": -0.3}]
)
@pytest.mark.parametrize(
    ("len_q", "len_k", "dim", "dim_v"),
    [(5, 31, 1, 3), (17, 33, 3, 1), (33, 257, 64, 40), (225, 129, 33, 65), (385, 513, 16, 128)],
)
def test_half_types_around_the_edges_of_tiles(dtype, options, len_q, len_k, dim, dim_v):
    """One more than a tile, a strip or a block: padding that is not 0 would show."""
    check(*qkv(1, 2, len_q, len_k, dim, dim_v, heads_kv=1, dtype=dtype), **options)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(
    ("len_q", "len_k"), [(16, 500), (17, 500), (24, 24), (25, 24), (24, 25), (32, 32), (33, 32), (32, 33)]
)
def test_half_types_around_the_smallest_problem_for_tiles(dtype, len_q, len_k):
    """Forward and backward must agree on who does the call: P = exp(S - lse) takes the same S."""
    q, k, v = qkv(2, 4, len_q, len_k, 40, heads_kv=2, dtype=dtype)
    check(q * 8, k, v, causal=True)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("visible", ["causal", "window", "lengths", "full_mask", "key_mask", "strided_mask"])
def test_half_types_where_only_visibility_modifies_the_logits(dtype, visible):
    """The shortest way through AMX's backward: whole strips, strips cut by a rule, and strips nobody sees."""
    torch.manual_seed(0)
    q, k, v = qkv(2, 2, 450, 523, 40, heads_kv=1, dtype=dtype)
    masks = torch.rand(2, 2, 450, 523) > 0.3
    masks[:, :, 70:140, :300] = False
    masks[:, :, 99] = False  # a row that sees nothing
    options = {
        "causal": {"causal": True},
        "window": {"window": (37, 90)},
        "lengths": {
            "key_lengths": torch.tensor([300, 10]),
            "query_lengths": torch.tensor([200, 450]),
            "causal": True,
        },
        "full_mask": {"mask": masks},
        "key_mask": {"mask": masks[:, :1, :1], "window": (200, 60)},
        "strided_mask": {"mask": masks.transpose(2, 3).contiguous().transpose(2, 3)},
    }[visible]
    check(q, k, v, **options)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (100, 5)}])
def test_plain_half_backward_does_not_depend_on_the_number_of_threads(dtype, options):
    q, k, v = qkv(1, 2, 450, 523, 40, heads_kv=1, dtype=dtype)

    def gradients(threads):
        torch.set_num_threads(threads)
        try:
            inputs = [t.clone().requires_grad_() for t in (q, k, v)]
            return torch.autograd.grad(attn_ext.attention(*inputs, **options).sin().sum(), inputs)
        finally:
            torch.set_num_threads(1)

    for one, three in zip(gradients(1), gradients(3), strict=True):
        assert torch.equal(one, three)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *HALF])
@pytest.mark.parametrize("options", [{"causal": True}, {"window": (70, 5)}])
def test_nan_in_hidden_values_does_not_depend_on_the_number_of_threads(dtype, options):
    """0 * NaN: where a tile is computed it is NaN, so what is computed must not depend on who computes it."""
    q, k, v = qkv(1, 2, 1000, 1005, 16, dtype=dtype)
    v[:, :, 202] = torch.nan  # shortly after what rows up to 191, the end of some units, see

    def run(threads):
        torch.set_num_threads(threads)
        try:
            out = attn_ext.attention(q, k, v, **options)
            tangents = torch.func.jvp(
                lambda q, v: attn_ext.attention(q, k, v, **options), (q, v), (q.sin(), v.cos())
            )
            return [out, *tangents]
        finally:
            torch.set_num_threads(1)

    want = run(1)
    for threads in (2, 3, 5, 16):
        for one, more in zip(want, run(threads), strict=True):
            torch.testing.assert_close(one, more, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", HALF)
def test_subnormal_half_numbers(dtype):
    """AMX reads bfloat16's subnormals as 0. float16's are split into normal numbers and stay exact."""
    q, k, v = qkv(1, 1, 40, 50, 16, dtype=dtype)
    tiny = torch.finfo(dtype).smallest_normal
    check(q, k, (v.double() * tiny / 8).to(dtype))
    check((q.double() * tiny / 8).to(dtype), k, v)
    if dtype == torch.float16:  # as logits of normal size
        check((q.double() * tiny / 8).to(dtype), k, v, scale=2e4)
        out = attn_ext.attention(q, k, (v.double() * tiny / 8).to(dtype))
        assert out.abs().max() > 0


@pytest.mark.parametrize("large", [1e36, 2.0**32])
def test_subnormal_bfloat16_with_a_huge_factor(large):
    """Read as 0, the subnormal would lose the logit or the gradient."""
    q, k, v = qkv(1, 1, 40, 50, 16, dtype=torch.bfloat16)
    small = 0.1 / large if large > 1e30 else 1e-39
    check((q.double() * small).bfloat16(), (k.double() * large).bfloat16(), v)
    check((q.double() * large).bfloat16(), (k.double() * small).bfloat16(), v)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_window_that_leaves_the_keys_within_a_strip(dtype):
    """The first rows of a strip see all keys of a tile, the last ones are past them and see nothing."""
    torch.manual_seed(0)
    q, k, v = qkv(1, 2, 300, 300, 24, dtype=dtype)
    for left in (16, 20, 33, 48, 70):
        check(q, k, v, window=(left, 100), key_lengths=torch.tensor([128]))


def test_scale_that_lifts_a_subnormal():
    q, k, v = qkv(1, 1, 40, 50, 16, dtype=torch.bfloat16)
    check((q.double() * 1e-39).bfloat16(), k, v, scale=1e38)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("argument", range(3))
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_one_non_finite_half_number_in_a_long_problem(dtype, argument, value):
    """In products of two parts infinity must not meet a part that is 0: that would be NaN."""
    tensors = qkv(1, 1, 70, 300, 16, dtype=dtype)
    tensors[argument][0, 0, 37, 5] = value
    got, want = (
        f(*(t.clone() for t in tensors), causal=True)
        for f in (attn_ext.attention, lambda q, k, v, causal: reference(q, k, v, causal))
    )
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.isinf(), want.isinf())
    torch.testing.assert_close(got.double(), want, rtol=0.02, atol=0.02, equal_nan=True)


def reference(q, k, v, causal):
    return attn_ext.reference.attention(*(t.double() for t in (q, k, v)), causal=causal)[0]


@pytest.mark.parametrize("dtype", HALF)
def test_non_finite_key_that_is_hidden_leaves_gradients_alone(dtype):
    q, k, v = qkv(1, 1, 300, 300, 32, dtype=dtype)
    mask = torch.ones(300, dtype=torch.bool)
    mask[131] = False

    def gradients(k):
        inputs = [t.clone().requires_grad_() for t in (q, k, v)]
        out = attn_ext.attention(*inputs, mask=mask)
        return [out, *torch.autograd.grad(out.sum(), inputs)]

    bad = k.clone()
    bad[:, :, 131, 3:6] = torch.tensor([torch.inf, -torch.inf, torch.nan])
    for a, b in zip(gradients(bad), gradients(k), strict=True):
        assert torch.equal(a, b)


def test_unknown_instruction_set_is_refused():
    code = "import torch, attn_ext; q = torch.ones(1, 1, 1, 1); attn_ext.attention(q, q, q)"
    done = run_python("-c", code, ATTN_EXT_CPU_ISA="mmx")
    assert done.returncode == 1
    assert "ATTN_EXT_CPU_ISA=mmx" in done.stderr
    assert "it can run:" in done.stderr


MEMORY = """
import resource, sys
import torch
import attn_ext

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # MiB

def run(n, dtype):
    tensors = [torch.randn(1, 1, n, 64, dtype=dtype, requires_grad=True) for _ in range(3)]
    mask = torch.ones(1, 1, 1, n, dtype=torch.bool)
    before = peak()
    attn_ext.attention(*tensors, mask=mask, causal=True).sum().backward()
    return peak() - before

run(64, torch.float32)
print(run(int(sys.argv[1]), getattr(torch, sys.argv[2])))
"""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memory_is_linear_in_length(dtype):
    """32768 keys: the score matrix would take 4 GiB. Out, three gradients and what autograd keeps take 48 MiB
    in float32; all of it and what comes on top must stay below the 200 MB that the design allows."""
    done = run_python("-c", MEMORY, "32768", dtype)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 200


def test_first_call_after_fork_works():
    """A DataLoader worker is a fork of a process that has used the kernels already."""
    q = torch.randn(1, 2, 300, 32)
    want = attn_ext.attention(q, q, q)
    pid = os.fork()
    if pid == 0:
        os._exit(0 if torch.equal(attn_ext.attention(q, q, q), want) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *HALF])
def test_keys_hidden_from_a_row_of_nan_keep_their_gradients(dtype):
    """The row's LSE is NaN: P of what it does not see is 0 all the same."""
    q, k, v = qkv(1, 1, 40, 40, 16, dtype=dtype)
    q[0, 0, 9] = torch.nan
    inputs = [t.requires_grad_() for t in (q, k, v)]
    out = attn_ext.attention(*inputs, causal=True)
    grad_q, grad_k, grad_v = torch.autograd.grad(out.nan_to_num().sum(), inputs)
    for grad in (grad_k, grad_v):
        assert grad[0, 0, 10:].isfinite().all()
        assert grad[0, 0, :10].isnan().any()
    assert grad_q[0, 0, 9].isnan().all()
    assert grad_q[0, 0, :9].isfinite().all()
