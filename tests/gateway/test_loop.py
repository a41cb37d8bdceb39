"""Long work is done beside the event loop: bodies, steps, ends, records, prompts, collections."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from engine.api import (
    EngineDeadError,
    FinishReason,
    GenerateRequest,
    ModelInfo,
    SamplingParams,
    TokenDelta,
    TokenLogprob,
    Usage,
)
from gateway import admission, generation, sse
from gateway.backends.embedded import EmbeddedBackend
from gateway.launch import SWITCH_SECONDS, keep_loop_free
from gateway.recorder import Tape
from gateway.sse import until_disconnect
from gateway.threads import LONG_COPY, LONG_PROMPT
from parsers import Codec, Completion, Exchange
from parsers.exchange import LONG_REPLY, LONG_STEP
from tests.gateway.support import EOS, FunctionBackend, RawCall, call, chat_body, run, running

CHAT = "/v1/chat/completions"
X = 100  # a token of the test's tokenizer


class Threads:
    """Notes in which threads a method runs."""

    def __init__(self, patch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
        self.seen: list[bool] = []  # whether it was the loop's
        original: Callable[..., Any] = getattr(owner, name)

        def noted(*args: Any, **kwargs: Any) -> Any:
            self.seen.append(threading.current_thread() is threading.main_thread())
            return original(*args, **kwargs)

        patch.setattr(owner, name, noted)


def ask(info: ModelInfo, steps: list[tuple[int, ...]], **options: Any) -> Any:
    async def generate(request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
        for step in steps:
            yield TokenDelta(request.id, step)
        yield TokenDelta(request.id, (EOS,), None, FinishReason.STOP, Usage(1, 1))

    async def main() -> Any:
        settings = options.pop("settings", {})
        async with running(FunctionBackend(info, generate), **settings) as app:
            return await call(app, CHAT, options.get("body", chat_body()))

    return run(main())


@pytest.mark.parametrize(("size", "on_loop"), [(LONG_STEP, True), (LONG_STEP + 1, False)])
def test_a_long_step(
    info: ModelInfo, monkeypatch: pytest.MonkeyPatch, size: int, on_loop: bool
) -> None:
    """Of joined deltas, say."""
    receive = Threads(monkeypatch, Exchange, "receive")
    status, reply = ask(info, [(X,) * size])

    assert status == 200
    assert reply["usage"]["completion_tokens"] == size + 1
    assert receive.seen == [on_loop, True]


@pytest.mark.parametrize(("size", "on_loop"), [(10, True), (LONG_REPLY, False)])
def test_a_long_replys_end(
    info: ModelInfo, monkeypatch: pytest.MonkeyPatch, size: int, on_loop: bool
) -> None:
    """The codec's finish, and the whole reply's text."""
    close = Threads(monkeypatch, Exchange, "close")
    body = Threads(monkeypatch, Exchange, "body")
    status, _ = ask(info, [(X,)] * size)

    assert status == 200
    assert (close.seen, body.seen) == ([on_loop], [on_loop])


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("size", "on_loop"), [(10, True), (LONG_REPLY, False)])
def test_the_end_of_a_reply_that_scores_a_long_prompt(
    info: ModelInfo,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    stream: bool,
    size: int,
    on_loop: bool,
) -> None:
    """However short the reply itself is: two tokens here."""

    async def generate(request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
        scores = (None, *[TokenLogprob(-0.5)] * (len(request.prompt_ids) - 1))
        yield TokenDelta(request.id, (X,), prompt_logprobs=scores)
        yield TokenDelta(request.id, (EOS,), None, FinishReason.STOP, Usage(size, 2))

    async def main() -> bytes:
        async with running(FunctionBackend(info, generate)) as app:
            asked = chat_body("x" * size) if path == CHAT else {"prompt": [X] * size}
            body = {"model": info.name, **asked, "prompt_logprobs": 0, "stream": stream}
            one = RawCall(app, path, orjson.dumps(body))
            await one.start()
            return await one.rest()

    owner = Exchange if path == CHAT else Completion
    close, whole = Threads(monkeypatch, owner, "close"), Threads(monkeypatch, Exchange, "body")
    note = Threads(monkeypatch, generation, "_note")

    assert run(main()).count(b'"token_id"') >= size - 1
    assert (close.seen, note.seen) == ([on_loop], [on_loop])
    assert whole.seen == ([on_loop] if path == CHAT and not stream else [])


def test_a_long_prompts_parsing(info: ModelInfo, monkeypatch: pytest.MonkeyPatch) -> None:
    """Short bodies are not worth a thread's cost."""
    opened = Threads(monkeypatch, Codec, "open_exchange")
    for size in (10, 8000):
        assert ask(info, [(X,)], body=chat_body("x" * size))[0] == 200
    assert opened.seen == [True, False]


