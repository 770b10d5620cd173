"""What cpu_bench.py measured, as tables in Markdown and as pictures of GFLOP/s and time over N.

    python benchmarks/cpu_bench.py --json times.json
    python benchmarks/cpu_report.py times.json docs/benchmarks/cpu_native

prints the tables and writes docs/benchmarks/cpu_native_full.png and ..._causal.png. Needs matplotlib.
"""

import argparse
import json
import math
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib.axes import Axes
from matplotlib.figure import Figure

COLORS = {64: "#1f77b4", 128: "#d62728"}  # by head dim
WIDTH, HEIGHT = 3.6, 2.7  # inches of a panel


def draw(axes: Axes, rows: list[dict], field: str) -> None:
    """One panel: a line for each head dim, solid for ours and dashed for torch's."""
    for head_dim in sorted({row["head_dim"] for row in rows}):
        line = sorted((r for r in rows if r["head_dim"] == head_dim), key=lambda r: r["keys"])
        lengths, color = [r["keys"] for r in line], COLORS.get(head_dim)
        for side, name, style in ((0, "attn_ext", "-o"), (1, "torch", "--s")):
            values = [r[field][side] for r in line]
            axes.plot(lengths, values, style, color=color, markersize=3, label=f"{name}, D {head_dim}")
    if field == "rates":
        limits = [row["limit"] for row in rows if not math.isnan(row["limit"])]
        if limits:
            axes.axhspan(min(limits), max(limits), color="gray", alpha=0.3, label="float32 FMA limit")
        axes.set_ylim(bottom=0)
    else:
        axes.set_yscale("log")
    axes.set_xscale("log", base=2)
    lengths = sorted({row["keys"] for row in rows})
    axes.set_xticks(lengths, map(str, lengths))
    axes.grid(alpha=0.3)


def figure(results: dict, kind: str) -> Figure | None:
    """Columns: dtypes; rows: forward and backward, in GFLOP/s and in ms. None without such cases."""
    rows = [row for row in results["results"] if row["kind"] == kind]
    if not rows:
        return None
    dtypes = list(dict.fromkeys(row["dtype"] for row in rows))
    panels = [(d, f) for f in ("rates", "milliseconds") for d in ("forward", "backward")]
    size = (WIDTH * len(dtypes), HEIGHT * len(panels) + 0.8)
    found = Figure(figsize=size, layout="constrained")
    grid = found.subplots(len(panels), len(dtypes), squeeze=False, sharex=True)
    for i, (direction, field) in enumerate(panels):
        for j, dtype in enumerate(dtypes):
            here = [row for row in rows if row["dtype"] == dtype and row["direction"] == direction]
            draw(grid[i, j], here, field)
            grid[i, j].set_title(f"{dtype}, {direction}", fontsize=9)
        grid[i, 0].set_ylabel({"rates": "GFLOP/s", "milliseconds": "ms"}[field])
    for axes in grid[-1]:
        axes.set_xlabel("N")
    about = results["environment"]
    found.suptitle(
        f"{'causal' if kind == 'causal' else 'no mask'}, B 1, H 8, threads {about['threads']}\n"
        f"{about['cpu']}\n{about['isa']}; {about['versions']}; {about['date']}",
        fontsize=8,
    )
    grid[0, 0].legend(fontsize=7)
    return found


def cell(row: dict, digits: int = 0) -> str:
    """Our rate : torch's = ratio, and our share of the limit."""
    ours, theirs = row["rates"]
    share = row["percent_of_limit"][0]
    limit = "" if math.isnan(share) else f" ({share:.0f}%)"
    return f"{ours:.{digits}f} : {theirs:.{digits}f} = **{row['ratio']:.2f}**{limit}"


def table(rows: list[dict], kinds: dict[str, int], directions: tuple[str, ...]) -> list[str]:
    """Lines of Markdown: a row for each kind and size, a column for each dtype and direction.

    kinds: digits of its rates by kind.
    """
    rows = [row for row in rows if row["kind"] in kinds and row["function"] == "attn_ext"]
    found = {(r["kind"], r["keys"], r["head_dim"], r["dtype"], r["direction"]): r for r in rows}
    columns = [
        (dtype, direction)
        for dtype in dict.fromkeys(row["dtype"] for row in rows)
        for direction in directions
        if any(r["direction"] == direction for r in rows)
    ]
    lines = ["| | N, D | " + " | ".join(f"{dtype} {direction}" for dtype, direction in columns) + " |"]
    lines.append("|---|---|" + "---|" * len(columns))
    for kind, keys, head_dim in dict.fromkeys(key[:3] for key in found):
        cells = [found.get((kind, keys, head_dim, *column)) for column in columns]
        texts = [cell(row, kinds[kind]) if row else "" for row in cells]
        lines.append(f"| {kind} | {keys}, {head_dim} | " + " | ".join(texts) + " |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, help="what cpu_bench.py --json wrote")
    parser.add_argument("target", help="path and first part of the names of the pictures")
    args = parser.parse_args()
    results = json.loads(args.results.read_text())
    both = ("forward", "training", "backward")
    for kinds, directions in (
        (dict.fromkeys(("full", "causal", "window", "mask", "bias"), 0), both[::2]),
        (dict.fromkeys(("decode8", "decode32", "gqa"), 1), both[:1]),
        (dict.fromkeys(("small", "module", "weights"), 0), both),
    ):
        lines = table(results["results"], kinds, directions)
        if len(lines) > 2:
            print("\n".join(lines), end="\n\n")
    Path(args.target).parent.mkdir(parents=True, exist_ok=True)
    for kind in ("full", "causal"):
        found = figure(results, kind)
        if found is not None:
            path = f"{args.target}_{kind}.png"
            found.savefig(path, dpi=80)
            print(path)


if __name__ == "__main__":
    main()
