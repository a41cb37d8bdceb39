"""The DSML parser: what each output means, the same in any split, and nothing lost."""

from __future__ import annotations

from itertools import groupby

import pytest
from hypothesis import given, strategies as st

from parsers.dialects import MARK as M, THINK_END, mark_text, quote, spell
from parsers.dsml import DsmlParser
from parsers.events import (
    BlockClosed,
    BlockOpened,
    Event,
    InvokeClosed,
    InvokeOpened,
    Noise,
    ParamClosed,
    ParamOpened,
    ParamText,
    Stray,
    Text,
    ThinkEnd,
)
from parsers.tags import LONGEST_TAG, Tag, read_closer, read_opener

OPEN, SHUT = f"<{M}tool_calls>", f"</{M}tool_calls>"
CALL, DONE = f'<{M}invoke name="f">', f"</{M}invoke>"
PARAM, END = f'<{M}parameter name="a" string="true">', f"</{M}parameter>"


def parse(text: str, size: int = 1_000_000, **start: bool) -> list[Event]:
    parser = DsmlParser(**start)
    events = [e for at in range(0, len(text), size) for e in parser.feed(text[at : at + size])]
    return merged(events + parser.close())


def merged(events: list[Event]) -> list[Event]:
    """Join neighbouring pieces of the kinds whose cut depends on the split."""
    out: list[Event] = []
    for kind, group in groupby(events, type):
        items = list(group)
        if kind in (Text, ParamText, Noise):
            out.append(kind("".join(item.raw for item in items)))
        else:
            out += items
    return out


def sketch(text: str, **start: bool) -> str:
    """The kinds of the events, one letter each; lower case for what did not end."""
    letters = {
        Text: "t",
        ThinkEnd: "!",
        Stray: "s",
        BlockOpened: "B",
        InvokeOpened: "C",
        ParamOpened: "P",
        ParamText: "v",
        ParamClosed: "/",
        Noise: "n",
    }
    out = ""
    for event in parse(text, **start):
        match event:
            case InvokeClosed():
                out += "D" if event.complete else "d"
            case BlockClosed():
                out += "E" if event.complete else "e"
            case _:
                out += letters[type(event)]
    return out


SKETCHES = [
    ("plain", "hi <b> | x", "t"),
    ("call", f"hi{OPEN}{CALL}{PARAM}x{END}{DONE}{SHUT}", "tBCPv/DE"),
    ("spaced tags", f'<{M} calls>\n<{M} invoke name="f">\n</{M} invoke></{M} calls>', "BnCnDE"),
    ("V3.2 block", f"<{M}function_calls>{CALL}{DONE}</{M}function_calls>", "BCDE"),
    ("mixed versions", f"{OPEN}<{M} invoke name='f'>{DONE}</{M} calls>", "BCDE"),
    ("no opener", f"{CALL}{DONE}{SHUT}", "BCDE"),
    ("reasoning ends", f"r{THINK_END}a", "t!t"),
    ("bare marker", f"a{M}b", "tst"),
    ("closer without block", f"a{SHUT}b", "tst"),
    ("parameter without call", f"a{PARAM}x", "tst"),
    ("marker then prose", f"use <{M} tags", "tst"),
    ("marker then an invoke in prose", f"<{M}invoke tags are", "st"),
    ("spelled marker", "a <｜DSML｜tool_calls>", "tst"),
    ("ASCII bars", "</|DSML|invoke>", "st"),
    ("half a spelled marker", "text <｜DS", "t"),
    ("second call ends the first", f"{OPEN}{CALL}{CALL}{DONE}{SHUT}", "BCDCDE"),
    ("block ends the call", f"{OPEN}{CALL}{PARAM}x{END}{SHUT}", "BCPv/DE"),
    ("call ends the value", f"{OPEN}{CALL}{PARAM}x{DONE}{SHUT}", "BCPv/DE"),
    ("block ends the value", f"{OPEN}{CALL}{PARAM}x{SHUT}", "BCPv/DE"),
    ("opening tag in a value", f"{OPEN}{CALL}{PARAM}x{CALL}y{END}{DONE}{SHUT}", "BCPv/DE"),
    ("any closer ends a value", f"{OPEN}{CALL}{PARAM}x</{M}foo>y{END}{DONE}{SHUT}", "BCPv/nDE"),
    ("think end in a value", f"{OPEN}{CALL}{PARAM}x{THINK_END}y{END}{DONE}{SHUT}", "BCPv/DE"),
    ("unknown tag", f'{OPEN}{CALL}<{M}foo bar="1">z</{M}foo>{PARAM}x{END}{DONE}{SHUT}', "BCnPv/DE"),
    ("no name", f"{OPEN}<{M}invoke>{DONE}{SHUT}", "BCDE"),
    ("cut in the opener", f"a<{M}tool_c", "tBe"),
    ("cut in the call's tag", f'{OPEN}<{M}invoke name="ge', "Bne"),
    ("cut in a value", f"{OPEN}{CALL}{PARAM}x", "BCPvde"),
    ("cut in a closer", f"{OPEN}{CALL}{PARAM}x</{M}para", "BCPv/de"),
    ("second block", f"{OPEN}{CALL}{DONE}{SHUT}and{OPEN}{CALL}{DONE}{SHUT}", "BCDEtBCDE"),
]


