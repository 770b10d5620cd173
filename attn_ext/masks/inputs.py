"""What people make block masks of, checked."""

import numbers

import torch

from ..arguments import ArgumentTypeError, ArgumentValueError, broadcasts_to


def check_int(name, value, least):
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise ArgumentTypeError(f"{name} must be an int, got {value!r} of type {type(value).__name__}")
    if value < least:
        raise ArgumentValueError(f"{name} must be at least {least}, got {value}")
    if value >= 2**63:  # beyond int64
        raise ArgumentValueError(f"{name} must be below 2**63, got {value}")
    return int(value)


def with_data(device):
    """The device that is meant: "cuda" becomes "cuda:0", None torch's default one."""
    device = torch.empty(0, device=device).device
    if device.type == "meta":
        raise ArgumentTypeError(
            "device must be one with data, got meta: build the mask elsewhere, then .to('meta')"
        )
    return device


def as_tensor(name, values, device):
    """A tensor with data, on its own device or the one that is asked for."""
    with_data(device)
    try:
        values = torch.as_tensor(values, device=device)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ArgumentTypeError(f"{name} must be a tensor or lists of equal lengths: {error}") from error
    with_data(values.device)
    return values


def as_integers(name, values, device):
    """int64 (B or 1, n) of integers (n,) or (B, n), a tensor or lists."""
    values = as_tensor(name, values, device)
    if values.numel() and values.dtype not in (torch.int64, torch.int32):
        raise ArgumentTypeError(f"{name} must be integers, got {values.dtype}")
    if values.dim() not in (1, 2) or (values.dim() == 2 and len(values) == 0):
        raise ArgumentValueError(f"{name} must be (n,) or (B, n), got {tuple(values.shape)}")
    return values.long() if values.dim() == 2 else values.long()[None]


def check_range(name, values, most):
    if ((values < 0) | (values > most)).any():
        raise ArgumentValueError(f"{name} must lie in 0 ... {most}, got {values.tolist()}")


def call_predicate(mask_mod, *indices):
    """mask_mod's bool tensor; errors that name mask_mod and what it must do."""
    if not callable(mask_mod):
        raise ArgumentTypeError(f"mask_mod must be a function of (b, h, q_idx, kv_idx), got {mask_mod!r}")
    try:
        visible = mask_mod(*indices)
    except Exception as error:
        shapes = ", ".join(str(tuple(t.shape)) for t in indices)
        raise ArgumentValueError(
            f"mask_mod failed on b, h, q_idx, kv_idx, int64 tensors of shapes {shapes} on "
            f"{indices[0].device}: {error}. It is called for many scores at once and must work element by "
            "element: &, |, ~ and torch.where in the place of and, or, not and if; other tensors on the same "
            "device, indexed as in ids[b, q_idx]"
        ) from error
    if not isinstance(visible, torch.Tensor) or visible.dtype != torch.bool:
        got = f"a tensor of {visible.dtype}" if isinstance(visible, torch.Tensor) else type(visible).__name__
        raise ArgumentTypeError(f"mask_mod must return a bool tensor, True = may attend, got {got}")
    if visible.device != indices[0].device:
        raise ArgumentTypeError(
            f"mask_mod must return a tensor on the mask's device, {indices[0].device}, got one on "
            f"{visible.device}: pass device='{visible.device}' or move the tensors that it uses"
        )
    full = torch.broadcast_shapes(*(t.shape for t in indices))
    if visible.dim() > len(full) or not broadcasts_to(visible.shape, full):
        raise ArgumentValueError(
            "mask_mod must return a tensor that broadcasts to the shape of its indices together, "
            f"{tuple(full)}, got {tuple(visible.shape)}"
        )
    return visible


def as_grid(blocks, rows, columns, device):
    """from_blocks' blocks as a bool tensor (B or 1, H or 1, rows, columns)."""
    blocks = as_tensor("blocks", blocks, device)
    if blocks.dtype == torch.bool:
        if blocks.dim() not in (2, 3, 4) or blocks.shape[-2:] != (rows, columns):
            raise ArgumentValueError(
                f"blocks must be (..., {rows}, {columns}), one bool for each block, with at most heads and "
                f"batch before them, got {tuple(blocks.shape)}"
            )
        return blocks[(None,) * (4 - blocks.dim())]
    if blocks.dtype not in (torch.int64, torch.int32):
        raise ArgumentTypeError(f"blocks must be bool, or integer pairs, got {blocks.dtype}")
    if blocks.dim() != 2 or blocks.shape[1] != 2:
        raise ArgumentValueError(f"blocks must be pairs of integers (n, 2), got {tuple(blocks.shape)}")
    row, column = blocks.long().unbind(1)
    beyond = (row < 0) | (row >= rows) | (column < 0) | (column >= columns)
    if beyond.any():
        raise ArgumentValueError(
            f"blocks must lie in 0 ... {rows - 1} and 0 ... {columns - 1}, got {blocks[beyond][0].tolist()}"
        )
    grid = torch.zeros(1, 1, rows, columns, dtype=torch.bool, device=blocks.device)
    grid[0, 0, row, column] = True
    return grid
