"""An exchange from its start to its end: frames, usage, stop token, stop sequences, faults."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import orjson
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from parsers import PROFILES, Codec, CodecError, Exchange, GatePolicy, ReplyError
from parsers.policy import Action
from tests.parsers.support import (
    chunks,
    drive,
    each,
    encode,
    function,
    message,
    open_chat,
    said,
    talk,
    whole,
)

TOOLS = [function("f", {"a": "string"}), function("g")]
CALLS = (
    'R</think>Hm.\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n'
    '<｜DSML｜parameter name="a" string="true">x</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
    '<｜DSML｜invoke name="g">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>'
)


def test_a_stream_is_what_the_openai_sdk_reads(codec: Codec) -> None:
    """Every chunk and the whole reply validate against the SDK's own models."""
    exchange = open_chat(codec, stream=True, tools=TOOLS)
    frames = drive(exchange, each(encode(codec, CALLS)))
    for chunk in chunks(frames):
        ChatCompletionChunk.model_validate(chunk, strict=True)
    assert frames[-1] == b"data: [DONE]\n\n"

    exchange = open_chat(codec, tools=TOOLS)
    assert drive(exchange, each(encode(codec, CALLS))) == []
    reply = ChatCompletion.model_validate_json(exchange.body())

    assert reply.choices[0].message.tool_calls is not None
    assert [call.function.name for call in reply.choices[0].message.tool_calls] == ["f", "g"]


@pytest.mark.parametrize("tools", [None, TOOLS])
def test_the_first_stop_id_ends_the_text(codec: Codec, tools: Any) -> None:
    """The stop id and all that follows it in the step or later leaves no trace."""
    eos = codec.model.eos_token_ids[0]
    word = encode(codec, "</think>word")
    fields = {"tools": tools} if tools else {}

    for pieces in ([[*word, eos, *word]], [word, [eos], word], [word, [eos, eos]]):
        exchange = open_chat(codec, stream=True, **fields)
        reply = message(chunks(drive(exchange, pieces)))
        assert (reply["content"], reply["finish"]) == ("word", "stop")
        assert exchange.finished


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("stream", [True, False])
def test_usage_takes_the_engines_count(codec: Codec, tools: Any, stream: bool) -> None:
    """completion_tokens is the engine's, total_tokens its sum with the prompt; prompt as told."""
    fields = {"tools": tools} if tools else {}
    exchange = open_chat(codec, stream=stream, **fields)
    frames = drive(exchange, each(encode(codec, CALLS)), completion_tokens=500)
    usage = message(chunks(frames))["usage"] if stream else whole(exchange.body())["usage"]

    assert usage["prompt_tokens"] == 10
    assert usage["completion_tokens"] == 500
    assert usage["total_tokens"] == 510
    assert usage["prompt_tokens_details"] == {"cached_tokens": 4}


def test_usage_without_a_count_is_the_ids_received(codec: Codec) -> None:
    """The ids taken in, markup and re-spelled text included, are the completion tokens."""
    ids = encode(codec, CALLS)

    assert talk(codec, CALLS, tools=TOOLS)["usage"]["completion_tokens"] == len(ids)


def test_a_quoted_usage_key_in_a_reply_is_not_touched(codec: Codec) -> None:
    """Text that looks like the usage stays as it is."""
    text = '"completion_tokens":1,"total_tokens":2'
    exchange = open_chat(codec)
    drive(exchange, [encode(codec, "</think>" + text)], completion_tokens=77)
    reply = whole(exchange.body())

    assert reply["content"] == text
    assert reply["usage"]["completion_tokens"] == 77


