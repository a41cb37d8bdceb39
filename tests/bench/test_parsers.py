"""The benchmark of the protocol core runs and measures what it says; figures are not judged."""

from __future__ import annotations

import sys
from pathlib import Path

import orjson
import pytest

from bench import parsers, rows
from parsers import Codec


def test_the_command_writes_a_row_per_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every mode at one and at eight ids a delta, in microseconds."""
    monkeypatch.setattr(sys, "argv", ["bench.parsers", "--tokens", "40", "--repeats", "2"])
    monkeypatch.setattr(rows, "RESULTS", tmp_path)

    parsers.main()

    found = [
        orjson.loads(line) for line in (tmp_path / "parsers-cpu.jsonl").read_bytes().splitlines()
    ]
    modes = ["codec", *parsers.MODES]
    assert [row["mode"] for row in found] == modes + [f"{mode}x8" for mode in modes]
    assert [row["deltas"] for row in found] == [40] * 6 + [5] * 6
    assert all(row["us_per_delta"]["median"] > 0 and row["us_per_delta"]["n"] == 2 for row in found)


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("plain", b'"content":"'),
        ("reasoning", b'"reasoning_content":"'),
        ("text", b'"content":"'),
        ("string", b'"arguments":"'),
        ("json", b'"content":"'),
    ],
)
def test_a_mode_measures_what_it_is_called(mode: str, words: bytes) -> None:
    """The frames of the measured tokens are of the named kind."""
    model = parsers.ServedModel(
        "m", "v4.1", str(parsers.TINY_CHECKPOINT / "tokenizer.json"), 10_000, eos_token_ids=(1,)
    )
    codec = Codec.load(model)
    exchange = parsers.opened(codec, mode)
    frames = [f for i in parsers.ids_of(codec, 30) for f in exchange.receive([i])]

    assert len(frames) > 20
    assert all(words in frame for frame in frames)
