"""Scheduler and prefix cache under any sequence of arrivals, steps, aborts and faults.

The machine executes plans on a memory of its own: each block cell and each slot remembers the whole
prefix it was written after. So a block that two requests write, a slot used before its reset or its
restore, and a position that was never processed all show as a wrong memory, not only as wrong
counters. Whose memory it was does not matter: with the cache, equal prefixes share it.

It also plays a device that leaves prompts' chunks under way over several steps, writing into their
memory all the while, and one that processes a token ahead of its being known.
"""

from __future__ import annotations

import dataclasses
from typing import Any

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
from engine.plan.prefix import HashChain, PrefixCache, Snapshot
from engine.plan.request import RequestState, Status
from engine.plan.scheduler import Scheduler
from engine.plan.step import Chunk

STOP = 999
DECODE = Status.DECODE


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
        spare_blocks=st.integers(0, 4),
        max_snapshots=st.integers(0, 6),
        lookahead=st.booleans(),
    )
    def sizes(
        self,
        block_size: int,
        num_slots: int,
        spare_rows: int,
        max_model_len: int,
        spare_blocks: int,
        max_snapshots: int,
        lookahead: bool,
    ) -> None:
        self.lookahead = lookahead
        self.under_way: list[Chunk] = []  # of the pass that began in an earlier step
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
            max_snapshots=max_snapshots,
            lookahead=lookahead,
        )
        self.max_snapshots = max_snapshots
        self.count = 0
        self.order: list[str] = []  # live requests by arrival
        self.requests: dict[str, tuple[GenerateRequest, int]] = {}
        self.output: dict[str, list[int]] = {}
        self.known: list[list[int]] = [[]]  # sequences of the past, to begin prompts with
        self.cells: dict[tuple[int, int], tuple[int, ...]] = {}
        self.slots: dict[int, tuple[int, ...]] = {}

    @rule(
        pick=st.integers(0, 1000),
        dropped=st.integers(0, 3),
        prompt=st.integers(1, 6),
        flavour=st.integers(0, 1),
        max_tokens=st.integers(1, 30),
        stop_at=st.integers(0, 30),
        ignore_eos=st.booleans(),
    )
    def add(
        self,
        pick: int,
        dropped: int,
        prompt: int,
        flavour: int,
        max_tokens: int,
        stop_at: int,
        ignore_eos: bool,
    ) -> None:
        # A prompt goes on from another request's sequence, whole or nearly so. The new part is the
        # same but for its first token, so that equal blocks follow different prefixes.
        past = self.known[pick % len(self.known)] if pick % 2 else []
        past = past[: max(0, len(past) - dropped)]
        ids = [*past, flavour, *range(2, 1 + prompt)][: self.max_model_len - 1]
        name = f"r{self.count}"
        self.count += 1
        sampling = SamplingParams(
            max_tokens=max_tokens, stop_token_ids=(STOP,), ignore_eos=ignore_eos
        )
        request = GenerateRequest(name, tuple(ids), sampling)
        self.known.append(ids)
        self.scheduler.add(request)
        self.order.append(name)
        self.requests[name] = (request, stop_at)
        self.output[name] = []

    @precondition(lambda self: self.order)
    @rule(faults=st.sets(st.integers(0, 3), max_size=1), finish=st.booleans())
    def step(self, faults: set[int], finish: bool) -> None:
        plan = self.scheduler.plan()
        assert plan.chunks, "somebody is live, so somebody must advance"
        assert plan.num_tokens <= self.budget
        names = [chunk.request_id for chunk in plan.chunks]
        assert len(names) == len(set(names))
        assert self.order[0] in names, "the oldest request advances in every step"
        streams = [c for c in plan.chunks if self.scheduler.get(c.request_id).status is DECODE]
        prompts = [chunk for chunk in plan.chunks if chunk not in streams]
        if not any(chunk in prompts for chunk in self.under_way):
            self.under_way = []  # all its requests are gone, so the device drops the pass
        for source, target in plan.slot_copies:
            self.slots[target] = self.slots[source]
        for source, target in plan.block_copies:
            for offset in range(self.block_size):
                self.cells[target, offset] = self.cells.get((source, offset), ())
        if self.under_way:
            assert set(prompts) <= set(self.under_way), (
                "a chunk under way comes again, and no other"
            )
        for chunk in streams if self.under_way else plan.chunks:
            self.begin(chunk)
        self.under_way = self.under_way or prompts
        for chunk in streams:
            self.write(chunk)
        self.go_ahead(streams)
        for chunk in self.under_way:  # also that of a request that has ended meanwhile
            if finish and chunk in prompts:
                self.write(chunk)
            else:
                self.make_a_mess(chunk)
        if finish:
            self.under_way = []
        for position, chunk in enumerate(plan.chunks):
            under_way = chunk in prompts and not finish  # such a chunk has no result to be wrong
            if position in faults and not under_way:
                self.scheduler.remove(chunk.request_id, keep=False)
                self.scheduler.prefix.clear()
                self.order.remove(chunk.request_id)
            elif under_way:
                self.scheduler.hold(chunk)
            else:
                self.commit(chunk)

    @precondition(lambda self: self.order)
    @rule(pick=st.integers(0, 1000))
    def abort(self, pick: int) -> None:
        name = self.order.pop(pick % len(self.order))
        self.known.append(list(self.scheduler.get(name).token_ids))

        assert self.scheduler.remove(name) is not None
        assert self.scheduler.remove(name) is None

    def begin(self, chunk: Chunk) -> None:
        """Check what the chunk is and what it would read."""
        request, _ = self.requests[chunk.request_id]
        sequence = list(request.prompt_ids) + self.output[chunk.request_id]
        end = chunk.start + len(chunk.token_ids)
        assert chunk.token_ids
        assert list(chunk.token_ids) == sequence[chunk.start : end]
        assert chunk.wants_logits == (end == len(sequence))
        assert chunk.slot != 0
        assert 0 not in chunk.block_ids
        assert len(chunk.block_ids) == len(set(chunk.block_ids))
        if chunk.start:
            assert self.slots[chunk.slot] == tuple(sequence[: chunk.start])
        for position in range(chunk.start):
            assert self.cells[self.cell(chunk, position)] == tuple(sequence[: position + 1])

    def write(self, chunk: Chunk) -> None:
        """Write what the chunk leaves in memory."""
        request, _ = self.requests[chunk.request_id]
        sequence = list(request.prompt_ids) + self.output[chunk.request_id]
        end = chunk.start + len(chunk.token_ids)
        self.slots[chunk.slot] = tuple(sequence[:end])
        for position in range(end):
            if position >= chunk.start:
                self.cells[self.cell(chunk, position)] = tuple(sequence[: position + 1])
            assert self.cells[self.cell(chunk, position)] == tuple(sequence[: position + 1])

    def make_a_mess(self, chunk: Chunk) -> None:
        """Write what a chunk leaves in memory while some layers have processed it."""
        self.slots[chunk.slot] = (-1,)
        for position in range(chunk.start, chunk.start + len(chunk.token_ids)):
            self.cells[self.cell(chunk, position)] = (-1,)

    def go_ahead(self, streams: list[Chunk]) -> None:
        """Write the entry of the position after each stream's, whoever will have that token."""
        going = [chunk for chunk in streams if chunk.goes_ahead]
        assert self.lookahead or not going
        for chunk in streams:
            wants = len(self.output[chunk.request_id]) + 1
            limit = self.requests[chunk.request_id][0].sampling.max_tokens
            more = wants < limit and chunk.start + 2 < self.max_model_len
            assert chunk.goes_ahead == (more and bool(going)), "all that go on or none"
        for chunk in going:
            self.cells[self.cell(chunk, chunk.start + 1)] = (-1,)

    def cell(self, chunk: Chunk, position: int) -> tuple[int, int]:
        block, offset = divmod(position, self.block_size)
        return chunk.block_ids[block], offset

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
            self.known.append([*self.requests[name][0].prompt_ids, *self.output[name]])

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
        held = {block for name in self.order for block in scheduler.get(name).block_ids}
        limbo = scheduler._limbo
        assert not limbo or self.under_way
        if scheduler._held:  # the device still writes for all of the pass, ended requests included
            assert not {chunk.slot for chunk in self.under_way} & set(scheduler.slots._free)
        held |= {block for _, block_ids in limbo for block in block_ids}
        blocks, kept = scheduler.blocks, len(scheduler.prefix)
        assert len(held) + blocks.num_idle + blocks.num_free == self.num_blocks
        assert kept <= self.max_snapshots
        total = self.num_slots + self.max_snapshots
        assert scheduler.num_running + kept + len(limbo) + scheduler.slots.num_free == total

    def teardown(self) -> None:
        """Every request ends, in a bounded number of steps, and all memory comes back."""
        if not hasattr(self, "scheduler"):
            return
        limit = (2 * self.max_model_len + 1) * len(self.order)
        for _ in range(limit):
            if self.order:
                self.step(set(), finish=True)
                self.books_are_right()
        assert not self.order
        self.scheduler.prefix.clear()
        assert self.scheduler.blocks.num_free == self.num_blocks
        assert self.scheduler.slots.num_free == self.num_slots + self.max_snapshots


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


