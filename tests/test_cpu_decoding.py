"""Up to four queries a head (csrc/cpu/decode.h): a group of heads reads its keys at once, by stretches."""

import pytest
import torch
from oracle import check, qkv

import attn_ext

HALF = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *HALF])
@pytest.mark.parametrize("len_q", [1, 2, 3, 4])
@pytest.mark.parametrize(("heads", "heads_kv"), [(1, 1), (7, 1), (6, 3)])
def test_decoding(dtype, len_q, heads, heads_kv):
    """Several stretches of keys, the last one short, and groups of heads that fill rows of four unevenly."""
    q, k, v = qkv(2, heads, len_q, 1300, 59, 41, heads_kv=heads_kv, dtype=dtype, seed=len_q)
    check(q, k, v, causal=True, key_lengths=torch.tensor([1290, 3]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "options",
    [
        {"window": (600, 0)},
        {"softcap": 2.0, "sinks": torch.tensor([0.5, -torch.inf, 1.0, 2.0])},
        {"alibi_slopes": torch.tensor([0.5, 0.1, 0.01, 0.0]), "query_lengths": torch.tensor([2, 0])},
        {"bias": (4, 3, 1100), "mask": True},
    ],
    ids=lambda options: "-".join(options),
)
def test_decoding_with_options(dtype, options):
    """Each head of a group has its own terms, though they share their keys."""
    q, k, v = qkv(2, 4, 3, 1100, 64, heads_kv=1, dtype=dtype)
    if "bias" in options:
        generator = torch.Generator().manual_seed(1)
        mask = torch.rand(2, 4, 3, 1100, generator=generator) > 0.5
        mask[0, 1, 2] = False
        options = {"bias": torch.randn(options["bias"], generator=generator).to(dtype), "mask": mask}
    check(q, k, v, **options)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_decoding_drops_what_single_heads_drop(dtype):
    """A group of heads is read at once, by stretches; dropout follows positions all the same."""
    q, k, v = qkv(1, 4, 2, 1100, 16, heads_kv=2, dtype=dtype)
    k, v = torch.ones_like(k), torch.eye(1100, 16, dtype=dtype).expand(1, 2, 1100, 16).contiguous()
    rows = torch.cat([q, q, q], 2)  # six queries take the way of long sequences

    def run(q):
        return attn_ext.attention(q, k, v, dropout_p=0.5, generator=torch.Generator().manual_seed(3))

    assert torch.equal(run(q) != 0, run(rows)[:, :, :2] != 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decoding_does_not_depend_on_the_number_of_threads(dtype):
    q, k, v = qkv(1, 4, 1, 5000, 64, heads_kv=2, dtype=dtype)

    def run(threads):
        torch.set_num_threads(threads)
        try:
            return attn_ext.attention(q, k, v, return_lse=True)
        finally:
            torch.set_num_threads(1)

    for threads in (2, 5):
        for one, more in zip(run(1), run(threads), strict=True):
            assert torch.equal(one, more)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decoding_a_sample_alone_as_in_a_batch(dtype):
    """Many samples keep every unit busy with whole heads; one is cut into stretches."""
    q, k, v = qkv(40, 4, 1, 3000, 16, heads_kv=2, dtype=dtype)
    batch = attn_ext.attention(q, k, v, return_lse=True)
    for one, many in zip(attn_ext.attention(q[7:8], k[7:8], v[7:8], return_lse=True), batch, strict=True):
        assert torch.equal(one, many[7:8])


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_decoding_with_a_non_finite_number_in_one_stretch(value):
    q, k, v = qkv(1, 2, 1, 1300, 16, dtype=torch.float32)
    k[0, 0, 800, 3] = value
    out, lse = attn_ext.attention(q, k, v, return_lse=True)
    want, want_lse = attn_ext.reference.attention(q.double(), k.double(), v.double())[:2]
    assert torch.equal(out.isnan(), want.isnan())
    torch.testing.assert_close(lse.double(), want_lse, equal_nan=True)


def test_decoding_a_block_hidden_from_one_head_of_a_group():
    """What another head of the group reads there, NaN, is not multiplied with this one's 0."""
    visible = torch.ones(1, 2, 1, 512, dtype=torch.bool)
    visible[0, 1, 0, 256:] = False
    q, k, v = qkv(1, 2, 1, 512, 16, heads_kv=1, dtype=torch.float32)
    v[0, 0, 300] = torch.nan
    out = attn_ext.attention(q, k, v, block_mask=attn_ext.BlockMask.from_dense(visible))
    assert out[0, 0].isnan().all()
    assert out[0, 1].isfinite().all()
