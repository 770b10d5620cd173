"""Exact fused attention for PyTorch: see :func:`attention`."""

from pathlib import Path as _Path

import torch  # noqa: F401  first: the compiled module links against torch's libraries and finds them loaded

try:
    from . import _C
except ImportError as error:
    _home = _Path(__file__).resolve().parents[1]
    _where = (
        f"Python found the source tree in {_home} before any installed attn_ext: "
        "start it in another directory. "
        if (_home / "setup.py").exists()
        else ""
    )
    raise ImportError(
        f"attn_ext's compiled module cannot be loaded ({error}). {_where}"
        "It is built by installing the project: run "
        "`pip install .` in its directory, or `python setup.py build_ext --inplace` to use the source tree. "
        "There is no slower path in Python that it would fall back to."
    ) from error

from . import masks, reference, viz
from .functional import attention, merge_attention, scaled_dot_product_attention
from .integrations.sdpa import patch_sdpa
from .integrations.torch_modules import replace_attention
from .masks import BlockMask
from .modules import (
    CrossAttention,
    MultiHeadAttention,
    SelfAttention,
    Transformer,
    TransformerDecoder,
    TransformerDecoderLayer,
    TransformerEncoder,
    TransformerEncoderLayer,
)
from .plan import LaunchPlan, launch_plan
from .positions import (
    ALiBi,
    LearnedPositionalEncoding,
    RelativePositionBias2D,
    RotaryEmbedding,
    SinusoidalPositionalEncoding,
    T5RelativePositionBias,
    alibi_slopes,
)

__version__ = _C.build_info()["version"]

__all__ = [
    "ALiBi",
    "BlockMask",
    "CrossAttention",
    "LaunchPlan",
    "LearnedPositionalEncoding",
    "MultiHeadAttention",
    "RelativePositionBias2D",
    "RotaryEmbedding",
    "SelfAttention",
    "SinusoidalPositionalEncoding",
    "T5RelativePositionBias",
    "Transformer",
    "TransformerDecoder",
    "TransformerDecoderLayer",
    "TransformerEncoder",
    "TransformerEncoderLayer",
    "__version__",
    "alibi_slopes",
    "attention",
    "launch_plan",
    "masks",
    "merge_attention",
    "patch_sdpa",
    "reference",
    "replace_attention",
    "scaled_dot_product_attention",
    "viz",
]
