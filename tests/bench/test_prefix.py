"""The prefix benchmark runs and measures what it says; its figures are not judged here."""

from __future__ import annotations

import sys
from pathlib import Path

import orjson
import pytest

from bench import prefix, rows
from tests.engine.model import build


def test_the_command_writes_both_turns_with_and_without_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second turn finds all of the first but the last sampled token; without a cache nothing."""
    folder = build.write(tmp_path / "some-model", build.v41())
    arguments = "--repeats 2 --history-tokens 50 --answer-tokens 6 --new-tokens 9 --device cpu"
    monkeypatch.setattr(
        sys, "argv", ["bench.prefix", "--model", str(folder), "--random", *arguments.split()]
    )
    monkeypatch.setattr(rows, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(prefix, "WARM_UPS", 0)

    prefix.main()

    lines = (tmp_path / "results" / "prefix-some-model-random-cpu.jsonl").read_bytes().splitlines()
    found = [orjson.loads(line) for line in lines]
    names = ("bench", "prefix_cache", "prompt_tokens", "cached_tokens")
    assert [tuple(row[name] for name in names) for row in found] == [
        ("first_turn", False, 44, 0),
        ("second_turn", False, 59, 0),
        ("first_turn", True, 44, 0),
        ("second_turn", True, 59, 49),
    ]
    assert all(row["ttft_ms"]["median"] > 0 and row["ttft_ms"]["n"] == 2 for row in found)


def test_an_answer_longer_than_the_history_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The history is the first prompt and its answer, so the answer is shorter."""
    monkeypatch.setattr(sys, "argv", ["bench.prefix", "--answer-tokens", "600"])

    with pytest.raises(SystemExit):
        prefix.main()
    assert "expected fewer than the 600 history tokens, got 600" in capsys.readouterr().err