@pytest.mark.parametrize(("name", "text", "want"), SKETCHES, ids=[s[0] for s in SKETCHES])
def test_what_an_output_consists_of(name: str, text: str, want: str) -> None:
    """Each way of writing calls, right or wrong, is read as its row says."""
    assert sketch(text) == want


def test_a_forced_block_is_open_already() -> None:
    """After a prompt that opened the block, its closer is a block and prose is text."""
    assert sketch(f"{CALL}{DONE}{SHUT}", forced=True) == "BCDE"
    assert sketch(f"{SHUT}", forced=True) == "BE"
    assert sketch(f"no{SHUT}{SHUT}", forced=True) == "tBEs"
    assert sketch("Sorry, no.", forced=True) == "t"


@pytest.mark.parametrize(
    ("text", "reasoning", "doubtful"),
    [
        (f"a {OPEN}", False, False),
        (f"a {OPEN}", True, True),
        (f"a{THINK_END}{OPEN}", True, False),
        (f"see:\n```\n{OPEN}", False, True),
        (f"see:\n```\nx\n```\n{OPEN}", False, False),
        (f"see:\n````\n```\n{OPEN}", False, False),
        (f"`a` ``b`` {OPEN}", False, False),
        (f"``` {THINK_END}{OPEN}", True, False),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 100])
def test_a_block_is_doubtful_in_reasoning_and_in_a_fence(
    text: str, reasoning: bool, doubtful: bool, size: int
) -> None:
    """Doubt is where a quotation is likely: in thinking, and between runs of three backticks."""
    (opened,) = [e for e in parse(text, size, reasoning=reasoning) if isinstance(e, BlockOpened)]

    assert opened.doubtful is doubtful


ATOMS = [
    *["<", "</", M, THINK_END, ">", " ", "\n", "x", "é", "=", "'", '"', "name", "｜", "|", "DSML"],
    *["```", "`", "|DSML|", "｜DSML｜", "tool_calls", " calls", "invoke", "parameter", "D", "SML"],
    *[' name="a"', ' string="true"', ' string="false"', OPEN, SHUT, CALL, DONE, PARAM, END],
    *[f"<{M} calls>", f"</{M} calls>", f'<{M} invoke name="g">', f"</{M} invoke>"],
]
OUTPUTS = st.lists(st.sampled_from(ATOMS), max_size=30).map("".join)


@given(text=OUTPUTS, size=st.integers(1, 7), reasoning=st.booleans(), forced=st.booleans())
def test_any_split_gives_the_same_events(
    text: str, size: int, reasoning: bool, forced: bool
) -> None:
    """How the text was cut does not change what it means."""
    start = {"reasoning": reasoning, "forced": forced}

    assert parse(text, **start) == parse(text, size, **start)


@given(text=OUTPUTS, size=st.integers(1, 7), reasoning=st.booleans(), forced=st.booleans())
def test_the_events_are_the_whole_output(
    text: str, size: int, reasoning: bool, forced: bool
) -> None:
    """The source texts of all events, joined, are the output, and what was opened was closed."""
    events = parse(text, size, reasoning=reasoning, forced=forced)
    kinds = [type(event) for event in events]

    assert "".join(event.raw for event in events) == text
    assert kinds.count(BlockOpened) == kinds.count(BlockClosed)
    assert kinds.count(InvokeOpened) == kinds.count(InvokeClosed)


