"""Responses and Messages by their SDKs: two-turn tool loops over a real server on loopback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import anthropic
import httpx
import openai
import orjson
import pytest

from engine.api import ModelInfo
from gateway import Settings, create_app
from gateway.backends.scripted import Line
from tests.gateway.support import loopback, text_line
from tests.gateway.test_openai_sdk import RecordingBackend, calls, invoke

MODEL = "test-model"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}
RESPONSES_TOOL = {"type": "function", "name": "get_weather", "parameters": SCHEMA}
MESSAGES_TOOL = {"name": "get_weather", "input_schema": SCHEMA}
LOOP = (
    text_line(f"Which city?</think>Looking.{calls(invoke('get_weather', city='Oslo', days=2))}"),
    text_line("Now I know.</think>Rain in Oslo."),
)


@contextmanager
def server(
    info: ModelInfo, *lines: Line, **settings: Any
) -> Iterator[tuple[str, RecordingBackend]]:
    backend = RecordingBackend(list(lines), info)
    with loopback(create_app(Settings(**settings), backend)) as url:
        yield url, backend


@contextmanager
def openai_client(
    info: ModelInfo, *lines: Line, **settings: Any
) -> Iterator[tuple[openai.OpenAI, RecordingBackend]]:
    with (
        server(info, *lines, **settings) as (url, backend),
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client, backend


@contextmanager
def anthropic_client(
    info: ModelInfo, *lines: Line, prefix: str = "", **settings: Any
) -> Iterator[tuple[anthropic.Anthropic, RecordingBackend]]:
    with (
        server(info, *lines, **settings) as (url, backend),
        anthropic.Anthropic(base_url=url + prefix, api_key="none", max_retries=0) as client,
    ):
        yield client, backend


def respond(client: openai.OpenAI, stream: bool, **request: Any) -> Any:
    """A response, streamed or whole; the stream's final object is the whole one."""
    if not stream:
        return client.responses.create(model=MODEL, **request)
    with client.responses.stream(model=MODEL, **request) as events:
        numbers = [event.sequence_number for event in events]
        assert numbers == list(range(len(numbers)))
        return events.get_final_response()


def say(client: anthropic.Anthropic, stream: bool, **request: Any) -> Any:
    """A message, streamed or whole."""
    if not stream:
        return client.messages.create(model=MODEL, max_tokens=500, **request)
    with client.messages.stream(model=MODEL, max_tokens=500, **request) as events:
        return events.get_final_message()


STREAM = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


@STREAM
@pytest.mark.parametrize("chained", [False, True], ids=["resent", "chained"])
def test_a_responses_loop_ends_in_an_answer(info: ModelInfo, stream: bool, chained: bool) -> None:
    """Call, result, answer: with the whole input sent again, and by previous_response_id."""
    question = {"role": "user", "content": "Weather in Oslo?"}
    with openai_client(info, *LOOP) as (client, backend):
        first = respond(client, stream, input=[question], tools=[RESPONSES_TOOL])
        (call,) = [item for item in first.output if item.type == "function_call"]
        assert (call.name, orjson.loads(call.arguments)) == (
            "get_weather",
            {"city": "Oslo", "days": 2},
        )
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
        if chained:
            more: dict[str, Any] = {"previous_response_id": first.id, "input": [result]}
        else:
            more = {"input": [question, *(i.model_dump() for i in first.output), result]}
        second = respond(client, stream, tools=[RESPONSES_TOOL], **more)

    assert second.output_text == "Rain in Oslo."
    assert second.status == "completed"
    assert "Weather in Oslo?" in backend.prompts[1]
    assert "Looking." in backend.prompts[1]
    assert "rain" in backend.prompts[1]
    assert "Which city?" in backend.prompts[1]  # the reasoning came back


