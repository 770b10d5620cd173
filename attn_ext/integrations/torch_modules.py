"""replace_attention: a model's torch.nn.MultiheadAttention modules become attn_ext.MultiHeadAttention."""

from torch import nn
from torch.nn.utils import parametrize

from ..arguments import ArgumentTypeError
from ..modules import MultiHeadAttention


def replace_attention(model):
    """Turn each torch.nn.MultiheadAttention in ``model`` into an attn_ext.MultiHeadAttention, in place.

    The module object remains and only its class changes, as torch's parametrizations and fully_shard do it.
    So everything that hangs on it remains: the Parameters themselves (an optimizer needs no rebuilding),
    buffers, state_dict names, train or eval mode, hooks and their handles, pruning and parametrizations,
    ``out_proj`` with whatever took its place; other references to the module, in a list or in a second model
    that shares it, and ``model`` itself, if it is one.

    Left as they are, and named in the report: instances of subclasses, whose own code would be lost, and
    modules whose ``forward`` was replaced on the instance, which would still call the old one.

    Args:
        model: an nn.Module, also one under torch.compile or DistributedDataParallel. Part of a model is a
            model too: ``replace_attention(model.encoder)``.

    Returns:
        AttentionReplacement: ``replaced`` (names), ``skipped`` (name -> reason), ``undo()``; printed, it
        lists them. A model without torch.nn.MultiheadAttention is no error: look at the report.

    A model that calls ``F.scaled_dot_product_attention`` itself, as timm's do, has no such modules:
    :func:`attn_ext.patch_sdpa`. What differs after the replacement is listed at
    :class:`attn_ext.MultiHeadAttention`.

    Raises:
        TypeError: model is not an nn.Module.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
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
    return AttentionReplacement(modules, skipped)


class AttentionReplacement:
    """What :func:`replace_attention` did.

    Attributes:
        replaced: names of the modules that were replaced, "" for the model itself; a shared module's first.
        skipped: name -> why a torch.nn.MultiheadAttention was left as it is.
    """

    def __init__(self, modules, skipped):
        self._swapped = [(name, module, _to_ours(module)) for name, module in modules.items()]
        self.replaced = list(modules)
        self.skipped = skipped

    def undo(self):
        """Make the modules torch.nn.MultiheadAttention again, with the parameters that they have now.

        Raises:
            RuntimeError: one of them has become something else since, or uses what torch's module lacks
                (``window``, ``softcap``, ...); then none is changed. A second call has no effect.
        """
        for name, module, added in self._swapped:
            if not _is_exactly(module, MultiHeadAttention):
                raise RuntimeError(
                    f"{_shown(name)} has become a {type(module).__name__}: it cannot be undone"
                )
            used = [key for key, off in added.items() if getattr(module, key) != off]
            if used:
                raise RuntimeError(f"{_shown(name)} uses {', '.join(used)}, which torch's module has not")
        for _, module, added in self._swapped:
            _rebase(module, nn.MultiheadAttention)
            for key in added:
                delattr(module, key)
            # as torch computes it; read by nn.TransformerEncoderLayer
            module._qkv_same_embed_dim = module.kdim == module.vdim == module.embed_dim
        self._swapped = []

    def __repr__(self):
        lines = [f"replace_attention: {len(self.replaced)} replaced, {len(self.skipped)} skipped"]
        lines += [f"  {_shown(name)}" for name in self.replaced]
        lines += [f"  {_shown(name)}: skipped, {reason}" for name, reason in self.skipped.items()]
        if len(lines) == 1:
            lines.append("  the model has no torch.nn.MultiheadAttention; for calls of")
            lines.append("  F.scaled_dot_product_attention there is attn_ext.patch_sdpa()")
        return "\n".join(lines)


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
    added = dict.fromkeys(("window", "softcap", "qk_norm", "q_norm", "k_norm"))
    added["num_kv_heads"] = module.num_heads
    vars(module).update(added)
    # In the class it is False, which keeps nn.TransformerEncoderLayer from its own fused path.
    del module._qkv_same_embed_dim
    _rebase(module, MultiHeadAttention)
    return added


def _shown(name):
    return name or "(the model itself)"
