"""Known faults of batches and caches: neighbours in a batch, packed against padded, one token at a time.

References are issues of other projects in which users met the fault.
"""

import random

import nvcc
import pytest
import torch
from cuda_kernels import attention_on
from oracle import DTYPES, assert_close, oracle, qkv, randn
from torch.nn.utils.rnn import pad_sequence

from attn_ext import attention
from attn_ext.integrations.flash_attn import flash_attn_varlen_func


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(1, 300), (3, 40), (130, 200)])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_sample_alone_has_the_bits_it_has_in_a_batch(dtype, sizes, threads):
    # flash-attention#1897, flashinfer#2424: work divided by the size of the batch gives sums in another order
    inputs = [t.requires_grad_() for t in qkv(8, 4, *sizes, 24, heads_kv=2, dtype=dtype)]
    others = torch.tensor([sizes[1] - 2 * b for b in range(8)])  # sample 0 keeps all its keys
    cotangents = randn(8, 4, sizes[0], 24, dtype=dtype, seed=7), randn(8, 4, sizes[0], seed=8)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for options in ({"causal": True}, {"window": (5, 0), "softcap": 3.0}):

            def run(samples, options=options, **lengths):
                x = [t[samples] for t in inputs]
                out, lse = attention(*x, **options, **lengths, return_lse=True)
                weights = [c[samples].to(t.dtype) for c, t in zip(cotangents, (out, lse), strict=True)]
                return [t[:1] for t in (out, lse, *torch.autograd.grad((out, lse), x, weights))]

            alone = run(slice(1))
            assert all(map(torch.equal, run(slice(8)), alone))
            assert all(map(torch.equal, run(slice(8), key_lengths=others), alone))
    finally:
        torch.set_num_threads(before)


@nvcc.needed
@pytest.mark.parametrize(
    ("dtype", "len_q"), [(torch.float16, 37), (torch.float32, 9)], ids=["tensor cores", "simt"]
)
def test_a_sample_alone_has_the_bits_it_has_in_a_batch_on_cuda(dtype, len_q):
    # Long keys of few queries are split by the size of the batch, as the README says: not the same bits.
    tensors = qkv(2, 2, len_q, 70, 40, heads_kv=1, dtype=dtype)
    cotangent = randn(2, 2, len_q, 40, dtype=dtype, seed=7)
    results = []
    for samples in (slice(2), slice(1)):
        x = [t[samples].clone().requires_grad_() for t in tensors]
        out, lse = attention_on("ptxrun", multiprocessors=1)(*x, causal=True)
        results.append([t[:1] for t in (out, lse, *torch.autograd.grad(out, x, cotangent[samples]))])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pieces", [(1,) * 10, (4, 1, 5)], ids=["tokens", "pieces"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"window": (3, 0)},
        {"alibi_slopes": torch.tensor([0.5, 0.2, 0.1, 0.05])},
        {"softcap": 2.0, "sinks": torch.tensor([0.5, 0.0, -1.0, 2.0])},
    ],
    ids=lambda options: "+".join(options) or "plain",
)
def test_decoding_with_a_cache_equals_the_full_forward(dtype, pieces, options):
    # x-transformers#311, #187: the diagonal, the window or ALiBi's distance counted from the wrong end
    q, k, v = qkv(2, 4, 10, 10, heads_kv=2, dtype=dtype)
    truth, plain = (oracle(q, k, v, causal=True, dtype=of, **options)[0] for of in (torch.float64, dtype))
    assert_close("at once", attention(q, k, v, causal=True, **options), truth, plain)
    outs, end = [], 0
    for n in pieces:
        new = slice(end, end := end + n)
        outs.append(attention(q[:, :, new], k[:, :, :end], v[:, :, :end], causal=True, **options))
    assert_close("with a cache", torch.cat(outs, 2), truth, plain)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_packed_sequences_equal_padded_ones(causal, seed):
    # flash-attention#545, #1311: out or gradients of the packed form differ from those of the padded one
    lengths = random.Random(seed).choices(range(1, 41), k=6)
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    packed = [randn(sum(lengths), heads, 8, seed=n).requires_grad_() for n, heads in enumerate((4, 2, 2))]
    weight = randn(sum(lengths), 4, 8, seed=5)
    padded = [pad_sequence(t.split(lengths), batch_first=True).transpose(1, 2) for t in packed]
    # Queries and keys of a sample are equally many, so the upper left corner is where each sequence starts.
    alignment = "upper_left" if causal else False
    out = attention(*padded, causal=alignment, key_lengths=lengths, query_lengths=lengths).transpose(1, 2)
    want = torch.cat([sample[:n] for sample, n in zip(out, lengths, strict=True)])
    got = flash_attn_varlen_func(*packed, ends, ends, max(lengths), max(lengths), causal=causal)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(*(torch.autograd.grad(t, packed, weight) for t in (got, want)))


@pytest.mark.compile
def test_a_cache_that_is_written_and_read_in_one_compiled_graph():
    # vllm flash-attention fork PR#148: the write is dropped, or comes after the read

    def step(cache_k, cache_v, q, k, v, lengths):
        cache_k.scatter_(2, (lengths - 1).view(-1, 1, 1, 1).expand_as(k), k)
        cache_v.scatter_(2, (lengths - 1).view(-1, 1, 1, 1).expand_as(v), v)
        return attention(q, cache_k, cache_v, key_lengths=lengths)

    torch.compiler.reset()
    results = []
    for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        caches = [torch.full((2, 2, 9, 8), float("nan"), dtype=torch.float64) for _ in range(2)]
        outs = []
        for n in range(4):
            lengths = torch.tensor([n + 1, n + 1])
            outs.append(function(*caches, *qkv(len_q=1, len_k=1, seed=n), lengths))
        results.append((*outs, *(c.nan_to_num(0) for c in caches)))
        assert all(out.isfinite().all() for out in outs)
    torch.testing.assert_close(*results)
