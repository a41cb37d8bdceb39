"""Slips in the spelling of tags that were seen in the field: understood, in any split.

The outputs are composed here; the thread beside each shows that models write so.
"""

from __future__ import annotations

import re
from typing import Any

import orjson
import pytest
from hypothesis import given, strategies as st

from parsers import Codec
from tests.parsers.support import (
    chunks,
    drive,
    each,
    encode,
    function,
    message,
    open_chat,
    said,
    talk,
)

M = "｜DSML｜"
TOOLS = [function("f", {"a": "string", "n": "integer"}), function("g")]
INVOKE, DONE = f'<{M}invoke name="f">\n', f"</{M}invoke>\n"
OPEN, SHUT = f"<{M}tool_calls>\n", f"</{M}tool_calls>"
A = f'<{M}parameter name="a" string="true">x</{M}parameter>\n'
N = f'<{M}parameter name="n" string="false">5</{M}parameter>\n'
REPAIRED = [{"name": "f", "rule": "missing_string_attribute", "parameter": "n"}]

# What is written, the arguments that are meant, and what is reported.
SLIPS: dict[str, tuple[str, dict[str, Any], Any]] = {
    # anomalyco/opencode#24566
    "block opener without its end": (f"<{M}tool_calls\n{INVOKE}{A}{DONE}{SHUT}", {"a": "x"}, None),
    "call opener without its end": (
        f'{OPEN}<{M}invoke name="f"\n{A}{N}{DONE}{SHUT}',
        {"a": "x", "n": 5},
        None,
    ),
    "parameter opener without its end": (
        f'{OPEN}{INVOKE}<{M}parameter name="a" string="true"</{M}parameter>\n{N}{DONE}{SHUT}',
        {"a": "", "n": 5},
        None,
    ),
    # syt2/paper-chat-for-zotero#28
    "typographic quotes": (
        f"{OPEN}<{M}invoke name=“f”>\n"
        f"<{M}parameter name=‘a’ string=“true”>x “y”</{M}parameter>\n{DONE}{SHUT}",
        {"a": "x “y”"},
        None,
    ),
    # MetaFARS/codex-relay#49, lsdefine/GenericAgent#804, diegosouzapw/OmniRoute#13930
    "doubled bars": (
        (OPEN + INVOKE + A + N + DONE + SHUT).replace(M, f"｜{M}｜"),
        {"a": "x", "n": 5},
        None,
    ),
    "a bar too many before the marker": (
        (OPEN + INVOKE + A + N + DONE + SHUT).replace(M, f"｜{M}"),
        {"a": "x", "n": 5},
        None,
    ),
    # adolfousier/opencrabs#419
    "closers with doubled bars": (
        OPEN + INVOKE + (f'<{M}parameter name="a" string="true">2>&1</｜{M}｜parameter>\n') + SHUT,
        {"a": "2>&1"},
        None,
    ),
    "parameter that closes itself": (
        f'{OPEN}{INVOKE}<{M}parameter name="a" string="true"/>\n{N}{DONE}{SHUT}',
        {"a": "", "n": 5},
        None,
    ),
    # Luce-Org/lucebox#742 asks to be as tolerant of what else a tag says
    "attribute of another dialect": (
        f'{OPEN}{INVOKE}<{M}parameter name="n" type="integer">5</{M}parameter>\n{DONE}{SHUT}',
        {"n": 5},
        REPAIRED,
    ),
    "attribute between": (
        f'{OPEN}{INVOKE}<{M}parameter name="n" type="integer" string="false">5</{M}parameter>\n'
        f"{A}{DONE}{SHUT}",
        {"n": 5, "a": "x"},
        None,
    ),
}


def finely(codec: Codec, text: str) -> list[int]:
    """One token per byte, but for the markers."""
    parts = re.split(f"({M}|</think>)", text)
    return [
        id_
        for part in parts
        for id_ in (
            encode(codec, part) if part in (M, "</think>") else codec.vocabulary.spell(part)
        )
    ]


@pytest.mark.parametrize("slip", SLIPS)
@pytest.mark.parametrize("spaced", [False, True])
@given(cuts=st.lists(st.integers(1, 9), max_size=60))
def test_a_slip_is_understood(codec: Codec, slip: str, spaced: bool, cuts: list[int]) -> None:
    """The call that is meant is delivered, in V4's and V4.1's spelling, however it is cut."""
    output, wanted, repaired = SLIPS[slip]
    if spaced:
        output = re.sub(f"({M}｜?)(?=[a-z])", r"\1 ", output)
    for ids in (
        encode(codec, f"R</think>Text.\n\n{output}"),
        finely(codec, f"R</think>Text.\n\n{output}"),
    ):
        pieces, at = [], 0
        for cut in cuts:
            pieces.append(ids[at : at + cut])
            at += cut
        pieces.append(ids[at:])
        for steps in (pieces, each(ids)):
            got = message(chunks(drive(open_chat(codec, stream=True, tools=TOOLS), steps)))
            ((name, arguments, _),) = got["calls"]
            assert (name, orjson.loads(arguments)) == ("f", wanted)
            assert (got["content"], got["finish"]) == ("Text.", "tool_calls")
            assert (got["bathyal"] or {}).get("repaired_calls") == repaired


@pytest.mark.parametrize(
    "text",
    ["<｜", "</｜", "a <｜b", "x < ｜ y", "<｜｜", "if a <｜> b", "｜"],
)
@pytest.mark.parametrize("where", ["answer", "reasoning", "argument"])
def test_bars_of_a_text_are_its_own(codec: Codec, text: str, where: str) -> None:
    """What looks like the beginning of a doubled marker and is none comes through whole."""
    call = INVOKE + f'<{M}parameter name="a" string="true">{text}</{M}parameter>\n' + DONE
    output = {
        "answer": f"R</think>{text}",
        "reasoning": f"{text}</think>A",
        "argument": f"R</think>{OPEN}{call}{SHUT}",
    }[where]
    for ids in (encode(codec, output), finely(codec, output)):
        got = talk(codec, ids, tools=TOOLS)
        if where == "argument":
            assert orjson.loads(got["calls"][0][1]) == {"a": text}
        else:
            assert said(got)["content" if where == "answer" else "reasoning"] == text


@pytest.mark.parametrize(
    "inside",
    [
        f"<{M}invoke f>\n",  # no tag at all
        '[{"name": "f", "arguments": {"a": "x"}}]',
        "f(a='x')",
        A,
    ],
)
def test_a_block_that_cannot_be_read_is_no_empty_reply(codec: Codec, inside: str) -> None:
    """An agent would take silence for the end of its task: the reply says what was lost."""
    got = talk(codec, f"R</think>{OPEN}{inside}{SHUT}", tools=TOOLS)

    assert (got["calls"], got["finish"]) == ([], "stop")
    assert got["content"].endswith("was not delivered: it cannot be read.]")
    (entry,) = got["bathyal"]["withheld_calls"]
    assert (entry["name"], entry["reason"]) in [(None, "malformed_call"), ("f", "malformed_call")]
    assert talk(codec, f"R</think>Done.{OPEN}{inside}{SHUT}", tools=TOOLS)["content"] == "Done."
