"""The profiles as a table for people: ``python -m parsers.profiles`` prints it as Markdown."""

from __future__ import annotations

import sys
from dataclasses import fields
from typing import Any

from parsers.policy import GatePolicy
from parsers.rules import PROFILES, Profile

__all__ = ["PROFILES", "Profile", "markdown"]


def markdown() -> str:
    """Return the table for the documentation: one row per rule, one column per profile."""
    names = list(PROFILES)
    lines = [
        f"| rule | what it decides | {' | '.join(names)} |",
        "|---|---|" + "---|" * len(names),
    ]
    for rule in fields(Profile):
        if rule.name in ("name", "gate"):
            continue
        cells = [_cell(getattr(PROFILES[name], rule.name)) for name in names]
        lines.append(f"| `{rule.name}` | {rule.metadata['meaning']} | {' | '.join(cells)} |")
    for rule in fields(GatePolicy):
        cells = [_cell(getattr(PROFILES[name].gate, rule.name)) for name in names]
        lines.append(f"| `gate.{rule.name}` | {rule.metadata['meaning']} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)


if __name__ == "__main__":
    sys.stdout.write(markdown())