def test_a_records_line(info: ModelInfo, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It holds the whole body."""
    line = Threads(monkeypatch, Tape, "line")
    assert ask(info, [(X,)], settings={"record": tmp_path / "record.jsonl"})[0] == 200
    assert line.seen == [False]


def test_a_large_body_is_joined_in_a_thread(
    info: ModelInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copying 32 MiB takes some milliseconds."""
    asked: list[bool] = []
    original = admission.in_thread_if

    async def noted(long: bool, *args: Any) -> Any:
        asked.append(long)
        return await original(long, *args)

    monkeypatch.setattr(admission, "in_thread_if", noted)
    for size in (10, LONG_COPY):
        ask(info, [(X,)], body=chat_body("x" * size))
    assert asked == [False, True]


@pytest.mark.parametrize(("size", "on_loop"), [(10, True), (LONG_PROMPT, False)])
def test_a_long_prompts_way_into_the_engine(size: int, on_loop: bool) -> None:
    """The engine looks at every id of it."""

    class Engine:
        def submit(self, request: GenerateRequest, sink: Any) -> None:
            seen.append(threading.current_thread() is threading.main_thread())
            raise EngineDeadError("enough")

    async def main() -> None:
        backend = EmbeddedBackend()
        backend._thread = Engine()  # type: ignore[assignment]
        request = GenerateRequest("a", (5,) * size, SamplingParams(1))
        with pytest.raises(EngineDeadError):
            async for _ in backend.generate(request):
                pass

    seen: list[bool] = []
    run(main())
    assert seen == [on_loop]


def test_what_start_up_made_is_left_out_of_collections() -> None:
    """A full collection over a loaded model stops the loop for 100 ms."""
    before, frozen = sys.getswitchinterval(), gc.get_freeze_count()
    try:
        keep_loop_free()
        assert gc.get_freeze_count() > max(frozen, 10_000)
        assert sys.getswitchinterval() == pytest.approx(SWITCH_SECONDS)
    finally:
        sys.setswitchinterval(before)
        gc.unfreeze()


@pytest.mark.parametrize("turns", range(6))
def test_a_client_that_leaves_as_the_work_ends_leaves_no_cancel_behind(
    monkeypatch: pytest.MonkeyPatch, turns: int
) -> None:
    """The work's result stands, and the caller's task goes on unharmed."""

    monkeypatch.setattr(sse, "LISTEN_AFTER_SECONDS", 0)

    async def main() -> tuple[Any, int]:
        left = asyncio.Event()

        async def receive() -> dict[str, Any]:
            await left.wait()
            return {"type": "http.disconnect"}

        async def work() -> int:
            await asyncio.sleep(0.001)
            left.set()
            for _ in range(turns):  # the listener hears it before, in or after the last of them
                await asyncio.sleep(0)
            return 7

        task = asyncio.current_task()
        assert task is not None
        try:
            found = await until_disconnect(receive, work())
        finally:
            assert task.cancelling() == 0
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return found, task.cancelling()

    found, cancelling = run(main())
    assert found in (7, None)
    assert cancelling == 0


def test_a_server_that_stops_while_the_client_leaves_is_not_held(info: ModelInfo) -> None:
    """Both cancel: the outer one is passed on."""

    async def main() -> None:
        async def receive() -> dict[str, Any]:
            return {"type": "http.disconnect"}

        async def work() -> None:
            await asyncio.sleep(60)

        task = asyncio.create_task(until_disconnect(receive, work()))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(main())


def test_a_client_that_leaves_is_noticed_in_a_whole_reply(info: ModelInfo) -> None:
    """The generation ends with it."""

    async def endless(request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
        while True:
            await asyncio.sleep(0.001)
            yield TokenDelta(request.id, (X,))

    async def main() -> int:
        backend = FunctionBackend(info, endless)
        async with running(backend) as app:
            one = RawCall(app, CHAT, orjson.dumps(chat_body()))
            while not backend.live:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            one.leave()
            await one.rest()
        return backend.live

    assert run(main()) == 0
