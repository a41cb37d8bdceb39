"""Forced calls while thinking: the model thinks freely, then its call is opened for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson
import pytest

from parsers import ClientError, Codec, Exchange
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
            if (more := exchange.continuation()) is not None:
                frames += self._generate(exchange, more.prompt_ids, more.max_tokens, size)
            assert exchange.continuation() is None
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
