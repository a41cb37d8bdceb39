"""Scheduler: who runs when, and with which memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from engine.api import FinishReason, GenerateRequest, SamplingParams
from engine.plan.scheduler import Scheduler
from engine.plan.step import StepPlan


def make(**changes: int) -> Scheduler:
    settings = {
        "num_blocks": 16,
        "block_size": 4,
        "num_slots": 4,
        "max_batched_tokens": 8,
        "max_model_len": 64,
    }
    return Scheduler(**{**settings, **changes})


def request(name: str, prompt: int, max_tokens: int = 100) -> GenerateRequest:
    return GenerateRequest(name, tuple(range(prompt)), SamplingParams(max_tokens=max_tokens))


def run(scheduler: Scheduler, token: int = 7) -> StepPlan:
    """One step in which every row that wants a token gets the same."""
    plan = scheduler.plan()
    for chunk in plan.chunks:
        scheduler.commit(chunk, token if chunk.wants_logits else None)
    scheduler.check_integrity()
    return plan


def shape(plan: StepPlan) -> list[tuple[str, int, int]]:
    return [(c.request_id, c.start, len(c.token_ids)) for c in plan.chunks]


def test_a_prompt_is_cut_into_chunks_of_the_budget() -> None:
    """A long prompt takes several steps; only the last one wants logits."""
    scheduler = make()
    scheduler.add(request("a", 20))

    plans = [run(scheduler) for _ in range(4)]

    assert [shape(p) for p in plans] == [
        [("a", 0, 8)],
        [("a", 8, 8)],
        [("a", 16, 4)],
        [("a", 20, 1)],
    ]
    assert [p.chunks[0].wants_logits for p in plans] == [False, False, True, True]
    assert plans[2].chunks[0].token_ids == (16, 17, 18, 19)
    assert plans[3].chunks[0].token_ids == (7,)


def test_chunks_carry_blocks_for_their_positions() -> None:
    """Every position of a chunk lies in a block of its own request."""
    scheduler = make()
    scheduler.add(request("a", 9))
    scheduler.add(request("b", 9))
    for _ in range(12):
        plan = run(scheduler)
        owned = [set(c.block_ids) for c in plan.chunks]

        assert all(len(c.block_ids) * 4 >= c.start + len(c.token_ids) for c in plan.chunks)
        assert len(set().union(*owned)) == sum(len(ids) for ids in owned)
        assert 0 not in set().union(*owned)
        assert len({c.slot for c in plan.chunks} - {0}) == len(plan.chunks)


def test_memory_under_a_pass_is_free_when_the_pass_is_over() -> None:
    """Of two prompts half through one ends: what the device still writes is nobody's until it is done."""
    scheduler = make()
    scheduler.add(request("a", 4))
    scheduler.add(request("b", 4))
    plan = scheduler.plan()
    for chunk in plan.chunks:
        scheduler.hold(chunk)
    free = scheduler.blocks.num_free, scheduler.slots.num_free

    scheduler.remove("a")

    scheduler.check_integrity()
    assert (scheduler.blocks.num_free, scheduler.slots.num_free) == free
    assert scheduler.plan().chunks == plan.chunks[1:]
    scheduler.commit(plan.chunks[1], 7)
    scheduler.check_integrity()
    assert (scheduler.blocks.num_free, scheduler.slots.num_free) == (free[0] + 1, free[1] + 1)


def test_beside_streams_prompts_take_smaller_steps() -> None:
    """Alone a prompt has the whole budget; with a stream beside it no more than its bound."""
    scheduler = make(max_mixed_tokens=3)
    scheduler.add(request("stream", 8))
    assert shape(run(scheduler)) == [("stream", 0, 8)]
    scheduler.add(request("long", 30))

    assert shape(run(scheduler)) == [("stream", 8, 1), ("long", 0, 3)]
    scheduler.remove("stream")
    assert shape(run(scheduler)) == [("long", 3, 8)]


def test_streams_get_their_row_before_prompts() -> None:
    """A running stream advances in every step, and so does the prompt that arrives beside it."""
    scheduler = make()
    scheduler.add(request("stream", 2))
    run(scheduler)
    scheduler.add(request("long", 30))

    plans = [shape(run(scheduler)) for _ in range(4)]

    assert [p[0] for p in plans] == [("stream", start, 1) for start in (2, 3, 4, 5)]
    assert [p[1] for p in plans] == [("long", start, 7) for start in (0, 7, 14, 21)]