@pytest.mark.parametrize("size", [1, 2, 100])
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_a_stop_sequence_ends_the_reply(codec: Codec, tools: Any, size: int) -> None:
    """The reply is finished at once; what follows in the step leaves no trace, in no step size."""
    fields = {"tools": tools} if tools else {}
    exchange = open_chat(codec, stream=True, stop=["END"], **fields)
    pieces = each(encode(codec, "R END</think>one END two" + CALLS[8:]), size)
    frames = exchange.start(10, 4)
    for piece in pieces:
        frames += exchange.receive(piece)

    assert exchange.finished
    frames += exchange.close("stop", 99)
    reply = message(chunks(frames))
    assert (reply["content"], reply["reasoning"]) == ("one ", "R END")
    assert (reply["finish"], reply["calls"]) == ("stop", [])
    assert reply["usage"]["completion_tokens"] < 15
    assert exchange.report.calls == 0


def test_a_stop_sequence_in_what_was_held_ends_the_reply(codec: Codec) -> None:
    """Text held until the end may complete a stop sequence: the reply has one last chunk."""
    reply = talk(codec, "R</think>x <", tools=TOOLS, stop="<")

    assert (reply["content"], reply["finish"]) == ("x ", "stop")


def test_a_stop_sequence_does_not_cut_arguments(codec: Codec) -> None:
    """The codec's meaning: reasoning and arguments are never cut."""
    reply = talk(codec, CALLS.replace(">x<", ">x END y<"), tools=TOOLS, stop="END")

    assert reply["calls"][0][1] == '{"a": "x END y"}'


@pytest.mark.parametrize("stream", [True, False])
def test_a_fault_is_an_error_and_never_a_finish(codec: Codec, stream: bool) -> None:
    """fail() writes the protocol's error, ends the stream, and claims no finish reason."""
    exchange = open_chat(codec, stream=stream)
    frames = exchange.start(10, 4) + exchange.receive(encode(codec, "R</think>half"))
    frames += exchange.fail("the engine died")

    assert exchange.finished
    if stream:
        *ordinary, error = chunks(frames)
        assert all(chunk["choices"][0]["finish_reason"] is None for chunk in ordinary)
        assert error["error"]["message"] == "the engine died"
        assert error["error"]["type"] == "server_error"
        assert frames[-1] == b"data: [DONE]\n\n"
    else:
        assert frames == []


def test_logprobs_of_text_survive_the_gate(codec: Codec, bare: Codec) -> None:
    """Tokens of text reach the codec as they came, with their logprobs; markup has none."""
    ids = encode(codec, "R <b</think>C <x | y `z`\n\n<｜DSML｜tool_calls>")
    scores = [(-0.25 - i, [(id_, -1.5)]) for i, id_ in enumerate(ids)]

    def logprobs(of: Codec, size: int) -> list[Any]:
        exchange = open_chat(of, stream=True, tools=TOOLS, logprobs=True, top_logprobs=1)
        frames = exchange.start(10, 4)
        for at in range(0, len(ids), size):
            frames += exchange.receive(ids[at : at + size], scores[at : at + size])
        out = []
        for chunk in chunks(frames + exchange.close("stop")):
            found = chunk["choices"][0]["logprobs"] or {}
            out += found.get("reasoning_content", []) + found.get("content", [])
        return out

    assert logprobs(bare, 1) != []
    for size in (1, 3, 100):
        assert logprobs(codec, size) == logprobs(bare, 1)


def test_logprobs_nobody_asked_for_are_not_written(codec: Codec) -> None:
    """The codec writes what it is given: so it is given none."""
    exchange = open_chat(codec, stream=True)
    ids = encode(codec, "a")
    frames = exchange.receive(ids, [(-0.5, [])])

    assert all(chunk["choices"][0]["logprobs"] is None for chunk in chunks(frames))


