"""``attn_implementation="attn_ext"`` for the models of Hugging Face transformers: see :func:`register`.

transformers asks twice. For each forward pass a model has its masks made by the mask function that is
registered for its implementation (:func:`make_mask`), and each layer hands that mask, with queries, keys and
values, to the attention function (:func:`attention_forward`). What goes from one to the other may have any
form: here it is an :class:`AttentionMask`, which holds rules and not N x N pairs.

transformers is imported when :func:`register` is called, not before.
"""

import functools
import inspect

import torch

from ..functional import attention

NAME = "attn_ext"
OLDEST = "5.20.0"  # the oldest transformers that tests/test_transformers.py has passed with

# Keywords that travel through a model to its attention and say nothing about the result. Masks hold what
# position_ids say about packed sequences; cu_seq_lens_q is looked at in _check_packing.
HARMLESS = frozenset(
    (
        *("cache_position", "position_ids", "use_cache", "num_items_in_batch", "seq_idx"),
        *("output_hidden_states", "output_router_logits"),
        *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"),
    )
)


def register(*, ignore=()):
    """Make ``attn_implementation="attn_ext"`` known to transformers, for all of its models.

        attn_ext.integrations.transformers.register()
        model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="attn_ext")
        model.set_attn_implementation("attn_ext")  # or for a model that exists

    It may be called any number of times; the last call counts. transformers has no way to take a name back.

    Args:
        ignore: names of keywords that models pass to their attention and that may be left unheeded. One that
            attn_ext does not know is otherwise an error, because it could change the result.

    Raises:
        ImportError: transformers is missing, or so old that its mask functions take other arguments.
        RuntimeError: a mask pattern of this transformers does not mean what it did in tested versions.
    """
    try:
        import transformers
    except ImportError as error:
        raise ImportError(
            f"attn_ext.integrations.transformers.register() needs transformers >= {OLDEST}: "
            f"`pip install transformers` ({error})"
        ) from error
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import sdpa_mask
    except ImportError:
        sdpa_mask = None
    if sdpa_mask is None or "q_offset" not in inspect.signature(sdpa_mask).parameters:
        raise ImportError(
            f"attn_ext needs transformers >= {OLDEST} (the oldest tested), whose mask functions get q_length "
            f"and q_offset; this is transformers {transformers.__version__}"
        )
    _check_patterns(transformers.__version__)
    AttentionInterface.register(NAME, functools.partial(attention_forward, ignore=frozenset(ignore)))
    AttentionMaskInterface.register(NAME, make_mask)


