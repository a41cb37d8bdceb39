"""What takes long is known before it is begun, so that a server can do it beside its event loop."""

from __future__ import annotations

from typing import Any

import pytest

from parsers import Codec, Report
from parsers.exchange import GATHER, LONG_REPLY, LONG_STEP
from parsers.gate import LONG_CALL
from parsers.schemas import MAX_MATCHES, violation
from tests.parsers.support import complete, encode, function, open_chat

QUIET = {"type": "disabled"}
OPEN = '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="a" string="{}">'
PLAIN = [function("f", {"a": "string"})]
PATTERN = [function("f", {"a": {"type": "string", "pattern": "^x+$"}})]


@pytest.mark.parametrize(
    ("tools", "string", "size", "step", "heavy"),
    [
        (PLAIN, "true", 10, "</｜DSML｜parameter>", False),
        (PLAIN, "true", LONG_CALL + 10, "x", False),
        (PLAIN, "true", LONG_CALL + 10, "</｜DSML｜parameter>", True),
        (PLAIN, "false", LONG_CALL + 10, "</｜DSML｜parameter>", True),
        (PATTERN, "true", 10, "</｜DSML｜parameter>", True),
        (PATTERN, "true", 10, "x", False),
    ],
)
def test_the_end_of_a_call_is_long_where_its_judgement_is(
    codec: Codec, tools: list[Any], string: str, size: int, step: str, heavy: bool
) -> None:
    """Large arguments, or a schema with patterns, and a marker in the step."""
    exchange = open_chat(codec, stream=True, thinking=QUIET, tools=tools)
    exchange.start(1, 0)
    exchange.receive(encode(codec, OPEN.format(string)))
    for _ in range(size // 10):
        exchange.receive(encode(codec, "some words "))

    assert exchange.heavy(encode(codec, step)) is heavy


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


def test_lost_pieces_do_not_join_to_a_marker() -> None:
    """Each is harmless; together they would spell one."""
    report = Report()
    for piece in ("<", "｜DSML", "｜ calls>"):
        report.lose(piece)

    found = report.extension()
    assert found == {"lost_text": "<dsml: calls>", "lost_chars": 14}
