"""One reply in three protocols: the same message, each in its own grammar, gate and faults alike."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import orjson
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from hypothesis import given, settings, strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from parsers import ClientError, Codec, ServedModel
from parsers.errors import Protocol
from tests.parsers import streams
from tests.parsers.streams import PROTOCOLS, events, open_any, talk
from tests.parsers.support import drive, each, encode, function, said
from tests.parsers.test_gate import block, call, param
from tests.parsers.test_properties import PIECES

TOOLS = [function("f", {"a": "string", "n": "integer"}), function("g")]
CALLS = "R</think>Hm." + block(call("f", param("a", "x"), param("n", "5", "false")), call("g"))


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("size", [1, 4, 1000])
def test_a_stream_says_what_the_whole_reply_says(codec: Codec, protocol: str, size: int) -> None:
    """Text, reasoning, calls, finish, usage: in events and in a body, in any step size."""
    ids = encode(codec, CALLS)
    streamed = open_any(codec, protocol, tools=TOOLS, stream=True)
    got = streams.message(protocol, drive(streamed, each(ids, size), completion_tokens=99))
    exchange = open_any(codec, protocol, tools=TOOLS)
    assert drive(exchange, each(ids, size), completion_tokens=99) == []
    want = streams.whole(protocol, exchange.body())

    if protocol == "messages":  # there the arguments are an object
        for sent in got["calls"]:
            sent[1] = orjson.loads(sent[1])
    assert {**said(got), "usage": got["usage"]} == {**said(want), "usage": want["usage"]}
    assert got["reasoning"] == "R"
    assert [name for name, _, _ in got["calls"]] == ["f", "g"]
    assert got["finish"] == "tool_calls"


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("size", [1, 1000])
def test_an_event_is_one_line_for_readers_that_split_at_more(
    codec: Codec, protocol: str, size: int
) -> None:
    """Unicode's line ends go out as escapes in every field, and come back as they were written."""
    text = "a\x85b\u2028c\u2029d\x0be\x1cf"
    written = block(call("f", param("a", text), param("o", f'{{"k": "{text[:7]}"}}', "false")))
    frames = drive(
        open_any(codec, protocol, tools=TOOLS, stream=True),
        each(encode(codec, f"{text}</think>{text}{written}"), size),
    )

    stream = b"".join(frames).decode()
    assert stream.splitlines() == stream.split("\n")[:-1]  # as httpx and its like read it
    got = streams.message(protocol, frames)
    assert (got["reasoning"], got["content"]) == (text, text)
    assert orjson.loads(got["calls"][0][1]) == {"a": text, "o": {"k": text[:7]}}


def test_a_fault_is_one_line_too(codec: Codec) -> None:
    """An error in a stream may repeat what a client or a model wrote."""
    for protocol in PROTOCOLS:
        exchange = open_any(codec, protocol, tools=TOOLS, stream=True)
        stream = b"".join([*exchange.start(1, 0), *exchange.fail("a\u2028b")]).decode()
        assert stream.splitlines() == stream.split("\n")[:-1]


BIG = "123456789012345678901234567890"


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("size", [1, 1000])
def test_big_numbers_keep_their_digits(
    codec: Codec, protocol: str, stream: bool, size: int
) -> None:
    """An integer beyond 64 bits goes out digit for digit, as a string or inside an object."""
    deep = f'[1, {{"b": -{BIG}, "c": 0.{BIG}}}]'
    calls = block(
        call("g"),
        call("f", param("a", "x"), param("n", BIG, "false")),
        call("g", param("o", deep, "false")),
    )
    exchange = open_any(codec, protocol, tools=TOOLS, stream=stream)
    frames = drive(exchange, each(encode(codec, f"R</think>Hm.{calls}"), size))
    if protocol == "messages" and not stream:
        body = exchange.body().decode()
        assert f'"input":{{"a": "x", "n": {BIG}}}' in body
        assert f'"input":{{"o": {deep}}}' in body
        blocks = orjson.loads(body)["content"]
        assert [b["type"] for b in blocks] == ["thinking", "text", *["tool_use"] * 3]
        assert blocks[2]["input"] == {}
    else:
        read = streams.message if stream else streams.whole
        got = read(protocol, frames if stream else exchange.body())
        want = ["{}", f'{{"a": "x", "n": {BIG}}}', f'{{"o": {deep}}}']
        assert [c[1] for c in got["calls"]] == want


def test_a_cut_call_with_a_big_number_is_left_to_the_codec(codec: Codec) -> None:
    """Arguments that are no whole JSON are not put into a body."""
    exchange = open_any(codec, "messages", tools=TOOLS)
    output = "R</think>" + block(call("f", param("n", BIG, "false"), param("a", "half")))
    drive(exchange, each(encode(codec, output.partition("half")[0])), finish="length")
    (_, sent) = orjson.loads(exchange.body())["content"]

    assert sent["type"] == "tool_use"


