"""POST /v1/chat/completions over ASGI: streams, whole replies, faults, and clients that leave."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

import orjson
import pytest

from engine.api import (
    EngineDeadError,
    EngineError,
    FinishReason,
    GenerateRequest,
    ModelInfo,
    PromptTooLongError,
    TokenDelta,
    Usage,
)
from gateway.backends.scripted import Line, ScriptedBackend
from gateway.sse import KEEP_ALIVE
from tests.gateway.support import (
    EOS,
    FunctionBackend,
    RawCall,
    call,
    chat_body,
    data_frames,
    eventually,
    run,
    running,
    text_line,
)

CHAT = "/v1/chat/completions"
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = (
    "<｜DSML｜ calls>\n"
    '<｜DSML｜ invoke name="get_weather">\n'
    '<｜DSML｜ parameter name="city" string="true">Oslo</｜DSML｜ parameter>\n'
    "</｜DSML｜ invoke>\n"
    "</｜DSML｜ calls>"
)


def content_of(frames: list[Any]) -> str:
    return "".join(
        choice["delta"].get("content") or ""
        for frame in frames
        if frame != "[DONE]"
        for choice in frame["choices"]
    )


def letters(request: GenerateRequest, text: str, *, finish: bool = True) -> list[TokenDelta]:
    """One delta a letter; the ids are those of the test tokenizer's byte tokens."""
    ids = [LETTER_IDS[letter] for letter in text]
    deltas = [TokenDelta(request.id, (token_id,)) for token_id in ids]
    if finish:
        usage = Usage(len(request.prompt_ids), len(ids) + 1)
        deltas.append(TokenDelta(request.id, (EOS,), None, FinishReason.STOP, usage))
    return deltas


LETTER_IDS: dict[str, int] = {}


@pytest.fixture(autouse=True, scope="module")
def letter_ids(info: ModelInfo) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(info.tokenizer_path)
    LETTER_IDS.update({letter: tokenizer.token_to_id(letter) for letter in "abcdefghij"})


