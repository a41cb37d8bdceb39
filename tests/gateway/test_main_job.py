"""The project's main job: an agent on the openai SDK, our server, our engine, the model that ships.

Nothing scripted, nothing mocked. Greedy, so that a passing conversation passes every time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import orjson
import pytest

from gateway import Settings, create_app
from gateway.backends import Backend
from gateway.launch import open_backend
from tests.gateway.agent import Conversation, ask, run_loop
from tests.gateway.support import RawCall, eventually, loopback, run

MODEL = "bathyal-tiny"


def tool(name: str, about: str, **properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": about,
            "parameters": {
                "type": "object",
                "properties": properties,
                "required": list(properties),
            },
        },
    }


WEATHER = tool(
    "get_weather",
    "Get the current weather in a given location",
    city={"type": "string", "description": "The city"},
)
CLOCK = tool(
    "get_current_time",
    "Get the current time in a given city",
    city={"type": "string", "description": "City name"},
)
MULTIPLY = tool(
    "multiply",
    "Multiply two numbers",
    a={"type": "number", "description": "First number"},
    b={"type": "number", "description": "Second number"},
)
TOOLS = [WEATHER, CLOCK, MULTIPLY]
SKIES = {"Oslo": ("rain", 7), "Cairo": ("sunny", 31), "Lima": ("cloudy", 19)}


def get_weather(city: str) -> dict[str, Any]:
    condition, temperature = SKIES[city]
    return {"temperature": temperature, "condition": condition}


IMPLEMENTATIONS = {
    "get_weather": get_weather,
    "get_current_time": lambda city: {"time": "14:25"},
    "multiply": lambda a, b: {"result": a * b},
}
LOOPS = [
    ("What is the weather in Oslo?", "get_weather", {"city": "Oslo"}, "7"),
    ("What time is it in Madrid?", "get_current_time", {"city": "Madrid"}, "14:25"),
    ("What is 12 times 34?", "multiply", {"a": 12, "b": 34}, "408"),
]


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[openai.OpenAI, Backend, str]]:
    settings = Settings(device="cpu")
    backend = open_backend(settings)
    with (
        loopback(create_app(settings, backend)) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client, backend, url


def loop(client: openai.OpenAI, question: str, *, stream: bool, thinking: bool) -> Conversation:
    return run_loop(
        client,
        question,
        TOOLS,
        IMPLEMENTATIONS,
        stream=stream,
        model=MODEL,
        temperature=0,
        max_tokens=300,
        extra_body={"thinking": {"type": "enabled" if thinking else "disabled"}},
    )


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("question", "name", "arguments", "answer"), LOOPS)
def test_a_tool_loop(
    served: tuple[openai.OpenAI, Backend, str],
    question: str,
    name: str,
    arguments: dict[str, Any],
    answer: str,
    stream: bool,
    thinking: bool,
) -> None:
    """One question: the right tool with the right arguments, then an answer from its result."""
    done = loop(served[0], question, stream=stream, thinking=thinking)

    call, final = done.turns
    assert [one["function"]["name"] for one in call.calls] == [name]
    assert orjson.loads(call.calls[0]["function"]["arguments"]) == arguments
    assert (call.finish_reason, final.finish_reason) == ("tool_calls", "stop")
    assert answer in final.content
    assert bool(call.reasoning) == thinking


def test_stream_and_whole_are_the_same_conversation(
    served: tuple[openai.OpenAI, Backend, str],
) -> None:
    """How a reply travels does not change what the model says."""
    question = LOOPS[0][0]
    whole = loop(served[0], question, stream=False, thinking=True)
    streamed = loop(served[0], question, stream=True, thinking=True)

    assert [(t.content, t.reasoning) for t in whole.turns] == [
        (t.content, t.reasoning) for t in streamed.turns
    ]


def test_a_greeting_needs_no_tool(served: tuple[openai.OpenAI, Backend, str]) -> None:
    """Tools that are there need not be used."""
    turn = ask(
        served[0],
        stream=True,
        model=MODEL,
        messages=[{"role": "user", "content": "Hello!"}],
        tools=TOOLS,
        temperature=0,
        max_tokens=200,
    )

    assert (turn.calls, turn.finish_reason) == ([], "stop")
    assert turn.content


def test_ten_at_once_do_not_cross(served: tuple[openai.OpenAI, Backend, str]) -> None:
    """Ten agents with three questions between them each get their own answer."""
    client, backend, _ = served
    cities = [list(SKIES)[i % 3] for i in range(10)]

    async def main() -> list[Conversation]:
        return await asyncio.gather(
            *(
                asyncio.to_thread(
                    loop,
                    client,
                    f"What is the weather in {city}?",
                    stream=i % 2 == 0,
                    thinking=i % 4 < 2,
                )
                for i, city in enumerate(cities)
            )
        )

    for city, done in zip(cities, asyncio.run(main()), strict=True):
        (one,) = done.turns[0].calls
        assert orjson.loads(one["function"]["arguments"]) == {"city": city}
        assert str(SKIES[city][1]) in done.answer
    stats = backend.stats()
    assert (stats.running, stats.waiting, stats.free_blocks) == (0, 0, stats.total_blocks)


def test_temperature_0_gives_the_same_answer_twice(
    served: tuple[openai.OpenAI, Backend, str],
) -> None:
    """Also while thinking, where the codec alone would sample."""
    first, second = (loop(served[0], LOOPS[0][0], stream=False, thinking=True) for _ in range(2))

    assert [(t.content, t.reasoning) for t in first.turns] == [
        (t.content, t.reasoning) for t in second.turns
    ]


def test_a_client_that_leaves_frees_its_blocks_within_one_step() -> None:
    """The engine finishes the step it is in and gives the blocks back."""

    async def main() -> None:
        settings = Settings(device="cpu")
        backend = open_backend(settings)
        app = create_app(settings, backend)
        async with app.router.lifespan_context(app):
            body = {
                "model": MODEL,
                "messages": [{"role": "user", "content": "What is the weather in Oslo?"}],
                "tools": TOOLS,
                "stream": True,
            }
            one = RawCall(app, "/v1/chat/completions", orjson.dumps(body))
            await eventually(lambda: backend.stats().completion_tokens > 2)
            assert backend.stats().free_blocks < backend.stats().total_blocks
            one.leave()
            await one.task
            steps = backend.stats().steps
            await eventually(lambda: backend.stats().free_blocks == backend.stats().total_blocks)
            assert backend.stats().steps <= steps + 1

    run(main())
