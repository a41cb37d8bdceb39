"""Cells of README's tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Row = dict[str, Any]
#: Gives the rows of one results file, none if it is absent.
Read = Callable[[str], list[Row]]


def spread(value: Row, digits: int = 2) -> str:
    """A median with its spread."""
    return f"{value['median']:.{digits}f} ({value['p10']:.{digits}f}-{value['p90']:.{digits}f})"


def met(text: str, is_met: bool) -> str:
    """A figure, bold where its target is met."""
    return f"**{text}**" if is_met else text


def taken(row: Row, first: Row) -> str:
    """At which commit a figure was taken, where a table's other figures are of another one."""
    return "" if row.get("commit") == first.get("commit") else f", at {row['commit']}"
