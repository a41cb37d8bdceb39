"""Slips in histories that clients were seen to send: mended for agents, refused by name elsewhere.

A mended history gives the very prompt of the history that was meant. The bodies are composed
here; the thread beside each shows that clients send such ones.
"""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given, strategies as st

from parsers import ClientError, Codec, Exchange
from parsers.errors import Protocol
from parsers.pairs import ORPHAN, REPEAT, Mark, distinct

Turns = list[dict[str, Any]]
ASK: dict[str, Any] = {"role": "user", "content": "q"}


def chat(call: dict[str, Any], **turn: Any) -> Turns:
    calling = {"role": "assistant", "content": None, "tool_calls": [call], **turn}
    return [ASK, calling, {"role": "tool", "tool_call_id": "c", "content": "r"}]


def call(id_: str = "c", **function: Any) -> dict[str, Any]:
    return {
        "id": id_,
        "type": "function",
        "function": {"name": "f", "arguments": "{}", **function},
    }


def use(id_: str = "c", **fields: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": id_, "name": "f", "input": {}, **fields}


def result(id_: str = "c", content: Any = "r") -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": id_, "content": content}


def messages(calling: Turns, answer: Turns) -> Turns:
    return [ASK, {"role": "assistant", "content": calling}, {"role": "user", "content": answer}]


def made(id_: str = "c", **fields: Any) -> dict[str, Any]:
    return {"type": "function_call", "call_id": id_, "name": "f", "arguments": "{}", **fields}


def output(id_: str = "c", text: Any = "r") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": id_, "output": text}


def without(field: str, item: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in item.items() if key != field}


TEXT = {"type": "text", "text": "and?"}
THOUGHT = {"type": "thinking", "thinking": "", "signature": "s"}
DONE: dict[str, Any] = {"type": "message", "role": "assistant", "content": "ok"}
PARAMETERS = {"type": "object", "properties": {}}
TOOLS: dict[str, list[dict[str, Any]]] = {
    "chat": [{"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}],
    "messages": [{"name": "f", "input_schema": PARAMETERS}],
    "responses": [{"type": "function", "name": "f", "parameters": PARAMETERS}],
}

SPACE = {"type": "namespace", "name": "n", "description": None}
NULLS = {"type": "auto", "name": None, "disable_parallel_tool_use": None}

# Protocol, what was sent, what was meant, and the path that is refused in profile official.
SLIPS: dict[str, tuple[Protocol, Turns, Turns, str]] = {
    # zed-industries/zed#26144, labring/FastGPT#4754: a tool without arguments
    "chat: arguments null": (
        "chat",
        chat(call(arguments=None)),
        chat(call()),
        "messages[1].tool_calls[0].function.arguments",
    ),
    # vercel/ai#6687: nor with a word for none
    "chat: arguments empty": ("chat", chat(call(arguments=" \n")), chat(call()), ""),
    "chat: arguments of null": ("chat", chat(call(arguments="null")), chat(call()), ""),
    "responses: arguments empty": (
        "responses",
        [ASK, made(arguments=""), output()],
        [ASK, made(), output()],
        "",
    ),
    # router-for-me/CLIProxyAPI#4997, QwenLM/qwen-code#8163: recorded twice
    "chat: a result twice": (
        "chat",
        [*chat(call()), {"role": "tool", "tool_call_id": "c", "content": "r"}],
        chat(call()),
        "messages[3].tool_call_id",
    ),
    "messages: a result twice": (
        "messages",
        messages([use()], [result(), result(), TEXT]),
        messages([use()], [result(), TEXT]),
        "messages[2].content",
    ),
    "responses: a result twice": (
        "responses",
        [ASK, made(), output(), DONE, output(), ASK],
        [ASK, made(), output(), DONE, ASK],
        "input",
    ),
    # stacklok/mecatl#1465: what was said behind the calls of a turn
    "messages: text behind a call": (
        "messages",
        messages([use("a"), {"type": "text", "text": "t"}, use("b")], [result("a"), result("b")]),
        messages([{"type": "text", "text": "t"}, use("a"), use("b")], [result("a"), result("b")]),
        "",
    ),
    # can1357/oh-my-pi#4781: where a server went over to another model
    "messages: a mark of the server's": (
        "messages",
        messages([{"type": "fallback", "from": {"model": "a"}}, use()], [result()]),
        messages([use()], [result()]),
        "messages[1].content[0].type",
    ),
    # openai/codex#42376: a client's note in the form of an output
    "responses: an output of no call": (
        "responses",
        [without("call_id", output(text="note")), ASK],
        [
            {
                "role": "user",
                "content": [{"type": "input_text", "text": t} for t in (ORPHAN, "note")],
            },
            ASK,
        ],
        "input[0].call_id",
    ),
    "chat: no type": (
        "chat",
        chat(without("type", call())),
        chat(call()),
        "messages[1].tool_calls[0].type",
    ),
    # can1357/oh-my-pi#2055, openclaw/openclaw#47136
    "chat: an id twice in a turn": (
        "chat",
        [
            ASK,
            {"role": "assistant", "content": None, "tool_calls": [call(), call()]},
            {"role": "tool", "tool_call_id": "c", "content": "1"},
            {"role": "tool", "tool_call_id": "c", "content": "2"},
        ],
        [
            ASK,
            {"role": "assistant", "content": None, "tool_calls": [call("a"), call("b")]},
            {"role": "tool", "tool_call_id": "a", "content": "1"},
            {"role": "tool", "tool_call_id": "b", "content": "2"},
        ],
        "messages[1].tool_calls[1].id",
    ),
    # OpenCoworkAI/open-cowork#231, NousResearch/hermes-agent#21986
    "chat: a thought among the parts": (
        "chat",
        chat(
            call(), content=[{"type": "thinking", "thinking": "R"}, {"type": "text", "text": "t"}]
        ),
        chat(call(), content="t", reasoning_content="R"),
        "messages[1].content[0].type",
    ),
    # mistralai/mistral-common#242: parts of the other protocol
    "chat: parts of Responses": (
        "chat",
        chat(call(), content=[{"type": "output_text", "text": "t"}]),
        chat(call(), content="t"),
        "messages[1].content[0].type",
    ),
    # the form of OpenAI's own SDK
    "chat: a nested file": (
        "chat",
        [{"role": "user", "content": [{"type": "file", "file": {"file_data": "data:,x"}}]}],
        [{"role": "user", "content": [{"type": "file", "file_data": "data:,x"}]}],
        "",
    ),
    "chat: a refusal": (
        "chat",
        [ASK, {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}, ASK],
        [ASK, {"role": "assistant", "content": "no"}, ASK],
        "messages[1].content[0].type",
    ),
    # anthropics/claude-code#6695, langchain-ai/langsmith-sdk#2435
    "messages: input as text": (
        "messages",
        messages([use(input='{"a": 1}')], [result()]),
        messages([use(input={"a": 1})], [result()]),
        "messages[1].content[0].input",
    ),
    "messages: input empty": (
        "messages",
        messages([use(input="")], [result()]),
        messages([use()], [result()]),
        "messages[1].content[0].input",
    ),
    "messages: input missing": (
        "messages",
        messages([without("input", use())], [result()]),
        messages([use()], [result()]),
        "messages[1].content[0].input",
    ),
    "messages: a text before the result": (
        "messages",
        messages([use()], [TEXT, result()]),
        messages([use()], [result(), TEXT]),
        "messages[2].content",
    ),
    # anthropics/claude-code#21094
    "messages: an id twice in a turn": (
        "messages",
        messages([use(), use()], [result(content="1"), result(content="2")]),
        messages([use("a"), use("b")], [result("a", "1"), result("b", "2")]),
        "messages[1].content",
    ),
    "messages: a thought without its text": (
        "messages",
        messages([without("thinking", THOUGHT), use()], [result()]),
        messages([THOUGHT, use()], [result()]),
        "messages[1].content[0].thinking",
    ),
    # anthropics/claude-code#59812: what an interrupted turn leaves
    "messages: an empty turn": (
        "messages",
        [ASK, {"role": "assistant", "content": []}, ASK],
        [ASK, {"role": "assistant", "content": ""}, ASK],
        "messages[1]",
    ),
    # NousResearch/hermes-agent#111443, fw-ai/fireconnect#16
    "responses: an id in every turn": (
        "responses",
        [ASK, made(), output(text="1"), DONE, ASK, made(), output(text="2")],
        [ASK, made("a"), output("a", "1"), DONE, ASK, made("b"), output("b", "2")],
        "input",
    ),
    "responses: an id twice in a turn": (
        "responses",
        [ASK, made(), made(), output(text="1"), output(text="2")],
        [ASK, made("a"), made("b"), output("a", "1"), output("b", "2")],
        "input",
    ),
    # ogx-ai/ogx#4978
    "responses: an answer as a result": (
        "responses",
        [ASK, made(), output(text=[{"type": "output_text", "text": "r"}])],
        [ASK, made(), output(text=[{"type": "input_text", "text": "r"}])],
        "",
    ),
    # farion1231/cc-switch#5100
    "responses: arguments as an object": (
        "responses",
        [ASK, made(arguments={"a": 1}), output()],
        [ASK, made(arguments='{"a":1}'), output()],
        "input[1].arguments",
    ),
    "responses: a result of nothing": (
        "responses",
        [ASK, made(), output(text=None)],
        [ASK, made(), output(text="")],
        "input[2].output",
    ),
    "responses: a thought as a string": (
        "responses",
        [ASK, {"type": "reasoning", "summary": [], "content": "R"}, made(), output()],
        [
            ASK,
            {
                "type": "reasoning",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": "R"}],
            },
            made(),
            output(),
        ],
        "",
    ),
    "responses: null content": (
        "responses",
        [ASK, {**DONE, "content": None}, ASK],
        [ASK, {**DONE, "content": ""}, ASK],
        "input[1].content",
    ),
    # Edward-lyz/codex-mixin#10, openai/codex#27423: a client's own notes
    "responses: an unknown item": (
        "responses",
        [ASK, {"type": "ghost_snapshot", "ghost_commit": {"id": "x"}}, made(), output()],
        [ASK, made(), output()],
        "input[1].type",
    ),
}


def prompt(codec: Codec, protocol: Protocol, turns: Turns) -> tuple[int, ...]:
    fields = {"input": turns} if protocol == "responses" else {"messages": turns}
    body = {"model": codec.model.name, "tools": TOOLS[protocol], **fields}
    return codec.open_exchange(protocol, orjson.dumps(body), exchange_id="ID").prompt_ids


@pytest.mark.parametrize("slip", SLIPS)
def test_a_slip_is_mended(codec: Codec, slip: str) -> None:
    """Profile agent: the prompt is that of the history that was meant."""
    protocol, sent, meant, _ = SLIPS[slip]
    assert prompt(codec, protocol, sent) == prompt(codec, protocol, meant)


@pytest.mark.parametrize("slip", [slip for slip, row in SLIPS.items() if row[3]])
def test_a_slip_is_refused_by_name(official: Codec, slip: str) -> None:
    """Profile official: 400 that says where."""
    protocol, sent, _, path = SLIPS[slip]
    with pytest.raises(ClientError) as caught:
        prompt(official, protocol, sent)
    assert (caught.value.status, caught.value.param) == (400, path)


@pytest.mark.parametrize(
    ("protocol", "turns", "path"),
    [
        ("chat", chat(call(), reasoning_content=["x"]), "messages[1].reasoning_content"),
        (
            "chat",
            [ASK, {"role": "assistant", "content": "a", "prefix": "yes"}],
            "messages[1].prefix",
        ),
        ("chat", chat({**call(), "type": "tool"}), "messages[1].tool_calls[0].type"),
        ("messages", messages([{"type": "zz"}], [TEXT]), "messages[1].content[0].type"),
        ("responses", [ASK, {"type": "compaction_trigger"}], "input[1].type"),
        ("responses", [ASK, {"type": "compaction", "encrypted_content": "x"}], "input[1].type"),
        ("responses", [ASK, {"type": "zz", "content": "text"}], "input[1].type"),
        ("responses", [{"type": "zz"}], "input"),
    ],
)
def test_what_cannot_be_guessed_is_refused_by_name(
    codec: Codec, protocol: Protocol, turns: Turns, path: str
) -> None:
    """Profile agent too: no context is dropped in silence, and the path is told."""
    with pytest.raises(ClientError) as caught:
        prompt(codec, protocol, turns)
    assert (caught.value.status, caught.value.param) == (400, path)


NESTED = {"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}
FLAT = {"type": "function", "name": "f", "parameters": PARAMETERS}
CUSTOM = {"name": "c", "description": "d"}
# BerriAI/litellm#34029, askalf/dario#1204: protocol, what was sent, what was meant, refused path.
FORMS: dict[str, tuple[Protocol, dict[str, Any], dict[str, Any], str]] = {
    "chat: flat tools": (
        "chat",
        {"tools": [FLAT, {"type": "custom", **CUSTOM}]},
        {"tools": [NESTED, {"type": "custom", "custom": CUSTOM}]},
        "tools[0].function",
    ),
    "chat: a flat choice": (
        "chat",
        {"tools": [NESTED], "tool_choice": {"type": "function", "name": "f"}},
        {"tools": [NESTED], "tool_choice": {"type": "function", "function": {"name": "f"}}},
        "tool_choice",
    ),
    "chat: a flat choice of several": (
        "chat",
        {
            "tools": [NESTED],
            "tool_choice": {
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [{"type": "function", "name": "f"}],
            },
        },
        {
            "tools": [NESTED],
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "auto",
                    "tools": [{"type": "function", "function": {"name": "f"}}],
                },
            },
        },
        "tool_choice.allowed_tools",
    ),
    "responses: nested tools": (
        "responses",
        {"tools": [NESTED, {"type": "custom", "custom": CUSTOM}]},
        {"tools": [FLAT, {"type": "custom", **CUSTOM}]},
        "tools[0].name",
    ),
    "responses: a nested choice": (
        "responses",
        {"tools": [FLAT], "tool_choice": {"type": "function", "function": {"name": "f"}}},
        {"tools": [FLAT], "tool_choice": {"type": "function", "name": "f"}},
        "tool_choice.name",
    ),
    "responses: a nested choice of several": (
        "responses",
        {
            "tools": [FLAT],
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "required", "tools": [NESTED]},
            },
        },
        {
            "tools": [FLAT],
            "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [FLAT]},
        },
        "tool_choice.mode",
    ),
    "responses: a nested tool of a namespace": (
        "responses",
        {"tools": [{**SPACE, "tools": [NESTED]}]},
        {"tools": [{**SPACE, "tools": [FLAT]}]},
        "tools[0].tools[0].name",
    ),
    "messages: functions": (
        "messages",
        {"tools": [NESTED]},
        {"tools": [{"name": "f", "input_schema": PARAMETERS}]},
        "tools[0].type",
    ),
    "messages: a flat function without parameters": (
        "messages",
        {"tools": [{"type": "function", "name": "f"}]},
        {"tools": [{"name": "f", "input_schema": PARAMETERS}]},
        "tools[0].type",
    ),
}


