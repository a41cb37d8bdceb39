"""The openai SDK against a real server on loopback, over scripted output."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from typing import Any

import anthropic
import httpx
import openai
import orjson
import pytest
from tokenizers import Tokenizer

from engine.api import GenerateRequest, ModelInfo, TokenDelta
from gateway import Settings, create_app
from gateway.backends.scripted import Line, ScriptedBackend
from tests.gateway.agent import ask, run_loop
from tests.gateway.support import data_frames, loopback, text_line

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}
OFF = {"thinking": {"type": "disabled"}}
ON = {"thinking": {"type": "enabled"}}


class RecordingBackend(ScriptedBackend):
    """A scripted backend that keeps the prompts."""

    def __init__(self, lines: list[Line], info: ModelInfo) -> None:
        super().__init__(lines, info)
        self.prompts: list[str] = []
        self._tokenizer = Tokenizer.from_file(info.tokenizer_path)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
        self.prompts.append(self._tokenizer.decode(request.prompt_ids, skip_special_tokens=False))
        async for delta in super().generate(request):
            yield delta


def invoke(name: str, **parameters: Any) -> str:
    """An invoke in V4.1's spelling."""
    spelt = "".join(
        f'<｜DSML｜ parameter name="{key}" string="{"true" if isinstance(value, str) else "false"}">'
        f"{value if isinstance(value, str) else orjson.dumps(value).decode()}</｜DSML｜ parameter>\n"
        for key, value in parameters.items()
    )
    return f'<｜DSML｜ invoke name="{name}">\n{spelt}</｜DSML｜ invoke>\n'


def calls(*invokes: str) -> str:
    return f"\n\n<｜DSML｜ calls>\n{''.join(invokes)}</｜DSML｜ calls>"


