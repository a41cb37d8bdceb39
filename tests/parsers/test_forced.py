"""Forced calls while thinking: the model thinks freely, then its call is opened for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson
import pytest

from engine import TINY_CHECKPOINT
from parsers import ClientError, Codec, Exchange, ReplyError, ServedModel
from tests.parsers import streams
from tests.parsers.streams import PROTOCOLS, open_any
from tests.parsers.support import drive, each, encode, function, open_chat
from tests.parsers.test_gate import block, call, param

TOOLS = [function("f", {"a": "string"}), function("g")]
REQUIRED: dict[str, Any] = {
    "chat": "required",
    "responses": "required",
    "messages": {"type": "any"},
}
NAMED: dict[str, Any] = {
    "chat": {"type": "function", "function": {"name": "f"}},
    "responses": {"type": "function", "name": "f"},
    "messages": {"type": "tool", "name": "f"},
}
OPENED = "\n\n<｜DSML｜tool_calls>\n"
REST = param("a", "x") + "</｜DSML｜invoke>\n</｜DSML｜tool_calls>"


class Engine:
    """A scripted engine that follows the driver's contract.

    ``outputs`` holds what it generates for each prompt, in order.
    """

    def __init__(self, codec: Codec, *outputs: str) -> None:
        self._codec = codec
        self._outputs = [encode(codec, output) for output in outputs]
        self.prompts: list[tuple[int, ...]] = []
        self.limits: list[int] = []
        self.generated = 0

    def _generate(self, exchange: Exchange, prompt: Sequence[int], limit: int, size: int) -> Any:
        self.prompts.append(tuple(prompt))
        self.limits.append(limit)
        for step in each(self._outputs.pop(0), size):
            self.generated += len(step)
            yield from exchange.receive(step)
            if exchange.finished:
                return

    def run(self, exchange: Exchange, *, size: int = 1, finish: Any = "stop") -> list[bytes]:
        frames = exchange.start(10, 4)
        frames += self._generate(exchange, exchange.prompt_ids, exchange.sampling.max_tokens, size)
        if finish != "length":
            while (more := exchange.continuation()) is not None:
                frames += self._generate(exchange, more.prompt_ids, more.max_tokens, size)
        return frames + exchange.close(finish)


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("named", [False, True])
def test_the_call_is_opened_after_the_reasoning(
    codec: Codec, protocol: str, size: int, named: bool
) -> None:
    """`</think>` ends the first generation; the second goes on inside the block, or the call."""
    choice = (NAMED if named else REQUIRED)[protocol]
    opened = OPENED + ('<｜DSML｜invoke name="f">\n' if named else "")
    rest = REST if named else '<｜DSML｜invoke name="f">\n' + REST
    engine = Engine(codec, "Let me see</think>prose that is not wanted", rest)
    exchange = open_any(codec, protocol, tools=TOOLS, tool_choice=choice, stream=True)
    frames = engine.run(exchange, size=size)
    got = streams.message(protocol, frames)

    assert (got["reasoning"], got["content"]) == ("Let me see", "")
    assert [(c[0], c[1]) for c in got["calls"]] == [("f", '{"a": "x"}')]
    assert got["finish"] == "tool_calls"
    assert got["bathyal"] is None
    first, second = engine.prompts
    want = [*first, *encode(codec, "Let me see</think>"), *encode(codec, opened)]
    assert list(second) == want
    thought = len(encode(codec, "Let me see</think>"))
    assert engine.limits == [exchange.sampling.max_tokens, exchange.sampling.max_tokens - thought]


def test_the_opener_is_what_the_codec_writes_without_thinking(codec: Codec) -> None:
    """The ids after `</think>` are those of the codec's own forced prompt."""
    fields: dict[str, Any] = {"tools": TOOLS, "thinking": {"type": "disabled"}}
    auto = open_chat(codec, **fields).prompt_ids
    forced = open_chat(codec, tool_choice="required", **fields).prompt_ids

    assert list(forced[len(auto) :]) == codec.opener(None) == encode(codec, OPENED)


