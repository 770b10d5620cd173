"""replace_attention: the attention of an existing model becomes attn_ext's."""

from torch import nn
from torch.nn.utils import parametrize

from ..arguments import ArgumentTypeError
from ..modules import MultiHeadAttention
from . import library_models


def replace_attention(model):
    """Make the attention of ``model`` attn_ext's, in place:

    - each torch.nn.MultiheadAttention becomes an attn_ext.MultiHeadAttention,
    - each attention module of timm calls attn_ext.scaled_dot_product_attention instead of torch's,
    - each model of Hugging Face transformers gets the attention implementation "attn_ext"
      (:func:`attn_ext.integrations.transformers.register`).

    A torch.nn.MultiheadAttention remains the same object and only its class changes, as torch's
    parametrizations and fully_shard do it. So everything that hangs on it remains: the Parameters themselves
    (an optimizer needs no rebuilding), buffers, state_dict names, train or eval mode, hooks and their
    handles, pruning and parametrizations, ``out_proj`` with whatever took its place; other references to the
    module, in a list or in a second model that shares it, and ``model`` itself, if it is one. The other two
    keep their classes.

    Left as they are, and named in the report: instances of subclasses of torch.nn.MultiheadAttention, whose
    own code would be lost; modules whose ``forward`` was replaced on the instance, which would still call the
    old one; modules of timm that compute the softmax themselves (``fused_attn`` off); models of transformers
    that do.

    Args:
        model: an nn.Module, also one under torch.compile or DistributedDataParallel. Part of a model is a
            model too: ``replace_attention(model.encoder)``.

    Returns:
        AttentionReplacement: ``replaced`` (names), ``skipped`` (name -> reason), ``undo()``; printed, it
        lists them. A model without any of these is no error: look at the report.

    Other models that call ``F.scaled_dot_product_attention`` themselves: :func:`attn_ext.patch_sdpa`. What
    differs after the replacement is listed at :class:`attn_ext.MultiHeadAttention` and
    :func:`attn_ext.scaled_dot_product_attention`.

    Raises:
        TypeError: model is not an nn.Module.
        ImportError: a model of transformers, of a version that is too old.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    kinds = (
        (library_models.find_transformers, library_models.TransformersModel),  # first: this may raise
        (_find_torch, _TorchModule),
        (library_models.find_timm, library_models.TimmModule),
    )
    swaps, skipped = {}, {}
    for find, swap in kinds:
        found, left = find(model)
        swaps.update({name: swap(module) for name, module in found.items()})
        skipped.update(left)
    return AttentionReplacement(swaps, skipped)


class AttentionReplacement:
    """What :func:`replace_attention` did.

    Attributes:
        replaced: names of the modules (of transformers: the models) that were changed, "" for the model
            itself; a shared module's first.
        skipped: name -> why one was left as it is.
    """

    def __init__(self, swaps, skipped):
        self._swaps = swaps
        self.replaced = list(swaps)
        self.skipped = skipped

    def undo(self):
        """Give the modules their old attention back, with the parameters that they have now.

        Raises:
            RuntimeError: one of them has become something else since, or uses what torch's module lacks
                (``window``, ``softcap``, ...); then none is changed. A second call has no effect.
        """
        for name, swap in self._swaps.items():
            if reason := swap.why_not_undo():
                raise RuntimeError(f"{_shown(name)} {reason}: it cannot be undone")
        for swap in self._swaps.values():
            swap.undo()
        self._swaps = {}

    def __repr__(self):
        lines = [f"replace_attention: {len(self.replaced)} replaced, {len(self.skipped)} skipped"]
        lines += [f"  {_shown(name)}" for name in self.replaced]
        lines += [f"  {_shown(name)}: skipped, {reason}" for name, reason in self.skipped.items()]
        if len(lines) == 1:
            lines.append("  no torch.nn.MultiheadAttention, nothing of timm or transformers; for calls of")
            lines.append("  F.scaled_dot_product_attention there is attn_ext.patch_sdpa()")
        return "\n".join(lines)


def _find_torch(model):
    """({name: module}, {name: why not}) of torch.nn.MultiheadAttention in ``model``."""
    modules, skipped = {}, {}
    for name, module in model.named_modules():  # a shared module comes once
        if not isinstance(module, nn.MultiheadAttention):
            continue
        if "forward" in vars(module):
            skipped[name] = "its forward was replaced on the instance"
        elif not _is_exactly(module, nn.MultiheadAttention):
            skipped[name] = f"of the subclass {type(module).__module__}.{type(module).__qualname__}"
        else:
            modules[name] = module
    return modules, skipped


class _TorchModule:
    """The swap of one torch.nn.MultiheadAttention: its class."""

    def __init__(self, module):
        self._module = module
        self._added = _to_ours(module)

    def why_not_undo(self):
        if not _is_exactly(self._module, MultiHeadAttention):
            return f"has become a {type(self._module).__name__}"
        used = [key for key, off in self._added.items() if getattr(self._module, key) != off]
        return f"uses {', '.join(used)}, which torch's module has not" if used else None

    def undo(self):
        module = self._module
        _rebase(module, nn.MultiheadAttention)
        for key in self._added:
            delattr(module, key)
        # as torch computes it; read by nn.TransformerEncoderLayer
        module._qkv_same_embed_dim = module.kdim == module.vdim == module.embed_dim


def _is_exactly(module, cls):
    """Whether the module's class is ``cls``, but for the subclass that torch makes for parametrizations."""
    found = type(module)
    if parametrize.is_parametrized(module):
        return found.__bases__ == (cls,)
    return found is cls


def _rebase(module, cls):
    """Give the module the class ``cls``, with the properties of its parametrizations where it has any."""
    old = type(module)
    if parametrize.is_parametrized(module):
        members = {k: v for k, v in vars(old).items() if k not in ("__dict__", "__weakref__")}
        cls = type(f"Parametrized{cls.__name__}", (cls,), members)
    module.__class__ = cls


def _to_ours(module):
    """Change the class; return the attributes that this added, the extras of ours, all off."""
    added = dict.fromkeys(("window", "softcap", "qk_norm", "q_norm", "k_norm", "position"))
    added["num_kv_heads"] = module.num_heads
    vars(module).update(added)
    # In the class it is False, which keeps nn.TransformerEncoderLayer from its own fused path.
    del module._qkv_same_embed_dim
    _rebase(module, MultiHeadAttention)
    return added


def _shown(name):
    return name or "(the model itself)"
