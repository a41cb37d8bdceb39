"""The expected-failures file: known faults do not fail a run, forgotten entries do.

A line is `PATTERN CHECK  # reason`: PATTERN matches variant ids with `*`, CHECK a slug or `*`.
An entry whose variants ran and which matched no failure is stale and fails the run, so that the
file cannot outlive the faults it lists.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from conformance.model import Outcome, Result, Verdict


class BaselineError(ValueError):
    """A line that cannot be read; the message names file and line."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the file."""

    pattern: str
    check: str
    reason: str
    line: int

    def covers(self, variant: str) -> bool:
        """Says whether the entry speaks of this variant id."""
        return re.fullmatch(re.escape(self.pattern).replace(r"\*", ".*"), variant) is not None

    def matches(self, outcome: Outcome) -> bool:
        """Says whether the entry announces this outcome."""
        return self.check in {"*", outcome.check} and self.covers(outcome.variant)


def read(path: Path) -> list[Entry]:
    """Reads an expected-failures file.

    Raises:
        BaselineError: For a line without check or without reason.
    """
    entries = []
    for number, raw in enumerate(path.read_text().splitlines(), 1):
        line, _, reason = raw.partition("#")
        if not line.strip():
            continue
        parts = line.split()
        if len(parts) != 2 or not reason.strip():
            raise BaselineError(f"{path}:{number}: expected 'PATTERN CHECK  # reason', got {raw!r}")
        entries.append(Entry(parts[0], parts[1], reason.strip(), number))
    return entries


def apply(entries: Iterable[Entry], results: list[Result]) -> list[Entry]:
    """Marks announced failures as expected, in place.

    Returns:
        Stale entries: a variant of theirs ran, and nothing they announce failed.
    """
    stale = []
    for entry in entries:
        ran = hit = False
        for result in results:
            if not entry.covers(result.variant.id):
                continue
            for number, outcome in enumerate(result.outcomes):
                # A skip is no evidence either way.
                ran = ran or outcome.verdict is not Verdict.SKIP
                if outcome.verdict in {Verdict.FAIL, Verdict.WARN} and entry.matches(outcome):
                    result.outcomes[number] = replace(outcome, expected=True)
                    hit = True
        if ran and not hit:
            stale.append(entry)
    return stale
