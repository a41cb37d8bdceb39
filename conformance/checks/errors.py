"""Refusals and faults: status, envelope, words."""

from __future__ import annotations

import re
from collections.abc import Iterator

from conformance.checks.registry import check
from conformance.model import Level
from conformance.protocols.observation import Observation, table, text

_INTERNAL = re.compile(r"Traceback|File \"|\.py\b|\.rs:\d+|panicked|0x[0-9a-f]{6,}|ValidationError")


@check("error/envelope", kind="error")
def envelope(seen: Observation) -> Iterator[str]:
    """The error has the protocol's shape: {"error": {message, type}}; Messages adds type error."""
    document = table(seen.document)
    error = document.get("error")
    if not isinstance(error, dict):
        yield f'expected {{"error": {{...}}}}, got {seen.exchange.body[:200]!r}'
        return
    if not text(error.get("message")).strip() or not text(error.get("type")):
        yield f"message {error.get('message')!r}, type {error.get('type')!r}"
    if seen.variant.protocol == "messages" and document.get("type") != "error":
        yield f'expected "type": "error" at the top, got {document.get("type")!r}'
    if seen.variant.protocol != "messages" and not {"param", "code"} <= error.keys():
        yield f"expected the keys param and code, got {sorted(error)}"


@check("error/content-type", kind="error")
def content_type(seen: Observation) -> Iterator[str]:
    """A refused request is answered by JSON, also when a stream was asked for."""
    got = seen.exchange.headers.get("content-type", "")
    if not got.startswith("application/json"):
        yield f"expected application/json, got {got!r}"


@check("error/no-internals", kind="error")
def no_internals(seen: Observation) -> Iterator[str]:
    """The message tells the caller's fault, not the server's file names or stack."""
    match = _INTERNAL.search(text(table(seen.error).get("message")))
    if match:
        yield f"message holds {match.group()!r}"


def _wanted_param(seen: Observation) -> str | None:
    for expected in seen.variant.case.expect:
        param = expected.get("param")
        if isinstance(param, dict):
            param = param.get(seen.variant.protocol)
        if isinstance(param, str):
            return param
    return None


@check(
    "error/param",
    kind="error",
    level=Level.SHOULD,
    protocols=["chat", "responses"],
    when=lambda seen: _wanted_param(seen) is not None,
)
def param(seen: Observation) -> Iterator[str]:
    """`param` names the field at fault, or a place in it, so that an agent can mend its request."""
    want, got = str(_wanted_param(seen)), table(seen.error).get("param")
    exact = isinstance(got, str) and got.startswith((f"{want}.", f"{want}["))
    if got != want and not exact:
        yield f"expected param {want!r}, got {got!r}"


@check("fault/told", kind="any", modes=["stream"], when=lambda seen: seen.faulty)
def fault_told(seen: Observation) -> Iterator[str]:
    """A backend that dies in mid-stream is told by the protocol's error event."""
    if seen.exchange.status == 200 and seen.error is None:
        yield "no error event in the stream"


@check("fault/no-good-end", kind="any", when=lambda seen: seen.faulty)
def fault_no_end(seen: Observation) -> Iterator[str]:
    """A fault never looks like a finished answer."""
    if seen.finish is not None:
        yield f"the output is declared finished: {seen.finish}"
    if seen.variant.mode == "whole" and seen.exchange.status < 500:
        yield f"expected a 5xx status, got {seen.exchange.status}"
