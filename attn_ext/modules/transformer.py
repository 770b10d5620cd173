"""torch.nn's transformer on the fused kernels: the same constructors, parameters, state_dicts and results.

Each class is a subclass of torch.nn's and keeps its constructor and feed-forward network. What differs is the
attention, which is ours, and `forward`, which has one path: torch's encoder may hand a layer's weights to a
fused operator, or its input over as nested tensors, and never call the attention; and it compares masks with
the causal one, which waits for the GPU and stops torch.compile.

"Attention Is All You Need", section 3.1 (https://arxiv.org/abs/1706.03762); norm_first: Xiong et al. 2020
(https://arxiv.org/abs/2002.04745).
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..arguments import ArgumentValueError
from .multihead import MultiHeadAttention
from .torch_conversion import torch_arguments

CROSS_ATTENTION_LACKS = ("position", "window")  # there are no distances between two different sequences


def _check_sizes(d_model: int, nhead: int) -> None:
    if not (d_model > 0 and nhead > 0 and d_model % nhead == 0):
        raise ArgumentValueError(
            f"d_model must be a multiple of nhead, and both greater than 0, got {d_model} and {nhead}"
        )


def _ours(module: nn.MultiheadAttention, **extras) -> MultiHeadAttention:
    """In place of the module that torch's constructor made; without extras it keeps its initial values."""
    if not extras:
        return MultiHeadAttention.from_torch(module)
    weight = module.out_proj.weight
    arguments = {**torch_arguments(module), "device": weight.device, "dtype": weight.dtype}
    return MultiHeadAttention(**arguments, **extras)


class TransformerEncoderLayer(nn.TransformerEncoderLayer):
    r"""Self-attention and a feed-forward network, as :class:`torch.nn.TransformerEncoderLayer`.

        norm_first=False:   x = LayerNorm(x + SelfAttention(x));  x = LayerNorm(x + FeedForward(x))
        norm_first=True:    x = x + SelfAttention(LayerNorm(x));  x = x + FeedForward(LayerNorm(x))

        FeedForward(x) = activation(x W_1 + b_1) W_2 + b_2

    Args:
        d_model ... dtype: torch.nn's.
        attention: keyword arguments that :class:`MultiHeadAttention` has beyond torch.nn's: position,
            qk_norm, num_kv_heads, head_dim, window, softcap.

    Masks have torch.nn's meaning, True = may not attend. is_causal=True works without src_mask, and is then
    much faster; beside one it is a hint that is not needed. Errors: those of MultiHeadAttention.
    """

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: str | Callable[[Tensor], Tensor] = F.relu,
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **attention,
    ) -> None:
        _check_sizes(d_model, nhead)
        super().__init__(
            d_model, nhead, dim_feedforward, dropout, activation, layer_norm_eps, batch_first, norm_first,
            bias, device, dtype,
        )  # fmt: skip
        self.self_attn = _ours(self.self_attn, **attention)

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """src (N, S, d_model) if batch_first, else (S, N, d_model), or (S, d_model) -> the same shape.

        src_mask: (S, S) or (N * nhead, S, S). src_key_padding_mask: (N, S), unbatched (S,).
        """
        x = src
        if self.norm_first:
            x = x + self._sa_block(self.norm1(x), src_mask, src_key_padding_mask, is_causal)
            return x + self._ff_block(self.norm2(x))
        x = self.norm1(x + self._sa_block(x, src_mask, src_key_padding_mask, is_causal))
        return self.norm2(x + self._ff_block(x))


class TransformerDecoderLayer(nn.TransformerDecoderLayer):
    r"""Self-attention, attention to the encoder's output and a feed-forward network, as torch.nn's.

        norm_first=False:   x = LayerNorm(x + SelfAttention(x))
                            x = LayerNorm(x + CrossAttention(x, memory))
                            x = LayerNorm(x + FeedForward(x))

    norm_first=True: x = x + Block(LayerNorm(x)) for each, as in :class:`TransformerEncoderLayer`.

    Args:
        d_model ... dtype: torch.nn's.
        attention: keyword arguments that :class:`MultiHeadAttention` has beyond torch.nn's, for both
            attentions; position and window for the self-attention only.

    forward(tgt, memory, tgt_mask=None, memory_mask=None, tgt_key_padding_mask=None,
    memory_key_padding_mask=None, tgt_is_causal=False, memory_is_causal=False): torch.nn's; tgt_is_causal=True
    works without tgt_mask, and is then much faster.
    """

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: str | Callable[[Tensor], Tensor] = F.relu,
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **attention,
    ) -> None:
        _check_sizes(d_model, nhead)
        super().__init__(
            d_model, nhead, dim_feedforward, dropout, activation, layer_norm_eps, batch_first, norm_first,
            bias, device, dtype,
        )  # fmt: skip
        self.self_attn = _ours(self.self_attn, **attention)
        cross = {name: value for name, value in attention.items() if name not in CROSS_ATTENTION_LACKS}
        self.multihead_attn = _ours(self.multihead_attn, **cross)


