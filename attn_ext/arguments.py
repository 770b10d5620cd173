"""What users pass in, checked once and brought into the form of the ops.

Errors name the argument, what it was and what is allowed. They are TypeErrors and ValueErrors, and
RuntimeErrors too: torch raises those for the same mistakes, so code that catches them goes on working.

The common case costs a few comparisons. Nothing here depends on tensor data while torch.compile traces.
"""

import math
import numbers
import warnings

import torch

from . import ops

_SDPA = ("query", "key", "value")
DEVICES = ("cpu", "cuda", "meta")  # meta computes shapes only
HALF = (torch.float16, torch.bfloat16)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class ArgumentTypeError(TypeError, RuntimeError):
    """An argument of the wrong type, dtype, layout or device."""


class ArgumentValueError(ValueError, RuntimeError):
    """An argument of the wrong shape or value."""


def check_tensor(name, t):
    """A dense strided tensor: nested and sparse ones have no strides that a kernel could follow."""
    if not isinstance(t, torch.Tensor):
        raise ArgumentTypeError(f"{name} must be a torch.Tensor, got {type(t).__name__}")
    if is_dtensor(t):
        raise ArgumentTypeError(
            f"{name} must be a plain tensor, got a DTensor, for which attn_ext has no sharding rules: pass "
            f"this rank's samples or heads, {name}.to_local(), or wrap the call in "
            "torch.distributed.tensor.experimental.local_map"
        )
    if t.layout is not torch.strided or t.is_nested:
        kind = "a nested tensor" if t.is_nested else f"one of layout {t.layout}"
        raise ArgumentTypeError(f"{name} must be a dense strided tensor, got {kind}")


def is_dtensor(t):
    """Told by its method: torch.distributed.tensor takes a second to import."""
    return type(t) is not torch.Tensor and hasattr(t, "to_local")


def allows_tf32(q):
    """Whether products may round their operands to TF32: torch's switch, which is about float32 on a GPU."""
    return q.is_cuda and q.dtype == torch.float32 and tf32_switch()


def tf32_switch():
    """torch.backends.cuda.matmul.allow_tf32, which torch.set_float32_matmul_precision sets too.

    It is read as fp32_precision: once a program has set it by that name, torch refuses to read allow_tf32.
    """
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


# Dynamo calls the function where it cannot trace it; code that it compiled is guarded by the switch as it is.
# torch.compiler.assume_constant_result does the same, but imports Dynamo for it.
tf32_switch._dynamo_marked_constant = True


def autocast_enabled(t):
    """Whether autocast is on for t's device; there is none for meta tensors.

    First whether it is on at all: to ask for a device takes as long as all other checks of a call.
    """
    return torch._C._is_any_autocast_enabled() and not t.is_meta and torch.is_autocast_enabled(t.device.type)


def qkv(q, k, v, names=("q", "k", "v")):
    """Check types, dtypes and devices; return q, k, v, cast as autocast asks, and whether autocast is on.

    Autocast casts floating tensors to its dtype, except float64, as it does for torch's own attention.
    """
    for name, t in zip(names, (q, k, v), strict=True):
        check_tensor(name, t)
    autocast = autocast_enabled(q)
    if autocast:
        dtype = torch.get_autocast_dtype(q.device.type)
        q, k, v = (
            t.to(dtype) if t.is_floating_point() and t.dtype != torch.float64 else t for t in (q, k, v)
        )
    if not q.dtype == k.dtype == v.dtype:
        got = ", ".join(f"{name} {t.dtype}" for name, t in zip(names, (q, k, v), strict=True))
        raise ArgumentTypeError(f"{_list(names)} must have the same dtype, got {got}")
    if q.dtype not in DTYPES:
        raise ArgumentTypeError(
            f"{_list(names)} must be float64, float32, bfloat16 or float16, got {q.dtype}"
        )
    if not q.device == k.device == v.device:
        got = ", ".join(f"{name} {t.device}" for name, t in zip(names, (q, k, v), strict=True))
        raise ArgumentTypeError(f"{_list(names)} must be on the same device, got {got}")
    if not q.is_cpu and q.device.type not in DEVICES:
        raise ArgumentTypeError(f"{_list(names)} must be on the CPU or on a CUDA GPU, got {q.device}")
    if q.is_cuda and ops.CUDA_PROBLEM:
        raise ArgumentTypeError(
            f"{_list(names)} are on {q.device}, and attn_ext's CUDA kernels are {ops.CUDA_PROBLEM}. "
            "`python -m attn_ext` tells what was built; move the tensors to the CPU to go on without them"
        )
    return q, k, v, autocast