USAGE = {
    "chat": ("prompt_tokens", 10, "completion_tokens", 7, "total_tokens", 17),
    "responses": ("input_tokens", 10, "output_tokens", 7, "total_tokens", 17),
    "messages": ("input_tokens", 6, "cache_read_input_tokens", 4, "output_tokens", 7),
}


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("stream", [True, False])
def test_the_engines_count_is_told(codec: Codec, protocol: str, stream: bool) -> None:
    """The last event and the body carry the engine's number of tokens, and what adds up to it."""
    exchange = open_any(codec, protocol, stream=stream)
    frames = drive(exchange, each(encode(codec, "R</think>Hi")), completion_tokens=7)
    read = streams.message if stream else streams.whole
    got = read(protocol, frames if stream else exchange.body())["usage"]

    names = USAGE[protocol]
    assert {name: got[name] for name in names[::2]} == dict(
        zip(names[::2], names[1::2], strict=True)
    )


FINISHES = [
    ("R</think>Hi", "stop", {}, ("stop", "completed", "end_turn")),
    ("R</think>Hi", "length", {}, ("length", "incomplete", "max_tokens")),
    (CALLS, "stop", {"tools": TOOLS}, ("tool_calls", "completed", "tool_use")),
    ("R</think>" + block(call("zz")), "stop", {"tools": TOOLS}, ("stop", "completed", "end_turn")),
]


@pytest.mark.parametrize(("output", "finish", "fields", "want"), FINISHES)
def test_the_end_is_each_protocols_word(
    codec: Codec, output: str, finish: str, fields: Any, want: tuple[str, ...]
) -> None:
    """finish_reason, status and stop_reason for the same end; no calls delivered is no tool_use."""
    got = []
    for protocol in PROTOCOLS:
        exchange = open_any(codec, protocol, **fields)
        drive(exchange, each(encode(codec, output)), finish)
        reply = orjson.loads(exchange.body())
        got.append(
            reply["choices"][0]["finish_reason"]
            if protocol == "chat"
            else reply["status" if protocol == "responses" else "stop_reason"]
        )

    assert tuple(got) == want


