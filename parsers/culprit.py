"""Finds the part of a body that a reader stumbles over, where the reader does not say which.

Parts are left out one at a time, large ones first, and then only parts of one without which the body
is read: the smallest such part is the one at fault. Used for refusals only, and bounded, so that a hostile body gains nothing by it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

_Path = tuple[Any, ...]

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
        else enumerate(node)
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