class AttentionMask:
    """Which keys each query may see, by rules: query i sees key j if

        i + offset - left <= j <= i + offset + right  and  j < key_lengths[b]  and  visible[b, h, i, j]

    as far as each is given. A causal mask has right = 0 and left = None.

    It goes through a model as the mask of one forward pass and stands for the boolean tensor (B, 1, Nq, Nk),
    True = may attend. Models may cut and combine it; what they get is an AttentionMask again, of the tensor.
    It refuses to become numbers: a model that does not call the registered attention function, but adds its
    mask to logits of its own, would add 1 where a key is visible and go on with a wrong result.

    Attributes:
        size: (B, Nq, Nk).
        device: of the tensor it stands for.
        window: (left, right), each an integer or None (no limit).
        offset: where the diagonal lies: query i is at the position of key i + offset.
        visible: bool, broadcasts to (B, Hq, Nq, Nk), or None; for padding (B, 1, 1, Nk).
        key_lengths: int64 (B,) or None: padding's form where all of it is at the right.
    """

    dtype = torch.bool
    ndim = 4

    def __init__(self, size, device, window=(None, None), offset=0, visible=None, key_lengths=None):
        self.size = size
        self.device = device
        self.window = window
        self.offset = offset
        self.visible = visible
        self.key_lengths = key_lengths

    @classmethod
    def of_tensor(cls, visible):
        """The mask that a boolean tensor (B, 1 or Hq, Nq, Nk) is."""
        return cls((visible.shape[0], *visible.shape[2:]), visible.device, visible=visible)

    @property
    def shape(self):
        batch, len_q, len_k = self.size
        return torch.Size((batch, 1, len_q, len_k))

    def dim(self):
        return 4

    def contiguous(self):
        return self

    def dense(self):
        """The boolean tensor (B, 1, Nq, Nk) that it stands for, with a head axis if ``visible`` has one."""
        batch, len_q, len_k = self.size
        j = torch.arange(len_k, device=self.device)
        diagonal = torch.arange(len_q, device=self.device)[:, None] + self.offset
        seen = torch.ones(batch, 1, len_q, len_k, dtype=torch.bool, device=self.device)
        left, right = self.window
        if left is not None:
            seen = seen & (j >= diagonal - left)
        if right is not None:
            seen = seen & (j <= diagonal + right)
        if self.key_lengths is not None:
            seen = seen & (j < self.key_lengths[:, None, None, None])
        return seen if self.visible is None else seen & self.visible

    def keys_in_reach(self):
        """How many keys, from the first on, any query may see. A causal diagonal then ends at their last."""
        _, len_q, len_k = self.size
        return len_q + self.offset if self.window[1] == 0 else len_k

    def options(self):
        """The same rules as keyword arguments of :func:`attn_ext.attention`, for the keys in reach."""
        left, right = self.window
        return {
            "causal": right == 0,
            "window": None if left is None and right in (0, None) else (left, right),
            "mask": None if self.visible is None else self.visible[..., : self.keys_in_reach()],
            "key_lengths": self.key_lengths,
        }

    def to(self, *args, **kwargs):
        """On another device."""
        like = torch.empty(0, dtype=torch.bool, device=self.device).to(*args, **kwargs)
        if like.dtype != torch.bool:
            raise TypeError(_COMPUTES)
        visible, lengths = (t if t is None else t.to(like.device) for t in (self.visible, self.key_lengths))
        return AttentionMask(self.size, like.device, self.window, self.offset, visible, lengths)

    def __getitem__(self, index):
        return _as_mask(self.dense()[index])

    def __and__(self, other):
        return _as_mask(self.dense() & _dense(other))

    def __or__(self, other):
        return _as_mask(self.dense() | _dense(other))

    def __radd__(self, scores):
        raise TypeError(_COMPUTES)

    __rand__, __ror__ = __and__, __or__

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        args, kwargs = torch.utils._pytree.tree_map(_dense, (args, kwargs or {}))
        return _as_mask(function(*args, **kwargs))

    def __getattr__(self, name):
        raise AttributeError(f"{name}: {_COMPUTES}")


_COMPUTES = (
    "a model computes with its attention mask, instead of handing it to the attention function that "
    f'attn_implementation="{NAME}" names. Either this model does not support other attention functions in '
    "this version of transformers, or it does with the mask what attn_ext does not know: use "
    '"eager"'
)


def _dense(x):
    return x.dense() if isinstance(x, AttentionMask) else x


def _as_mask(x):
    """What came of a computation with a mask, if it is one again."""
    if not isinstance(x, torch.Tensor) or x.dtype != torch.bool or x.dim() != 4:
        raise TypeError(_COMPUTES)
    return AttentionMask.of_tensor(x)


def make_mask(
    batch_size, q_length, kv_length, q_offset=0, kv_offset=0, mask_function=None, attention_mask=None,
    allow_is_causal_skip=True, allow_is_bidirectional_skip=False, device="cpu", **kwargs,
):  # fmt: skip
    """The mask of a forward pass in its cheapest form: transformers calls it, see its ``sdpa_mask``.

    Args:
        batch_size, q_length, kv_length: B, Nq, Nk.
        q_offset, kv_offset: the positions of the first query and key in the sequence. A static cache gives
            q_offset as a tensor.
        mask_function: (batch, head, query position, key position) -> whether the pair is visible.
        attention_mask: bool (B, at least the positions of the queries), False at padding; or None.
        allow_is_causal_skip, allow_is_bidirectional_skip: transformers' leave to return something other than
            a tensor of all pairs. It gives none where it combines patterns (packed sequences, blocks of
            images, masks of the caller) and for the steps that it compiles with a static cache.
        kwargs: handed on to ``sdpa_mask``.

    Returns:
        An :class:`AttentionMask`: rules, O(B Nk), for causal masks, sliding windows and padding; otherwise,
        and for a sliding window that is made in compiled code, with the boolean tensor of ``sdpa_mask``.
    """
    from transformers.masking_utils import causal_mask_function, sdpa_mask

    if isinstance(attention_mask, AttentionMask):  # made beforehand, by generate()
        return attention_mask
    mask_function = causal_mask_function if mask_function is None else mask_function
    known = None
    if (allow_is_causal_skip or allow_is_bidirectional_skip) and not (
        torch.compiler.is_compiling() and isinstance(q_offset, torch.Tensor)
    ):
        known = _window(mask_function)
    if known is not None and (attention_mask is None or attention_mask.dim() == 2):
        offset = int(q_offset) - kv_offset
        last = q_length + offset
        # attention() puts the diagonal where it ends at the last key. Cutting off keys that are out of reach
        # brings a causal one there.
        cut = known[1] == 0 and 0 < last <= kv_length
        if known == (None, None) or cut or last == kv_length:
            mask = AttentionMask((batch_size, q_length, kv_length), device, known, offset)
            _add_padding(mask, attention_mask, kv_offset)
            return mask
    visible = sdpa_mask(
        batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset,
        mask_function=mask_function, attention_mask=attention_mask, device=device,
        **{**kwargs, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False},
    )  # fmt: skip
    return AttentionMask.of_tensor(visible)


