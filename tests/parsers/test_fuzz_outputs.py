"""The fuzz of bench/fuzz_outputs.py: a few of its cases, what it has found, and faults it would see."""

from __future__ import annotations

import pytest

from bench import fuzz_outputs
from parsers import Codec
from parsers.events import ThinkEnd
from parsers.gate import ToolGate
from tests.parsers.support import encode, function, plainly, talk
from tests.parsers.test_gate import block, call

QUIET = {"type": "disabled"}
TOOLS = [function("f")]


@pytest.fixture(scope="module")
def codecs() -> dict[str, Codec]:
    return fuzz_outputs.codecs()


def test_the_first_cases_hold(codecs: dict[str, Codec]) -> None:
    """All kinds of output, all profiles and protocols are among them."""
    cases = [fuzz_outputs.make(codecs["agent"], 0, number) for number in range(600)]
    for case in cases:
        fuzz_outputs.check(codecs[case.profile], case)
    assert {case.kind for case in cases} == {"written", "mutated", "soup"}
    assert {case.profile for case in cases} == set(codecs)
    assert {case.protocol for case in cases} == {"chat", "responses", "messages"}


def test_a_case_is_a_function_of_its_number(codecs: dict[str, Codec]) -> None:
    """So that what was found can be played again."""
    assert fuzz_outputs.make(codecs["agent"], 0, 5) == fuzz_outputs.make(codecs["agent"], 0, 5)
    assert fuzz_outputs.make(codecs["agent"], 0, 5) != fuzz_outputs.make(codecs["agent"], 1, 5)


@pytest.mark.parametrize("before", ["｜DSML", "|D", "</｜", "x <"])
@pytest.mark.parametrize("after", ["|", "｜", "SML｜", "｜DSML｜"])
def test_text_around_a_lost_end_of_thinking_makes_no_marker(
    codec: Codec, before: str, after: str
) -> None:
    """The codec leaves the token out where nothing is thought; a blank keeps the text apart."""
    ids = [
        *plainly(codec, before),
        codec.vocabulary.special("</think>"),
        *plainly(codec, f"{after} rest"),
    ]
    got = talk(codec, ids, tools=TOOLS, thinking=QUIET)

    assert not fuzz_outputs.MARKER.search(got["content"])
    assert got["content"].startswith(before)
    assert got["content"].endswith(" rest")


@pytest.mark.parametrize(
    "tag", ["</{}｜DSML｜ calls>", "<{}｜DSML｜ calls>", "</{}|DSML|>", "{}｜DSML｜"]
)
def test_a_stray_tag_and_the_text_behind_it_make_no_marker(codec: Codec, tag: str) -> None:
    """The marker's own token, and behind it one that ordinary tokens spell."""
    before, after = tag.split("{}")
    mark = codec.vocabulary.special("｜DSML｜")
    ids = [*plainly(codec, f"Hi {before}"), mark, *plainly(codec, f"{after} rest")]

    content = talk(codec, ids, tools=TOOLS, thinking=QUIET)["content"]

    assert content.startswith("Hi ")
    assert content.endswith(" rest")
    assert not fuzz_outputs.MARKER.search(content)


@pytest.mark.parametrize("before", ["x <｜", "｜DS", "|DSML", "<"])
@pytest.mark.parametrize("after", ["DSML| y", "ML｜ y", "｜ y"])
def test_text_around_calls_that_were_withheld_makes_no_marker(
    codec: Codec, before: str, after: str
) -> None:
    """A blank keeps the text apart where an undeclared tool's block was left out of it."""
    calls = encode(codec, block(call("undeclared")))
    ids = [*plainly(codec, before), *calls, *plainly(codec, after)]

    got = talk(codec, ids, tools=TOOLS, thinking=QUIET)

    assert not fuzz_outputs.MARKER.search(got["content"])
    assert got["content"].startswith(before)
    assert got["content"].endswith(" y")
    assert got["calls"] == []


def test_an_end_of_thinking_that_joins_nothing_is_left_out_as_by_the_codec(codec: Codec) -> None:
    """The rule is for beginnings of markers only."""
    ids = [*plainly(codec, "a"), codec.vocabulary.special("</think>"), *plainly(codec, "b")]
    assert talk(codec, ids, tools=TOOLS, thinking=QUIET)["content"] == "ab"


def test_a_gate_without_that_rule_would_be_seen(
    codecs: dict[str, Codec], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted fault: the case that found it fails again."""
    handle = ToolGate.handle

    def forgetful(self: ToolGate, event: object) -> None:
        handle(self, event._replace(joins=False) if isinstance(event, ThinkEnd) else event)  # type: ignore[arg-type]

    case = fuzz_outputs.make(codecs["agent"], 0, 692)
    assert fuzz_outputs.check(codecs[case.profile], case)
    monkeypatch.setattr(ToolGate, "handle", forgetful)
    with pytest.raises(AssertionError, match="a marker was sent"):
        fuzz_outputs.check(codecs[case.profile], case)
