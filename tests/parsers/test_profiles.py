"""What each profile does where the three differ, rule by rule; and the table for the docs."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import orjson
import pytest

from parsers import PROFILES, ClientError, Codec, ReasoningCache, error_body
from parsers.policy import GatePolicy
from parsers.profiles import markdown
from parsers.rules import Profile
from tests.parsers import streams
from tests.parsers.streams import open_any
from tests.parsers.support import drive, each, encode, function, open_chat
from tests.parsers.test_gate import block, call

USER = {"role": "user", "content": "q"}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TURN = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "x"}
TOOLS = [function("f")]
QUIET = {"type": "disabled"}


@pytest.fixture
def codecs(official: Codec, sglang: Codec, codec: Codec) -> dict[str, Codec]:
    return {"official": official, "sglang": sglang, "agent": codec}


def outcome(codec: Codec, protocol: str = "chat", **body: Any) -> Any:
    """The prompt of a body, or the error's param."""
    try:
        return open_any(codec, protocol, **body).prompt_ids
    except ClientError as error:
        return error.param if error.status == 400 else error.status


def test_the_table_names_every_rule() -> None:
    """One row per rule, one column per profile, no rule without a meaning."""
    rows = markdown().splitlines()
    rules = [f.name for f in fields(Profile) if f.name not in ("name", "gate")]
    rules += [f"gate.{f.name}" for f in fields(GatePolicy)]

    assert [row.split("|")[1].strip() for row in rows[2:]] == [f"`{rule}`" for rule in rules]
    assert all(len(row.split("|")) == 7 for row in rows)
    assert all(len(row.split("|")[2]) > 15 for row in rows[2:])


def test_every_rule_differs_somewhere() -> None:
    """A rule that all profiles agree on is no rule of a profile."""
    for rule in fields(Profile):
        values = {str(getattr(profile, rule.name)) for profile in PROFILES.values()}
        assert len(values) > 1, rule.name


def test_thinking_by_default(codecs: dict[str, Codec]) -> None:
    """On, but off under sglang."""
    prompts = {name: outcome(codec) for name, codec in codecs.items()}
    off = outcome(codecs["agent"], thinking=QUIET)

    assert prompts["official"] == prompts["agent"] != off
    assert prompts["sglang"] == off


def test_the_bodys_thinking_switch(codecs: dict[str, Codec]) -> None:
    """Decides, but under sglang it has no effect and is reported."""
    on = {"type": "enabled"}
    assert outcome(codecs["sglang"], thinking=on) == outcome(codecs["sglang"])
    assert open_chat(codecs["sglang"], thinking=on).ignored == ("thinking",)
    assert outcome(codecs["official"], thinking=QUIET) == outcome(codecs["sglang"])


@pytest.mark.parametrize("name", ["thinking", "enable_thinking"])
def test_chat_template_kwargs(codecs: dict[str, Codec], name: str) -> None:
    """Switch thinking under sglang and agent; official reports them."""
    on, off = {name: True}, {name: False}
    assert outcome(codecs["agent"], chat_template_kwargs=off) == outcome(codecs["sglang"])
    assert outcome(codecs["sglang"], chat_template_kwargs=on) == outcome(codecs["agent"])
    exchange = open_chat(codecs["official"], chat_template_kwargs=off)
    assert exchange.ignored == ("chat_template_kwargs",)
    assert exchange.prompt_ids == outcome(codecs["official"])
    odd = open_chat(codecs["agent"], chat_template_kwargs={"zz": 1, name: True})
    assert odd.ignored == ("chat_template_kwargs.zz",)
    assert outcome(codecs["agent"], chat_template_kwargs={name: "yes"}).endswith(".thinking")


def test_an_effort_in_the_kwargs(codecs: dict[str, Codec]) -> None:
    """A tier there is a tier; the body's own field goes first."""
    low = outcome(codecs["agent"], reasoning_effort="low")
    kwargs = {"chat_template_kwargs": {"reasoning_effort": "low"}}
    assert outcome(codecs["agent"], **kwargs) == low
    assert outcome(codecs["agent"], **kwargs, reasoning_effort="max") != low
    assert outcome(codecs["agent"], chat_template_kwargs={"reasoning_effort": 50}) == (
        "chat_template_kwargs.reasoning_effort"
    )


