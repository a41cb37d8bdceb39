"""SGLang's native parsing: text in, calls and the text around them out."""

from __future__ import annotations

import pytest

from parsers import Codec, ParsedCall, ParsedCalls, parse_function_call
from tests.parsers.support import function

TOOLS = [function("f", {"a": "string"}), function("g")]
F = '<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="a" string="true">x</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
G = '<｜DSML｜invoke name="g">\n</｜DSML｜invoke>\n'
OPEN, SHUT = "\n\n<｜DSML｜tool_calls>\n", "</｜DSML｜tool_calls>"

CASES = [
    ("two calls", f"Sure.{OPEN}{G}{F}{SHUT}", "Sure.", [(1, "g", "{}"), (0, "f", '{"a": "x"}')]),
    ("undeclared", f"{OPEN}{G.replace('g', 'zz')}{SHUT}", "", [(-1, "zz", "{}")]),
    ("no call", "a < b", "a < b", []),
    ("text after is left out", f"{OPEN}{G}{SHUT}\nmore", "", [(1, "g", "{}")]),
    ("reasoning stays text", f"<think>r</think>c{OPEN}{G}{SHUT}", "<think>rc", [(1, "g", "{}")]),
    ("cut parameters", f"{OPEN}{F[: F.index('x<') + 1]}", "", [(0, "f", '{"a": "x')]),
    ("V4.1", f"<｜DSML｜ calls>{F.replace('｜DSML｜', '｜DSML｜ ')}", "", [(0, "f", '{"a": "x"}')]),
    ("stray markers stay", "a</｜DSML｜tool_calls>b", "a</｜DSML｜tool_calls>b", []),
    ("in a fence", f"```{OPEN}{G}{SHUT}\n```", "```", [(1, "g", "{}")]),
    (
        "broken JSON is a string",
        f"{OPEN}{F.replace('true', 'false')}{SHUT}",
        "",
        [(0, "f", '{"a": "x"}')],
    ),
    (
        "odd name",
        OPEN + F.replace('name="a"', 'name="a b"') + SHUT,
        "",
        [(0, "f", '{"a b": "x"}')],
    ),
]


@pytest.mark.parametrize(("name", "text", "normal", "calls"), CASES, ids=[c[0] for c in CASES])
def test_calls_of_a_text(
    codec: Codec, name: str, text: str, normal: str, calls: list[tuple[int, str, str]]
) -> None:
    """Index in tools or -1, name, and arguments that are JSON or its beginning."""
    want = ParsedCalls(normal, tuple(ParsedCall(*call) for call in calls))

    assert parse_function_call(codec, text, TOOLS) == want


def test_without_tools_the_text_is_unchanged(codec: Codec) -> None:
    """Nothing is parsed when nothing was offered."""
    text = f"{OPEN}{G}{SHUT}\ud800"

    assert parse_function_call(codec, text, []) == ParsedCalls(text, ())


def test_a_long_text_is_parsed_in_pieces(codec: Codec) -> None:
    """Calls that lie across the pieces of a long text are found."""
    for pad in range(4090, 4100, 3):
        got = parse_function_call(codec, "x" * pad + f"{OPEN}{F}{SHUT}", TOOLS)
        assert got == ParsedCalls("x" * pad, (ParsedCall(0, "f", '{"a": "x"}'),))
