"""replace_attention's part for models of timm and of Hugging Face transformers.

Neither library is imported here: a model of theirs has brought it along.
"""

import functools
import sys

import torch
import torch.nn.functional as F

from ..functional import scaled_dot_product_attention
from . import transformers as integration


def find_timm(model):
    """({name: module}, {name: why not}) of timm's attention modules in ``model``.

    They are known by ``fused_attn``, the switch by which they choose between F.scaled_dot_product_attention
    and a softmax of their own.
    """
    found, skipped = {}, {}
    for name, module in model.named_modules():
        if not type(module).__module__.startswith("timm.") or not hasattr(module, "fused_attn"):
            continue
        if not module.fused_attn:
            skipped[name] = "its fused_attn is off: it computes the softmax itself"
        elif "forward" in vars(module):
            skipped[name] = "its forward was replaced on the instance"
        else:
            found[name] = module
    return found, skipped


class TimmModule:
    """The swap of one of timm's modules: its forward runs with our function in the place of torch's."""

    def __init__(self, module):
        self._module = module
        module.forward = functools.partial(_forward_with_ours, module)

    def why_not_undo(self):
        """Why it cannot be undone, or None."""
        forward = vars(self._module).get("forward")
        if getattr(forward, "func", None) is not _forward_with_ours:
            return "has got another forward"
        return None

    def undo(self):
        del self._module.forward


def _forward_with_ours(module, *args, **kwargs):
    with _OurFunction():
        return type(module).forward(module, *args, **kwargs)


class _OurFunction(torch.overrides.TorchFunctionMode):
    """F.scaled_dot_product_attention is attn_ext's, in this thread only."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is F.scaled_dot_product_attention:
            function = scaled_dot_product_attention
        return function(*args, **(kwargs or {}))


def find_transformers(model):
    """({name: model}, {name: why not}) of transformers' models in ``model``, without models within models."""
    found, skipped = {}, {}
    library = sys.modules.get("transformers")
    if library is None:
        return found, skipped
    inner = set()
    for name, module in model.named_modules():
        if not isinstance(module, library.PreTrainedModel) or module in inner:
            continue
        inner.update(module.modules())
        if module.config._attn_implementation == integration.NAME:
            skipped[name] = "uses attn_ext already"
        elif not module._can_set_attn_implementation():
            skipped[name] = f"transformers cannot change the attention of {type(module).__name__}"
        else:
            found[name] = module
    return found, skipped


class TransformersModel:
    """The swap of one of transformers' models: its attention implementation, and that of its parts."""

    def __init__(self, model):
        self._model, self._before = model, _implementations(model.config)
        if integration.NAME not in sys.modules["transformers"].AttentionInterface().valid_keys():
            integration.register()  # a second time would forget what the first was told to ignore
        model.set_attn_implementation(integration.NAME)

    def why_not_undo(self):
        """Why it cannot be undone, or None."""
        now = self._model.config._attn_implementation
        return None if now == integration.NAME else f"uses {now} now"

    def undo(self):
        self._model.set_attn_implementation(self._before)


def _implementations(config):
    """For set_attn_implementation: {"": of the model itself, name of a part: the same of that part}."""
    parts = {name: getattr(config, name) for name in config.sub_configs}
    return {"": config._attn_implementation} | {
        name: _implementations(part) for name, part in parts.items() if part is not None
    }