NUMBERS: list[tuple[dict[str, Any], int | None]] = [
    ({"reasoning_effort": 0.3}, 30),
    ({"reasoning_effort": "0.3"}, 30),
    ({"reasoning_effort": 0.0}, 1),
    ({"reasoning_effort": 0.005}, 1),
    ({"reasoning_effort": 0.99}, 99),
    ({"reasoning_effort": 1.0}, None),
    ({"reasoning_effort": 50}, None),
    ({"reasoning_effort": "30"}, None),
    ({"reasoning_effort": True}, None),
    ({"chat_template_kwargs": {"reasoning_effort": 50}}, 50),
    ({"chat_template_kwargs": {"reasoning_effort": 100}}, 100),
    ({"chat_template_kwargs": {"reasoning_effort": 0}}, None),
    ({"chat_template_kwargs": {"reasoning_effort": 101}}, None),
    ({"chat_template_kwargs": {"reasoning_effort": 0.5}}, None),
]


@pytest.mark.parametrize(("body", "number"), NUMBERS, ids=[str(n[0]) for n in NUMBERS])
@pytest.mark.parametrize("name", ["sglang", "agent"])
def test_numeric_effort_on_v41(v41: Codec, name: str, body: Any, number: int | None) -> None:
    """The number stands in the prompt's line as SGLang 0.5.23 takes it; others are refused."""
    codec = Codec(v41.model, v41._tokenizer, v41.vocabulary, PROFILES[name])
    messages = [{"role": "system", "content": "Reasoning Effort: 75"}, USER]
    if number is None:
        assert "reasoning_effort" in outcome(codec, messages=messages, **body)
        return
    text = bytes(
        byte
        for id_ in outcome(codec, messages=messages, **body)
        for byte in codec.vocabulary.bytes_of(id_) or b""
    ).decode()
    tier = open_chat(codec, messages=messages, reasoning_effort="high").prompt_ids
    plain = bytes(b for i in tier for b in codec.vocabulary.bytes_of(i) or b"").decode()

    assert text == plain.replace("Reasoning Effort: 75", f"Reasoning Effort: {number}", 1)


def test_official_and_v4_take_no_number(codecs: dict[str, Codec], v41: Codec) -> None:
    """400 that names the field."""
    strict = Codec(v41.model, v41._tokenizer, v41.vocabulary, PROFILES["official"])
    for codec in (strict, *codecs.values()):
        assert outcome(codec, reasoning_effort=0.3) == "reasoning_effort"
        assert outcome(codec, reasoning_effort=50) == "reasoning_effort"


def test_missing_reasoning(codecs: dict[str, Codec]) -> None:
    """400 with message and field, filled empty, or restored by the call's id."""
    messages = [USER, TURN, RESULT]
    given = [USER, {**TURN, "reasoning_content": "because"}, RESULT]
    empty = [USER, {**TURN, "reasoning_content": ""}, RESULT]
    on = {"chat_template_kwargs": {"thinking": True}, "tools": TOOLS}
    assert outcome(codecs["official"], messages=messages, **on) == "messages[1].reasoning_content"
    filled = outcome(codecs["official"], messages=empty, **on)
    assert outcome(codecs["sglang"], messages=messages, **on) == filled
    assert outcome(codecs["agent"], messages=messages, **on) == filled

    store = ReasoningCache()
    store.put(["c1"], "because")
    body = {"model": codecs["agent"].model.name, "messages": messages, "tools": TOOLS}
    for name, want in [("sglang", messages), ("agent", given)]:
        codec = codecs[name]
        exchange = codec.open_exchange(
            "chat", orjson.dumps({**body, **on}), exchange_id="ID", reasoning=store
        )
        assert exchange.prompt_ids == outcome(codec, messages=want, **on)