def check_shapes(q, k, v):
    """q (B, Hq, Nq, D), k (B, Hkv, Nk, D), v (B, Hkv, Nk, Dv), Hq a multiple of Hkv."""
    if not q.dim() == k.dim() == v.dim() == 4:
        raise ArgumentValueError(
            "q, k and v must be 4-D (batch, heads, length, head_dim), "
            f"got {q.dim()}-D, {k.dim()}-D and {v.dim()}-D: {_shapes(q, k, v)}"
        )
    batch, heads, _, head_dim = q.shape
    batch_k, heads_k, len_k, head_dim_k = k.shape
    batch_v, heads_v, len_v, _ = v.shape
    if not batch == batch_k == batch_v:
        raise ArgumentValueError(
            f"q, k and v must have the same batch size, got {batch}, {batch_k} and {batch_v}: "
            f"{_shapes(q, k, v)} (expand() broadcasts a batch of 1 without a copy)"
        )
    if head_dim != head_dim_k:
        raise ArgumentValueError(
            f"q and k must have the same head_dim (last dimension), got {head_dim} and {head_dim_k}: "
            f"{_shapes(q, k, v)}"
        )
    if heads_k != heads_v:
        raise ArgumentValueError(
            f"k and v must have the same number of heads, got {heads_k} and {heads_v}: {_shapes(q, k, v)}"
        )
    if len_k != len_v:
        raise ArgumentValueError(
            f"k and v must have the same length, got {len_k} and {len_v}: {_shapes(q, k, v)}"
        )
    if heads != heads_k and (heads_k == 0 or heads % heads_k):
        raise ArgumentValueError(
            f"q's number of heads must be a multiple of k's, got {heads} and {heads_k}: {_shapes(q, k, v)}"
        )