def backend_of(
    info: ModelInfo, *steps: TokenDelta | Exception | Callable[[GenerateRequest], Any]
) -> FunctionBackend:
    """A backend that yields deltas, raises exceptions and awaits what functions return."""

    async def generate(request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
        for step in steps:
            if isinstance(step, Exception):
                raise step
            if isinstance(step, TokenDelta):
                yield step
            else:
                made = step(request)
                for delta in made if isinstance(made, list) else [await made]:
                    if delta is not None:
                        yield delta

    return FunctionBackend(info, generate)


def test_a_stream_carries_the_script(info: ModelInfo) -> None:
    """The frames spell the output, end with one finish reason, and [DONE] closes."""

    async def main() -> list[Any]:
        async with running(ScriptedBackend([text_line("Hello wörld")], info)) as app:
            one = RawCall(app, CHAT, orjson.dumps(chat_body(stream=True)))
            status, headers = await one.start()
            assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
            return data_frames(await one.rest())

    frames = run(main())
    assert content_of(frames) == "Hello wörld"
    reasons = [frame["choices"][0]["finish_reason"] for frame in frames[:-1]]
    assert [reason for reason in reasons if reason] == ["stop"]
    assert frames[-1] == "[DONE]"
    assert len({frame["id"] for frame in frames[:-1]}) == 1


def test_the_first_frame_leaves_before_the_second_token_exists(info: ModelInfo) -> None:
    """A token is on its way to the client while the model still thinks about the next."""

    async def main() -> None:
        more = asyncio.Event()

        async def wait(_: GenerateRequest) -> None:
            await more.wait()

        backend = backend_of(
            info,
            lambda r: letters(r, "a", finish=False),
            lambda r: wait(r),
            lambda r: letters(r, "b"),
        )
        async with running(backend) as app:
            one = RawCall(app, CHAT, orjson.dumps(chat_body(stream=True)))
            await one.start()
            assert b'"content":"a"' in await one.until(b'"content":"a"')
            assert not more.is_set()
            more.set()
            assert b'"content":"b"' in await one.rest()

    run(main())


def test_a_whole_reply_carries_the_script(info: ModelInfo) -> None:
    """Without `stream` the same output is one body, with the backend's counts in it."""

    async def main() -> tuple[int, Any]:
        async with running(ScriptedBackend([text_line("Hello")], info)) as app:
            return await call(app, "/chat/completions", chat_body())

    status, body = run(main())
    assert status == 200
    assert body["choices"][0]["message"]["content"] == "Hello"
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"]["completion_tokens"] == len("Hello") + 1  # the stop token counts
    assert body["usage"]["prompt_tokens"] > 0


def test_a_reply_cut_by_its_limit_says_so(info: ModelInfo) -> None:
    """`length` is told apart from `stop`, streamed and whole."""

    async def main() -> tuple[Any, list[Any]]:
        async with running(ScriptedBackend([text_line("Hello")], info)) as app:
            _, whole = await call(app, CHAT, chat_body(max_tokens=3))
            one = RawCall(app, CHAT, orjson.dumps(chat_body(max_tokens=3, stream=True)))
            await one.start()
            return whole, data_frames(await one.rest())

    whole, frames = run(main())
    assert whole["choices"][0]["finish_reason"] == "length"
    assert whole["choices"][0]["message"]["content"] == content_of(frames) == "Hel"
    assert frames[-2]["choices"][0]["finish_reason"] == "length"
    assert whole["usage"]["completion_tokens"] == 3


def test_stream_and_whole_say_the_same(info: ModelInfo) -> None:
    """A tool call with reasoning is the same message in both forms."""
    output = f"I look.</think>Let me see.\n\n{CALL}"
    request = chat_body(tools=[TOOL], thinking={"type": "enabled"})

    async def main() -> tuple[list[Any], Any]:
        async with running(ScriptedBackend([text_line(output)], info)) as app:
            one = RawCall(app, CHAT, orjson.dumps({**request, "stream": True}))
            await one.start()
            return data_frames(await one.rest()), (await call(app, CHAT, request))[1]

    frames, whole = run(main())
    message = whole["choices"][0]["message"]
    deltas = [frame["choices"][0]["delta"] for frame in frames[:-1]]
    calls = [piece for delta in deltas for piece in delta.get("tool_calls") or []]
    assert message["content"] == content_of(frames)
    assert message["reasoning_content"] == "I look."
    assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == "I look."
    assert orjson.loads(message["tool_calls"][0]["function"]["arguments"]) == {"city": "Oslo"}
    assert message["tool_calls"][0]["function"]["arguments"] == "".join(
        piece["function"].get("arguments", "") for piece in calls
    )
    assert whole["choices"][0]["finish_reason"] == "tool_calls"


def test_the_request_reaches_the_backend(info: ModelInfo) -> None:
    """Sampling, the stop tokens and the chosen script arrive as the client sent them."""
    body = chat_body(max_completion_tokens=17, temperature=0, top_p=0.5, seed=3)

    async def main() -> GenerateRequest:
        backend = backend_of(info, lambda r: letters(r, "a"))
        async with running(backend) as app:
            status, _ = await call(app, CHAT, body, headers={"x-bathyal-script": "weather"})
            assert status == 200
        return backend.requests[0]

    request = run(main())
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.seed) == (
        17,
        0,
        0.5,
        3,
    )
    assert sampling.stop_token_ids == info.eos_token_ids
    assert sampling.top_logprobs is None
    assert request.script == "weather"


def test_the_clients_temperature_holds_while_thinking(info: ModelInfo) -> None:
    """The codec would force 1.0; a client that asks for 0 gets 0."""

    async def main() -> float:
        backend = backend_of(info, lambda r: letters(r, "a"))
        async with running(backend) as app:
            await call(app, CHAT, chat_body(thinking={"type": "enabled"}, temperature=0))
        return backend.requests[0].sampling.temperature

    assert run(main()) == 0