def attention_forward(
    module, query, key, value, attention_mask, dropout=0.0, scaling=None, is_causal=None, position_bias=None,
    softcap=None, s_aux=None, sliding_window=None, deterministic=None, output_attentions=None, ignore=(),
    **kwargs,
):  # fmt: skip
    """Attention of one layer: transformers calls it with what the layer passes.

    Args:
        module: the layer; ``module.training`` decides about dropout, ``module.is_causal`` about mask None.
        query: (B, Hq, Nq, D).
        key: (B, Hkv, Nk, D), Hq a multiple of Hkv: heads are not repeated.
        value: (B, Hkv, Nk, Dv).
        attention_mask: what :func:`make_mask` returned, or the caller's own mask: a tensor that broadcasts
            to (B, Hq, Nq, Nk), bool (True = may attend) or floating (added to the logits). It is the whole
            truth about visibility. None: as transformers' ``sdpa`` has it, causal from the first key on if
            ``is_causal`` (default: module.is_causal, else True) and Nq > 1, otherwise every key is visible.
        dropout: probability; in training only.
        scaling: factor of the logits; default 1 / sqrt(D).
        position_bias: broadcasts to (B, Hq, Nq, Nk), added to the logits, with gradient (T5).
        softcap: see :func:`attn_ext.attention` (Gemma 2).
        s_aux: (Hq,), sinks (gpt-oss).
        sliding_window: the layer's window. Masks hold it already, so it is only compared with what they hold.
        deterministic: see :func:`attn_ext.attention`.
        output_attentions: whether to return the weights too.

    Returns:
        (out, weights): out (B, Nq, Hq, Dv) contiguous; weights (B, Hq, Nq, Nk) before dropout, or None.

    Raises:
        TypeError: a keyword that attn_ext does not know (see :func:`register`).
        ValueError: a mask that is missing or does not fit; what :func:`attn_ext.attention` raises.
    """
    unknown = [
        name
        for name, given in kwargs.items()
        if not (given is None or given is False or name in HARMLESS or name in ignore)
    ]
    if unknown:
        raise TypeError(
            f"{type(module).__name__} passes {', '.join(unknown)} to its attention, which "
            'attn_implementation="attn_ext" does not know and which may change the result. Use "eager", or, '
            f"if it does not matter, attn_ext.integrations.transformers.register(ignore={unknown})"
        )
    len_q, len_k = query.shape[2], key.shape[2]
    keys = len_k
    if attention_mask is None:
        _check_packing(kwargs, query)
        if sliding_window is not None and len_k > sliding_window:
            raise ValueError(
                f"{type(module).__name__} has sliding_window={sliding_window} and got {len_k} keys, but no "
                "attention_mask: pass the mask that the model makes"
            )
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        options = {"causal": bool(causal) and len_q > 1}
        if options["causal"]:
            keys = min(len_q, len_k)
    elif isinstance(attention_mask, AttentionMask):
        if attention_mask.visible is None or attention_mask.visible.shape[2] == 1:  # it knows of padding only
            _check_packing(kwargs, query)
        if attention_mask.size[1:] != (len_q, len_k):
            raise ValueError(
                f"{type(module).__name__} has {len_q} queries and {len_k} keys, but its attention_mask was "
                f"made for {attention_mask.size[1]} and {attention_mask.size[2]}"
            )
        options, keys = attention_mask.options(), attention_mask.keys_in_reach()
    elif attention_mask.dim() != 4:
        raise ValueError(
            f"the attention_mask that {type(module).__name__} passes to its attention must be 4-D, "
            f"(B or 1, heads or 1, Nq or 1, Nk), got shape {tuple(attention_mask.shape)}"
        )
    else:
        options = {"mask": attention_mask}
    if keys != len_k:  # keys of a static cache that are still empty
        key, value = key[:, :, :keys], value[:, :, :keys]
        if position_bias is not None:
            position_bias = position_bias[..., :keys]
    batch = max(query.shape[0], key.shape[0])
    query, key, value = (  # learned queries come once for all samples
        t.expand(batch, -1, -1, -1) if t.shape[0] == 1 != batch else t for t in (query, key, value)
    )
    out = attention(
        query, key, value, **options, bias=position_bias, scale=scaling, softcap=softcap, sinks=s_aux,
        dropout_p=dropout if module.training else 0.0, deterministic=deterministic,
        return_weights="full" if output_attentions else None,
    )  # fmt: skip
    weights = None
    if output_attentions:
        out, weights = out
        weights = torch.nn.functional.pad(weights, (0, len_k - keys))
    return out.transpose(1, 2).contiguous(), weights


