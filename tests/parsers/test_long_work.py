"""What takes long is known before it is begun, so that a server can do it beside its event loop."""

from __future__ import annotations

from typing import Any

import pytest

from parsers import Codec, PromptNote, Report, schemas
from parsers.exchange import GATHER, LONG_REPLY, LONG_STEP
from parsers.gate import LONG_CALL
from parsers.schemas import LONG_SCHEMA, MAX_MATCHES, violation
from parsers.toolset import types_of
from tests.parsers.support import complete, encode, function, open_chat

QUIET = {"type": "disabled"}
OPEN = '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="a" string="{}">'
PLAIN = [function("f", {"a": "string"})]
PATTERN = [function("f", {"a": {"type": "string", "pattern": "^x+$"}})]
SLOW = [
    [function("f", {"a": {"type": "string", "pattern": "^x+$"}})],
    [function("f", {"a": {"$ref": "#"}})],
    [function("f", {"a": {"type": "array", "items": {"type": "string"}}})],
    [function("f", {"a": {"additionalProperties": {"type": "string"}}})],
    [function("f", {"a": {"type": "string", "description": "x" * LONG_SCHEMA}})],
    [function("g"), function("f", {"a": {"contains": {"type": "string"}}})],
]


@pytest.mark.parametrize(
    ("tools", "string", "size", "step", "heavy"),
    [
        (PLAIN, "true", 10, "</｜DSML｜parameter>", False),
        (PLAIN, "true", LONG_CALL + 10, "x", False),
        (PLAIN, "true", LONG_CALL + 10, "</｜DSML｜parameter>", True),
        (PLAIN, "false", LONG_CALL + 10, "</｜DSML｜parameter>", True),
        *((tools, "true", 10, "</｜DSML｜parameter>", True) for tools in SLOW),
        *((tools, "true", 10, "x", False) for tools in SLOW),
    ],
)
def test_the_end_of_a_call_is_long_where_its_judgement_is(
    codec: Codec, tools: list[Any], string: str, size: int, step: str, heavy: bool
) -> None:
    """Large arguments, or a schema that takes its time, and a marker in the step."""
    exchange = open_chat(codec, stream=True, thinking=QUIET, tools=tools)
    exchange.start(1, 0)
    exchange.receive(encode(codec, OPEN.format(string)))
    for _ in range(size // 10):
        exchange.receive(encode(codec, "some words "))

    assert exchange.heavy(encode(codec, step)) is heavy


@pytest.mark.parametrize("tools", [PLAIN, PATTERN])
def test_every_token_of_a_tag_is_long_where_its_end_is(codec: Codec, tools: list[Any]) -> None:
    """The marker comes first, and what is judged is judged at the last character."""
    size = LONG_CALL + 10 if tools is PLAIN else 10
    exchange = open_chat(codec, stream=True, thinking=QUIET, tools=tools)
    exchange.start(1, 0)
    exchange.receive(encode(codec, OPEN.format("true") + "some words " * (size // 10)))
    tag = encode(codec, "</｜DSML｜parameter>")
    found = []
    for token_id in tag:
        found.append(exchange.heavy([token_id]))
        exchange.receive([token_id])

    # the bracket before the marker is not known to begin a tag
    assert found == [False, *[True] * (len(tag) - 1)]
    assert not exchange.heavy(encode(codec, "x"))


def test_a_body_in_place_of_parameters_counts_as_arguments(codec: Codec) -> None:
    """It is judged like them."""
    exchange = open_chat(codec, stream=True, thinking=QUIET, tools=PLAIN)
    exchange.start(1, 0)
    exchange.receive(encode(codec, OPEN.partition("<｜DSML｜parameter")[0]))
    assert not exchange.heavy(encode(codec, "</｜DSML｜invoke>"))
    exchange.receive(encode(codec, '{"a": "' + "some words " * (LONG_CALL // 10) + '"}'))
    assert exchange.heavy(encode(codec, "</｜DSML｜invoke>"))


@pytest.mark.parametrize(
    ("fields", "piece"),
    [
        ({"tools": PLAIN}, OPEN.format("true") + "some words " * LONG_STEP),  # quoted, or a call
        ({"response_format": {"type": "json_object"}, "thinking": QUIET}, "words " * LONG_STEP),
        ({"thinking": QUIET}, "é"),
    ],
)
def test_a_token_that_may_let_go_much_is_long(
    codec: Codec, fields: dict[str, Any], piece: str
) -> None:
    """A doubtful block, text before a JSON answer, half characters: all that waits comes at once."""
    messages = [{"role": "user", "content": "json"}]
    exchange = open_chat(codec, stream=True, messages=messages, **fields)
    exchange.start(1, 0)
    ids = encode(codec, piece) if piece != "é" else codec.vocabulary.spell("é")[:1] * LONG_STEP
    assert not exchange.heavy(encode(codec, "x"))
    exchange.receive(ids)
    assert exchange.heavy(encode(codec, "x"))


def test_the_end_of_a_long_thought_is_long(codec: Codec) -> None:
    """Responses repeat it whole, as text and as its summary."""
    exchange = open_chat(codec, stream=True)
    exchange.start(1, 0)
    end = encode(codec, "</think>")
    exchange.receive([5] * (LONG_REPLY - 1))
    assert not exchange.heavy(end)
    exchange.receive([5])
    assert exchange.heavy(end)
    assert not exchange.heavy([5])


def test_a_gathered_step_is_judged_with_those_before_it(codec: Codec) -> None:
    """A whole reply is worked on in lumps: the marker may have come in an earlier step."""
    exchange = open_chat(codec, thinking=QUIET, tools=PATTERN)
    exchange.start(1, 0)
    assert not exchange.heavy(encode(codec, "x"))
    exchange.receive(encode(codec, "</｜DSML｜parameter>"))
    assert exchange.heavy(encode(codec, "x"))


def test_only_a_step_without_work_is_gathered(codec: Codec) -> None:
    """No stream, no end, room left, and nothing that wants to be seen token by token."""
    plain = [5] * 3
    for fields, taken in [
        ({}, True),
        ({"stream": True}, False),
        ({"stop": "x"}, False),
        ({"tools": PLAIN, "parallel_tool_calls": False}, False),
    ]:
        exchange = open_chat(codec, thinking=QUIET, **fields)
        exchange.start(1, 0)
        assert exchange.gather(plain) is taken
    exchange = open_chat(codec, thinking=QUIET)
    exchange.start(1, 0)
    assert not exchange.gather([5] * GATHER)
    assert not exchange.gather([5, codec.model.eos_token_ids[0]])
    exchange.receive([5, codec.model.eos_token_ids[0]])
    assert not exchange.gather(plain)
    completion = complete(codec)
    assert not completion.gather(plain)


def test_many_tokens_at_once_are_long(codec: Codec) -> None:
    """A slow reader's steps are joined."""
    exchange = open_chat(codec, stream=True)
    completion = complete(codec)
    for reply in (exchange, completion):
        assert not reply.heavy([5] * LONG_STEP)
        assert reply.heavy([5] * (LONG_STEP + 1))
        assert not reply.heavy_close(LONG_REPLY - 1)
        assert reply.heavy_close(LONG_REPLY)


def test_log_probabilities_count_as_tokens(codec: Codec) -> None:
    """Those of rivals, and those of the prompt: each is spelled at the end."""
    scores = PromptNote(None, [None, *[(-0.5, [(7, -1.0)])] * 99])  # two for each
    for tokens, n in [(LONG_REPLY - 200, 1), ((LONG_REPLY - 200) // 4, 4)]:
        rivals: dict[str, Any] = {"top_logprobs": n - 1} if n > 1 else {}
        chat = open_chat(codec, prompt_logprobs=1, **(rivals and {"logprobs": True, **rivals}))
        raw = complete(
            codec, prompt=[5] * 100, prompt_logprobs=1, **(rivals and {"logprobs": n - 1})
        )
        for reply in (chat, raw):
            assert not reply.heavy_close(tokens)
            reply.note_prompt(scores)
            assert not reply.heavy_close(tokens - 1)
            assert reply.heavy_close(tokens)
            assert not reply.heavy([5] * (LONG_STEP // n))
            assert reply.heavy([5] * (LONG_STEP // n + 1))
        assert chat.heavy_body(tokens)
        assert not chat.heavy_body(tokens - 1)
        assert not raw.heavy_body(tokens)  # written by its close


def test_the_scores_of_every_choice_count(codec: Codec) -> None:
    """The body of the first holds all."""
    first = open_chat(codec, n=2, prompt_logprobs=0)
    for choice in first.choices:
        choice.note_prompt(PromptNote(None, [(-0.5, ())] * 100))
    assert first.heavy_body(LONG_REPLY - 200)
    assert not first.heavy_body(LONG_REPLY - 201)


@pytest.mark.parametrize(
    ("fields", "size", "heavy"),
    [
        ({"stop": "x", "stream": True}, LONG_REPLY, True),
        ({"stop": "x", "stream": True}, LONG_REPLY - 1, False),
        ({"stream": True}, LONG_REPLY, False),
        ({"stop": "x"}, LONG_REPLY, False),
    ],
)
def test_a_step_that_may_end_a_stream_tells_the_scores(
    codec: Codec, fields: dict[str, Any], size: int, heavy: bool
) -> None:
    """A stop sequence ends it in the middle of a step."""
    exchange = open_chat(codec, prompt_logprobs=0, thinking=QUIET, **fields)
    exchange.start(1, 0)
    exchange.note_prompt(PromptNote(None, [(-0.5, ())] * size))
    assert exchange.heavy(encode(codec, "x")) is heavy


@pytest.mark.parametrize(
    ("fields", "heavy"),
    [
        ({}, False),
        ({"tools": PLAIN}, False),
        ({"tools": PATTERN}, True),
        ({"response_format": {"type": "json_object"}}, True),
    ],
)
def test_an_end_that_judges_is_long(codec: Codec, fields: dict[str, Any], heavy: bool) -> None:
    """However short the reply is."""
    messages = [{"role": "user", "content": "json"}]
    assert open_chat(codec, messages=messages, **fields).heavy_close(10) is heavy


def test_matches_are_counted_over_a_whole_check() -> None:
    """Many short ones are as bad as a long one: beyond the limit there is no verdict."""
    schema = {"type": "array", "items": {"type": "string", "pattern": "^x$"}}

    assert violation(schema, ["x"] * MAX_MATCHES) is None
    assert violation(schema, ["x"] * (MAX_MATCHES - 1) + ["y"]) is not None
    assert violation(schema, ["x"] * MAX_MATCHES + ["y"]) is None  # not looked at


def _branching(word: str, depth: int) -> dict[str, Any]:
    """Definitions of which each refers to the next one twice."""
    refs = [{"$ref": f"#/$defs/n{i + 1}"} for i in range(depth)]
    both: Any = {"dependentSchemas": lambda r: {"a": r, "b": r}}.get(word, lambda r: [r, r])
    return {
        "$ref": "#/$defs/n0",
        "$defs": {**{f"n{i}": {word: both(r)} for i, r in enumerate(refs)}, f"n{depth}": {}},
    }


NUMBERS = list(range(2000))


@pytest.mark.parametrize(
    ("schema", "value", "verdict"),
    [
        ({"items": {"enum": NUMBERS}}, [-1] * 50, True),
        ({"items": {"enum": NUMBERS}}, [-1] * 200, False),  # each is compared with each
        ({"items": {"properties": {str(i): {} for i in NUMBERS}}}, [0, *[{}] * 200], False),
        ({"items": {"anyOf": [{"minimum": i} for i in NUMBERS]}}, [-1] * 200, False),
        ({**_branching("allOf", 9), "type": "string"}, {}, True),
        ({**_branching("allOf", 30), "type": "string"}, {}, False),
        ({"unevaluatedProperties": False}, {"a": 1}, True),
        ({"unevaluatedProperties": False, **_branching("dependentSchemas", 30)}, {"c": 1}, False),
        ({"unevaluatedItems": False, **_branching("allOf", 2)}, [1], False),
    ],
)
def test_a_check_is_given_up_where_it_would_cost_too_much(
    schema: Any, value: Any, verdict: bool
) -> None:
    """A schema's size times a value's, or ways through references without end."""
    assert (violation(schema, value) is not None) is verdict


def test_a_schema_is_looked_through_once_for_references(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many values are held to a word that gives no verdict beside them."""
    dumps, seen = schemas.orjson.dumps, []

    def counted(value: Any) -> bytes:
        seen.append(value)
        return dumps(value)

    monkeypatch.setattr(schemas.orjson, "dumps", counted)
    schema = {"items": {"unevaluatedItems": False, "contains": True}}

    assert violation(schema, [[1]] * 100) is None
    assert len(seen) == 1


@pytest.mark.parametrize(
    ("value", "unique"),
    [
        ([1, "1", True, [1], [True], {"a": 1}, {"a": True}, {"a": [1]}, None, 0, False], True),
        ([1, 2, 1.0], False),
        ([{"a": 1, "b": [2]}, {"b": [2.0], "a": 1}], False),
        ([[False], [0]], True),
        ([x for i in range(5000) for x in (i, str(i))], True),  # none is compared with another
    ],
)
def test_items_are_unique_by_their_json_value(value: list[Any], unique: bool) -> None:
    """As in JSON Schema; found by a look at each."""
    assert (violation({"uniqueItems": True}, value) is None) is unique
    assert violation({"uniqueItems": False}, value) is None


@pytest.mark.parametrize("word", ["anyOf", "allOf", "oneOf"])
def test_types_of_schemas_that_branch_are_read_once(word: str) -> None:
    """Each schema, not each way to it: these have 3 ** 8 ways, and may lead back to themselves."""
    looked: list[str] = []

    class Looked(dict[str, Any]):
        def get(self, key: str, default: Any = None) -> Any:
            looked.append(key)
            return super().get(key, default)

    definitions = {
        f"n{i}": Looked({word: [{"$ref": f"#/$defs/n{i + 1}"}] * 3, "type": ["string", "null"]})
        for i in range(9)
    }
    definitions["n9"] = Looked({"type": "string"})
    assert types_of({"$ref": "#/$defs/n0"}, {"$defs": definitions}) <= {"string", "null"}
    definitions["n9"] = Looked({word: [{"$ref": "#/$defs/n0"}] * 3, "type": "null"})
    assert "string" not in types_of({"$ref": "#/$defs/n9"}, {"$defs": definitions})
    assert len(looked) < 200


def test_lost_pieces_do_not_join_to_a_marker() -> None:
    """Each is harmless; together they would spell one."""
    report = Report()
    for piece in ("<", "｜DSML", "｜ calls>"):
        report.lose(piece)

    found = report.extension()
    assert found == {"lost_text": "<dsml: calls>", "lost_chars": 14}
