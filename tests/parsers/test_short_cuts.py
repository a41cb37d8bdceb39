"""The short cuts of a step change nothing: what they write is what the long way writes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import orjson
import pytest
from hypothesis import given, strategies as st

from parsers import Codec, Exchange
from parsers.exchange import GATHER
from parsers.pipeline import Pipeline
from tests.parsers.support import each, encode, function, masked, open_chat, whole

TOOLS = [function("f", {"s": "string", "n": "integer"})]
PIECES = st.lists(
    st.sampled_from(
        [
            *(
                "plain words ",
                "a",
                '"',
                "\\",
                "\n",
                "｜",
                "|",
                "|D",
                "|DSML",
                "<",
                "</",
                "`",
                "é",
                "🎉",
            ),
            "</think>",
            '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="s" string="true">',
            '<｜DSML｜parameter name="n" string="false">',
            "</｜DSML｜parameter>\n",
            "</｜DSML｜invoke>\n",
            "</｜DSML｜tool_calls>",
        ]
    ),
    max_size=24,
)


def played(exchange: Exchange, ids: Sequence[int], size: int) -> list[bytes]:
    frames = exchange.start(1, 0)
    for step in each(ids, size):
        frames += exchange.receive(step)
    return frames + exchange.close("stop", len(ids))


def the_long_way(exchange: Exchange) -> Exchange:
    """Take both short cuts of the pipeline away: every id is watched."""
    pipeline = exchange._pipeline
    assert isinstance(pipeline, Pipeline)

    pipeline._watched = frozenset(range(200_000))
    return exchange


def compared(codec: Codec, ids: Sequence[int], size: int) -> tuple[Any, Any]:
    short = open_chat(codec, tools=TOOLS, stream=True)
    long = the_long_way(open_chat(codec, tools=TOOLS, stream=True))
    return tuple(  # type: ignore[return-value]
        [masked(frame.decode()) for frame in played(exchange, ids, size)]
        for exchange in (short, long)
    )


@given(PIECES, st.integers(1, 9))
def test_frames_past_the_parser_are_those_behind_it(
    codec: Codec, pieces: list[str], size: int
) -> None:
    """Byte for byte, but for random ids, in any order of text, calls, strings and half markers."""
    short, long = compared(codec, encode(codec, "".join(pieces)), size)
    assert _timeless(short) == _timeless(long)


def _timeless(frames: list[str]) -> list[str]:
    return [re.sub(r'"created":\d+', '"created":0', frame) for frame in frames]


def test_a_short_cut_over_a_marker_would_be_seen(
    codec: Codec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted fault: a vocabulary that watches nothing lets a call through as text."""
    ids = encode(codec, 'x</think><｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n')
    monkeypatch.setattr(codec.vocabulary, "watched", frozenset())
    short, long = compared(codec, ids, 1)
    assert _timeless(short) != _timeless(long)


@given(PIECES, st.integers(1, 9))
def test_a_whole_reply_is_the_same_however_much_is_gathered(
    codec: Codec, pieces: list[str], size: int
) -> None:
    """One step of all tokens, and steps that fill the store several times over."""
    ids = encode(codec, "".join(pieces) + "and so on, " * GATHER)
    bodies = []
    for step in (size, len(ids)):
        exchange = open_chat(codec, tools=TOOLS)
        assert played(exchange, ids, step) == []
        bodies.append(masked(whole(exchange.body())))
    exchange = open_chat(codec, tools=TOOLS)
    exchange.start(1, 0)
    for taken in each(ids, size):
        if not exchange.gather(taken):
            assert exchange.receive(taken) == []
    exchange.close("stop", len(ids))
    bodies.append(masked(whole(exchange.body())))
    assert bodies[0] == bodies[1] == bodies[2]


def test_log_probabilities_are_gathered_with_their_tokens(codec: Codec) -> None:
    """Each token keeps its own, whatever the steps were."""
    ids = encode(codec, "one two three")
    logprobs = [(-float(i), [(id_, -float(i))]) for i, id_ in enumerate(ids)]
    found = []
    for size in (1, 2, len(ids)):
        exchange = open_chat(
            codec, logprobs=True, top_logprobs=1, thinking={"type": "disabled"}, tools=TOOLS
        )
        exchange.start(1, 0)
        for at in range(0, len(ids), size):
            exchange.receive(ids[at : at + size], logprobs[at : at + size])
        exchange.close("stop", len(ids))
        (choice,) = orjson.loads(exchange.body())["choices"]
        found.append([one["logprob"] for one in choice["logprobs"]["content"]])
    assert found == [[-float(i) for i in range(len(ids))]] * 3
