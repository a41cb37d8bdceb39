"""An SVG badge: the share of MUST variants that passed."""

from __future__ import annotations

from html import escape
from typing import Any


def render(data: dict[str, Any]) -> str:
    """The badge as SVG text.

    Args:
        data: A recorded run.
    """
    tested = [r for r in data["results"] if r["verdict"] != "skip"]
    good = sum(r["verdict"] in {"pass", "warn"} for r in tested)
    label, value = "tool-call protocol", f"{good}/{len(tested)}"
    colour = "#2f855a" if good == len(tested) and tested else "#c53030"
    left, right = 6 * len(label) + 16, 7 * len(value) + 16
    text = 'fill="#fff" font-family="Verdana,sans-serif" font-size="11" text-anchor="middle"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + right}" height="20" role="img" '
        f'aria-label="{escape(label)}: {value}">'
        f'<rect width="{left}" height="20" fill="#444"/>'
        f'<rect x="{left}" width="{right}" height="20" fill="{colour}"/>'
        f'<text x="{left / 2}" y="14" {text}>{escape(label)}</text>'
        f'<text x="{left + right / 2}" y="14" {text}>{value}</text></svg>\n'
    )
