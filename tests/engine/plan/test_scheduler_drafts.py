"""What the scheduler allows for where tokens are drafted."""

from __future__ import annotations

import pytest

from engine.api import FinishReason, GenerateRequest, SamplingParams
from engine.plan.scheduler import Scheduler
from engine.plan.step import Chunk, StepPlan


def make(**changes: int) -> Scheduler:
    settings = {
        "num_blocks": 16,
        "block_size": 4,
        "num_slots": 4,
        "max_batched_tokens": 30,
        "max_model_len": 64,
        "drafts": 5,
    }
    return Scheduler(**{**settings, **changes})  # type: ignore[arg-type]


def request(name: str, prompt: int, max_tokens: int = 30) -> GenerateRequest:
    return GenerateRequest(name, tuple(range(prompt)), SamplingParams(max_tokens=max_tokens))


def started(scheduler: Scheduler, *requests: GenerateRequest) -> StepPlan:
    """Run the prompts; the plan of the first step with streams."""
    for one in requests:
        scheduler.add(one)
    for chunk in scheduler.plan().chunks:
        scheduler.commit(chunk, 7)
    return scheduler.plan()


def reach(chunk: Chunk) -> int:
    """Tokens that a chunk's blocks have room for from its start on."""
    return len(chunk.block_ids) * 4 - chunk.start


@pytest.mark.parametrize("prompt", range(1, 9))
def test_blocks_cover_a_whole_draft(prompt: int) -> None:
    """A stream has the blocks of its newest token and of the draft after it, and no further."""
    scheduler = make()
    (chunk,) = started(scheduler, request("a", prompt)).chunks

    assert chunk.left == 29
    assert 6 <= reach(chunk) < 6 + 4
    assert make(drafts=0)._drafts == 0


def test_the_last_tokens_need_no_room_for_drafts() -> None:
    """Blocks reach as far as tokens may still come."""
    scheduler = make()
    (chunk,) = started(scheduler, request("a", 3, max_tokens=2)).chunks

    assert chunk.left == 1
    assert reach(chunk) == 1


def test_drafts_take_free_blocks_only() -> None:
    """Nobody is preempted or evicted for a draft: the first stream takes what is left."""
    scheduler = make(num_blocks=5, max_model_len=20)
    plan = started(scheduler, request("a", 4, 9), request("b", 4, 9))
    first, second = plan.chunks

    assert (reach(first), reach(second)) == (8, 4)
    assert scheduler.num_preemptions == 0
    assert scheduler.blocks.num_free == 0


def test_a_step_may_give_several_tokens() -> None:
    """All of them count; after the last one the request has ended, and a further one is a bug."""
    scheduler = make()
    (chunk,) = started(scheduler, request("a", 3)).chunks
    assert scheduler.commit(chunk, 8, (9, 10)) is None
    state = scheduler.get("a")
    assert state.token_ids[3:] == [7, 8, 9, 10]
    assert state.num_computed == 6
    scheduler.check_integrity()
    (chunk,) = scheduler.plan().chunks
    assert (chunk.start, chunk.token_ids, chunk.left) == (6, (10,), 26)

    stopping = make()
    sampling = SamplingParams(30, stop_token_ids=(9,))
    (chunk,) = started(stopping, GenerateRequest("b", (1, 2), sampling)).chunks
    assert stopping.commit(chunk, 8, (9,)) is FinishReason.STOP
    (chunk,) = started(stopping, GenerateRequest("c", (1, 2), sampling)).chunks
    with pytest.raises(RuntimeError, match="request c has ended, yet got token 10"):
        stopping.commit(chunk, 8, (9, 10))


@pytest.mark.parametrize("drafts", [0, 5])
def test_going_ahead_needs_a_block_wherever_a_draft_ends(drafts: int) -> None:
    """The step after this one has a block for its row even if the whole draft is taken."""
    scheduler = make(drafts=drafts, lookahead=True)
    (chunk,) = started(scheduler, request("a", 4)).chunks
    assert chunk.goes_ahead
    assert reach(chunk) >= 2 + drafts

    tight = make(drafts=drafts, lookahead=True, num_blocks=4, max_model_len=16)
    first, second = started(tight, request("a", 4, 6), request("b", 3, 6)).chunks
    assert first.goes_ahead == second.goes_ahead == (drafts == 0)


@pytest.mark.parametrize(("drafts", "kept"), [(0, 1), (5, 0)])
def test_an_aborted_request_is_kept_where_its_state_is_known(drafts: int, kept: int) -> None:
    """With drafts under way a step may have taken its state further than its tokens."""
    scheduler = make(drafts=drafts, lookahead=True, max_snapshots=4)
    (chunk,) = started(scheduler, request("a", 3)).chunks
    scheduler.commit(chunk, 8)
    before = len(scheduler.prefix)
    scheduler.abort("a")

    assert len(scheduler.prefix) == before + kept
    scheduler.abort("a")
    scheduler.check_integrity()
