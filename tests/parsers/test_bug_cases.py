"""Faults seen in the field, replayed: every case of a model's output, in several splits.

The inputs are in tests/data/codec/bug_cases.jsonl; what is expected here is the case's own
expectation under the default policy, in the form of ``said``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson
import pytest

from parsers import Codec
from tests.parsers.support import chunks, each, encode, message, said, whole

LINES = (Path(__file__).parents[1] / "data/codec/bug_cases.jsonl").read_bytes().splitlines()
CASES = {case["id"]: case for case in map(orjson.loads, LINES)}
PLAYABLE = {
    id_: case
    for id_, case in CASES.items()
    if case["kind"] in ("model_output", "stream")
    and "model_output" in case["input"]
    and case["input"].get("endpoint", "/v1/chat/completions") == "/v1/chat/completions"
}


def reply(
    *calls: tuple[str, str], content: str = "", reasoning: str = "R", finish: str | None = None
) -> dict[str, Any]:
    finish = finish or ("tool_calls" if calls else "stop")
    return {"content": content, "reasoning": reasoning, "finish": finish, "calls": list(calls)}


OSLO = ("get_weather", '{"city": "Oslo"}')
ROME = ("get_weather", '{"city": "Rome"}')
LOREM = re.search(r"lorem[^<]*", PLAYABLE["long-arg-buffered"]["input"]["model_output"])
assert LOREM is not None

EXPECTED: dict[str, dict[str, Any]] = {
    "dsml-close-tag-after-gt": reply(("bash", '{"command": "ls 2>&1"}')),
    "dsml-other-block-name": reply(OSLO),
    "dsml-in-open-think": reply(OSLO, reasoning="I should look it up."),
    "delta-index-missing": reply(OSLO, ROME),
    "name-repeated-each-chunk": reply(
        (
            "read_file",
            '{"path": "a/very/long/path/so/that/arguments/take/many/chunks.txt"}',
        )
    ),
    "parallel-calls-all-index-0": reply(
        ("add", '{"a": 2, "b": 2}'), ("get_weather", '{"city": "Tokyo"}')
    ),
    "args-double-encoded": reply(("save", '{"doc": {"a": "{not json}"}}')),
    "args-sent-twice": reply(("bash", '{"command": "ls /srv"}')),
    "finish-tool-calls-without-calls": reply(),
    "length-inside-args": reply(
        ("write", '{"path": "a.txt", "text": "once upon a'), finish="length"
    ),
    "parallel-false-still-two": reply(OSLO),
    "utf8-rune-split-stream": reply(
        ("say", '{"t": "日本語 👩‍👩‍👧 é"}'), content="好👩‍💻", reasoning="思考"
    ),
    "numeric-text-kept-as-string": reply(("f", '{"zip": "02134", "exp": "1e5", "flag": "true"}')),
    "number-sent-as-string": reply(("search", '{"pattern": "foo", "limit": "50"}')),
    "untyped-param-forced-string": reply(("put", '{"value": 5}')),
    "typed-arg-cut-at-flush": reply(("f", '{"a": {"k":1.50,"l":[ 1 , 2 ]}, "b": "z"}')),
    "v41-spaced-tags-unparsed": reply(OSLO),
    "held-marker-prefix-lost": reply(content="so 1 < 2, and 2 <"),
    "long-arg-buffered": reply(("write", f'{{"text": "{LOREM[0]}"}}')),
    "quoted-dsml-in-answer": reply(
        content="It looks like this:\n```\n<dsml:tool_calls>\n"
        '<dsml:invoke name="bash">\n<dsml:parameter name="command" string="true">rm -rf /tmp/x'
        "</dsml:parameter>\n</dsml:invoke>\n</dsml:tool_calls>\n```\nThat is all."
    ),
    "strict-broken-key-quote": reply(("submit", '{"selected": ["A", "C"]}')),
    "tool-parse-error-becomes-500": reply(
        content='[A call of the tool "f" was not delivered: its arguments are not valid.]'
    ),
    "finish-stop-when-last-chunk-is-eos": reply(OSLO),
    "dsml-missing-wrapper": reply(OSLO, content="Let me see."),
    "exact-text-request-becomes-call": reply(("record_item", "{}")),
}


def finely(codec: Codec, text: str) -> list[int]:
    """One token per byte, but real special tokens for markers and the end of turn."""
    out: list[int] = []
    for part in re.split("(｜DSML｜|</think>|<｜end▁of▁sentence｜>)", text):
        special = part.startswith(("｜DSML", "</think", "<｜end"))
        out += encode(codec, part) if special else codec.vocabulary.spell(part)
    return out


def play(codec: Codec, case: dict[str, Any], ids: Sequence[int], size: int, *, stream: bool) -> Any:
    body = {**case["input"]["request"], "stream": stream}
    exchange = codec.open_exchange("chat", orjson.dumps(body), exchange_id="ID")
    frames = exchange.start(10, 4)
    for piece in each(ids, size):
        if not exchange.finished:
            frames += exchange.receive(piece)
    frames += exchange.close(case["input"].get("backend_finish", "stop"))
    return message(chunks(frames)) if stream else whole(exchange.body())


def test_every_case_of_an_output_is_expected_here() -> None:
    """No case of the file is left out, none is made up."""
    assert set(EXPECTED) == set(PLAYABLE)


@pytest.mark.parametrize("id_", EXPECTED)
def test_the_fault_does_not_occur(codec: Codec, id_: str) -> None:
    """The case's expectation holds token by token, byte by byte, in steps, and for a whole reply."""
    case = PLAYABLE[id_]
    text = case["input"]["model_output"]

    for ids in (encode(codec, text), finely(codec, text)):
        for size in (1, 2, 3, 5, 7, 11, 100_000):
            assert said(play(codec, case, ids, size, stream=True)) == EXPECTED[id_]
        assert said(play(codec, case, ids, 1, stream=False)) == EXPECTED[id_]


def test_a_long_argument_flows(codec: Codec) -> None:
    """A long string is sent as it comes, not in one piece at its end."""
    case = PLAYABLE["long-arg-buffered"]
    ids = encode(codec, case["input"]["model_output"])
    body = orjson.dumps({**case["input"]["request"], "stream": True})
    exchange = codec.open_exchange("chat", body, exchange_id="ID")
    exchange.start(10, 4)
    sent = [len(exchange.receive([id_])) for id_ in ids]

    silent = max(len(run) for run in "".join("01"[n > 0] for n in sent).split("1"))
    assert silent < 40  # the opening tags; no longer silence inside the value


def test_what_was_withheld_is_reported(codec: Codec) -> None:
    """A call lost to its arguments is told in the reply, with the reason and what was written."""
    case = PLAYABLE["tool-parse-error-becomes-500"]
    got = play(codec, case, encode(codec, case["input"]["model_output"]), 1, stream=True)

    (entry,) = got["bathyal"]["withheld_calls"]
    assert (entry["name"], entry["reason"]) == ("f", "broken_json")
    assert entry["raw"].startswith('<dsml:invoke name="f">')


@pytest.mark.parametrize("id_", ["quoted-dsml-in-answer"])
def test_a_quotation_is_counted(codec: Codec, id_: str) -> None:
    """Markup shown as text is told in the reply."""
    case = PLAYABLE[id_]
    got = play(codec, case, encode(codec, case["input"]["model_output"]), 1, stream=True)

    assert got["bathyal"] == {"quoted_markers": 1}
