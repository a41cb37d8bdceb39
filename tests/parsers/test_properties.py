"""What holds for any output at all: every split says the same, nothing leaks, JSON is JSON."""

from __future__ import annotations

import json  # noqa: TID251 -- its error positions tell a beginning of JSON from broken JSON
import re
from typing import Any

import orjson
import pytest
from hypothesis import given, settings, strategies as st

from parsers import Action, Codec, Doubt, GatePolicy, Hold
from tests.parsers.support import (
    chunks,
    each,
    encode,
    function,
    masked,
    message,
    open_chat,
    under,
    whole,
)

TOOLS = [function("f", {"a": "string", "n": "integer", "o": "object"}), function("g")]
M = "｜DSML｜"
MARKER = re.compile(r"[|｜]DSML[|｜]")

PIECES = [
    *[
        "R",
        "</think>",
        "<think>",
        "\n",
        " ",
        "x",
        "é",
        "👩",
        "<",
        "</",
        ">",
        '"',
        "'",
        "`",
        "```\n",
    ],
    *["{", "}", '{"k": 1}', "NaN", "True", "1", ",", "\\", "\x01", "｜", "|", "DSML", "|DSML|", M],
    *[f"<{M}tool_calls>\n", f"</{M}tool_calls>", f"<{M} calls>", f"</{M} calls>"],
    *[f'<{M}invoke name="{name}">\n' for name in ("f", "g", "rm", 'a"b')],
    *[f"<{M}invoke>", f"<{M}invoke name='f'>", f'<{M} invoke name="f">', f"</{M}invoke>\n"],
    *[
        f'<{M}parameter name="{n}" string="{s}">'
        for n in ("a", "n", "b c")
        for s in ("true", "false")
    ],
    *[f'<{M}parameter name="a">', f'<{M}parameter string="true" name="o">', f"</{M}parameter>\n"],
    *[f"<{M}foo>", f"</{M}foo>", f"<{M}", f"</{M}", "<｜end▁of▁sentence｜>", "END"],
    *["<｜", "</｜", f"<｜{M}｜tool_calls>\n", f"</｜{M}｜parameter>", f"<｜{M}invoke name=“f”>"],
    *[f"<{M}tool_calls\n", f'<{M}invoke name="f"\n', f'<{M}parameter name="a" string="true"/>'],
    f'<{M}parameter name="n" type="integer" string="false">',
    f'<{M}tool_calls>\n<{M}invoke name="f">\n<{M}parameter name="a" string="true">x</{M}parameter>\n'
    f"</{M}invoke>\n</{M}tool_calls>",
]


@st.composite
def outputs(draw: st.DrawFn, codec: Codec) -> list[int]:
    """Token ids of an output: pieces of markup and text, some spelled by ordinary tokens."""
    ids: list[int] = []
    for piece in draw(st.lists(st.sampled_from(PIECES), max_size=25)):
        plain = draw(st.integers(0, 7)) == 0
        ids += codec.vocabulary.spell(piece) if plain else encode(codec, piece)
        if draw(st.integers(0, 30)) == 0:
            ids.append(draw(st.integers(3, 127_999)))
    return ids


POLICIES = [
    GatePolicy(),
    GatePolicy(undeclared_tool=Action.PASS, doubtful_block=Doubt.CALL),
    GatePolicy(hold=Hold.CALL, doubtful_block=Doubt.QUOTE, json_body=Action.WITHHOLD),
]
FIELDS: list[dict[str, Any]] = [
    {},
    {"thinking": {"type": "disabled"}},
    {"thinking": {"type": "disabled"}, "tool_choice": "required"},
    {"tool_choice": "none"},
    {"parallel_tool_calls": False},
    {"stop": ["END", "\n\n"]},
]


def play(
    codec: Codec, ids: list[int], cuts: list[int], finish: str, *, stream: bool, **fields: Any
) -> Any:
    exchange = open_chat(codec, stream=stream, tools=TOOLS, **fields)
    frames = exchange.start(10, 4)
    at = 0
    for cut in cuts:
        frames += exchange.receive(ids[at : at + cut])
        at += cut
    frames += exchange.receive(ids[at:])
    frames += exchange.close(finish)  # type: ignore[arg-type]
    assert exchange.finished
    return frames if stream else exchange.body()


def is_beginning(text: str) -> bool:
    """Whether a text is valid JSON or can become it."""
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        if re.search(
            r"\\u[0-9a-f]{4}\Z", text
        ):  # the decoder wants one more character after an escape
            return is_beginning(text + "x")
        return error.pos >= len(text) or error.msg.startswith("Unterminated string")
    return True


@given(data=st.data())
@settings(max_examples=250)
def test_whatever_a_model_writes(codec: Codec, data: st.DataObject) -> None:
    """Any output, split, policy and request: no exception, one message, no marker, valid JSON."""
    policy = data.draw(st.sampled_from(POLICIES))
    changed = under(codec, policy)
    ids = data.draw(outputs(codec))
    fields = data.draw(st.sampled_from(FIELDS))
    finish = data.draw(st.sampled_from(["stop", "length"]))
    cuts = data.draw(st.lists(st.integers(1, 9), max_size=len(ids)))

    want = masked(whole(play(changed, ids, [], finish, stream=False, **fields)))
    single = play(changed, ids, [1] * len(ids), finish, stream=True, **fields)
    frames = play(changed, ids, cuts, finish, stream=True, **fields)

    assert masked(message(chunks(single))) == want
    assert masked(message(chunks(frames))) == want
    for frame in [*single, *frames]:
        assert not MARKER.search(frame.decode())
    declared = {"f", "g"} if policy.undeclared_tool is Action.WITHHOLD else None
    for name, arguments, _id in want["calls"]:
        assert declared is None or name in declared
        assert is_beginning(arguments)
        if want["finish"] != "length":
            assert isinstance(orjson.loads(arguments), dict)
    assert want["finish"] in ("stop", "tool_calls", "length")
    assert (want["finish"] == "tool_calls") <= bool(want["calls"])