def test_sampling(codecs: dict[str, Codec]) -> None:
    """Whose temperature and top_p count while thinking."""
    got = {}
    for name, codec in codecs.items():
        kwargs = {"chat_template_kwargs": {"thinking": True}}
        sampling = open_chat(codec, temperature=0.5, top_p=0.3, **kwargs).sampling
        got[name] = (sampling.temperature, sampling.top_p)

    assert got == {"official": (1.0, 1.0), "sglang": (0.5, 0.3), "agent": (0.5, 0.3)}


def test_choices_are_capped(codecs: dict[str, Codec]) -> None:
    """One, or eight."""
    for name, most in [("official", 1), ("sglang", 8), ("agent", 8)]:
        assert len(open_chat(codecs[name], n=most).choices) == most
        assert outcome(codecs[name], n=most + 1) == "n"


def test_a_trailing_assistant_message(codecs: dict[str, Codec]) -> None:
    """A finished turn, or a user's turn under sglang."""
    once = [USER, {"role": "assistant", "content": "Once"}]
    assert outcome(codecs["official"], messages=once) == outcome(codecs["agent"], messages=once)
    as_user = [USER, {"role": "user", "content": "Once"}]
    assert outcome(codecs["sglang"], messages=once) == outcome(codecs["sglang"], messages=as_user)


def test_a_prefill_in_messages(codecs: dict[str, Codec]) -> None:
    """Continued; official renders a finished turn."""
    once = [USER, {"role": "assistant", "content": "Once"}]
    end = encode(codecs["agent"], "</think>Once")
    for name, continued in [("official", False), ("sglang", True), ("agent", True)]:
        prompt = outcome(codecs[name], "messages", messages=once, max_tokens=5, thinking=QUIET)
        assert (list(prompt[-len(end) :]) == end) == continued


PAIRS = [
    [USER, TURN],
    [USER, TURN, USER],
    [USER, RESULT, USER],
    [USER, TURN, RESULT, RESULT],
    [USER, TURN, {"role": "system", "content": "s"}, RESULT],
]


@pytest.mark.parametrize("messages", PAIRS)
def test_calls_and_results(codecs: dict[str, Codec], messages: list[Any]) -> None:
    """Refused, or mended; what is in order is not touched."""
    filled = [{**m, "reasoning_content": ""} if m is TURN else m for m in messages]
    for name in ("official", "sglang"):
        assert isinstance(outcome(codecs[name], messages=filled, tools=TOOLS), str)
    assert isinstance(outcome(codecs["agent"], messages=messages, tools=TOOLS), tuple)


def test_lenient_messages(codecs: dict[str, Codec]) -> None:
    """Null content and an object as arguments."""
    null = [{"role": "user", "content": None}]
    empty = [{"role": "user", "content": ""}]
    object_ = {**CALL, "function": {"name": "f", "arguments": {"a": 1}}}
    text = {**CALL, "function": {"name": "f", "arguments": '{"a":1}'}}
    for name in ("sglang", "agent"):
        codec = codecs[name]
        assert outcome(codec, messages=null) == outcome(codec, messages=empty)
        assert outcome(
            codec, messages=[USER, {**TURN, "tool_calls": [object_]}, RESULT]
        ) == outcome(codec, messages=[USER, {**TURN, "tool_calls": [text]}, RESULT])
    assert outcome(codecs["official"], messages=null) == "messages[0].content"
    assert outcome(
        codecs["official"], messages=[USER, {**TURN, "tool_calls": [object_]}, RESULT]
    ).endswith("function.arguments")


HOSTED = [
    ("messages", {"type": "web_search_20250305", "name": "web_search"}),
    ("responses", {"type": "code_interpreter", "container": {"type": "auto"}}),
]


