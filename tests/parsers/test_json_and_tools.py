"""Checked JSON text, and which types a declared parameter admits."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given, strategies as st

from parsers import ToolSet
from parsers.jsontext import (
    DEEPEST,
    escape,
    is_strict,
    key_text,
    members,
    mend_strings,
    mend_surrogates,
    type_of,
)
from parsers.toolset import TYPES, fits
from tests.parsers.support import function

STRICT = ["1", " 7 \n", "-0", "1.50", "1e5", "9" * 40, '"\\ud83d\\ude00"', '{"a":{"b":[]}}', "null"]
BROKEN = [
    "",
    " ",
    "NaN",
    "Infinity",
    "1e400",
    "1 2",
    "[1,]",
    "{bad",
    "Paris",
    "True",
    "'a'",
    '"\t"',
]
BROKEN += ['{"a":1,"a":2}', '[{"a":1,"a":2}]', '"\\ud83d"', '1, "b": 2', "01", "\ufeff1", "\u00a01"]
BROKEN += ["[" * (DEEPEST + 1) + "]" * (DEEPEST + 1), "[" * 100_000]


@pytest.mark.parametrize("text", STRICT)
def test_strict_json_passes(text: str) -> None:
    """What every strict reader takes is taken."""
    assert is_strict(text)


@pytest.mark.parametrize("text", BROKEN, ids=lambda t: repr(t[:12]))
def test_broken_json_is_seen(text: str) -> None:
    """What some strict reader refuses, or reads otherwise than another, is refused."""
    assert not is_strict(text)


def test_depth_counts_nesting_and_not_brackets_in_strings() -> None:
    """Many brackets are fine side by side or in a string."""
    assert is_strict("[" + ",".join(["[]"] * 500) + "]")
    assert is_strict(orjson.dumps("[" * 500 + '"\\').decode())
    assert is_strict("[" * DEEPEST + "]" * DEEPEST)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(value=st.dictionaries(st.text(max_size=8), JSON, max_size=4))
def test_an_object_is_split_into_the_texts_of_its_members(value: dict[str, Any]) -> None:
    """Keys and value texts of an object, put together again, are the object."""
    import json  # noqa: TID251 -- an independent writer, with blanks and escapes of its own

    text = json.dumps(value, indent=1)
    found = members(f" {text}\n")

    assert found is not None
    assert [key for key, _ in found] == list(value)
    assert {key: json.loads(raw) for key, raw in found} == value


def test_members_keep_their_spelling_and_refuse_what_is_no_object() -> None:
    """Digits and inner blanks stay; arrays, broken text and repeated keys give None."""
    assert members('{"a": 1.50, "b":[ 1 , 2 ]}') == [("a", "1.50"), ("b", "[ 1 , 2 ]")]
    assert members("{}") == []
    assert members("[1]") is members("{bad}") is members('{"a":1,"a":2}') is None


@given(text=st.text())
def test_escaped_text_is_the_inside_of_a_json_string_without_a_marker(text: str) -> None:
    """It decodes to the text and shows no marker's bar."""
    assert orjson.loads(f'"{escape(text)}"') == text
    assert "｜" not in escape(text)


@given(key=st.text())
def test_a_key_is_written_so_that_nothing_in_it_breaks_the_codec(key: str) -> None:
    """It decodes to the key; no quote, blank, bracket or control character stands in it."""
    written = key_text(key)

    assert orjson.loads(f'"{written}"') == key
    assert not set(' "<>=|｜\n\t') & set(written)
    assert written.isprintable()


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ('"\\ud83d"', '"\\ufffd"'),
        ('"\\ude00x"', '"\\ufffdx"'),
        ('"\\ud83d\\ude00"', '"\\ud83d\\ude00"'),
        ('"\\\\ud83d"', '"\\\\ud83d"'),
        ('"\\ud83d\\u0041"', '"\\ufffd\\u0041"'),
    ],
)
def test_half_characters_in_escapes_are_replaced(text: str, want: str) -> None:
    """Only an escape of half a character changes."""
    assert mend_surrogates(text) == want
    assert is_strict(want)


