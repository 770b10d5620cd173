"""Plots of attention weights, masks and positions. Each returns a matplotlib Figure."""

import math

import torch

from ..arguments import ArgumentTypeError, ArgumentValueError
from ..masks import BlockMask
from ..masks.tiles import FULL, SIZE
from .capture import AttentionMap
from .fonts import families

MOST_TICKS = 40  # labels along an axis that can still be told apart
CELL_INCHES = 0.28  # of a labelled token
MAP_INCHES = (1.6, 9.0)  # of one map's side, smallest and largest
HIDDEN, PARTLY_SEEN, SEEN = "#d9d9d9", "#8db6da", "#1f5f99"


def plot_attention(weights, tokens=None, key_tokens=None, *, title=None, cmap="viridis", max_heads=16):
    """Attention weights as pictures: a row for each query, a column for each key, bright = much attention.

    Args:
        weights: (Nq, Nk) of one head; (H, Nq, Nk): a picture for each head; (layers, H, Nq, Nk): a grid; a
            list of (H, Nq, Nk) for layers that differ in size; or what capture_attention returned, a grid of
            its first sample.
        tokens: Nq strings for the queries, in any script; also for the keys, where they are as many.
        key_tokens: Nk strings for the keys.
        title: above everything.
        cmap: a colormap of matplotlib's. Its range is 0 to the largest weight of each picture.
        max_heads: of more heads only the first are drawn, and the title says so.

    Returns:
        matplotlib.figure.Figure; no window opens: `figure.savefig("attention.png")`, a notebook draws it.

    Raises:
        ImportError: no matplotlib.
        TypeError, ValueError: weights of another shape, tokens of another number.
    """
    _require_matplotlib()
    layers, names = _as_layers(weights)
    heads = max(len(layer) for layer in layers)
    shown = min(heads, max_heads)
    single = len(layers) == 1 and heads == 1
    panels = []
    for row, layer in enumerate(layers):
        for head, matrix in enumerate(layer[:shown]):
            label = "" if single else f"head {head}" if len(layers) == 1 else f"{names[row]}, head {head}"
            panels.append((row, head, matrix, label))
    columns, rows = (shown, len(layers)) if len(layers) > 1 else _near_square(shown)
    if heads > shown:
        title = f"{title or 'attention'} (the first {shown} of {heads} heads)"
    figure, axes = _grid(rows, columns, [(p[2].shape, tokens, key_tokens) for p in panels], title)
    for row, head, matrix, label in panels:
        ax = axes[row][head] if len(layers) > 1 else axes[head // columns][head % columns]
        ax.set_visible(True)
        image = ax.imshow(matrix.numpy(), cmap=cmap, vmin=0.0, interpolation="nearest", aspect="equal")
        ax.set_title(label, fontsize="medium", family=families(label))
        _label_axes(ax, matrix.shape, tokens, key_tokens)
        if single:
            figure.colorbar(image, ax=ax, label="weight", shrink=0.8)
    return figure


def plot_mask(mask, tokens=None, key_tokens=None, *, title=None):
    """Which keys each query may attend to.

    Args:
        mask: (Nq, Nk), or (H, Nq, Nk) for a picture of each head. bool: True = may attend, as in
            attn_ext.attention (MultiHeadAttention's masks mean the opposite: pass ``~mask``). Floating: what
            is added to the logits; -inf hides. Or a :class:`attn_ext.masks.BlockMask`, of which the blocks of
            the first sample are drawn, and with tokens its elements.
        tokens, key_tokens, title: as in :func:`plot_attention`.

    Returns:
        matplotlib.figure.Figure. A mask of -inf and one other value has two colours, a BlockMask three (full,
        partial and hidden blocks); one with more values a scale beside it.
    """
    _require_matplotlib()
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    if isinstance(mask, BlockMask) and 0 in mask.shape:
        raise ArgumentValueError(f"mask must have no axis of size 0, got {tuple(mask.shape)}")
    by_block = isinstance(mask, BlockMask) and tokens is key_tokens is None
    if by_block:
        shades = {"hidden": HIDDEN, "partial": PARTLY_SEEN, "full": SEEN}
        ends = {"xlim": (0, mask.len_k), "ylim": (mask.len_q, 0)}
        extent = (0, mask.map.shape[3] * SIZE, mask.map.shape[2] * SIZE, 0)  # axes count positions
        mask = (mask.map[0] != 0).int() + (mask.map[0] == FULL)
    else:
        shades, extent = {"hidden": HIDDEN, "may attend": SEEN}, None
        mask = mask.to_dense()[0] if isinstance(mask, BlockMask) else mask
    matrices = _tensor("mask", mask)
    if matrices.dim() not in (2, 3) or 0 in matrices.shape:
        raise ArgumentValueError(
            f"mask must be (Nq, Nk) or (H, Nq, Nk), none of them 0, got {tuple(matrices.shape)}"
        )
    matrices = matrices if matrices.dim() == 3 else matrices[None]
    columns, rows = _near_square(len(matrices))
    sizes = [(m.shape, tokens, key_tokens) for m in matrices]
    figure, axes = _grid(rows, columns, sizes, title)
    colours = ListedColormap(list(shades.values()))
    for n, matrix in enumerate(matrices):
        ax = axes[n // columns][n % columns]
        ax.set_visible(True)
        hidden = ~matrix if matrix.dtype == torch.bool else matrix == -math.inf
        if by_block or len(matrix[~hidden].double().unique()) <= 1:
            ax.imshow(
                (matrix if by_block else ~hidden).numpy(), cmap=colours, vmin=0, vmax=len(shades) - 1,
                interpolation="nearest", aspect="equal", extent=extent,
            )  # fmt: skip
        else:
            shown = matrix.double().masked_fill(hidden, math.nan).numpy()
            ax.set_facecolor(HIDDEN)
            image = ax.imshow(shown, cmap="coolwarm", interpolation="nearest", aspect="equal")
            figure.colorbar(image, ax=ax, label="added to the logit", shrink=0.8)
        if len(matrices) > 1:
            ax.set_title(f"head {n}", fontsize="medium")
        _label_axes(ax, matrix.shape, tokens, key_tokens)
        if by_block:
            ax.set(**ends)
    entries = [Patch(facecolor=colour, label=name) for name, colour in reversed(shades.items())]
    figure.legend(handles=entries, loc="outside lower center", ncols=len(entries), frameon=False)
    return figure


def plot_positions(positions, *, title=None):
    """What a position encoding looks like.

    Args:
        positions: (N, D): encodings that are added to inputs: a picture, position down, feature across.
            (H, Nq, Nk) or (1, H, Nq, Nk): biases of the logits: for each head a curve over the distance of
            key and query, of the last query.
        title: above it.

    Returns:
        matplotlib.figure.Figure.
    """
    _require_matplotlib()
    from matplotlib.figure import Figure

    values = _tensor("positions", positions)
    if values.dim() == 4 and values.shape[0] == 1:
        values = values[0]
    if values.dim() not in (2, 3) or 0 in values.shape:
        raise ArgumentValueError(
            f"positions must be (N, D), or a bias (H, Nq, Nk), none of them 0, got {tuple(values.shape)}"
        )
    figure = Figure(figsize=(7.0, 4.0), layout="constrained")
    ax = figure.add_subplot()
    if values.dim() == 2:
        image = ax.imshow(values.numpy(), cmap="coolwarm", aspect="auto", interpolation="nearest")
        ax.set_xlabel("feature")
        ax.set_ylabel("position")
        figure.colorbar(image, ax=ax)
    else:
        distance = torch.arange(values.shape[2]) - (values.shape[2] - 1)
        for head, curve in enumerate(values[:, -1]):
            ax.plot(distance.numpy(), curve.numpy(), label=f"head {head}")
        ax.set_xlabel("position of the key, the query's being 0")
        ax.set_ylabel("added to the logit")
        ax.legend(fontsize="small", ncols=1 + (len(values) - 1) // 8)
    _set_title(figure, title)
    return figure


def _require_matplotlib():
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ImportError(f"the plots of attn_ext.viz need `pip install matplotlib` ({error})") from error


def _as_layers(weights):
    """([(H, Nq, Nk) of each layer], [its name])."""
    if isinstance(weights, AttentionMap):
        weights = weights.weights()[0]
    if isinstance(weights, dict):
        layers = [m.weights()[0] if isinstance(m, AttentionMap) else m for m in weights.values()]
        names = list(weights)
    elif isinstance(weights, (list, tuple)):
        layers, names = list(weights), [f"layer {n}" for n in range(len(weights))]
    else:
        weights = _tensor("weights", weights)
        if weights.dim() not in (2, 3, 4):
            raise ArgumentValueError(
                "weights must be (Nq, Nk), (H, Nq, Nk) or (layers, H, Nq, Nk), "
                f"got {tuple(weights.shape)} (of a batch choose one sample)"
            )
        layers = list(weights) if weights.dim() == 4 else [weights if weights.dim() == 3 else weights[None]]
        names = [f"layer {n}" for n in range(len(layers))]
    layers = [_tensor("weights", layer) for layer in layers]
    if not layers or any(layer.dim() != 3 or 0 in layer.shape for layer in layers):
        raise ArgumentValueError(
            "weights must hold (H, Nq, Nk) for each layer, none of them 0, got "
            f"{[tuple(layer.shape) for layer in layers]}"
        )
    return layers, names


def _tensor(name, t):
    """On the CPU, floats in a type that numpy knows."""
    if not isinstance(t, torch.Tensor):
        raise ArgumentTypeError(f"{name} must be a torch.Tensor, got {type(t).__name__}")
    t = t.detach().cpu()
    return t.float() if t.dtype in (torch.bfloat16, torch.float16) else t


def _near_square(count):
    """(columns, rows) for a number of pictures."""
    columns = math.ceil(math.sqrt(count))
    return columns, math.ceil(count / columns)


def _grid(rows, columns, panels, title):
    """A figure with rows x columns axes, invisible ones; its size lets the labels be read."""
    from matplotlib.figure import Figure

    width, height = 0.0, 0.0
    for (len_q, len_k), tokens, key_tokens in panels:
        labelled = tokens is not None or key_tokens is not None
        width, height = max(width, _side(len_k, labelled)), max(height, _side(len_q, labelled))
    figure = Figure(figsize=(columns * width + 0.8, rows * height + 0.8), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    for ax in axes.flat:
        ax.set_visible(False)
    _set_title(figure, title)
    return figure, axes


def _side(count, labelled):
    smallest, largest = MAP_INCHES
    inches = 1.0 + CELL_INCHES * min(count, MOST_TICKS) if labelled else 2.6
    return min(max(inches, smallest), largest)


def _set_title(figure, title):
    if title:
        figure.suptitle(title, family=families(title))


def _label_axes(ax, shape, tokens, key_tokens):
    len_q, len_k = shape
    if key_tokens is None and tokens is not None and len(tokens) == len_k:
        key_tokens = tokens
    sides = (("tokens", tokens, len_q, ax.yaxis), ("key_tokens", key_tokens, len_k, ax.xaxis))
    for name, labels, count, axis in sides:
        if labels is None:
            axis.get_major_locator().set_params(integer=True)
            continue
        if len(labels) != count:
            raise ArgumentValueError(f"{name} must have {count} strings, one for each, got {len(labels)}")
        step = math.ceil(count / MOST_TICKS)
        places = range(0, count, step)
        texts = [str(labels[n]) for n in places]
        axis.set_ticks(list(places), texts)
        known = families("".join(texts))
        for label in axis.get_ticklabels():
            label.set(family=known, fontsize="small")
    if key_tokens is not None and max(map(len, map(str, key_tokens)), default=0) > 2:
        ax.tick_params(axis="x", rotation=90)  # two characters fit above a cell as they are
    ax.set_ylabel("query")
    ax.set_xlabel("key")