def _add_padding(mask, attention_mask, kv_offset):
    """Put the padding of a 2-D mask (B, positions) into an AttentionMask, in its cheapest form."""
    if attention_mask is None:
        return
    len_k, keys = mask.size[2], mask.keys_in_reach()
    padding = attention_mask[:, kv_offset : kv_offset + len_k].bool()
    if padding.shape[1] < len_k:  # a static cache is longer than what has been seen
        padding = torch.nn.functional.pad(padding, (0, len_k - padding.shape[1]))
    if not torch.compiler.is_compiling():  # where values can be looked at
        lengths = padding[:, :keys].sum(-1)
        at_right = torch.arange(keys, device=padding.device) < lengths[:, None]
        none, right = torch.stack([padding[:, :keys].all(), (padding[:, :keys] == at_right).all()]).tolist()
        if none:
            return
        if right:
            mask.key_lengths = lengths
            return
    mask.visible = padding[:, None, None]


def _window(mask_function):
    """(left, right) of a pattern of transformers, see AttentionMask; None for one that is not known.

    Functions made by transformers' factories are told by their code, and their parts are read from their
    closures; Dynamo cannot follow that.
    """
    from transformers import masking_utils as hf

    if mask_function is hf.causal_mask_function:
        return None, 0
    if mask_function is hf.bidirectional_mask_function:
        return None, None
    if torch.compiler.is_compiling() or not _made_by(mask_function, hf.and_masks()):
        return None
    (parts,) = inspect.getclosurevars(mask_function).nonlocals.values()
    if len(parts) != 2:
        return None
    overlay, base = parts
    if base is hf.causal_mask_function and _made_by(overlay, hf.sliding_window_overlay(1)):
        size = inspect.getclosurevars(overlay).nonlocals["sliding_window"]
        return size - 1, 0
    if base is hf.bidirectional_mask_function and _made_by(
        overlay, hf.sliding_window_bidirectional_overlay(1)
    ):
        size = inspect.getclosurevars(overlay).nonlocals["sliding_window"]
        return size, size
    return None


def _made_by(function, example):
    """Whether both are made by the same factory."""
    return getattr(function, "__code__", None) is example.__code__


def _check_patterns(version):
    """See that the patterns which _window knows mean in this transformers what it takes them for."""
    from transformers import masking_utils as hf

    n, position = 8, torch.arange(8)
    patterns = (
        hf.causal_mask_function,
        hf.bidirectional_mask_function,
        hf.sliding_window_causal_mask_function(3),
        hf.sliding_window_bidirectional_mask_function(3),
    )
    for function in patterns:
        window = _window(function)
        if window is None:
            continue
        theirs = function(torch.zeros((), dtype=torch.long), 0, position[:, None], position[None])
        ours = AttentionMask((1, n, n), "cpu", window, 0).dense()[0, 0]
        if not torch.equal(theirs.expand(n, n), ours):
            raise RuntimeError(
                f"a mask pattern of transformers {version} is not window {window}, as it was in the versions "
                "that attn_ext was tested with: update attn_ext"
            )


def _check_packing(kwargs, query):
    """Packed sequences need a mask that keeps them apart; transformers makes one unless a cache is in use."""
    starts = kwargs.get("cu_seq_lens_q")
    if starts is not None and starts.shape[0] - 1 > query.shape[0]:
        raise ValueError(
            f"cu_seq_lens_q tells of {starts.shape[0] - 1} sequences in a batch of {query.shape[0]}, but "
            "there is no attention_mask that keeps them apart: pass position_ids that start again at 0 with "
            "each sequence, use_cache=False and no attention_mask, then the model makes one"
        )
