"""``attn_implementation="attn_ext"`` for the models of Hugging Face transformers: see :func:`register`.

transformers asks twice. For each forward pass a model has its masks made by the mask function that is
registered for its implementation (:func:`make_mask`), and each layer hands that mask, with queries, keys and
values, to the attention function (:func:`attention_forward`). What goes from one to the other may have any
form: here it is an :class:`.attention_mask.AttentionMask`, which holds rules and not N x N pairs.

transformers is imported when :func:`register` is called, not before.
"""

import functools
import inspect
import sys

import torch

from ..functional import attention
from .attention_mask import NAME, AttentionMask

OLDEST = "5.20.0"  # the oldest transformers that tests/test_transformers.py has passed with

# Keywords that travel through a model to its attention and say nothing about the result. Masks hold what
# position_ids say about packed sequences; cu_seq_lens_q is looked at in _visibility.
HARMLESS = {
    *("cache_position", "position_ids", "use_cache", "num_items_in_batch", "seq_idx"),
    *("output_hidden_states", "output_router_logits"),
    *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"),
}


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
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import sdpa_mask

        inspect.signature(sdpa_mask).parameters["q_offset"]
    except (ImportError, KeyError) as error:
        module = sys.modules.get("transformers")
        found = "and there is none" if module is None else f"this is transformers {module.__version__}"
        raise ImportError(
            f"attn_ext.integrations.transformers.register() needs transformers >= {OLDEST} (the oldest "
            f"tested), whose mask functions get q_length and q_offset: {found} ({error})"
        ) from error
    _check_patterns(transformers.__version__)
    AttentionInterface.register(NAME, functools.partial(attention_forward, ignore=frozenset(ignore)))
    AttentionMaskInterface.register(NAME, make_mask)


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
    len_k = key.shape[2]
    options, keys = _visibility(
        type(module).__name__, attention_mask, query, len_k, sliding_window, kwargs.get("cu_seq_lens_q"),
        getattr(module, "is_causal", True) if is_causal is None else is_causal,
    )  # fmt: skip
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


def _visibility(layer, mask, query, len_k, sliding_window, starts, is_causal):
    """(options of attn_ext.attention, how many keys are left when those that none may see are cut off).

    starts: of packed sequences. They need a mask that keeps them apart, which transformers makes unless a
    cache is in use.
    """
    batch, _, len_q, _ = query.shape
    rules = isinstance(mask, AttentionMask)
    padding_only = rules and (mask.visible is None or mask.visible.shape[2] == 1)
    if starts is not None and starts.shape[0] - 1 > batch and (mask is None or padding_only):
        raise ValueError(
            f"cu_seq_lens_q tells of {starts.shape[0] - 1} sequences in a batch of {batch}, but there is no "
            "attention_mask that keeps them apart: pass position_ids that start again at 0 with each "
            "sequence, use_cache=False and no attention_mask, then the model makes one"
        )
    if rules:
        if mask.sizes[1:] != (len_q, len_k):
            raise ValueError(
                f"{layer} has {len_q} queries and {len_k} keys, but its attention_mask was "
                f"made for {mask.sizes[1]} and {mask.sizes[2]}"
            )
        return mask.options(), mask.keys_in_reach()
    if mask is not None:
        if mask.dim() != 4:
            raise ValueError(
                f"the attention_mask that {layer} passes to its attention must be 4-D, "
                f"(B or 1, heads or 1, Nq or 1, Nk), got shape {tuple(mask.shape)}"
            )
        return {"mask": mask}, len_k
    if sliding_window is not None and len_k > sliding_window:
        raise ValueError(
            f"{layer} has sliding_window={sliding_window} and got {len_k} keys, but no attention_mask: pass "
            "the mask that the model makes"
        )
    causal = bool(is_causal) and len_q > 1
    return {"causal": causal}, min(len_q, len_k) if causal else len_k


def _add_padding(mask, attention_mask, kv_offset):
    """Put the padding of a 2-D mask (B, positions) into an AttentionMask, in its cheapest form."""
    if attention_mask is None:
        return
    len_k, keys = mask.sizes[2], mask.keys_in_reach()
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
    # By name: Dynamo of torch 2.10 cannot trace the import of a module from the package.
    from transformers.masking_utils import (
        and_masks,
        bidirectional_mask_function,
        causal_mask_function,
        sliding_window_bidirectional_overlay,
        sliding_window_overlay,
    )  # fmt: skip

    if mask_function is causal_mask_function:
        return None, 0
    if mask_function is bidirectional_mask_function:
        return None, None
    if torch.compiler.is_compiling() or not _made_by(mask_function, and_masks()):
        return None
    (parts,) = inspect.getclosurevars(mask_function).nonlocals.values()
    kinds = (
        (sliding_window_overlay, causal_mask_function, lambda size: (size - 1, 0)),
        (sliding_window_bidirectional_overlay, bidirectional_mask_function, lambda size: (size, size)),
    )
    for factory, base, sides in kinds:
        if len(parts) == 2 and parts[1] is base and _made_by(parts[0], factory(1)):
            return sides(inspect.getclosurevars(parts[0]).nonlocals["sliding_window"])
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
