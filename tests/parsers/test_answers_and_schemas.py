"""JSON answers and schemas of calls: what is delivered, what is judged, and what it may cost."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given, strategies as st

from parsers import Action, ClientError, Codec, GatePolicy, Hold
from parsers.schemas import MAX_BYTES, MAX_DEPTH, check_size, violation
from parsers.toolset import TYPES, types_of
from tests.parsers import streams
from tests.parsers.support import drive, each, encode, function, open_chat, talk, under
from tests.parsers.test_gate import block, call, param

ANY_JSON = {"type": "json_object"}
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer"}},
    "required": ["n"],
    "additionalProperties": False,
}


def wanted(schema: Any = None, *, strict: bool = False) -> dict[str, Any]:
    schema = SCHEMA if schema is None else schema
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": strict}}


def ask(codec: Codec, output: str, shape: Any = ANY_JSON, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "json"}]
    return talk(codec, f"R</think>{output}", messages=messages, response_format=shape, **fields)


ANSWERS = [
    ('{"n": 1}', '{"n": 1}', None),
    ('Sure:\n```json\n{"n": 1}\n```', '{"n": 1}', None),
    ('```json\n{"n": 1}\n```\n', '{"n": 1}', None),
    ('{"n": 1} and more', '{"n": 1}', "lost"),
    ('a "quoted { brace" {"n": 1}', '{ brace" {"n": 1}', "unmet"),
    ('{"s": "}{\\"]", "n": [1, {"a": 2}]}x', '{"s": "}{\\"]", "n": [1, {"a": 2}]}', "lost"),
    ("I cannot.", "I cannot.", "unmet"),
    ("[1, 2]", "[1, 2]", "unmet"),
    ('{"n": 1', '{"n": 1', "unmet"),
    ('{"n": NaN}', '{"n": NaN}', "unmet"),
    ("", "", "unmet"),
]


@pytest.mark.parametrize(("output", "content", "note"), ANSWERS, ids=[a[0][:20] for a in ANSWERS])
def test_a_json_answer_is_the_value_alone(
    codec: Codec, output: str, content: str, note: str | None
) -> None:
    """Fences and prose around it are left out; no blanks of the codec; what is wrong is reported."""
    got = ask(codec, output)

    assert got["content"] == content
    report = got["bathyal"] or {}
    assert ("lost_text" in report) == (note == "lost" or output.startswith(("Sure", "a ")))
    assert (report.get("unmet") == "response_format") == (note == "unmet")


@given(size=st.integers(1, 9), case=st.sampled_from(ANSWERS))
def test_any_split_gives_the_same_answer(codec: Codec, size: int, case: Any) -> None:
    """Token by token or in steps: the same text and the same report."""
    fields: dict[str, Any] = {
        "messages": [{"role": "user", "content": "json"}],
        "response_format": ANY_JSON,
        "stream": True,
    }
    ids = encode(codec, f"R</think>{case[0]}")
    one, other = (
        streams.message("chat", drive(open_chat(codec, **fields), each(ids, n))) for n in (1, size)
    )

    assert one == other


def test_an_answer_is_judged_by_its_schema(codec: Codec) -> None:
    """A violation is reported; of a strict schema it is an error; cut by length it is neither."""
    assert ask(codec, '{"n": 1}', wanted())["bathyal"] is None
    loose = ask(codec, '{"n": "x"}', wanted())
    assert loose["bathyal"]["unmet"] == "response_format"
    assert loose["bathyal"]["schema_violations"][0]["message"].startswith("$.n: 'x' is not of type")

    fields: dict[str, Any] = {"response_format": wanted(strict=True), "stream": True}
    exchange = open_chat(codec, **fields)
    frames = drive(exchange, each(encode(codec, 'R</think>{"n": "x"}')))
    assert exchange.error is not None
    assert exchange.error.code == "invalid_reply"
    assert b'"finish_reason":"stop"' not in b"".join(frames)
    cut = open_chat(codec, **fields)
    frames = drive(cut, each(encode(codec, 'R</think>{"n": ')), "length")
    assert streams.message("chat", frames)["finish"] == "length"


@pytest.mark.parametrize(
    ("schema", "output", "content"),
    [
        ({"type": "array"}, "So [1]", "[1]"),
        ({"type": "string"}, '"x" ', '"x" '),
        ({"anyOf": [{"type": "array"}, {"type": "object"}]}, 'x {"a": [1]} y', '{"a": [1]}'),
    ],
)
def test_where_the_value_begins_depends_on_the_schema(
    codec: Codec, schema: Any, output: str, content: str
) -> None:
    """Objects and arrays are found by their bracket; another value is the whole answer."""
    got = ask(codec, output, wanted(schema))

    assert got["content"] == content
    assert got["bathyal"] is None or "unmet" not in got["bathyal"]


def test_json_with_tools_may_be_a_call(codec: Codec) -> None:
    """A call takes the answer's place and is not judged; prose before it is shown."""
    tools = [function("f")]
    got = ask(codec, "Hm." + block(call("f")), tools=tools)
    assert ([c[0] for c in got["calls"]], got["content"]) == (["f"], "Hm.")
    assert got["bathyal"] is None
    plain = ask(codec, 'So: {"n": 1}', tools=tools)
    assert plain["content"] == '{"n": 1}'