@given(st.text("a\\'\n\t\x00:{,é"))
def test_a_string_written_bare_keeps_its_characters(text: str) -> None:
    """Control characters and backslashes that were not escaped are what was meant."""
    bare = text.replace("\\\\", "").rstrip("\\")
    written = f'{{"k": ["{bare}"]}}'

    assert orjson.loads(mend_strings(written)) == {"k": [bare]}


@pytest.mark.parametrize("text", [*STRICT, r'{"a\\b\"c\/": "\u00e9\n\\d"}', "[\n1\t,\n2]"])
def test_strict_json_has_nothing_bare(text: str) -> None:
    """What is strict stays as it is, blanks between values included."""
    assert mend_strings(text) == text


@pytest.mark.parametrize("text", [r'{"p": "C:\Users\new"}', '["a", "b\\', '["\n\\"', '"' * 3])
def test_what_could_mean_two_things_is_not_made_strict(text: str) -> None:
    """A guess at an escape, or at the end of a string, would deliver what nobody wrote."""
    assert not is_strict(mend_strings(text))


def test_many_quotes_are_gone_through_once() -> None:
    """A string without its end, full of escaped quotes, does not cost its square."""
    text = '["' + '\\"\n' * 200_000

    assert len(mend_strings(text)) == len(text) + 200_000


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "s": {"type": "string"},
        "n": {"type": "number"},
        "maybe": {"type": ["integer", "null"]},
        "any": {"description": "anything"},
        "enum": {"enum": ["a", 1, None]},
        "const": {"const": 3},
        "ref": {"$ref": "#/$defs/x"},
        "deep": {"$ref": "#/$defs/loop"},
        "away": {"$ref": "https://example.org/x"},
        "lost": {"$ref": "#/$defs/none"},
        "either": {"anyOf": [{"type": "string"}, {"type": "boolean"}]},
        "both": {"allOf": [{"type": ["string", "null"]}, {"type": ["null", "array"]}]},
    },
    "$defs": {"x": {"type": "array"}, "loop": {"$ref": "#/$defs/loop"}},
}


@pytest.mark.parametrize(
    ("parameter", "want"),
    [
        ("s", {"string"}),
        ("n", {"number", "integer"}),
        ("maybe", {"integer", "null"}),
        ("any", TYPES),
        ("enum", {"string", "integer", "null"}),
        ("const", {"integer"}),
        ("ref", {"array"}),
        ("deep", TYPES),
        ("away", TYPES),
        ("lost", TYPES),
        ("either", {"string", "boolean"}),
        ("both", {"null"}),
        ("undeclared", TYPES),
    ],
)
def test_the_types_a_parameter_admits(parameter: str, want: frozenset[str]) -> None:
    """Types are read through references and combinators; what the schema leaves open is open."""
    tools = ToolSet([{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}])

    assert tools.admits(0, parameter) == want
    assert tools.admits(-1, parameter) == TYPES


def test_names_and_types() -> None:
    """A tool's index is its place, -1 for none; an integer is a number, 1.0 is an integer."""
    tools = ToolSet([function("a"), {"type": "function", "function": {"name": "b"}}])

    assert (len(tools), tools.index("b"), tools.index("c")) == (2, 1, -1)
    assert tools.admits(1, "x") == TYPES
    names = [type_of(t) for t in ("1", "1.0", "1.5", "true", '"x"', "[]", "{}", "null", "9" * 40)]
    assert names == [
        "integer",
        "integer",
        "number",
        "boolean",
        "string",
        "array",
        "object",
        "null",
        "integer",
    ]
    assert fits("1", frozenset({"number"}))
    assert not fits("1.5", frozenset({"integer"}))


def test_additional_properties_have_a_type_too() -> None:
    """A parameter that only additionalProperties admits has its type."""
    schema = {"type": "object", "additionalProperties": {"type": "integer"}}
    tools = ToolSet([{"type": "function", "function": {"name": "f", "parameters": schema}}])

    assert tools.admits(0, "x") == {"integer"}
