"""What the gate did to a reply, as data: for the reply itself, for counters, for a log.

Nothing here is an error of the server: a model wrote something, a named rule dealt with it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from parsers.dialects import quote

LONGEST_RAW = 2000
"""Characters of model text that a report repeats, per entry."""


@dataclass(frozen=True, slots=True)
class Withheld:
    """A call that was not delivered.

    Args:
        name: the tool it named, None where none could be read.
        reason: the rule, such as ``undeclared_tool``.
        raw: what the model wrote, markers made harmless, cut at ``LONGEST_RAW``.
    """

    name: str | None
    reason: str
    raw: str


@dataclass(frozen=True, slots=True)
class Repaired:
    """A call that was delivered otherwise than written.

    Args:
        name: the tool.
        rule: what was mended, such as ``broken_json``.
        parameter: where, None for the call as a whole.
    """

    name: str
    rule: str
    parameter: str | None = None


@dataclass(slots=True)
class Report:
    """All that is to be told about one reply.

    Attributes:
        calls: calls delivered.
        withheld: calls not delivered, in order.
        repaired: mended calls, in order.
        flagged: names of undeclared tools whose calls were passed on.
        lost_text: text the codec has no place for (after the calls), cut at ``LONGEST_RAW``.
        lost_chars: its whole length.
        quoted_markers: markers that were shown as text.
        unmet: a demand the reply did not meet, such as ``tool_choice``.
        violations: (tool, what is wrong) of delivered calls that break their schema; the tool is
            None for an answer that breaks the schema it was to have.
    """

    calls: int = 0
    withheld: list[Withheld] = field(default_factory=list)
    repaired: list[Repaired] = field(default_factory=list)
    flagged: list[str] = field(default_factory=list)
    lost_text: str = ""
    lost_chars: int = 0
    quoted_markers: int = 0
    unmet: str | None = None
    violations: list[tuple[str | None, str]] = field(default_factory=list)

    def lose(self, text: str) -> None:
        """Note text that cannot be delivered."""
        self.lost_chars += len(text)
        self.lost_text += text[: LONGEST_RAW - len(self.lost_text)]

    def extension(self) -> dict[str, Any] | None:
        """Return the reply's extension field ``bathyal``; None where there is nothing to tell."""
        out: dict[str, Any] = {}
        if self.withheld:
            out["withheld_calls"] = [
                {"name": w.name, "reason": w.reason, "raw": w.raw} for w in self.withheld
            ]
        if self.repaired:
            out["repaired_calls"] = [
                {"name": r.name, "rule": r.rule, "parameter": r.parameter} for r in self.repaired
            ]
        if self.flagged:
            out["undeclared_calls"] = list(self.flagged)
        if self.lost_text.strip():
            out["lost_text"] = quote(self.lost_text)  # joined pieces may spell a marker anew
            out["lost_chars"] = self.lost_chars
        if self.quoted_markers:
            out["quoted_markers"] = self.quoted_markers
        if self.violations:
            out["schema_violations"] = [
                {"name": name, "message": message} for name, message in self.violations
            ]
        if self.unmet:
            out["unmet"] = self.unmet
        return out or None
