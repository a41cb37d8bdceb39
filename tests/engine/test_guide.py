"""A request's guide decides which tokens may come, in the step's own sampler."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from engine.api import FinishReason, GenerateRequest, SamplingParams, TokenDelta, TokenGuide
from engine.core import EngineCore
from engine.device.fast_runner import FastRunner
from engine.device.prompt_pass import PromptPass
from engine.device.runner import ModelRunner
from engine.model.fast import FastModel
from engine.model.v4 import Model
from engine.plan.step import Chunk
from tests.engine.device.engines import (
    VOCAB,
    load_fast,
    load_reference,
    make_fast,
    make_reference,
    requests,
    run,
    same,
)
from tests.engine.model import build

PROMPT = tuple(range(40, 60))


def mask(*token_ids: int) -> bytes:
    bits = np.zeros(32 * -(-VOCAB // 32), np.uint8)
    bits[list(token_ids)] = 1
    return np.packbits(bits, bitorder="little").tobytes()


class Turns:
    """In turn: one of three tokens, any token, one certain token. Notes what it was asked."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []

    def next(self, generated: Sequence[int]) -> bytes | int | None:
        self.asked.append(list(generated))
        return (mask(3, 170, 287), None, 101)[len(generated) % 3]


class Answers:
    """Gives the same answer each time, after some tokens without one."""

    def __init__(self, answer: Callable[[], bytes | int | None], after: int = 2) -> None:
        self.answer, self.after = answer, after

    def next(self, generated: Sequence[int]) -> bytes | int | None:
        return self.answer() if len(generated) >= self.after else None


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[FastModel, Model]:
    path = build.write(tmp_path_factory.mktemp("guide") / "model", build.v4(), seed=11)
    return load_fast(path), load_reference(path)


def request(name: str, guide: TokenGuide | None, temperature: float = 0.0) -> GenerateRequest:
    sampling = SamplingParams(12, temperature, seed=5, ignore_eos=True)
    return GenerateRequest(name, PROMPT, sampling, guide=guide)


def serve(core: EngineCore, *wanted: GenerateRequest) -> dict[str, list[TokenDelta]]:
    found: dict[str, list[TokenDelta]] = {one.id: [] for one in wanted}
    for one in wanted:
        core.submit(one)
    while core.has_work:
        for delta in core.step():
            found[delta.request_id].append(delta)
        core.check_integrity()
    return found


