"""EngineThread.update_weights: what was begun ends first, what comes waits, and everybody is answered."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.api import EngineDeadError, EngineError
from engine.core import EngineCore
from engine.plan.step import StepPlan
from engine.thread import EngineThread
from tests.engine.threads import PATIENCE, Client, Gate, alone, eventually, make_core, request, run


class Sourced(EngineCore):
    """An engine whose update is a note of when it came."""

    updated: list[tuple[int, list[str]]]

    def update_weights(self, path: Path, *, in_place: bool = False) -> Any:
        if in_place:
            return super().update_weights(path, in_place=True)
        assert not self.has_work
        if path.name == "broken":
            raise EngineError("a broken checkpoint")
        if path.name == "fatal":
            raise MemoryError
        self.updated.append((self.stats().steps, []))
        return SimpleNamespace(load_seconds=1.5, ready_seconds=0.25)


def make_sourced(before_run: Callable[[StepPlan], None] | None = None) -> Sourced:
    core = make_core(before_run)
    core.__class__ = Sourced
    assert isinstance(core, Sourced)
    core.updated = []
    return core


def test_an_update_waits_for_what_was_begun_and_holds_up_what_comes() -> None:
    """Old requests end with the old weights, new ones begin with the new; aborted ones never do."""
    gate = Gate()
    cores: list[Sourced] = []

    def load() -> EngineCore:
        cores.append(make_sourced(gate))
        return cores[0]

    thread = EngineThread(load)
    thread.start()

    async def scenario() -> None:
        old, new, gone = Client(), Client(), Client()
        thread.submit(request("old"), old.sink)
        await asyncio.to_thread(gate.entered.wait, PATIENCE)
        done = thread.update_weights(Path("new"))
        broken = thread.update_weights(Path("broken"))
        refused = thread.update_weights(Path("new"), in_place=True)
        thread.submit(request("new"), new.sink)
        thread.submit(request("gone"), gone.sink)
        thread.abort("gone")
        gate.open.set()
        assert await asyncio.wrap_future(done) == 1.75
        with pytest.raises(EngineError, match="a broken checkpoint"):
            await asyncio.wrap_future(broken)
        with pytest.raises(EngineError, match="cannot be written in place"):
            await asyncio.wrap_future(refused)
        await new.ended.wait()
        await eventually(old.ended.is_set)
        assert (old.tokens, new.tokens) == (alone(request("old")), alone(request("new")))
        assert gone.deltas == []
        assert cores[0].updated == [(5, [])], "after the five steps of the old request"

    run(thread, scenario)


def test_an_update_that_takes_the_weights_with_it_ends_the_thread(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Where nothing is left to serve with, everybody hears so."""
    thread = EngineThread(make_sourced)
    thread.start()

    async def scenario() -> None:
        client = Client()
        done = thread.update_weights(Path("fatal"))
        with pytest.raises(EngineDeadError):
            await asyncio.wrap_future(done)
        await eventually(lambda: not thread.alive)
        with pytest.raises(EngineDeadError):
            thread.submit(request("late"), client.sink)
        with pytest.raises(EngineDeadError):
            thread.update_weights(Path("new"))

    with caplog.at_level(logging.ERROR):
        run(thread, scenario)


def test_an_update_that_nobody_does_is_answered() -> None:
    """Stopped before its turn, an update ends with an error instead of never."""
    gate = Gate()
    thread = EngineThread(lambda: make_sourced(gate))
    thread.start()

    async def scenario() -> None:
        client = Client()
        thread.submit(request("old", max_tokens=40), client.sink)
        await asyncio.to_thread(gate.entered.wait, PATIENCE)
        done = thread.update_weights(Path("new"))
        stopping = asyncio.create_task(asyncio.to_thread(thread.stop))
        await asyncio.sleep(0.01)
        gate.open.set()
        with pytest.raises(EngineDeadError, match="shutting down"):
            await asyncio.wrap_future(done)
        await stopping

    run(thread, scenario)