@STREAM
def test_a_messages_loop_ends_in_an_answer(info: ModelInfo, stream: bool) -> None:
    """Tool use, tool result, answer, with the thinking blocks sent back."""
    thinking: Any = {"type": "enabled", "budget_tokens": 1024}
    messages: list[Any] = [{"role": "user", "content": "Weather in Oslo?"}]
    with anthropic_client(info, *LOOP) as (client, backend):
        request = {"tools": [MESSAGES_TOOL], "thinking": thinking}
        first = say(client, stream, messages=messages, **request)
        (call,) = [block for block in first.content if block.type == "tool_use"]
        assert (first.stop_reason, call.input) == ("tool_use", {"city": "Oslo", "days": 2})
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "rain"}
        messages += [
            {"role": "assistant", "content": [block.model_dump() for block in first.content]},
            {"role": "user", "content": [result]},
        ]
        second = say(client, stream, messages=messages, **request)

    assert [block.text for block in second.content if block.type == "text"] == ["Rain in Oslo."]
    assert second.stop_reason == "end_turn"
    assert second.usage.output_tokens > 0
    assert "Which city?" in backend.prompts[1]


@pytest.mark.parametrize("prefix", ["", "/anthropic", "/beta"])
def test_counted_tokens_are_the_prompts(info: ModelInfo, prefix: str) -> None:
    """count_tokens gives the length of the prompt that the same body is generated from."""
    body: Any = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Weather in Oslo?"}],
        "system": "Be brief.",
        "tools": [MESSAGES_TOOL],
    }
    with anthropic_client(info, *LOOP, prefix=prefix) as (client, _):
        counted = client.messages.count_tokens(**body)
        message = client.messages.create(max_tokens=500, **body)

    usage = message.usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_an_error_of_messages_is_the_sdks_own(info: ModelInfo) -> None:
    """The Anthropic SDK raises its typed errors, with the request id, before and within a stream."""
    broken = text_line("half a</think>sentence", finish="error", name="broken")
    with anthropic_client(info, *LOOP, broken) as (client, _):
        with pytest.raises(anthropic.BadRequestError) as refused:
            client.messages.create(model=MODEL, max_tokens=5, messages=[])
        with (
            pytest.raises(anthropic.APIStatusError, match="script fails") as cut,
            client.messages.stream(
                model=MODEL,
                max_tokens=500,
                messages=[{"role": "user", "content": "?"}],
                extra_headers={"x-bathyal-script": "broken"},
            ) as events,
        ):
            events.get_final_message()
        with pytest.raises(anthropic.NotFoundError):
            client.models.retrieve("no-such-model")

    body: Any = refused.value.body
    assert body["error"]["type"] == "invalid_request_error"
    assert refused.value.request_id == body["request_id"]
    cut_body: Any = cut.value.body
    assert cut_body["type"] == "error"


def test_a_failed_response_says_so(info: ModelInfo) -> None:
    """A fault in the middle is response.failed with the next sequence number, and is not kept."""
    broken = text_line("half a</think>sentence", finish="error", name="broken")
    with openai_client(info, broken) as (client, _):
        stream = client.responses.create(model=MODEL, input="?", stream=True)
        events = list(stream)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(events[0].response.id)  # type: ignore[union-attr]

    assert events[-1].type == "response.failed"
    assert [event.sequence_number for event in events] == list(range(len(events)))


def test_silence_in_messages_is_filled_with_pings(info: ModelInfo) -> None:
    """Comments before message_start, pings after it, and the SDK reads over both."""
    line = text_line("ab</think>c", delay_ms=60)
    body = {"model": MODEL, "max_tokens": 50, "messages": [{"role": "user", "content": "?"}]}
    with anthropic_client(info, line, keep_alive_seconds=0.02) as (client, _):
        url = f"{str(client.base_url).rstrip('/')}/v1/messages"
        raw = httpx.post(url, json={**body, "stream": True}).text
        message = say(client, True, messages=body["messages"])

    before, _, after = raw.partition("event: message_start")
    assert ": keep-alive" in before
    assert "ping" not in before
    assert 'event: ping\ndata: {"type": "ping"}\n\n' in after
    assert ": keep-alive" not in after
    assert [block.type for block in message.content] == ["thinking", "text"]


