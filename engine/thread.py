"""The engine's thread: owns the model, runs steps while there is work, sleeps when there is none.

Callers live on event loops. A submit or an abort is a message in the inbox, read between steps; the
deltas of a step go back in one `call_soon_threadsafe` per event loop. Nothing else is shared but
the table of open requests, under a lock that is held for a few dictionary operations.

A request is open from `submit` until its last delta, its abort or the thread's end. Whatever ends
the thread, each open request gets a last delta, so nobody waits for ever.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from engine.api import (
    EngineDeadError,
    EngineError,
    EngineStats,
    FinishReason,
    GenerateRequest,
    TokenDelta,
    Usage,
)
from engine.core import EngineCore

logger = logging.getLogger(__name__)

_DIED = "the engine has stopped because of an internal fault; the server's log says more"
_STOPPED = "the server is shutting down"


@dataclass(frozen=True, slots=True)
class Sink:
    """Where a request's deltas go.

    Args:
        loop: the event loop whose thread calls `deliver`.
        deliver: takes each delta, in order; must return at once.
    """

    loop: asyncio.AbstractEventLoop
    deliver: Callable[[TokenDelta], None]


class _Open:
    """An open request. Its identity tells it from an earlier one of the same id."""

    __slots__ = ("closed", "num_tokens", "request", "sink")

    def __init__(self, request: GenerateRequest, sink: Sink) -> None:
        self.request = request
        self.sink = sink
        self.num_tokens = 0  # sent so far
        self.closed = False  # aborted: what is on its way to the sink is dropped


@dataclass(frozen=True, slots=True)
class _Submit:
    entry: _Open


@dataclass(frozen=True, slots=True)
class _Abort:
    entry: _Open


@dataclass(frozen=True, slots=True)
class _Update:
    path: Path
    in_place: bool
    done: Future[float]


@dataclass(frozen=True, slots=True)
class _Stop:
    pass


_Message = _Submit | _Abort | _Update | _Stop


class EngineThread:
    """Runs an EngineCore.

    `submit`, `abort` and `stats` may be called from any thread.

    Args:
        load: makes the engine; called in the new thread, so that a GPU's context belongs to it.
    """

    def __init__(self, load: Callable[[], EngineCore]) -> None:
        self._load = load
        self._inbox: queue.SimpleQueue[_Message] = queue.SimpleQueue()
        self._lock = threading.Lock()  # of _open and _ended
        self._open: dict[str, _Open] = {}
        self._begun: dict[str, _Open] = {}  # those the engine knows; the thread's own
        self._updates: deque[_Update] = deque()  # waiting for what was begun to end
        self._delayed: list[_Open] = []  # waiting for an update
        self._core: EngineCore | None = None  # while it is loaded
        self._last_stats = EngineStats()
        self._loaded = threading.Event()
        self._load_error: BaseException | None = None
        self._ended = False
        self._farewell = _STOPPED  # what open requests are told at the end
        self._thread = threading.Thread(target=self._main, name="bathyal-engine", daemon=True)

    @property
    def alive(self) -> bool:
        """Whether requests can be served: loaded, and neither stopped nor dead."""
        return self._core is not None and not self._ended

    def start(self) -> None:
        """Start the thread and wait until the engine is loaded. Blocks for as long as that takes.

        Raises:
            Exception: whatever `load` raised; the thread has ended then.
        """
        self._thread.start()
        self._loaded.wait()
        if self._load_error is not None:
            raise self._load_error

    def stop(self) -> None:
        """Stop after the step that runs and wait for it. Open requests end with an error."""
        self._inbox.put(_Stop())
        if self._thread.ident is not None:
            self._thread.join()

    def submit(self, request: GenerateRequest, sink: Sink) -> None:
        """Open a request.

        Raises:
            PromptTooLongError: its prompt does not fit.
            EngineError: it can never be served, or its id is that of an open request.
            EngineDeadError: the engine does not run.
        """
        core = self._core
        if core is None:
            raise EngineDeadError(self._farewell if self._ended else "the engine is not loaded")
        core.check(request)
        entry = _Open(request, sink)
        with self._lock:
            if self._ended:
                raise EngineDeadError(self._farewell)
            if request.id in self._open:
                raise EngineError(f"request id {request.id}: expected one that is not in use")
            self._open[request.id] = entry
            self._inbox.put(_Submit(entry))

    def abort(self, request_id: str) -> None:
        """Give a request up: no delta follows, its memory is free before the next step.

        Idempotent, and harmless for an id that is not open. A request is open until its last delta
        is sent off, so that one delta may still arrive if the abort came just after.
        """
        entry = self._open.get(request_id)
        if entry is not None:
            self._give_up(entry)

    def update_weights(self, path: Path, *, in_place: bool = False) -> Future[float]:
        """Serve another checkpoint of the same shape.

        Requests that the engine has begun run to their end first; those that come meanwhile wait
        until the new weights are there.

        Args:
            path: folder of the checkpoint.
            in_place: as EngineCore.update_weights; always refused there.

        Returns:
            the seconds of loading and rebuilding, once done; EngineError if it is refused.

        Raises:
            EngineDeadError: the engine does not run.
        """
        update = _Update(path, in_place, Future())
        with self._lock:
            if self._core is None or self._ended:
                raise EngineDeadError(self._farewell if self._ended else "the engine is not loaded")
            self._inbox.put(update)
        return update.done

    def stats(self) -> EngineStats:
        """Take a snapshot of the counters."""
        core = self._core
        stats = self._last_stats if core is None else core.stats()
        return dataclasses.replace(stats, alive=self.alive)

    def _main(self) -> None:
        try:
            core = self._load()
        except BaseException as error:  # start() raises it in its caller's thread
            self._load_error = error
            self._ended = True
            self._loaded.set()
            return
        self._core = core
        self._loaded.set()
        try:
            self._run(core)
        except BaseException:
            logger.exception("the engine's thread died")
            self._farewell = _DIED
        finally:
            self._last_stats = core.stats()
            self._end()
            _close(core)
            self._core = None  # whoever keeps this object does not keep the model's memory

    def _run(self, core: EngineCore) -> None:
        """Read the inbox and step, until told to stop."""
        while True:
            if self._updates and not core.has_work:
                self._update(core, self._updates.popleft())
                continue
            match self._next_message(core):
                case None:
                    self._hop(core.step())
                case _Submit(entry):
                    if self._updates:
                        self._delayed.append(entry)
                    else:
                        self._begin(core, entry)
                case _Abort(entry):
                    if self._begun.get(entry.request.id) is entry:
                        core.abort(entry.request.id)
                        del self._begun[entry.request.id]
                case _Update() as update:
                    if update.in_place:  # refused, so nothing needs to end for it
                        self._update(core, update)
                    else:
                        self._updates.append(update)
                case _Stop():
                    return

    def _begin(self, core: EngineCore, entry: _Open) -> None:
        if not entry.closed:
            core.submit(entry.request)
            self._begun[entry.request.id] = entry

    def _update(self, core: EngineCore, update: _Update) -> None:
        """Take new weights; nothing runs. Afterwards those who came meanwhile begin."""
        try:
            built = core.update_weights(update.path, in_place=update.in_place)
        except EngineError as error:
            update.done.set_exception(error)
        except BaseException as error:  # the engine has no weights any more
            update.done.set_exception(EngineDeadError(_DIED))
            raise error from None
        else:
            update.done.set_result(built.load_seconds + built.ready_seconds)
        if not self._updates:
            for entry in self._delayed:
                self._begin(core, entry)
            self._delayed.clear()

    def _next_message(self, core: EngineCore) -> _Message | None:
        """Take a message; None if there is none and a step is due. Sleeps while neither is."""
        if core.has_work:
            try:
                return self._inbox.get_nowait()
            except queue.Empty:
                return None
        if self._inbox.empty():
            core.check_integrity()
        return self._inbox.get()

    def _give_up(self, entry: _Open) -> None:
        """Abort a request unless it has ended."""
        with self._lock:
            if self._open.get(entry.request.id) is entry:
                del self._open[entry.request.id]
                entry.closed = True
                self._inbox.put(_Abort(entry))

    def _hop(self, deltas: list[TokenDelta]) -> None:
        """Send the deltas of a step."""
        batch = []
        for delta in deltas:
            entry = self._begun[delta.request_id]
            entry.num_tokens += len(delta.token_ids)
            batch.append((entry, delta))
            if delta.finish_reason is not None:
                del self._begun[delta.request_id]
                with self._lock:
                    if not entry.closed:
                        del self._open[delta.request_id]
        self._send(batch)

    def _send(self, batch: list[tuple[_Open, TokenDelta]]) -> None:
        """Pass deltas to their loops, in one call for each loop."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Open, TokenDelta]]] = {}
        for entry, delta in batch:
            by_loop.setdefault(entry.sink.loop, []).append((entry, delta))
        for loop, part in by_loop.items():
            try:
                loop.call_soon_threadsafe(_deliver, part)
            except RuntimeError:  # the loop is closed, so nobody is left to tell
                for entry, _ in part:
                    self._give_up(entry)

    def _end(self) -> None:
        """Tell every open request that it ends here."""
        with self._lock:
            self._ended = True
            entries = list(self._open.values())
            self._open.clear()
        for update in self._unfinished_updates():
            update.done.set_exception(EngineDeadError(self._farewell))
        self._send([(entry, self._last_delta(entry)) for entry in entries])

    def _unfinished_updates(self) -> list[_Update]:
        """Updates that nobody will do, those in the inbox included."""
        found = list(self._updates)
        while True:
            try:
                message = self._inbox.get_nowait()
            except queue.Empty:
                return found
            if isinstance(message, _Update):
                found.append(message)

    def _last_delta(self, entry: _Open) -> TokenDelta:
        return TokenDelta(
            request_id=entry.request.id,
            token_ids=(),
            finish_reason=FinishReason.ERROR,
            usage=Usage(len(entry.request.prompt_ids), entry.num_tokens),
            error=self._farewell,
        )


def _close(core: EngineCore) -> None:
    """Let the engine write what it has collected; a fault there changes nothing any more."""
    try:
        core.close()
    except Exception:
        logger.exception("what the engine has collected could not be written")


def _deliver(batch: list[tuple[_Open, TokenDelta]]) -> None:
    """Pass deltas to their sinks; runs on the event loop."""
    for entry, delta in batch:
        if not entry.closed:
            entry.sink.deliver(delta)
