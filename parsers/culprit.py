"""Finds the part of a body that the codec refuses, of whose errors few have a path.

First by its words. Where they name nothing, parts are left out one at a time, large ones first, and
then only parts of one without which the body is read: the smallest such part is the one at fault.
Used for refusals only, and bounded, so that a hostile body gains nothing by it.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

# The codec names a field in quotes, as "Invalid x value" or not at all.
_QUOTED_PATH = re.compile(r"'((?:messages|tools|stop|input)\[\d+\][^']*)'")
# In Messages it names a message as "messages.1: ...", for a file as ".messages[1]: ...".
_DOTTED_MESSAGE = re.compile(r"\A\.?messages[.\[](\d+)")
_INVALID_VALUE = re.compile(r"Invalid (\w+)(?: and \w+)? value")
_BAD_SCHEMA = re.compile(r"Invalid schema for function '([^']*)'")
_PARAM_BY_WORDS = (
    ("response_format", "response_format"),
    ("'text.format'", "text.format"),
    ("Invalid json schema", "response_format.json_schema.schema"),
    ("tool_choice", "tool_choice"),
    ("Stop string", "stop"),
    ("prefix", "messages"),
    ("max_tokens", "max_tokens"),
    ("'call_id'", "input"),
)
# A call of a turn that had no reasoning: the mark in its id excuses the turn (protocol.md 2.3).
_EXCUSED = re.compile(r"call_.._ET_")

_Path = tuple[Any, ...]

MOST_TRIES = 100
MOST_BYTES = 64 * 1024
"""Bodies that are longer are not searched: each try reads one anew."""


def culprit(body: Mapping[str, Any], size: int, reads: Callable[[Any], bool]) -> str | None:
    """Return the path of the smallest part without which a body is read.

    Args:
        body: a body that is not read as it stands.
        size: of its text in bytes.
        reads: says whether a body is read.

    Returns:
        The path, such as ``messages[1].content[0]``; None where none was found within the bounds.
    """
    if size > MOST_BYTES:
        return None
    found: _Path = ()
    waiting = deque(_parts((), body))
    for _ in range(MOST_TRIES):
        if not waiting:
            break
        path, node = waiting.popleft()
        if reads(_without(body, path)):
            found = path
            waiting.clear()
        waiting += _parts(path, node)
    return _spelled(found)


def _parts(path: _Path, node: Any) -> Iterator[tuple[_Path, Any]]:
    members = (
        node.items()
        if isinstance(node, Mapping)
        else reversed(list(enumerate(node)))  # of a history, what came last is what is new
        if isinstance(node, list)
        else ()
    )
    return (((*path, key), value) for key, value in members)


def _without(node: Any, path: _Path) -> Any:
    key, rest = path[0], path[1:]
    copy: Any = dict(node) if isinstance(node, Mapping) else list(node)
    if rest:
        copy[key] = _without(copy[key], rest)
    else:
        del copy[key]
    return copy


def _spelled(path: _Path) -> str | None:
    steps = (f"[{key}]" if isinstance(key, int) else f".{key}" for key in path)
    return "".join(steps).removeprefix(".") or None


def function_of(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what holds a tool's name and schema: Chat has it beneath `function`."""
    inner = tool.get("function")
    return inner if isinstance(inner, dict) else tool


def named(message: str, body: Mapping[str, Any]) -> str | None:
    """Guess the field that a codec message speaks of; None where it names none."""
    if path := _QUOTED_PATH.search(message):
        return path.group(1)
    if dotted := _DOTTED_MESSAGE.match(message):
        return f"messages[{dotted[1]}]"
    if value := _INVALID_VALUE.search(message):
        return value.group(1)
    if schema := _BAD_SCHEMA.search(message):
        for i, tool in enumerate(body.get("tools", [])):
            if function_of(tool).get("name") == schema.group(1):
                inside = "parameters" if function_of(tool) is tool else "function.parameters"
                return f"tools[{i}].{inside if 'input_schema' not in tool else 'input_schema'}"
    if "must be passed back" in message:
        return _without_reasoning(body)
    for words, param in _PARAM_BY_WORDS:
        if words in message:
            if "text" in body:  # Responses: the same field by another name
                return re.sub(r"response_format(\.json_schema)?", "text.format", param)
            return param
    return None


def _without_reasoning(body: Mapping[str, Any]) -> str:
    """Name the first turn with calls whose reasoning is missing and not excused by an id."""
    for i, message in enumerate(body.get("messages", ())):
        calls = message.get("tool_calls") or ()
        excused = any(_EXCUSED.match(call["id"]) for call in calls)
        if calls and not excused and message.get("reasoning_content") is None:
            return f"messages[{i}].reasoning_content"
    return "input"
