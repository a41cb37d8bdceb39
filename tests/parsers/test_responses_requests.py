"""Responses bodies: what is accepted, what it becomes, what a store keeps, what the error names."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from parsers import ClientError, Codec, Exchange, ReasoningCache
from parsers.pairs import ORPHAN, UNANSWERED
from tests.parsers import streams
from tests.parsers.support import drive, each, encode
from tests.parsers.test_gate import block, call, param

USER = {"role": "user", "content": "q"}
CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
OTHER = {**CALL, "call_id": "c2"}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "r1"}
OUTPUT2 = {**OUTPUT, "call_id": "c2", "output": "r2"}
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}
EXEC = {"type": "custom", "name": "exec", "description": "run"}
SEARCH = {"type": "tool_search", "execution": "client", "parameters": {"type": "object"}}
QUIET = {"effort": "none"}
SPACE = {"type": "namespace", "name": "n"}


def open_(codec: Codec, *, state: dict[str, Any] | None = None, **fields: Any) -> Exchange:
    body = {"model": codec.model.name, "input": "q", **fields}
    return codec.open_exchange("responses", orjson.dumps(body), exchange_id="ID", **state or {})


def prompt(codec: Codec, **fields: Any) -> str:
    ids = open_(codec, **fields).prompt_ids
    return b"".join(codec.vocabulary.bytes_of(id_) or b"" for id_ in ids).decode()


def run(codec: Codec, output: str, *, state: Any = None, **fields: Any) -> dict[str, Any]:
    """Play an output and return the whole response."""
    exchange = open_(codec, state=state, **fields)
    drive(exchange, each(encode(codec, output)))
    reply: dict[str, Any] = orjson.loads(exchange.body())
    return reply


REFUSED: list[tuple[dict[str, Any], str | None, str]] = [
    ({"model": None}, "model", "expected one of"),
    ({"input": 5}, "input", "array of items"),
    ({"input": []}, "input", "non-empty"),
    ({"input": [5]}, "input[0]", "an object"),
    ({"input": [{"type": "zz"}]}, "input[0].type", "'zz'"),
    ({"input": [{"type": "compaction", "encrypted_content": "x"}]}, "input[0].type", "compaction"),
    ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role", "'tool'"),
    ({"input": [{"role": "user", "content": 5}]}, "input[0].content", "array of parts"),
    ({"input": [{"role": "user", "content": [{"type": "zz"}]}]}, "input[0].content[0].type", "zz"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        "input[0].content[0]",
        "no vision tower",
    ),
    ({"input": [{**CALL, "arguments": {}}]}, "input[0].arguments", "a string"),
    ({"input": [{**CALL, "call_id": None}]}, "input[0].call_id", "a string"),
    ({"input": [USER, CALL]}, "input", "c1"),
    ({"input": [USER, OUTPUT]}, "input", "c1"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].id", "'x'"),
    ({"previous_response_id": "r"}, "previous_response_id", "keeps no responses"),
    ({"background": True}, "background", "keeps no responses"),
    ({"conversation": "c"}, "conversation", "not supported"),
    ({"prompt": {"id": "p"}}, "prompt", "not supported"),
    ({"input": [{"type": "reasoning", "content": True}]}, "input[0].content", "an array of parts"),
    ({"input": [{"type": "reasoning", "summary": 5}]}, "input[0].summary", "an array of parts"),
    ({"reasoning": {"summary": {}}}, "reasoning.summary", "an empty object"),
    ({"text": {"verbosity": "loud"}}, "text.verbosity", "'loud'"),
    ({"tools": [{"type": "namespace", "tools": []}]}, "tools[0].name", "a string"),
    ({"tools": [{"type": "namespace", "name": "n"}]}, "tools[0].tools", "an array of tools"),
    ({"tools": [{**SPACE, "tools": [5]}]}, "tools[0].tools[0]", "an object"),
    ({"tools": [{**SPACE, "tools": [{"name": "f"}]}]}, "tools[0].tools[0].type", "got null"),
    ({"tools": [{**SPACE, "tools": [{**TOOL, "name": 5}]}]}, "tools[0].tools[0].name", "number 5"),
    (
        {"tools": [TOOL], "tool_choice": {"type": "function", "name": {}}},
        "tool_choice.name",
        "empty",
    ),
    (
        {
            "tools": [TOOL],
            "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"name": {}}]},
        },
        "tool_choice.tools",
        "none of them",
    ),
    ({"tools": [5]}, "tools[0]", "an object"),
    ({"tools": [{"name": "f"}]}, "tools[0].type", "a string"),
    ({"tools": [{**TOOL, "name": "a b"}]}, "tools[0].name", "'a b'"),
    ({"tools": [TOOL, TOOL]}, "tools[1].name", "unique"),
    ({"tools": [{**TOOL, "parameters": {"type": "foo"}}]}, "tools[0].parameters", "foo"),
    ({"tools": [{"type": "mcp", "server_label": "x"}]}, "tools[0].type", "'mcp'"),
    ({"tool_choice": "required"}, "tool_choice", "needs tools"),
    ({"tool_choice": "any", "tools": [TOOL]}, "tool_choice", "'any'"),
    ({"tool_choice": {"type": "function", "name": "z"}, "tools": [TOOL]}, "tool_choice.name", "z"),
    ({"tool_choice": {"type": "mcp"}, "tools": [TOOL]}, "tool_choice.type", "'mcp'"),
    (
        {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}, "tools": [TOOL]},
        "tool_choice.tools",
        "non-empty",
    ),
    ({"reasoning": {"effort": 5}}, "reasoning.effort", "numeric"),
    ({"reasoning": {"summary": "long"}}, "reasoning.summary", "'long'"),
    ({"max_output_tokens": 0}, "max_output_tokens", "[1, "),
    ({"metadata": {"a": 1}}, "metadata", "object of strings"),
    ({"text": {"format": "json"}}, "text.format", "an object"),
    ({"text": {"format": {"type": "regex"}}}, "text.format.type", "'regex'"),
    ({"text": {"format": {"type": "json_object"}}}, "text.format", "'json'"),
    ({"text": {"format": {"type": "json_schema"}}}, "text.format.name", "a string, got null"),
    ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema", "null"),
    (
        {"text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "foo"}}}},
        "text.format.schema",
        "foo",
    ),
]


@pytest.mark.parametrize(
    ("fields", "param", "words"), REFUSED, ids=[str(r[0])[:60] for r in REFUSED]
)
def test_a_bad_field_is_refused_by_name(
    official: Codec, fields: dict[str, Any], param: str | None, words: str
) -> None:
    """400 with the path of the field, what was expected and what came (profile official)."""
    with pytest.raises(ClientError) as caught:
        open_(official, **fields)

    assert (caught.value.status, caught.value.param) == (400, param)
    assert words in caught.value.message


def test_a_text_is_a_users_message(codec: Codec) -> None:
    """`input` as a string gives the prompt of one user message, developer that of system."""
    assert prompt(codec) == prompt(codec, input=[USER])
    messages = [[{"role": role, "content": "d"}, USER] for role in ("developer", "system")]
    assert prompt(codec, input=messages[0]) == prompt(codec, input=messages[1])


def test_items_without_ids_and_odd_parts_are_read(codec: Codec) -> None:
    """Reasoning and messages without ids, refusals, parts of other protocols."""
    items = [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "ls"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "I"}]},
        CALL,
        OUTPUT,
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
        {"role": "user", "content": [{"type": "text", "text": "on"}]},
    ]
    text = prompt(codec, input=items, tools=[TOOL])

    assert "<think>I</think>" in text
    assert "no" in text


def test_a_summary_is_read_where_the_text_did_not_come_back(codec: Codec) -> None:
    """Our summaries are the text itself, so a client that keeps only them loses nothing."""
    summary = [{"type": "summary_text", "text": "because"}]
    items = [USER, {"type": "reasoning", "summary": summary}, CALL, OUTPUT]

    assert "<think>because</think>" in prompt(codec, input=items, tools=[TOOL])


def test_outputs_are_matched_by_call_id(codec: Codec, official: Codec) -> None:
    """A message between a call and its output goes behind; parallel calls stay one turn."""
    note = {"type": "message", "role": "developer", "content": "note"}
    thought = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "T"}]}
    fields: dict[str, Any] = {"tools": [TOOL]}
    for any_ in (codec, official):
        want = prompt(any_, input=[USER, thought, CALL, OUTPUT, note], **fields)
        assert prompt(any_, input=[USER, thought, CALL, note, OUTPUT], **fields) == want
        both = prompt(any_, input=[USER, thought, CALL, OTHER, OUTPUT, OUTPUT2], **fields)
        assert prompt(any_, input=[USER, thought, CALL, OTHER, note, OUTPUT, OUTPUT2], **fields)
        assert both.count("<｜DSML｜tool_calls>\n<｜DSML｜invoke") == 1 + 1  # the head shows one


def test_pairs_are_mended(codec: Codec) -> None:
    """A call without output gets one that says so, an output without a call becomes text."""
    assert UNANSWERED in prompt(codec, input=[USER, CALL, USER], tools=[TOOL])
    assert f"{ORPHAN}\n\nr1" in prompt(codec, input=[OUTPUT, USER], tools=[TOOL])


def test_traces_of_hosted_tools_are_skipped_and_named(codec: Codec) -> None:
    """What a server's own tools left in a history does not stop the session."""
    search = {"type": "web_search_call", "id": "ws", "status": "completed", "action": {"type": "x"}}
    exchange = open_(codec, input=[USER, search, USER])

    assert exchange.ignored == ("input[1]",)
    assert exchange.prompt_ids == open_(codec, input=[USER, USER]).prompt_ids


