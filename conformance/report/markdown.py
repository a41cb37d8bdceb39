"""A Markdown summary, such as a CI job's summary page shows."""

from __future__ import annotations

from collections import Counter
from typing import Any

from conformance.report.record import bad_checks, by_check


def render(data: dict[str, Any]) -> str:
    """The report as Markdown.

    Args:
        data: A recorded run.
    """
    meta = data["meta"]
    out = [
        f"# Conformance of {meta.get('name') or meta['endpoint']}",
        "",
        f"Model `{meta['model']}`, suite {meta['suite']}, {meta['started']}.",
        "",
        "```",
        meta["command"],
        "```",
        "",
        "| area | pass | warn | fail | error | skip |",
        "|---|---|---|---|---|---|",
    ]
    areas: dict[str, Counter[str]] = {}
    for result in data["results"]:
        area = f"{result['protocol']} {result['case'].split('/')[0]}"
        areas.setdefault(area, Counter())[result["verdict"]] += 1
    for area, counts in sorted(areas.items()):
        cells = " | ".join(str(counts[v]) for v in ("pass", "warn", "fail", "error", "skip"))
        out.append(f"| {area} | {cells} |")
    failures = [r for r in data["results"] if r["verdict"] in {"fail", "error"}]
    if failures:
        out += ["", "| failed check | variants |", "|---|---|"]
        out += [f"| {check} | {number} |" for check, number in by_check(data)]
        out += ["", "## Failures", ""]
        for result in failures:
            out.append(f"- `{result['variant']}`: {result['why']} ({result['source']})")
            out += [
                f"  - {c['check']}: {_inline(c.get('message', ''))}" for c in bad_checks(result)
            ]
    if data["stale"]:
        out += ["", "## Stale expected failures", "", *(f"- {e}" for e in data["stale"])]
    return "\n".join(out) + "\n"


def _inline(text: str) -> str:
    return "`" + text.replace("`", "'").replace("\n", " ")[:300] + "`"
