"""The declared tools: which names exist, and which JSON types a parameter admits.

Knows JSON Schema as far as types go; knows neither DSML nor policies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from parsers.jsontext import is_strict, type_of
from parsers.schemas import is_slow, violation

TYPES = frozenset({"string", "number", "integer", "boolean", "object", "array", "null"})
"""The JSON Schema types; an integer is a number too."""

_DEEPEST = 16  # of $ref and combinators; beyond it anything is admitted
_NAMES: dict[type, str] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    list: "array",
    dict: "object",
    type(None): "null",
}


class ToolSet:
    """The tools of one request.

    Args:
        tools: function tools in the Chat Completions form, checked.

    Attributes:
        slow: whether a check of arguments may take long however short they are.
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        functions = [tool["function"] for tool in tools]
        self._index = {function["name"]: i for i, function in enumerate(functions)}
        self._schemas = [function.get("parameters") for function in functions]
        self._strict = [function.get("strict") is True for function in functions]
        self.slow = any(map(is_slow, self._schemas))
        self._admitted: dict[tuple[int, str], frozenset[str]] = {}

    def __len__(self) -> int:
        return len(self._schemas)

    def index(self, name: str) -> int:
        """Return a tool's position, -1 where no tool has this name."""
        return self._index.get(name, -1)

    def admits(self, tool: int, parameter: str) -> frozenset[str]:
        """Return the JSON types a parameter's schema admits.

        Args:
            tool: position of the tool, -1 for one that is not declared.
            parameter: name of the parameter.

        Returns:
            A subset of ``TYPES``; all of them where the schema does not say.
        """
        if tool < 0:
            return TYPES
        key = (tool, parameter)
        if key not in self._admitted:
            self._admitted[key] = self._read(self._schemas[tool], parameter)
        return self._admitted[key]

    def has_schema(self, tool: int) -> bool:
        """Whether the arguments of a tool can be checked."""
        return tool >= 0 and isinstance(self._schemas[tool], dict | bool)

    def is_strict(self, tool: int) -> bool:
        """Whether a tool is declared ``strict``."""
        return tool >= 0 and self._strict[tool]

    def violation(self, tool: int, arguments: str) -> str | None:
        """Say how arguments break the schema of their tool.

        Args:
            tool: position of the tool, one that ``has_schema``.
            arguments: JSON text.
        """
        if not is_strict(arguments):
            return "$: the arguments are no strict JSON"
        return violation(self._schemas[tool], orjson.loads(arguments))

    @staticmethod
    def _read(root: Any, parameter: str) -> frozenset[str]:
        if not isinstance(root, dict):
            return TYPES
        properties = root.get("properties")
        if not isinstance(properties, dict) or parameter not in properties:
            extra = root.get("additionalProperties")
            return types_of(extra, root) if isinstance(extra, dict) else TYPES
        return types_of(properties[parameter], root)


def types_of(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """Return the types a schema admits, as far as its own words and local references tell.

    Args:
        schema: a JSON Schema (Draft 2020-12): an object or a boolean.
        root: the document that local ``$ref`` point into.
    """
    return _types(schema, root, 0, {})


def _types(
    schema: Any, root: Mapping[str, Any], depth: int, known: dict[int, frozenset[str]]
) -> frozenset[str]:
    """Read a schema that is inside of ``depth`` others; each is read once, by its identity."""
    if not isinstance(schema, dict) or depth > _DEEPEST:
        return TYPES
    if id(schema) in known:
        return known[id(schema)]
    known[id(schema)] = TYPES  # for a reference from inside to itself
    admitted = TYPES
    named = schema.get("type")
    if named is not None:
        admitted &= _widened(named if isinstance(named, list) else [named])
    if isinstance(schema.get("enum"), list):
        admitted &= _widened(_NAMES[type(value)] for value in schema["enum"])
    if "const" in schema:
        admitted &= _widened([_NAMES[type(schema["const"])]])
    if isinstance(schema.get("$ref"), str):
        admitted &= _types(_resolve(schema["$ref"], root), root, depth + 1, known)
    for word in ("anyOf", "oneOf"):
        if isinstance(schema.get(word), list):
            branches = [_types(branch, root, depth + 1, known) for branch in schema[word]]
            admitted &= frozenset().union(*branches)
    every = schema.get("allOf")
    for branch in every if isinstance(every, list) else ():
        admitted &= _types(branch, root, depth + 1, known)
    known[id(schema)] = admitted
    return admitted


def fits(text: str, admitted: frozenset[str]) -> bool:
    """Whether a strict JSON text has one of the admitted types."""
    kind = type_of(text)
    return kind in admitted or (kind == "integer" and "number" in admitted)


def _widened(names: Any) -> frozenset[str]:
    types = frozenset(name for name in names if isinstance(name, str)) & TYPES
    return types | {"integer"} if "number" in types else types


def _resolve(pointer: str, root: Mapping[str, Any]) -> Any:
    """Follow a local JSON pointer; an unknown or foreign one admits anything."""
    if not pointer.startswith("#"):
        return True
    here: Any = root
    for step in pointer[1:].split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        if not isinstance(here, dict) or step not in here:
            return True
        here = here[step]
    return here