def test_missing_reasoning_is_restored_by_call_id(codec: Codec) -> None:
    """The reasoning goes to the head of its turn; what came back is left alone."""
    store = ReasoningCache()
    store.put(["c1"], "because")
    say = {"role": "assistant", "content": "Let me."}
    thought = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "because"}]}
    own = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "own"}]}
    fields: dict[str, Any] = {"tools": [TOOL]}
    want = open_(codec, input=[USER, thought, say, CALL, OUTPUT], **fields).prompt_ids
    state = {"reasoning": store}

    assert open_(codec, state=state, input=[USER, say, CALL, OUTPUT], **fields).prompt_ids == want
    sealed = {"type": "reasoning", "summary": [], "encrypted_content": "ID-0"}
    items = [USER, sealed, say, CALL, OUTPUT]
    assert open_(codec, state=state, input=items, **fields).prompt_ids == want
    kept = open_(codec, input=[USER, own, CALL, OUTPUT], **fields).prompt_ids
    assert open_(codec, state=state, input=[USER, own, CALL, OUTPUT], **fields).prompt_ids == kept


# Custom tools and searches


@pytest.mark.parametrize("stream", [True, False])
def test_custom_tools_of_any_name(codec: Codec, stream: bool) -> None:
    """Calls go out as custom_tool_call under their own names, beside functions of any name."""
    tools = [EXEC, {**EXEC, "name": "lua"}, {**TOOL, "name": "apply_patch"}, TOOL]
    output = "R</think>" + block(
        call("exec", param("input", 'a "b"\nc')),
        call("apply_patch"),
        call("lua", param("input", "x")),
        call("f"),
    )
    exchange = open_(codec, tools=tools, stream=stream)
    frames = drive(exchange, each(encode(codec, output)))
    items = (
        streams.events(frames)[-1]["response"]["output"]
        if stream
        else orjson.loads(exchange.body())["output"]
    )

    assert [(i["type"], i.get("name"), i.get("input", i.get("arguments"))) for i in items[1:]] == [
        ("custom_tool_call", "exec", 'a "b"\nc'),
        ("function_call", "apply_patch", "{}"),
        ("custom_tool_call", "lua", "x"),
        ("function_call", "f", "{}"),
    ]
    if stream:
        done = [
            e["item"] for e in streams.events(frames) if e["type"] == "response.output_item.done"
        ]
        assert done == items
        streams.message("responses", frames)  # the grammar