def played_in_tries(
    codec: Codec, tries: list[list[int]], size: int, *, stream: bool, **fields: Any
) -> tuple[dict[str, Any] | str, list[tuple[int, ...]]]:
    """Play a forced choice as a driver does: its message or its error, and the prompts it took."""
    exchange = open_chat(codec, stream=stream, tools=TOOLS, tool_choice="required", **fields)
    frames, prompts, left = exchange.start(10, 4), [], [*tries]
    while True:
        for step in each(left.pop(0), size):
            frames += exchange.receive(step)
        more = exchange.continuation() if left else None
        if more is None:
            break
        prompts.append(more.prompt_ids)
    frames += exchange.close("stop")
    assert not any(MARKER.search(frame.decode()) for frame in frames)
    if exchange.error is not None:
        return exchange.error.code, prompts
    return masked(message(chunks(frames)) if stream else whole(exchange.body())), prompts


@given(data=st.data())
@settings(max_examples=100)
def test_whatever_a_model_writes_in_place_of_a_forced_call(
    codec: Codec, data: st.DataObject
) -> None:
    """Tries of any output and split: one message or one error; never empty without a call."""
    fields = data.draw(st.sampled_from([{}, {"thinking": {"type": "disabled"}}]))
    tries = [data.draw(outputs(codec)) for _ in range(3)]
    size = data.draw(st.integers(1, 9))

    want, prompts = played_in_tries(codec, tries, 10_000, stream=False, **fields)
    assert played_in_tries(codec, tries, 1, stream=True, **fields) == (want, prompts)
    assert played_in_tries(codec, tries, size, stream=True, **fields) == (want, prompts)
    assert len(prompts) <= (2 if not fields else 1)
    if isinstance(want, str):
        assert want == "forced_call_missing"
        return
    for name, arguments, _id in want["calls"]:
        assert name in ("f", "g")
        assert isinstance(orjson.loads(arguments), dict)
    if not want["calls"]:
        assert want["content"].strip()
        assert want["bathyal"]["unmet"] == "tool_choice"


@given(data=st.data())
def test_what_was_sent_is_at_every_moment_the_beginning_of_json(
    codec: Codec, data: st.DataObject
) -> None:
    """After each single frame the arguments of every call are a beginning of valid JSON."""
    ids = data.draw(outputs(codec))
    sent: dict[int, str] = {}
    for chunk in chunks(play(codec, ids, [1] * len(ids), "stop", stream=True)):
        for call in chunk["choices"][0]["delta"].get("tool_calls", ()):
            sent[call["index"]] = sent.get(call["index"], "") + call["function"]["arguments"]
            assert is_beginning(sent[call["index"]])


VALUES = st.text() | st.sampled_from(
    ["</think>", "2>&1", "a</", "<", "</｜DSML｜invoke>", "\ufffd"]
)
JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | VALUES,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
NAMES = st.text(max_size=12).filter(lambda name: not re.search(r'"\s+string\s*=|"\s*>|\\', name))


@given(arguments=st.dictionaries(NAMES, JSON_VALUES, max_size=4), data=st.data())
@settings(max_examples=150)
def test_arguments_written_as_the_prompt_shows_them_come_back(
    codec: Codec, arguments: dict[str, Any], data: st.DataObject
) -> None:
    """Any JSON arguments, spelled in DSML as the codec spells history, are delivered as they were.

    The property names are written raw, as the codec writes them in a prompt.
    """
    special = lambda text: encode(codec, text)  # noqa: E731 -- markup; values are ordinary tokens
    plain = codec.vocabulary.spell
    ids = [*special(f'R</think>\n\n<{M}tool_calls>\n<{M}invoke name="f">\n')]
    for name, value in arguments.items():
        string = isinstance(value, str)
        text = value if string else json.dumps(value, ensure_ascii=False)
        ids += [
            *special(f"<{M}"),
            *plain(f'parameter name="{name}" string="{str(string).lower()}">'),
        ]
        ids += [*plain(text), *special(f"</{M}parameter>\n")]
    ids += special(f"</{M}invoke>\n</{M}tool_calls>")
    size = data.draw(st.integers(1, 9))

    got = message(chunks(play(codec, ids, [size] * (len(ids) // size), "stop", stream=True)))

    ((_name, sent, _id),) = got["calls"]
    assert json.loads(sent) == arguments  # orjson reads integers beyond 64 bits as floats
    assert set(got["bathyal"] or ()) <= {"schema_violations"}  # values of any type were drawn


@pytest.mark.parametrize("steps", [1, 4, 64])
def test_no_tools_no_gate(codec: Codec, bare: Codec, steps: int) -> None:
    """Without tools ids go straight to the codec, and markup is the codec's text."""
    ids = encode(codec, f"R</think>a <{M}tool_calls> b")
    for of in (codec, bare):
        exchange = open_chat(of, stream=True)
        frames = exchange.start(10, 4)
        for piece in each(ids, steps):
            frames += exchange.receive(piece)
        got = message(chunks(frames + exchange.close("stop")))
        assert got["content"] == f"a <{M}tool_calls> b"