class TransformerEncoder(nn.TransformerEncoder):
    """A stack of copies of encoder_layer, then norm if one is given, as :class:`torch.nn.TransformerEncoder`.

    enable_nested_tensor and mask_check are taken and have no effect: padded batches stay as they are. Each
    layer has its own copy of `encoder_layer`, its position module included; to share one, as T5 does: `for
    layer in encoder.layers: layer.self_attn.position = bias`.
    """

    def __init__(
        self,
        encoder_layer: nn.Module,
        num_layers: int,
        norm: nn.Module | None = None,
        enable_nested_tensor: bool = True,
        mask_check: bool = True,
    ) -> None:
        super().__init__(encoder_layer, num_layers, norm, enable_nested_tensor=False, mask_check=mask_check)

    def forward(
        self,
        src: Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> Tensor:
        """As :class:`TransformerEncoderLayer`'s, through all layers; is_causal None is False."""
        x = src
        for layer in self.layers:
            x = layer(
                x,
                src_mask=mask,
                src_key_padding_mask=src_key_padding_mask,
                is_causal=bool(is_causal),
            )
        return x if self.norm is None else self.norm(x)


class TransformerDecoder(nn.TransformerDecoder):
    """A stack of copies of decoder_layer, then norm if given, as :class:`torch.nn.TransformerDecoder`."""

    def forward(
        self,
        tgt: Tensor,
        memory: Tensor,
        tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        tgt_is_causal: bool | None = None,
        memory_is_causal: bool = False,
    ) -> Tensor:
        """As :class:`TransformerDecoderLayer`'s, through all layers; tgt_is_causal None is False."""
        x = tgt
        for layer in self.layers:
            x = layer(
                x,
                memory,
                tgt_mask=tgt_mask,
                memory_mask=memory_mask,
                tgt_key_padding_mask=tgt_key_padding_mask,
                memory_key_padding_mask=memory_key_padding_mask,
                tgt_is_causal=bool(tgt_is_causal),
                memory_is_causal=memory_is_causal,
            )
        return x if self.norm is None else self.norm(x)


class Transformer(nn.Transformer):
    """Encoder and decoder, as :class:`torch.nn.Transformer`: src, tgt -> output shaped like tgt.

    Args:
        d_model ... dtype: torch.nn's.
        attention: as in the layers, for those of the encoder and of the decoder.

    src (N, S, d_model) and tgt (N, T, d_model) if batch_first, else (S, N, d_model) and (T, N, d_model);
    unbatched without N. Embeddings, positional encodings and the output layer are the caller's. For training,
    `model(src, tgt, tgt_is_causal=True)` without tgt_mask is the fast way.

    Raises:
        ValueError, TypeError: shapes or dtypes that do not fit, naming the argument.
    """

    def __init__(
        self,
        d_model: int = 512,
        nhead: int = 8,
        num_encoder_layers: int = 6,
        num_decoder_layers: int = 6,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: str | Callable[[Tensor], Tensor] = F.relu,
        custom_encoder: nn.Module | None = None,
        custom_decoder: nn.Module | None = None,
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **attention,
    ) -> None:
        if attention and custom_encoder is not None and custom_decoder is not None:
            raise ArgumentValueError(
                f"{', '.join(attention)} would have no effect: custom_encoder and custom_decoder are given"
            )
        layer = (
            d_model, nhead, dim_feedforward, dropout, activation, layer_norm_eps, batch_first, norm_first,
            bias, device, dtype,
        )  # fmt: skip
        norm = {"eps": layer_norm_eps, "bias": bias, "device": device, "dtype": dtype}
        if custom_encoder is None:
            custom_encoder = TransformerEncoder(
                TransformerEncoderLayer(*layer, **attention),
                num_encoder_layers,
                nn.LayerNorm(d_model, **norm),
            )
        if custom_decoder is None:
            custom_decoder = TransformerDecoder(
                TransformerDecoderLayer(*layer, **attention),
                num_decoder_layers,
                nn.LayerNorm(d_model, **norm),
            )
        super().__init__(
            d_model,
            nhead,
            custom_encoder=custom_encoder,
            custom_decoder=custom_decoder,
            batch_first=batch_first,
        )

    def forward(self, src: Tensor, tgt: Tensor, *masks, **options) -> Tensor:
        """The further arguments are torch.nn's, from src_mask to memory_is_causal."""
        batch_dim = 0 if self.batch_first else 1
        fits = src.dim() == tgt.dim() in (2, 3) and src.shape[-1] == tgt.shape[-1] == self.d_model
        if not fits or (src.dim() == 3 and src.shape[batch_dim] != tgt.shape[batch_dim]):
            layout = "(N, length, d_model)" if self.batch_first else "(length, N, d_model)"
            raise ArgumentValueError(
                f"src and tgt must be {layout} with the same N, or (length, d_model), with "
                f"d_model={self.d_model} (batch_first={self.batch_first}), got {tuple(src.shape)} and "
                f"{tuple(tgt.shape)}"
            )
        return super().forward(src, tgt, *masks, **options)