def test_a_grammar_is_told_in_words(codec: Codec) -> None:
    """It cannot be enforced; the model reads it."""
    shape = {"type": "grammar", "syntax": "lark", "definition": "start: /x/"}

    assert "start: /x/" in prompt(codec, tools=[{**EXEC, "format": shape}])


def test_the_reply_repeats_the_tools_as_sent(codec: Codec) -> None:
    """tools, tool_choice, metadata and parallel_tool_calls are those of the request."""
    choice = {
        "type": "allowed_tools",
        "mode": "auto",
        "tools": [{"type": "custom", "name": "exec"}],
    }
    reply = run(
        codec,
        "R</think>" + block(call("f"), call("exec", param("input", "x"))),
        tools=[TOOL, EXEC],
        tool_choice=choice,
        metadata={"a": "b"},
        parallel_tool_calls=False,
    )

    assert reply["tools"] == [TOOL, EXEC]
    assert reply["tool_choice"] == choice
    assert reply["metadata"] == {"a": "b"}
    assert reply["parallel_tool_calls"] is False
    assert [item.get("name") for item in reply["output"][1:]] == ["exec"]
    assert reply["bathyal"]["withheld_calls"][0]["reason"] == "not_chosen"


def test_namespaces_go_out_and_back(codec: Codec) -> None:
    """A tool of a namespace is declared, called and passes the gate under both its names."""
    space = {"type": "namespace", "name": "mcp", "description": "d", "tools": [TOOL]}
    reply = run(codec, "R</think>" + block(call("mcp__f")), tools=[space])

    (_, item) = reply["output"]
    assert (item["type"], item["name"], item["namespace"]) == ("function_call", "f", "mcp")


def test_a_clients_tool_search(codec: Codec) -> None:
    """The model sees a function; the call goes out as tool_search_call; what was found can be called."""
    output = "R</think>" + block(call("tool_search", param("q", "x")))
    reply = run(codec, output, tools=[SEARCH])
    item = reply["output"][1]
    assert (item["type"], item["arguments"]) == ("tool_search_call", {"q": "x"})

    found = {**TOOL, "name": "late", "defer_loading": True}
    back = {"type": "tool_search_output", "call_id": item["call_id"], "tools": [found]}
    history = [USER, reply["output"][0], item, {**back, "execution": "client"}]
    again = run(codec, "R</think>" + block(call("late")), tools=[SEARCH], input=history)
    assert [i.get("name") for i in again["output"][1:]] == ["late"]


