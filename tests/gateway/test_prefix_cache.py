"""An agent's next turn starts where the last one ended: openai SDK, our server, the model that ships.

What a hit needs is that the codec renders a turn, sent back by the client, to the very ids that the
model wrote. Where it does not, the prompt of the turn before is still found.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import openai
import pytest

from gateway import Settings, create_app
from gateway.backends import Backend
from gateway.launch import open_backend
from tests.gateway.agent import Turn, ask, run_loop
from tests.gateway.support import loopback
from tests.gateway.test_main_job import IMPLEMENTATIONS, LOOPS, MODEL, TOOLS

QUESTION = {"role": "user", "content": "Thanks. What is the weather in Lima?"}


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[openai.OpenAI, Backend]]:
    settings = Settings(device="cpu")
    backend = open_backend(settings)
    with (
        loopback(create_app(settings, backend)) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client, backend


def request(thinking: bool) -> dict[str, Any]:
    body = {"thinking": {"type": "enabled" if thinking else "disabled"}}
    return {"model": MODEL, "temperature": 0, "max_tokens": 300, "extra_body": body}


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("question", [LOOPS[0][0], LOOPS[2][0]])
def test_each_turn_finds_all_of_the_turn_before(
    served: tuple[openai.OpenAI, Backend], question: str, thinking: bool
) -> None:
    """Call, result, answer and a further question: only what is new is processed.

    The last token sampled, the end of the turn, was never processed, so it counts as new.
    """
    client, _ = served
    loop = run_loop(client, question, TOOLS, IMPLEMENTATIONS, stream=True, **request(thinking))
    messages = [*loop.messages, QUESTION]
    further = ask(client, stream=True, messages=messages, tools=TOOLS, **request(thinking))

    turns = [*loop.turns, further]
    assert len(turns) >= 3
    for before, after in pairwise(turns):
        known = before.usage.prompt_tokens + before.usage.completion_tokens
        assert after.usage.prompt_tokens_details.cached_tokens == known - 1


def calls_of_first_turn(client: openai.OpenAI) -> tuple[Turn, list[dict[str, Any]]]:
    """A turn with reasoning and a call, and what a client sends next that keeps no reasoning."""
    question = {"role": "user", "content": LOOPS[1][0]}
    first = ask(client, stream=True, messages=[question], tools=TOOLS, **request(thinking=True))
    assert first.reasoning
    assert first.calls
    reply = {"role": "assistant", "content": first.content, "tool_calls": first.calls}
    result = {"role": "tool", "tool_call_id": first.calls[0]["id"], "content": '{"time":"14:25"}'}
    return first, [question, reply, result]


def test_a_client_that_drops_the_reasoning_finds_its_turn(
    served: tuple[openai.OpenAI, Backend],
) -> None:
    """The gateway puts the reasoning of a turn with calls back, so the ids are the same again."""
    client, _ = served
    first, messages = calls_of_first_turn(client)

    second = ask(client, stream=True, messages=messages, tools=TOOLS, **request(thinking=True))

    known = first.usage.prompt_tokens + first.usage.completion_tokens
    assert second.usage.prompt_tokens_details.cached_tokens == known - 1


def test_a_turn_with_another_reasoning_finds_its_prompt(
    served: tuple[openai.OpenAI, Backend],
) -> None:
    """Where the turn comes back changed from its first token on, all before it is still found."""
    client, _ = served
    first, messages = calls_of_first_turn(client)
    messages[1]["reasoning_content"] = "Hm."

    second = ask(client, stream=True, messages=messages, tools=TOOLS, **request(thinking=True))

    assert second.usage.prompt_tokens_details.cached_tokens == first.usage.prompt_tokens


def test_the_counters_see_it(served: tuple[openai.OpenAI, Backend]) -> None:
    """Tokens found and requests that found some are counted beside all prompt tokens."""
    client, backend = served
    before = backend.stats()
    messages: list[dict[str, Any]] = [{"role": "user", "content": "What is 3 times 4?"}]
    turn = ask(client, stream=False, messages=messages, tools=TOOLS, **request(thinking=False))
    messages += [{"role": "assistant", "content": turn.content, "tool_calls": turn.calls}]
    messages += [{"role": "tool", "tool_call_id": turn.calls[0]["id"], "content": '{"result":12}'}]
    after = ask(client, stream=False, messages=messages, tools=TOOLS, **request(thinking=False))

    stats = backend.stats()
    cached = after.usage.prompt_tokens_details.cached_tokens
    assert cached == turn.usage.prompt_tokens + turn.usage.completion_tokens - 1
    assert stats.cached_tokens - before.cached_tokens >= cached
    assert stats.prompt_tokens - before.prompt_tokens > stats.cached_tokens - before.cached_tokens
    assert stats.prefix_hits > before.prefix_hits
