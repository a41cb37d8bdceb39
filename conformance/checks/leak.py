"""Markup that must not reach a client."""

from __future__ import annotations

import re
from collections.abc import Iterator

from conformance.checks.registry import check
from conformance.dialect import MARK
from conformance.protocols.observation import Observation

_TAG = re.compile(rf"</?{MARK} ?[A-Za-z_]*|</?\|DSML\| ?[A-Za-z_]*|<{MARK}")
_ROLE = re.compile("<｜(?:User|Assistant|System|begin▁of▁sentence|end▁of▁sentence)｜>")
_THINK = re.compile("</?think>")


def _places(seen: Observation, pattern: re.Pattern[str], *, arguments: bool) -> Iterator[str]:
    for place, string in seen.strings:
        if not arguments and place.endswith("arguments"):
            continue
        match = pattern.search(string)
        if match:
            around = string[max(0, match.start() - 20) : match.end() + 20]
            yield f"{place} holds {match.group()!r}: …{around!r}…"


@check("leak/dsml", when=lambda seen: bool(seen.declared))
def dsml(seen: Observation) -> Iterator[str]:
    """Where tools are declared no tool markup shows in any text: the call in it is lost."""
    yield from _places(seen, _TAG, arguments=True)


@check("leak/think")
def think(seen: Observation) -> Iterator[str]:
    """Think tags do not show in answer, name or arguments."""
    for message in _places(seen, _THINK, arguments=True):
        if not message.startswith("reasoning"):
            yield message


@check("leak/end-token")
def end_token(seen: Observation) -> Iterator[str]:
    """The end-of-turn and role tokens are control and not text."""
    yield from _places(seen, _ROLE, arguments=True)


def _clean_source(seen: Observation) -> bool:
    script = seen.variant.case.script
    return script is None or "\ufffd" not in script.output


@check("leak/replacement-character", when=_clean_source)
def replacement(seen: Observation) -> Iterator[str]:
    """No U+FFFD that the model did not write: a character was cut between two tokens."""
    for place, string in seen.strings:
        if "\ufffd" in string:
            yield f"{place} holds U+FFFD: {string[:80]!r}"
