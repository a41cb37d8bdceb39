"""Strict JSON and its beginnings."""

from __future__ import annotations

import orjson
import pytest
from hypothesis import given, strategies as st

from conformance import strict_json

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8")),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(st.dictionaries(st.text(max_size=6), VALUES, max_size=4))
def test_every_beginning_of_an_object_is_one(value: dict) -> None:  # type: ignore[type-arg]
    """Each prefix of an object's text is the beginning of a JSON object."""
    text = strict_json.dumps(value)

    for end in range(len(text) + 1):
        assert strict_json.is_object_prefix(text[:end]), text[:end]


@pytest.mark.parametrize(
    "text",
    [
        "[",
        '"',
        "1",
        "{]",
        '{"a"}',
        '{"a":,',
        '{"a": 01',
        '{"a": tx',
        '{"a": 1 2',
        '{"a": 1}}',
        "{a",
        '{"a": "x\n',
        '{"a": "\\x',
        '{"a": -}',
        '{"a": 1,}',
        '{"a": [1,]',
        '{"a": .5',
        "{,",
        '{"a": "b"</x',
        '{"a": 1e}',
        '{"a": 1.}',
        '{"a": nul]',
        "{1",
    ],
)
def test_what_cannot_become_an_object_is_no_beginning(text: str) -> None:
    """Text from which no JSON goes on is told apart."""
    assert not strict_json.is_object_prefix(text)


@given(st.text(alphabet='{}[]":,0123eE+-.truefalsn \\u', max_size=12))
def test_beginning_agrees_with_a_slow_twin(text: str) -> None:
    """If some short continuation parses as an object, the text is a beginning."""
    endings = [
        "",
        "}",
        '"}',
        '":1}',
        '"a":1}',
        "0}",
        "1}]}",
        "]}",
        '"]}',
        "1]}",
        "rue}",
        "ull}",
        "alse}",
    ]
    for ending in endings:
        try:
            value = orjson.loads(text + ending)
        except orjson.JSONDecodeError:
            continue
        if isinstance(value, dict):
            assert strict_json.is_object_prefix(text)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('{"a": NaN}', strict_json.NotFiniteError),
        ('{"a": -Infinity}', strict_json.NotFiniteError),
        ('{"a": 1, "a": 1}', strict_json.DuplicateKeyError),
        ('{"a": {"b": 1, "b": 2}}', strict_json.DuplicateKeyError),
        ('{"a": 1,}', strict_json.JsonError),
        ("[" * 100_000, strict_json.JsonError),
        ("", strict_json.JsonError),
    ],
)
def test_each_fault_has_its_name(text: str, error: type[Exception]) -> None:
    """The three ways of not being strict JSON are told apart."""
    with pytest.raises(error) as caught:
        strict_json.loads(text)

    assert error is caught.type


def test_long_integers_keep_their_digits() -> None:
    """No digit of a long integer is lost on the way through."""
    text = '{"a": 123456789012345678901234567890}'

    assert text == strict_json.dumps(strict_json.loads(text))
