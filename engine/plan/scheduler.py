"""Decides what each step runs: continuous batching with chunked prefill over two pools.

Knows token counts, block ids and slots. Knows nothing of tensors, sampling or clocks.

A request holds one slot (its fixed-size state) and enough blocks for the tokens it has. The rules:

1. Every running stream that has only its newest token to process gets its row in every step;
   prompts share the rest of the row budget in order of arrival; beside streams their part may be
   bounded further. A step so lasts at most as long as its budget, and a prompt advances in every step.
2. A waiting request is admitted, in order of arrival, when a slot and the blocks for all its tokens
   are free, plus one block for each running request to grow into. The first that does not fit
   holds up those behind it, so a long prompt is not starved by short ones.
3. When a stream needs a block and none is free, the youngest running request is preempted: it
   loses its memory, keeps its tokens, and waits at the head of the queue. The oldest request is
   never preempted by another and one request of full length always fits, so each one ends.
4. Blocks that only the prefix cache holds count as free and are evicted when they are needed.
   State is kept at the last block boundary of a prompt, at the boundary where it leaves a prompt
   seen before, at its end, and where a request ends or is aborted.
5. Where the runner can launch a step ahead of its predecessor's results, streams get the block of
   one position more, if it is free, and where it drafts tokens those of its drafts: nobody is
   preempted or evicted for them.
6. Chunks of prompts that a step did not finish are *held*: they stand in every plan, unchanged, until
   they are committed, and no other prompt begins meanwhile. Who ends in between leaves its memory
   *in limbo* until the last of them is through, because the device still writes it.

By 2 and 3 whoever runs arrived before whoever waits.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator, Sequence

from engine.api import FinishReason, GenerateRequest, PrefillMode
from engine.plan.blocks import BlockPool
from engine.plan.prefix import PrefixCache, Snapshot
from engine.plan.replay import Replay
from engine.plan.request import RequestState, Status
from engine.plan.step import Chunk, StepPlan

#: Blocks of a new turn that are processed at least before a stop for a snapshot.
TURN_BLOCKS = 4


class Scheduler:
    """Queue, running set and pools.

    `plan` and `commit` are apart, so that results may be committed after further host work.

    Args:
        num_blocks: blocks that requests can hold.
        block_size: positions per block.
        num_slots: requests that can run at once.
        max_batched_tokens: rows of one step; more than num_slots.
        max_model_len: context in tokens; fits the blocks.
        max_mixed_tokens: rows of prompts in a step that has streams; None for no further bound.
        max_snapshots: most states the prefix cache keeps, each in a slot of its own beside those
            of requests; 0 for no prefix cache.
        salt: of the prefix cache's hashes; differs where equal tokens give another state.
        lookahead: whether to allow for steps that are launched ahead.
        drafts: tokens that the runner drafts after a stream's newest; 0 for none.
        replay: how prompts are processed.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        num_slots: int,
        max_batched_tokens: int,
        max_model_len: int,
        max_mixed_tokens: int | None = None,
        max_snapshots: int = 0,
        salt: bytes = b"",
        lookahead: bool = False,
        drafts: int = 0,
        replay: Replay | None = None,
    ) -> None:
        if num_blocks * block_size < max_model_len:
            raise ValueError(
                f"{num_blocks} blocks of {block_size} positions cannot hold one request of"
                f" {max_model_len} tokens"
            )
        if max_batched_tokens <= num_slots:
            raise ValueError(
                f"a step of {max_batched_tokens} rows leaves no prompt a row beside {num_slots}"
                " running streams"
            )
        self.blocks = BlockPool(num_blocks)
        self.slots = BlockPool(num_slots + max_snapshots, "slot")
        self.prefix = PrefixCache(
            self.blocks,
            self.slots,
            block_size=block_size,
            max_snapshots=max_snapshots,
            salt=salt,
        )
        self.num_preemptions = 0
        #: By mode, rows of prompts that the last layers have processed and that they left out.
        self.tail_rows: dict[PrefillMode, tuple[int, int]] = {}
        self._replay = replay or Replay()
        self._block_size = block_size
        self._num_slots = num_slots
        self._slot_copies: list[tuple[int, int]] = []  # due at the head of the next plan
        self._block_copies: list[tuple[int, int]] = []
        self._max_batched_tokens = max_batched_tokens
        self._max_mixed_tokens = max_mixed_tokens or max_batched_tokens
        self._max_model_len = max_model_len
        self._lookahead = lookahead
        self._drafts = drafts
        self._unsure: set[str] = set()
        self._held: dict[str, Chunk] = {}  # of the last plan, not finished by it
        self._limbo: list[tuple[int, tuple[int, ...]]] = []  # (slot, blocks)
        self._arrivals = 0
        self._live: dict[str, RequestState] = {}
        self._running: list[RequestState] = []  # in order of arrival
        self._waiting: deque[RequestState] = deque()  # in order of arrival

    @property
    def num_running(self) -> int:
        """Requests that hold memory."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests that hold none."""
        return len(self._waiting)

    def continue_counts(self, before: Scheduler) -> None:
        """Go on with the counters of a scheduler that this one replaces."""
        self.num_preemptions = before.num_preemptions
        self.tail_rows = before.tail_rows
        self.prefix.num_evictions = before.prefix.num_evictions

    def get(self, request_id: str) -> RequestState:
        """Give the live request of this id.

        Raises:
            KeyError: there is none.
        """
        return self._live[request_id]

    def add(self, request: GenerateRequest) -> None:
        """Queue a request. Its prompt is not empty and shorter than the context.

        Raises:
            ValueError: the id is that of a live request.
            EngineError: its prompt cannot be processed as it asks.
        """
        if request.id in self._live:
            raise ValueError(f"request id {request.id} is live already")
        tail = self._replay.resolve(request)
        chain = self.prefix.chain(tail.salt + _salt(request.cache_salt))
        state = RequestState(request, self._arrivals, self._max_model_len, chain, tail)
        self._arrivals += 1
        self._live[request.id] = state
        self._waiting.append(state)

    def remove(self, request_id: str, *, keep: bool = True) -> RequestState | None:
        """End a request in whatever state it is and free its memory at once.

        Args:
            request_id: whose.
            keep: whether the prefix cache may keep its state, which goes over without a copy.

        Returns:
            what it was, or None if no such request is live.
        """
        state = self._live.pop(request_id, None)
        if state is None:
            return None
        (self._waiting if state.status is Status.WAITING else self._running).remove(state)
        # Where a chunk is half through, the slot holds no state that anybody could go on from.
        if keep and state.num_computed and self.prefix.enabled and request_id not in self._held:
            self._keep(state, state.slot)
        self._release(state)
        state.finish()
        return state

    def abort(self, request_id: str) -> None:
        """End a request for who no longer wants it; idempotent.

        Its state is kept as that of one that ends by itself, but where the last step went ahead with
        drafts: how far that took the state only the device knows.
        """
        self.remove(request_id, keep=request_id not in self._unsure)

    def plan(self) -> StepPlan:
        """Decide the next step, preempting and admitting where needed."""
        budget = self._max_batched_tokens
        preemptions = self.num_preemptions
        streams = []
        for state in tuple(self._running):
            # A decode whose request was preempted by an older one in this loop is WAITING now.
            if state.status is Status.DECODE and self._grow(state):
                streams.append(state)
                budget -= 1
        if streams:
            budget = min(budget, self._max_mixed_tokens)
        if preemptions == self.num_preemptions and not self._held:
            self._admit(budget)
        ahead = self._lookahead and self._grow_ahead(streams)
        for state in streams if self._drafts else ():
            self._grow_for_drafts(state)
        chunks = [
            self._chunk(state, 1, goes_ahead=ahead and state.wants_more_after_this)
            for state in streams
        ]
        if self._held:
            chunks += self._held.values()
        else:
            chunks += self._prompts(budget)
        self._unsure = {c.request_id for c in chunks if c.goes_ahead and self._drafts}
        if not chunks:
            return StepPlan(())
        plan = StepPlan(tuple(chunks), tuple(self._slot_copies), tuple(self._block_copies))
        self._slot_copies.clear()
        self._block_copies.clear()
        return plan

    def hold(self, chunk: Chunk) -> None:
        """Record that a chunk of the last plan is under way: it comes again in the next one."""
        self._held[chunk.request_id] = chunk

    def commit(
        self, chunk: Chunk, sampled: int | None, further: Sequence[int] = ()
    ) -> FinishReason | None:
        """Record that a chunk ran; end the request if that was its last token.

        Args:
            chunk: of the last plan; its request is live.
            sampled: the token drawn from its logits, None where it wanted none.
            further: tokens the step gave after that one, having processed all but the last.

        Returns:
            why the request has ended, or None if it goes on.

        Raises:
            RuntimeError: a token follows the request's last one; a bug of the runner.
        """
        state = self._live[chunk.request_id]
        self._let_go(chunk.request_id)
        if not chunk.is_stream:
            ran, left = self.tail_rows.get(chunk.prefill, (0, 0))
            rows = state.tail.rows(chunk.start, chunk.end)
            counts = ran + rows, left + len(chunk.token_ids) - rows
            self.tail_rows[chunk.prefill] = counts
        reason = state.advance(len(chunk.token_ids), sampled)
        for token in further:
            if reason is not None:
                raise RuntimeError(f"request {chunk.request_id} has ended, yet got token {token}")
            reason = state.advance(1, token)
        if reason is not None:
            self.remove(chunk.request_id)
        elif state.marks and state.marks[0] == state.num_computed:
            del state.marks[0]
            slot = self._keep(state)
            if slot:
                self._slot_copies.append((state.slot, slot))
        return reason

    def check_integrity(self) -> None:
        """Check that nothing is lost, held twice or out of order.

        Raises:
            RuntimeError: it is; a bug of this module.
        """
        running, waiting = self._running, list(self._waiting)
        kept = self.prefix.snapshots
        self.prefix.check_integrity()
        limbo = self._limbo
        if limbo and not self._held:
            raise RuntimeError(f"memory of {len(limbo)} requests waits for a pass that is over")
        block_ids = [*(r.block_ids for r in running), *(ids for _, ids in limbo)]
        slots = [*((r.slot,) for r in running), *((slot,) for slot, _ in limbo)]
        self.blocks.check_integrity(block_ids, (s.block_ids for s in kept))
        self.slots.check_integrity(slots, ((s.slot,) for s in kept))
        everyone = running + waiting
        arrivals = [state.arrival for state in everyone]
        if arrivals != sorted(arrivals):
            raise RuntimeError(f"requests out of order of arrival: {arrivals}")
        if {id(state) for state in everyone} != {id(state) for state in self._live.values()}:
            raise RuntimeError("live requests differ from those running and waiting")
        for state in running:
            if state.status not in (Status.PREFILL, Status.DECODE):
                raise RuntimeError(f"request {state.request.id} runs, but is {state.status.value}")
            if len(state.block_ids) * self._block_size < state.num_computed:
                raise RuntimeError(f"request {state.request.id} has tokens outside its blocks")
        for state in waiting:
            if state.status is not Status.WAITING or state.block_ids or state.slot:
                raise RuntimeError(f"request {state.request.id} waits, but holds memory")
        for request_id, chunk in self._held.items():
            held = self._live.get(request_id)
            if held is None or held.status is not Status.PREFILL or held.slot != chunk.slot:
                raise RuntimeError(
                    f"request {request_id} has a chunk under way, but not its memory"
                )

    def _prompts(self, budget: int) -> Iterator[Chunk]:
        """Share the rows of a step that streams leave among prompts, in order of arrival."""
        for state in self._running:
            if budget and state.status is Status.PREFILL:
                size = min(budget, len(state.token_ids) - state.num_computed)
                if state.marks:
                    size = min(size, state.marks[0] - state.num_computed)
                yield self._chunk(state, size)
                budget -= size

    def _chunk(self, state: RequestState, size: int, *, goes_ahead: bool = False) -> Chunk:
        start = state.num_computed
        end = start + size
        scored_from, targets = self._targets(state, start, end)
        return Chunk(
            request_id=state.request.id,
            slot=state.slot,
            start=start,
            token_ids=tuple(state.token_ids[start:end]),
            block_ids=state.block_ids,
            wants_logits=end == len(state.token_ids),
            arrival=state.arrival,
            is_stream=state.status is Status.DECODE,
            goes_ahead=goes_ahead,
            left=state.num_left if state.status is Status.DECODE else 0,
            prefill=state.tail.mode,
            anchor=state.tail.anchor,
            scored_from=scored_from,
            targets=targets,
            num_rivals=state.request.prompt_logprobs or 0,
        )

    def _targets(self, state: RequestState, start: int, end: int) -> tuple[int, tuple[int, ...]]:
        """First of the rows [start, end) that score a prompt token, and the tokens they score."""
        if state.tail.scored_from is None or state.num_generated:
            return 0, ()
        first = max(start, state.tail.scored_from)
        return first, tuple(state.token_ids[first + 1 : min(end + 1, state.num_prompt)])

    def _keep(self, state: RequestState, slot: int = 0) -> int:
        """Have the prefix cache keep a request's state; see `PrefixCache.add`."""
        return self.prefix.add(
            state.token_ids,
            state.chain,
            state.num_computed,
            state.block_ids,
            slot,
            state.tail.anchor,
        )

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def _admit(self, budget: int) -> None:
        """Admit from the head of the queue while there are rows and memory for it."""
        if not self._waiting:
            return
        rows = budget - sum(
            len(state.token_ids) - state.num_computed
            for state in self._running
            if state.status is Status.PREFILL
        )
        while self._waiting and rows > 0 and len(self._running) < self._num_slots:
            state = self._waiting[0]
            if not self._give_memory(state):
                return
            self._running.append(self._waiting.popleft())
            rows -= len(state.token_ids) - state.num_computed

    def _give_memory(self, state: RequestState) -> bool:
        """Admit a request, with what the prefix cache has of its tokens; False if it does not fit."""
        hit = self._find(state) if self.prefix.enabled else None
        length = hit.length if hit else 0
        shared = hit.block_ids[: length // self._block_size] if hit else ()
        self.blocks.share(shared)  # first of all, so that they are not evicted
        needed = self._blocks_for(len(state.token_ids)) - len(shared)
        if needed + len(self._running) > self.blocks.num_free + self.blocks.num_idle:
            self.blocks.release(shared)
            return False
        while self.blocks.num_free < needed and self.prefix.evict():
            pass
        own = self.blocks.acquire(needed)
        (slot,) = self.slots.acquire(1)
        if hit:
            # If the hit was evicted just now, what it held is still there when copies are made.
            self._slot_copies.append((hit.slot, slot))
            if length % self._block_size:
                self._block_copies.append((hit.block_ids[-1], own[0]))
        state.tail.settle(length, hit.anchor if hit else 0)
        state.admit(slot, shared + own, length)
        if self.prefix.enabled:
            state.marks = self._marks(state)
        return True

    def _find(self, state: RequestState) -> Snapshot | None:
        def fits(kept: Snapshot) -> bool:
            has_output = bool(state.num_generated)
            return state.tail.fits(kept.length, kept.anchor, has_output=has_output)

        return self.prefix.find(state.token_ids, state.chain, fits)

    def _marks(self, state: RequestState) -> list[int]:
        """Where to take a snapshot: the branch from known prompts, the last boundary, the end.

        A stop on the way costs a step, so it must be worth a block at least, and several behind a
        prefix that was found: a short new turn runs through, and the next prompt goes on from its end.
        """
        end = len(state.token_ids)
        last = (end - 1) // self._block_size * self._block_size
        branch = self.prefix.branch(state.token_ids, state.chain)
        marks = (state.tail.mark(mark, self._block_size) for mark in (branch, last))
        blocks = TURN_BLOCKS if state.num_computed else 1
        least = state.num_computed + blocks * self._block_size
        return sorted({end, *(mark for mark in marks if mark >= least)})

    def _grow(self, state: RequestState) -> bool:
        """Give a stream the block its newest token needs; False if it was preempted itself."""
        missing = self._blocks_for(len(state.token_ids)) - len(state.block_ids)
        if missing <= 0:
            return True
        while self.blocks.num_free < missing:
            if self.prefix.evict():
                continue
            victim = self._running[-1]
            self._preempt(victim)
            if victim is state:
                return False
        state.block_ids += self.blocks.acquire(missing)
        return True

    def _grow_ahead(self, streams: list[RequestState]) -> bool:
        """Give streams the block of the token after the ones of this step, all or none.

        Args:
            streams: those with a row in this step.

        Returns:
            whether the step after this one may be launched ahead: every stream that wants another
            token has its block, none is asked for log-probabilities, which are read from logits that
            such a launch overwrites, and none has a guide, which must see the token first. If one
            cannot go ahead nobody does, since two passes of half the rows take longer than one.
        """
        going = [state for state in streams if state.wants_more_after_this]
        missing = [
            (state, self._blocks_for(self._next_end(state)) - len(state.block_ids))
            for state in going
        ]
        needed = sum(count for _, count in missing if count > 0)
        if needed > self.blocks.num_free or any(state.needs_host for state in streams):
            return False
        for state, count in missing:
            if count > 0:
                state.block_ids += self.blocks.acquire(count)
        return True

    def _next_end(self, state: RequestState) -> int:
        """End of the row that the step after this one has of a stream, wherever it will stand."""
        return len(state.token_ids) + min(1 + self._drafts, state.num_left - 1)

    def _grow_for_drafts(self, state: RequestState) -> None:
        """Give a stream the blocks of its drafts as far as they are free."""
        rows = min(self._drafts + 1, state.num_left)
        missing = self._blocks_for(state.num_computed + rows) - len(state.block_ids)
        count = min(missing, self.blocks.num_free)
        if count > 0:
            state.block_ids += self.blocks.acquire(count)

    def _preempt(self, state: RequestState) -> None:
        self._running.remove(state)
        self._release(state)
        state.preempt()
        self._waiting.appendleft(state)
        self.num_preemptions += 1

    def _release(self, state: RequestState) -> None:
        """Give a request's memory back, now or when the pass that still writes it is through."""
        if state.request.id in self._held and len(self._held) > 1:
            self._limbo.append((state.slot, state.block_ids))
        elif state.slot:
            self.blocks.release(state.block_ids)
            self.slots.release((state.slot,))
        self._let_go(state.request.id)

    def _let_go(self, request_id: str) -> None:
        """Forget a chunk under way, if there is one; after the last, what was in limbo is free."""
        self._held.pop(request_id, None)
        if self._held:
            return
        for slot, block_ids in self._limbo:
            self.blocks.release(block_ids)
            self.slots.release((slot,))
        self._limbo.clear()


def _salt(cache_salt: str) -> bytes:
    """A request's salt as bytes of one length, so that no other salt can end in it."""
    return hashlib.blake2b(cache_salt.encode(), digest_size=32).digest()
