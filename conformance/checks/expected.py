"""The result a case wants, compared with the reply.

A case may name several acceptable results; the nearest one is compared, so that the finding says
what is missing from it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from conformance import strict_json
from conformance.checks.registry import check
from conformance.protocols.observation import Observation, count, table, text


def _statuses(expect: Mapping[str, Any]) -> list[int]:
    status = expect.get("status", 200)
    return status if isinstance(status, list) else [status]


@check("expect/status", kind="any", when=lambda seen: seen.exchange.status > 0)
def status(seen: Observation) -> Iterator[str]:
    """The HTTP status is the wanted one."""
    if any("fault" in expect for expect in seen.variant.case.expect):
        return  # judged by fault/*
    wanted = sorted({code for expect in seen.variant.case.expect for code in _statuses(expect)})
    if seen.exchange.status not in wanted:
        said = text(table(seen.error).get("message")) or seen.exchange.body[:160].decode(
            errors="replace"
        )
        yield f"expected status {wanted}, got {seen.exchange.status}: {said[:200]}"


def _may_be(seen: Observation, expect: Mapping[str, Any]) -> bool:
    """Whether the reply has the status of a result; for an error inside a stream any 5xx will do."""
    statuses = _statuses(expect)
    in_stream = seen.error is not None and seen.exchange.status == 200
    return seen.exchange.status in statuses or (in_stream and max(statuses) >= 500)


def nearest(seen: Observation) -> Mapping[str, Any]:
    """The acceptable result with the fewest differences from the reply."""
    options = [e for e in seen.variant.case.expect if _may_be(seen, e)]
    return min(
        options or seen.variant.case.expect,
        key=lambda e: sum(len(list(part(seen, e))) for part in _PARTS),
    )


def _content(seen: Observation, expect: Mapping[str, Any]) -> Iterator[str]:
    got = seen.content
    if "content" in expect and got != expect["content"]:
        yield f"expected content {expect['content']!r}, got {got!r}"
    if "content_trimmed" in expect and got.strip() != expect["content_trimmed"]:
        yield f"expected content {expect['content_trimmed']!r} but for blanks, got {got!r}"
    if "content_has" in expect and expect["content_has"] not in got:
        yield f"expected {expect['content_has']!r} in content {got!r}"
    if "content_lacks" in expect and expect["content_lacks"] in got:
        yield f"expected no {expect['content_lacks']!r} in content {got!r}"


def _reasoning(seen: Observation, expect: Mapping[str, Any]) -> Iterator[str]:
    if "reasoning" in expect and (seen.reasoning or None) != (expect["reasoning"] or None):
        yield f"expected thinking {expect['reasoning']!r}, got {seen.reasoning!r}"


def _calls(seen: Observation, expect: Mapping[str, Any]) -> Iterator[str]:
    if "calls" in expect:
        want = [call["name"] for call in expect["calls"]]
        got = [call.name for call in seen.calls]
        if got != want:
            yield f"expected calls {want}, got {got}"


def _arguments(seen: Observation, expect: Mapping[str, Any]) -> Iterator[str]:
    as_object = seen.variant.protocol == "messages" and seen.variant.mode == "whole"
    for number, (want, call) in enumerate(zip(expect.get("calls", ()), seen.calls, strict=False)):
        got = call.arguments
        if "arguments" in want and not _same(got, want["arguments"]):
            yield f"call {number}: expected arguments {strict_json.dumps(want['arguments'])}, got {got!r}"
        if "arguments_text" in want and not as_object and got != want["arguments_text"]:
            yield f"call {number}: expected the text {want['arguments_text']!r}, got {got!r}"
        if "arguments_prefix" in want and not as_object:
            prefix = want["arguments_prefix"]
            if not (got.startswith(prefix) or prefix.startswith(got)):
                yield f"call {number}: expected arguments that begin {prefix!r}, got {got!r}"


def _same(got: str, want: Any) -> bool:
    try:
        # Text comparison: 1 and 1.0, and integers beyond 64 bits, stay different.
        return strict_json.dumps(strict_json.loads(got)) == strict_json.dumps(want)
    except strict_json.JsonError:
        return False


def _finish(seen: Observation, expect: Mapping[str, Any]) -> Iterator[str]:
    if "finish" in expect and seen.finish != expect["finish"]:
        yield f"expected the end {expect['finish']!r}, got {seen.finish!r}"


_PARTS = (_content, _reasoning, _calls, _arguments, _finish)


def _names(*keys: str) -> Any:
    def when(seen: Observation) -> bool:
        found: set[str] = set()
        for expect in seen.variant.case.expect:
            found |= expect.keys()
            found |= {key for call in expect.get("calls", ()) for key in call}
        return bool(found & set(keys))

    return when


@check(
    "expect/content",
    when=_names("content", "content_trimmed", "content_has", "content_lacks"),
)
def content(seen: Observation) -> Iterator[str]:
    """The answer text is the wanted one."""
    yield from _content(seen, nearest(seen))


@check("expect/reasoning", when=_names("reasoning"))
def reasoning(seen: Observation) -> Iterator[str]:
    """The thinking text is the wanted one."""
    yield from _reasoning(seen, nearest(seen))


@check("expect/calls", when=_names("calls"))
def calls(seen: Observation) -> Iterator[str]:
    """The tools called are the wanted ones, in order."""
    yield from _calls(seen, nearest(seen))


@check("expect/arguments", when=_names("arguments", "arguments_text", "arguments_prefix"))
def arguments(seen: Observation) -> Iterator[str]:
    """The arguments are the wanted ones, value by value."""
    yield from _arguments(seen, nearest(seen))


@check("expect/finish", when=_names("finish"))
def finish(seen: Observation) -> Iterator[str]:
    """The declared end is the wanted one."""
    yield from _finish(seen, nearest(seen))


@check("expect/message", kind="error", when=_names("message_has"))
def message(seen: Observation) -> Iterator[str]:
    """The error's message names what the caller has to mend."""
    said = text(table(seen.error).get("message"))
    for word in nearest(seen).get("message_has", ()):
        if word.lower() not in said.lower():
            yield f"expected {word!r} in the message {said!r}"


@check("expect/prompt-tokens", when=_names("prompt_tokens"))
def prompt_tokens(seen: Observation) -> Iterator[str]:
    """prompt_tokens equals the ground truth, which shows that the chat template is right."""
    want = nearest(seen)["prompt_tokens"]
    got = seen.usages[-1].prompt if seen.usages else None
    if got != want:
        yield f"expected {want} prompt tokens, got {got}"


def lookup(value: Any, path: str) -> Any:
    """The value at a dotted path, None where the way ends early."""
    for key in path.split("."):
        if isinstance(value, list):
            value = value[int(key)] if key.isdigit() and int(key) < len(value) else None
        else:
            value = table(value).get(key)
    return value


@check("expect/document", kind="any", when=_names("document_has"))
def document(seen: Observation) -> Iterator[str]:
    """The JSON document holds the wanted values."""
    for path, want in nearest(seen).get("document_has", {}).items():
        got = lookup(seen.document, path)
        fits = {"<text>": bool(text(got)), "<count>": count(got) is not None}
        if not fits.get(want, got == want):
            yield f"expected {want!r} at {path}, got {got!r}"