def believe_a_token_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    admit = RequestState.admit

    def wrong(self: RequestState, slot: int, blocks: tuple[int, ...], done: int = 0) -> None:
        admit(self, slot, blocks, done + 1 if 0 < done < len(self.token_ids) - 1 else done)

    monkeypatch.setattr(RequestState, "admit", wrong)


def preempt_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    preempt = Scheduler._preempt

    def wrong(self: Scheduler, state: RequestState) -> None:
        preempt(self, self._running[0])

    monkeypatch.setattr(Scheduler, "_preempt", wrong)


def never_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scheduler, "_grow", lambda self, state: True)


def hit_the_whole_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    find = PrefixCache.find

    def wrong(self: PrefixCache, ids: list[int], chain: HashChain) -> Snapshot | None:
        return find(self, [*ids, -1], chain)

    monkeypatch.setattr(PrefixCache, "find", wrong)


def leave_out(monkeypatch: pytest.MonkeyPatch, copies: str) -> None:
    plan = Scheduler.plan
    monkeypatch.setattr(
        Scheduler, "plan", lambda self: dataclasses.replace(plan(self), **{copies: ()})
    )


def restore_no_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    leave_out(monkeypatch, "slot_copies")


def copy_no_open_block(monkeypatch: pytest.MonkeyPatch) -> None:
    leave_out(monkeypatch, "block_copies")