def opened(codec: Codec, protocol: Protocol, fields: dict[str, Any]) -> Exchange:
    name = "input" if protocol == "responses" else "messages"
    body = {"model": codec.model.name, name: [ASK], **fields}
    return codec.open_exchange(protocol, orjson.dumps(body), exchange_id="ID")


@pytest.mark.parametrize("form", FORMS)
def test_a_tool_in_the_form_of_another_protocol(codec: Codec, official: Codec, form: str) -> None:
    """Profile agent reads it, and leaves none out; official says where it is wrong."""
    protocol, sent, meant, path = FORMS[form]
    got, want = (opened(codec, protocol, fields) for fields in (sent, meant))

    assert got.prompt_ids == want.prompt_ids
    assert got.ignored == ()
    with pytest.raises(ClientError) as caught:
        opened(official, protocol, sent)
    assert (caught.value.status, caught.value.param) == (400, path)


@pytest.mark.parametrize(
    ("protocol", "fields"),
    [
        ("responses", {"text": {"format": None, "verbosity": None}}),
        ("messages", {"tools": TOOLS["messages"], "tool_choice": NULLS}),
        (
            "responses",
            {"tools": [{**SPACE, "tools": [{**FLAT, "description": None, "strict": None}]}]},
        ),
        ("responses", {"reasoning": {"summary": None, "generate_summary": "auto"}}),
    ],
)
def test_null_is_not_given_inside_an_object_either(
    codec: Codec, protocol: Protocol, fields: dict[str, Any]
) -> None:
    """Serializers write what was left open as null (sgl-project/sglang#36194)."""
    assert opened(codec, protocol, fields).prompt_ids


