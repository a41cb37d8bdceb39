"""Reads a request body and checks the shape of its fields, so that an error can name one.

The codec checks a body too, but its parse errors carry neither a status nor a path. Everything it
would refuse for its shape is refused here first, with the path; what passes here and fails there
is still an error 400, only without a name.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import orjson

from parsers.errors import ClientError
from parsers.jsontext import RepeatedKeyError, check_keys

Body = dict[str, Any]
_NESTED = 250  # levels; the decoder reads four times as many as its writer, and the codec, take


def parse_object(raw: bytes) -> Body:
    """Return the JSON object that a request body must be.

    Args:
        raw: the body as received.

    Raises:
        ClientError: the body is empty, not UTF-8, not strict JSON (RFC 8259: no NaN, no lone
            surrogate, no trailing bytes, nesting within the decoder's bound), not an object, or has
            a key twice: which of the two counts, readers along the way may see differently.
    """
    if not raw.strip():
        raise ClientError("request body: expected a JSON object, got an empty body")
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise ClientError(f"request body: expected a JSON object: {error}") from None
    if not isinstance(value, dict):
        raise ClientError(f"request body: expected a JSON object, got {describe(value)}")
    try:
        check_keys(raw.decode())
    except RepeatedKeyError as error:
        key = error.key if len(error.key) <= 60 else f"{error.key[:57]}..."
        raise ClientError(
            f"request body: expected every key once in its object, got {key!r} twice",
            code="duplicate_key",
        ) from None
    except RecursionError:
        raise _too_deep() from None
    check_nesting(raw, value)
    return value


def check_nesting(raw: bytes, value: Any) -> None:
    """Raise unless a body can be written again: then it can be walked through as well.

    Args:
        raw: the body as received.
        value: what was read from it.

    Raises:
        ClientError: it is nested deeper.
    """
    if raw.count(b"[") + raw.count(b"{") > _NESTED:  # else it cannot be
        try:
            orjson.dumps(value)
        except orjson.JSONEncodeError:
            raise _too_deep() from None


def _too_deep() -> ClientError:
    return ClientError(f"request body: nesting is too deep; expected at most {_NESTED} levels")


def written(value: Any, param: str) -> str:
    """Return the JSON text of a part of a body.

    Raises:
        ClientError: it is nested deeper than can be written (less deep than can be read).
    """
    try:
        return orjson.dumps(value).decode()
    except orjson.JSONEncodeError:
        raise ClientError(f"{param}: nesting is too deep", param=param) from None


def describe(value: Any) -> str:
    """Name a JSON value for an error message, short enough to be shown."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return "an object" if value else "an empty object"
    if isinstance(value, list):
        return f"an array of {len(value)}" if value else "an empty array"
    text = repr(value)
    kind = "string" if isinstance(value, str) else "number"
    return f"the {kind} {text if len(text) <= 60 else text[:57] + '...'}"


def fail(param: str, expected: str, value: Any) -> ClientError:
    """Build the error for a field that holds something else than it should."""
    return ClientError(f"{param}: expected {expected}, got {describe(value)}", param=param)


def require(ok: bool, param: str, expected: str, value: Any) -> None:
    """Raise the error of ``fail`` unless ``ok``."""
    if not ok:
        raise fail(param, expected, value)


def is_int(value: Any) -> bool:
    """Whether a JSON value is an integer (JSON's booleans are not)."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Whether a JSON value is a finite number."""
    return is_int(value) or (isinstance(value, float) and math.isfinite(value))


def integer(low: int, high: int | None = None) -> tuple[Callable[[Any], bool], str]:
    """Return a check for an integer field and the words for what it expects."""
    if high is None:
        return (lambda v: is_int(v) and v >= low), f"an integer >= {low}"
    return (lambda v: is_int(v) and low <= v <= high), f"an integer in [{low}, {high}]"


def number(low: float, high: float) -> tuple[Callable[[Any], bool], str]:
    """Return a check for a number field and the words for what it expects."""
    return (lambda v: is_number(v) and low <= v <= high), f"a number in [{low:g}, {high:g}]"


def kind(type_: type, words: str) -> tuple[Callable[[Any], bool], str]:
    """Return a check for a field of one JSON type and the words for what it expects."""
    return (lambda v: isinstance(v, type_)), words


def is_stop(value: Any) -> bool:
    """Whether a value is a string or a list of at most 16 non-empty strings."""
    items = [value] if isinstance(value, str) else value
    return (
        isinstance(items, list)
        and len(items) <= 16
        and all(isinstance(item, str) and item for item in items)
    )


def check_fields(body: Body, table: dict[str, tuple[Callable[[Any], bool], str]]) -> None:
    """Check every top-level field that a table knows and the body holds.

    Raises:
        ClientError: a field fails; ``param`` is its name.
    """
    for name, (ok, expected) in table.items():
        if name in body:
            require(ok(body[name]), name, expected, body[name])


def drop_nulls(body: Body) -> Body:
    """Return the body without its null top-level fields: null means not given."""
    return {name: value for name, value in body.items() if value is not None}
