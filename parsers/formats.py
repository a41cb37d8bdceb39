"""Reads which JSON a reply is asked to be: ``response_format`` and ``text.format``.

Checked here and not by the codec, whose error names no field (issue 3: a clear error says where).
"""

from __future__ import annotations

from typing import Any

from parsers.body import require
from parsers.request import FLAG
from parsers.schemas import check_size
from parsers.values import ReplyFormat

_CHAT = ("text", "json_object", "json_schema", "regex")
_RESPONSES = ("text", "json_object", "json_schema")


def chat_format(shape: Any) -> ReplyFormat | None:
    """Read ``response_format`` of Chat Completions, whose schema is nested.

    Returns:
        The JSON that is asked for; None for any text.

    Raises:
        ClientError: a part is missing or no such thing; ``param`` is its path.
    """
    at = "response_format"
    kind = _kind(shape, at, _CHAT)
    if kind == "regex":
        require(isinstance(shape.get("regex"), str), f"{at}.regex", "a string", shape.get("regex"))
    if kind != "json_schema":
        return ReplyFormat() if kind == "json_object" else None
    inner = shape.get("json_schema")
    require(isinstance(inner, dict), f"{at}.json_schema", "an object", inner)
    return _schema(inner, f"{at}.json_schema", ("name", "description"))


def responses_format(shape: Any) -> ReplyFormat | None:
    """Read ``text.format`` of Responses, whose schema is flat and has a name.

    Returns and raises as ``chat_format``.
    """
    at = "text.format"
    kind = _kind(shape, at, _RESPONSES)
    if kind != "json_schema":
        return ReplyFormat() if kind == "json_object" else None
    require(isinstance(shape.get("name"), str), f"{at}.name", "a string", shape.get("name"))
    return _schema(shape, at, ("description",))


def _kind(shape: Any, at: str, kinds: tuple[str, ...]) -> str:
    require(isinstance(shape, dict), at, "an object", shape)
    kind = shape.get("type")
    known = isinstance(kind, str) and kind in kinds
    require(known, f"{at}.type", f"one of {', '.join(kinds)}", kind)
    return str(kind)


def _schema(holder: dict[str, Any], at: str, texts: tuple[str, ...]) -> ReplyFormat:
    for name in texts:
        value = holder.get(name)
        require(value is None or isinstance(value, str), f"{at}.{name}", "a string", value)
    strict, schema = holder.get("strict"), holder.get("schema")
    holds, words = FLAG
    require(strict is None or holds(strict), f"{at}.strict", words, strict)
    require(isinstance(schema, dict | bool), f"{at}.schema", "a JSON Schema object", schema)
    check_size(schema, f"{at}.schema")
    return ReplyFormat(schema, strict=strict is True)
