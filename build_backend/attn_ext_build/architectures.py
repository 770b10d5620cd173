"""Which GPU architectures the kernels are compiled for."""

import re

# When no GPU is visible. CUDA 12.0 and newer know sm_90a, and torch 2.10 comes with no older one.
DEFAULT = "8.0;9.0a+PTX"


def split(wish: str) -> tuple[str, bool]:
    """(TORCH_CUDA_ARCH_LIST for most kernels, whether those for sm_90a are wanted).

    wgmma and TMA are features of 9.0a, which runs on Hopper alone. Only the files that use them are compiled
    for it; the others for 9.0 instead.
    """
    names = [name for name in re.split(r"[; ]+", wish) if name]
    plain = [re.sub(r"^9\.0a(?=$|\+)", "9.0", name) for name in names]
    return ";".join(dict.fromkeys(plain)), plain != names
