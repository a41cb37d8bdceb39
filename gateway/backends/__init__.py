"""The only thing the application knows of engines.

A backend turns a `GenerateRequest` into a stream of `TokenDelta`s. Where the tokens come from (an
engine in this process, a script, another server) is its own affair.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Protocol

from engine.api import EngineStats, GenerateRequest, ModelInfo, TokenDelta


class Backend(Protocol):
    """What every backend offers. All methods are called on the event loop's thread."""

    @property
    def info(self) -> ModelInfo:
        """The served model; known from construction on, the same for the backend's life."""

    async def start(self) -> None:
        """Load what is needed; when it returns, the backend serves.

        Raises:
            engine.api.EngineError: the model cannot be served; the message says why.
        """

    async def stop(self) -> None:
        """Release everything. Open generations end with FinishReason.ERROR. Idempotent."""

    def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
        """Generate; an async generator, so that a caller can close it (`contextlib.aclosing`).

        The last delta, and only it, has a finish reason. A failure after the start is a delta with
        FinishReason.ERROR, not an exception. Closing the generator before its end aborts the
        generation.

        Args:
            request: what to generate; its id is unique among the live requests.

        Raises:
            engine.api.PromptTooLongError: before the first delta.
            engine.api.EngineDeadError: before the first delta: nothing can be served any more.
            engine.api.EngineError: before the first delta: the request cannot be served.
        """

    def abort(self, request_id: str) -> None:
        """Give a generation up; its stream ends without a further delta.

        Idempotent; harmless for an id that has ended or never was.
        """

    def stats(self) -> EngineStats:
        """Take a snapshot of the counters; `alive` says whether requests can be served."""


__all__ = ["Backend"]
