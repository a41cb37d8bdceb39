"""Judges a loop by what the client, its tool and the server each left behind."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import orjson


@dataclass(frozen=True, slots=True)
class Expected:
    """What a finished loop shows.

    Args:
        protocol: of the requests.
        stream: whether the client asks for streams.
        mark: what the tool writes when it runs with the right arguments.
        result: what the tool gives back, unknown to client and model before it runs.
        thought: the model's reasoning before the call.
        final: the model's last words.
        client_errors: outcomes of the 4xx that the client is meant to get, one for each.
    """

    protocol: str
    stream: bool
    mark: str
    result: str
    thought: str
    final: str
    client_errors: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a loop left behind.

    Args:
        status: of the client's process; None when it ran out of time.
        output: the client's stdout.
        mark: what the tool wrote, None where it did not run.
        log: the server's log lines.
        exchanges: the server's record of generations (gateway.recorder).
    """

    status: int | None
    output: str
    mark: str | None
    log: list[dict[str, Any]]
    exchanges: list[dict[str, Any]]


def judge(expected: Expected, evidence: Evidence) -> list[str]:
    """List what is wrong with a loop; nothing when it is whole."""
    faults = []
    if evidence.status is None:
        faults.append("the client did not end in time")
    elif evidence.status:
        faults.append(f"the client ended with {evidence.status}")
    if evidence.mark is None:
        faults.append("the tool did not run")
    elif evidence.mark != expected.mark:
        faults.append(f"the tool got {evidence.mark!r} instead of {expected.mark!r}")
    if expected.final not in evidence.output:
        faults.append("the client does not show the final answer")
    turns = tool_turns(evidence.exchanges)
    if len(turns) != 2:
        faults.append(f"{len(turns)} requests with tools instead of 2")
    elif expected.result not in _text(turns[1]):
        faults.append("the second request does not carry the tool's result")
    for turn in turns:
        if turn["protocol"] != expected.protocol:
            faults.append(f"a request speaks {turn['protocol']}")
        if bool(body_of(turn).get("stream")) is not expected.stream:
            faults.append("a request is not " + ("a stream" if expected.stream else "whole"))
    failures = [exchange["failure"] for exchange in evidence.exchanges if exchange["failure"]]
    faults += [f"a reply failed: {failure}" for failure in failures]
    return list(dict.fromkeys([*faults, *_log_faults(expected.client_errors, evidence.log)]))


def reasoning_back(expected: Expected, evidence: Evidence) -> str:
    """Say who put the reasoning into the second prompt: client, server or none."""
    turns = tool_turns(evidence.exchanges)
    if len(turns) < 2:
        return "none"
    if expected.thought in _text(turns[1]):
        return "client"
    kept = "".join([*turns[1]["reasoning"].values(), turns[1]["history"] or ""])
    return "server" if expected.thought in kept or _refers_to_reasoning(*turns[:2]) else "none"


def _refers_to_reasoning(first: dict[str, Any], second: dict[str, Any]) -> bool:
    """Whether an item of the first reply's reasoning is named in place of being sent."""
    items = body_of(second).get("input")
    references = [
        item["id"]
        for item in (items if isinstance(items, list) else [])
        if item.get("type") == "item_reference"
    ]
    return any(id_.startswith("rs_") and id_ in first["reply"] for id_ in references)


def tool_turns(exchanges: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Leave out what clients ask beside the loop, such as a title for it."""
    return [exchange for exchange in exchanges if body_of(exchange).get("tools")]


def body_of(exchange: dict[str, Any]) -> dict[str, Any]:
    """The request's body."""
    body = orjson.loads(exchange["body"])
    return body if isinstance(body, dict) else {}


def _text(exchange: dict[str, Any]) -> str:
    # written anew: clients differ in how they escape
    return orjson.dumps(body_of(exchange)).decode()


def _log_faults(client_errors: tuple[str, ...], log: list[dict[str, Any]]) -> list[str]:
    faults = []
    meant = list(client_errors)
    for line in log:
        if line.get("message") == "request":
            if line["status"] < 400:
                continue
            if line["status"] < 500 and line["outcome"] in meant:
                meant.remove(line["outcome"])
            else:
                where = line.get("path", line["route"])
                faults.append(f"{where} was answered {line['status']} {line['outcome']}")
        elif line["level"] in ("warning", "error", "critical"):
            faults.append(f"the server logged: {line['message']}")
    return faults + [f"the client was not refused: {outcome}" for outcome in meant]
