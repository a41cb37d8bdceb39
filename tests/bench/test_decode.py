"""The decode benchmark runs and measures what it says; its figures are not judged here."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator
from pathlib import Path

import orjson
import pytest

from bench import decode, rows
from engine.api import GenerateRequest, SamplingParams, TokenDelta
from tests.engine.model import build


def test_the_command_writes_a_row_per_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TTFT, one and two streams, and the host's share, each with its unit."""
    folder = build.write(tmp_path / "some-model", build.v41())
    arguments = "--repeats 2 --new-tokens 4 --prompt-tokens 20 --streams 1 2 --device cpu"
    monkeypatch.setattr(
        sys, "argv", ["bench.decode", "--model", str(folder), "--random", *arguments.split()]
    )
    monkeypatch.setattr(rows, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(decode, "WARM_UPS", 0)
    monkeypatch.setattr(decode, "HOST_STEPS", 20)

    decode.main()

    lines = (tmp_path / "results" / "decode-some-model-random-cpu.jsonl").read_bytes().splitlines()
    found = [orjson.loads(line) for line in lines]
    assert [(row["bench"], row["batch"]) for row in found] == [
        ("ttft", 1),
        ("decode", 1),
        ("decode", 2),
        ("host", 1),
        ("host", 1),
        ("host", 2),
        ("host", 2),
    ]
    for row in found:
        names = {"ttft": "ttft_ms", "decode": "ms_step", "host": "us_step"}
        assert row[names[row["bench"]]]["median"] > 0
        assert row[names[row["bench"]]]["n"] == 2


class Metronome:
    """A backend whose every token takes the same time on a clock of its own."""

    def __init__(self, clock: list[float]) -> None:
        self.clock = clock

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
        for _ in range(request.sampling.max_tokens):
            self.clock[0] += 0.5
            yield TokenDelta(request.id, (1,))


def test_times_are_those_of_the_deltas(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first token's time and the last one's are read when their deltas come."""
    clock = [100.0]
    monkeypatch.setattr(decode.time, "perf_counter", lambda: clock[0])
    request = GenerateRequest("a", (1,), SamplingParams(4))

    (timing,) = asyncio.run(decode.time_batch(Metronome(clock), [request]))  # type: ignore[arg-type]

    assert timing == decode.Timing(0.5, 2.0, (0.5, 1.0, 1.5, 2.0))


def test_prompts_share_no_prefix() -> None:
    """No measurement is helped by an earlier request's prompt; the ids repeat between runs."""
    first, again = decode.Requests(2000), decode.Requests(2000)
    made = [first.make(600, 1) for _ in range(5)]

    assert len({r.prompt_ids[:2] for r in made}) == 5
    assert len({r.id for r in made}) == 5
    assert [again.make(600, 1) for _ in range(5)] == made