def sdpa_shapes(query, key, value, mask, enable_gqa):
    """Shapes as in torch's scaled_dot_product_attention: return 4-D q, k, v, their mask, and out's shape.

    query (..., Hq, L, E), key (..., H, S, E), value (..., H, S, Ev): batch dimensions and heads broadcast,
    heads by repetition with enable_gqa. This is done by strides; several batch dimensions may cost a copy.
    The shape is None where out has it already.
    """
    tensors = (query, key, value)
    fewest = 3 if enable_gqa else 2
    if min(t.dim() for t in tensors) < fewest:
        raise ArgumentValueError(
            f"query, key and value must have at least {fewest} dimensions{' with enable_gqa' * enable_gqa}, "
            f"got {_shapes(*tensors, _SDPA)}"
        )
    if query.shape[-1] != key.shape[-1]:
        raise ArgumentValueError(
            f"query and key must have the same last dimension, got {_shapes(*tensors, _SDPA)}"
        )
    if key.shape[-2] != value.shape[-2]:
        raise ArgumentValueError(f"key and value must have the same length, got {_shapes(*tensors, _SDPA)}")
    if query.dim() == key.dim() == value.dim() == 4 and query.shape[:2] == key.shape[:2] == value.shape[:2]:
        return query, key, value, mask, None
    heads_q, heads_k, heads_v = (t.shape[-3] if t.dim() > 2 else 1 for t in tensors)
    if enable_gqa:
        if any(heads_q != n and (n == 0 or heads_q % n) for n in (heads_k, heads_v)):
            raise ArgumentValueError(
                "query's number of heads must be a multiple of those of key and of value with enable_gqa, "
                f"got {heads_q}, {heads_k} and {heads_v}"
            )
        if heads_k != heads_v:
            key, value = (t.repeat_interleave(heads_q // t.shape[-3], -3) for t in (key, value))
        heads, heads_kv = heads_q, key.shape[-3]
    else:
        heads = _broadcast("heads", [(heads_q,), (heads_k,), (heads_v,)], tensors)[0]
        # A single key and value head serves all queries; the kernels know that without an expanded gradient.
        heads_kv = 1 if heads_k == heads_v == 1 else heads
    batch = _broadcast("batch dimensions", [t.shape[:-3] for t in tensors], tensors)
    q, k, v = (_four_dims(t, batch, h) for t, h in ((query, heads), (key, heads_kv), (value, heads_kv)))
    if isinstance(mask, torch.Tensor) and mask.dim() > 3:
        full = (*batch, heads, q.shape[2], k.shape[2])
        if mask.dim() > max(4, len(full)) or not broadcasts_to(mask.shape, full):
            raise ArgumentValueError(f"attn_mask must broadcast to {full}, got {tuple(mask.shape)}")
        if len(batch) > 1:
            if any(n != 1 for n in mask.shape[:-3]):
                mask = mask.expand(*batch, *mask.shape[-3:])
            mask = mask.flatten(0, -4)
    shape = (*batch, heads, q.shape[2], v.shape[3])
    if max(t.dim() for t in tensors) == 2:
        shape = shape[1:]  # no batch and no heads
    return q, k, v, mask, shape if len(shape) != 4 else None


def causal_bias(t, query, key):
    """The alignment (see below) of a `torch.nn.attention.bias.CausalBias`, None for anything else.

    Told by its name: the class is a prototype in torch and has no mask in its storage.
    """
    if type(t).__name__ != "CausalBias":
        return None
    lengths = query.shape[-2], key.shape[-2]
    if lengths != (t.seq_len_q, t.seq_len_kv):
        raise ArgumentValueError(
            "attn_mask, a CausalBias, must be made for the lengths of query and key, "
            f"{lengths}, got one for {(t.seq_len_q, t.seq_len_kv)}"
        )
    return alignment(t.variant.name.lower())


def score_term(name, t, q, len_k, autocast, *, bool_allowed=False):
    """A mask or bias as a 4-D view, not a copy, whose axes are 1 or those of (B, Hq, Nq, Nk).

    Dtype: bool where allowed, q's, or float32 (which becomes float64 with a float64 q).
    """
    check_tensor(name, t)
    if type(t).__name__ == "CausalBias":
        raise ArgumentTypeError(
            f"{name} must be a plain tensor, got a CausalBias: pass causal='upper_left' or True"
        )
    if t.dtype != torch.bool or not bool_allowed:
        t = _additive(name, t, q, autocast, bool_allowed)
    same_device(name, t, q)
    full = (*q.shape[:3], len_k)
    if t.dim() > 4 or not broadcasts_to(t.shape, full):
        raise ArgumentValueError(
            f"{name} must broadcast to (batch, query heads, query length, key length) = {tuple(full)}, "
            f"got shape {tuple(t.shape)}"
        )
    return t if t.dim() == 4 else t[(None,) * (4 - t.dim())]


def warn_if_all_hidden(name, mask):
    """Say so if a boolean mask lets no query attend to any key: most likely it was meant the other way round.

    Only on the CPU and not while compiling: elsewhere its values cannot be read without waiting. The first
    element tells it apart from most others at little cost.
    """
    if torch.compiler.is_compiling() or not mask.is_cpu or type(mask) is not torch.Tensor or not mask.numel():
        return
    try:
        hidden = not mask[0, 0, 0, 0] and not mask.any()
    except RuntimeError:  # under vmap: each sample has values of its own
        return
    if hidden:
        warnings.warn(
            f"{name} hides every key from every query: the output is 0. True means may attend in "
            "attn_ext.attention and scaled_dot_product_attention, but masked out in MultiHeadAttention, as "
            "in torch.nn. If it was meant the other way round, pass ~mask.",
            stacklevel=2,
        )


def per_head(name, t, q, autocast, *, batch_allowed=False):
    """ALiBi slopes (Hq,) or (B, Hq), or sinks (Hq,); dtype as for a bias."""
    check_tensor(name, t)
    t = _additive(name, t, q, autocast, False)
    same_device(name, t, q)
    batch, heads = q.shape[:2]
    if t.shape != (heads,) and not (batch_allowed and t.shape == (batch, heads)):
        allowed = f"({heads},) or ({batch}, {heads})" if batch_allowed else f"({heads},)"
        raise ArgumentValueError(
            f"{name} must have one value for each query head: {allowed}, got {tuple(t.shape)}"
        )
    return t


def lengths(name, values, q, limit, limit_name):
    """A tensor of B integers or a list of them, in [0, limit], as an int64 tensor (B,).

    The values of a tensor are looked at only where that needs no synchronisation: on the CPU, not compiling.
    """
    batch = q.shape[0]
    if isinstance(values, torch.Tensor):
        check_tensor(name, values)
        if values.dtype not in (torch.int64, torch.int32):
            raise ArgumentTypeError(f"{name} must be int64 or int32, got {values.dtype}")
        if values.shape != (batch,):
            raise ArgumentValueError(
                f"{name} must have shape (batch,) = ({batch},), got {tuple(values.shape)}"
            )
        same_device(name, values, q)
        result, known = values.long(), _readable(values)
    elif isinstance(values, (list, tuple)) and all(_is_int(n) for n in values):
        if len(values) != batch:
            raise ArgumentValueError(
                f"{name} must have one entry for each of {batch} samples, got {len(values)}"
            )
        result, known = torch.tensor(values, dtype=torch.int64, device=q.device), values
    else:
        raise ArgumentTypeError(f"{name} must be an integer tensor (batch,) or a list of int, got {values!r}")
    for n in known:
        if not 0 <= n <= limit:
            raise ArgumentValueError(f"{name} must lie between 0 and the {limit_name} {limit}, got {n}")
    return result


def alignment(causal):
    """The ops' number for causal: 0 none, 1 upper left, 2 lower right."""
    if causal is False:
        return 0
    if causal is True or causal == "lower_right":
        return 2
    if causal == "upper_left":
        return 1
    raise ArgumentValueError(f"causal must be False, True, 'lower_right' or 'upper_left', got {causal!r}")


def window_sides(window, name="window"):
    """(left, right) as two integers, -1 meaning open."""
    if window is None:
        return -1, -1
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise ArgumentValueError(
            f"{name} must be a pair (left, right): how many keys before and after its diagonal a query sees, "
            f"None or -1 = no limit; for a causal window of W keys, {name}=(W - 1, 0). Got {window!r}"
        )
    for side in window:
        if side is not None and not (_is_int(side) and side >= -1):
            raise ArgumentValueError(f"{name} must hold integers >= 0, -1 or None (no limit), got {window!r}")
    # Nothing is 2^40 keys long, and i + left must not overflow for callers who pass sys.maxsize.
    return tuple(-1 if side is None else min(side, 1 << 40) for side in window)


def scale_factor(scale, head_dim, name="scale"):
    """A finite number; 1 / sqrt(head_dim) for None, and 1 where head_dim is 0: all logits are 0 then."""
    if scale is None:
        return 1 / math.sqrt(head_dim) if head_dim else 1.0
    return _number(name, scale, "a finite number (a tensor with gradient multiplies q instead)", _is_finite)


def cap(softcap):
    """A positive finite number, 0 for None."""
    if softcap is None:
        return 0.0
    return _number("softcap", softcap, "None or a finite number > 0", lambda x: 0 < x < math.inf)


def probability(dropout_p, name="dropout_p"):
    return _number(name, dropout_p, "a probability between 0 and 1", lambda x: 0 <= x <= 1)


def rng_state(dropout_p, generator, device):
    """(seed, offset), int64 (2,), drawn from torch's generator on the device; None without dropout."""
    if generator is not None:
        if not isinstance(generator, torch.Generator):
            raise ArgumentTypeError(f"generator must be a torch.Generator, got {type(generator).__name__}")
        if generator.device.type != device.type and device.type != "meta":
            raise ArgumentTypeError(
                f"generator must be on the device of q, {device}, got one on {generator.device}"
            )
    if dropout_p == 0:
        return None
    return torch.randint(-(2**63), 2**63 - 1, (2,), generator=generator, device=device)


def _additive(name, t, q, autocast, bool_allowed):
    """t in a dtype that kernels add to q's scores: q's, or float32 for half types. No precision is lost."""
    if t.dtype == q.dtype or (t.dtype == torch.float32 and q.dtype in HALF):
        return t
    if t.dtype == torch.float32:
        return t.to(q.dtype)
    if autocast and t.dtype in HALF:
        return t.to(torch.promote_types(q.dtype, torch.float32))
    allowed = [*(["bool (True = may attend)"] if bool_allowed else []), f"{torch.float32}"]
    if q.dtype != torch.float32:
        allowed.append(f"{q.dtype} as q is")
    raise ArgumentTypeError(f"{name} must be {' or '.join(allowed)}, got {t.dtype}")


def same_device(name, t, q):
    if t.device != q.device:
        raise ArgumentTypeError(f"{name} must be on the device of q, {q.device}, got {t.device}")


def _readable(values):
    """The values of an integer tensor, or none where reading them would synchronise or break a trace."""
    if torch.compiler.is_compiling() or values.device.type != "cpu" or type(values) is not torch.Tensor:
        return ()
    try:
        return values.tolist()
    except RuntimeError:  # under vmap: each sample has values of its own
        return ()


def broadcasts_to(shape, full):
    """Whether each axis, aligned at the right, is 1 or full; more axes than full has must be 1."""
    missing = len(full) - len(shape)
    for axis, n in enumerate(shape):
        if n != 1 and (axis + missing < 0 or n != full[axis + missing]):
            return False
    return True


def _broadcast(what, shapes, tensors):
    """The common shape of three parts of query, key and value."""
    if shapes[0] == shapes[1] == shapes[2]:
        return shapes[0]
    try:
        return torch.broadcast_shapes(*shapes)
    except RuntimeError:
        raise ArgumentValueError(
            f"the {what} of query, key and value must broadcast, got {_shapes(*tensors, _SDPA)}"
            f"{' (a multiple of heads needs enable_gqa=True)' * (what == 'heads')}"
        ) from None


def _four_dims(t, batch, heads):
    """(..., N, D) -> (B, heads, N, D), B the product of the batch sizes."""
    if t.dim() == 4 and t.shape[:2] == (*batch, heads):
        return t
    return t.expand(*batch, heads, *t.shape[-2:]).reshape(math.prod(batch), heads, *t.shape[-2:])


def _is_finite(x):
    return -math.inf < x < math.inf


def _is_int(x):
    return isinstance(x, (numbers.Integral, torch.SymInt)) and not isinstance(x, bool)


def _number(name, value, allowed, is_allowed):
    """A float, checked by comparisons: where torch.compile makes it symbolic, they are guards on a range."""
    # float and int are numbers.Real, too, but that is asked of an abstract class, which takes longer
    if not isinstance(value, (float, int, numbers.Real, torch.SymFloat, torch.SymInt)):
        raise ArgumentTypeError(f"{name} must be {allowed}, got {value!r} of type {type(value).__name__}")
    try:
        if is_allowed(value):
            return float(value)
    except OverflowError:  # an int beyond any float
        pass
    raise ArgumentValueError(f"{name} must be {allowed}, got {value!r}")


def _list(names):
    return f"{', '.join(names[:-1])} and {names[-1]}"


def _shapes(q, k, v, names=("q", "k", "v")):
    return ", ".join(f"{name} {tuple(t.shape)}" for name, t in zip(names, (q, k, v), strict=True))