def test_a_reply_the_policy_calls_an_error_is_one(served: Any) -> None:
    """With undeclared_tool=error the stream ends in an error, and a whole reply raises it."""
    codec = Codec.load(
        served, replace(PROFILES["agent"], gate=GatePolicy(undeclared_tool=Action.ERROR))
    )
    output = CALLS.replace('name="f"', 'name="rm"')
    exchange = open_chat(codec, stream=True, tools=TOOLS)
    frames = drive(exchange, each(encode(codec, output)))
    *_, error = chunks(frames)

    assert error["error"]["code"] == "undeclared_tool"
    assert "'rm'" in error["error"]["message"]
    assert frames[-1] == b"data: [DONE]\n\n"
    assert frames.count(b"data: [DONE]\n\n") == 1

    exchange = open_chat(codec, tools=TOOLS)
    drive(exchange, each(encode(codec, output)))
    with pytest.raises(ReplyError, match="'rm'") as caught:
        exchange.body()
    assert caught.value.status == 502
    assert exchange.error is caught.value


def test_the_extension_is_there_only_when_there_is_something_to_tell(codec: Codec) -> None:
    """An ordinary reply is the codec's; a mended one has the field bathyal on its last chunk."""
    plain = open_chat(codec, stream=True, tools=TOOLS)
    assert not any("bathyal" in c for c in chunks(drive(plain, each(encode(codec, CALLS)))))

    mended = open_chat(codec, stream=True, tools=TOOLS)
    output = CALLS.replace('name="g"', 'name="rm"')
    *others, last = chunks(drive(mended, each(encode(codec, output))))
    assert not any("bathyal" in chunk for chunk in others)
    assert last["bathyal"]["withheld_calls"][0]["name"] == "rm"
    assert last["choices"][0]["finish_reason"] == "tool_calls"


def test_indices_stay_dense_when_a_call_is_left_out(codec: Codec) -> None:
    """The call after a withheld one has the next index, and official ids."""
    output = CALLS.replace('name="f"', 'name="rm"')
    reply = talk(codec, output, tools=TOOLS)

    assert [name for name, _, _ in reply["calls"]] == ["g"]
    assert reply["calls"][0][2].startswith("call_00_")


def test_calls_after_empty_reasoning_keep_the_marked_ids(codec: Codec) -> None:
    """The codec's ET_ mark, which excuses missing reasoning later, is kept."""
    reply = talk(codec, CALLS.replace("R</think>Hm.", "</think>"), tools=TOOLS)

    assert [id_[:11] for _, _, id_ in reply["calls"]] == ["call_00_ET_", "call_01_ET_"]


def test_v41_replies_work_alike(v41: Codec) -> None:
    """The same output in V4.1's spelling, through a V4.1 codec."""
    output = (
        CALLS.replace("｜tool_calls", "｜ calls")
        .replace("｜invoke", "｜ invoke")
        .replace("｜parameter", "｜ parameter")
    )
    ids = encode(v41, output)
    want = {
        "content": "Hm.",
        "reasoning": "R",
        "finish": "tool_calls",
        "calls": [("f", '{"a": "x"}'), ("g", "{}")],
    }

    for size in (1, 7, 1000):
        exchange = open_chat(v41, stream=True, tools=TOOLS)
        assert said(message(chunks(drive(exchange, each(ids, size))))) == want


def test_a_codec_fault_is_ours(codec: Codec) -> None:
    """What the codec refuses after our checks is a CodecError, not the client's fault."""
    exchange: Exchange = open_chat(codec, stream=True)
    exchange.start(1, 0)
    exchange._wire.abandon()

    with pytest.raises(CodecError, match="tokens chunk"):
        exchange.receive([5])


def test_the_reply_carries_the_requested_name_and_one_stamp(codec: Codec) -> None:
    """An alias is echoed; id, model and created are the same in all chunks and the whole."""
    exchange = open_chat(codec, model="gpt", stream=True)
    stream = chunks(drive(exchange, each(encode(codec, "R</think>x"))))

    assert {(c["id"], c["model"], c["object"]) for c in stream} == {
        ("ID", "gpt", "chat.completion.chunk")
    }
    exchange = open_chat(codec, model="gpt")
    drive(exchange, [encode(codec, "R</think>x")])
    body = orjson.loads(exchange.body())
    assert (body["id"], body["model"]) == ("ID", "gpt")
    assert abs(body["created"] - stream[0]["created"]) < 60
