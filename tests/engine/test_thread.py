"""EngineThread: submit and abort from event loops, one hop a step, a last delta for everybody."""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
import random
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from engine.api import (
    EngineDeadError,
    EngineError,
    FinishReason,
    PromptTooLongError,
    TokenDelta,
)
from engine.core import EngineCore
from engine.plan.scheduler import Scheduler
from engine.plan.step import StepPlan
from engine.thread import EngineThread, Sink
from tests.engine.threads import (
    PATIENCE,
    VOCAB,
    Client,
    Gate,
    alone,
    eventually,
    make_core,
    request,
    run,
    started,
)


def test_many_requests_each_get_their_own_tokens() -> None:
    """More requests than slots, submitted at once, all end with what they would get alone."""
    thread = started()

    async def scenario() -> None:
        requests = [request(f"r{i}", tuple(range(i, 3 * i + 1)), 3 + i % 4) for i in range(12)]
        clients = [Client() for _ in requests]
        for r, client in zip(requests, clients, strict=True):
            thread.submit(r, client.sink)
        for r, client in zip(requests, clients, strict=True):
            await client.ended.wait()
            assert client.tokens == alone(r)
        stats = thread.stats()
        assert stats.free_blocks == stats.total_blocks
        assert stats.alive

    run(thread, scenario)


def test_a_step_hops_once_per_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """The deltas of all requests of a step cross to the loop in one call."""
    hops: list[int] = []
    thread = started(gate := Gate())

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        hop = loop.call_soon_threadsafe

        def counting(callback: Callable[..., object], batch: list[object]) -> object:
            hops.append(len(batch))
            return hop(callback, batch)

        monkeypatch.setattr(loop, "call_soon_threadsafe", counting)
        clients = [Client() for _ in range(4)]
        for i, client in enumerate(clients):
            thread.submit(request(f"r{i}"), client.sink)
        gate.open.set()
        for client in clients:
            await client.ended.wait()

    run(thread, scenario)
    # The first step may have begun before the last of the four was submitted.
    assert sum(hops) == 20
    assert len(hops) <= 6


