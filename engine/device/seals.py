"""Seals: a captured graph reads and writes addresses, so what lies there must stay there.

Whoever owns a buffer says how to find it; when graphs are captured its address, shape, strides and
type are noted, and compared before graphs run on a changed set of requests. A pool that was made
anew in between would otherwise be read where it used to be.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

Found = Mapping[str, Tensor]
_Mark = tuple[int, tuple[int, ...], tuple[int, ...], str]


class SealError(RuntimeError):
    """A buffer is not where it was when graphs were captured."""


class Seals:
    """Buffers of several owners."""

    def __init__(self) -> None:
        self._owners: dict[str, Callable[[], Found]] = {}
        self._marks: dict[tuple[str, str], _Mark] = {}

    def add(self, owner: str, find: Callable[[], Found]) -> None:
        """Name an owner and how to find its buffers, asked anew at every check.

        Raises:
            ValueError: there is one of this name.
        """
        if owner in self._owners:
            raise ValueError(f"owner {owner} has its seals already")
        self._owners[owner] = find

    def seal(self) -> None:
        """Note where everything lies now."""
        self._marks = {
            (owner, name): _mark(tensor)
            for owner, find in self._owners.items()
            for name, tensor in find().items()
        }

    def check(self) -> None:
        """Compare with what was noted.

        Raises:
            SealError: naming every buffer that moved, changed or is gone, and how.
        """
        now = {
            (owner, name): _mark(tensor)
            for owner, find in self._owners.items()
            for name, tensor in find().items()
        }
        if now == self._marks:
            return
        wrong = [
            f"{owner}.{name}: {_say(mark)} when captured, now {_say(now.get((owner, name)))}"
            for (owner, name), mark in self._marks.items()
            if now.get((owner, name)) != mark
        ]
        wrong += [f"{owner}.{name}: new" for owner, name in now.keys() - self._marks.keys()]
        raise SealError("buffers that captured graphs use have changed: " + "; ".join(wrong))


def _mark(tensor: Tensor) -> _Mark:
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), str(tensor.dtype)


def _say(mark: _Mark | None) -> str:
    if mark is None:
        return "absent"
    address, shape, strides, dtype = mark
    return f"{dtype} {list(shape)} strides {list(strides)} at {address:#x}"