def test_prompts_share_a_step_in_order_of_arrival() -> None:
    """What the first prompt leaves of a step goes to the next ones."""
    scheduler = make()
    for name in "abc":
        scheduler.add(request(name, 3))

    assert shape(run(scheduler)) == [("a", 0, 3), ("b", 0, 3), ("c", 0, 2)]
    assert shape(run(scheduler)) == [("a", 3, 1), ("b", 3, 1), ("c", 2, 1)]


def test_requests_beyond_the_slots_wait_their_turn() -> None:
    """A slot that becomes free goes to the request that has waited longest."""
    scheduler = make(num_slots=2)
    for name in "abcd":
        scheduler.add(request(name, 2, max_tokens=2))

    order = [[c[0] for c in shape(run(scheduler))] for _ in range(4)]

    assert order == [["a", "b"], ["a", "b"], ["c", "d"], ["c", "d"]]
    assert (scheduler.num_running, scheduler.num_waiting) == (0, 0)


def test_a_request_that_does_not_fit_holds_up_those_behind_it() -> None:
    """Short requests do not overtake a long one for ever: memory is given in order of arrival."""
    scheduler = make(max_batched_tokens=64)
    scheduler.add(request("first", 32, max_tokens=3))  # 8 of 16 blocks
    run(scheduler)
    scheduler.add(request("long", 40, max_tokens=2))  # 10 blocks
    scheduler.add(request("short", 2, max_tokens=1))

    seen = [[c[0] for c in shape(run(scheduler))] for _ in range(3)]

    assert seen == [["first"], ["first"], ["long", "short"]]


def test_admission_leaves_running_requests_a_block_to_grow() -> None:
    """The last free block is not given away while a stream is about to need it."""
    scheduler = make(num_blocks=16, max_batched_tokens=64)
    scheduler.add(request("a", 56))  # 14 blocks, two left
    run(scheduler)
    scheduler.add(request("b", 8))  # would take both

    assert [c[0] for c in shape(run(scheduler))] == ["a"]
    assert scheduler.blocks.num_free == 1


def test_the_youngest_gives_way_and_goes_on_where_it_was() -> None:
    """Out of blocks, the youngest is recomputed later from prompt and generated tokens."""
    scheduler = make(num_blocks=16, max_batched_tokens=64)
    scheduler.add(request("old", 27))
    scheduler.add(request("young", 27, max_tokens=12))
    seen = [item for _ in range(60) for item in shape(run(scheduler))]

    assert scheduler.num_preemptions == 1
    again = [item for item in seen if item[:2] == ("young", 0)]
    assert [item[2] for item in again] == [27, 33]
    assert ("old", 0, 27) in seen
    assert sum(item[0] == "old" for item in seen) == 64 - 27
    assert scheduler.blocks.num_free == 16


def test_a_preempted_request_keeps_its_tokens() -> None:
    """What was generated before a preemption is part of what is processed after it."""
    scheduler = make(num_blocks=16, max_batched_tokens=64)
    scheduler.add(request("old", 27))
    scheduler.add(request("young", 27))
    young = scheduler.get("young")
    for token in range(100, 107):
        run(scheduler, token)
    assert scheduler.num_preemptions == 1
    generated = young.token_ids[27:]

    plans = [run(scheduler) for _ in range(60)]

    chunk = next(c for plan in plans for c in plan.chunks if c.request_id == "young")
    assert chunk.token_ids == tuple(range(27)) + tuple(generated)
    assert chunk.wants_logits


def test_nobody_is_admitted_in_the_step_of_a_preemption() -> None:
    """The blocks just taken from a request are not handed to it again at once."""
    scheduler = make(num_blocks=16, max_batched_tokens=64)
    scheduler.add(request("old", 27))
    scheduler.add(request("young", 27))
    plans = [run(scheduler) for _ in range(7)]

    assert [len(plan.chunks) for plan in plans] == [2] * 6 + [1]
    assert scheduler.num_preemptions == 1
    assert scheduler.num_waiting == 1


@pytest.mark.parametrize("steps", [0, 1, 2, 4])
def test_removal_frees_everything_at_once(steps: int) -> None:
    """Waiting, in the middle of its prompt or decoding, an aborted request leaves nothing."""
    scheduler = make()
    scheduler.add(request("a", 12))
    for _ in range(steps):
        run(scheduler)

    assert scheduler.remove("a") is not None
    assert scheduler.remove("a") is None

    assert (scheduler.blocks.num_free, scheduler.slots.num_free) == (16, 4)
    assert scheduler.plan().chunks == ()
    scheduler.check_integrity()


