"""The engine in this process: the one door to engine.thread, and so to torch.

Constructing the backend reads config.json and loads no torch; `start` loads the model in the
engine's own thread while the event loop stays free.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import TYPE_CHECKING

from engine import TINY_CHECKPOINT
from engine.api import (
    EngineDeadError,
    EngineError,
    EngineStats,
    GenerateRequest,
    ModelInfo,
    TokenDelta,
)
from engine.architectures import read_config
from engine.config import ModelConfig
from engine.options import EngineConfig
from gateway.threads import LONG_PROMPT, in_thread_if

if TYPE_CHECKING:
    from engine.thread import EngineThread

#: Name under which the checkpoint that ships is listed.
TINY_NAME = "bathyal-tiny"


class _Mailbox:
    """The deltas of one request on their way to its reader.

    What has come while the reader was busy is handed over as one delta, so that a slow reader costs
    a write per look, not one per token, and holds token ids only: at most max_tokens of them.
    """

    def __init__(self) -> None:
        self._waiting: list[TokenDelta] = []
        self._aborted = False
        self._come = asyncio.Event()

    def put(self, delta: TokenDelta) -> None:
        """Leave a delta; on the event loop's thread."""
        self._waiting.append(delta)
        self._come.set()

    def abort(self) -> None:
        """Nothing follows, and what waits is not wanted."""
        self._aborted = True
        self._come.set()

    async def get(self) -> TokenDelta | None:
        """Return all that has come, as one delta; None after an abort."""
        await self._come.wait()
        self._come.clear()
        if self._aborted:
            return None
        waiting, self._waiting = self._waiting, []
        return waiting[0] if len(waiting) == 1 else _joined(waiting)


def _joined(deltas: list[TokenDelta]) -> TokenDelta:
    """One delta for several: all tokens, the end if there is one, the newest usage that is known."""
    last = deltas[-1]
    logprobs = None
    if all(delta.logprobs is not None for delta in deltas if delta.token_ids):
        logprobs = tuple(one for delta in deltas for one in delta.logprobs or ())
    return last._replace(
        token_ids=tuple(token_id for delta in deltas for token_id in delta.token_ids),
        logprobs=logprobs,
        usage=next((d.usage for d in reversed(deltas) if d.usage is not None), None),
        prompt_logprobs=deltas[0].prompt_logprobs,  # only a first delta has them
    )


class EmbeddedBackend:
    """Serves a checkpoint from this process; implements gateway.backends.Backend.

    Args:
        path: folder of the checkpoint; the one that ships by default.
        options: how to run it.
        name: name under which it is listed; the folder's name by default.

    Raises:
        EngineError: the folder holds no config.json that can be served, no tokenizer.json, or the
            options do not fit the model.
    """

    def __init__(
        self,
        path: Path = TINY_CHECKPOINT,
        options: EngineConfig | None = None,
        *,
        name: str | None = None,
    ) -> None:
        self._path = path.resolve()
        self._options = EngineConfig() if options is None else options
        self._info = _model_info(self._path, self._options, name)
        self._thread: EngineThread | None = None
        self._streams: dict[str, _Mailbox] = {}

    @property
    def info(self) -> ModelInfo:
        """The served model."""
        return self._info

    async def start(self) -> None:
        """Load the model.

        Raises:
            EngineError: it cannot be served; the message says why.
        """
        thread = await asyncio.to_thread(_start_thread, self._path, self._options)
        self._thread = thread

    async def stop(self) -> None:
        """Stop the engine; open generations end with an error. Idempotent."""
        if self._thread is not None:
            await asyncio.to_thread(self._thread.stop)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
        """Generate; see gateway.backends.Backend.

        Raises:
            PromptTooLongError: before the first delta.
            EngineError: before the first delta.
        """
        if self._thread is None:
            raise EngineDeadError("the engine is not loaded")
        if request.images:
            raise EngineError("images: expected none, for the engine has no vision tower")
        from engine.thread import Sink

        deltas = _Mailbox()
        sink = Sink(asyncio.get_running_loop(), deltas.put)
        # the engine looks at every id of the prompt
        long = len(request.prompt_ids) >= LONG_PROMPT
        await in_thread_if(long, self._thread.submit, request, sink)
        self._streams[request.id] = deltas
        try:
            while True:
                delta = await deltas.get()
                if delta is None or self._streams.get(request.id) is not deltas:
                    return  # aborted
                if delta.finish_reason is not None:
                    # The id may be used again from now on, so it is ours no more.
                    del self._streams[request.id]
                    yield delta
                    return
                yield delta
        finally:
            if self._streams.get(request.id) is deltas:
                self.abort(request.id)

    def abort(self, request_id: str) -> None:
        """Give a generation up; its stream ends without a further delta. Idempotent."""
        deltas = self._streams.pop(request_id, None)
        if deltas is not None and self._thread is not None:
            self._thread.abort(request_id)
            deltas.abort()

    def stats(self) -> EngineStats:
        """Take a snapshot of the engine's counters."""
        return EngineStats(alive=False) if self._thread is None else self._thread.stats()


def _start_thread(path: Path, options: EngineConfig) -> EngineThread:
    """Import the engine and load the model; takes seconds, so it runs off the event loop."""
    from engine.core import load_engine
    from engine.thread import EngineThread

    thread = EngineThread(lambda: load_engine(path, options))
    thread.start()
    return thread


def _model_info(path: Path, options: EngineConfig, name: str | None) -> ModelInfo:
    config = read_config(path)
    tokenizer = path / "tokenizer.json"
    if not tokenizer.is_file():
        raise EngineError(f"{tokenizer}: file not found; a served checkpoint has its tokenizer")
    if name is None:
        name = TINY_NAME if path == TINY_CHECKPOINT.resolve() else path.name
    return ModelInfo(
        name=name,
        version=config.version if isinstance(config, ModelConfig) else "plain",
        max_model_len=options.resolve_max_model_len(config.max_position_embeddings),
        eos_token_ids=config.eos_token_ids,
        tokenizer_path=str(tokenizer),
        has_vision=False,
        vocab_size=config.vocab_size,
    )
