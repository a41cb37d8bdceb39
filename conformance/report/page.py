"""One HTML file: a case x endpoint matrix, and the raw exchange of every failure.

No script and no outside file; details fold. Several reports side by side give a column each.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape
from typing import Any

from conformance.report.record import bad_checks

STYLE = """
body{font:14px/1.45 system-ui,sans-serif;margin:2rem auto;max-width:76rem;padding:0 1rem;color:#222}
table{border-collapse:collapse;width:100%}th,td{border:1px solid #ddd;padding:.2rem .5rem;
text-align:left;vertical-align:top}thead th{background:#f4f4f4;position:sticky;top:0}
pre{background:#f7f7f7;overflow:auto;padding:.6rem;max-height:30rem;white-space:pre-wrap;
word-break:break-all}.pass{background:#e6f4ea}.warn{background:#fff6d6}.fail{background:#fde4e1}
.error{background:#ead6f5}.skip{background:#eee;color:#666}.why{color:#555}
"""
ORDER = ("error", "fail", "warn", "pass", "skip")


def render(reports: Sequence[dict[str, Any]]) -> str:
    """The page as HTML text.

    Args:
        reports: Recorded runs, a column each.
    """
    names = [r["meta"].get("name") or r["meta"]["endpoint"] for r in reports]
    cells: dict[str, list[list[dict[str, Any]]]] = {}
    for column, report in enumerate(reports):
        for result in report["results"]:
            row = cells.setdefault(result["case"], [[] for _ in reports])
            row[column].append(result)
    out = [
        "<!doctype html><html lang=en><meta charset=utf-8>",
        "<title>Tool-call protocol conformance</title>",
        f"<style>{STYLE}</style><h1>Tool-call protocol conformance</h1>",
        "<table><thead><tr><th>endpoint<th>model<th>suite<th>command<th>result</thead><tbody>",
    ]
    for name, report in zip(names, reports, strict=True):
        meta, counts = report["meta"], report["counts"]
        result = ", ".join(f"{counts[v]} {v}" for v in ORDER if counts[v])
        out.append(
            f"<tr><td>{escape(name)}<td>{escape(meta['model'])}<td>{escape(meta['suite'])}"
            f"<td><code>{escape(meta['command'])}</code><td>{result}"
        )
    heads = "".join(f"<th>{escape(name)}" for name in names)
    out.append(f"</tbody></table><h2>Cases</h2><table><thead><tr><th>case{heads}</thead><tbody>")
    for case, row in sorted(cells.items()):
        why = next(r["why"] for column in row for r in column)
        source = next(r["source"] for column in row for r in column)
        out.append(
            f"<tr><td><code>{escape(case)}</code><div class=why>{escape(why)} "
            f"[{escape(source)}]</div>"
        )
        out += [_cell(column) for column in row]
    out.append("</tbody></table></html>\n")
    return "\n".join(out)


def _cell(results: list[dict[str, Any]]) -> str:
    if not results:
        return "<td class=skip>not run"
    worst = min((r["verdict"] for r in results), key=ORDER.index)
    if all(r["verdict"] in {"pass", "skip"} for r in results):
        worst = "pass" if any(r["verdict"] == "pass" for r in results) else "skip"
    counts = ", ".join(f"{n} {v}" for v in ORDER if (n := sum(r["verdict"] == v for r in results)))
    details = "".join(_detail(r) for r in results if r["verdict"] not in {"pass", "skip"})
    return f"<td class={worst}>{counts}{details}"


def _detail(result: dict[str, Any]) -> str:
    findings = "".join(
        f"<li>{escape(c['verdict'])} <code>{escape(c['check'])}</code>: "
        f"{escape(c.get('message', ''))}"
        for c in bad_checks(result)
    )
    raw = ""
    exchange = result.get("exchange")
    if exchange:
        sent = _show(exchange["request_base64"])
        reply = "".join(_show(piece) for _, piece in exchange["reads"])
        raw = (
            f"<pre>{escape(exchange['curl'])}</pre><pre>{escape(sent)}</pre>"
            f"<pre>HTTP {exchange['status']}\n\n{escape(reply)}</pre>"
        )
    name = result["variant"].removeprefix(result["case"])
    return f"<details><summary>{escape(name)}</summary><ul>{findings}</ul>{raw}</details>"


def _show(text: str) -> str:
    return base64.b64decode(text).decode(errors="backslashreplace")
