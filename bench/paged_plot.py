"""Draws the rows of bench.paged: tokens per second by hit rate and by slots, measured and by formula.

    python -m bench.paged_plot          docs/paged-experts.png from bench/results

Left: one sequence at stated hit rates, a series for each model, format and number of slots; the lines
are the formula, from the resident step that the same run measured (of a model that is larger than the
GPU, the step in which every choice is in a slot). Right: the sweep over K, whose choices are drawn with
weights 1 / rank; the hit rate that the slots counted stands at each point.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import orjson
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from bench.rows import RESULTS, ROOT

Row = dict[str, Any]
PICTURE = ROOT / "docs" / "paged-experts.png"
#: What is drawn by default: a file for each series; others repeat single points under another question.
SERIES = ("qwen", "qwen-fp8", "sweep-qwen", "v4-flash-43l", "v4-flash-43l-80gb")


def sources() -> list[Path]:
    """Files of rows that are there."""
    paths = [RESULTS / f"gpu-paged-{name}.jsonl" for name in SERIES]
    return [path for path in paths if path.exists()]


def read(paths: list[Path]) -> list[Row]:
    """Rows of decode steps of one sequence over paged experts, without prefetch."""
    rows = [orjson.loads(line) for path in paths for line in path.read_bytes().splitlines()]
    return [
        row
        for row in rows
        if (row["bench"], row["mode"], row.get("batch")) == ("paged", "paged", 1)
        and "prefetch_accuracy" not in row
    ]


def name(row: Row) -> str:
    """What a series is of."""
    form = " FP8" if row["experts"] == "fp8" else ""
    budget = f", {row['gpu_budget_gb']} GB GPU" if row.get("gpu_budget_gb") else ""
    return f"{row['geometry']}{form}, {row['paged_layers']} layers of {row['slots']} slots{budget}"


def by_hit_rate(axes: Axes, rows: list[Row]) -> None:
    """Draw tokens per second over the hit rate."""
    series = defaultdict(list)
    for row in rows:
        if row["trace"].startswith("reuse"):
            series[name(row)].append(row)
    curves = [(label, points) for label, points in sorted(series.items()) if len(points) > 1]
    for number, (label, points) in enumerate(curves):
        colour = f"C{number}"
        points.sort(key=lambda row: row["hit_rate"])
        h, rate = ([row[field] for row in points] for field in ("hit_rate", "tok_s"))
        axes.plot(h, rate, "o", color=colour, label=label)
        worst = points[0]
        if worst["hit_rate"] < 1:
            resident = worst["resident_ms"] or worst["full_hit_ms"]
            slope = (worst["formula_ms"] - resident) / (1 - worst["hit_rate"])
            line = np.linspace(min(h), 1, 200)
            axes.plot(line, 1e3 / (resident + (1 - line) * slope), "-", color=colour, lw=1)
    axes.set_xlabel("hit rate, counted by the slots")
    axes.set_ylabel("tokens per second, one sequence")
    axes.set_yscale("log")
    axes.legend(fontsize="small", title="points measured, lines formula", loc="lower right")


def by_slots(axes: Axes, rows: list[Row]) -> None:
    """Draw tokens per second over K, with the formula at the hit rate of each point."""
    points = sorted(
        (row for row in rows if row["trace"] == "zipf" and row["geometry"].startswith("qwen")),
        key=lambda row: row["slots"],
    )
    slots = [row["slots"] for row in points]
    axes.plot(slots, [row["tok_s"] for row in points], "o", color="C0", label="measured")
    formula = [1e3 / row["formula_ms"] for row in points]
    axes.plot(slots, formula, "-", color="C0", lw=1, label="formula at the counted hit rate")
    for row in points:
        at = row["slots"], row["tok_s"]
        axes.annotate(f"h {row['hit_rate']:.3f}", at, (4, -12), textcoords="offset points")
    axes.margins(x=0.12)
    axes.set_xlabel("slots K of 128 experts a layer, qwen3-30b-a3b")
    axes.set_ylabel("tokens per second, one sequence")
    axes.legend(fontsize="small", title="choices drawn with weights 1 / rank")


def draw(paths: list[Path], to: Path) -> None:
    """Draw files of rows.

    Args:
        paths: of the files.
        to: PNG to write.
    """
    mpl.use("Agg")
    rows = read(paths)
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.8), layout="constrained")
    by_hit_rate(left, rows)
    by_slots(right, rows)
    figure.savefig(to, dpi=110)
    plt.close(figure)
    print(f"wrote {to} of {len(rows)} rows")


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", type=Path, nargs="*", help="files of rows")
    parser.add_argument("--out", type=Path, default=PICTURE, help="PNG to write")
    args = parser.parse_args()
    draw(args.rows or sources(), args.out)


if __name__ == "__main__":
    main()
