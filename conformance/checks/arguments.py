"""Argument JSON: whole, strict, and a beginning of it where the token limit cut."""

from __future__ import annotations

from collections.abc import Iterator

from conformance import strict_json
from conformance.checks.registry import check
from conformance.protocols.observation import Observation


def _finished(seen: Observation) -> bool:
    return bool(seen.calls) and seen.finish in {"tool_calls", "stop"}


def _faults(seen: Observation) -> Iterator[tuple[str, strict_json.JsonError]]:
    for number, call in enumerate(seen.calls):
        try:
            strict_json.loads(call.arguments)
        except strict_json.JsonError as fault:
            yield f"call {number} ({call.name}): {call.arguments[:200]!r}: {fault}", fault


@check("arguments/json", when=_finished)
def is_json(seen: Observation) -> Iterator[str]:
    """The fragments joined are JSON."""
    for message, fault in _faults(seen):
        if type(fault) is strict_json.JsonError:
            yield message


@check("arguments/finite", when=_finished)
def finite(seen: Observation) -> Iterator[str]:
    """Numbers are JSON numbers: no NaN, no Infinity, which many parsers refuse."""
    for message, fault in _faults(seen):
        if isinstance(fault, strict_json.NotFiniteError):
            yield message


@check("arguments/unique-keys", when=_finished)
def unique_keys(seen: Observation) -> Iterator[str]:
    """No key occurs twice: parsers differ in which one wins."""
    for message, fault in _faults(seen):
        if isinstance(fault, strict_json.DuplicateKeyError):
            yield message


@check("arguments/object", when=_finished)
def is_object(seen: Observation) -> Iterator[str]:
    """Arguments are an object, not JSON text inside a JSON string."""
    for number, call in enumerate(seen.calls):
        try:
            value = strict_json.loads(call.arguments)
        except strict_json.JsonError:
            continue
        if not isinstance(value, dict):
            yield f"call {number} ({call.name}): arguments are a {type(value).__name__}"


@check(
    "arguments/beginning-when-cut",
    when=lambda seen: (
        bool(seen.calls)
        and seen.finish == "length"
        and not (seen.variant.protocol == "messages" and seen.variant.mode == "whole")
    ),
)
def beginning(seen: Observation) -> Iterator[str]:
    """What the token limit cut is still the beginning of a JSON object."""
    for number, call in enumerate(seen.calls):
        if not strict_json.is_object_prefix(call.arguments):
            yield f"call {number} ({call.name}): no JSON goes on from {call.arguments[:200]!r}"
