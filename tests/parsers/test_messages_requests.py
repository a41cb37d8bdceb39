"""Messages bodies: what is accepted, what it becomes, and what the error names."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from parsers import ClientError, Codec, ReasoningCache, error_body
from parsers.pairs import ORPHAN, UNANSWERED
from tests.parsers.support import encode

USER = {"role": "user", "content": "q"}
USE = {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": "x"}}
OTHER = {"type": "tool_use", "id": "t2", "name": "f", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": "r1"}
TOOL = {"name": "f", "input_schema": {"type": "object", "properties": {"a": {"type": "string"}}}}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
QUIET = {"type": "disabled"}


def turn(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def open_(codec: Codec, **fields: Any) -> Any:
    body = {"model": codec.model.name, "max_tokens": 50, "messages": [USER], **fields}
    return codec.open_exchange("messages", orjson.dumps(body), exchange_id="ID")


def prompt(codec: Codec, **fields: Any) -> str:
    ids = open_(codec, **fields).prompt_ids
    return b"".join(codec.vocabulary.bytes_of(id_) or b"" for id_ in ids).decode()


REFUSED: list[tuple[dict[str, Any], str | None, str]] = [
    ({"model": "other"}, "model", "expected one of"),
    ({"messages": []}, "messages", "non-empty"),
    ({"messages": [5]}, "messages[0]", "an object"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", "'tool'"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "got null"),
    ({"messages": [user(5)]}, "messages[0].content[0]", "an object"),
    ({"messages": [user({"text": "x"})]}, "messages[0].content[0].type", "a string"),
    ({"messages": [user({"type": "text"})]}, "messages[0].content[0].text", "a string"),
    ({"messages": [user(IMAGE)]}, "messages[0].content[0]", "no vision tower"),
    (
        {"messages": [USER, turn(USE), user({**RESULT, "content": [IMAGE]})], "tools": [TOOL]},
        "messages[2].content[0].content[0]",
        "no vision tower",
    ),
    ({"messages": [USER, turn({**USE, "input": "x"})]}, "messages[1].content[0].input", "object"),
    ({"messages": [USER, turn({**USE, "id": 5})]}, "messages[1].content[0].id", "a string"),
    (
        {"messages": [USER, turn(USE), user({**RESULT, "tool_use_id": None})]},
        "messages[2].content[0].tool_use_id",
        "a string",
    ),
    (
        {"messages": [USER, turn(USE), user({**RESULT, "content": 5})]},
        "messages[2].content[0].content",
        "array",
    ),
    ({"messages": [USER, turn(USE, OTHER), USER]}, "messages[1].content", "t1, t2"),
    ({"messages": [USER, turn(USE)]}, "messages[1].content", "unanswered: t1"),
    ({"messages": [user(RESULT)]}, "messages[0].content", "'t1'"),
    ({"messages": [USER, turn(USE), user(RESULT, RESULT)]}, "messages[2].content", "'t1'"),
    (
        {"messages": [user({"type": "server_tool_use", "id": "s", "name": "n", "input": {}})]},
        "messages[0].content[0].type",
        "server_tool_use",
    ),
    ({"system": 5}, "system", "array of text"),
    ({"system": [5]}, "system[0].text", "a text block"),
    ({"tools": [5]}, "tools[0]", "an object"),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema", "JSON Schema"),
    ({"tools": [{**TOOL, "name": "a b"}]}, "tools[0].name", "'a b'"),
    ({"tools": [TOOL, TOOL]}, "tools[1].name", "unique"),
    ({"tools": [{**TOOL, "type": 5}]}, "tools[0].type", "a string"),
    ({"tools": [{**TOOL, "input_schema": {"type": "foo"}}]}, "tools[0].input_schema", "foo"),
    ({"tools": [{"type": "computer_20250124", "name": "c"}]}, "tools[0].type", "computer_20250124"),
    ({"tool_choice": {"type": "any"}}, "tool_choice", "needs tools"),
    ({"tool_choice": {"type": "zz"}, "tools": [TOOL]}, "tool_choice.type", "'zz'"),
    ({"tool_choice": {"type": "tool", "name": {}}, "tools": [TOOL]}, "tool_choice.name", "object"),
    ({"tool_choice": {"type": "tool", "name": "zz"}, "tools": [TOOL]}, "tool_choice.name", "'zz'"),
    ({"thinking": {"type": "on"}}, "thinking.type", "'on'"),
    ({"output_config": {"effort": 5}}, "output_config.effort", "numeric"),
    ({"output_config": {"effort": "bogus"}}, "output_config.effort", "'bogus'"),
    ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type", "'xml'"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema", "null"),
    ({"stop_sequences": "x"}, "stop_sequences", "16"),
    ({"max_tokens": 0}, "max_tokens", "[1, "),
    ({"temperature": 3}, "temperature", "[0, 2]"),
    ({"thread": {"type": "create"}}, "thread", "whole history"),
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


def test_a_thread_is_refused_so_that_the_sdk_falls_back(codec: Codec) -> None:
    """The envelope carries the code that makes the SDK send the whole history."""
    with pytest.raises(ClientError) as caught:
        open_(codec, thread={"type": "create"})
    body = orjson.loads(error_body("messages", caught.value, request_id="r"))

    assert body["type"] == "error"
    assert body["request_id"] == "r"
    assert body["error"]["details"] == {
        "error_code": "thread_unsupported_request",
        "unsupported": ["thread"],
    }


STATUSES = [
    (401, "authentication_error"),
    (403, "permission_error"),
    (404, "not_found_error"),
    (413, "request_too_large"),
    (429, "rate_limit_error"),
    (500, "api_error"),
    (503, "api_error"),
    (504, "timeout_error"),
]


@pytest.mark.parametrize(("status", "kind"), STATUSES)
def test_error_types_fit_the_status(status: int, kind: str) -> None:
    """The words of the protocol."""
    body = orjson.loads(error_body("messages", ClientError("m", status=status)))

    assert body["error"] == {"type": kind, "message": "m"}


def test_a_custom_tool_is_a_client_tool(codec: Codec) -> None:
    """`type: custom` is the default: the same prompt as without a type."""
    assert prompt(codec, tools=[{**TOOL, "type": "custom"}]) == prompt(codec, tools=[TOOL])


def test_tools_the_client_runs_are_functions(codec: Codec) -> None:
    """bash, text editor and memory get schemas; what a server would run is left out and named."""
    exchange = open_(
        codec,
        tools=[
            {"type": "bash_20250124", "name": "bash"},
            {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"},
            {"type": "memory_20250818", "name": "memory"},
            {"type": "web_search_20250305", "name": "web_search", "max_uses": 3},
        ],
    )
    text = b"".join(codec.vocabulary.bytes_of(i) or b"" for i in exchange.prompt_ids).decode()

    assert exchange.ignored == ("tools[3].web_search_20250305",)
    for name in ("bash", "str_replace_based_edit_tool", "memory"):
        assert f'"name": "{name}"' in text
    assert "web_search" not in text


def test_a_schema_for_the_answer_reaches_prompt_and_check(codec: Codec) -> None:
    """output_config.format: the schema is in the prompt, and an answer that breaks it is an error."""
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    shape = {"format": {"type": "json_schema", "schema": schema}}
    exchange = open_(codec, output_config=shape)
    exchange.start(1, 0)
    exchange.receive(encode(codec, 'R</think>Sure: {"n": 1} ok'))
    exchange.close("stop")
    reply = orjson.loads(exchange.body())
    assert reply["content"][-1]["text"] == '{"n": 1}'
    assert '{"type":"integer"}' in prompt(codec, output_config=shape).replace(" ", "")

    wrong = open_(codec, output_config=shape)
    wrong.start(1, 0)
    wrong.receive(encode(codec, 'R</think>{"n": "x"}'))
    wrong.close("stop")
    with pytest.raises(ClientError, match="is not of type 'integer'"):
        wrong.body()


def test_thinking_blocks_of_any_maker_are_read(codec: Codec) -> None:
    """Any signature, or none, is accepted; redacted thinking is skipped."""
    fields: dict[str, Any] = {"tools": [TOOL]}
    plain = {"type": "thinking", "thinking": "T"}
    want = prompt(codec, messages=[USER, turn(plain, USE), user(RESULT)], **fields)
    for block in ({**plain, "signature": "Zm9v"}, {**plain, "signature": ""}):
        redacted = {"type": "redacted_thinking", "data": "x"}
        messages = [USER, turn(redacted, block, USE), user(RESULT)]
        assert prompt(codec, messages=messages, **fields) == want
    assert "<think>T</think>" in want
    assert prompt(codec, messages=[USER, turn({"type": "redacted_thinking", "data": "x"}), USER])


def test_documents_of_text_are_read(codec: Codec) -> None:
    """A text document and a search result are text to the model."""
    document = {"type": "document", "title": "T", "source": {"type": "text", "data": "body"}}
    found = {
        "type": "search_result",
        "source": "u",
        "title": "t",
        "content": [{"type": "text", "text": "z"}],
    }
    text = prompt(codec, messages=[user(document, found)])

    assert "T\nbody" in text
    assert "t\nu\nz" in text


def test_missing_reasoning_is_restored_by_call_id(codec: Codec) -> None:
    """A turn with tool use and without thinking gets back what it was thought with."""
    store = ReasoningCache()
    store.put(["t1"], "because")
    body = {
        "model": codec.model.name,
        "messages": [USER, turn(USE), user(RESULT)],
        "tools": [TOOL],
    }
    given = turn({"type": "thinking", "thinking": "because"}, USE)
    exchange = codec.open_exchange(
        "messages", orjson.dumps(body), exchange_id="ID", reasoning=store
    )

    assert list(exchange.prompt_ids) == list(
        open_(codec, messages=[USER, given, user(RESULT)], tools=[TOOL]).prompt_ids
    )


def test_results_out_of_place_are_mended(codec: Codec) -> None:
    """Moved behind their calls, made where there is none, shown where there is no call."""
    fields: dict[str, Any] = {"tools": [TOOL], "thinking": QUIET}
    late = prompt(codec, messages=[USER, turn(USE, OTHER), USER, user(RESULT)], **fields)
    assert late.index("r1") < late.index(UNANSWERED) < late.rindex("q")
    orphan = prompt(codec, messages=[user(RESULT, {"type": "text", "text": "on"})], **fields)
    assert f"{ORPHAN}\n\nr1" in orphan
    in_order = [USER, turn(USE), user(RESULT, {"type": "text", "text": "on"})]
    split = [USER, turn(USE), user({"type": "text", "text": "on"}), user(RESULT)]
    assert prompt(codec, messages=in_order, **fields) == prompt(codec, messages=split, **fields)


@pytest.mark.parametrize("blank", ["", " \n", [{"type": "text", "text": ""}]])
def test_an_empty_prefill_is_none(codec: Codec, blank: Any) -> None:
    """Nothing to continue: the prompt is that of the messages before it."""
    assert prompt(codec, messages=[USER, {"role": "assistant", "content": blank}]) == prompt(codec)


def test_a_prefill_while_thinking_follows_the_reasoning(codec: Codec) -> None:
    """The reply goes on as an answer; its text is not taken for reasoning."""
    exchange = open_(codec, messages=[USER, {"role": "assistant", "content": "Once"}])
    text = b"".join(codec.vocabulary.bytes_of(i) or b"" for i in exchange.prompt_ids).decode()
    assert text.endswith("<think></think>Once")
    exchange.start(1, 0)
    exchange.receive(encode(codec, " upon"))
    exchange.close("stop")
    assert orjson.loads(exchange.body())["content"] == [{"type": "text", "text": " upon"}]


def test_fields_without_effect_are_named(codec: Codec) -> None:
    """Any user id is fine; what is not heeded is listed."""
    exchange = open_(
        codec,
        metadata={"user_id": 'user_ab|account:{"x":1}'},
        top_k=5,
        context_management={"edits": []},
        service_tier="auto",
    )

    assert exchange.ignored == ("context_management", "metadata", "service_tier", "top_k")
