"""Each barrier, wait, commit and fence of the CUDA kernels is needed: see kernel_mutations.py."""

import re

import cuda_kernels
import kernel_mutations
import nvcc
import pytest
from ptxrun import mutate

# Every kernel that synchronises, of the two half types, which have the same source, in one.
KERNELS = [
    *(
        f"attn_{what}_sm80_f16_d{dim}{kind}"
        for what in ("fwd", "bwd_dkdv", "bwd_dq")
        for dim in (32, 64, 96, 128, 192, 256)
        for kind in ("", "_full")
    ),
    *(f"attn_fwd_sm80_f16_d{dim}_compact" for dim in (192, 256)),
    *(f"attn_{what}_sm80_f16_d{dim}" for what in ("bwd_bias", "jvp") for dim in (32, 64, 96, 128, 192, 256)),
    *(f"attn_decode_sm80_f16_d{dim}" for dim in (64, 128, 256)),
    "attn_decode_combine_f16",
    *(
        f"attn_{what}_{core}"
        for core in ("simt_f16", "simt_f32", "simt_f64", "tf32_sm80")
        for what in ("fwd", "bwd_dkdv", "bwd_dq", "bwd_bias", "jvp")
    ),
    *(f"attn_bwd_sums_{dtype}" for dtype in ("f32", "f64")),
    *(f"attn_fwd_sm90_f16_d{kind}" for kind in ("64", "96", "128", "128_banded", "192", "256")),
    *(f"attn_bwd_sm90_f16_d{dim}" for dim in (64, 96, 128)),
]
# Without -m slow: the forward, both loops of the backward, forward mode, decoding, and the two-stage ring of
# simt/.
QUICK = {
    "attn_fwd_sm80_f16_d64",
    "attn_bwd_dkdv_sm80_f16_d64",
    "attn_bwd_dq_sm80_f16_d64",
    "attn_jvp_sm80_f16_d64",
    "attn_decode_sm80_f16_d64",
    "attn_decode_combine_f16",
    "attn_fwd_simt_f32",
    "attn_bwd_sums_f32",
    "attn_fwd_sm90_f16_d64",
}
REDUNDANT = {  # regular expression on "kernel: Mutation": why it may go unnoticed
    r"_simt_f16: .*cp\.async\.(commit|wait)_group": "halves become floats in registers: of all copies only "
    "those of the backward's row terms are asynchronous. The source is float32's, which needs each",
    r"_jvp_tf32_.*bar\.warp\.sync.*\(jvp\.cuh:.* the tile": "in TF32 a thread reads only its own numbers "
    "of the tile. The source is float32's, where it reads whole rows",
    r"bwd_sm90_.*(fence\.proxy\.async\.global|bulk\.wait_group 0)": "in ptxrun blocks run one after the "
    "other, and a bulk store is done when it starts; on a GPU others may add to the same sums meanwhile",
    r"bwd_sm90_.*fence\.proxy\.async\.shared": "that of hide(): another follows, for dS; this one is where "
    "the PTX ISA's examples have it, between the writes and the barrier",
    r"bwd_sm90_.*wgmma\.commit_group": "after the last tile all products could be one group; the source "
    "is that of the loop, which waits for dV and dK first",
}


@nvcc.needed
@pytest.mark.parametrize(
    "kernel", [pytest.param(k, marks=() if k in QUICK else pytest.mark.slow) for k in KERNELS]
)
def test_every_synchronisation_is_needed(kernel, monkeypatch):
    arch = "sm_86" if kernel.endswith("_compact") else "sm_80"  # compact: where a block gets 99 KiB
    if "_sm90_" in kernel:
        arch = "sm_90"
        monkeypatch.setenv("ATTN_EXT_KERNELS", "sm90")
    found = list(kernel_mutations.mutations(kernel, kernel_mutations.cases_for(kernel), arch))
    missed = [f"{kernel}: {m}" for m in found if m.outcome in ("not noticed", "not executed")]
    assert found, f"{kernel} has no synchronisation at all"
    assert [m for m in missed if not any(re.search(pattern, m) for pattern in REDUNDANT)] == []


def test_no_kernel_is_left_out():
    files = cuda_kernels.INSTANTIATIONS.glob("*.cu")
    kernels = {name for path in files for name in re.findall(r"_KERNEL\((attn_\w+)", path.read_text())}
    alone = {name for name in kernels if re.match("attn_bwd_(rows|dq_sm90)_", name)}  # see below
    assert {name.replace("bf16", "f16") for name in kernels - alone} == set(KERNELS)


@nvcc.needed
@pytest.mark.parametrize(
    ("kernel", "others"),
    [("attn_bwd_rows_f32", ()), ("attn_bwd_dq_sm90_f16_d64", ("attn_bwd_sm90_f16_d64",))],
)
def test_threads_that_share_no_memory_have_nothing_to_synchronise(kernel, others):
    text = cuda_kernels.ptx(kernel, "sm_80")
    start = text.index(f".entry {kernel}(")
    assert all(text.index(f".entry {other}(") < start for other in others)  # in the same file
    lines = range(text[:start].count("\n") + 1, text.count("\n") + 2)
    assert mutate.synchronisations(text, lines) == []
