"""The JSON form of a run: what every other report, and `diff`, is made from.

report.schema.json describes it; `load` refuses anything else.
"""

from __future__ import annotations

import base64
from collections import Counter
from pathlib import Path
from typing import Any

import orjson
from jsonschema import Draft202012Validator

from conformance.client import Exchange
from conformance.model import Outcome, Result, Verdict
from conformance.repeats import pass_power, wilson
from conformance.runner import Run, verdict_of

SCHEMA = Path(__file__).with_name("report.schema.json")
FORMAT = "bathyal-conform/1"


class ReportError(ValueError):
    """A file that is no report of this format."""


def record(run: Run, *, key_env: str | None = None) -> dict[str, Any]:
    """Turns a run into plain data.

    Args:
        run: The run.
        key_env: Name of the variable with the API key, for the curl lines; the key itself is
            nowhere in a report.
    """
    return {
        "format": FORMAT,
        "meta": run.meta,
        "elapsed_s": round(run.elapsed_s, 3),
        "failed": run.failed,
        "counts": {verdict.value: number for verdict, number in run.counts().items()},
        "stale": [f"line {e.line}: {e.pattern} {e.check}" for e in run.stale],
        "results": [_result(result, key_env) for result in run.results],
    }


def _result(result: Result, key_env: str | None) -> dict[str, Any]:
    case = result.variant.case
    verdict = verdict_of(result)
    data: dict[str, Any] = {
        "variant": result.variant.id,
        "case": case.id,
        "protocol": result.variant.protocol,
        "mode": result.variant.mode,
        "dialect": result.variant.dialect,
        "tier": case.tier,
        "level": case.level.value,
        "why": case.why,
        "source": case.source,
        "verdict": verdict.value,
        "elapsed_ms": round(result.elapsed_ms, 2),
        "checks": [_outcome(outcome) for outcome in result.outcomes],
    }
    if verdict in {Verdict.FAIL, Verdict.WARN, Verdict.ERROR} and result.exchange is not None:
        data["exchange"] = exchange(result.exchange, key_env)
    return data


def _outcome(outcome: Outcome) -> dict[str, Any]:
    data: dict[str, Any] = {
        "check": outcome.check,
        "verdict": outcome.verdict.value,
        "level": outcome.level.value,
    }
    if outcome.message:
        data["message"] = outcome.message
    if outcome.expected:
        data["expected"] = True
    runs, passed = outcome.repeats
    if runs > 1:
        low, high = wilson(passed, runs)
        data["repeats"] = {
            "runs": runs,
            "passed": passed,
            "interval": [round(low, 4), round(high, 4)],
            "pass_power": {str(k): round(pass_power(passed, runs, k), 4) for k in (1, runs)},
        }
    return data


def exchange(found: Exchange, key_env: str | None) -> dict[str, Any]:
    """The raw bytes of an exchange, base64, with the curl line that repeats it."""
    return {
        "curl": found.curl(key_env),
        "status": found.status,
        "headers": found.headers,
        "request_base64": base64.b64encode(found.request.body).decode(),
        "reads": [[round(at, 6), base64.b64encode(piece).decode()] for at, piece in found.reads],
        "fault": found.fault,
    }


def dump(data: dict[str, Any], path: Path) -> None:
    """Writes a report."""
    path.write_bytes(orjson.dumps(data, option=orjson.OPT_INDENT_2))


def load(path: Path) -> dict[str, Any]:
    """Reads a report.

    Raises:
        ReportError: If the file is missing or breaks the schema.
    """
    try:
        data: dict[str, Any] = orjson.loads(path.read_bytes())
    except OSError as error:
        raise ReportError(f"{path}: {error.strerror}") from None
    except orjson.JSONDecodeError as error:
        raise ReportError(f"{path}: not JSON: {error}") from None
    fault = next(Draft202012Validator(orjson.loads(SCHEMA.read_bytes())).iter_errors(data), None)
    if fault is not None:
        where = "/".join(map(str, fault.absolute_path)) or "top"
        raise ReportError(f"{path}: no report of this suite: {where}: {fault.message[:200]}")
    return data


def bad_checks(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The checks of a recorded result that warn, fail or err, announced ones left out."""
    return [
        check
        for check in result["checks"]
        if check["verdict"] in {"warn", "fail", "error"} and not check.get("expected")
    ]


def by_check(data: dict[str, Any]) -> list[tuple[str, int]]:
    """(check, number of variants) of everything that fails or errs, the most frequent first."""
    counts = Counter(
        check["check"]
        for result in data["results"]
        for check in bad_checks(result)
        if check["verdict"] in {"fail", "error"}
    )
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))