@pytest.mark.parametrize("protocol", ["chat", "messages", "responses"])
def test_a_second_result_that_differs_is_shown_as_such(codec: Codec, protocol: Protocol) -> None:
    """It is not said to be that of a call which is gone, and the first one stays the result."""
    turns: dict[str, Turns] = {
        "chat": [*chat(call()), {"role": "tool", "tool_call_id": "c", "content": "r2"}],
        "messages": messages([use()], [result(), result(content="r2")]),
        "responses": [ASK, made(), output(), output(text="r2")],
    }
    ids = prompt(codec, protocol, turns[protocol])
    text = b"".join(codec.vocabulary.bytes_of(id_) or b"" for id_ in ids).decode()

    assert "<tool_result>r</tool_result>" in text
    assert text.index(REPEAT) < text.index("r2")
    assert ORPHAN not in text


@pytest.mark.parametrize(
    "kept",
    [
        {"reasoning": "R"},
        {"thinking_blocks": [{"type": "thinking", "thinking": "R", "signature": ""}]},
        {"reasoning_details": [{"type": "reasoning.text", "text": "R"}]},
    ],
)
def test_reasoning_comes_back_under_other_names(codec: Codec, kept: dict[str, Any]) -> None:
    """Profile agent: what clients of other servers keep the thought of a turn under is read."""
    assert prompt(codec, "chat", chat(call(), **kept)) == prompt(
        codec, "chat", chat(call(), reasoning_content="R")
    )