# Calls

CHECKED = [{"type": "function", "function": {"name": "s", "parameters": SCHEMA}}]


def test_a_violation_is_reported_with_the_call(codec: Codec) -> None:
    """An agent can mend it and is told; the call is delivered."""
    got = talk(codec, "R</think>" + block(call("s", param("n", "x"))), tools=CHECKED)

    assert [c[1] for c in got["calls"]] == ['{"n": "x"}']
    assert got["bathyal"]["schema_violations"] == [
        {"name": "s", "message": "$.n: 'x' is not of type 'integer'"}
    ]


def test_a_call_held_back_is_only_released_when_valid(codec: Codec) -> None:
    """`hold: call` withholds what breaks its schema, whole and before anything is sent."""
    held = under(codec, GatePolicy(hold=Hold.CALL))
    got = talk(held, "R</think>" + block(call("s", param("n", "x"))), tools=CHECKED)
    assert got["calls"] == []
    assert got["bathyal"]["withheld_calls"][0]["reason"] == "schema_violation"
    good = talk(held, "R</think>" + block(call("s", param("n", "5", "false"))), tools=CHECKED)
    assert [c[1] for c in good["calls"]] == ['{"n": 5}']


def test_violations_can_be_errors_or_not(codec: Codec) -> None:
    """Both rules of the policy, for loose and for strict tools."""
    strict = [{**CHECKED[0], "function": {**CHECKED[0]["function"], "strict": True}}]
    output = encode(codec, "R</think>" + block(call("s")))
    for tools, policy, fails in [
        (CHECKED, GatePolicy(), False),
        (CHECKED, GatePolicy(schema_violation=Action.ERROR), True),
        (strict, GatePolicy(), True),
        (strict, GatePolicy(strict_violation=Action.PASS), False),
    ]:
        exchange = open_chat(under(codec, policy), tools=tools)
        drive(exchange, each(output))
        assert (exchange.error is not None) == fails


def test_a_cut_call_is_not_judged(codec: Codec) -> None:
    """Under length the arguments are a beginning; that is no violation."""
    cut = "R</think>" + block(call("s", param("n", "x"))).split("</｜DSML｜invoke")[0]
    got = talk(codec, cut, "length", tools=CHECKED)

    assert got["bathyal"] is None


# Bounds