@pytest.mark.parametrize("arguments", ['{"a": "x"}', "{}"])
@pytest.mark.parametrize("which", ["v4", "tiny"])
def test_an_opened_call_has_the_ids_of_a_history(codec: Codec, which: str, arguments: str) -> None:
    """Other ids of the same text stand where the model was never trained: it leaves arguments out."""
    if which == "tiny":
        path = str(TINY_CHECKPOINT / "tokenizer.json")
        codec = Codec.load(ServedModel("tiny", "v4.1", path, 100_000, (1,)))
    made = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    history = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "reasoning_content": "R", "tool_calls": [made]},
        {"role": "tool", "tool_call_id": "c1", "content": "r"},
    ]
    ids = open_chat(codec, tools=TOOLS, messages=history).prompt_ids
    end = codec.vocabulary.special("</think>")
    turn = ids[[i for i, token_id in enumerate(ids) if token_id == end][-1] + 1 :]
    bare = arguments == "{}"
    opener = codec.opener("f", bare=bare)
    spelled = codec.vocabulary.text(opener)

    assert list(turn[: len(opener)]) == opener
    assert spelled.rstrip("</").rstrip("\n").endswith('invoke name="f">')
    # what is shown to the gate is the same but for the blank line before it
    assert codec.vocabulary.text(codec.opener("f", blank="", bare=bare)) == spelled.removeprefix(
        "\n\n"
    )


A_STRING = '｜DSML｜ parameter name="a" string="true">x</｜DSML｜ parameter>\n</'
OBJECT = {"type": "object"}


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize(
    ("parameters", "last", "inside", "arguments"),
    [
        ({**OBJECT, "properties": {"a": {"type": "string"}}}, '">\n<', A_STRING, '{"a": "x"}'),
        ({**OBJECT, "additionalProperties": True}, '">\n<', A_STRING, '{"a": "x"}'),
        ({**OBJECT, "additionalProperties": {}}, '">\n<', A_STRING, '{"a": "x"}'),
        ({**OBJECT, "properties": {}, "required": ["a"]}, '">\n<', A_STRING, '{"a": "x"}'),
        (OBJECT, '">\n<', A_STRING, '{"a": "x"}'),
        ({**OBJECT, "properties": {}}, '">\n\n</', "", "{}"),
        ({**OBJECT, "properties": {}, "additionalProperties": False}, '">\n\n</', "", "{}"),
        (None, '">\n\n</', "", "{}"),
    ],
)
def test_a_call_goes_on_behind_a_token_that_begins_the_next_tag(
    parameters: Any, last: str, inside: str, arguments: str, size: int
) -> None:
    """The model writes the rest of it, from its marker on."""
    path = str(TINY_CHECKPOINT / "tokenizer.json")
    tiny = Codec.load(ServedModel("tiny", "v4.1", path, 100_000, (1,)))
    rest = f"{inside}｜DSML｜ invoke>\n</｜DSML｜ calls>"
    tool = {"name": "f"} if parameters is None else {"name": "f", "parameters": parameters}
    engine = Engine(tiny, "Let me see</think>", rest)
    exchange = open_chat(
        tiny,
        tools=[{"type": "function", "function": tool}],
        tool_choice=NAMED["chat"],
        stream=True,
    )
    got = streams.message("chat", engine.run(exchange, size=size))

    assert [(c[0], c[1]) for c in got["calls"]] == [("f", arguments)]
    assert got["bathyal"] is None
    assert tiny.vocabulary.text(engine.prompts[1][-1:]) == last


def test_reasoning_that_just_ends_is_closed_for_the_model(codec: Codec) -> None:
    """An end of turn inside the reasoning: `</think>` is put in before the opener."""
    engine = Engine(
        codec, "Hm<｜end▁of▁sentence｜>", '<｜DSML｜invoke name="g">\n</｜DSML｜invoke>\n'
    )
    exchange = open_chat(codec, tools=TOOLS, tool_choice="required", stream=True)
    got = streams.message("chat", engine.run(exchange))

    assert got["reasoning"] == "Hm"
    assert [c[0] for c in got["calls"]] == ["g"]
    assert list(engine.prompts[1][len(exchange.prompt_ids) :]) == encode(
        codec, f"Hm</think>{OPENED}"
    )