def tokens(deltas: list[TokenDelta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


@pytest.mark.parametrize("form", ["fast", "reference"])
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_only_what_the_guide_allows_comes(
    models: tuple[FastModel, Model], form: str, temperature: float
) -> None:
    """Masks and forced tokens hold at each place, and its neighbours get what they get alone."""
    make = (lambda: make_fast(models[0])) if form == "fast" else (lambda: make_reference(models[1]))
    guide = Turns()

    alone = serve(make(), request("free", None, temperature))
    found = serve(make(), request("free", None, temperature), request("guided", guide, temperature))

    got = tokens(found["guided"])
    assert len(got) == 12
    assert set(got[0::3]) <= {3, 170, 287}
    assert got[2::3] == [101] * 4
    assert guide.asked == [got[:n] for n in range(12)]
    assert tokens(found["free"]) == tokens(alone["free"]) != got


def test_the_captured_step_draws_under_the_guide(models: tuple[FastModel, Model]) -> None:
    """Each token after the first comes from the step over the static buffers, none ahead of the guide."""
    core = make_fast(models[0])
    runner = core._runner
    assert isinstance(runner, FastRunner)
    begun: list[Chunk] = []
    begin = runner._begin

    def noting(chunks: Sequence[Chunk]) -> PromptPass:
        begun.extend(chunks)
        return begin(chunks)

    runner._begin = noting  # type: ignore[method-assign]

    fast = serve(core, request("a", Turns(), 0.8), request("b", Turns(), 0.0))
    reference = serve(
        make_reference(models[1]), request("a", Turns(), 0.8), request("b", Turns(), 0.0)
    )

    assert {len(chunk.token_ids) for chunk in begun} == {16, 4}, "none is a single token"
    assert runner.num_ahead == 0
    assert {n: tokens(d) for n, d in fast.items()} == {n: tokens(d) for n, d in reference.items()}


def test_a_mask_ends_with_its_request(models: tuple[FastModel, Model]) -> None:
    """Whoever gets the row of a request that was masked and forced draws freely."""
    core = make_fast(models[0])
    serve(core, *(request(f"g{n}", Turns()) for n in range(4)))
    core._scheduler.prefix.clear()

    after = serve(core, *(request(f"f{n}", None) for n in range(4)))
    fresh = serve(make_fast(models[0]), request("f0", None))

    assert all(tokens(deltas) == tokens(fresh["f0"]) for deltas in after.values())


def test_guided_requests_under_load(models: tuple[FastModel, Model]) -> None:
    """Among others that come, end and are preempted, guided ones get the reference's tokens."""
    load = [
        (dataclasses.replace(one, guide=Turns()) if number % 3 == 0 else one, wait, abort)
        for number, (one, wait, abort) in enumerate(requests(random.Random(4), 12))
    ]

    got, want = run(make_fast(models[0]), load), run(make_reference(models[1]), load)

    assert same(got, want, load)


def _raise() -> None:
    raise LookupError("no such rule")


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (_raise, "no such rule"),
        (lambda: VOCAB, f"expected a token id below {VOCAB}, got {VOCAB}"),
        (lambda: -1, "got -1"),
        (lambda: b"\1\0\0\0", f"expected a mask of 36 bytes for {VOCAB} tokens, got 4"),
        (lambda: bytes(36), "a mask of none"),
        (lambda: True, "expected None, a token id or the bytes of a mask, got bool"),
        (lambda: np.int64(3), "or the bytes of a mask, got int64"),
        (lambda: np.full(36, -1, np.int32), "got ndarray"),
        (lambda: memoryview(np.full(36, -1, np.int32)), "got memoryview"),
        (lambda: "x" * 36, "got str"),
    ],
    ids=[
        *("raises", "too large", "negative", "short", "empty"),
        *("bool", "numpy's", "wide", "wide view", "text"),
    ],
)
@pytest.mark.parametrize("form", ["fast", "reference"])
def test_a_wrong_answer_ends_that_request_alone(
    models: tuple[FastModel, Model], form: str, answer: Callable[[], Any], words: str
) -> None:
    """A guide that fails ends its request with what it did; the engine and the others go on."""
    core = make_fast(models[0]) if form == "fast" else make_reference(models[1])

    found = serve(core, request("wrong", Answers(answer)), request("right", Turns()))

    last = found["wrong"][-1]
    assert last.finish_reason is FinishReason.ERROR
    assert words in str(last.error)
    assert len(tokens(found["wrong"])) == 2
    assert len(tokens(found["right"])) == 12
    assert core.stats().free_blocks == core.stats().total_blocks


@pytest.mark.parametrize("form", ["fast", "reference"])
def test_a_guides_failure_leaves_the_prefix_cache(
    models: tuple[FastModel, Model], form: str
) -> None:
    """What others have left is found afterwards, and what the failed one's prompt left is true."""
    core = make_fast(models[0]) if form == "fast" else make_reference(models[1])
    other = dataclasses.replace(request("other", None), prompt_ids=tuple(range(100, 140)))
    fresh = serve(core, other, request("free", None))
    core._scheduler.prefix.clear()
    serve(core, other)

    serve(core, request("wrong", Answers(_raise)))

    found = serve(core, other, request("free", None))
    assert {n: tokens(d) for n, d in found.items()} == {n: tokens(d) for n, d in fresh.items()}
    for deltas in found.values():
        assert deltas[0].usage is not None
        assert deltas[0].usage.cached_tokens >= 16


def test_logits_that_cannot_be_used_count_before_the_guide(
    models: tuple[FastModel, Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the device is in doubt as well, that is told, and all that was kept is forgotten."""
    core = make_reference(models[1])
    serve(core, request("free", None))
    assert core.stats().snapshots
    runner = core._runner
    assert isinstance(runner, ModelRunner)
    monkeypatch.setattr(runner, "_draw", lambda logits, draws: [None for _ in draws])

    found = serve(core, request("wrong", Answers(_raise, after=0)))

    assert "no usable probabilities" in str(found["wrong"][-1].error)
    assert core.stats().snapshots == 0