def test_references_stay_in_the_document() -> None:
    """A local one is followed; a foreign one gives no verdict and no request."""
    local = {"$defs": {"n": {"type": "integer"}}, "properties": {"a": {"$ref": "#/$defs/n"}}}
    assert violation(local, {"a": "x"}) == "$.a: 'x' is not of type 'integer'"
    assert violation({"$ref": "http://127.0.0.1:9/schema"}, 1) is None
    assert violation({"$ref": "#/nowhere"}, 1) is None


HOSTILE = [
    ({"$ref": "#"}, 1),
    ({"pattern": "(a|a)*$"}, "a" * 64 + "b"),
    ({"patternProperties": {"(a|a)*$": True}}, {"a" * 64 + "b": 1}),
    ({"additionalProperties": False, "patternProperties": {"(a|a)*$": True}}, {"a" * 64 + "b": 1}),
    ({"pattern": "("}, "x"),
    (
        {
            "$defs": {str(i): {"allOf": [{"$ref": f"#/$defs/{i + 1}"}] * 2} for i in range(40)}
            | {"40": {"type": "integer"}},
            "$ref": "#/$defs/0",
        },
        "x",
    ),
]


@pytest.mark.parametrize(("schema", "value"), HOSTILE, ids=[str(h[0])[:40] for h in HOSTILE])
def test_a_check_that_costs_too_much_is_given_up(schema: Any, value: Any) -> None:
    """No verdict, where one would take years: endless references and branching, bad patterns."""
    assert violation(schema, value) is None


def test_patterns_and_additional_properties_still_work() -> None:
    """The bounded keywords judge like the library's own."""
    assert violation({"pattern": "^a"}, "b") == "$: 'b' does not match '^a'"
    assert violation({"pattern": "^a"}, "ab") is None
    assert violation({"patternProperties": {"^n": {"type": "integer"}}}, {"n1": "x"}) is not None
    closed = {"properties": {"a": True}, "patternProperties": {"^x-": True}}
    assert violation({**closed, "additionalProperties": False}, {"a": 1, "x-b": 2}) is None
    assert violation({**closed, "additionalProperties": False}, {"c": 1}) is not None
    assert violation({**closed, "additionalProperties": {"type": "null"}}, {"c": 1}) is not None
    assert violation(False, 1) is not None
    assert violation(True, 1) is None


def test_schemas_have_a_size(codec: Codec) -> None:
    """Too long or too deep: 400 with the tool's path."""
    deep: dict[str, Any] = {}
    for _ in range(MAX_DEPTH + 1):
        deep = {"a": deep}
    for schema, words in [(deep, "levels"), ({"d": "x" * MAX_BYTES}, "bytes")]:
        with pytest.raises(ClientError, match=words):
            check_size(schema, "p")
        schema = {"type": "object", "x": schema}
        with pytest.raises(ClientError) as caught:
            open_chat(
                codec, tools=[{"type": "function", "function": {"name": "f", "parameters": schema}}]
            )
        assert caught.value.param == "tools[0].function.parameters"
    assert orjson.dumps(deep)


@pytest.mark.parametrize(
    "schema",
    [
        {"required": None},
        {"$ref": "#/required/a", "required": ["a"]},
        {"$ref": "#/required/0", "required": ["a"]},
        {"$ref": "#/$defs/n", "$defs": [{}]},
        {"properties": {"a": {"enum": None}}},
        {"properties": {"a": {"minLength": None}}},
        {"properties": [1]},
        {"type": [{}]},
    ],
)
def test_what_is_no_schema_gives_no_verdict(schema: Any) -> None:
    """The validator stumbles over it; some of it is valid, and the codec lets strict tools have all."""
    assert violation(schema, {"a": "x"}) is None


@pytest.mark.parametrize("schema", [{"type": 1.5}, {"type": {}}, {"allOf": True}, {"anyOf": 1}])
def test_words_of_no_schema_admit_any_type_or_none(schema: Any) -> None:
    """Nothing raises: types are read while the model writes."""
    assert types_of(schema, {}) in (TYPES, frozenset())
