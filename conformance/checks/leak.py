"""Markup that must not reach a client."""

from __future__ import annotations

import re
from collections.abc import Iterator

from conformance import strict_json
from conformance.checks.registry import check
from conformance.dialect import MARK
from conformance.model import Level
from conformance.protocols.observation import Observation

_TAG = re.compile(rf"</?{MARK} ?[A-Za-z_]*|</?\|DSML\| ?[A-Za-z_]*|<{MARK}")
_ROLE = re.compile("<｜(?:User|Assistant|System|begin▁of▁sentence|end▁of▁sentence)｜>")
_THINK = re.compile("</?think>")


def _places(seen: Observation, pattern: re.Pattern[str]) -> Iterator[tuple[str, str]]:
    """(place, finding) of each text that holds the pattern; escapes in arguments hide nothing."""
    for place, string in seen.strings:
        texts = [string, *_inside(string)] if place.endswith("arguments") else [string]
        for text in texts:
            match = pattern.search(text)
            if match:
                around = text[max(0, match.start() - 20) : match.end() + 20]
                yield place, f"{place} holds {match.group()!r}: …{around!r}…"
                break


def _inside(arguments: str) -> Iterator[str]:
    """Every key and string value of a JSON text; nothing of a text that is no JSON."""
    try:
        todo = [strict_json.loads(arguments)]
    except strict_json.JsonError:
        return
    while todo:
        value = todo.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            todo += [*value, *value.values()]
        elif isinstance(value, list):
            todo += value


def _leaks(seen: Observation, pattern: re.Pattern[str]) -> Iterator[str]:
    """In the live tier a value may quote markup because the model wrote it: judged apart."""
    for place, finding in _places(seen, pattern):
        if seen.variant.case.tier != "live" or not place.endswith("arguments"):
            yield finding


@check("leak/dsml", when=lambda seen: bool(seen.declared))
def dsml(seen: Observation) -> Iterator[str]:
    """Where tools are declared no tool markup shows in any text: the call in it is lost."""
    yield from _leaks(seen, _TAG)


@check("leak/think")
def think(seen: Observation) -> Iterator[str]:
    """Think tags do not show in answer, name or arguments."""
    for message in _leaks(seen, _THINK):
        if not message.startswith("reasoning"):
            yield message


@check(
    "live/markup-in-arguments",
    level=Level.SHOULD,
    when=lambda seen: seen.variant.case.tier == "live" and bool(seen.calls),
)
def in_arguments(seen: Observation) -> Iterator[str]:
    """A value with tool or think tags in it is a quotation, or a call that was closed too late."""
    for pattern in (_TAG, _THINK, _ROLE):
        yield from (finding for place, finding in _places(seen, pattern) if "arguments" in place)


@check("leak/end-token")
def end_token(seen: Observation) -> Iterator[str]:
    """The end-of-turn and role tokens are control and not text."""
    yield from _leaks(seen, _ROLE)


def _clean_source(seen: Observation) -> bool:
    script = seen.variant.case.script
    return script is not None and "\ufffd" not in script.output


def _replaced(seen: Observation) -> Iterator[str]:
    for place, string in seen.strings:
        if "\ufffd" in string:
            yield f"{place} holds U+FFFD: {string[:80]!r}"


@check("leak/replacement-character", when=_clean_source)
def replacement(seen: Observation) -> Iterator[str]:
    """No U+FFFD that the model did not write: a character was cut between two tokens."""
    yield from _replaced(seen)


@check(
    "live/replacement-character",
    level=Level.SHOULD,
    when=lambda seen: seen.variant.case.tier == "live",
)
def replacement_live(seen: Observation) -> Iterator[str]:
    """U+FFFD: a character was cut between two tokens, or the model wrote bytes that are none."""
    yield from _replaced(seen)
