"""Finds the part of a body that a reader stumbles over, where the reader does not say which.

Parts are left out one at a time, from the top down: the last one without which the body is read is
the one at fault. Used for refusals only, and bounded, so that a hostile body gains nothing by it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

MOST_TRIES = 200
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
    path: list[Any] = []
    node: Any = body
    left = MOST_TRIES
    while True:
        keys: Sequence[Any] = (
            list(node)
            if isinstance(node, Mapping)
            else range(len(node))
            if isinstance(node, list)
            else ()
        )
        for key in keys:
            left -= 1
            if left < 0:
                return _spelled(path)
            if reads(_without(body, [*path, key])):
                path.append(key)
                node = node[key]
                break
        else:
            return _spelled(path)


def _without(node: Any, path: Sequence[Any]) -> Any:
    key, *rest = path
    copy: Any = dict(node) if isinstance(node, Mapping) else list(node)
    if rest:
        copy[key] = _without(copy[key], rest)
    else:
        del copy[key]
    return copy


def _spelled(path: Sequence[Any]) -> str | None:
    steps = (f"[{key}]" if isinstance(key, int) else f".{key}" for key in path)
    return "".join(steps).removeprefix(".") or None
