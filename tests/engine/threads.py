"""An engine in its own thread over a model of hashes, and its clients: what tests of threads share."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

from engine.api import GenerateRequest, SamplingParams, TokenDelta
from engine.core import EngineCore
from engine.options import EngineConfig
from engine.plan.step import StepPlan
from engine.thread import EngineThread, Sink
from tests.engine.hash_model import HashRunner, next_logits

VOCAB = 40
CONTEXT = 64
PATIENCE = 30.0  # seconds after which a test that hangs fails


def make_core(before_run: Callable[[StepPlan], None] | None = None) -> EngineCore:
    options = EngineConfig(block_size=4, num_blocks=40, max_num_seqs=4, max_batched_tokens=16)
    runner = HashRunner(
        vocab_size=VOCAB,
        num_blocks=41,
        block_size=4,
        num_slots=options.resolve_num_slots(),
        before_run=before_run,
    )
    return EngineCore(runner, options, max_position_embeddings=CONTEXT)


def request(name: str, prompt: tuple[int, ...] = (1, 2, 3), max_tokens: int = 5) -> GenerateRequest:
    return GenerateRequest(name, prompt, SamplingParams(max_tokens=max_tokens, temperature=0.0))


def alone(r: GenerateRequest) -> list[int]:
    sequence = list(r.prompt_ids)
    for _ in range(r.sampling.max_tokens):
        sequence.append(int(next_logits(sequence, VOCAB).argmax()))
    return sequence[len(r.prompt_ids) :]


class Gate:
    """Holds the engine inside a step until it is opened."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.open = threading.Event()

    def __call__(self, plan: StepPlan) -> None:
        self.entered.set()
        assert self.open.wait(PATIENCE)


class Client:
    """Deltas of one request on the running loop."""

    def __init__(self) -> None:
        self.deltas: list[TokenDelta] = []
        self.ended = asyncio.Event()
        self.sink = Sink(asyncio.get_running_loop(), self.take)

    def take(self, delta: TokenDelta) -> None:
        assert not self.ended.is_set(), "nothing follows the last delta"
        self.deltas.append(delta)
        if delta.finish_reason is not None:
            self.ended.set()

    @property
    def tokens(self) -> list[int]:
        return [token for delta in self.deltas for token in delta.token_ids]


async def eventually(condition: Callable[[], bool]) -> None:
    """Wait for what another thread is about to do."""
    for _ in range(10_000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it did not come true")


def run(thread: EngineThread, scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a scenario on a loop beside a started engine, and stop the engine."""
    try:
        asyncio.run(asyncio.wait_for(scenario(), PATIENCE))
    finally:
        thread.stop()
    assert not thread.alive


def started(before_run: Callable[[StepPlan], None] | None = None) -> EngineThread:
    thread = EngineThread(lambda: make_core(before_run))
    thread.start()
    return thread
