r"""JSON as text that is checked but never re-spelled: digits and blanks stay as they were written.

The standard decoder is used beside orjson for what orjson cannot tell: repeated keys, and where
the value of each member stands in the text.
"""

from __future__ import annotations

import json  # noqa: TID251 -- repeated keys and positions of members; nothing is encoded with it
import re
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import orjson

DEEPEST = 128
"""Nesting beyond which a value is not taken for JSON (readers in the field stop near 128)."""

_BAR = "｜"
_BAR_BEGUN = re.compile(r"\|(?:D(?:SM?)?)?\Z")


class RepeatedKeyError(ValueError):
    """An object has a key twice.

    Args:
        key: which.
    """

    def __init__(self, key: str) -> None:
        super().__init__(f"the key {key!r} is there twice")
        self.key = key


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        counts = Counter(key for key, _ in pairs)
        raise RepeatedKeyError(counts.most_common(1)[0][0])
    return members


def _no_constant(name: str) -> Any:
    raise ValueError(name)


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_constant)
_ESCAPE = re.compile(
    r"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    r"|(?P<half>u[dD][89a-fA-F][0-9a-fA-F]{2})|.)",
    re.DOTALL,
)
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"?', re.DOTALL)  # takes one without its end, too
_UNITS = re.compile(
    r"(?P<kept>\\[\"\\/])|(?P<letter>\\(?:[bfnrt]|u[0-9a-fA-F]{4}))|(?P<bare>\\)|[\x00-\x1f]"
)
_BLANKS = " \t\n\r"
_BREAKS = frozenset(" \"'\\<>=|" + _BAR)


def is_strict(text: str) -> bool:
    """Whether a text is one JSON value every strict reader takes, without repeated keys."""
    try:
        orjson.loads(text)  # refuses what the standard decoder lets pass: lone surrogates, 1e400
        _DECODER.decode(text)
    except (ValueError, RecursionError):
        return False
    return text.count("[") + text.count("{") <= DEEPEST or _depth(text) <= DEEPEST


def check_keys(text: str) -> None:
    """Raise unless no object of a strict JSON text has a key twice.

    Raises:
        RepeatedKeyError: one has.
        RecursionError: it is nested too deep to be looked through.
    """
    _DECODER.decode(text)


def mend_surrogates(text: str) -> str:
    r"""Replace escapes of half a character (``\ud83d`` alone) by the one of U+FFFD."""

    def mend(found: re.Match[str]) -> str:
        return "\\ufffd" if found["half"] else found[0]

    return _ESCAPE.sub(mend, text)


def mend_strings(text: str) -> str:
    r"""Escape what stands bare in the strings of a JSON text, so that they say what is written.

    Control characters are, and backslashes that begin no escape (``"\d+"``), unless there are escapes
    of letters in the same string: whether ``"C:\Users\new"`` means a line end nobody can tell
    (inngest/agent-kit#329).
    """

    def mend(found: re.Match[str]) -> str:
        units = list(_UNITS.finditer(found[0]))
        if any(unit["bare"] for unit in units) and any(unit["letter"] for unit in units):
            return found[0]
        return _UNITS.sub(_mended, found[0])

    return _STRING.sub(mend, text)


def _mended(unit: re.Match[str]) -> str:
    if unit["bare"]:
        return "\\\\"
    return unit["kept"] or unit["letter"] or orjson.dumps(unit[0]).decode()[1:-1]


def type_of(text: str) -> str:
    """Name the JSON Schema type of a strict JSON text; ``integer`` where it has no fraction."""
    value = orjson.loads(text)
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int):
        return "integer"
    if isinstance(value, float):
        return "integer" if value.is_integer() else "number"
    names = {str: "string", list: "array", dict: "object", type(None): "null"}
    return names[type(value)]


def members(text: str) -> list[tuple[str, str]] | None:
    """Split a strict JSON object into its keys and the text of their values.

    Returns:
        (key, value text) in order; None where the text is no strict JSON object.
    """
    stripped = text.strip(_BLANKS)
    if not stripped.startswith("{") or not is_strict(stripped):
        return None
    return list(_members(stripped))


def _members(text: str) -> Iterator[tuple[str, str]]:
    at = _skip(text, 1)
    while text[at] != "}":
        key, at = _DECODER.raw_decode(text, at)
        begin = _skip(text, _skip(text, at) + 1)  # past the colon
        _, end = _DECODER.raw_decode(text, begin)
        yield key, text[begin:end]
        at = _skip(text, end)
        if text[at] == ",":
            at = _skip(text, at + 1)


def _skip(text: str, at: int) -> int:
    while text[at] in _BLANKS:
        at += 1
    return at


def _depth(text: str) -> int:
    deepest = depth = 0
    in_string = escaped = False
    for char in text:
        if in_string:
            if escaped:
                escaped = False
            elif char == "\\":
                escaped = True
            elif char == '"':
                in_string = False
        elif char == '"':
            in_string = True
        elif char in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif char in "]}":
            depth -= 1
    return deepest


def escape(text: str) -> str:
    """Return the inside of a JSON string in which no marker shows."""
    return hide_bars(orjson.dumps(text).decode()[1:-1])


@lru_cache(8192)
def escape_token(text: str) -> str:
    """Return what `escape` does, remembered: tokens come again and again."""
    return escape(text)


def hide_bars(text: str) -> str:
    """Escape the bars of markers in a JSON text, where they can only stand in a string."""
    return text.replace(_BAR, "\\uff5c").replace("|DSML", "\\u007cDSML")


def held_bar(text: str) -> int:
    """Return how much of the end of a text may begin a marker that ``hide_bars`` hides."""
    found = _BAR_BEGUN.search(text)
    return 0 if found is None else len(found[0])


def key_text(key: str) -> str:
    r"""Return the inside of a JSON string for a member's name.

    The codec splices the name of a parameter into the arguments as it is, up to a quote or blank.
    So everything that breaks there is written as an escape, which it passes on.
    """
    return "".join(char if _plain(char) else _escaped(char) for char in key)


def _plain(char: str) -> bool:
    return char.isprintable() and char not in _BREAKS


def _escaped(char: str) -> str:
    units = char.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[i : i + 2].hex()}" for i in range(0, len(units), 2))