@contextmanager
def served(
    info: ModelInfo, *lines: Line, **settings: Any
) -> Iterator[tuple[openai.OpenAI, RecordingBackend, str]]:
    backend = RecordingBackend(list(lines), info)
    with (
        loopback(create_app(Settings(**settings), backend)) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client, backend, url


def becomes_idle(backend: ScriptedBackend) -> bool:
    """Wait, from outside the server's thread, until nothing runs."""
    for _ in range(500):
        if backend.stats().running == 0:
            return True
        time.sleep(0.01)
    return False


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_a_two_turn_tool_loop(info: ModelInfo, stream: bool, thinking: bool) -> None:
    """Question, call, result, answer; the second prompt holds the result and the reasoning."""
    first = "Let me look." + calls(invoke("get_weather", city="Oslo", days=2))
    last = "It rains in Oslo."
    if thinking:
        first, last = f"They ask for Oslo.</think>{first}", f"Clear.</think>{last}"
    seen: list[dict[str, Any]] = []

    def get_weather(**arguments: Any) -> dict[str, Any]:
        seen.append(arguments)
        return {"sky": "rain"}

    with served(info, text_line(first), text_line(last)) as (client, backend, _):
        loop = run_loop(
            client,
            "Weather in Oslo?",
            [WEATHER, CLOCK],
            {"get_weather": get_weather},
            stream=stream,
            model="test-model",
            extra_body=ON if thinking else OFF,
        )

    assert seen == [{"city": "Oslo", "days": 2}]
    assert [turn.finish_reason for turn in loop.turns] == ["tool_calls", "stop"]
    assert [turn.content for turn in loop.turns] == ["Let me look.", "It rains in Oslo."]
    reasoning = ["They ask for Oslo.", "Clear."] if thinking else ["", ""]
    assert [turn.reasoning for turn in loop.turns] == reasoning
    assert all(turn.usage.completion_tokens > 10 for turn in loop.turns)
    assert loop.turns[0].usage.prompt_tokens < loop.turns[1].usage.prompt_tokens
    assert '{"sky":"rain"}' in backend.prompts[1]
    assert ("They ask for Oslo." in backend.prompts[1]) == thinking


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tokens_per_step", [1, 7, 1000])
def test_parallel_calls_are_stitched_by_index(
    info: ModelInfo, stream: bool, tokens_per_step: int
) -> None:
    """Three calls in one turn stay three calls, in order, with their own ids and arguments."""
    output = calls(
        invoke("get_weather", city="Oslo"),
        invoke("now"),
        invoke("get_weather", city="Bergen", days=3),
    )

    with served(info, text_line(output, tokens_per_step=tokens_per_step)) as (client, _, _):
        turn = ask(
            client,
            stream=stream,
            model="test-model",
            messages=[{"role": "user", "content": "?"}],
            tools=[WEATHER, CLOCK],
            extra_body=OFF,
        )

    assert turn.finish_reason == "tool_calls"
    assert [
        (call["function"]["name"], orjson.loads(call["function"]["arguments"]))
        for call in turn.calls
    ] == [
        ("get_weather", {"city": "Oslo"}),
        ("now", {}),
        ("get_weather", {"city": "Bergen", "days": 3}),
    ]
    assert len({call["id"] for call in turn.calls}) == 3


@pytest.mark.parametrize("stream", [False, True])
def test_an_undeclared_tool_is_withheld_and_reported(info: ModelInfo, stream: bool) -> None:
    """The client never sees the call; the reply says what was kept from it."""
    output = calls(invoke("rm_rf", path="/"), invoke("get_weather", city="Oslo"))
    body = {
        "model": "test-model",
        "messages": [{"role": "user", "content": "?"}],
        "tools": [WEATHER],
        "stream": stream,
        **OFF,
    }
    with served(info, text_line(output)) as (client, _, url):
        extra = {"thinking": body.pop("thinking")}
        turn = ask(client, extra_body=extra, **body)
        raw = httpx.post(f"{url}/v1/chat/completions", json=body | extra)

    assert [call["function"]["name"] for call in turn.calls] == ["get_weather"]
    last = data_frames(raw.content)[-2] if stream else raw.json()
    (withheld,) = last["bathyal"]["withheld_calls"]
    assert (withheld["name"], withheld["reason"]) == ("rm_rf", "undeclared_tool")


def test_ten_at_once_do_not_cross(info: ModelInfo) -> None:
    """Ten conversations over one server, each with its own call, result and answer."""
    lines = []
    for i in range(10):
        lines.append(text_line(calls(invoke("get_weather", city=f"city-{i}")), name=f"call-{i}"))
        lines.append(text_line(f"answer {i}: " + "ab" * 40, name=f"answer-{i}"))

    async def loop(client: openai.AsyncOpenAI, i: int) -> tuple[str, str]:
        async def turn(name: str, messages: list[Any]) -> Any:
            stream = await client.chat.completions.create(
                model="test-model",
                messages=messages,
                tools=[WEATHER],
                stream=True,
                extra_body=OFF,
                extra_headers={"x-bathyal-script": name},
            )
            pieces, arguments = "", ""
            async for chunk in stream:
                delta = chunk.choices[0].delta
                pieces += delta.content or ""
                for piece in delta.tool_calls or []:
                    arguments += piece.function.arguments or ""
            return pieces, arguments

        question = {"role": "user", "content": f"weather in city {i}?"}
        _, arguments = await turn(f"call-{i}", [question])
        history = [
            question,
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [
                    {
                        "id": "c",
                        "type": "function",
                        "function": {"name": "get_weather", "arguments": arguments},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": "c", "content": f"sky {i}"},
        ]
        answer, _ = await turn(f"answer-{i}", history)
        return arguments, answer

    async def main(url: str) -> list[tuple[str, str]]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client:
            return await asyncio.gather(*(loop(client, i) for i in range(10)))

    with served(info, *lines) as (_, backend, url):
        results = asyncio.run(main(url))
        assert becomes_idle(backend)

    assert [orjson.loads(arguments) for arguments, _ in results] == [
        {"city": f"city-{i}"} for i in range(10)
    ]
    assert [answer for _, answer in results] == [f"answer {i}: " + "ab" * 40 for i in range(10)]
    for i in range(10):
        (second,) = [prompt for prompt in backend.prompts if f"sky {i}" in prompt]
        assert f"city {i}?" in second


def test_a_client_that_leaves_mid_stream_ends_the_generation(info: ModelInfo) -> None:
    """Closing the SDK's stream is seen by the backend, although thousands of tokens were due."""
    with served(info, text_line("a" * 5000, delay_ms=5)) as (client, backend, _):
        stream = client.chat.completions.create(
            model="test-model",
            messages=[{"role": "user", "content": "?"}],
            stream=True,
            extra_body=OFF,
        )
        next(iter(stream))
        assert backend.stats().running == 1
        stream.close()
        assert becomes_idle(backend)
        assert backend.stats().completion_tokens < 5000


def test_a_client_that_gives_up_on_a_whole_reply_ends_the_generation(info: ModelInfo) -> None:
    """A timeout on the client's side frees the backend, too."""
    with served(info, text_line("a" * 5000, delay_ms=5)) as (client, backend, _):
        with pytest.raises(openai.APITimeoutError):
            client.with_options(timeout=0.3).chat.completions.create(
                model="test-model", messages=[{"role": "user", "content": "?"}], extra_body=OFF
            )
        assert becomes_idle(backend)
        assert 0 < backend.stats().completion_tokens < 5000


def test_a_backend_error_mid_stream_is_the_sdks_exception(info: ModelInfo) -> None:
    """The SDK raises what the backend said, after the part that was good."""
    pieces = []

    def read(chunks: Any) -> None:
        for chunk in chunks:
            pieces.append(chunk.choices[0].delta.content or "")  # noqa: PERF401 (it raises)

    with served(info, text_line("half", finish="error", name="broken")) as (client, _, _):
        stream = client.chat.completions.create(
            model="test-model",
            messages=[{"role": "user", "content": "?"}],
            stream=True,
            extra_body=OFF,
        )
        with pytest.raises(openai.APIError, match="broken"):
            read(stream)

    assert "".join(pieces) == "half"


def test_a_backend_error_before_the_first_token_is_a_status(info: ModelInfo) -> None:
    """The SDK sees a server error it may retry, not an empty stream."""
    with served(info, Line("token_ids", (), finish="error", name="broken")) as (client, _, _):
        for stream in (False, True):
            with pytest.raises(openai.InternalServerError, match="broken") as caught:
                ask(
                    client,
                    stream=stream,
                    model="test-model",
                    messages=[{"role": "user", "content": "?"}],
                    extra_body=OFF,
                )
            assert caught.value.status_code == 502


def test_a_wrong_request_is_the_sdks_exception_with_its_param(info: ModelInfo) -> None:
    """The SDK's BadRequestError knows the field."""
    with (
        served(info, text_line("a")) as (client, _, _),
        pytest.raises(openai.BadRequestError, match="temperature") as caught,
    ):
        client.chat.completions.create(
            model="test-model", messages=[{"role": "user", "content": "?"}], temperature=9
        )

    assert (caught.value.param, caught.value.code) == ("temperature", "invalid_request_error")


def test_keep_alives_reach_a_client_that_waits(info: ModelInfo) -> None:
    """On the socket a long prefill is a row of comments, which the SDK skips."""
    line = text_line("ab", delay_ms=150)
    body = {
        "model": "test-model",
        "messages": [{"role": "user", "content": "?"}],
        "stream": True,
        **OFF,
    }
    with served(info, line, keep_alive_seconds=0.03) as (client, _, url):
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=body) as response:
            first = next(response.iter_raw())
        turn = ask(
            client,
            stream=True,
            model="test-model",
            messages=[{"role": "user", "content": "?"}],
            extra_body=OFF,
        )

    assert first == b": keep-alive\n\n"
    assert turn.content == "ab"


def test_models_in_the_eyes_of_both_sdks(info: ModelInfo) -> None:
    """The openai and the anthropic SDK list and fetch the served model under every name."""
    with (
        served(info, text_line("a"), aliases=("deepseek-chat", "org/model")) as (client, _, url),
        anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as other,
    ):
        names = ["test-model", "deepseek-chat", "org/model"]
        assert [model.id for model in client.models.list()] == names
        assert [model.id for model in other.models.list()] == names
        one = client.models.retrieve("test-model")
        assert (one.object, one.owned_by) == ("model", "bathyal")
        assert one.created > 1_700_000_000
        theirs = other.models.retrieve("deepseek-chat")
        assert (theirs.type, theirs.display_name) == ("model", "deepseek-chat")
        assert theirs.max_input_tokens == info.max_model_len
        assert int(theirs.created_at.timestamp()) == one.created
        with pytest.raises(openai.NotFoundError, match="gpt-5") as caught:
            client.models.retrieve("gpt-5")
        assert (caught.value.param, caught.value.code) == ("model", "model_not_found")
        with pytest.raises(anthropic.NotFoundError, match="gpt-5"):
            other.models.retrieve("gpt-5")


def test_an_alias_is_answered_under_its_own_name(info: ModelInfo) -> None:
    """The reply carries the name that the client used."""
    with served(info, text_line("a"), name="mine", aliases=("other",)) as (client, _, _):
        for name in ("mine", "other"):
            completion = client.chat.completions.create(
                model=name, messages=[{"role": "user", "content": "?"}], extra_body=OFF
            )
            assert completion.model == name
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(
                model="test-model", messages=[{"role": "user", "content": "?"}]
            )


def test_health_endpoints(info: ModelInfo) -> None:
    """Load balancers and benchmark tools find their 200, and HEAD / answers."""
    with (
        served(info, text_line("a")) as (_, backend, url),
        httpx.Client(base_url=url) as client,
    ):
        for path in ("/health", "/healthz", "/readyz", "/"):
            assert client.get(path).status_code == 200
            assert client.head(path).status_code == 200
        assert client.get("/readyz").json() == {"status": "ready", "model": "test-model"}
        backend._alive = False  # what a dead engine thread looks like
        assert client.get("/readyz").status_code == 503
        assert client.get("/healthz").status_code == 200