def test_a_call_made_in_the_reasoning_is_enough(codec: Codec) -> None:
    """A block that ends the output without `</think>` is the call; nothing is opened."""
    engine = Engine(codec, "Hm\n\n" + block(call("g")) + "<｜end▁of▁sentence｜>")
    exchange = open_chat(codec, tools=TOOLS, tool_choice="required", stream=True)
    got = streams.message("chat", engine.run(exchange))

    assert [c[0] for c in got["calls"]] == ["g"]
    assert len(engine.prompts) == 1


def test_length_ends_it(codec: Codec) -> None:
    """Out of tokens while thinking: length, no call, the demand is reported as not met."""
    engine = Engine(codec, "Hm")
    exchange = open_chat(codec, tools=TOOLS, tool_choice="required", stream=True)
    got = streams.message("chat", engine.run(exchange, finish="length"))
    assert (got["finish"], got["bathyal"]) == ("length", {"unmet": "tool_choice"})

    short = open_chat(codec, tools=TOOLS, tool_choice="required", max_tokens=2)
    engine = Engine(codec, "R</think>")
    engine.run(short)
    assert len(engine.prompts) == 1  # no token is left for a second generation


def test_whole_replies_are_served_too(codec: Codec) -> None:
    """Without a stream the same; the usage counts what was generated, not the opener."""
    engine = Engine(codec, "R</think>", '<｜DSML｜invoke name="f">\n' + REST)
    exchange = open_chat(codec, tools=TOOLS, tool_choice="required")
    assert engine.run(exchange) == []
    reply = orjson.loads(exchange.body())

    assert reply["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "f"
    assert reply["usage"]["completion_tokens"] == engine.generated


WRONG = '<｜DSML｜invoke name="rm">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>'
RIGHT = '<｜DSML｜invoke name="f">\n' + REST


def asked(
    codec: Codec, protocol: str, *, thinking: bool, choice: Any = REQUIRED, stream: bool = True
) -> Exchange:
    """Open a request that demands a call."""
    quiet: dict[str, Any] = {"thinking": {"type": "disabled"}}
    if protocol == "responses":
        quiet = {"reasoning": {"effort": "none"}}
    return open_any(
        codec,
        protocol,
        tools=TOOLS,
        tool_choice=choice[protocol],
        stream=stream,
        **({} if thinking else quiet),
    )


def outputs(thinking: bool, *after: str) -> list[str]:
    """What an engine generates: a thought first, where it thinks."""
    return ["R</think>", *after] if thinking else list(after)


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("size", [1, 1000])
def test_a_call_of_no_tool_is_tried_again(
    codec: Codec, protocol: str, thinking: bool, size: int
) -> None:
    """A withheld call in place of the forced one: the block is opened anew, as if it were not."""
    engine = Engine(codec, *outputs(thinking, WRONG, RIGHT))
    exchange = asked(codec, protocol, thinking=thinking)
    got = streams.message(protocol, engine.run(exchange, size=size))

    assert [(c[0], c[1]) for c in got["calls"]] == [("f", '{"a": "x"}')]
    assert (got["content"], got["finish"]) == ("", "tool_calls")
    assert [w["name"] for w in got["bathyal"]["withheld_calls"]] == ["rm"]
    assert "unmet" not in got["bathyal"]
    assert engine.prompts[-1] == engine.prompts[-2]
    assert engine.limits[-1] == engine.limits[-2] - len(encode(codec, WRONG))


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("output", [WRONG, "</｜DSML｜tool_calls>", ""])
def test_two_tries_without_a_call_are_an_error(
    codec: Codec, protocol: str, thinking: bool, output: str
) -> None:
    """Never an empty reply that ends in stop: the error says what was asked for and what came."""
    engine = Engine(codec, *outputs(thinking, output, output))
    exchange = asked(codec, protocol, thinking=thinking)
    frames = b"".join(engine.run(exchange))
    error = exchange.error
    assert error is not None
    assert (error.status, error.code) == (502, "forced_call_missing")
    assert error.message.startswith("tool_choice asks for a call, and the model made none in two")
    assert error.message.endswith("the tool is not declared") == (output == WRONG)
    assert error.message.encode() in frames
    assert b'"finish_reason":"stop"' not in frames

    engine = Engine(codec, *outputs(thinking, output, output))
    exchange = asked(codec, protocol, thinking=thinking, stream=False)
    engine.run(exchange)
    with pytest.raises(ReplyError, match="made none in two tries"):
        exchange.body()


@pytest.mark.parametrize("again", [RIGHT, "I will not."])
def test_prose_in_place_of_the_call_is_kept(codec: Codec, again: str) -> None:
    """What was said was sent: the call follows it, or it stays the answer and is reported."""
    engine = Engine(codec, "Sorry, no.", again)
    got = streams.message("chat", engine.run(asked(codec, "chat", thinking=False)))

    assert got["content"] == "Sorry, no."
    if again == RIGHT:
        assert ([c[0] for c in got["calls"]], got["finish"]) == (["f"], "tool_calls")
    else:
        assert (got["calls"], got["finish"]) == ([], "stop")
        assert got["bathyal"]["unmet"] == "tool_choice"
        assert got["bathyal"]["lost_text"].strip() == again


@pytest.mark.parametrize("thinking", [False, True])
def test_a_named_tool_is_opened_and_no_call_of_it_made_up(codec: Codec, thinking: bool) -> None:
    """Where one tool is named its call is opened; a model that begins another has not called it."""
    other = '<｜DSML｜invoke name="g">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>'
    engine = Engine(codec, *outputs(thinking, other, REST))
    exchange = asked(codec, "chat", thinking=thinking, choice=NAMED)
    got = streams.message("chat", engine.run(exchange))
    assert [(c[0], c[1]) for c in got["calls"]] == [("f", '{"a": "x"}')]
    opened = encode(codec, OPENED + '<｜DSML｜invoke name="f">\n')
    assert list(engine.prompts[-1][-len(opened) :]) == opened

    engine = Engine(codec, *outputs(thinking, other, other))
    exchange = asked(codec, "chat", thinking=thinking, choice=NAMED)
    engine.run(exchange)
    assert exchange.error is not None
    assert "asks for a call of f" in exchange.error.message


def test_a_call_in_the_reasoning_that_is_withheld_is_tried_again(codec: Codec) -> None:
    """The thought ended in a call of no tool: it is closed, and the block is opened."""
    engine = Engine(codec, "Hm\n\n" + block(call("rm")), RIGHT)
    exchange = asked(codec, "chat", thinking=True)
    got = streams.message("chat", engine.run(exchange))

    assert ([c[0] for c in got["calls"]], got["finish"]) == (["f"], "tool_calls")
    thought = "Hm\n\n" + block(call("rm"))
    assert engine.prompts[1] == (
        *exchange.prompt_ids,
        *encode(codec, f"{thought}</think>{OPENED}"),
    )


def test_a_call_that_is_delivered_is_not_tried_again(codec: Codec) -> None:
    """One good call among bad ones meets the demand."""
    engine = Engine(codec, WRONG.partition("</｜DSML｜tool_calls>")[0] + RIGHT)
    got = streams.message("chat", engine.run(asked(codec, "chat", thinking=False)))

    assert [c[0] for c in got["calls"]] == ["f"]


def test_length_and_an_empty_budget_end_it(codec: Codec) -> None:
    """No second try after length, nor where no token is left: the demand is reported."""
    engine = Engine(codec, WRONG)
    exchange = asked(codec, "chat", thinking=False)
    got = streams.message("chat", engine.run(exchange, finish="length"))
    assert (got["finish"], got["bathyal"]["unmet"]) == ("length", "tool_choice")

    quiet: dict[str, Any] = {"thinking": {"type": "disabled"}, "tool_choice": "required"}
    spent = len(encode(codec, WRONG))
    exchange = open_chat(codec, tools=TOOLS, stream=True, max_tokens=spent, **quiet)
    engine = Engine(codec, WRONG)
    got = streams.message("chat", engine.run(exchange))
    assert (got["finish"], got["bathyal"]["unmet"]) == ("stop", "tool_choice")
    assert "the tool is not declared" in got["content"]


def test_other_profiles_only_report(official: Codec) -> None:
    """`unmet_choice: report`: one generation, and the report names the demand."""
    engine = Engine(official, "</｜DSML｜tool_calls>")
    got = streams.message("chat", engine.run(asked(official, "chat", thinking=False)))

    assert (got["finish"], got["bathyal"]) == ("stop", {"unmet": "tool_choice"})


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("choice", [REQUIRED, NAMED])
def test_the_hosted_api_refuses(official: Codec, protocol: str, choice: dict[str, Any]) -> None:
    """Profile official: 400 that names thinking as the reason, alike in all protocols."""
    with pytest.raises(ClientError, match="Thinking mode does not support") as caught:
        open_any(official, protocol, tools=TOOLS, tool_choice=choice[protocol])

    assert (caught.value.status, caught.value.param) == (400, "tool_choice")


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_without_thinking_the_prompt_opens_the_block(codec: Codec, protocol: str) -> None:
    """`required` and `any` without thinking: one generation that starts inside the block."""
    quiet: dict[str, Any] = {"thinking": {"type": "disabled"}}
    if protocol == "responses":
        quiet = {"reasoning": {"effort": "none"}}
    exchange = open_any(
        codec, protocol, tools=TOOLS, tool_choice=REQUIRED[protocol], stream=True, **quiet
    )
    frames = drive(exchange, each(encode(codec, '<｜DSML｜invoke name="f">\n' + REST)))

    assert exchange.continuation() is None
    assert list(exchange.prompt_ids[-len(codec.opener(None)) :]) == codec.opener(None)
    assert [c[0] for c in streams.message(protocol, frames)["calls"]] == ["f"]


def test_other_requests_have_no_continuation(codec: Codec) -> None:
    """Free choice, no tools: the question is answered with None and changes nothing."""
    for fields in ({}, {"tools": TOOLS}, {"tools": TOOLS, "tool_choice": "none"}):
        exchange = open_chat(codec, stream=True, **fields)
        exchange.start(1, 0)
        exchange.receive(encode(codec, "R</think>Hi"))
        assert exchange.continuation() is None
        assert streams.message("chat", exchange.close("stop"))["finish"] == "stop"


def test_without_a_gate_nothing_is_opened(bare: Codec) -> None:
    """The bare codec has no second generation: it would not know whether a call was made."""
    exchange = open_chat(bare, tools=TOOLS, tool_choice="required")
    drive(exchange, each(encode(bare, "R</think>Hi")))

    assert exchange.continuation() is None
    assert orjson.loads(exchange.body())["choices"][0]["message"]["content"] == "Hi"


ALLOWED = {
    "type": "allowed_tools",
    "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "g"}}]},
}


def test_allowed_tools_are_the_only_ones(codec: Codec) -> None:
    """The prompt keeps all tools; a call of another is withheld, one of the allowed delivered."""
    assert (
        open_chat(codec, tools=TOOLS, tool_choice=ALLOWED).prompt_ids
        == open_chat(codec, tools=TOOLS).prompt_ids
    )
    exchange = open_chat(codec, tools=TOOLS, tool_choice=ALLOWED, stream=True)
    output = "R</think>" + block(call("f"), call("g"))
    got = streams.message("chat", drive(exchange, each(encode(codec, output))))

    assert [c[0] for c in got["calls"]] == ["g"]
    assert got["bathyal"]["withheld_calls"][0]["reason"] == "not_chosen"


def test_one_call_ends_the_generation(codec: Codec) -> None:
    """`parallel_tool_calls: false`: finished turns True with the first call, in every protocol."""
    single: dict[str, dict[str, Any]] = {
        "chat": {"parallel_tool_calls": False},
        "responses": {"parallel_tool_calls": False},
        "messages": {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
    }
    for protocol in PROTOCOLS:
        exchange = open_any(codec, protocol, tools=TOOLS, stream=True, **single[protocol])
        frames = exchange.start(1, 0)
        frames += exchange.receive(encode(codec, "R</think>" + block(call("f"), call("g"))))
        assert exchange.finished
        frames += exchange.close("stop")
        assert [c[0] for c in streams.message(protocol, frames)["calls"]] == ["f"]