class TestStored:
    """What is kept of responses."""

    def test_a_response_can_be_fetched_listed_and_deleted(self, info: ModelInfo) -> None:
        """The fetched object is the one that was sent; after a delete there is none."""
        with openai_client(info, text_line("ok</think>Hello.")) as (client, _):
            sent = client.responses.create(model=MODEL, input="Hi", instructions="Be brief.")
            fetched = client.responses.retrieve(sent.id)
            items = client.responses.input_items.list(sent.id)
            client.responses.delete(sent.id)
            for use in (
                lambda: client.responses.retrieve(sent.id),
                lambda: client.responses.input_items.list(sent.id),
                lambda: client.responses.delete(sent.id),
                lambda: client.responses.cancel(sent.id),
            ):
                with pytest.raises(openai.NotFoundError):
                    use()
            with pytest.raises(openai.BadRequestError) as gone:
                client.responses.create(model=MODEL, input="?", previous_response_id=sent.id)

        assert fetched.model_dump() == sent.model_dump()
        (item,) = items.data
        assert item.content[0].text == "Hi"  # type: ignore[union-attr]
        assert gone.value.code == "previous_response_not_found"
        assert gone.value.param == "previous_response_id"

    def test_what_is_not_to_be_kept_is_not(self, info: ModelInfo) -> None:
        """store: false is taken at its word."""
        with openai_client(info, text_line("ok</think>Hello.")) as (client, _):
            sent = client.responses.create(model=MODEL, input="Hi", store=False)
            with pytest.raises(openai.NotFoundError):
                client.responses.retrieve(sent.id)

        assert sent.to_dict().get("store") is False

    @pytest.mark.parametrize(
        ("field", "value"), [("previous_response_id", "resp_1"), ("background", True)]
    )
    def test_without_a_store_what_needs_one_is_400(
        self, info: ModelInfo, field: str, value: Any
    ) -> None:
        """The refusal names the field; a plain request is served."""
        with openai_client(info, text_line("ok</think>Hello."), store="off") as (client, _):
            with pytest.raises(openai.BadRequestError) as refused:
                client.responses.create(model=MODEL, input="Hi", **{field: value})
            served = client.responses.create(model=MODEL, input="Hi")
            with pytest.raises(openai.NotFoundError):
                client.responses.retrieve(served.id)

        assert refused.value.param == field
        assert served.output_text == "Hello."

    def test_input_items_come_in_pages(self, info: ModelInfo) -> None:
        """Newest first, or as sent; a page ends where it is told to; a wrong parameter is named."""
        with openai_client(info, text_line("ok</think>Hello.")) as (client, _):
            turns: Any = [{"role": "user", "content": f"q{i}"} for i in range(5)]
            sent = client.responses.create(model=MODEL, input=turns)
            newest = client.responses.input_items.list(sent.id, limit=2)
            every = list(client.responses.input_items.list(sent.id, limit=2, order="asc"))
            for wrong, value in (("limit", 0), ("order", "up"), ("after", "nobody")):
                with pytest.raises(openai.BadRequestError) as refused:
                    client.responses.input_items.list(sent.id, **{wrong: value})  # type: ignore[arg-type]
                assert refused.value.param == wrong

        texts = [item.content[0].text for item in every]  # type: ignore[union-attr]
        assert texts == [f"q{i}" for i in range(5)]
        assert [item.content[0].text for item in newest.data] == ["q4", "q3"]  # type: ignore[union-attr]
        assert newest.has_more

    def test_a_key_sees_its_own_alone(self, info: ModelInfo, tmp_path: Any) -> None:
        """Another key's response is a 404, and cannot be continued or cancelled."""
        keys = tmp_path / "keys.toml"
        keys.write_text(
            "".join(f'[[keys]]\nname = "{n}"\nkey = "sk-{n}-0123456789"\n' for n in "ab")
        )
        with server(info, text_line("ok</think>Hello."), api_keys=keys) as (url, _):
            mine, other = (
                openai.OpenAI(base_url=f"{url}/v1", api_key=f"sk-{n}-0123456789", max_retries=0)
                for n in "ab"
            )
            with mine, other:
                sent = mine.responses.create(model=MODEL, input="Hi")
                for use in (other.responses.retrieve, other.responses.delete):
                    with pytest.raises(openai.NotFoundError):
                        use(sent.id)
                with pytest.raises(openai.BadRequestError):
                    other.responses.create(model=MODEL, input="?", previous_response_id=sent.id)
                assert mine.responses.retrieve(sent.id).id == sent.id

    def test_a_chain_of_three_holds_all_turns(self, info: ModelInfo) -> None:
        """Each link carries everything before it."""
        lines = [text_line(f"t{i}</think>answer{i}") for i in range(3)]
        with openai_client(info, *lines) as (client, backend):
            previous = openai.omit
            for i in range(3):
                reply = client.responses.create(
                    model=MODEL, input=f"question{i}", previous_response_id=previous
                )
                previous = reply.id

        assert all(f"question{i}" in backend.prompts[2] for i in range(3))
        assert all(f"answer{i}" in backend.prompts[2] for i in range(2))

    def test_a_file_outlives_the_server(self, info: ModelInfo, tmp_path: Any) -> None:
        """With a file the chain goes on after a restart."""
        path = str(tmp_path / "responses.sqlite")
        with openai_client(info, text_line("ok</think>Hello."), store=path) as (client, _):
            sent = client.responses.create(model=MODEL, input="First")
        with openai_client(info, text_line("ok</think>Again."), store=path) as (client, backend):
            client.responses.create(model=MODEL, input="Then", previous_response_id=sent.id)

        assert "First" in backend.prompts[0]
        assert "Hello." in backend.prompts[0]