def test_instructions_alone_are_a_request(codec: Codec, official: Codec) -> None:
    """Responses: no input, as with the codec; an empty one is refused."""
    for one in (codec, official):
        body = {"model": one.model.name, "instructions": "Say hello."}
        assert one.open_exchange("responses", orjson.dumps(body), exchange_id="ID").prompt_ids
        with pytest.raises(ClientError, match="input") as caught:
            one.open_exchange("responses", orjson.dumps({**body, "input": []}), exchange_id="ID")
        assert caught.value.param == "input"


@given(
    ids=st.lists(
        st.lists(st.sampled_from(["a", "b", "a_2", "c"]), max_size=4).flatmap(
            lambda turn: st.tuples(st.just(turn), st.permutations(turn))
        ),
        max_size=5,
    )
)
def test_distinct_ids(ids: list[tuple[list[str], list[str]]]) -> None:
    """No id is given twice, first ones stay, and calls of one id get their results in order."""
    marks: list[Mark] = []
    for calls, results in ids:
        marks += [("call", id_) for id_ in calls]
        marks += [("result", id_) for id_ in results]
    new = distinct(marks)
    made_ = [id_ for id_, (kind, _) in zip(new, marks, strict=True) if kind == "call"]
    assert len(set(made_)) == len(made_)
    assert sorted(made_) == sorted(
        id_ for id_, (kind, _) in zip(new, marks, strict=True) if kind == "result"
    )
    at = 0
    for calls, results in ids:
        begun, ended = new[at : at + len(calls)], new[at + len(calls) : at + 2 * len(calls)]
        at += 2 * len(calls)
        for old in set(calls):
            mine = [n for n, o in zip(begun, calls, strict=True) if o == old]
            assert mine == [n for n, o in zip(ended, results, strict=True) if o == old]
    if marks:
        assert new[0] == marks[0][1]
