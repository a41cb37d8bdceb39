"""Generations: deadlines, several choices, second generations, and readers that are slow."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import orjson
import pytest

from engine.api import (
    FinishReason,
    GenerateRequest,
    ModelInfo,
    TokenDelta,
    TokenLogprob,
    Usage,
)
from gateway.backends.embedded import _Mailbox
from gateway.backends.scripted import ScriptedBackend
from gateway.deadlines import Deadline, Limits
from tests.gateway.support import (
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
        "name": "f",
        "parameters": {"type": "object", "properties": {"a": {"type": "string"}}},
    },
}
REST = (
    '<｜DSML｜ parameter name="a" string="true">x</｜DSML｜ parameter>\n</｜DSML｜ invoke>\n'
    "</｜DSML｜ calls>"
)


async def streamed(app: Any, body: Any, path: str = CHAT, **options: Any) -> list[Any]:
    one = RawCall(app, path, orjson.dumps({**body, "stream": True}), **options)
    status, _ = await one.start()
    assert status == 200
    return data_frames(await one.rest())


class TestDeadlines:
    """Each has its code; before the headers it is a 504."""

    @pytest.mark.parametrize(
        ("delay_ms", "settings", "code"),
        [
            (400, {"first_token_seconds": 0.05}, "first_token_timeout"),
            (40, {"request_seconds": 0.1}, "request_timeout"),
        ],
    )
    def test_a_whole_reply_is_504(
        self, info: ModelInfo, delay_ms: int, settings: Any, code: str
    ) -> None:
        """The status, the code and the limit; the backend is free again."""

        async def main() -> tuple[int, Any]:
            backend = ScriptedBackend([text_line("a" * 50, delay_ms=delay_ms)], info)
            async with running(backend, **settings) as app:
                reply = await call(app, CHAT, chat_body())
                await eventually(lambda: not backend.stats().running)
                return reply

        status, body = run(main())
        assert (status, body["error"]["code"]) == (504, code)

    def test_a_stream_ends_in_an_error_frame(self, info: ModelInfo) -> None:
        """After the headers the deadline is told in the stream, and never a finish reason."""

        async def main() -> list[Any]:
            backend = ScriptedBackend([text_line("a" * 50, delay_ms=40)], info)
            async with running(backend, request_seconds=0.15) as app:
                return await streamed(app, chat_body())

        frames = run(main())
        assert "longer than 0.15 s" in frames[-2]["error"]["message"]
        assert not any(
            choice["finish_reason"] for frame in frames[:-2] for choice in frame["choices"]
        )

    def test_a_step_that_does_not_come_is_noticed(self, info: ModelInfo) -> None:
        """A backend that stalls after its first token is given up after step_seconds."""

        class Stalling(ScriptedBackend):
            async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
                async for delta in super().generate(request):
                    yield delta
                    break
                await gone.wait()

            def abort(self, request_id: str) -> None:
                gone.set()

        async def main() -> tuple[int, Any]:
            nonlocal gone
            gone = asyncio.Event()
            backend = Stalling([text_line("abc")], info)
            async with running(backend, step_seconds=0.05, first_token_seconds=60) as app:
                return await call(app, CHAT, chat_body())

        gone = asyncio.Event()
        status, body = run(main())
        assert (status, body["error"]["code"]) == (504, "step_timeout")

    @pytest.mark.parametrize(
        ("path", "body", "where"),
        [
            (CHAT, chat_body(stream=True), ("error", "code", "step_timeout")),
            (
                "/v1/messages",
                {**chat_body(stream=True), "max_tokens": 9},
                ("error", "type", "timeout_error"),
            ),
            (
                "/v1/responses",
                {"model": "test-model", "input": "q", "stream": True},
                ("response", "error", "code", "server_error"),
            ),
        ],
    )
    def test_a_stream_says_that_it_was_the_time(
        self, info: ModelInfo, path: str, body: dict[str, Any], where: tuple[str, ...]
    ) -> None:
        """After the headers the error is what it would have been before: no internal error."""

        async def stalling(request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
            for _ in range(3):
                yield TokenDelta(request.id, (60,), usage=Usage(1, 1))
            await gone.wait()

        async def main() -> bytes:
            nonlocal gone
            gone = asyncio.Event()
            backend = FunctionBackend(info, stalling)
            backend.abort = lambda _id: gone.set()  # type: ignore[method-assign]
            async with running(backend, step_seconds=0.05, first_token_seconds=60) as app:
                one = RawCall(app, path, orjson.dumps(body))
                assert (await one.start())[0] == 200
                return await one.rest()

        gone = asyncio.Event()
        frames = [frame for frame in data_frames(run(main())) if frame != "[DONE]"]
        *path_, last = where
        found = frames[-1]
        for key in path_:
            found = found[key]
        assert found == last
        assert "longer than 0.05 s" in orjson.dumps(frames[-1]).decode()

    def test_a_slow_reader_is_no_slow_backend(self) -> None:
        """While nobody asks for a step, the time for one does not run."""

        async def main() -> list[bool]:
            given_up: list[int] = []
            deadline = Deadline(Limits(60, 0.03, 60), lambda: given_up.append(1))
            deadline.steps += 1
            await asyncio.sleep(0.1)  # nobody waits
            idle = bool(given_up)
            deadline.waiting = True
            await asyncio.sleep(0.1)
            deadline.close()
            return [idle, bool(given_up)]

        assert run(main()) == [False, True]

    def test_steps_in_time_are_not_counted_together(self) -> None:
        """Many steps may take longer than one may."""

        async def main() -> list[int]:
            given_up: list[int] = []
            deadline = Deadline(Limits(0.5, 0.1, 60), lambda: given_up.append(1))
            deadline.waiting = True
            for _ in range(20):
                await asyncio.sleep(0.01)
                deadline.steps += 1
            deadline.close()
            await asyncio.sleep(0.15)  # a closed one never fires
            return given_up

        assert run(main()) == []


class TestChoices:
    """n replies of one prompt."""

    @pytest.mark.parametrize("stream", [False, True])
    def test_each_choice_is_a_generation_of_its_own(self, info: ModelInfo, stream: bool) -> None:
        """Three lines of the script are three choices; the prompt counts once."""

        async def main() -> tuple[dict[int, str], Any, int]:
            lines = [text_line(f"answer {i}" * (i + 1)) for i in range(3)]
            backend = ScriptedBackend(lines, info)
            async with running(backend) as app:
                alone = (await call(app, CHAT, chat_body()))[1]["usage"]["prompt_tokens"]
                await call(app, CHAT, chat_body())
                await call(app, CHAT, chat_body())
                texts: dict[int, str] = {}
                if stream:
                    frames = await streamed(app, chat_body(n=3))
                    assert frames[-1] == "[DONE]"
                    for frame in frames[:-1]:
                        for choice in frame["choices"]:
                            text = choice["delta"].get("content") or ""
                            texts[choice["index"]] = texts.get(choice["index"], "") + text
                    (usage,) = [f["usage"] for f in frames[:-1] if f.get("usage")]
                else:
                    _, reply = await call(app, CHAT, chat_body(n=3))
                    texts = {c["index"]: c["message"]["content"] for c in reply["choices"]}
                    usage = reply["usage"]
                return texts, usage, alone

        texts, usage, alone = run(main())
        assert sorted(texts.values()) == sorted(f"answer {i}" * (i + 1) for i in range(3))
        assert usage["prompt_tokens"] == alone
        assert usage["completion_tokens"] == sum(len(text) + 1 for text in texts.values())

    @pytest.mark.parametrize("stream", [False, True])
    def test_one_that_fails_ends_all(self, info: ModelInfo, stream: bool) -> None:
        """A reply of which a part is missing is an error; nothing goes on behind it."""

        async def main() -> tuple[Any, Any]:
            lines = [text_line("a" * 300, delay_ms=5), text_line("b", finish="error")]
            backend = ScriptedBackend(lines, info)
            async with running(backend) as app:
                if stream:
                    reply: Any = (await streamed(app, chat_body(n=2)))[-2]
                else:
                    status, reply = await call(app, CHAT, chat_body(n=2))
                    assert status == 502
                await eventually(lambda: not backend.stats().running)
                return reply

        assert "script fails" in run(main())["error"]["message"]

    def test_a_seed_is_not_the_same_for_all(self, info: ModelInfo) -> None:
        """One seed for all choices would make them one and the same."""
        seen: list[GenerateRequest] = []

        class Noting(ScriptedBackend):
            async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
                seen.append(request)
                async for delta in super().generate(request):
                    yield delta

        async def main() -> None:
            async with running(Noting([text_line("a")], info)) as app:
                await call(app, CHAT, chat_body(n=3, seed=42))

        run(main())
        assert len({request.sampling.seed for request in seen}) == 3
        assert len({request.id for request in seen}) == 3
        assert seen[0].sampling.seed == 42


class TestSecondGeneration:
    """A forced choice while thinking: think freely, then the call is opened for the model."""

    @pytest.mark.parametrize("stream", [False, True])
    def test_a_forced_call_follows_the_thought(self, info: ModelInfo, stream: bool) -> None:
        """The first generation ends with the thought, the second writes the call."""
        seen: list[GenerateRequest] = []

        class Noting(ScriptedBackend):
            async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
                seen.append(request)
                async for delta in super().generate(request):
                    yield delta

        lines = [text_line("hm.</think>No call here.", name="think"), text_line(REST, name="call")]
        body = chat_body(
            tools=[TOOL],
            tool_choice={"type": "function", "function": {"name": "f"}},
            thinking={"type": "enabled"},
        )
        headers = {"x-bathyal-script": "think, call"}

        async def main() -> tuple[str, str, str]:
            backend = Noting(lines, info)
            async with running(backend) as app:
                if not stream:
                    _, reply = await call(app, CHAT, body, headers=headers)
                    (choice,) = reply["choices"]
                    function = choice["message"]["tool_calls"][0]["function"]
                    return function["name"], function["arguments"], choice["finish_reason"]
                frames = (await streamed(app, body, headers=headers))[:-1]
                name, arguments, finish = "", "", ""
                for frame in frames:
                    for choice in frame["choices"]:
                        finish = choice["finish_reason"] or finish
                        for piece in choice["delta"].get("tool_calls") or []:
                            name += piece["function"].get("name") or ""
                            arguments += piece["function"].get("arguments") or ""
                await eventually(lambda: not backend.stats().running)
                return name, arguments, finish

        name, arguments, finish = run(main())
        assert (name, orjson.loads(arguments), finish) == ("f", {"a": "x"}, "tool_calls")
        first, second = seen
        assert first.id != second.id
        assert second.prompt_ids[: len(first.prompt_ids)] == first.prompt_ids
        assert second.sampling.max_tokens < first.sampling.max_tokens

    @pytest.mark.parametrize("stream", [False, True])
    def test_a_call_of_no_tool_is_tried_once_more(self, info: ModelInfo, stream: bool) -> None:
        """The second try draws other numbers than the first; a failure of both is a 502."""
        seen: list[GenerateRequest] = []

        class Noting(ScriptedBackend):
            async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
                seen.append(request)
                async for delta in super().generate(request):
                    yield delta

        wrong = '<｜DSML｜ invoke name="rm">\n</｜DSML｜ invoke>\n</｜DSML｜ calls>'
        right = f'<｜DSML｜ invoke name="f">\n{REST}'
        lines = [text_line(wrong, name="wrong"), text_line(right, name="right")]
        body = chat_body(
            tools=[TOOL],
            tool_choice="required",
            thinking={"type": "disabled"},
            seed=7,
            stream=stream,
        )

        async def play(scripts: str) -> tuple[int, bytes]:
            async with running(Noting(lines, info)) as app:
                headers = {"x-bathyal-script": scripts}
                one = RawCall(app, CHAT, orjson.dumps(body), headers=headers)
                return (await one.start())[0], await one.rest()

        status, good = run(play("wrong, right"))
        assert status == 200
        assert b'"finish_reason":"tool_calls"' in good
        first, second = seen
        assert (first.prompt_ids, first.sampling.seed) == (second.prompt_ids, 7)
        assert second.sampling.seed not in (None, *range(8))

        status, bad = run(play("wrong"))
        assert status == (200 if stream else 502)
        assert b"forced_call_missing" in bad
        assert len(seen) == 4

    def test_one_call_is_enough_where_only_one_is_allowed(self, info: ModelInfo) -> None:
        """parallel_tool_calls: false gives the engine up after the first call."""
        one = f'<｜DSML｜ invoke name="f">\n{REST.partition("</｜DSML｜ calls>")[0]}'
        text = f"ok\n\n<｜DSML｜ calls>\n{one}{one}</｜DSML｜ calls>"

        async def main() -> tuple[Any, int]:
            backend = ScriptedBackend([text_line(text + "a" * 5000)], info)
            async with running(backend) as app:
                body = chat_body(tools=[TOOL], parallel_tool_calls=False)
                _, reply = await call(app, CHAT, body)
                return reply, backend.stats().completion_tokens

        reply, generated = run(main())
        (choice,) = reply["choices"]
        assert len(choice["message"]["tool_calls"]) == 1
        assert choice["finish_reason"] == "tool_calls"
        assert generated < 1000


class TestMissingReasoning:
    """A client that drops reasoning gets it back by the id of its call."""

    def test_the_thought_is_restored_into_the_prompt(self, info: ModelInfo) -> None:
        """The second turn's prompt is as long as if the client had sent the reasoning."""
        text = f'why not\n</think>\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="f">\n{REST}'

        async def main() -> list[int]:
            backend = ScriptedBackend([text_line(text), text_line("x</think>y")], info)
            body = chat_body(tools=[TOOL], thinking={"type": "enabled"})
            async with running(backend) as app:
                _, first = await call(app, CHAT, body)
                message = first["choices"][0]["message"]
                call_id = message["tool_calls"][0]["id"]
                result = {"role": "tool", "tool_call_id": call_id, "content": "r"}
                lengths = []
                for sent in (message, {**message, "reasoning_content": None}):
                    messages = [*body["messages"], sent, result]
                    _, reply = await call(app, CHAT, {**body, "messages": messages})
                    lengths.append(reply["usage"]["prompt_tokens"])
                return lengths

        full, restored = run(main())
        assert full == restored


