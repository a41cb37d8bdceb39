"""Writes the figures of README and model card from bench/results: `python -m bench.readme`.

`--check` only compares; a test calls it so.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

import orjson

from bench.rows import RESULTS, ROOT

BEGIN = "<!-- figures: begin (python -m bench.readme) -->\n"
END = "<!-- figures: end -->"
Row = dict[str, Any]
#: metric, what it counts, and issue 2's target for held-out words
SKILL = (
    ("well_formed", "well-formed DSML", 0.995),
    ("decision", "call or no call", 0.97),
    ("tool", "right tool", 0.95),
    ("arguments", "exactly right arguments", 0.90),
    ("final_answer", "right final answer", 0.95),
)


def read(name: str) -> list[Row]:
    """Rows of one results file, none if it is absent."""
    path = RESULTS / f"{name}.jsonl"
    return [orjson.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []


def source(row: Row) -> str:
    """Where a row comes from, for the line under a table."""
    v, d = row["versions"], row["device"]
    return (
        f"`{row['command']}`, commit {row['commit']}, {row['date']}, {d['cpu']}, {d['cores']} cores, "
        f"Python {v['python']}, torch {v['torch']}"
    )


def skill() -> str:
    """Held-out skill of the shipped checkpoint, one column per evaluation seed."""
    rows = [r for r in read("skill-tiny") if r["set"] != "demo"]
    if not rows:
        return ""
    columns = sorted({(r["set"], r["seed"]) for r in rows})
    names = [
        f"{name.replace('_', ' ').replace('held out', 'held-out')}, seed {seed}"
        for name, seed in columns
    ]
    lines = [
        "Tool calling of bathyal-tiny: greedy, unconstrained (95 % interval). Held-out: on tool, "
        "parameter and value words it has never seen. In distribution: on words it was trained with, "
        "but with kinds of request that the generator learnt only after the last training run.",
        "",
        "| | target | " + " | ".join(names) + " |",
        "|---|---|" + "---|" * len(columns),
    ]
    for metric, label, target in SKILL:
        cells = []
        for column in columns:
            r = next(r for r in rows if r["metric"] == metric and (r["set"], r["seed"]) == column)
            low, high = 100 * r["low"], 100 * r["high"]
            cells.append(f"{100 * r['rate']:.1f} % ({low:.1f}-{high:.1f}, n={r['total']})")
        lines.append(f"| {label} | {100 * target:.1f} % | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", source(rows[0]) + ".", ""])


def decode() -> str:
    """Speed of the shipped checkpoint on a CPU."""
    rows = [r for r in read("decode-bathyal-tiny-cpu") if r["bench"] in ("ttft", "decode")]
    if not rows:
        return ""
    lines = [
        "Speed of bathyal-tiny on a CPU, median (p10-p90):",
        "",
        "| | streams | prompt tokens | |",
        "|---|---|---|---|",
    ]
    for r in rows:
        if r["bench"] == "ttft":
            s, label, unit = r["ttft_ms"], "time to first token", "ms"
        else:
            s, label, unit = r["tok_s"], "decode", "tokens/s"
        figure = f"{s['median']:.0f} ({s['p10']:.0f}-{s['p90']:.0f}) {unit}"
        lines.append(f"| {label} | {r['batch']} | {r['prompt_tokens']} | {figure} |")
    return "\n".join([*lines, "", source(rows[0]) + ".", ""])


PAGES: dict[str, tuple[Callable[[], str], ...]] = {
    "README.md": (skill, decode),
    "engine/checkpoints/tiny/README.md": (skill,),
}


def rewritten(page: str) -> tuple[str, str]:
    """(text of a page, the same with today's figures between its markers)."""
    text = (ROOT / page).read_text()
    head, rest = text.split(BEGIN)
    _, tail = rest.split(END)
    figures = "\n".join(filter(None, (part() for part in PAGES[page])))
    return text, head + BEGIN + figures + END + tail


def main() -> None:
    """Rewrite the part between the markers of each page, or say that one is stale."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="exit 1 where a page is stale")
    args = parser.parse_args()
    for page in PAGES:
        text, fresh = rewritten(page)
        if args.check and fresh != text:
            sys.exit(f"{page}: figures are stale: python -m bench.readme")
        if fresh != text:
            (ROOT / page).write_text(fresh)


if __name__ == "__main__":
    main()
