"""The border between what a reply may say and how it is written."""

from __future__ import annotations

from typing import Protocol


class Sink(Protocol):
    """Where the gate's decisions go. Sizes are in characters of the parser's text."""

    def verbatim(self, size: int) -> None:
        """Let the next characters of the output through as the tokens they came in."""

    def drop(self, size: int) -> None:
        """Leave the next characters of the output out."""

    def say(self, text: str) -> None:
        """Put text into the answer or reasoning, where no marker in it counts as one."""

    def end_reasoning(self) -> None:
        """End the reasoning, for text that belongs to the answer."""

    def open_block(self) -> None:
        """Begin the block of calls, where no call of it will come."""

    def open_call(self, name: str) -> None:
        """Begin a call."""

    def key(self, name: str, *, first: bool) -> None:
        """Begin a member of the call's arguments."""

    def value(self, text: str) -> None:
        """Continue the member's value: a piece of JSON text."""

    def close_call(self, *, empty: bool) -> None:
        """End the call; ``empty`` when no member was begun."""
