"""The part of a body that a reader refuses, found by leaving parts out."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given, strategies as st

from parsers.culprit import MOST_BYTES, MOST_TRIES, culprit

BAD = "bad"


def is_clean(node: Any) -> bool:
    """A reader that refuses one word, wherever it stands."""
    return BAD.encode() not in orjson.dumps(node)


def found(body: Any) -> str | None:
    return culprit(body, len(orjson.dumps(body)), is_clean)


@pytest.mark.parametrize(
    ("body", "path"),
    [
        ({"a": 1, "b": BAD}, "b"),
        ({"a": {"b": [1, {"c": BAD}]}}, "a.b[1].c"),
        ({"a": [BAD]}, "a[0]"),
        ({"a": [BAD, 1], "b": BAD}, None),
        ({"a": [BAD, 1, BAD]}, "a"),
        ({"a": ["x" * MOST_BYTES, BAD]}, None),
        ({"a": [1] * MOST_TRIES, "b": 2, "c": BAD}, "c"),
    ],
)
def test_the_smallest_part_is_named(body: Any, path: str | None) -> None:
    """Of two faults the part that holds both; nothing where there is none such, or it costs too much."""
    assert found(body) == path


def test_members_that_must_be_there_are_passed() -> None:
    """Without `a` the body is refused too; the part inside of it is found all the same."""
    body = {"a": [{"b": 1, "c": BAD}]}
    reads = lambda part: bool(part.get("a")) and is_clean(part)  # noqa: E731
    assert culprit(body, 10, reads) == "a[0].c"


@given(st.lists(st.integers(0, 9), max_size=400), st.integers(0, 400))
def test_tries_are_bounded(numbers: list[int], at: int) -> None:
    """However long a body is; what is found holds the fault."""
    tries = 0

    def reads(part: Any) -> bool:
        nonlocal tries
        tries += 1
        return is_clean(part)

    numbers_and_fault: list[Any] = [*numbers[:at], BAD, *numbers[at:]]
    path = culprit({"a": numbers_and_fault}, 1, reads)
    assert tries <= MOST_TRIES
    assert path in ("a", f"a[{min(at, len(numbers))}]")
