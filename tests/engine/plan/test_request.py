"""RequestState: its transitions and its end."""

from __future__ import annotations

import pytest

from engine.api import FinishReason, GenerateRequest, SamplingParams
from engine.plan.prefix import HashChain
from engine.plan.replay import Replay
from engine.plan.request import RequestState, Status


def state(
    prompt: int = 4, *, max_tokens: int = 3, stop: tuple[int, ...] = (), ignore_eos: bool = False
) -> RequestState:
    sampling = SamplingParams(max_tokens=max_tokens, stop_token_ids=stop, ignore_eos=ignore_eos)
    request = GenerateRequest("r", tuple(range(prompt)), sampling)
    tail = Replay().resolve(request)
    return RequestState(request, 0, 8, HashChain(b"", 4), tail)


def test_a_request_goes_from_prompt_to_end() -> None:
    """Chunks of a prompt give no token; the last one and each decode step give one."""
    request = state()
    assert request.status is Status.WAITING
    request.admit(1, (1,))

    assert request.advance(3, None) is None
    assert request.status is Status.PREFILL
    assert request.advance(1, 50) is None
    assert request.status is Status.DECODE
    assert request.advance(1, 51) is None
    assert request.advance(1, 52) is FinishReason.LENGTH

    assert request.token_ids == [0, 1, 2, 3, 50, 51, 52]
    assert request.num_generated == 3


@pytest.mark.parametrize(
    ("kwargs", "token", "reason"),
    [
        ({"stop": (7,)}, 7, FinishReason.STOP),
        ({"stop": (7,)}, 6, None),
        ({"stop": (7,), "ignore_eos": True}, 7, None),
        ({"max_tokens": 1}, 6, FinishReason.LENGTH),
        ({"max_tokens": 1, "stop": (7,)}, 7, FinishReason.STOP),
        ({"prompt": 7, "max_tokens": 99}, 6, FinishReason.LENGTH),
    ],
    ids=["stop", "other", "ignore_eos", "max_tokens", "stop-before-length", "context"],
)
def test_the_end_has_its_reason(
    kwargs: dict[str, object], token: int, reason: FinishReason | None
) -> None:
    """A stop token, max_tokens and the context each end a request, in this order."""
    request = state(**kwargs)  # type: ignore[arg-type]
    request.admit(1, (1,))

    assert request.advance(len(request.token_ids), token) is reason


def test_preemption_keeps_the_tokens_and_drops_the_memory() -> None:
    """A preempted request starts again over prompt and generated tokens."""
    request = state()
    request.admit(1, (1, 2))
    request.advance(4, 50)

    request.preempt()

    assert (request.status, request.num_computed, request.slot) == (Status.WAITING, 0, 0)
    assert request.block_ids == ()
    request.admit(2, (3,))
    assert request.advance(5, 51) is None
    assert request.token_ids[4:] == [50, 51]


@pytest.mark.parametrize(
    "steps",
    [
        lambda r: r.preempt(),
        lambda r: (r.admit(1, (1,)), r.admit(1, (1,))),
        lambda r: (r.finish(), r.finish()),
        lambda r: (r.finish(), r.admit(1, (1,))),
        lambda r: (r.admit(1, (1,)), r.advance(2, 50)),
        lambda r: (r.admit(1, (1,)), r.advance(4, None)),
        lambda r: (r.admit(1, (1,)), r.advance(5, 50)),
        lambda r: r.advance(4, 50),
    ],
    ids=[
        "preempt-waiting",
        "admit-twice",
        "finish-twice",
        "admit-finished",
        "token-too-early",
        "token-missing",
        "more-than-known",
        "advance-waiting",
    ],
)
def test_a_wrong_transition_is_an_error(steps: object) -> None:
    """A scheduler that confuses a request's state is stopped at once."""
    with pytest.raises(RuntimeError):
        steps(state())  # type: ignore[operator]
