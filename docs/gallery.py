"""Draws the pictures of docs/gallery.md, all of them, in about a minute.

    python docs/gallery.py                     into docs/gallery/
    python docs/gallery.py --steps 5 --to DIR  the attention of a model that has hardly learned

Needs matplotlib, and for the Chinese characters any font that has them: an installed one or that of `pip
install matplotlib-fontja`. On one machine with one version of each library the files are always the same.
"""

import argparse
import importlib.util
import sys
from datetime import date
from pathlib import Path

import torch
from matplotlib.figure import Figure

import attn_ext
from attn_ext import masks, viz

ROOT = Path(__file__).resolve().parents[1]
LENGTH = 2048  # of the masks: 32 x 32 blocks


def attention(steps: int) -> dict[str, Figure]:
    """Where the decoder of examples/translate_dates.py looks, after training it."""
    sys.path.insert(0, str(ROOT / "examples"))
    import translate_dates as dates
    from training import fit

    args = argparse.Namespace(
        width=64,
        heads=2,
        depth=2,
        dropout=0.0,
        steps=steps,
        lr=2e-3,
        threads=1,
        device=torch.device("cpu"),
        amp=None,
    )
    torch.manual_seed(0)
    model = dates.Translator(args)
    fit(model, dates.batches(64, 0), args)

    source = dates.written(date(2021, 3, 14), "{year}年{m}月{d}日")
    (target,) = dates.translate(model, [source], args)
    maps = viz.capture_attention(model, dates.encode([source]), dates.shifted(dates.encode([target])))
    crossing = {
        f"layer {n}": maps[f"transformer.decoder.layers.{n}.multihead_attn"] for n in range(args.depth)
    }
    last = crossing["layer 1"].weights()[0].mean(0)
    return {
        "attention": viz.plot_attention(last, list(target), list(source), title=f"{source} → {target}"),
        "heads": viz.plot_attention(crossing, list(target), list(source)),
    }


def patterns() -> dict[str, Figure]:
    made = {
        "sliding_window": masks.sliding_window(LENGTH, 255, 0),
        "sparse_transformer_strided": masks.sparse_transformer_strided(LENGTH, 256),
        "sparse_transformer_fixed": masks.sparse_transformer_fixed(LENGTH, 256, 32),
        "longformer": masks.longformer(LENGTH, 512, global_tokens=[0, 1000]),
        "big_bird": masks.big_bird(LENGTH),
        "documents": masks.documents([700, 100, 448, 800]),
        "prefix_lm": masks.prefix_lm(LENGTH, 600),
        "longformer_causal": masks.longformer(LENGTH, 512, global_tokens=[0, 1000]) & masks.causal(LENGTH),
    }
    return {name: mask.plot() for name, mask in made.items()}


def short_masks() -> dict[str, Figure]:
    tokens = [*"你好世界", "hello", "world", "!"]
    mask = masks.documents([4, 3], causal=True)
    return {"tokens": viz.plot_mask(mask, tokens, title="two documents, causal")}


def positions() -> dict[str, Figure]:
    encoding = attn_ext.SinusoidalPositionalEncoding(64)(torch.zeros(100, 1, 64))[:, 0]
    distance = torch.arange(64) - 63.0
    alibi = attn_ext.alibi_slopes(4)[:, None, None] * distance
    return {
        "sinusoidal": viz.plot_positions(encoding, title="SinusoidalPositionalEncoding(64)"),
        "alibi": viz.plot_positions(alibi, title="alibi_slopes(4)"),
    }


def add_font() -> None:
    """Makes matplotlib-fontja's font known; not by importing it, which would draw everything in that font."""
    from matplotlib import font_manager

    package = importlib.util.find_spec("matplotlib_fontja")
    for folder in package.submodule_search_locations if package else ():
        for path in sorted(Path(folder).rglob("*.ttf")):
            font_manager.fontManager.addfont(str(path))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=800, help="of the training")
    parser.add_argument("--to", type=Path, default=ROOT / "docs" / "gallery", help="folder for the files")
    args = parser.parse_args()
    add_font()
    args.to.mkdir(parents=True, exist_ok=True)
    figures = {**patterns(), **short_masks(), **positions(), **attention(args.steps)}
    for name, figure in figures.items():
        path = args.to / f"{name}.png"
        figure.savefig(path, dpi=110, metadata={"Software": None})  # the version would change the file
        print(f"{path.name:<36}{path.stat().st_size / 1024:>6.1f} KiB")


if __name__ == "__main__":
    main()