def test_the_idle_thread_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without work the thread waits in one blocking read: no steps, no checks, no polling."""
    reads: list[str] = []
    checks: list[str] = []
    read, check = EngineThread._next_message, EngineCore.check_integrity

    def counted_read(self: EngineThread, core: EngineCore) -> Any:
        reads.append("read")
        return read(self, core)

    def counted_check(self: EngineCore) -> None:
        checks.append("check")
        check(self)

    monkeypatch.setattr(EngineThread, "_next_message", counted_read)
    monkeypatch.setattr(EngineCore, "check_integrity", counted_check)
    thread = started()

    async def scenario() -> None:
        client = Client()
        thread.submit(request("a"), client.sink)
        await client.ended.wait()
        await eventually(lambda: len(checks) == 2)  # before the request and after it
        steps, num_reads = thread.stats().steps, len(reads)
        await asyncio.sleep(0.2)
        assert (steps, num_reads, 2) == (thread.stats().steps, len(reads), len(checks))

    run(thread, scenario)


def test_abort_frees_before_the_next_step() -> None:
    """Aborted during a step, a request is gone before the next one and hears nothing more."""
    plans: list[StepPlan] = []
    gate = Gate()

    def before_run(plan: StepPlan) -> None:
        plans.append(plan)
        if len(plans) == 2:
            gate(plan)

    thread = started(before_run)

    async def scenario() -> None:
        leaver, stayer = Client(), Client()
        thread.submit(request("leaver", max_tokens=50), leaver.sink)
        thread.submit(request("stayer", max_tokens=5), stayer.sink)
        await asyncio.to_thread(gate.entered.wait, PATIENCE)
        await asyncio.sleep(0)
        heard = len(leaver.deltas)
        thread.abort("leaver")
        thread.abort("leaver")
        gate.open.set()
        await stayer.ended.wait()

        assert len(leaver.deltas) == heard
        assert not any(c.request_id == "leaver" for plan in plans[2:] for c in plan.chunks)
        assert stayer.tokens == alone(request("stayer"))
        await eventually(lambda: not thread.stats().running)
        stats = thread.stats()
        assert stats.free_blocks == stats.total_blocks

    run(thread, scenario)


def test_nothing_arrives_after_an_abort() -> None:
    """A delta that was already on its way to the loop is dropped."""
    gate = Gate()
    plans = itertools.count(1)

    def before_run(plan: StepPlan) -> None:
        if next(plans) == 3:
            gate(plan)

    thread = started(before_run)

    async def scenario() -> None:
        client = Client()
        thread.submit(request("a", max_tokens=50), client.sink)
        assert gate.entered.wait(PATIENCE)  # the loop does not run meanwhile
        thread.abort("a")
        gate.open.set()
        await asyncio.sleep(0.02)

        assert client.deltas == []

    run(thread, scenario)


def test_an_id_can_be_used_again_at_once() -> None:
    """After an abort a new request of the same id hears its own tokens only."""
    thread = started(lambda plan: time.sleep(0.001))

    async def scenario() -> None:
        for round_ in range(30):
            first, second = Client(), Client()
            left = request("same", (9, 9, 9), max_tokens=50)
            thread.submit(left, first.sink)
            await asyncio.sleep(0.0005 * (round_ % 4))
            thread.abort("same")
            r = request("same", (round_, 1, 2), max_tokens=4)
            thread.submit(r, second.sink)
            await second.ended.wait()
            assert second.tokens == alone(r)
            assert first.tokens == alone(left)[: len(first.tokens)]

    run(thread, scenario)


def test_what_cannot_be_served_is_refused_in_the_callers_thread() -> None:
    """Wrong prompts and ids in use raise at submit and reach no sink."""
    thread = started(gate := Gate())

    async def scenario() -> None:
        client = Client()
        with pytest.raises(PromptTooLongError) as error:
            thread.submit(request("long", (1,) * 64), client.sink)
        assert (error.value.prompt_tokens, error.value.max_model_len) == (64, 64)
        thread.submit(request("a"), client.sink)
        with pytest.raises(EngineError, match="request id a: expected one that is not in use"):
            thread.submit(request("a"), client.sink)
        gate.open.set()
        await client.ended.wait()
        assert client.tokens == alone(request("a"))

    run(thread, scenario)


def test_stop_ends_open_requests_with_an_error() -> None:
    """A shutdown leaves nobody waiting, whether a request runs, waits or is still in the inbox."""
    thread = started(gate := Gate())

    async def scenario() -> None:
        clients = [Client() for _ in range(6)]
        thread.submit(request("r0", max_tokens=50), clients[0].sink)
        await asyncio.to_thread(gate.entered.wait, PATIENCE)  # a step runs, the others must wait
        for i, client in enumerate(clients[1:], 1):
            thread.submit(request(f"r{i}", max_tokens=50), client.sink)
        stopping = asyncio.create_task(asyncio.to_thread(thread.stop))
        gate.open.set()
        await stopping
        for client in clients:
            await client.ended.wait()
            last = client.deltas[-1]
            assert last.finish_reason is FinishReason.ERROR
            assert last.error == "the server is shutting down"
            assert last.usage is not None
            assert last.usage.completion_tokens == len(client.tokens)
        with pytest.raises(EngineDeadError, match="shutting down"):
            thread.submit(request("late"), clients[0].sink)

    run(thread, scenario)
    thread.stop()
    assert thread.stats().steps > 0


def test_a_stopped_engine_frees_its_model() -> None:
    """Whoever still holds the thread object does not hold the weights."""
    models: list[weakref.ref[object]] = []

    def load() -> EngineCore:
        core = make_core()
        models.append(weakref.ref(core._runner))
        return core

    thread = EngineThread(load)
    thread.start()
    assert models[0]() is not None

    thread.stop()
    gc.collect()

    assert models[0]() is None


def test_a_dead_thread_tells_every_open_request(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A bug in the scheduler ends the thread; everybody gets an error, `alive` turns false."""

    def broken(self: Scheduler) -> StepPlan:
        raise RuntimeError("a planted bug")

    thread = started()

    async def scenario() -> None:
        clients = [Client() for _ in range(3)]
        monkeypatch.setattr(Scheduler, "plan", broken)
        with caplog.at_level(logging.ERROR, "engine.thread"):
            for i, client in enumerate(clients):
                try:
                    thread.submit(request(f"r{i}"), client.sink)
                except EngineDeadError:
                    assert i > 0  # it may die before the later ones come
                    continue
                await client.ended.wait()
                assert client.deltas[-1].finish_reason is FinishReason.ERROR
                assert "internal fault" in str(client.deltas[-1].error)
        assert not thread.alive
        assert not thread.stats().alive
        with pytest.raises(EngineDeadError, match="internal fault"):
            thread.submit(request("late"), clients[0].sink)
        assert "a planted bug" in caplog.text

    run(thread, scenario)


