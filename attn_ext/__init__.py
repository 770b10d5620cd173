"""Exact fused attention for PyTorch: see :func:`attention`."""

import torch  # noqa: F401  first: the compiled module links against torch's libraries and finds them loaded

try:
    from . import _C
except ImportError as error:
    raise ImportError(
        f"attn_ext's compiled module cannot be loaded ({error}). It is built by installing the project: run "
        "`pip install .` in its directory, or `python setup.py build_ext --inplace` to use the source tree. "
        "There is no slower path in Python that it would fall back to."
    ) from error

from . import reference
from .functional import attention, merge_attention, scaled_dot_product_attention
from .modules import MultiHeadAttention

__version__ = _C.build_info()["version"]

__all__ = [
    "MultiHeadAttention",
    "__version__",
    "attention",
    "merge_attention",
    "reference",
    "scaled_dot_product_attention",
]
