"""Scheduler under any sequence of arrivals, steps, aborts and faults.

The machine executes plans on a memory of its own: each block cell and each slot remembers which
request wrote which position there. So a block given to two requests, a slot used before its reset
and a position that was never processed all show as a wrong memory, not only as wrong counters.
"""

from __future__ import annotations

import pytest
from hypothesis import Phase, settings, strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from engine.api import FinishReason, GenerateRequest, SamplingParams
from engine.plan.blocks import BlockPool
from engine.plan.request import RequestState
from engine.plan.scheduler import Scheduler
from engine.plan.step import Chunk

STOP = 999


def token(name: str, index: int, stop_at: int) -> int:
    """What the make-believe model says: a function of the request alone."""
    return STOP if index == stop_at else 1000 + 100 * int(name[1:]) + index


class SchedulerMachine(RuleBasedStateMachine):
    """Drives a scheduler and keeps the books a second time."""

    @initialize(
        block_size=st.integers(1, 5),
        num_slots=st.integers(1, 4),
        spare_rows=st.integers(1, 8),
        max_model_len=st.integers(4, 24),
        spare_blocks=st.integers(0, 6),
    )
    def sizes(
        self,
        block_size: int,
        num_slots: int,
        spare_rows: int,
        max_model_len: int,
        spare_blocks: int,
    ) -> None:
        self.block_size = block_size
        self.budget = num_slots + spare_rows
        self.max_model_len = max_model_len
        self.num_blocks = -(-max_model_len // block_size) + spare_blocks
        self.num_slots = num_slots
        self.scheduler = Scheduler(
            num_blocks=self.num_blocks,
            block_size=block_size,
            num_slots=num_slots,
            max_batched_tokens=self.budget,
            max_model_len=max_model_len,
        )
        self.count = 0
        self.order: list[str] = []  # live requests by arrival
        self.requests: dict[str, tuple[GenerateRequest, int]] = {}
        self.output: dict[str, list[int]] = {}
        self.cells: dict[tuple[int, int], tuple[str, int, int]] = {}
        self.slots: dict[int, tuple[str, int]] = {}

    @rule(
        prompt=st.integers(1, 30),
        max_tokens=st.integers(1, 30),
        stop_at=st.integers(0, 30),
        ignore_eos=st.booleans(),
    )
    def add(self, prompt: int, max_tokens: int, stop_at: int, ignore_eos: bool) -> None:
        prompt = min(prompt, self.max_model_len - 1)
        name = f"r{self.count}"
        self.count += 1
        sampling = SamplingParams(
            max_tokens=max_tokens, stop_token_ids=(STOP,), ignore_eos=ignore_eos
        )
        request = GenerateRequest(name, tuple(range(prompt)), sampling)
        self.scheduler.add(request)
        self.order.append(name)
        self.requests[name] = (request, stop_at)
        self.output[name] = []

    @precondition(lambda self: self.order)
    @rule(faults=st.sets(st.integers(0, 3), max_size=1))
    def step(self, faults: set[int]) -> None:
        plan = self.scheduler.plan()
        assert plan.chunks, "somebody is live, so somebody must advance"
        assert plan.num_tokens <= self.budget
        names = [chunk.request_id for chunk in plan.chunks]
        assert len(names) == len(set(names))
        assert self.order[0] in names, "the oldest request advances in every step"
        for position, chunk in enumerate(plan.chunks):
            self.execute(chunk)
            if position in faults:
                self.scheduler.remove(chunk.request_id)
                self.order.remove(chunk.request_id)
            else:
                self.commit(chunk)

    @precondition(lambda self: self.order)
    @rule(pick=st.integers(0, 1000))
    def abort(self, pick: int) -> None:
        name = self.order.pop(pick % len(self.order))
        free = self.scheduler.blocks.num_free
        held = len(self.scheduler.get(name).block_ids)

        assert self.scheduler.remove(name) is not None

        assert self.scheduler.blocks.num_free == free + held
        assert self.scheduler.remove(name) is None

    def execute(self, chunk: Chunk) -> None:
        """Check what the chunk would read, then write what it would write."""
        name = chunk.request_id
        request, _ = self.requests[name]
        sequence = list(request.prompt_ids) + self.output[name]
        end = chunk.start + len(chunk.token_ids)
        assert list(chunk.token_ids) == sequence[chunk.start : end]
        assert chunk.wants_logits == (end == len(sequence))
        assert chunk.slot != 0
        assert 0 not in chunk.block_ids
        assert len(chunk.block_ids) == len(set(chunk.block_ids))
        if chunk.start:
            assert self.slots[chunk.slot] == (name, chunk.start)
        self.slots[chunk.slot] = (name, end)
        for position in range(end):
            block, offset = divmod(position, self.block_size)
            cell = (chunk.block_ids[block], offset)
            if position >= chunk.start:
                self.cells[cell] = (name, position, sequence[position])
            assert self.cells[cell] == (name, position, sequence[position])

    def commit(self, chunk: Chunk) -> None:
        name = chunk.request_id
        _, stop_at = self.requests[name]
        sampled = token(name, len(self.output[name]), stop_at) if chunk.wants_logits else None
        reason = self.scheduler.commit(chunk, sampled)
        if sampled is not None:
            self.output[name].append(sampled)
        assert reason is self.expected_end(name)
        if reason is not None:
            self.order.remove(name)

    def expected_end(self, name: str) -> FinishReason | None:
        request, _ = self.requests[name]
        output = self.output[name]
        if output and output[-1] == STOP and not request.sampling.ignore_eos:
            return FinishReason.STOP
        length = len(request.prompt_ids) + len(output)
        if len(output) == request.sampling.max_tokens or length == self.max_model_len:
            return FinishReason.LENGTH
        return None

    @invariant()
    def books_are_right(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        scheduler = self.scheduler
        scheduler.check_integrity()
        assert scheduler.num_running + scheduler.num_waiting == len(self.order)
        held = sum(len(scheduler.get(name).block_ids) for name in self.order)
        assert held + scheduler.blocks.num_free == self.num_blocks
        assert scheduler.num_running + scheduler.slots.num_free == self.num_slots

    def teardown(self) -> None:
        """Every request ends, in a bounded number of steps, and all memory comes back."""
        if not hasattr(self, "scheduler"):
            return
        limit = (2 * self.max_model_len + 1) * len(self.order)
        for _ in range(limit):
            if self.order:
                self.step(set())
                self.books_are_right()
        assert not self.order
        assert self.scheduler.blocks.num_free == self.num_blocks
        assert self.scheduler.slots.num_free == self.num_slots


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(stateful_step_count=40)


def forget_to_release(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scheduler, "_release", lambda self, state: None)


def hand_out_held_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    def acquire(self: BlockPool, count: int) -> tuple[int, ...]:
        return tuple(range(1, count + 1))

    monkeypatch.setattr(BlockPool, "acquire", acquire)


def lose_tokens_on_preemption(monkeypatch: pytest.MonkeyPatch) -> None:
    preempt = RequestState.preempt

    def forgetful(self: RequestState) -> None:
        preempt(self)
        del self.token_ids[self.num_prompt :]

    monkeypatch.setattr(RequestState, "preempt", forgetful)


def keep_progress_on_preemption(monkeypatch: pytest.MonkeyPatch) -> None:
    preempt = RequestState.preempt

    def stale(self: RequestState) -> None:
        computed = self.num_computed
        preempt(self)
        self.num_computed = computed - 1

    monkeypatch.setattr(RequestState, "preempt", stale)


def preempt_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    preempt = Scheduler._preempt

    def wrong(self: Scheduler, state: RequestState) -> None:
        preempt(self, self._running[0])

    monkeypatch.setattr(Scheduler, "_preempt", wrong)


def never_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scheduler, "_grow", lambda self, state: True)


@pytest.mark.parametrize(
    "fault",
    [
        forget_to_release,
        hand_out_held_blocks,
        lose_tokens_on_preemption,
        keep_progress_on_preemption,
        preempt_the_oldest,
        never_grow,
    ],
)
def test_the_machine_catches_a_planted_fault(
    fault: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each way of breaking the scheduler is found by the machine above."""
    fault(monkeypatch)  # type: ignore[operator]

    with pytest.raises(Exception):  # noqa: B017, PT011 - whichever check sees it first
        run_state_machine_as_test(
            SchedulerMachine,
            settings=settings(
                max_examples=300,
                stateful_step_count=40,
                derandomize=True,
                database=None,
                phases=[Phase.generate],  # found is enough; the smallest example is not wanted
            ),
        )
