"""Each barrier, wait, commit and fence of the CUDA kernels is needed: see kernel_mutations.py."""

import re

import kernel_mutations
import nvcc
import pytest

pytestmark = [nvcc.needed, pytest.mark.slow]

# One kernel of each source: f16 and bf16, and head dims with the same tiling, share their synchronisation.
KERNELS = [
    *(f"attn_fwd_sm80_f16_d{dim}{kind}" for dim in (64, 128) for kind in ("", "_full")),
    *(
        f"attn_bwd_{what}_sm80_f16_d{dim}{kind}"
        for what in ("dkdv", "dq")
        for dim in (64, 128)
        for kind in ("", "_full")
    ),
    *(f"attn_bwd_bias_sm80_f16_d{dim}" for dim in (64, 128)),
    "attn_bwd_sums_f32",
    "attn_decode_sm80_f16_d64",
    *(
        f"attn_{what}_{core}"
        for core in ("simt_f32", "tf32_sm80")
        for what in ("fwd", "bwd_dkdv", "bwd_dq", "bwd_bias")
    ),
]
REDUNDANT = {  # regular expression on str(Mutation): why it may go unnoticed
    # The second one needs it (another batch element's slopes, or a sink): without it ptxrun reports a race.
    r"backward_sums\.cuh.*all have read the sum before": "a block's first sum needs none",
}


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_synchronisation_is_needed(kernel):
    found = list(kernel_mutations.mutations(kernel, kernel_mutations.cases_for(kernel)))
    missed = [str(m) for m in found if m.outcome in ("not noticed", "not executed")]
    assert found, f"{kernel} has no synchronisation at all"
    assert [m for m in missed if not any(re.search(pattern, m) for pattern in REDUNDANT)] == []
