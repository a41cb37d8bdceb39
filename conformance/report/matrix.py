"""Several runs side by side as Markdown: small enough for a documentation page.

Areas (the first part of case ids) by endpoint, then what failed at each, check by check with one
example: the case, what came, and where the rule is from.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from conformance.report.record import bad_checks


def render(reports: Sequence[dict[str, Any]]) -> str:
    """The matrix.

    Args:
        reports: Recorded runs, in the order of the columns.

    Returns:
        Markdown, without a title.
    """
    names = [_name(report) for report in reports]
    out = ["| endpoint | command | variants |", "|---|---|---|"]
    for name, report in zip(names, reports, strict=True):
        counts = ", ".join(f"{n} {verdict}" for verdict, n in report["counts"].items() if n)
        out.append(f"| {name} | `{report['meta']['command']}` | {counts} |")
    out += ["", f"| area | {' | '.join(names)} |", "|---|" + "---|" * len(names)]
    tables = [_areas(report) for report in reports]
    for area in sorted({area for table in tables for area in table}):
        cells = [_cell(table.get(area, Counter())) for table in tables]
        out.append(f"| {area} | {' | '.join(cells)} |")
    for name, report in zip(names, reports, strict=True):
        out += ["", f"## {name}", "", *_failures(report)]
    return "\n".join(out) + "\n"


def _name(report: dict[str, Any]) -> str:
    return str(report["meta"].get("name") or report["meta"]["endpoint"])


def _areas(report: dict[str, Any]) -> dict[str, Counter[str]]:
    areas: dict[str, Counter[str]] = {}
    for result in report["results"]:
        areas.setdefault(result["case"].split("/")[0], Counter())[result["verdict"]] += 1
    return areas


def _cell(counts: Counter[str]) -> str:
    """Passed of tested (a warning is a missed SHOULD, and passed), then what failed."""
    tested = counts.total() - counts["skip"]
    if not tested:
        return "-" if not counts else "skipped"
    good = counts["pass"] + counts["warn"]
    return f"{good} of {tested}" if good == tested else f"**{good} of {tested}**"


def _failures(report: dict[str, Any]) -> Iterator[str]:
    found: dict[str, list[tuple[dict[str, Any], str]]] = {}
    for result in report["results"]:
        for one in bad_checks(result):
            if one["verdict"] in {"fail", "error"}:
                found.setdefault(one["check"], []).append((result, one.get("message", "")))
    if not found:
        yield "No failure."
        return
    yield "| check | variants | for example | what came | rule from |"
    yield "|---|---|---|---|---|"
    for check, places in sorted(found.items(), key=lambda item: (-len(item[1]), item[0])):
        result, message = places[0]
        cases = len({result["case"] for result, _ in places})
        yield (
            f"| {check} | {len(places)} in {cases} cases | `{result['variant']}` | "
            f"{_inline(message)} | {result['source']} |"
        )


def _inline(text: str) -> str:
    """Any text as code inside a table cell."""
    shown = text if len(text) <= 160 else text[:157] + "..."
    clean = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in shown)
    return "`" + clean.replace("`", "'").replace("|", "\\|") + "`"