class TestBackground:
    """Responses that are fetched later."""

    def test_it_is_answered_at_once_and_fetched_when_done(self, info: ModelInfo) -> None:
        """The first reply is in progress; the last one is whole."""
        line = text_line("ok</think>Hello.", delay_ms=5)
        with openai_client(info, line) as (client, _):
            begun = client.responses.create(model=MODEL, input="Hi", background=True)
            response = begun
            for _ in range(400):
                response = client.responses.retrieve(begun.id)
                if response.status != "in_progress":
                    break

        assert begun.status == "in_progress"
        assert (response.status, response.output_text) == ("completed", "Hello.")
        assert response.background is True

    def test_a_cancelled_one_stops_generating(self, info: ModelInfo) -> None:
        """The engine is free again and the response says that it was cancelled."""
        line = text_line("a" * 2000, delay_ms=20)
        with openai_client(info, line) as (client, backend):
            begun = client.responses.create(model=MODEL, input="Hi", background=True)
            assert backend.stats().running == 1
            cancelled = client.responses.cancel(begun.id)
            assert backend.stats().running == 0
            fetched = client.responses.retrieve(begun.id)

        assert cancelled.status == fetched.status == "cancelled"

    def test_a_failed_one_says_why(self, info: ModelInfo) -> None:
        """A fault is told to whoever fetches."""
        line = text_line("a" * 3, finish="error", delay_ms=2)
        with openai_client(info, line) as (client, _):
            begun = client.responses.create(model=MODEL, input="Hi", background=True)
            response = begun
            for _ in range(400):
                response = client.responses.retrieve(begun.id)
                if response.status != "in_progress":
                    break

        assert response.status == "failed"
        assert response.error is not None
        assert "script fails" in response.error.message

    def test_only_so_many_run_at_once(
        self, info: ModelInfo, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """One more than the bound is 503; after a cancel there is room again."""
        monkeypatch.setattr("gateway.background.MOST", 2)
        with openai_client(info, text_line("a" * 2000, delay_ms=20)) as (client, _):
            begun = [
                client.responses.create(model=MODEL, input="Hi", background=True) for _ in range(2)
            ]
            with pytest.raises(openai.InternalServerError) as refused:
                client.responses.create(model=MODEL, input="Hi", background=True)
            client.responses.cancel(begun[0].id)
            client.responses.create(model=MODEL, input="Hi", background=True)

        assert refused.value.status_code == 503
        assert refused.value.response.headers["retry-after"] == "5"

    def test_it_is_not_streamed(self, info: ModelInfo) -> None:
        """Both at once is refused by name."""
        with (
            openai_client(info, text_line("a")) as (client, _),
            pytest.raises(openai.BadRequestError) as refused,
        ):
            client.responses.create(model=MODEL, input="Hi", background=True, stream=True)

        assert refused.value.param == "background"

    def test_a_kept_one_is_not_streamed_again(self, info: ModelInfo) -> None:
        """The refusal names the parameter; a wrong method is told both right ones."""
        with server(info, text_line("ok</think>Hello.")) as (url, _):
            sent = httpx.post(f"{url}/responses", json={"model": MODEL, "input": "Hi"}).json()
            path = f"{url}/v1/responses/{sent['id']}"
            refused = httpx.get(path, params={"stream": "true"})
            wrong = httpx.put(path)

        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "stream")
        assert (wrong.status_code, set(wrong.headers["allow"].split(", "))) == (
            405,
            {"GET", "HEAD", "DELETE"},
        )

    def test_only_such_can_be_cancelled(self, info: ModelInfo) -> None:
        """A response that is there is not cancelled."""
        with openai_client(info, text_line("ok</think>Hello.")) as (client, _):
            sent = client.responses.create(model=MODEL, input="Hi")
            with pytest.raises(openai.BadRequestError, match="background"):
                client.responses.cancel(sent.id)


