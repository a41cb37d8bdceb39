"""Writes the figures of README and model card from bench/results: `python -m bench.readme`.

`--check` only compares; a test calls it so.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

import orjson

from bench.readme_gpu import gpu
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

#: mode, what it is, and issue 3's target
GATEWAY = (
    ("stream-prose", "a frame a token, no tools", "1.3x"),
    ("stream-call", "a frame a token, arguments", "1.3x"),
    ("stream-prose8", "8 tokens a step, no tools", "10 us"),
    ("stream-call8", "8 tokens a step, arguments", "10 us"),
    ("whole-16-at-once", "whole replies, 16 at once", "0.7x"),
    ("whole-serial", "whole replies, one by one", "+1.5 ms"),
)
#: figure, its unit, and where its relation to the bare codec's stands
FIGURES = (
    ("cpu_us_per_token", "us CPU a token", "cpu_ratio"),
    ("requests_per_s", "requests/s", "rate_ratio"),
    ("latency_ms", "ms", "added_latency_ms"),
)


def read(name: str) -> list[Row]:
    """Rows of one results file, none if it is absent."""
    path = RESULTS / f"{name}.jsonl"
    return [orjson.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []


def source(row: Row) -> str:
    """Where a row comes from, for the line under a table."""
    v, d = row["versions"], row["device"]
    where = f"{d['gpu']}, triton {v['triton']}" if "gpu" in d else f"{d['cpu']}, {d['cores']} cores"
    return (
        f"`{row['command']}`, commit {row['commit']}, {row['date']}, {where}, "
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


def gateway() -> str:
    """What the gateway costs, beside a minimal server around the bare codec and two other gateways."""
    rows = {row["mode"]: row for row in read("gateway")}
    if not rows:
        return ""
    lines = [
        "The gateway over played tokens, one core, median (p10-p90); CPU is the server process's own. "
        "Beside it a minimal server around the bare codec; LiteLLM and smg only pass on what our server "
        "says.",
        "",
        "| | target | bathyal | bare codec | to it | LiteLLM | smg |",
        "|---|---|---|---|---|---|---|",
    ]
    for mode, label, target in GATEWAY:
        row = rows[mode]
        other = [rows.get(f"{name}-{mode}", {}) for name in ("litellm", "smg")]
        for figure, unit, ratio in FIGURES:
            if figure in row:
                cells = [_figure(row, figure), _figure(row, f"bare_{figure}"), _figure(row, ratio)]
                cells += [_figure(one, figure) for one in other]
                lines.append(f"| {label}, {unit} | {target} | " + " | ".join(cells) + " |")
    rate, held = rows["short-streams"]["streams_per_s"], rows["open-streams"]
    lines += [
        f"| short streams a second | 300 | {_spread(rate)} | - | - | - | - |",
        f"| KiB a stream, {held['streams']} open | | {held['kib_per_stream']['median']:.0f} | - | - | - | - |",
        "",
    ]
    source_ = rows["stream-prose"]
    lines.append(f"{source(source_)}, load average before {source_['load_average_before']}.")
    return "\n".join([*lines, "", *_proofs(), ""])


def _proofs() -> list[str]:
    """The longest callback of the event loop, the time per delta, and the fuzz, a line each."""
    found = []
    if loop := read("gateway-loop"):
        longest = max(loop, key=lambda row: row["longest_cpu_ms"])
        found.append(
            f"Longest callback on the event loop over {len(loop)} of the largest requests: "
            f"{longest['longest_cpu_ms']:.1f} ms of CPU ({longest['mode']}; target 5 ms)."
        )
    if deltas := {row["mode"]: row["us_per_delta"]["median"] for row in read("parsers-cpu")}:
        found.append(
            f"`Exchange.receive`, a delta: {deltas['plain']:.1f} us without tools (target 8), "
            f"{deltas['text']:.1f} us of text and {deltas['string']:.1f} us of arguments with tools and "
            f"gate (target 20); the codec alone {deltas['codec']:.1f} us."
        )
    if fuzz := read("fuzz-outputs"):
        (row,) = fuzz
        found.append(
            f"Fuzz: {row['cases']} outputs of {row['tokens'] / 1e6:.1f} million tokens, "
            f"{row['replies_a_case']} replies each, {len(row['failures'])} failures "
            f"(`{row['command']}`)."
        )
    return [line for one in found for line in (one, "")][:-1]


def _figure(row: Row, name: str) -> str:
    return _spread(row[name]) if name in row else "-"


def _spread(s: Row) -> str:
    digits = 0 if s["median"] >= 100 else 1 if s["median"] >= 10 else 2
    return f"{s['median']:.{digits}f} ({s['p10']:.{digits}f}-{s['p90']:.{digits}f})"


PAGES: dict[str, tuple[Callable[[], str], ...]] = {
    "README.md": (skill, decode, lambda: gpu(read, source), gateway),
    "engine/checkpoints/tiny/README.md": (skill,),
}


def rewritten(page: str) -> tuple[str, str]:
    """(text of a page, the same with today's figures between its markers)."""
    text = (ROOT / page).read_text()
    head, rest = text.split(BEGIN)
    _, tail = rest.split(END)
    figures = "\n".join(filter(None, (part() for part in PAGES[page])))
    return text, head + BEGIN + figures + END + tail


def rewrite() -> None:
    """Rewrite the part between the markers of each page."""
    for page in PAGES:
        text, fresh = rewritten(page)
        if fresh != text:
            (ROOT / page).write_text(fresh)


def main() -> None:
    """Rewrite the pages, or say that one is stale."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="exit 1 where a page is stale")
    args = parser.parse_args()
    if not args.check:
        rewrite()
        return
    for page in PAGES:
        text, fresh = rewritten(page)
        if fresh != text:
            sys.exit(f"{page}: figures are stale: python -m bench.readme")


if __name__ == "__main__":
    main()
