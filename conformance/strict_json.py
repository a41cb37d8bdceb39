"""JSON as the tool-call rules need it: strict, and with nothing lost.

orjson gives neither repeated keys nor integers beyond 64 bits, both of which are subjects of the
suite, so the standard library's decoder is used here and nowhere else.
"""

from __future__ import annotations

import json  # noqa: TID251 - see the module docstring
import re
from typing import Any


class JsonError(ValueError):
    """Text that is not strict JSON; the message says in which way."""


class DuplicateKeyError(JsonError):
    """An object names a key twice."""


class NotFiniteError(JsonError):
    """NaN or an infinity, which JSON does not have."""


def loads(text: str) -> Any:
    """Parses strict JSON, integers of any size kept exact.

    Raises:
        NotFiniteError: For NaN, Infinity, -Infinity.
        DuplicateKeyError: For a repeated key at any depth.
        JsonError: For any other fault of syntax.
    """
    try:
        return json.loads(text, object_pairs_hook=_pairs, parse_constant=_constant)
    except JsonError:
        raise
    except (ValueError, RecursionError) as error:
        raise JsonError(str(error)) from None


def dumps(value: Any) -> str:
    """Writes a value as compact JSON with sorted keys, for comparison and display."""
    return json.dumps(value, ensure_ascii=False, sort_keys=True)


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise DuplicateKeyError(f"key {key!r} occurs twice")
        result[key] = value
    return result


def _constant(name: str) -> Any:
    raise NotFiniteError(f"{name} is not JSON")


_TOKEN = re.compile(
    r'[ \t\n\r]*(?:(?P<punct>[{}\[\],:])|(?P<string>"(?:[^"\\\x00-\x1f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*")'
    r"|(?P<word>true|false|null)|(?P<number>-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?))"
)
_AFTER_NUMBER = tuple(", ]}\t\n\r")
_PARTIAL = re.compile(
    r'[ \t\n\r]*(?:"(?:[^"\\\x00-\x1f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*(?:\\(?:u[0-9a-fA-F]{0,3})?)?'
    r"|t|tr|tru|f|fa|fal|fals|n|nu|nul"
    r"|-?(?:(?:0|[1-9]\d*)(?:\.\d*)?(?:(?<=\d)[eE][+-]?\d*)?)?)?\Z"
)


def is_object_prefix(text: str) -> bool:
    """Says whether some continuation makes `text` a JSON object.

    The empty text is a prefix. Used for calls that the token limit cut.
    """
    stack: list[str] = []
    want = "object"  # what may come next
    position = 0
    while True:
        match = _TOKEN.match(text, position)
        # A number is whole only before a separator; until then the partial rule judges it.
        if match is None or (match["number"] and text[match.end() :][:1] not in _AFTER_NUMBER):
            break
        following = _step(match, want, stack)
        if following is None:
            return False
        want = following
        position = match.end()
    rest = text[position:]
    if not rest.strip(" \t\n\r"):
        return True
    if _PARTIAL.match(text, position) is None:
        return False
    first = rest.lstrip(" \t\n\r")[0]
    if first == '"':
        return want in {"value", "value]", "key", "key}"}
    return want in {"value", "value]"}


def _step(match: re.Match[str], want: str, stack: list[str]) -> str | None:
    """One token of the pushdown automaton: the next expectation, or None when it does not fit."""
    punct = match["punct"]
    if want == "object":
        if punct != "{":
            return None
        stack.append("}")
        return "key}"
    if want == "end":
        return None
    if want in {"key", "key}"}:
        if match["string"]:
            return ":"
        return _close(stack) if punct == "}" and want == "key}" else None
    if want == ":":
        return "value" if punct == ":" else None
    if want in {"value", "value]"}:
        if punct == "{":
            stack.append("}")
            return "key}"
        if punct == "[":
            stack.append("]")
            return "value]"
        if punct == "]" and want == "value]":
            return _close(stack)
        return None if punct else ","
    if punct == ",":  # want == ",": the end of a value
        return "key" if stack[-1] == "}" else "value"
    return _close(stack) if punct == stack[-1] else None


def _close(stack: list[str]) -> str:
    stack.pop()
    return "," if stack else "end"
