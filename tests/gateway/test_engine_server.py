"""The server over the engine in its own process, with random weights: mechanics, not skill."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import orjson
import pytest

from engine import TINY_CHECKPOINT
from gateway import Settings, create_app
from gateway.backends import Backend
from gateway.launch import open_backend
from tests.engine.model.build import write
from tests.gateway.support import RawCall, call, chat_body, data_frames, eventually, loopback, run

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shape and the tokenizer of the checkpoint that ships, with weights drawn at random."""
    folder = tmp_path_factory.mktemp("checkpoint") / "random"
    write(folder, orjson.loads((TINY_CHECKPOINT / "config.json").read_bytes()), seed=1)
    shutil.copy(TINY_CHECKPOINT / "tokenizer.json", folder)
    return folder


@pytest.fixture(scope="module")
def settings(checkpoint: Path) -> Settings:
    return Settings(model=checkpoint, device="cpu")


@pytest.fixture(scope="module")
def served(settings: Settings) -> Iterator[tuple[Backend, str]]:
    backend = open_backend(settings)
    with loopback(create_app(settings, backend)) as url:
        yield backend, url


def body(question: str, **fields: Any) -> dict[str, Any]:
    return chat_body(question, model="random", **{"max_tokens": 12, "temperature": 0, **fields})


@pytest.mark.parametrize("stream", [False, True])
def test_temperature_0_gives_the_same_answer_twice(
    served: tuple[Backend, str], stream: bool
) -> None:
    """Greedy means greedy, streamed or whole, also while thinking (the codec would force 1.0)."""
    _, url = served

    def answer(client: openai.OpenAI, **extra: Any) -> str:
        request = {
            "model": "random",
            "messages": [{"role": "user", "content": "Hi"}],
            "max_tokens": 12,
            "temperature": 0,
            "extra_body": extra,
        }
        if not stream:
            message = client.chat.completions.create(**request).choices[0].message
            return message.content + getattr(message, "reasoning_content", "")
        chunks = client.chat.completions.create(stream=True, **request)
        deltas = [chunk.choices[0].delta for chunk in chunks]
        return "".join(
            (delta.content or "") + (getattr(delta, "reasoning_content", None) or "")
            for delta in deltas
        )

    with openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client:
        for kind in ("enabled", "disabled"):
            thinking = {"thinking": {"type": kind}}
            first, second = answer(client, **thinking), answer(client, **thinking)
            assert first == second
            assert first


def test_ten_at_once_are_what_each_is_alone(served: tuple[Backend, str]) -> None:
    """What runs beside a request does not change its answer, and every block comes back."""
    backend, url = served
    requests = [
        {
            "model": "random",
            "messages": [{"role": "user", "content": f"Question {i}: " + "why " * (7 * i)}],
            "max_tokens": 10 + i,
            "temperature": 0.8,
            "seed": i,
            "extra_body": {"thinking": {"type": "disabled"}},
        }
        for i in range(10)
    ]

    async def one(client: openai.AsyncOpenAI, request: dict[str, Any]) -> str:
        stream = await client.chat.completions.create(stream=True, **request)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def main() -> tuple[list[str], list[str]]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client:
            steps.append(backend.stats().steps)
            together = await asyncio.gather(*(one(client, request) for request in requests))
            steps.append(backend.stats().steps)
            alone = [await one(client, request) for request in requests]
            steps.append(backend.stats().steps)
            return together, alone

    steps: list[int] = []
    together, alone = asyncio.run(main())
    assert together == alone
    assert steps[1] - steps[0] < (steps[2] - steps[1]) / 2  # they did share their steps
    assert len(set(together)) == 10
    stats = backend.stats()
    assert (stats.running, stats.waiting, stats.free_blocks) == (0, 0, stats.total_blocks)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_blocks_within_one_step(
    settings: Settings, stream: bool
) -> None:
    """The engine finishes the step it is in and gives the blocks back."""

    async def main() -> None:
        backend = open_backend(settings)
        app = create_app(settings, backend)
        async with app.router.lifespan_context(app):
            request = body("Hi", stream=stream, max_tokens=2000)
            one = RawCall(app, CHAT, orjson.dumps(request))
            await eventually(lambda: backend.stats().completion_tokens > 3)
            assert backend.stats().free_blocks < backend.stats().total_blocks
            one.leave()
            await one.task
            steps = backend.stats().steps
            await eventually(lambda: backend.stats().free_blocks == backend.stats().total_blocks)
            assert backend.stats().steps <= steps + 1
            assert backend.stats().running == 0

    run(main())


def test_a_prompt_beyond_the_context_is_400_with_both_numbers(settings: Settings) -> None:
    """Nothing reaches the engine, and the client learns both lengths."""

    async def main() -> tuple[int, Any]:
        backend = open_backend(settings)
        app = create_app(settings, backend)
        async with app.router.lifespan_context(app):
            reply = await call(app, CHAT, body("why not? " * 4000))
            assert backend.stats().steps == 0
            return reply

    status, reply = run(main())
    assert (status, reply["error"]["code"]) == (400, "context_length_exceeded")
    assert "4096" in reply["error"]["message"]


def test_a_stopped_engine_ends_its_streams_in_an_error(settings: Settings) -> None:
    """When the backend is stopped under an open stream, the client hears it."""

    async def main() -> list[Any]:
        backend = open_backend(settings)
        app = create_app(settings, backend)
        async with app.router.lifespan_context(app):
            one = RawCall(app, CHAT, orjson.dumps(body("Hi", stream=True, max_tokens=2000)))
            await one.start()
            await one.until(b"data: ")
            await backend.stop()
            frames = data_frames(await one.rest())
            status, reply = await call(app, CHAT, body("Hi"))
            assert (status, reply["error"]["code"]) == (503, "backend_unavailable")
            assert (await call(app, "/readyz", method="GET"))[0] == 503
            return frames

    frames = run(main())
    assert "shutting down" in frames[-2]["error"]["message"]
    assert not any(frame["choices"][0]["finish_reason"] for frame in frames[:-2])