@STREAM
def test_completions_continue_a_prompt(info: ModelInfo, stream: bool) -> None:
    """Text or token ids go in as they are, text comes out; markers are text."""
    with openai_client(info, text_line("b</think>c")) as (client, backend):
        ids = httpx.post(f"{client.base_url!s}tokenize", json={"prompt": "a<think>"}).json()[
            "tokens"
        ]
        texts = []
        for prompt in ("a<think>", ids):
            request: Any = {"model": MODEL, "prompt": prompt, "max_tokens": 50}
            if stream:
                chunks = list(client.completions.create(stream=True, **request))
                texts.append("".join(c.choices[0].text for c in chunks if c.choices))
                last = chunks[-1]
            else:
                last = client.completions.create(**request)
                texts.append(last.choices[0].text)
            assert last.choices[0].finish_reason == "stop"
        with pytest.raises(openai.BadRequestError) as refused:
            client.completions.create(model=MODEL, prompt=[10**9])

    assert texts == ["b</think>c"] * 2
    assert backend.prompts == ["a<think>"] * 2
    assert refused.value.param == "prompt[0]"


@pytest.mark.parametrize(
    ("body", "reply"),
    [
        ({"text": "<think>r</think>c"}, {"reasoning_text": "r", "text": "c"}),
        ({"text": "plain"}, {"reasoning_text": "", "text": "plain"}),
        (
            {"text": "r</think>c", "reasoning_parser": "deepseek-v4", "return_blocks": True},
            {
                "reasoning_text": "r",
                "text": "c",
                "reasoning_blocks": ["r"],
                "text_blocks": ["c"],
                "blocks": [{"type": "reasoning", "text": "r"}, {"type": "text", "text": "c"}],
            },
        ),
        ({"text": 1}, "text"),
        ({"text": "a", "return_blocks": "yes"}, "return_blocks"),
        ({"text": "a", "reasoning_parser": "qwen3"}, "reasoning_parser"),
        ([], None),
    ],
)
def test_separate_reasoning_has_sglangs_shape(info: ModelInfo, body: Any, reply: Any) -> None:
    """Both parts as SGLang names them; what is wrong is named."""
    with server(info, text_line("a")) as (url, _):
        got = httpx.post(f"{url}/separate_reasoning", json=body)

    if isinstance(reply, dict):
        assert got.json() == reply
    else:
        assert got.status_code == 400
        assert got.json()["error"]["param"] == reply


def test_tokenize_gives_the_prompt_of_a_chat(info: ModelInfo) -> None:
    """The ids of messages are those that are generated from; those of a text spell it."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
    with server(info, text_line("ok")) as (url, backend):
        counted = httpx.post(f"{url}/tokenize", json=body).json()
        text = httpx.post(f"{url}/v1/tokenize", json={"prompt": "Hi<think>"}).json()
        used = httpx.post(f"{url}/v1/chat/completions", json=body).json()["usage"]
        wrong = httpx.post(f"{url}/v1/tokenize", json={"prompt": 3})

    assert counted["count"] == len(counted["tokens"]) == used["prompt_tokens"]
    assert counted["max_model_len"] == info.max_model_len
    assert text["count"] == 3
    assert wrong.status_code == 400
    assert backend.prompts
