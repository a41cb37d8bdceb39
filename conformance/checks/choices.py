"""Several choices, and the logprobs of one."""

from __future__ import annotations

from collections.abc import Iterator

from conformance import strict_json
from conformance.checks.registry import check
from conformance.protocols.chat import asked
from conformance.protocols.observation import Observation, rows, text


def _several(seen: Observation) -> bool:
    return asked(seen) > 1


@check("choices/all", protocols=["chat"], when=_several)
def all_there(seen: Observation) -> Iterator[str]:
    """N choices are asked for and n come, each with its own end."""
    found = [one.finish for one in (seen, *seen.others)]
    if len(found) != asked(seen) or None in found:
        yield f"{asked(seen)} choices asked for, their ends: {found}"


@check(
    "choices/independent",
    protocols=["chat"],
    when=lambda seen: _several(seen) and seen.variant.case.tier == "scripted",
)
def independent(seen: Observation) -> Iterator[str]:
    """Choices of the same output say the same: none gets text or thinking of another."""
    first = _said(seen)
    for number, other in enumerate(seen.others, 1):
        if other.finish is not None and _said(other) != first:
            yield f"choice {number} says {_said(other)}, choice 0 {first}"


def _said(seen: Observation) -> tuple[object, ...]:
    calls = [(call.name, call.arguments) for call in seen.calls]
    return seen.content, seen.reasoning or "", calls, seen.finish


@check("choices/ids-distinct", protocols=["chat"], when=_several)
def ids_distinct(seen: Observation) -> Iterator[str]:
    """Call ids are unique over all choices; clients keep them in one table."""
    ids = [call.id for one in (seen, *seen.others) for call in one.calls]
    if len(set(ids)) != len(ids):
        yield f"call ids {ids}"


def _logprobs(seen: Observation) -> bool:
    return seen.body.get("logprobs") is True and bool(seen.content)


@check("logprobs/entries", protocols=["chat"], when=_logprobs)
def entries(seen: Observation) -> Iterator[str]:
    """Each entry has a token, its logprob, its bytes, and no more rivals than asked for."""
    if not seen.logprobs:
        yield "logprobs were asked for and none came"
    most = seen.body.get("top_logprobs") or 0
    for number, entry in enumerate(seen.logprobs):
        rivals = rows(entry.get("top_logprobs"))
        for one in (entry, *rivals):
            value, raw = one.get("logprob"), one.get("bytes")
            if not isinstance(one.get("token"), str) or not isinstance(value, int | float):
                yield f"entry {number}: {strict_json.dumps(one)[:160]} lacks token or logprob"
            elif value > 0:
                yield f"entry {number}: logprob {value}, which is above 0"
            elif raw is not None and not _are_bytes(raw):
                yield f"entry {number}: bytes are {raw!r}"
        if len(rivals) > most:
            yield f"entry {number}: {len(rivals)} top_logprobs, {most} asked for"


def _are_bytes(raw: object) -> bool:
    return isinstance(raw, list) and all(isinstance(b, int) and 0 <= b <= 255 for b in raw)


@check(
    "logprobs/join",
    protocols=["chat"],
    when=lambda seen: _logprobs(seen) and bool(seen.logprobs) and not seen.calls,
)
def join(seen: Observation) -> Iterator[str]:
    """The entries' bytes joined are the answer, so that a client can align them."""
    parts = [
        bytes(entry["bytes"])
        if _are_bytes(entry.get("bytes"))
        else text(entry.get("token")).encode()
        for entry in seen.logprobs
    ]
    if b"".join(parts) != seen.content.encode():
        yield f"the entries are {b''.join(parts)!r}, the answer is {seen.content.encode()!r}"
