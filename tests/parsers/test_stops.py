"""Stop strings of completions: what a slow and obvious search finds, in any split, for little work."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import example, given, settings, strategies as st

from parsers import Codec
from parsers.exchange import LONG_STEP
from parsers.stops import Stops
from tests.parsers.support import complete


class ObviousStops:
    """The twin: looks at every end of the text, and at every beginning of every stop."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.met = False
        self._stops = stops
        self._held = ""

    def feed(self, text: str) -> str:
        self._held += text
        for end in range(len(self._held) - len(text) + 1, len(self._held) + 1):
            for stop in self._stops:
                if self._held.endswith(stop, 0, end):
                    self.met = True
                    return self._held[: end - len(stop)]
        keep = max(
            (n for s in self._stops for n in range(1, len(s)) if self._held.endswith(s[:n])),
            default=0,
        )
        cut = len(self._held) - keep
        out, self._held = self._held[:cut], self._held[cut:]
        return out

    def close(self) -> str:
        return "" if self.met else self._held


class Counted(str):
    """A stop that counts how often a part of it is looked at."""

    looks = 0

    def __getitem__(self, key: Any) -> str:
        self.looks += 1
        return super().__getitem__(key)


def play(stops: Any, pieces: Sequence[str]) -> list[str]:
    return [*(stops.feed(piece) for piece in pieces if not stops.met), stops.close()]


words = st.one_of(
    st.text("ab", min_size=1, max_size=9),
    st.text("aé👩", min_size=1, max_size=4),
    st.sampled_from(["aaaab", "abaababaab", "abcabcabd", "\n\n", "a"]),
)


@given(
    stops=st.lists(words, max_size=4),
    pieces=st.lists(st.one_of(words, st.just("")), max_size=30),
)
@example(stops=["b", "ab"], pieces=["a", "b"])
@example(stops=["ab", "b"], pieces=["a", "b"])
@example(stops=["aab"], pieces=["a", "a", "a", "b"])
@settings(max_examples=500)
def test_every_piece_shows_what_the_obvious_search_shows(
    stops: list[str], pieces: list[str]
) -> None:
    """Piece by piece: nothing is shown early, nothing is held longer than a stop may begin in it."""
    found, wanted = Stops(stops), ObviousStops(stops)

    assert play(found, pieces) == play(wanted, pieces)
    assert found.met == wanted.met


@given(stops=st.lists(words, max_size=4), text=st.text("ab", max_size=40), data=st.data())
def test_any_split_shows_the_same(stops: list[str], text: str, data: st.DataObject) -> None:
    """Joined, what is shown of pieces is what is shown of the whole."""
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=9)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]

    assert "".join(play(Stops(stops), pieces)) == "".join(play(Stops(stops), [text]))


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        ("x" * 50_000, "ab" * 20),
        ("ab" * 50_000, "xy" * 20),
        ("a" * 50_000 + "b", "a" * 300 + "c"),
        ("a" * 300 + "b", "a" * 1000),
        ("ab" * 100 + "a", ("ab" * 100 + "b") * 5),
    ],
)
def test_work_is_bounded_by_the_text(stop: str, text: str) -> None:
    """Not by the stop, and not by how much of it is met."""
    counted = Counted(stop)
    shown = "".join(play(Stops([counted]), list(text)))

    assert shown == text
    assert counted.looks < 8 * len(text)


def test_a_character_that_ends_a_long_hope_costs_little() -> None:
    """All that was met is given up in a few steps."""
    stop = Counted("a" * 20_000 + "b")
    stops = Stops([stop])
    stops.feed("a" * 10_000)
    stop.looks = 0

    assert stops.feed("c") == "a" * 10_000 + "c"
    assert stop.looks < 8


def test_a_step_is_long_by_tokens_and_stops(codec: Codec) -> None:
    """Every stop looks at every character: what is joined goes to a thread the sooner."""
    fields = {"stop": [f"{i} is here" for i in range(16)]}
    assert complete(codec).heavy([5] * (LONG_STEP + 1))
    assert not complete(codec).heavy([5] * LONG_STEP)
    assert not complete(codec, **fields).heavy([5] * (LONG_STEP // 17))
    assert complete(codec, **fields).heavy([5] * (LONG_STEP // 17 + 1))
