"""patch_sdpa: existing code that calls torch.nn.functional.scaled_dot_product_attention gets attn_ext's."""

import sys
import threading
import warnings

import torch
import torch.nn.functional as F

from .. import arguments
from ..functional import scaled_dot_product_attention

_PLAIN = (torch.Tensor, torch.nn.Parameter, type(None))

_lock = threading.Lock()
_handles = set()  # the patches in force
_active = False  # whether there are any; a plain bool, since code that torch.compile made is guarded by it
# What stood there before the first of them.
_original = F.scaled_dot_product_attention
_original_mha = F.multi_head_attention_forward
_original_causal_bias = None  # CausalBias.__torch_function__, a classmethod


def patch_sdpa():
    """Make ``torch.nn.functional.scaled_dot_product_attention`` attn_ext's, in the whole process.

    As a function it holds until ``undo()`` of what it returns, or until the process ends; as a context
    manager until the end of the block::

        patch = attn_ext.patch_sdpa()
        ...
        patch.undo()

        with attn_ext.patch_sdpa():
            model(x)

    Patches may be nested and overlap, also between threads: torch's function, the very object, is back when
    the last of them is undone. All threads see the patch while it holds.

    It reaches every call that looks the function up in ``torch.nn.functional`` when it calls:
    ``F.scaled_dot_product_attention(...)``, and torch.nn.MultiheadAttention with ``need_weights=False``, so
    torch.nn.TransformerEncoderLayer and its like. Functions that torch.compile compiled earlier are compiled
    anew. It does not reach

    - modules that said ``from torch.nn.functional import scaled_dot_product_attention`` before the patch;
    - torch.nn.MultiheadAttention and TransformerEncoderLayer in eval mode without gradients, which take an
      operator of torch's own. ``torch.backends.mha.set_fastpath_enabled(False)`` makes them call the
      function; :func:`attn_ext.replace_attention` replaces the modules;
    - programs that were scripted or exported earlier.

    Calls that attn_ext's kernels have no form for go on to torch's function, with a warning (compiled code
    does not warn): nested tensors, DTensors, devices other than CPU and CUDA, and arguments whose class has
    its own ``__torch_function__`` (torch.fx's proxies among them). All else behaves as
    :func:`attn_ext.scaled_dot_product_attention`, and what that refuses is an error. `torch.jit.script`
    cannot take a model while the patch holds.

    The first call imports torch's compiler, which takes about as long as importing torch.

    Returns:
        SdpaPatch: with ``undo()``, and usable as a context manager.

    Raises:
        RuntimeError: a patch holds already, and something else has replaced the function since.
    """
    return SdpaPatch()


class SdpaPatch:
    """One call of :func:`patch_sdpa`. ``active`` tells whether it still holds."""

    def __init__(self):
        with _lock:
            _install()
            _handles.add(self)

    @property
    def active(self):
        return self in _handles

    def undo(self):
        """Take this patch back; without effect when that was done.

        Raises:
            RuntimeError: this is the last patch, and something else has replaced the function since, which
                would be lost. Undo that first; the patch holds until then.
        """
        with _lock:
            if self not in _handles:
                return
            if len(_handles) == 1:
                _remove()
            _handles.remove(self)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.undo()

    def __repr__(self):
        state = "active" if self.active else "undone"
        return f"<attn_ext.patch_sdpa: {state}; {len(_handles)} active in this process>"


def _install():
    global _active, _original, _original_mha, _original_causal_bias
    if _active:
        _check_ours("patched again")
        return
    # Imported here because it brings torch's compiler along, which takes a second or two.
    from torch.nn.attention.bias import CausalBias

    torch._dynamo.allow_in_graph(_multi_head_attention_forward)
    _original, F.scaled_dot_product_attention = F.scaled_dot_product_attention, _scaled_dot_product_attention
    _original_mha = F.multi_head_attention_forward
    F.multi_head_attention_forward = _multi_head_attention_forward
    _original_causal_bias = vars(CausalBias)["__torch_function__"]
    CausalBias.__torch_function__ = classmethod(_causal_bias_torch_function)
    _active = True


def _remove():
    global _active
    _check_ours("restored")
    F.scaled_dot_product_attention = _original
    F.multi_head_attention_forward = _original_mha
    sys.modules["torch.nn.attention.bias"].CausalBias.__torch_function__ = _original_causal_bias
    _active = False


def _check_ours(what):
    for function in (_scaled_dot_product_attention, _multi_head_attention_forward):
        name = function.__name__.removeprefix("_")
        found = getattr(F, name)
        if found is not function:
            raise RuntimeError(
                f"torch.nn.functional.{name} cannot be {what}: since attn_ext.patch_sdpa() it has been "
                f"replaced by {found!r}, which has to be taken back first"
            )


def _scaled_dot_product_attention(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False
):
    """What stands in torch.nn.functional while a patch holds."""
    options = (attn_mask, dropout_p, is_causal)
    if not _active:  # imported by name while a patch held, which has been undone since
        return _original(query, key, value, *options, scale=scale, enable_gqa=enable_gqa)
    if reason := _not_ours(query, key, value, attn_mask):
        if not torch.compiler.is_compiling():  # Dynamo cannot trace a warning
            warnings.warn(f"attn_ext.patch_sdpa: left to torch, {reason}", stacklevel=2)
        return _original(query, key, value, *options, scale=scale, enable_gqa=enable_gqa)
    return scaled_dot_product_attention(query, key, value, *options, scale=scale, enable_gqa=enable_gqa)


def _not_ours(*tensors):
    """Why torch's function must have the call, or None. tensors: query, key, value, attn_mask."""
    for t in tensors:
        if type(t) not in _PLAIN and (_has_own_torch_function(type(t)) or arguments.is_dtensor(t)):
            return f"an argument of {type(t)}"
    query = tensors[0]  # the others must be like it
    if isinstance(query, torch.Tensor):
        if query.is_nested:
            return "a nested tensor"
        if query.device.type not in arguments.DEVICES:
            return f"a tensor on {query.device}"
    return None


def _has_own_torch_function(cls):
    rule = getattr(cls, "__torch_function__", None)
    common = (None, torch.Tensor.__torch_function__, torch._C._disabled_torch_function_impl)
    # Methods of classes are new objects at each look-up, equal only for the same class: their functions tell.
    return cls.__name__ != "CausalBias" and all(
        getattr(rule, "__func__", rule) is not getattr(c, "__func__", c) for c in common
    )


def _multi_head_attention_forward(*args, **kwargs):
    """torch.nn.functional's own, under another name while a patch holds.

    torch.compile keeps a call of it as one step, and its caches on disk know the compiled code by that step's
    name. Under the same name they would hand code with one attention to a process that wants the other.
    """
    return _original_mha(*args, **kwargs)


def _causal_bias_torch_function(cls, func, types, args=(), kwargs=None):
    """CausalBias.__torch_function__ while a patch holds.

    Torch's function, imported by name, asks the mask's class, and that compares the function with the one in
    torch.nn.functional. They differ now, and torch would read the mask's storage, which holds nothing.
    """
    if func is _original:
        return _scaled_dot_product_attention(*args, **(kwargs or {}))
    return _original_causal_bias.__func__(cls, func, types, args, kwargs)