def test_logprobs_come_through(info: ModelInfo) -> None:
    """Probabilities of the backend are the client's."""

    async def main() -> Any:
        async with running(ScriptedBackend([text_line("ab")], info)) as app:
            return await call(app, CHAT, chat_body(logprobs=True, top_logprobs=2))

    status, body = run(main())
    assert status == 200
    content = body["choices"][0]["logprobs"]["content"]
    assert [(item["token"], item["logprob"]) for item in content] == [("a", 0.0), ("b", 0.0)]
    assert content[0]["top_logprobs"][0]["token"] == "a"


def test_ignored_fields_are_named(info: ModelInfo) -> None:
    """What has no effect is said in a header, streaming or not."""

    async def main() -> list[str]:
        async with running(ScriptedBackend([text_line("a")], info)) as app:
            seen = []
            for stream in (False, True):
                body = chat_body(stream=stream, user="me", top_k=5)
                one = RawCall(app, CHAT, orjson.dumps(body))
                seen.append((await one.start())[1]["x-bathyal-ignored"])
                await one.rest()
            return seen

    assert run(main()) == ["top_k, user"] * 2


def test_a_header_cannot_be_forged_by_a_field_name(info: ModelInfo) -> None:
    """A field whose name holds a line break is not repeated in a header."""

    async def main() -> dict[str, str]:
        async with running(ScriptedBackend([text_line("a")], info)) as app:
            one = RawCall(
                app, CHAT, orjson.dumps(chat_body(**{"a\r\nset-cookie: x": 1, "user": "u"}))
            )
            status, headers = await one.start()
            assert status == 200
            return headers

    assert run(main())["x-bathyal-ignored"] == "user"


def test_a_stop_string_ends_the_generation(info: ModelInfo) -> None:
    """When the client's stop string is met, the backend is told to stop, and the reply ends."""

    async def main() -> tuple[Any, list[str], list[GenerateRequest]]:
        async def never(_: GenerateRequest) -> None:
            await asyncio.Event().wait()

        backend = backend_of(info, lambda r: letters(r, "abcd", finish=False), never)
        async with running(backend) as app:
            status, body = await call(app, CHAT, chat_body(stop=["c"]))
            assert status == 200
            await eventually(lambda: backend.live == 0)
            return body, backend.aborted, backend.requests

    body, aborted, requests = run(main())
    assert body["choices"][0]["message"]["content"] == "ab"
    assert body["choices"][0]["finish_reason"] == "stop"
    assert requests[0].id in aborted


