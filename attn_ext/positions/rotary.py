"""Rotary position embedding, with the scalings by which models are stretched beyond their training length."""

import math

import torch
from torch import Tensor, nn

from .. import arguments
from ..arguments import ArgumentTypeError, ArgumentValueError
from .common import at_least_float32, cos_sin, row_positions

# rope_type -> (entries it needs, optional entries with their defaults); names and meaning as in Hugging
# Face's configurations. None: follows from the others.
SCALINGS = {
    "default": ((), {}),
    "linear": (("factor",), {}),
    "ntk": (("factor",), {}),
    "dynamic": (("factor", "original_max_position_embeddings"), {}),
    "yarn": (
        ("factor", "original_max_position_embeddings"),
        {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": True,
            "attention_factor": None,
            "mscale": None,
            "mscale_all_dim": None,
        },
    ),
    "llama3": (
        ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
        {},
    ),
}


class RotaryEmbedding(nn.Module):
    r"""Rotates pairs of features of queries and keys by angles proportional to their position.

        theta_i  = base^(-2i / dim)                                          i = 0 ... dim/2 - 1
        (a, b)_i -> (a cos(pos theta_i) - b sin(pos theta_i), a sin(pos theta_i) + b cos(pos theta_i))

    so that q_m . k_n depends on the positions through m - n alone. RoFormer
    (https://arxiv.org/abs/2104.09864, section 3.2). Features from `dim` on are left as they are (partial
    rotation, as in GPT-NeoX and Phi).

        >>> rope = RotaryEmbedding(64)
        >>> q, k = torch.randn(2, 8, 10, 64), torch.randn(2, 2, 10, 64)
        >>> q, k = rope(q), rope(k)

    Decoding: `rope(q, 10)` for what stands at positions 10, 11, ... In a module: `MultiHeadAttention(512, 8,
    position=RotaryEmbedding(64))`.

    Args:
        dim: how many features of a head are rotated; even.
        base: of the frequencies; Llama 2 has 10,000, Llama 3 500,000.
        interleaved: whether the pairs are features (2i, 2i + 1), as in RoFormer, GPT-J and Meta's Llama,
            instead of (i, i + dim / 2), as in GPT-NeoX and Hugging Face's Llama. A permutation of W_q and W_k
            turns one into the other; to a checkpoint it is not a matter of taste.
        scaling: None, or a dict with "rope_type" and the other entries of a Hugging Face configuration's
            `rope_parameters` (`rope_scaling`) but `rope_theta`; s = factor, L0 =
            original_max_position_embeddings:

            "linear" (Chen et al., https://arxiv.org/abs/2306.15595): theta_i / s.
            "ntk": base becomes base * s^(dim / (dim - 2)), which divides the lowest frequency by s and leaves
                the highest.
            "dynamic": ntk with s L / L0 - (s - 1) for s, L being the highest position of the call plus 1, at
                least L0. Another L is another rotation of every key: with a cache of keys, cache them
                unrotated.
            "yarn" (Peng et al., https://arxiv.org/abs/2309.00071, sections 3.2 and 3.4): theta_i of more than
                beta_fast turns within L0 stay, of fewer than beta_slow are divided by s, between them a
                linear ramp over i; cos and sin are multiplied by attention_factor, by default
                0.1 ln(s) + 1 (with mscale and mscale_all_dim: DeepSeek's ratio of two such terms).
            "llama3" (Llama 3.1, https://arxiv.org/abs/2407.21783): wavelengths below L0 / high_freq_factor
                stay, above L0 / low_freq_factor are divided by s, between them a blend linear in 1 /
                wavelength.

    There is no parameter, buffer or table: frequencies are formed in float64 at each call and cannot be
    rounded by `.half()`. Rotations are computed in float32 (float64 for float64) and rounded once to x's
    dtype.

    Raises:
        ValueError, TypeError: an odd dim, one beyond the head's, unknown or missing entries of scaling,
            shapes that do not fit.
    """

    def __init__(
        self, dim: int, base: float = 10000.0, *, interleaved: bool = False, scaling: dict | None = None
    ) -> None:
        super().__init__()
        if dim <= 0 or dim % 2:
            raise ArgumentValueError(f"dim must be even and greater than 0 to fall into pairs, got {dim}")
        if not base > 1:
            raise ArgumentValueError(f"base must be greater than 1, got {base}")
        self.dim = dim
        self.base = base
        self.interleaved = interleaved
        self.scaling = _checked(scaling, dim)

    def forward(self, x: Tensor, positions: int | Tensor = 0) -> Tensor:
        """x (B, H, N, D) turned by its positions, in the same shape and dtype.

        positions: that of the first row (an int, or a tensor without dimensions), or those of all rows, (N,)
            or (B, N).
        """
        self._check("x", x)
        rows = row_positions(positions, x.shape[0], x.shape[2], x.device)
        return self._rotate(x, *self._cos_sin(rows, at_least_float32(x.dtype)))

    def attention_terms(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """For MultiHeadAttention: both rotated, the last query at the position of the last key; no terms."""
        self._check("query's heads", q)
        len_q, len_k = q.shape[2], k.shape[2]
        rows = torch.arange(min(0, len_k - len_q), len_k, device=q.device)
        cos, sin = self._cos_sin(rows, at_least_float32(q.dtype))
        q, k = (
            self._rotate(x, cos[rows.shape[0] - x.shape[2] :], sin[rows.shape[0] - x.shape[2] :])
            for x in (q, k)
        )
        return q, k, {}

    def _check(self, name: str, x: Tensor) -> None:
        arguments.check_tensor(name, x)
        if x.dim() != 4 or x.shape[3] < self.dim:
            raise ArgumentValueError(
                f"{name} must be (batch, heads, length, head_dim) with head_dim >= dim={self.dim}, "
                f"got {tuple(x.shape)}"
            )

    def _cos_sin(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(..., N, dim / 2) each, of positions (..., N)."""
        frequencies, factor = inverse_frequencies(self.dim, self.base, self.scaling, positions)
        cos, sin = cos_sin(positions, frequencies, dtype)
        return (cos, sin) if factor == 1 else (cos * factor, sin * factor)

    def _rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if cos.dim() == 3:  # (B, N, F): the same for all heads
            cos, sin = cos[:, None], sin[:, None]
        pairs, axis = ((-1, 2), -1) if self.interleaved else ((2, -1), -2)
        a, b = x[..., : self.dim].to(cos.dtype).unflatten(-1, pairs).unbind(axis)
        turned = torch.stack([a * cos - b * sin, a * sin + b * cos], axis).flatten(-2).to(x.dtype)
        return turned if x.shape[-1] == self.dim else torch.cat([turned, x[..., self.dim :]], -1)

    def extra_repr(self) -> str:
        return f"{self.dim}, base={self.base}, interleaved={self.interleaved}, scaling={self.scaling}"


def inverse_frequencies(dim: int, base: float, scaling: dict, positions: Tensor) -> tuple[Tensor, float]:
    """theta (dim / 2,) in float64, and the factor of cos and sin; see :class:`RotaryEmbedding`.

    positions: those of the call; only "dynamic" looks at them, on their device.
    """
    kind, s = scaling["rope_type"], scaling.get("factor")
    trained = scaling.get("original_max_position_embeddings")
    exponents = torch.arange(0, dim, 2, dtype=torch.float64, device=positions.device) / dim
    if kind == "ntk":
        base = base * s ** (dim / (dim - 2))
    elif kind == "dynamic":
        length = (positions.max().double() + 1).clamp_min(trained) if positions.numel() else trained
        base = base * (s * length / trained - (s - 1)) ** (dim / (dim - 2))
    theta = base**-exponents
    if kind == "linear":
        return theta / s, 1.0
    if kind == "yarn":
        kept = 1 - _ramp(dim, base, scaling, positions.device)
        return theta * kept + theta / s * (1 - kept), scaling["attention_factor"]
    if kind == "llama3":
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        turns = trained * theta / (2 * math.pi)  # within the training length
        kept = ((turns - low) / (high - low)).clamp(0, 1)
        return theta * kept + theta / s * (1 - kept), 1.0
    return theta, 1.0


def _ramp(dim: int, base: float, scaling: dict, device: torch.device) -> Tensor:
    """YaRN's ramp over i: 0 where theta_i turns more than beta_fast times within L0, 1 below beta_slow."""

    def index(turns: float) -> float:  # the i, not rounded, whose theta_i makes so many turns
        length = scaling["original_max_position_embeddings"]
        return dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(base))

    first, last = index(scaling["beta_fast"]), index(scaling["beta_slow"])
    if scaling["truncate"]:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    i = torch.arange(dim // 2, dtype=torch.float64, device=device)
    return ((i - first) / max(last - first, 1e-3)).clamp(0, 1)  # 1e-3: a step where both are one


def _checked(scaling: dict | None, dim: int) -> dict:
    """`scaling` with its defaults filled in; an entry of None counts as absent, as in configuration files."""
    scaling = {"rope_type": "default"} if scaling is None else scaling
    if not isinstance(scaling, dict):
        raise ArgumentTypeError(f"scaling must be None or a dict, got {type(scaling).__name__}")
    scaling = {name: value for name, value in scaling.items() if value is not None}
    kind = scaling.get("rope_type")
    if kind not in SCALINGS:
        raise ArgumentValueError(f'scaling["rope_type"] must be one of {", ".join(SCALINGS)}, got {kind!r}')
    needed, optional = SCALINGS[kind]
    given = set(scaling) - {"rope_type"}
    if not set(needed) <= given <= {*needed, *optional}:
        raise ArgumentValueError(
            f'scaling of rope_type "{kind}" must have the entries ({", ".join(needed)}) and may have '
            f"({', '.join(optional)}), got ({', '.join(sorted(given))})"
        )
    scaling = {**optional, **scaling}
    for name in needed:
        if not scaling[name] > 0:
            raise ArgumentValueError(f'scaling["{name}"] must be greater than 0, got {scaling[name]}')
    if kind in ("ntk", "dynamic") and dim < 4:
        raise ArgumentValueError(f'dim must be at least 4 for rope_type "{kind}", got {dim}')
    if kind == "llama3" and not scaling["low_freq_factor"] < scaling["high_freq_factor"]:
        raise ArgumentValueError(
            f"scaling's low_freq_factor must be less than high_freq_factor, got {scaling['low_freq_factor']} "
            f"and {scaling['high_freq_factor']}"
        )
    if kind == "yarn" and scaling["attention_factor"] is None:
        s, one, all_dim = scaling["factor"], scaling["mscale"], scaling["mscale_all_dim"]
        both = one and all_dim
        scaling["attention_factor"] = _mscale(s, one) / _mscale(s, all_dim) if both else _mscale(s, 1.0)
    return scaling


def _mscale(s: float, weight: float) -> float:
    return 0.1 * weight * math.log(s) + 1 if s > 1 else 1.0
