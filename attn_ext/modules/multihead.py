"""MultiHeadAttention: torch.nn.MultiheadAttention's interface and checkpoints on the fused kernels."""

import functools
import warnings
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import arguments
from ..arguments import ArgumentTypeError, ArgumentValueError
from ..functional import attention, merge_attention
from ..masks import BlockMask
from .score_terms import score_terms
from .torch_conversion import copy_parameters, torch_arguments, used_extras

QK_NORM_EPS = 1e-6  # as in models with q/k norm (Qwen3, OLMo 2): small beside activations of order one


class MultiHeadAttention(nn.Module):
    r"""Multi-head attention; boolean masks mark what is masked OUT (True = may not attend), as in torch.nn.

    A drop-in for `torch.nn.MultiheadAttention` ("Attention Is All You Need", section 3.2.2,
    https://arxiv.org/abs/1706.03762): the same constructor arguments, parameter names, initialisation (the
    same seed gives the same parameters) and forward; state_dicts load both ways while the extras (the
    keyword-only arguments) are off.

        head_h = softmax(q_h k_h^T / sqrt(head_dim) + masks) v_h        q = query W_q + b_q, likewise k, v
        output = concat(head_1, ..., head_H) W_o + b_o

    Args:
        embed_dim: features of query and output.
        num_heads: query heads H; each has `embed_dim // num_heads` features unless `head_dim` is given.
        dropout: probability of dropping an attention probability, in training mode only.
        bias: input and output projections have a bias.
        add_bias_kv: append one learned key and value (`bias_k`, `bias_v`) that every query sees.
        add_zero_attn: append a key and value of zeros that every query sees.
        kdim, vdim: features of key and value, by default embed_dim. If both are embed_dim the input
            projection is one packed `in_proj_weight`, otherwise `q_proj_weight`, `k_proj_weight`,
            `v_proj_weight`.
        batch_first: batched inputs and outputs are (N, L, E) instead of (L, N, E).
        num_kv_heads: grouped-query attention: key/value heads, a divisor of num_heads (1: multi-query).
        head_dim: features of a head, by default `embed_dim // num_heads`; out_proj maps H * head_dim to
            embed_dim.
        window: (left, right), a sliding window as in `attention`: for L = S, query i sees the keys from
            i - left to i + right; None leaves a side open.
        softcap: logits become `softcap * tanh(logits / softcap)` before masks and biases are added.
        qk_norm: "rms" or "layer": each head's query and key (also `bias_k`) are normalised over head_dim,
            with a learned scale that the heads share (`q_norm.weight`, `k_norm.weight`).
        position: a module of :mod:`attn_ext.positions` that turns queries and keys (after qk_norm) or adds to
            the logits: RotaryEmbedding, ALiBi, T5RelativePositionBias, RelativePositionBias2D, or one of your
            own. Query i stands at position i + S - L, key j at j; extra keys stand nowhere.

    Differences from torch.nn.MultiheadAttention: a query with no visible key (a fully padded sample) gives
    `out_proj.bias` and weights 0 in every mode, where torch gives NaN; returned weights are those before
    dropout; `is_causal=True` works without a mask; `out_proj` is called as a module, so hooks and
    replacements act; masks of different kinds may be mixed; errors are ValueError or TypeError; torch.jit
    cannot script it (torch.compile and torch.export take it). In
    `nn.TransformerEncoderLayer` it is called in every mode, never replaced by the layer's own fused path
    (`_qkv_same_embed_dim` is False for that; build an `nn.TransformerEncoder` with
    enable_nested_tensor=False, else it warns that it cannot use that path).

    Examples::

        >>> mha = MultiHeadAttention(512, 8, batch_first=True)
        >>> x, memory = torch.randn(2, 10, 512), torch.randn(2, 16, 512)

        Self-attention, also with the weights of each head:

        >>> out, _ = mha(x, x, x, need_weights=False)
        >>> out.shape
        torch.Size([2, 10, 512])
        >>> out, weights = mha(x, x, x, average_attn_weights=False)
        >>> weights.shape
        torch.Size([2, 8, 10, 10])

        Causal self-attention of a decoder:

        >>> out, _ = mha(x, x, x, need_weights=False, is_causal=True)

        Encoder-decoder cross-attention, with padding in the encoder's output:

        >>> padding = torch.arange(16).expand(2, 16) >= torch.tensor([[16], [11]])
        >>> out, _ = mha(x, memory, memory, key_padding_mask=padding, need_weights=False)
    """

    # nn.TransformerEncoderLayer in eval mode hands the weights of its self_attn to an operator of torch's own
    # instead of calling it, unless this is False. The parameters' layout does not depend on it.
    _qkv_same_embed_dim = False

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        window: tuple[int | None, int | None] | None = None,
        softcap: float | None = None,
        qk_norm: str | None = None,
        position: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kdim = embed_dim if kdim is None else kdim
        self.vdim = embed_dim if vdim is None else vdim
        for name in ("embed_dim", "num_heads", "num_kv_heads", "kdim", "vdim"):
            if getattr(self, name) <= 0:
                raise ArgumentValueError(f"{name} must be greater than 0, got {getattr(self, name)}")
        if head_dim is None and embed_dim % num_heads:
            raise ArgumentValueError(
                f"embed_dim must be divisible by num_heads, got embed_dim={embed_dim}, num_heads={num_heads} "
                "(or give head_dim, the size of a head)"
            )
        self.head_dim = embed_dim // num_heads if head_dim is None else head_dim
        if self.head_dim <= 0:
            raise ArgumentValueError(f"head_dim must be greater than 0, got {head_dim}")
        if num_heads % self.num_kv_heads:
            raise ArgumentValueError(f"num_kv_heads must divide num_heads={num_heads}, got {num_kv_heads}")
        dropout = arguments.probability(dropout, "dropout")
        if qk_norm not in (None, "rms", "layer"):
            raise ArgumentValueError(f'qk_norm must be None, "rms" or "layer", got {qk_norm!r}')
        if position is not None and not hasattr(position, "attention_terms"):
            raise ArgumentTypeError(
                "position must be a module with attention_terms(q, k), see attn_ext.positions, got "
                f"{type(position).__name__} (absolute encodings are added to the input of the first layer)"
            )
        if self.head_dim < 32:
            _warn_of_small_heads(self.head_dim)
        arguments.window_sides(window)
        arguments.cap(softcap)
        self.dropout = dropout
        self.batch_first = batch_first
        self.add_zero_attn = add_zero_attn
        self.window = window
        self.softcap = softcap
        self.qk_norm = qk_norm
        self.position = position

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        # Created and initialised in torch.nn.MultiheadAttention's order: a seed gives the same parameters.
        q_dim, kv_dim = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        packed = self.kdim == self.vdim == embed_dim
        self.in_proj_weight = parameter(q_dim + 2 * kv_dim, embed_dim) if packed else None
        self.q_proj_weight = None if packed else parameter(q_dim, embed_dim)
        self.k_proj_weight = None if packed else parameter(kv_dim, self.kdim)
        self.v_proj_weight = None if packed else parameter(kv_dim, self.vdim)
        self.in_proj_bias = parameter(q_dim + 2 * kv_dim) if bias else None
        self.out_proj = nn.Linear(q_dim, embed_dim, bias=bias, device=device, dtype=dtype)
        self.bias_k = parameter(1, 1, kv_dim) if add_bias_kv else None
        self.bias_v = parameter(1, 1, kv_dim) if add_bias_kv else None
        self._reset_parameters()
        self.q_norm = self.k_norm = None
        if qk_norm is not None:
            norm = nn.RMSNorm if qk_norm == "rms" else nn.LayerNorm
            options = {"eps": QK_NORM_EPS, "device": device, "dtype": dtype}
            if qk_norm == "layer":
                options["bias"] = False
            self.q_norm, self.k_norm = norm(self.head_dim, **options), norm(self.head_dim, **options)

    def _reset_parameters(self) -> None:
        for weight in (self.in_proj_weight, self.q_proj_weight, self.k_proj_weight, self.v_proj_weight):
            if weight is not None:
                nn.init.xavier_uniform_(weight)
        if self.in_proj_bias is not None:
            nn.init.zeros_(self.in_proj_bias)
            nn.init.zeros_(self.out_proj.bias)
        if self.bias_k is not None:
            nn.init.xavier_normal_(self.bias_k)
            nn.init.xavier_normal_(self.bias_v)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        attn_bias: Tensor | None = None,
        block_mask: BlockMask | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        r"""Attend with `query` to `key` and `value`; True in a boolean mask means may NOT attend.

        Args:
            query: (N, L, embed_dim) if batch_first, else (L, N, embed_dim); unbatched (L, embed_dim).
            key: (N, S, kdim) or (S, N, kdim); unbatched (S, kdim).
            value: (N, S, vdim) or (S, N, vdim); unbatched (S, vdim).
            key_padding_mask: (N, S), unbatched (S,): True = may not be attended to, or floating and added to
                the logits.
            need_weights: also return the attention weights, which takes L * S memory a head (averaged over
                heads: L * S in all). With False nothing of that size is allocated.
            attn_mask: (L, S), or (N * num_heads, L, S) ordered b * num_heads + h: True = may not attend, or
                floating and added to the logits.
            average_attn_weights: average the returned weights over the heads.
            is_causal: with attn_mask a hint that is not needed: the mask decides. Without, query i sees the
                keys j <= i (the diagonal starts in the upper left corner).
            attn_bias: floating, broadcastable to (N, num_heads, L, S), added to the logits; may require
                gradients. Given beside both masks, two of the three are merged: the pair whose merged size is
                smallest.
            block_mask: a sparse pattern for L queries and S keys, whose hidden blocks cost nothing. It says
                what is visible, not what is masked out.

        Floating masks and biases may have any dtype up to the wider of float32 and the query's. Extra keys
        (add_bias_kv, add_zero_attn) are seen by every query, whatever the masks, window and attn_bias say of
        the S others.

        Returns:
            `(output, weights)`: output shaped like query; weights None, or (N, L, S') averaged over heads, or
            (N, num_heads, L, S') (no N if unbatched), before dropout. S' is S plus the number of extra keys.

        Raises:
            ValueError, TypeError: shapes or dtypes that do not fit, naming the argument.
        """
        for name, x in (("query", query), ("key", key), ("value", value)):
            if not isinstance(x, Tensor):
                raise ArgumentTypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
        if query.is_nested:
            if not all(x is None for x in (key_padding_mask, attn_mask, attn_bias, block_mask)):
                raise ArgumentValueError(
                    "key_padding_mask, attn_mask, attn_bias and block_mask must be None with a nested query"
                )
            return self._forward_nested(query, key, value, need_weights, average_attn_weights, is_causal)
        self._check_inputs(query, key, value)
        batched = query.dim() == 3
        q, k, v = self._project(query, key, value, batched)
        if self.qk_norm is not None:
            q, k = _normalised(self.q_norm, q), _normalised(self.k_norm, k)
        placed_q, placed_k, terms = q, k, {}
        if self.position is not None:
            placed_q, placed_k, terms = self.position.attention_terms(q, k)
            terms = dict(terms)  # to take the bias out of
        position_bias = terms.pop("bias", None)
        mask = bias = None
        if not key_padding_mask is attn_mask is attn_bias is position_bias is None:
            biases = {"attn_bias": attn_bias, "position's bias": position_bias}
            sizes = (q.shape[0], self.num_heads, q.shape[2], k.shape[2])
            mask, bias = score_terms(key_padding_mask, attn_mask, biases, sizes, batched, v.dtype)
        weights_kind = None
        if need_weights:
            weights_kind = "mean_heads" if average_attn_weights else "full"
        causal = "upper_left" if is_causal and attn_mask is None else False
        options = dict(
            mask=mask, bias=bias, causal=causal, window=self.window, block_mask=block_mask, **terms
        )
        if self.bias_k is None and not self.add_zero_attn:
            result = self._attend(placed_q, placed_k, v, return_weights=weights_kind, **options)
            out, weights = result if need_weights else (result, None)
        else:
            main = functools.partial(self._attend, placed_q, placed_k, v, **options)
            out, weights = self._attend_with_extra_keys(main, q, k, v, weights_kind)

        # (N, H, L, D) -> the caller's layout with heads concatenated
        out = out.permute(2, 0, 1, 3) if batched and not self.batch_first else out.transpose(1, 2)
        out = self.out_proj(out.flatten(2))
        if not batched:
            out, weights = out.squeeze(0), weights if weights is None else weights.squeeze(0)
        return out, weights

    def _check_inputs(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        if query.dim() not in (2, 3):
            raise ArgumentValueError(
                f"query must be 2-D (unbatched) or 3-D (batched), got {tuple(query.shape)}"
            )
        inputs = (query, key, value)
        for name, x, size_name, size in (
            ("query", query, "embed_dim", self.embed_dim),
            ("key", key, "kdim", self.kdim),
            ("value", value, "vdim", self.vdim),
        ):
            if x.dim() != query.dim():
                raise ArgumentValueError(f"{name} must be {query.dim()}-D like query, got {_shapes(*inputs)}")
            if x.shape[-1] != size:
                raise ArgumentValueError(
                    f"{name} must have {size_name}={size} in its last dimension, got {_shapes(*inputs)}"
                )
        if key is not value and key.shape[:-1] != value.shape[:-1]:
            raise ArgumentValueError(
                f"key and value must have the same length and batch size, got {_shapes(*inputs)}"
            )
        batch_dim = 0 if self.batch_first else 1
        if query is not key and query.dim() == 3 and query.shape[batch_dim] != key.shape[batch_dim]:
            layout = "(N, L, E)" if self.batch_first else "(L, N, E)"
            raise ArgumentValueError(
                f"query and key must have the same batch size N, in the layout {layout} "
                f"(batch_first={self.batch_first}), got {_shapes(*inputs)}"
            )

    def _project(
        self, query: Tensor, key: Tensor, value: Tensor, batched: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q (N, H, L, D), k and v (N, Hkv, S, D); one product for inputs that are the same tensor.

        Views of products in the caller's layout: nothing is copied between projection and kernel.
        """
        # each weight is read once: a parametrized one is computed anew, with side effects, at every reading
        packed, bias = self.in_proj_weight, self.in_proj_bias
        separate = () if packed is not None else (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        parameters = packed if packed is not None else separate[0]
        if bias is not None and bias.dtype != parameters.dtype:
            bias = bias.to(parameters.dtype)  # torch's module promotes a bias of a narrower dtype
        for name, x in (("query", query), ("key", key), ("value", value)):
            if x.dtype != parameters.dtype and not torch.is_autocast_enabled(x.device.type):
                raise ArgumentTypeError(
                    f"{name} is {x.dtype}, the parameters are {parameters.dtype}: convert one of them"
                )
        heads, kv_heads = self.num_heads, self.num_kv_heads
        if packed is not None and query is key and key is value:
            return self._split_heads(F.linear(query, packed, bias), batched, heads, kv_heads, kv_heads)
        q_dim, kv_dim = heads * self.head_dim, kv_heads * self.head_dim
        sizes = (q_dim, kv_dim, kv_dim)
        biases = (None,) * 3 if bias is None else bias.split(sizes)
        if packed is not None and key is value:
            q = F.linear(query, packed[:q_dim], biases[0])
            kv = F.linear(key, packed[q_dim:], None if bias is None else bias[q_dim:])
            return *self._split_heads(q, batched, heads), *self._split_heads(kv, batched, kv_heads, kv_heads)
        weights = separate or packed.split(sizes)
        q, k, v = (F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True))
        return tuple(
            self._split_heads(x, batched, h)[0] for x, h in ((q, heads), (k, kv_heads), (v, kv_heads))
        )

    def _split_heads(self, x: Tensor, batched: bool, *heads: int) -> Sequence[Tensor]:
        """A view (N, h, L, D) for each h of heads; x (N, L, sum(heads) * D), or (L, N, ...) or (L, ...)."""
        x = x if batched else x.unsqueeze(0)
        x = x.view(x.shape[0], x.shape[1], sum(heads), self.head_dim)
        order = (1, 2, 0, 3) if batched and not self.batch_first else (0, 2, 1, 3)
        if len(heads) == 1:
            return [x.permute(order)]
        if not x.requires_grad:
            return x.permute(order).split_with_sizes(heads, 1)
        # In this order the backward puts the parts together in the layout of x: it takes no further copy.
        return [part.permute(order) for part in x.split_with_sizes(heads, 2)]

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, **options):
        """What `attention` returns, with the module's own options."""
        dropout_p = self.dropout if self.training else 0.0
        return attention(q, k, v, softcap=self.softcap, dropout_p=dropout_p, **options)

    def _attend_with_extra_keys(self, attend_main, q: Tensor, k: Tensor, v: Tensor, weights_kind: str | None):
        """`attend_main`, over the S keys, and q over the extra keys, unmasked, joined exactly by their LSEs.

        Two calls rather than k and v lengthened by concatenation: neither keys nor masks are copied, no mask,
        window or diagonal has to make room for the extra columns, and q meets them without its position.
        """
        extra_k, extra_v = [], []
        if self.bias_k is not None:
            bias_k, bias_v = (
                self._split_heads(x.to(v.dtype), True, self.num_kv_heads)[0]
                for x in (self.bias_k, self.bias_v)
            )
            extra_k.append(bias_k if self.qk_norm is None else _normalised(self.k_norm, bias_k))
            extra_v.append(bias_v)
        if self.add_zero_attn:
            extra_k.append(k.new_zeros(1, self.num_kv_heads, 1, self.head_dim))
            extra_v.append(v.new_zeros(1, self.num_kv_heads, 1, self.head_dim))
        extra_k, extra_v = (torch.cat(x, 2).expand(q.shape[0], -1, -1, -1) for x in (extra_k, extra_v))
        per_head = {"return_lse": True, "return_weights": None if weights_kind is None else "full"}
        main = attend_main(**per_head)
        extra = self._attend(q, extra_k, extra_v, **per_head)
        out, lse = merge_attention(*main[:2], *extra[:2])
        if weights_kind is None:
            return out, None
        parts = [w * torch.exp(part_lse - lse).unsqueeze(-1) for _, part_lse, w in (main, extra)]
        weights = torch.cat(parts, -1).to(out.dtype)
        return out, weights.mean(1) if weights_kind == "mean_heads" else weights

    def _forward_nested(self, query, key, value, need_weights, average_attn_weights, is_causal):
        """Self-attention of a strided nested tensor, which nn.TransformerEncoder may pass on in eval mode."""
        strided = query.layout == torch.strided
        if not (query is key and key is value and self.batch_first and strided):
            raise ArgumentValueError(
                "a nested query must have the strided layout, with key and value the same tensor and "
                "batch_first=True; otherwise pad it and give key_padding_mask"
            )
        samples = query.unbind()
        if query.dim() != 3:
            raise ArgumentValueError(
                "a nested query must hold samples of shape (length, embed_dim), at least one, got "
                f"{[tuple(sample.shape) for sample in samples]}"
            )
        lengths = [len(sample) for sample in samples]
        # (N, longest, E); query.to_padded_tensor refuses samples that are all of length 0
        x = nn.utils.rnn.pad_sequence(samples, batch_first=True)
        positions = torch.arange(x.shape[1], device=x.device)
        padding = positions >= torch.tensor(lengths, device=x.device)[:, None]
        # not self(...): hooks and subclasses see one call
        out, weights = MultiHeadAttention.forward(
            self, x, x, x, padding, need_weights, None, average_attn_weights, is_causal
        )
        rows = [sample[:length] for sample, length in zip(out, lengths, strict=True)]
        return torch.nested.as_nested_tensor(rows), weights

    @classmethod
    def from_torch(cls, module: nn.MultiheadAttention) -> "MultiHeadAttention":
        """A copy of a torch.nn.MultiheadAttention: parameter values, device, dtype, mode, requires_grad."""
        return copy_parameters(module, cls(**torch_arguments(module)))

    def to_torch(self) -> nn.MultiheadAttention:
        """A torch.nn.MultiheadAttention with copies of these parameters; ValueError if an extra is in use."""
        if used := used_extras(self):
            raise ArgumentValueError(f"torch.nn.MultiheadAttention has no {', '.join(used)}")
        return copy_parameters(self, nn.MultiheadAttention(**torch_arguments(self)))

    def extra_repr(self) -> str:
        names = ("embed_dim", "num_heads", "num_kv_heads", "head_dim", "dropout", "batch_first")
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in names)


def _shapes(query: Tensor, key: Tensor, value: Tensor) -> str:
    return f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"


def _normalised(norm: nn.Module, x: Tensor) -> Tensor:
    """norm(x) of (N, H, L, D), computed in the dtype of its parameters: under autocast wider than that of x.

    Norms return a contiguous tensor. Heads stay inside positions here, and so in what attention makes of it.
    """
    return norm(x.transpose(1, 2).to(norm.weight.dtype)).to(x.dtype).transpose(1, 2)


@functools.cache
def _warn_of_small_heads(head_dim: int) -> None:
    """Once in a process for each size."""
    warnings.warn(
        f"heads of {head_dim} features: a head's logits are products of so few features that it can tell few "
        "patterns apart (https://arxiv.org/abs/2002.07028), and CUDA kernels take as long as for 32: "
        "prefer fewer heads of at least 32 features.",
        stacklevel=3,
    )
