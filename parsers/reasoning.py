"""Remembers what the model thought before a call, for clients that do not send it back.

A bounded map in memory, from the id of a call to the reasoning of its turn: the most reported
fault of DeepSeek's API is a client that drops ``reasoning_content`` and breaks on its second step.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from threading import Lock
from typing import Protocol


class ReasoningStore(Protocol):
    """Where an exchange asks for and leaves reasoning; a server may keep it elsewhere."""

    def get(self, call_id: str) -> str | None:
        """Return the reasoning of the turn that made a call, None where it is not known."""

    def put(self, call_ids: Iterable[str], reasoning: str) -> None:
        """Remember the reasoning of a turn under the ids of its calls."""


class ReasoningCache:
    """The store that forgets what was not used for longest; threads may share it.

    Args:
        max_chars: characters kept in all, ids among them, so that calls without reasoning fill it
            too; a text under several ids counts for each.
    """

    def __init__(self, max_chars: int = 16_000_000) -> None:
        self._max_chars = max_chars
        self._chars = 0
        self._entries: OrderedDict[str, str] = OrderedDict()
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, call_id: str) -> str | None:
        """See ``ReasoningStore``."""
        with self._lock:
            found = self._entries.get(call_id)
            if found is not None:
                self._entries.move_to_end(call_id)  # now the one used last
            return found

    def put(self, call_ids: Iterable[str], reasoning: str) -> None:
        """See ``ReasoningStore``; a text longer than the whole store is not kept."""
        if len(reasoning) > self._max_chars:
            return
        with self._lock:
            for call_id in call_ids:
                if call_id in self._entries:
                    self._chars -= len(call_id) + len(self._entries.pop(call_id))
                self._chars += len(call_id) + len(reasoning)
                self._entries[call_id] = reasoning
            while self._chars > self._max_chars:
                self._chars -= sum(map(len, self._entries.popitem(last=False)))