class TestSlowReaders:
    """What waits for a reader is bounded."""

    def test_what_waits_is_handed_over_as_one(self) -> None:
        """All tokens in order, their logprobs and the last delta's end; nothing is lost."""

        def delta(i: int, last: bool = False) -> TokenDelta:
            logprobs = (TokenLogprob(float(-i)),)
            if last:
                return TokenDelta("r", (i,), logprobs, FinishReason.STOP, Usage(1, i + 1))
            return TokenDelta("r", (i,), logprobs)

        async def main() -> list[TokenDelta | None]:
            box = _Mailbox()
            box.put(delta(0))
            first = await box.get()
            for i in range(1, 5):
                box.put(delta(i, last=i == 4))
            return [first, await box.get()]

        first, rest = run(main())
        assert first is not None
        assert rest is not None
        assert (first.token_ids, first.finish_reason) == ((0,), None)
        assert rest.token_ids == (1, 2, 3, 4)
        assert rest.logprobs is not None
        assert [one.logprob for one in rest.logprobs] == [-1.0, -2.0, -3.0, -4.0]
        assert rest.finish_reason is FinishReason.STOP
        assert rest.usage == Usage(1, 5)

    def test_an_abort_outdoes_what_waits(self) -> None:
        """After an abort nothing follows."""

        async def main() -> TokenDelta | None:
            box = _Mailbox()
            box.put(TokenDelta("r", (1,)))
            box.abort()
            return await box.get()

        assert run(main()) is None

    def test_a_reader_that_stopped_is_given_up(self, info: ModelInfo) -> None:
        """A write that takes too long ends the generation."""

        async def main() -> None:
            backend = ScriptedBackend([text_line("a" * 3000)], info)
            settings = {"keep_alive_seconds": 0.02, "stall_seconds": 0.1}
            async with running(backend, **settings) as app:
                one = RawCall(app, CHAT, orjson.dumps(chat_body(stream=True)))
                stuck = asyncio.Event()

                async def send(message: Any) -> None:
                    if message["type"] == "http.response.body":
                        await stuck.wait()

                one.task.cancel()
                one._incoming = asyncio.Queue()
                body = orjson.dumps(chat_body(stream=True))
                one._incoming.put_nowait({"type": "http.request", "body": body})
                await asyncio.wait_for(app(one._scope, one._incoming.get, send), 5)
                assert not backend.stats().running

        run(main())
