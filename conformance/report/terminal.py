"""The report a person sees: progress while it runs, then what is wrong and how to repeat it."""

from __future__ import annotations

import sys
from typing import Any, TextIO

from conformance.model import Result, Verdict
from conformance.report.record import bad_checks, by_check

MARKS = {
    Verdict.PASS: ".",
    Verdict.WARN: "w",
    Verdict.FAIL: "F",
    Verdict.ERROR: "E",
    Verdict.SKIP: "s",
}


class Progress:
    """One character per variant on a terminal, nothing elsewhere.

    Args:
        total: Number of variants.
        out: Where to write; progress goes to stderr so that stdout stays a report.
    """

    def __init__(self, total: int, out: TextIO = sys.stderr) -> None:
        self.total = total
        self.done = 0
        self.bad = 0
        self._out = out if out.isatty() else None

    def __call__(self, result: Result) -> None:
        """Takes one finished variant."""
        self.done += 1
        self.bad += result.verdict in {Verdict.FAIL, Verdict.ERROR}
        if self._out is not None:
            end = "\n" if self.done == self.total else ""
            self._out.write(f"\r{self.done}/{self.total} variants, {self.bad} failed{end}")
            self._out.flush()


def lines(data: dict[str, Any], *, verbose: bool = False, limit: int = 40) -> list[str]:
    """The report as lines.

    Args:
        data: A recorded run.
        verbose: Also print warnings in full.
        limit: Most failures to print.
    """
    out: list[str] = []
    shown = hidden = 0
    for result in data["results"]:
        bad = [c for c in bad_checks(result) if verbose or c["verdict"] != "warn"]
        if not bad:
            continue
        if shown >= limit:
            hidden += 1
            continue
        shown += 1
        out.append(f"{result['verdict'].upper():5} {result['variant']}")
        out.append(f"      {result['why']}  [{result['source']}]")
        for check in bad:
            repeats = check.get("repeats")
            often = f" ({repeats['passed']} of {repeats['runs']} runs passed)" if repeats else ""
            out.append(
                f"      {check['verdict']} {check['check']}{often}: {check.get('message', '')}"
            )
        if "exchange" in result:
            out.append(f"      {result['exchange']['curl']}")
    if hidden:
        out.append(f"… and {hidden} more; the JSON, HTML and JUnit reports have them all")
    out += [
        f"STALE expected-failures {entry}: nothing of the kind fails any more"
        for entry in data["stale"]
    ]
    counted = by_check(data)
    if len(counted) > 1 or hidden:
        out.append("failed checks: " + ", ".join(f"{check} {n}" for check, n in counted))
    arrived, wanted = data["meta"].get("scripts_played", (0, 0))
    if wanted >= 3 and arrived * 10 < wanted:
        out.append(
            f"NOTE: {arrived} of {wanted} prescribed answers arrived; this endpoint seems not to "
            "play the scripts. Give them to it (bathyal-conform scripts), play them from behind "
            "it (--upstream PORT), or test it as it is (--tier live)."
        )
    out.append(summary(data))
    return out


def summary(data: dict[str, Any]) -> str:
    """One line of counts."""
    counts = data["counts"]
    parts = [
        f"{counts[v.value]} {v.value}" for v in Verdict if counts[v.value] or v.value == "pass"
    ]
    cases = len({result["case"] for result in data["results"]})
    return (
        f"{cases} cases, {len(data['results'])} variants: {', '.join(parts)} "
        f"in {data['elapsed_s']:.1f} s"
    )