def test_lost_memory_kills_the_idle_engine(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The idle engine's own check finds a leak, and the process is told through `alive`."""
    monkeypatch.setattr(Scheduler, "_release", lambda self, state: None)
    thread = started()

    async def scenario() -> None:
        client = Client()
        with caplog.at_level(logging.ERROR, "engine.thread"):
            thread.submit(request("a"), client.sink)
            await client.ended.wait()
            await eventually(lambda: not thread.alive)
        assert client.tokens == alone(request("a"))
        assert "references differ from their holders" in caplog.text

    run(thread, scenario)


def test_a_failed_load_is_raised_by_start() -> None:
    """Whoever starts the engine learns why it cannot load; the thread is gone."""

    def load() -> EngineCore:
        raise EngineError("no such checkpoint")

    thread = EngineThread(load)

    with pytest.raises(EngineError, match="no such checkpoint"):
        thread.start()
    assert not thread.alive
    assert not thread.stats().alive
    thread.stop()


def test_before_start_nothing_is_served() -> None:
    """A thread that was never started refuses requests and stops at once."""
    thread = EngineThread(make_core)

    async def scenario() -> None:
        with pytest.raises(EngineDeadError, match="not loaded"):
            thread.submit(request("a"), Client().sink)

    run(thread, scenario)


def test_a_closed_loop_does_not_harm_the_engine() -> None:
    """Requests whose event loop is gone are given up; others go on."""
    thread = started(gate := Gate())

    async def leave() -> None:
        thread.submit(request("orphan", max_tokens=50), Client().sink)

    asyncio.run(leave())
    gate.open.set()

    async def scenario() -> None:
        client = Client()
        thread.submit(request("a"), client.sink)
        await client.ended.wait()
        assert client.tokens == alone(request("a"))
        await eventually(lambda: not thread.stats().running)
        stats = thread.stats()
        assert stats.free_blocks == stats.total_blocks

    run(thread, scenario)


def test_two_loops_are_served_by_one_engine() -> None:
    """Requests from two threads with a loop each get their own deltas on their own loop."""
    thread = started()
    failures: list[BaseException] = []

    async def scenario() -> None:
        me = threading.get_ident()
        for i in range(5):
            client = Client()
            take = client.take

            def here(delta: TokenDelta, take: Callable[[TokenDelta], None] = take) -> None:
                assert threading.get_ident() == me
                take(delta)

            r = request(f"{me}-{i}", (i, me % VOCAB))
            thread.submit(r, Sink(asyncio.get_running_loop(), here))
            await client.ended.wait()
            assert client.tokens == alone(r)

    def other() -> None:
        try:
            asyncio.run(asyncio.wait_for(scenario(), PATIENCE))
        except BaseException as error:
            failures.append(error)

    beside = threading.Thread(target=other)
    beside.start()
    try:
        asyncio.run(asyncio.wait_for(scenario(), PATIENCE))
    finally:
        beside.join(PATIENCE)
        thread.stop()
    assert failures == []


@pytest.mark.parametrize("seed", range(3))
def test_random_load_loses_and_crosses_nothing(seed: int) -> None:
    """Under random arrivals and aborts every request gets its own tokens or its own abort."""
    thread = started()
    draw = random.Random(seed)

    async def one(name: str) -> bool:
        prompt = tuple(draw.randrange(VOCAB) for _ in range(draw.randint(1, 40)))
        r = request(name, prompt, draw.randint(1, 20))
        patience = draw.choice([None, None, draw.randint(0, 10)])
        await asyncio.sleep(draw.random() * 0.05)
        client = Client()
        thread.submit(r, client.sink)
        while not client.ended.is_set():
            if patience is not None and len(client.deltas) >= patience:
                thread.abort(name)
                heard = len(client.deltas)
                await asyncio.sleep(0.005)
                assert len(client.deltas) == heard or client.ended.is_set()
                return False
            await asyncio.sleep(0.001)  # 120 spinning tasks would keep the engine's thread waiting
        assert client.tokens == alone(r)
        return True

    async def scenario() -> None:
        served = await asyncio.gather(*(one(f"r{i}") for i in range(120)))
        assert 60 < sum(served) < 120
        await eventually(lambda: not thread.stats().running + thread.stats().waiting)
        stats = thread.stats()
        assert stats.free_blocks == stats.total_blocks
        assert stats.alive

    run(thread, scenario)
