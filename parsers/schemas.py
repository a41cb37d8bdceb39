"""JSON Schema (Draft 2020-12) over values that a model wrote, with every cost bounded.

Knows schemas and values; knows no tool. References are followed inside the document only. A check
that would cost too much, or that needs what is not there, gives no verdict rather than a wrong one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import orjson
import regex
from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError, UnknownType, ValidationError, best_match
from jsonschema.validators import extend
from referencing.exceptions import Unresolvable

from parsers.body import Body
from parsers.errors import ClientError

MAX_BYTES = 256 * 1024
"""Most bytes of one schema."""
MAX_DEPTH = 64
"""Deepest nesting of one schema."""
PATTERN_SECONDS = 0.01
"""Most time for one match of a pattern."""
MAX_MATCHES = 1000
"""Matches of patterns in one check, which together bound the time of all."""
MAX_REFERENCES = 2000
"""References followed in one check: schemas can branch without end through them."""
MAX_STEPS = 200_000
"""Words of schemas looked at in one check, and entries of each: a schema's size times a value's."""
LONG_SCHEMA = 8192
"""Bytes of a schema from which on a check of a short value counts as long."""

_Check = Callable[[Any, Any, Any, Any], Any]
_LONGEST = 300  # characters of a message
# What the validator raises over what is no schema: where a reference leads to some other value, and
# in strict tools, whose schemas the codec reads in part only.
_STUMBLES = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


class _NoVerdictError(Exception):
    """The check was given up."""


_left: ContextVar[int] = ContextVar("references_left", default=0)
_matches_left: ContextVar[int] = ContextVar("matches_left", default=0)
_steps_left: ContextVar[int] = ContextVar("steps_left", default=0)
_refers: ContextVar[bool] = ContextVar("refers", default=False)  # the whole schema holds references
_REFERENCE = re.compile(rb'"\$(?:dynamicR|r)ef"')
# Patterns, references, and words that hold every member to a schema of its own.
_SLOW = re.compile(
    rb'"(?:pattern|\$ref|\$dynamicRef|items|contains|additionalProperties":\{|propertyNames|unevaluated)'
)


def _spend(left: ContextVar[int], count: int = 1) -> None:
    now = left.get() - count
    if now < 0:
        raise _NoVerdictError
    left.set(now)


def _counted(validator: Any, reference: Any, instance: Any, schema: Any) -> Iterator[Any]:
    _spend(_left)
    yield from Draft202012Validator.VALIDATORS["$ref"](validator, reference, instance, schema) or ()


def _unevaluated(check: _Check) -> _Check:
    """What is left over is looked for along every way through references, however many there are."""

    def checked(validator: Any, value: Any, instance: Any, schema: Any) -> Any:
        if _refers.get():
            raise _NoVerdictError
        return check(validator, value, instance, schema)

    return checked


def _unique(validator: Any, wanted: Any, instance: Any, schema: Any) -> Iterator[Any]:
    if wanted and isinstance(instance, list):
        _spend(_steps_left, len(instance))
        if len(set(map(_key, instance))) < len(instance):
            yield ValidationError("the array has an item twice")


def _key(value: Any) -> Any:
    """Return what is equal for equal JSON values: 1 is 1.0, and is not true."""
    if isinstance(value, bool):
        return bool, value
    if isinstance(value, list):
        return list, tuple(map(_key, value))
    if isinstance(value, dict):
        return dict, frozenset((name, _key(inner)) for name, inner in value.items())
    return value


def _stepped(check: _Check) -> _Check:
    def stepped(validator: Any, value: Any, instance: Any, schema: Any) -> Any:
        _spend(_steps_left, 1 + len(value) if isinstance(value, list | dict) else 1)
        return check(validator, value, instance, schema)

    return stepped


def _matches(pattern: str, text: str) -> bool:
    _spend(_matches_left)
    try:
        return regex.search(pattern, text, timeout=PATTERN_SECONDS) is not None
    except (TimeoutError, regex.error) as error:
        raise _NoVerdictError from error


def _pattern(validator: Any, pattern: str, instance: Any, schema: Any) -> Iterator[Any]:
    if isinstance(instance, str) and not _matches(pattern, instance):
        yield ValidationError(f"{instance!r} does not match {pattern!r}")


def _pattern_properties(
    validator: Any, patterns: Body, instance: Any, schema: Any
) -> Iterator[Any]:
    if not isinstance(instance, dict):
        return
    for pattern, subschema in patterns.items():
        for key, value in instance.items():
            if _matches(pattern, key):
                yield from validator.descend(value, subschema, path=key, schema_path=pattern)


def _additional(validator: Any, allowed: Any, instance: Any, schema: Body) -> Iterator[Any]:
    if not isinstance(instance, dict):
        return
    named, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
    for key, value in instance.items():
        if key in named or any(_matches(pattern, key) for pattern in patterns):
            continue
        if allowed is False:
            yield ValidationError(f"{key!r} is not a property that is allowed")
        else:
            yield from validator.descend(value, allowed, path=key)


_WORDS: dict[str, _Check] = {
    **Draft202012Validator.VALIDATORS,
    "$ref": _counted,
    "$dynamicRef": _counted,
    "pattern": _pattern,
    "patternProperties": _pattern_properties,
    "additionalProperties": _additional,
    "uniqueItems": _unique,
    **{
        word: _unevaluated(Draft202012Validator.VALIDATORS[word])
        for word in ("unevaluatedItems", "unevaluatedProperties")
    },
}
_Validator: Any = extend(  # type: ignore[no-untyped-call]
    Draft202012Validator, {word: _stepped(check) for word, check in _WORDS.items()}
)


def check_size(schema: Any, at: str) -> None:
    """Raise unless a schema is within the bounds of this module.

    Raises:
        ClientError: it is too long or too deep; ``param`` is ``at``.
    """
    level, depth = [schema], 0
    while level:
        if depth > MAX_DEPTH:
            raise ClientError(f"{at}: expected at most {MAX_DEPTH} levels of schema", param=at)
        depth += 1
        level = [
            inner
            for value in level
            for inner in (
                value.values()
                if isinstance(value, dict)
                else value
                if isinstance(value, list)
                else ()
            )
        ]
    if len(orjson.dumps(schema)) > MAX_BYTES:
        raise ClientError(f"{at}: expected at most {MAX_BYTES} bytes of schema", param=at)


def check_schema(schema: Any, at: str) -> None:
    """Raise unless a value is a schema within the bounds: where the codec is not asked.

    Raises:
        ClientError: it is not; ``param`` is ``at``.
    """
    check_size(schema, at)
    try:
        Draft202012Validator.check_schema(schema)
    except RecursionError:
        raise ClientError(f"{at}: nesting is too deep", param=at) from None
    except SchemaError as error:
        what = f"{error.json_path}: {error.message}"[:_LONGEST]
        raise ClientError(f"{at}: expected a JSON Schema: {what}", param=at) from None


def is_schema(value: Any) -> bool:
    """Whether a JSON value is a schema; the codec has asked that of those in requests."""
    try:
        Draft202012Validator.check_schema(value)
    except (SchemaError, RecursionError):
        return False
    return True


def is_slow(schema: Any) -> bool:
    """Whether a check may take its time even for a short value."""
    written = orjson.dumps(schema)
    return len(written) > LONG_SCHEMA or _SLOW.search(written) is not None


def violation(schema: Any, value: Any) -> str | None:
    """Say how a value breaks a schema.

    Args:
        schema: a JSON Schema: the codec accepted it, or ``is_schema`` did; over parts that are
            none there is no verdict.
        value: a JSON value.

    Returns:
        ``<path>: <what is wrong>``, shortened; None where nothing is wrong or no verdict was
        reached within the bounds.
    """
    if not isinstance(schema, dict | bool):
        return None
    _left.set(MAX_REFERENCES)
    _matches_left.set(MAX_MATCHES)
    _steps_left.set(MAX_STEPS)
    try:
        _refers.set(_REFERENCE.search(orjson.dumps(schema)) is not None)
        error = best_match(_Validator(schema).iter_errors(value))
    except (_NoVerdictError, Unresolvable, UnknownType, RecursionError, *_STUMBLES):
        return None
    if error is None:
        return None
    return f"{error.json_path}: {error.message}"[:_LONGEST]