@pytest.mark.parametrize(("protocol", "tool"), HOSTED)
def test_hosted_tools(codecs: dict[str, Codec], protocol: str, tool: dict[str, Any]) -> None:
    """400 that names the tool, or left out and named among what was ignored."""
    body = {**streams.body_for(protocol, tools=TOOLS), "model": codecs["agent"].model.name}
    raw = orjson.dumps({**body, "tools": [*body["tools"], tool]})
    for name in ("sglang", "agent"):
        exchange = codecs[name].open_exchange(protocol, raw, exchange_id="ID")  # type: ignore[arg-type]
        assert exchange.ignored == (f"tools[1].{tool['type']}",)
        assert exchange.prompt_ids == outcome(codecs[name], protocol, tools=TOOLS)
    with pytest.raises(ClientError, match=tool["type"]) as caught:
        codecs["official"].open_exchange(protocol, raw, exchange_id="ID")  # type: ignore[arg-type]
    assert caught.value.param == "tools[1].type"


BILLING = "x-anthropic-billing-header: v=1; n={};"


def test_the_billing_line(codecs: dict[str, Codec]) -> None:
    """Kept out of the prompt under agent, text behind it kept; else as the codec has it."""

    def system(n: int, *, is_list: bool) -> Any:
        text = f"{BILLING.format(n)}\nBe brief."
        return [{"type": "text", "text": text}] if is_list else text

    for name in codecs:
        for is_list in (False, True):
            one, two, none = (
                outcome(codecs[name], "messages", max_tokens=5, system=text)
                for text in (system(1, is_list=is_list), system(2, is_list=is_list), "Be brief.")
            )
            assert (one == two) == (is_list or name == "agent")
            assert (one == none) == (name == "agent")


def test_a_failed_tool_is_told(codecs: dict[str, Codec]) -> None:
    """is_error reaches the prompt under agent."""
    use = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
    for name, told in [("official", False), ("sglang", False), ("agent", True)]:
        prompts = [
            outcome(
                codecs[name],
                "messages",
                tools=TOOLS,
                max_tokens=5,
                messages=[
                    USER,
                    {"role": "assistant", "content": [use]},
                    {
                        "role": "user",
                        "content": [
                            {
                                "type": "tool_result",
                                "tool_use_id": "t",
                                "content": "x",
                                "is_error": failed,
                            }
                        ],
                    },
                ],
            )
            for failed in (False, True)
        ]
        assert (prompts[0] != prompts[1]) == told


def test_error_bodies(codecs: dict[str, Codec]) -> None:
    """Nested everywhere but for chat under sglang; a stream's error likewise."""
    error = ClientError("m", param="p")
    assert orjson.loads(error_body("chat", error, flat=True)) == {
        "object": "error",
        "message": "m",
        "type": "BadRequestError",
        "param": "p",
        "code": 400,
    }
    assert error_body("responses", error, flat=True) == error_body("responses", error)
    assert orjson.loads(error_body("messages", error, flat=True, request_id="r")) == {
        "type": "error",
        "error": {"type": "invalid_request_error", "message": "m"},
        "request_id": "r",
    }
    for name, code in [
        ("official", "internal_error"),
        ("agent", "internal_error"),
        ("sglang", 500),
    ]:
        exchange = open_chat(codecs[name], stream=True)
        exchange.start(1, 0)
        (failed, _done) = exchange.fail("m")
        assert orjson.loads(failed[6:])["error"]["code"] == code


def test_undeclared_tools(codecs: dict[str, Codec]) -> None:
    """Passed and flagged, or withheld and reported."""
    for name, field in [
        ("official", "undeclared_calls"),
        ("sglang", "undeclared_calls"),
        ("agent", "withheld_calls"),
    ]:
        exchange = open_chat(codecs[name], tools=TOOLS, stream=True)
        start = "" if name == "sglang" else "R</think>"
        frames = drive(exchange, each(encode(codecs[name], start + block(call("rm")))))
        got = streams.message("chat", frames)
        assert list(got["bathyal"]) == [field]
        assert bool(got["calls"]) == (field == "undeclared_calls")


def test_a_profile_is_a_value(codec: Codec) -> None:
    """Any rule can be set by itself; nothing asks for a profile's name."""
    mixed = replace(PROFILES["official"], name="mine", forced_while_thinking="serve", max_n=2)
    changed = Codec(codec.model, codec._tokenizer, codec.vocabulary, mixed)

    assert len(open_chat(changed, tools=TOOLS, tool_choice="required", n=2).choices) == 2