def test_nothing_is_held_that_cannot_become_markup() -> None:
    """Text comes out at once; only what may begin a marker waits."""
    parser = DsmlParser()

    assert parser.feed("a < b <b") == [Text("a < b <b")]
    assert parser.feed(" x <") == [Text(" x ")]
    assert parser.feed("=") == [Text("<=")]
    assert parser.idle
    parser.feed(f"{OPEN}{CALL}{PARAM}")
    assert parser.feed("lorem") == [ParamText("lorem")]
    assert parser.feed("2>&1<") == [ParamText("2>&1")]
    assert parser.feed(END[1:])[-1] == ParamClosed(END)


PARAMETERS = [
    (' name="a" string="true"', "a", True),
    (' name="a" string="false"', "a", False),
    (' name="a"  string="True" ', "a", True),
    (' name="a"\nstring="true"', "a", True),
    (' string="true" name="a"', "a", True),
    (" name='a' string='false'", "a", False),
    (" name=a string=true", "a", True),
    (' name="sel string="false"', "sel", False),
    (' name="a" string="false" string="true"', "a", True),
    (' name="a"', "a", None),
    (" name=a", "a", None),
    (' name="a" string="maybe"', "a", None),
    (' name="" string="true"', "", True),
    (' name="a"b c>d" string="false"', 'a"b c>d', False),
    (' name="x\ny" string="true"', "x\ny", True),
    (' nome="a"', None, None),
]


@pytest.mark.parametrize(("attributes", "name", "string"), PARAMETERS)
def test_a_parameters_tag_is_read_however_it_is_spelled(
    attributes: str, name: str | None, string: bool | None
) -> None:
    """Name and kind of a parameter, with the attributes in every spelling seen."""
    text = f"parameter{attributes}>value>"

    assert read_opener(text, 0, final=False) == Tag("parameter", len(text) - 6, name, string)


@pytest.mark.parametrize(
    ("attributes", "name"),
    [
        (' name="f"', "f"),
        (" name='f'", "f"),
        (" name=f", "f"),
        (' id="1" name="f" x="y"', "f"),
        (' name=" f\n"', " f\n"),
        (' name=""', ""),
        ("", None),
        (' nome="f"', None),
    ],
)
def test_a_calls_tag_is_read_however_it_is_spelled(attributes: str, name: str | None) -> None:
    """The name of a call, or None where there is none."""
    text = f" invoke{attributes}>"

    assert read_opener(text, 0, final=False) == Tag("invoke", len(text), name)


def test_a_tag_that_never_ends_is_no_tag() -> None:
    """After LONGEST_TAG characters without an end a tag is given up."""
    assert read_opener('invoke name="' + "x" * LONGEST_TAG, 0, final=False) == "none"
    assert read_opener('invoke name="' + "x" * 100, 0, final=False) == "more"
    assert read_opener('invoke name="f', 0, final=True) == "none"
    assert read_closer("invoke", 0, final=False) == "more"
    blanks = " \n" * LONGEST_TAG
    assert read_closer(f"invoke{blanks}>", 0, final=False) == Tag("invoke", 6)
    assert read_closer("x" * (LONGEST_TAG + 9) + ">", 0, final=False) == Tag("other", LONGEST_TAG)
    assert read_opener(f"calls{blanks}>", 0, final=False) == "none"
    assert read_opener(f"calls{blanks[:100]}", 0, final=False) == "more"
    assert read_closer("invoke\nx", 0, final=False) == Tag("invoke", 6)


@pytest.mark.parametrize("blanks", [LONGEST_TAG - 9, LONGEST_TAG, 2 * LONGEST_TAG])
def test_a_tag_far_from_its_end_is_the_same_in_any_split(blanks: int) -> None:
    """Blanks without end are not held without end."""
    far = " " * blanks
    for text in (
        f"{OPEN}{CALL}{PARAM}x</{M}parameter{far}>y{DONE}",
        f"<{M}calls{far}>{CALL}{DONE}",
    ):
        assert parse(text) == parse(text, 1) == parse(text, 7)


def test_text_sources_spell_markers_and_cannot_smuggle_one() -> None:
    """Spelled markers of a text become real ones; a lone surrogate in it does not."""
    assert mark_text("<｜DSML｜invoke></think>") == f"<{M}invoke>{THINK_END}"
    assert mark_text(f"a{M}b") == "a\ufffdb"
    assert spell(f"<{M}invoke>{THINK_END}") == "<｜DSML｜invoke></think>"
    assert quote(f"<{M}a> <|DSML|b> <｜DSML|c>") == "<dsml:a> <dsml:b> <dsml:c>"
