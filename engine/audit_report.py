"""The report of an audit, in a folder (engine.audit measures).

report.md with the tables, audit.json with every number, one SVG plot per figure.
"""

from __future__ import annotations

import html
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import orjson

#: Figures that every load has, and what they are called.
FIGURES = {
    "ttft_ms": "First token, ms",
    "itl_ms": "Between tokens, ms",
    "itl_p99_ms": "Between tokens, 99 of 100 are quicker, ms",
    "tok_s": "Tokens per second",
}
#: What is plotted or put into a table: case -> variant -> value.
Cases = dict[str, dict[str, float]]


def open_folder(folder: Path) -> None:
    """Make the folder of a report if it is absent, before the minutes that go into one.

    Raises:
        OSError: it cannot be made, or files cannot be made in it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass


def write_report(result: dict[str, Any], folder: Path) -> Path:
    """Write report.md, audit.json and the plots, over those of an earlier one; gives report.md.

    Args:
        result: from engine.audit.audit; perhaps not all of it yet, which the report says then.
        folder: from `open_folder`.
    """
    text = orjson.dumps(result, option=orjson.OPT_INDENT_2, default=str)  # paths
    (folder / "audit.json").write_bytes(text)
    repeats = result["load"]["repeats"]
    lines = [
        f"# Audit of {result['model']}",
        "",
        result["machine"],
        "",
    ]
    if result["missing"]:
        names = ", ".join(f"`{name}`" for name in result["missing"])
        lines += [f"**Cut: these were not measured to their end: {names}.**", ""]
    lines += [
        "Each variant is the engine as configured with one switch turned over. Cold: prompts seen for",
        f"the first time. Warm: the same prompts with a new end. Medians over {repeats} repeats.",
    ]
    rows = result["rows"]
    for figure, title in FIGURES.items():
        cases: Cases = {}
        for row in rows:
            case = f"{row['prompt_tokens']} tokens x {row['batch']}, {row['kind']}"
            cases.setdefault(case, {})[row["variant"]] = row[figure]
        lines += _section(title, figure, cases, folder)
    memory: Cases = {"peak MB": {}, "loaded in s": {}}
    for row in rows:
        own = memory["peak MB"]
        own[row["variant"]] = max(own.get(row["variant"], 0.0), row["peak_mb"])
        memory["loaded in s"][row["variant"]] = row["load_s"]
    lines += _section("Memory and load time", "memory", memory, folder)
    differences: Cases = {
        f"{of}, {label}": {name: found[of][key] for name, found in result["logprobs"].items()}
        for of in ("prompt", "reply")
        for label, key in (("mean", "mean"), ("largest", "max"))
    }
    lines += _section("Log-probabilities", "logprobs", differences, folder)
    lines += [
        "",
        "Differences from the engine as configured. Prompt: of random prompts, whose rows are all computed",
        "for it, whatever `prefill` says. Reply: of tokens that are told, after such a prompt as it is",
        "processed in service.",
    ]
    for name, why in result["skipped"].items():
        lines += ["", f"`{name}`: {why}"]
    if result["left_out"]:
        lines += ["", "## Not compared here", ""]
        lines += [f"- {switch}, because {why}" for switch, why in result["left_out"].items()]
    lines += ["", "## As configured", ""]
    lines += [f"- `{line}`" for line in result["configured"]]
    report = folder / "report.md"
    report.write_text("\n".join(lines) + "\n")
    return report


def _section(title: str, name: str, cases: Cases, folder: Path) -> list[str]:
    """A heading, a plot in a file of its own, and a table."""
    plot = folder / f"{name}.svg"
    plot.write_text(_bars(title, cases))
    return ["", f"## {title}", "", f"![{title}]({plot.name})", "", *_table(cases)]


def _variants(cases: Cases) -> Iterable[str]:
    return dict.fromkeys(name for case in cases.values() for name in case)


def _shown(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _table(cases: Cases) -> list[str]:
    lines = [f"| variant | {' | '.join(cases)} |", "|---" * (len(cases) + 1) + "|"]
    for name in _variants(cases):
        cells = [_shown(case.get(name)) for case in cases.values()]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def _bars(title: str, cases: Cases) -> str:
    """Horizontal bars, a group for each case and a bar for each variant, each group to its own scale."""
    parts, y = [], 30
    for label, case in cases.items():
        most = max(case.values(), default=0.0) or 1.0
        parts.append(f'<text x="8" y="{y + 12}" font-weight="bold">{html.escape(label)}</text>')
        y += 20
        for number, (name, value) in enumerate(case.items()):
            width, shade = 380 * value / most, 210 - 24 * (number % 6)
            parts += [
                f'<text x="190" y="{y + 12}" text-anchor="end">{html.escape(name)}</text>',
                f'<rect x="196" y="{y + 2}" width="{width:.1f}" height="12" fill="hsl({shade},55%,50%)"/>',
                f'<text x="{202 + width:.1f}" y="{y + 12}">{_shown(value)}</text>',
            ]
            y += 17
        y += 8
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="660" height="{y}" font-family="sans-serif" '
        f'font-size="11"><text x="8" y="18" font-size="14">{html.escape(title)}</text>{"".join(parts)}</svg>\n'
    )