def test_the_context_ends_a_request() -> None:
    """A request ends with length when prompt and completion fill the context."""
    scheduler = make(max_model_len=20)
    scheduler.add(request("a", 17))
    reasons: list[FinishReason | None] = []
    for _ in range(5):
        (chunk,) = scheduler.plan().chunks
        reasons.append(scheduler.commit(chunk, 7 if chunk.wants_logits else None))

    assert reasons == [None, None, None, None, FinishReason.LENGTH]
    assert scheduler.num_running == 0


def test_a_live_id_is_refused() -> None:
    """Two live requests never share an id; after the end it may be used again."""
    scheduler = make()
    scheduler.add(request("a", 2, max_tokens=1))

    with pytest.raises(ValueError, match="request id a is live"):
        scheduler.add(request("a", 2))
    run(scheduler)
    scheduler.add(request("a", 2))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_blocks": 15}, "15 blocks of 4 positions cannot hold one request of 64 tokens"),
        ({"max_batched_tokens": 4}, "a step of 4 rows leaves no prompt a row beside 4"),
    ],
)
def test_sizes_that_could_starve_are_refused(changes: dict[str, int], message: str) -> None:
    """A pool smaller than one request and a step without room for a prompt are no schedulers."""
    with pytest.raises(ValueError, match=message):
        make(**changes)


def lose_a_block(scheduler: Scheduler) -> None:
    scheduler._running[0].block_ids = scheduler._running[0].block_ids[:-1]


def share_a_slot(scheduler: Scheduler) -> None:
    scheduler._running[1].slot = scheduler._running[0].slot


def swap_the_order(scheduler: Scheduler) -> None:
    scheduler._running.reverse()


def forget_a_request(scheduler: Scheduler) -> None:
    del scheduler._live["a"]


def overrun(scheduler: Scheduler) -> None:
    scheduler._running[0].num_computed = 50


def wait_with_memory(scheduler: Scheduler) -> None:
    scheduler._waiting[0].slot = 1


def run_without_status(scheduler: Scheduler) -> None:
    state = scheduler._running[0]
    state.status = type(state.status).WAITING


@pytest.mark.parametrize(
    "fault",
    [
        lose_a_block,
        share_a_slot,
        swap_the_order,
        forget_a_request,
        overrun,
        wait_with_memory,
        run_without_status,
    ],
)
def test_check_integrity_sees_a_planted_fault(fault: Callable[[Scheduler], None]) -> None:
    """Each kind of wrong bookkeeping is found."""
    scheduler = make(num_slots=2)
    for name in "abc":
        scheduler.add(request(name, 3))
    run(scheduler)

    fault(scheduler)

    with pytest.raises(RuntimeError):
        scheduler.check_integrity()


def cached(**changes: int) -> Scheduler:
    return make(max_snapshots=6, max_batched_tokens=64, **changes)


def finish(scheduler: Scheduler, name: str, ids: list[int], max_tokens: int = 3) -> list[int]:
    """Run one request alone to its end; its whole sequence."""
    scheduler.add(GenerateRequest(name, tuple(ids), SamplingParams(max_tokens=max_tokens)))
    state = scheduler.get(name)
    while scheduler.num_running or scheduler.num_waiting:
        run(scheduler)
    return state.token_ids


def starts(scheduler: Scheduler, name: str, ids: list[int]) -> list[tuple[int, int]]:
    """(start, length) of every chunk of a request that is to give one token."""
    scheduler.add(GenerateRequest(name, tuple(ids), SamplingParams(max_tokens=1)))
    found = []
    while scheduler.num_running or scheduler.num_waiting:
        found += [(start, length) for _, start, length in shape(run(scheduler))]
    return found


def test_a_next_turn_starts_where_the_last_one_ended() -> None:
    """Prompt and generation of the turn before are not processed again, but for its last token."""
    scheduler = cached()
    first = finish(scheduler, "a", list(range(10)))
    assert len(first) == 13

    assert starts(scheduler, "b", [*first, 50, 51]) == [(12, 3)]


def test_a_turn_that_was_rendered_anew_starts_at_its_prompt() -> None:
    """Where only the generation differs, the prompt's end is the start."""
    scheduler = cached()
    first = finish(scheduler, "a", list(range(10)))

    assert starts(scheduler, "b", [*first[:10], 50, 51, 52]) == [(10, 3)]