def write_into_the_shared_block(monkeypatch: pytest.MonkeyPatch) -> None:
    give = Scheduler._give_memory

    def wrong(self: Scheduler, state: RequestState) -> bool:
        before = len(self._block_copies)
        given = give(self, state)
        if len(self._block_copies) > before and self.blocks._cached[self._block_copies[-1][0]]:
            source, target = self._block_copies.pop()
            self.blocks.share((source,))
            self.blocks.release((target,))
            state.block_ids = tuple(source if b == target else b for b in state.block_ids)
        return given

    monkeypatch.setattr(Scheduler, "_give_memory", wrong)


def hash_blocks_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    def unchained(self: HashChain, ids: list[int]) -> list[bytes]:
        size = self._block_size
        blocks = [ids[i : i + size] for i in range(0, len(ids) - size + 1, size)]
        return [b"", *(repr((i, block)).encode() for i, block in enumerate(blocks))]

    monkeypatch.setattr(HashChain, "links", unchained)


def ignore_the_open_block(monkeypatch: pytest.MonkeyPatch) -> None:
    find = PrefixCache.find

    def wrong(self: PrefixCache, ids: list[int], chain: HashChain) -> Snapshot | None:
        found = find(self, ids, chain)
        for full in range((len(ids) - 1) // self._block_size, -1, -1):
            for tail in self._tails.get(chain.links(ids)[full], ()):
                if full * self._block_size + len(tail) < len(ids):
                    return self._snapshots[chain.links(ids)[full], tail]
        return found

    monkeypatch.setattr(PrefixCache, "find", wrong)


def evict_what_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    drop = PrefixCache._drop

    def wrong(self: PrefixCache, snapshot: Snapshot) -> None:
        drop(self, snapshot)
        used = [b for b in snapshot.block_ids if self._blocks._used[b]]
        self._blocks.release(used)

    monkeypatch.setattr(PrefixCache, "_drop", wrong)


def take_a_slot_and_give_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(self: PrefixCache, *args: object) -> int:
        slot = add(self, *args)
        if slot and not self._slots._used[slot]:
            self._slots.release((slot,), cache=True)
        return slot

    add: Any = PrefixCache.add
    monkeypatch.setattr(PrefixCache, "add", wrong)


def free_what_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    release = Scheduler._release

    def wrong(self: Scheduler, state: RequestState) -> None:
        self._held.pop(state.request.id, None)
        release(self, state)

    monkeypatch.setattr(Scheduler, "_release", wrong)


def keep_half_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    remove = Scheduler.remove

    def wrong(self: Scheduler, request_id: str, *, keep: bool = True) -> RequestState | None:
        self._held.pop(request_id, None)
        return remove(self, request_id, keep=keep)

    monkeypatch.setattr(Scheduler, "remove", wrong)


def forget_what_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scheduler, "hold", lambda self, chunk: None)


def go_ahead_without_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scheduler, "_grow_ahead", lambda self, streams: True)


@pytest.mark.parametrize(
    "fault",
    [
        free_what_is_under_way,
        keep_half_a_chunk,
        forget_what_is_under_way,
        go_ahead_without_a_block,
        forget_to_release,
        hand_out_held_blocks,
        lose_tokens_on_preemption,
        believe_a_token_too_much,
        preempt_the_oldest,
        never_grow,
        hit_the_whole_prompt,
        restore_no_slot,
        copy_no_open_block,
        write_into_the_shared_block,
        hash_blocks_apart,
        ignore_the_open_block,
        evict_what_is_used,
        take_a_slot_and_give_it_back,
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
                max_examples=600,
                stateful_step_count=40,
                derandomize=True,
                database=None,
                phases=[Phase.generate],  # found is enough; the smallest example is not wanted
            ),
        )