FAULTS = [
    pytest.param([PromptTooLongError(10, 5)], 400, "context_length_exceeded", id="too-long"),
    pytest.param([EngineError("no such script")], 400, "unsupported_request", id="refused"),
    pytest.param([EngineDeadError("dead")], 503, "backend_unavailable", id="dead"),
    pytest.param(
        [TokenDelta("", (), None, FinishReason.ERROR, None, "out of memory")],
        502,
        "backend_error",
        id="error-delta",
    ),
    pytest.param([], 502, "backend_error", id="no-end"),
    pytest.param([ZeroDivisionError("secret")], 500, "internal_error", id="bug"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("steps", "status", "code"), FAULTS)
def test_a_fault_before_the_first_token_is_a_status(
    info: ModelInfo, steps: list[Any], status: int, code: str, stream: bool
) -> None:
    """A backend that fails at once gives the client a status and the nested error body."""

    async def main() -> tuple[int, Any, FunctionBackend]:
        backend = backend_of(info, *steps)
        async with running(backend) as app:
            one = RawCall(app, CHAT, orjson.dumps(chat_body(stream=stream)))
            got, _ = await one.start()
            message = await one.message()
            if code == "internal_error":
                with pytest.raises(ZeroDivisionError):  # for the server's log
                    await one.task
            return got, orjson.loads(message["body"]), backend

    got, body, backend = run(main())
    assert got == status
    assert body["error"]["code"] == code
    assert body["error"]["param"] is None
    assert "secret" not in body["error"]["message"]
    assert backend.live == 0
    assert backend.aborted == [backend.requests[0].id]


@pytest.mark.parametrize(("steps", "status", "code"), FAULTS)
def test_a_fault_after_the_first_token_is_an_error_frame(
    info: ModelInfo, steps: list[Any], status: int, code: str
) -> None:
    """A stream that breaks ends in the protocol's error, never in a finish reason."""

    async def main() -> tuple[list[Any], FunctionBackend]:
        backend = backend_of(info, lambda r: letters(r, "ab", finish=False), *steps)
        async with running(backend) as app:
            one = RawCall(app, CHAT, orjson.dumps(chat_body(stream=True)))
            assert (await one.start())[0] == 200
            return data_frames(await one.rest()), backend

    frames, backend = run(main())
    assert "message" in frames[-2]["error"]
    assert frames[-1] == "[DONE]"
    assert not any(frame["choices"][0].get("finish_reason") for frame in frames[:-2])
    assert "secret" not in str(frames)
    assert backend.live == 0
    assert backend.requests[0].id in backend.aborted


def test_a_partial_whole_reply_is_not_passed_off_as_one(info: ModelInfo) -> None:
    """When the backend dies half-way, a client without a stream gets the error alone."""

    async def main() -> tuple[int, Any]:
        backend = backend_of(info, lambda r: letters(r, "ab", finish=False))
        async with running(backend) as app:
            return await call(app, CHAT, chat_body())

    status, body = run(main())
    assert status == 502
    assert "choices" not in body


def test_the_scripts_error_line_is_a_fault_in_mid_stream(info: ModelInfo) -> None:
    """`finish: error` plays its output first, then fails."""

    async def main() -> list[Any]:
        lines = [text_line("half", finish="error", name="broken")]
        async with running(ScriptedBackend(lines, info)) as app:
            one = RawCall(app, CHAT, orjson.dumps(chat_body(stream=True)))
            await one.start()
            return data_frames(await one.rest())

    frames = run(main())
    assert content_of(frames[:-2]) == "half"
    assert "broken" in frames[-2]["error"]["message"]


def test_a_script_that_does_not_exist_is_the_clients_error(info: ModelInfo) -> None:
    """The names that exist are in the message."""

    async def main() -> tuple[int, Any]:
        async with running(ScriptedBackend([text_line("a", name="weather")], info)) as app:
            return await call(app, CHAT, chat_body(), headers={"x-bathyal-script": "nope"})

    status, body = run(main())
    assert status == 400
    assert "'weather'" in body["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("after", range(5))
def test_a_client_that_leaves_ends_the_generation_at_any_point(
    info: ModelInfo, stream: bool, after: int
) -> None:
    """Whichever delta it leaves after: the generator is closed, the abort is sent, nothing leaks."""

    async def main() -> FunctionBackend:
        reached = asyncio.Event()

        async def hang(_: GenerateRequest) -> None:
            reached.set()
            await asyncio.Event().wait()

        backend = backend_of(info, lambda r: letters(r, "abcde"[:after], finish=False), hang)
        async with running(backend) as app:
            before = asyncio.all_tasks()
            one = RawCall(app, CHAT, orjson.dumps(chat_body(stream=stream)))
            await reached.wait()
            one.leave()
            await one.task
            assert asyncio.all_tasks() == before
        return backend

    backend = run(main())
    assert backend.live == 0
    assert backend.aborted == [backend.requests[0].id]


def test_a_client_that_leaves_while_sending_starts_nothing(info: ModelInfo) -> None:
    """Half a request is no request."""

    async def main() -> FunctionBackend:
        backend = backend_of(info, lambda r: letters(r, "a"))
        async with running(backend) as app:
            one = RawCall(app, CHAT, b"")
            while not one._incoming.empty():
                one._incoming.get_nowait()
            one._incoming.put_nowait({"type": "http.request", "body": b"{", "more_body": True})
            one.leave()
            await one.task
        return backend

    assert run(main()).requests == []


def test_keep_alive_comments_flow_during_a_long_prefill(info: ModelInfo) -> None:
    """A client sees signs of life before the first token and between tokens."""

    async def main() -> bytes:
        line = Line("output", "ab", delay_ms=120)
        async with running(ScriptedBackend([line], info), keep_alive_seconds=0.02) as app:
            one = RawCall(app, CHAT, orjson.dumps(chat_body(stream=True)))
            await one.start()
            return await one.rest()

    body = run(main())
    first = body.index(b"data: ")
    assert body[:first].count(KEEP_ALIVE) >= 2
    assert body[first:].count(KEEP_ALIVE) >= 2
    assert content_of(data_frames(body)) == "ab"


def test_ten_at_once_do_not_cross(info: ModelInfo) -> None:
    """Each of ten concurrent streams gets its own script, whole."""
    texts = [f"reply {i}: " + "abcdefghij"[i] * 30 for i in range(10)]

    async def main() -> list[str]:
        lines = [text_line(text, name=f"n{i}") for i, text in enumerate(texts)]
        async with running(ScriptedBackend(lines, info)) as app:

            async def one(i: int) -> str:
                raw = RawCall(
                    app,
                    CHAT,
                    orjson.dumps(chat_body(stream=True)),
                    headers={"x-bathyal-script": f"n{i}"},
                )
                await raw.start()
                return content_of(data_frames(await raw.rest()))

            return await asyncio.gather(*(one(i) for i in range(10)))

    assert run(main()) == texts


def test_a_long_prompt_does_not_hold_the_event_loop(info: ModelInfo) -> None:
    """A body that takes long to encode is encoded in a thread: the loop's own thread never is."""
    import threading

    from parsers import Codec

    threads: list[int] = []

    async def main() -> None:
        async with running(ScriptedBackend([text_line("a")], info)) as app:
            real = Codec.open_exchange

            def spy(self: Codec, *args: Any, **kwargs: Any) -> Any:
                threads.append(threading.get_ident())
                return real(self, *args, **kwargs)

            Codec.open_exchange = spy  # type: ignore[method-assign]
            try:
                for size in (10, 20_000):
                    status, _ = await call(app, CHAT, chat_body("x" * size))
                    assert status == 200
            finally:
                Codec.open_exchange = real  # type: ignore[method-assign]

    run(main())
    short, long = threads
    assert short == threading.get_ident()
    assert long != threading.get_ident()


def test_a_long_reply_is_closed_in_a_thread(info: ModelInfo) -> None:
    """The codec re-tokenizes the reasoning at the end; a long one does it off the loop."""
    import threading

    from parsers import Exchange

    threads: list[int] = []

    async def main() -> None:
        lines = [text_line("a" * size + "</think>b", tokens_per_step=500) for size in (5, 4000)]
        async with running(ScriptedBackend(lines, info)) as app:
            real = Exchange.close

            def spy(self: Exchange, *args: Any, **kwargs: Any) -> Any:
                threads.append(threading.get_ident())
                return real(self, *args, **kwargs)

            Exchange.close = spy  # type: ignore[method-assign]
            try:
                for size in (5, 4000):
                    status, body = await call(app, CHAT, chat_body(thinking={"type": "enabled"}))
                    assert status == 200
                    message = body["choices"][0]["message"]
                    assert message["reasoning_content"] == "a" * size
            finally:
                Exchange.close = real  # type: ignore[method-assign]

    run(main())
    short, long = threads
    assert short == threading.get_ident()
    assert long != threading.get_ident()
