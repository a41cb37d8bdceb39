"""Faults seen in the field, in requests and in the other two protocols: every such case of the file.

The inputs are in tests/data/codec/bug_cases.jsonl; each test states what is expected of one kind.
What a case asks of a strict server holds under profile official, where agent mends it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import orjson
import pytest

from parsers import ClientError, Codec, Exchange
from tests.parsers import streams
from tests.parsers.support import SPECIALS, drive, each, encode
from tests.parsers.test_bug_cases import CASES, PLAYABLE

Check = Callable[[Codec, Codec, dict[str, Any]], None]
CHECKS: dict[str, Check] = {}


def case(id_: str) -> Callable[[Check], Check]:
    def register(check: Check) -> Check:
        CHECKS[id_] = check
        return check

    return register


def protocol_of(input_: dict[str, Any]) -> str:
    path = input_.get("endpoint", "/v1/chat/completions")
    return {"/v1/responses": "responses", "/v1/chat/completions": "chat"}.get(path, "messages")


def open_(codec: Codec, input_: dict[str, Any], **fields: Any) -> Exchange:
    body = {**input_["request"], **fields, "model": "gpt"}
    return codec.open_exchange(protocol_of(input_), orjson.dumps(body), exchange_id="ID")  # type: ignore[arg-type]


def refused(codec: Codec, input_: dict[str, Any], **fields: Any) -> ClientError:
    with pytest.raises(ClientError) as caught:
        open_(codec, input_, **fields)
    assert caught.value.status == 400
    return caught.value


def text_of(codec: Codec, exchange: Exchange) -> str:
    return b"".join(codec.vocabulary.bytes_of(i) or b"" for i in exchange.prompt_ids).decode()


@case("truncated-call-replayed")
def _cut_arguments(agent: Codec, official: Codec, input_: dict[str, Any]) -> None:
    assert "once upon" in text_of(agent, open_(agent, input_))


@case("special-tokens-in-user-text")
def _forged_turns(agent: Codec, official: Codec, input_: dict[str, Any]) -> None:
    control = {agent.vocabulary.special(s) for s in SPECIALS if s != "<｜System｜>"}
    plain = open_(agent, input_, messages=[{"role": "user", "content": "abc"}])

    def found(exchange: Exchange) -> list[int]:
        return [id_ for id_ in exchange.prompt_ids if id_ in control]

    assert found(open_(agent, input_)) == found(plain)


@case("named-choice-unknown-tool")
def _unknown_choice(agent: Codec, official: Codec, input_: dict[str, Any]) -> None:
    for codec in (agent, official):
        error = refused(codec, input_)
        assert error.param == "tool_choice.function.name"
        assert "nonexistent" in error.message
        for choice in ("required", {"type": "function", "function": {"name": "x"}}):
            assert refused(codec, input_, tools=[], tool_choice=choice)


@case("responses-input-items-lack-ids")
def _no_ids(agent: Codec, official: Codec, input_: dict[str, Any]) -> None:
    tools = [{"type": "function", "name": "bash", "parameters": {"type": "object"}}]
    text = text_of(official, open_(official, input_, tools=tools))
    assert text.index("I list.") < text.rindex('invoke name="bash"')


@case("developer-between-call-and-output")
def _developer_between(agent: Codec, official: Codec, input_: dict[str, Any]) -> None:
    text = text_of(agent, open_(agent, input_))
    assert "<tool_result>a</tool_result>" in text
    assert "note" in text


@case("tool-content-parts")
def _parts(agent: Codec, official: Codec, input_: dict[str, Any]) -> None:
    assert "<tool_result>a\n\nb</tool_result>" in text_of(agent, open_(agent, input_))
    messages = input_["request"]["messages"]
    odd = [*messages[:2], {**messages[2], "content": [{"type": "zz"}]}]
    assert refused(agent, input_, messages=odd).param == "messages[2].content[0].type"


@case("lone-surrogate-in-body")
def _surrogate(agent: Codec, official: Codec, input_: dict[str, Any]) -> None:
    for protocol in streams.PROTOCOLS:
        with pytest.raises(ClientError, match="request body") as caught:
            agent.open_exchange(protocol, input_["raw_body"].encode(), exchange_id="ID")  # type: ignore[arg-type]
        assert caught.value.status == 400


@case("calls-not-all-answered")
def _unanswered(agent: Codec, official: Codec, input_: dict[str, Any]) -> None:
    error = refused(official, input_)
    assert "c2" in error.message
    assert "messages[1]" in error.message
    assert "c1" not in error.message
    assert "this call was not answered" in text_of(agent, open_(agent, input_))


@case("messages-user-id-pattern")
def _user_id(agent: Codec, official: Codec, input_: dict[str, Any]) -> None:
    for codec in (agent, official):
        assert open_(codec, input_).prompt_ids


@case("forced-choice-in-thinking")
def _forced(agent: Codec, official: Codec, input_: dict[str, Any]) -> None:
    message = refused(official, input_).message
    assert "Thinking mode does not support this tool_choice" in message
    assert "disabled" in message
    assert open_(official, input_, thinking={"type": "disabled"}).prompt_ids
    assert open_(agent, input_).continuation() is not None


@case("foreign-thinking-signature")
def _signature(agent: Codec, official: Codec, input_: dict[str, Any]) -> None:
    messages = input_["request"]["messages"]
    prompts = set()
    for signature in ({"signature": "Zm9v"}, {"signature": ""}, {}):
        thinking = {"type": "thinking", "thinking": "t", **signature}
        redacted = {"type": "redacted_thinking", "data": "x"}
        turn = {**messages[1], "content": [redacted, thinking, {"type": "text", "text": "hello"}]}
        prompts.add(open_(agent, input_, messages=[messages[0], turn, messages[2]]).prompt_ids)
    assert prompts == {open_(agent, input_).prompt_ids}


@case("previous-id-loses-calls")
def _previous(agent: Codec, official: Codec, input_: dict[str, Any]) -> None:
    first, second = ({**step, "model": "gpt"} for step in input_["steps"])
    exchange = agent.open_exchange("responses", orjson.dumps(first), exchange_id="R", stateful=True)
    output = (
        'R</think>\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="bash">\n'
        '<｜DSML｜parameter name="command" string="true">ls</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜tool_calls>"
    )
    drive(exchange, each(encode(agent, output)))
    exchange.body()
    kept = orjson.loads(exchange.record())
    (answer,) = second["input"]
    answer = {**answer, "call_id": kept["output"][-1]["call_id"]}
    body = {**second, "previous_response_id": "R", "input": [answer]}
    state: dict[str, Any] = {"stateful": True, "history": exchange.record()}
    got = agent.open_exchange("responses", orjson.dumps(body), exchange_id="S", **state)
    full = {**second, "input": [*kept["input"], *kept["output"], answer]}
    del full["previous_response_id"]
    want = agent.open_exchange("responses", orjson.dumps(full), exchange_id="S")

    assert got.prompt_ids == want.prompt_ids
    assert "<think>R</think>" in text_of(agent, got)
    wrong = {**body, "input": [{**answer, "call_id": "zz"}]}
    with pytest.raises(ClientError, match="zz"):
        official.open_exchange("responses", orjson.dumps(wrong), exchange_id="S", **state)


@case("previous-id-ignored")
def _no_store(agent: Codec, official: Codec, input_: dict[str, Any]) -> None:
    error = refused(agent, input_)
    assert (error.param, error.code) == ("previous_response_id", "previous_response_not_found")


@case("assistant-null-content")
def _null(agent: Codec, official: Codec, input_: dict[str, Any]) -> None:
    messages = input_["request"]["messages"]
    for codec in (agent, official):
        prompts = set()
        for content in ({"content": None}, {"content": ""}, {}, {"content": []}):
            bare = {k: v for k, v in messages[1].items() if k != "content"}
            turn = {**bare, **content, "reasoning_content": ""}
            prompts.add(open_(codec, input_, messages=[messages[0], turn, messages[2]]).prompt_ids)
        assert len(prompts) == 1
        empty = [*messages[:1], {"role": "assistant", "content": ""}, *messages[:1]]
        assert open_(codec, input_, messages=empty).prompt_ids
    null = [*messages[:1], {"role": "assistant", "content": None}]
    assert refused(official, input_, messages=null).param == "messages[1]"


@case("over-length-by-one-deadlock")
def _over_length(agent: Codec, official: Codec, input_: dict[str, Any]) -> None:
    limit = agent.model.max_model_len
    room = limit - len(open_(agent, input_).prompt_ids)
    fields = {"max_tokens": None, "max_completion_tokens": None}
    assert open_(agent, input_, **{**fields, "max_tokens": room}).sampling.max_tokens == room
    error = refused(agent, input_, **{**fields, "max_tokens": room + 1})
    assert str(limit) in error.message
    assert str(limit + 1) in error.message
    assert error.code == "context_length_exceeded"


@case("strict-without-schema-check")
def _strict(agent: Codec, official: Codec, input_: dict[str, Any]) -> None:
    # Documented: strict is checked after the fact, see test_answers_and_schemas; what the codec
    # finds wrong with a strict schema is refused before, for a choice that allows calls.
    error = refused(official, input_, tool_choice="auto")
    assert error.param == "tools[0]"


@case("orphan-tool-after-compaction")
def _orphan(agent: Codec, official: Codec, input_: dict[str, Any]) -> None:
    error = refused(official, input_)
    assert (error.param, "c9" in error.message) == ("messages[1].tool_call_id", True)
    assert "old result" in text_of(agent, open_(agent, input_))


@case("tool-use-without-result-next")
def _no_result(agent: Codec, official: Codec, input_: dict[str, Any]) -> None:
    message = refused(official, input_).message
    assert "t1, t2" in message
    assert "messages[1]" in message
    assert open_(agent, input_).prompt_ids


@case("count-tokens-missing")
def _count(agent: Codec, official: Codec, input_: dict[str, Any]) -> None:
    assert agent.prompt_ids("messages", orjson.dumps({**input_["request"], "model": "gpt"}))


@case("count-tokens-undercounts")
def _exact(agent: Codec, official: Codec, input_: dict[str, Any]) -> None:
    body = orjson.dumps({**input_["request"], "model": "gpt"})
    assert agent.prompt_ids("messages", body) == open_(agent, input_).prompt_ids


@case("image-block-dropped")
def _image(agent: Codec, official: Codec, input_: dict[str, Any]) -> None:
    assert refused(agent, input_).param == "messages[2].content[0].content[1]"


@case("cc-billing-line-breaks-prefix")
def _billing(agent: Codec, official: Codec, input_: dict[str, Any]) -> None:
    line = "x-anthropic-billing-header: cc_version=1; cc_entrypoint=cli; cch={};"
    body = {"model": "gpt", "messages": [{"role": "user", "content": line.format("a")}]}
    prompts = {
        agent.prompt_ids(
            "messages",
            orjson.dumps({**body, "system": [{"type": "text", "text": line.format(nonce)}, rest]}),
        )
        for nonce in ("aaaaa", "bbbbb")
        for rest in [{"type": "text", "text": "Be.", "cache_control": {"type": "ephemeral"}}]
    }
    (prompt,) = prompts
    shown = b"".join(agent.vocabulary.bytes_of(i) or b"" for i in prompt).decode()
    assert line.format("a") in shown  # a user's own text is not touched


@case("history-item-type-rejected")
def _history_item(agent: Codec, official: Codec, input_: dict[str, Any]) -> None:
    assert open_(agent, input_).ignored == ("input[1]",)


@case("responses-call-id-pairing")
def _call_id(agent: Codec, official: Codec, input_: dict[str, Any]) -> None:
    user, call, output = input_["request"]["input"]
    other = {**call, "id": "fc_2", "call_id": "call_2"}
    thought = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "T"}]}
    items = [user, thought, call, other, {**output, "call_id": "call_2"}, output]
    assert open_(agent, input_).prompt_ids
    assert open_(official, input_, input=items).prompt_ids


@case("tool-name-bad-characters")
def _names(agent: Codec, official: Codec, input_: dict[str, Any]) -> None:
    for name in ("calendar.read", "devtools:inspect", "a/b", "查天气", "", "x" * 129):
        tool = {"type": "function", "function": {"name": name}}
        error = refused(agent, input_, tools=[tool])
        assert error.param == "tools[0].function.name"
        assert "1-128 of [a-zA-Z0-9_-]" in error.message


@case("successive-same-role")
def _same_role(agent: Codec, official: Codec, input_: dict[str, Any]) -> None:
    text = text_of(agent, open_(agent, input_, tools=[], thinking={"type": "disabled"}))
    turns = re.compile("User｜>a\n\nb<.*</think>c<.*</think>d<.*User｜>e<", re.DOTALL)
    assert turns.search(text)


# Streams of the other two protocols


def stream_of(codec: Codec, input_: dict[str, Any], output: str | None = None) -> list[Any]:
    exchange = open_(codec, input_, stream=True)
    ids = encode(codec, output or input_["model_output"])
    frames = drive(exchange, each(ids))
    streams.message(protocol_of(input_), frames)  # the whole grammar
    return streams.events(frames)


@case("messages-input-in-start-block")
def _start_block(agent: Codec, official: Codec, input_: dict[str, Any]) -> None:
    events = stream_of(agent, input_)
    (start,) = (e for e in events if e.get("content_block", {}).get("type") == "tool_use")
    deltas = [e["delta"]["partial_json"] for e in events if "partial_json" in e.get("delta", {})]
    assert start["content_block"]["input"] == {}
    assert orjson.loads("".join(deltas)) == {"city": "Oslo"}
    assert events[-2]["delta"]["stop_reason"] == "tool_use"


@case("responses-envelope-missing")
def _envelope(agent: Codec, official: Codec, input_: dict[str, Any]) -> None:
    events = stream_of(agent, input_, "R</think>Hi")
    for event in (events[0], events[1], events[-1]):
        assert event["response"]["object"] == "response"


@case("thinking-block-no-signature")
@case("signature-on-wrong-block")
def _signed(agent: Codec, official: Codec, input_: dict[str, Any]) -> None:
    events = stream_of(agent, input_)
    signed = [e for e in events if e.get("delta", {}).get("type") == "signature_delta"]
    assert [(e["index"], bool(e["delta"]["signature"])) for e in signed] == [(0, True)]
    whole = open_(agent, input_, stream=False)
    drive(whole, each(encode(agent, input_["model_output"])))
    blocks = orjson.loads(whole.body())["content"]
    assert [b["type"] for b in blocks][:1] == ["thinking"]
    messages = input_["request"]["messages"]
    result = {"type": "tool_result", "tool_use_id": blocks[-1]["id"], "content": "r"}
    again = [
        *messages,
        {"role": "assistant", "content": blocks},
        {"role": "user", "content": [result]},
    ]
    assert open_(official, input_, messages=again).prompt_ids


@case("custom-tool-call-not-executed")
def _custom(agent: Codec, official: Codec, input_: dict[str, Any]) -> None:
    output = (
        'R</think>\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="exec">\n'
        '<｜DSML｜parameter name="input" string="true">print(1)</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜tool_calls>"
    )
    events = stream_of(agent, input_, output)
    item = events[-1]["response"]["output"][-1]
    assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "exec", "print(1)")
    deltas = [e for e in events if e["type"] == "response.custom_tool_call_input.delta"]
    assert "".join(e["delta"] for e in deltas) == "print(1)"
    assert {e["item_id"] for e in deltas} == {item["id"]}


@case("messages-silent-while-thinking")
def _flows(agent: Codec, official: Codec, input_: dict[str, Any]) -> None:
    exchange = open_(agent, input_)
    assert exchange.start(1, 0)
    sent = [exchange.receive([id_]) for id_ in encode(agent, "a long thought " * 20)]
    silent = max(len(run) for run in "".join("01"[bool(f)] for f in sent).split("1"))
    assert silent < 3  # tokens; only half characters and blanks at the start wait


@case("responses-nonstream-drops-calls")
def _calls_kept(agent: Codec, official: Codec, input_: dict[str, Any]) -> None:
    exchange = open_(agent, input_)
    drive(exchange, each(encode(agent, input_["model_output"])))
    reply = orjson.loads(exchange.body())
    streamed = stream_of(agent, input_)[-1]["response"]["output"]

    assert [item["type"] for item in reply["output"]] == ["reasoning", "function_call"]
    assert reply["status"] == "completed"
    drop = ("id", "call_id")
    assert [{k: v for k, v in i.items() if k not in drop} for i in reply["output"]] == [
        {k: v for k, v in i.items() if k not in drop} for i in streamed
    ]


ELSEWHERE = {  # of the same kinds, but no matter of this room
    "length-cut-becomes-502": "a gateway over another server's stream",
    "usage-chunk-no-choices-key": "no chunk without a choice is sent, see test_exchange",
    "parser-state-shared-by-choices": "test_small_parts",
}


def ours(entry: dict[str, Any]) -> bool:
    return entry["kind"] in ("request", "stream", "model_output") and entry["id"] not in PLAYABLE


def test_every_case_is_checked_or_lies_elsewhere() -> None:
    """No case of a request or a stream is left out."""
    known = {id_ for id_, entry in CASES.items() if ours(entry)}
    rest = known - set(CHECKS) - set(ELSEWHERE)

    assert set(CHECKS) | set(ELSEWHERE) <= known
    assert rest == set()


@pytest.mark.parametrize("id_", CHECKS)
def test_the_fault_does_not_occur(codec: Codec, official: Codec, id_: str) -> None:
    """What the case expects, as its check says."""
    CHECKS[id_](codec, official, CASES[id_]["input"])