def test_the_same_prompt_starts_at_its_last_boundary() -> None:
    """Its last token's logits are wanted, so the state at its end is of no use to itself."""
    scheduler = cached()
    prompt = list(range(10))

    assert starts(scheduler, "a", prompt) == [(0, 8), (8, 2)]
    assert starts(scheduler, "b", prompt) == [(8, 2)]


def test_a_common_beginning_is_kept_when_it_is_seen_again() -> None:
    """The second prompt with the same system prompt stops where it leaves it; the third hits."""
    scheduler = cached()
    system = list(range(10))

    assert starts(scheduler, "a", system + [20] * 7) == [(0, 16), (16, 1)]
    assert starts(scheduler, "b", system + [21] * 7) == [(0, 8), (8, 8), (16, 1)]
    assert starts(scheduler, "c", system + [22] * 7) == [(8, 9)]


def test_a_stop_is_worth_some_blocks() -> None:
    """A turn that adds less than four blocks beyond the hit is not cut at a boundary."""
    scheduler = cached()
    first = finish(scheduler, "a", list(range(10)))

    assert starts(scheduler, "b", [*first, *range(50, 65)]) == [(12, 16)]
    assert starts(scheduler, "c", [*first, *range(70, 87)]) == [(12, 16), (28, 2)]


def test_an_aborted_prompt_goes_on_where_it_was() -> None:
    """A client that gave up and asks again does not wait for the same tokens twice."""
    scheduler = make(max_snapshots=6)
    scheduler.add(request("a", 30))
    run(scheduler)
    run(scheduler)
    scheduler.remove("a")

    assert starts(scheduler, "b", list(range(30)))[0] == (16, 8)


def test_what_failed_is_not_kept() -> None:
    """State that may be wrong goes with its request."""
    scheduler = cached()
    scheduler.add(request("a", 10))
    run(scheduler)
    scheduler.remove("a", keep=False)

    assert [snapshot.length for snapshot in scheduler.prefix.snapshots] == [8]


def test_cached_blocks_give_way_to_requests() -> None:
    """A prompt that needs the whole pool gets it; what was kept is evicted, oldest first."""
    scheduler = cached()
    finish(scheduler, "a", list(range(10)))
    assert scheduler.blocks.num_free < 16

    assert starts(scheduler, "b", [9] * 63) == [(0, 60), (60, 3)]

    assert scheduler.num_preemptions == 0
    assert scheduler.prefix.num_evictions > 0


def test_a_stream_grows_into_cached_blocks_before_anybody_is_preempted() -> None:
    """Room that only the cache holds is free room."""
    scheduler = cached()
    finish(scheduler, "a", list(range(30)))
    scheduler.add(request("b", 1, max_tokens=62))
    for _ in range(70):
        run(scheduler)

    assert scheduler.num_running == 0
    assert scheduler.num_preemptions == 0


def test_a_hit_does_not_let_in_what_does_not_fit() -> None:
    """Blocks of the hit itself are not counted as room: in use, they cannot be evicted."""
    scheduler = cached(num_blocks=16)
    known = finish(scheduler, "a", list(range(20)), max_tokens=1)
    scheduler.add(GenerateRequest("b", tuple(range(100, 139)), SamplingParams(max_tokens=20)))
    run(scheduler)  # ten of sixteen blocks; five hold the snapshots of "a"

    scheduler.add(GenerateRequest("c", (*known, *range(50, 60)), SamplingParams(max_tokens=1)))

    assert [c[0] for c in shape(run(scheduler))] == ["b"]
    assert scheduler.num_waiting == 1
    scheduler.check_integrity()


def test_a_preempted_request_finds_its_own_prompt() -> None:
    """What is left of its memory in the cache is not computed again, nor reported as cached."""
    scheduler = cached(num_blocks=20)
    scheduler.add(request("old", 27, max_tokens=20))
    scheduler.add(GenerateRequest("young", tuple(range(100, 127)), SamplingParams(max_tokens=37)))
    young = scheduler.get("young")
    resumed = []
    for _ in range(150):
        before = scheduler.num_preemptions
        for name, start, length in shape(run(scheduler)):
            if name == "young" and length > 1:
                resumed.append(start)
        assert scheduler.num_preemptions - before in (0, 1)

    assert scheduler.num_preemptions > 0
    assert scheduler.num_running == scheduler.num_waiting == 0
    assert young.cached_tokens == 0
    assert resumed == [0, 24, 27]
