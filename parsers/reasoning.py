"""Remembers what the model thought before a call, for clients that do not send it back.

A bounded map in memory, from the id of a call to the reasoning of its turn: the most reported
fault of DeepSeek's API is a client that drops ``reasoning_content`` and breaks on its second step.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Protocol


class ReasoningStore(Protocol):
    """Where an exchange asks for and leaves reasoning; a server may keep it elsewhere."""

    def get(self, call_id: str) -> str | None:
        """Return the reasoning of the turn that made a call, None where it is not known."""

    def put(self, call_ids: Iterable[str], reasoning: str) -> None:
        """Remember the reasoning of a turn under the ids of its calls."""


class ReasoningCache:
    """The store that forgets what was not used for longest.

    Every step is one operation of a dictionary, so threads that share it can at worst make each
    other forget an entry.

    Args:
        max_chars: characters of reasoning kept in all; a text under several ids counts for each.
    """

    def __init__(self, max_chars: int = 16_000_000) -> None:
        self._max_chars = max_chars
        self._entries: OrderedDict[str, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, call_id: str) -> str | None:
        """See ``ReasoningStore``."""
        found = self._entries.pop(call_id, None)
        if found is not None:
            self._entries[call_id] = found  # now the one used last
        return found

    def put(self, call_ids: Iterable[str], reasoning: str) -> None:
        """See ``ReasoningStore``; a text longer than the whole store is not kept."""
        if len(reasoning) > self._max_chars:
            return
        for call_id in call_ids:
            self._entries.pop(call_id, None)
            self._entries[call_id] = reasoning
        kept = list(self._entries.items())
        excess = sum(len(text) for _, text in kept) - self._max_chars
        for call_id, text in kept:
            if excess <= 0:
                return
            self._entries.pop(call_id, None)
            excess -= len(text)