# Summaries


def test_a_summary_is_written_when_asked(codec: Codec) -> None:
    """Parts and deltas beside the text, counted without a gap; the item holds it."""
    exchange = open_(codec, reasoning={"summary": "auto"}, stream=True)
    frames = drive(exchange, each(encode(codec, 'Say "sequence_number":9.</think>Hi')))
    stream = streams.events(frames)
    streams.message("responses", frames)
    kinds = [e["type"].removeprefix("response.") for e in stream]
    deltas = [e["delta"] for e in stream if e["type"].endswith("summary_text.delta")]

    assert "".join(deltas) == 'Say "sequence_number":9.'
    for kind in ("part.added", "text.done", "part.done"):
        assert kinds.count(f"reasoning_summary_{kind}") == 1
    item = stream[-1]["response"]["output"][0]
    assert item["summary"] == [{"type": "summary_text", "text": item["content"][0]["text"]}]


# State


def test_without_a_store_nothing_is_claimed(codec: Codec) -> None:
    """The reply says store: false even if the client asked for it."""
    assert run(codec, "R</think>Hi", store=True)["store"] is False


def test_a_conversation_goes_on_from_what_was_kept(codec: Codec) -> None:
    """previous_response_id gives the prompt of the same conversation sent in full."""
    state: dict[str, Any] = {"stateful": True}
    first = open_(codec, state=state, input="ls", tools=[TOOL], stream=True)
    drive(first, each(encode(codec, "I list.</think>Hm." + block(call("f")))))
    assert first.stored is not None
    assert first.stored.wanted
    kept = first.record()
    items = orjson.loads(kept)
    assert items["response"]["store"] is True
    call_id = items["output"][-1]["call_id"]
    result = {"type": "function_call_output", "call_id": call_id, "output": "a.txt"}

    second = open_(
        codec,
        state={**state, "history": kept},
        previous_response_id="ID",
        input=[result],
        tools=[TOOL],
    )
    whole = open_(codec, input=[*items["input"], *items["output"], result], tools=[TOOL])
    assert second.prompt_ids == whole.prompt_ids

    drive(second, each(encode(codec, "R</think>Done.")))
    reply = orjson.loads(second.body())
    assert reply["previous_response_id"] == "ID"
    third = orjson.loads(second.record())
    assert third["input"] == [*items["input"], *items["output"], result]
    assert third["output"] == reply["output"]


def test_an_unknown_response_is_named(codec: Codec) -> None:
    """With a store that does not have it: the code clients read."""
    with pytest.raises(ClientError, match="no such response") as caught:
        open_(codec, state={"stateful": True}, previous_response_id="r")

    assert caught.value.code == "previous_response_not_found"


def test_items_can_be_referred_to(codec: Codec) -> None:
    """item_reference is replaced by what is kept under its id."""
    kept = orjson.dumps({"type": "message", "role": "assistant", "content": "Hello"})
    items = [USER, {"type": "item_reference", "id": "msg_1"}, USER]
    got = open_(codec, state={"find_item": {"msg_1": kept}.get}, input=items)

    assert got.prompt_ids == open_(codec, input=[USER, orjson.loads(kept), USER]).prompt_ids


def test_background_is_the_stores_affair(codec: Codec) -> None:
    """With a store it is accepted, told to the caller and repeated in the reply."""
    exchange = open_(codec, state={"stateful": True}, background=True)
    drive(exchange, each(encode(codec, "R</think>Hi")))

    assert exchange.stored is not None
    assert exchange.stored.background
    assert orjson.loads(exchange.body())["background"] is True


def test_only_a_response_that_ended_is_recorded(codec: Codec) -> None:
    """No record before the end, after a fault, or of another protocol."""
    exchange = open_(codec, stream=True)
    exchange.start(1, 0)
    with pytest.raises(ValueError, match="no response"):
        exchange.record()
    exchange.fail("m")
    with pytest.raises(ValueError, match="no response"):
        exchange.record()
    chat = codec.open_exchange(
        "chat", orjson.dumps({"model": codec.model.name, "messages": [USER]}), exchange_id="ID"
    )
    drive(chat, [encode(codec, "R</think>Hi")])
    chat.body()
    with pytest.raises(ValueError, match="no response"):
        chat.record()


def test_effort_none_is_no_thinking(codec: Codec) -> None:
    """reasoning.effort none: the answer starts at once."""
    assert run(codec, "Hi", reasoning=QUIET)["output"][0]["type"] == "message"