def test_a_stop_sequence_is_told_by_messages(codec: Codec) -> None:
    """stop_reason stop_sequence with the text that was met; the usage is on that event."""
    exchange = open_any(codec, "messages", stop_sequences=["END"], stream=True)
    frames = drive(exchange, each(encode(codec, "R</think>a END b"), 3))

    last = events(frames)[-2]
    assert last["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "END"}
    assert last["usage"]["output_tokens"] > 0


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_the_gate_holds_in_every_protocol(codec: Codec, protocol: str) -> None:
    """An undeclared call is withheld, told in the answer and in the report; bad values are mended."""
    got = talk(codec, protocol, "R</think>" + block(call("rm")), tools=TOOLS)
    assert got["calls"] == []
    assert "rm" in got["content"]
    assert got["bathyal"]["withheld_calls"][0]["reason"] == "undeclared_tool"

    mended = talk(
        codec, protocol, "R</think>" + block(call("f", param("a", "{bad", "false"))), tools=TOOLS
    )
    assert [c[1] for c in mended["calls"]] == ['{"a": "{bad"}']
    assert mended["bathyal"]["repaired_calls"][0]["rule"] == "broken_json"


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_report_stands_in_a_whole_reply(codec: Codec, protocol: str) -> None:
    """The extension field is at the top of the body."""
    exchange = open_any(codec, protocol, tools=TOOLS)
    drive(exchange, each(encode(codec, "R</think>" + block(call("rm")))))

    assert orjson.loads(exchange.body())["bathyal"]["withheld_calls"][0]["name"] == "rm"


@pytest.mark.parametrize("protocol", PROTOCOLS)
@settings(max_examples=25)
@given(data=st.data())
def test_every_split_says_the_same_in_every_protocol(
    codec: Codec, protocol: str, data: st.DataObject
) -> None:
    """Any output in any split: the grammar holds, arguments are JSON, the message is the same."""
    text = "".join(data.draw(st.lists(st.sampled_from(PIECES), max_size=25)))
    ids = encode(codec, text)
    finish = data.draw(st.sampled_from(["stop", "length"]))
    want = said(talk(codec, protocol, ids, finish, tools=TOOLS))
    size = data.draw(st.integers(1, 12))
    exchange = open_any(codec, protocol, tools=TOOLS, stream=True)

    got = said(streams.message(protocol, drive(exchange, each(ids, size), finish)))

    assert got == want
    if got["finish"] != "length":
        for _name, arguments in got["calls"]:
            assert isinstance(orjson.loads(arguments), dict)


# Faults


def test_a_fault_in_messages_is_an_error_event(codec: Codec) -> None:
    """An `error` event with the envelope and the request's id; no stop_reason, nothing after it."""
    exchange = open_any(codec, "messages", stream=True)
    frames = exchange.start(1, 0) + exchange.receive(encode(codec, "R"))
    last = events(exchange.fail("the engine died"))

    assert last == [
        {
            "type": "error",
            "error": {"type": "api_error", "message": "the engine died"},
            "request_id": "ID",
        }
    ]
    assert not any(event["type"] == "message_delta" for event in events(frames))
    assert exchange.close("stop") == []


@pytest.mark.parametrize("after", [0, 1, 3])
def test_a_fault_in_responses_is_response_failed(codec: Codec, after: int) -> None:
    """`response.failed` carries the next sequence number, status failed and the error."""
    exchange = open_any(codec, "responses", stream=True)
    frames = exchange.start(1, 0)
    for id_ in encode(codec, 'R "sequence_number":77 x')[:after]:
        frames += exchange.receive([id_])
    (last,) = events(exchange.fail("the engine died"))

    assert last["type"] == "response.failed"
    assert last["sequence_number"] == events(frames)[-1]["sequence_number"] + 1
    assert last["response"]["status"] == "failed"
    assert last["response"]["error"] == {"code": "server_error", "message": "the engine died"}
    TypeAdapter(ResponseStreamEvent).validate_python(last)


def test_a_fault_before_the_first_event_has_no_response(codec: Codec) -> None:
    """Without a response that was begun, the protocol's own `error` event."""
    (event,) = events(open_any(codec, "responses", stream=True).fail("m"))

    assert (event["type"], event["message"], event["sequence_number"]) == ("error", "m", 0)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_strict_violation_ends_the_stream_in_an_error(codec: Codec, protocol: str) -> None:
    """A tool declared strict, called against its schema: an error, no finish, in every protocol."""
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    schema["additionalProperties"] = False
    strict = {"type": "function", "function": {"name": "s", "parameters": schema, "strict": True}}
    exchange = open_any(codec, protocol, tools=[strict], stream=True)
    frames = drive(exchange, each(encode(codec, "R</think>" + block(call("s")))))

    assert exchange.error is not None
    assert exchange.error.code == "schema_violation"
    text = b"".join(frames)
    assert b"'n' is a required property" in text
    assert b'"finish_reason":"' not in text
    assert b"response.completed" not in text
    assert b"message_stop" not in text


# What the vendors' own types say


@pytest.mark.parametrize("output", ["R</think>Hi", CALLS, "R"])
def test_openai_types_take_every_event(codec: Codec, output: str) -> None:
    """Every Responses event and the whole response validate against the SDK's types."""
    exchange = open_any(codec, "responses", tools=TOOLS, stream=True, reasoning={"summary": "auto"})
    for event in events(drive(exchange, each(encode(codec, output)))):
        TypeAdapter(ResponseStreamEvent).validate_python(event)
    one = open_any(codec, "responses", tools=TOOLS)
    drive(one, each(encode(codec, output)))
    Response.model_validate_json(one.body())


@pytest.mark.parametrize("output", ["R</think>Hi", CALLS, "R"])
def test_anthropic_types_take_every_event(codec: Codec, output: str) -> None:
    """Every Messages event but ping, and the whole message, validate against the SDK's types."""
    exchange = open_any(codec, "messages", tools=TOOLS, stream=True)
    for event in events(drive(exchange, each(encode(codec, output)))):
        if event["type"] != "ping":
            TypeAdapter[Any](RawMessageStreamEvent).validate_python(event)
    one = open_any(codec, "messages", tools=TOOLS)
    drive(one, each(encode(codec, output)))
    Message.model_validate_json(one.body())


# What is said of a context that is too small, and by which words clients find it.
OVERFLOWS = {
    ("chat", "prompt"): (r"maximum context length is 2000 tokens", "messages"),
    ("responses", "prompt"): (r"maximum context length is 2000 tokens", "input"),
    ("messages", "prompt"): (r"prompt is too long: (\d+) tokens > 1999 maximum", "messages"),
    ("chat", "reply"): (r"maximum context length is 2000 tokens", "max_tokens"),
    ("responses", "reply"): (r"maximum context length is 2000 tokens", "max_output_tokens"),
    ("messages", "reply"): (
        r"input length and `max_tokens` exceed context limit: (\d+) \+ 1999 > 2000",
        "max_tokens",
    ),
}


@pytest.mark.parametrize(("protocol", "what"), OVERFLOWS)
def test_agents_know_a_full_context_by_its_words(
    served: ServedModel, protocol: Protocol, what: str
) -> None:
    """They shorten their history then, or ask for less; numbers are those of the prompt."""
    codec = Codec.load(replace(served, max_model_len=2000))
    text = " word" * (5000 if what == "prompt" else 5)
    inner = "input" if protocol == "responses" else "messages"
    limit = "max_output_tokens" if protocol == "responses" else "max_tokens"
    body = {"model": served.name, inner: [{"role": "user", "content": text}], limit: 1999}
    with pytest.raises(ClientError) as caught:
        codec.open_exchange(protocol, orjson.dumps(body), exchange_id="ID")

    words, param = OVERFLOWS[protocol, what]
    found = re.search(words, caught.value.message)
    assert found is not None
    if found.groups():
        assert int(found[1]) == len(Codec.load(served).prompt_ids(protocol, orjson.dumps(body)))
    assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")
    assert caught.value.param == param
