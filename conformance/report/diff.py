"""What became worse between two runs, and what became better."""

from __future__ import annotations

from typing import Any

RANK = {"pass": 0, "warn": 1, "fail": 2, "error": 3}


def compare(before: dict[str, Any], after: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Compares two recorded runs check by check.

    A check that was not judged in both runs (skipped, new, gone) is neither; a variant that
    passed and is now missing from the run is a regression, since nothing vouches for it any more.

    Returns:
        (regressions, improvements), each a line.
    """
    old, new = _verdicts(before), _verdicts(after)
    worse, better = [], []
    for key, (verdict, message) in new.items():
        if key not in old or verdict not in RANK or old[key][0] not in RANK:
            continue
        change = RANK[verdict] - RANK[old[key][0]]
        line = f"{key[0]} {key[1]}: {old[key][0]} -> {verdict}"
        if change > 0:
            worse.append(f"{line}: {message}" if message else line)
        elif change < 0:
            better.append(line)
    ran = {result["variant"] for result in after["results"]}
    worse += [
        f"{result['variant']}: {result['verdict']} -> not run"
        for result in before["results"]
        if result["verdict"] in {"pass", "warn"} and result["variant"] not in ran
    ]
    return sorted(worse), sorted(better)


def _verdicts(report: dict[str, Any]) -> dict[tuple[str, str], tuple[str, str]]:
    return {
        (result["variant"], check["check"]): (check["verdict"], check.get("message", ""))
        for result in report["results"]
        for check in result["checks"]
    }
