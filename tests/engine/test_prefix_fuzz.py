"""Engine with the prefix cache against the same engine without, under random load.

Prompts go on from earlier requests' sequences, whole or cut anywhere; requests are aborted; pools
are so small that snapshots are evicted and requests preempted.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from engine.api import EngineStats, FinishReason, GenerateRequest, SamplingParams
from engine.core import EngineCore
from engine.device.kvpool import KVPool
from engine.device.runner import ModelRunner
from engine.model.checkpoint import load_model
from engine.model.v4 import Model
from engine.options import EngineConfig
from tests.engine.hash_model import HashRunner
from tests.engine.model import build
from tests.engine.model.test_prefix_hit import leave_out

CONTEXT = 96


def load(draw: random.Random, vocab: int, count: int) -> list[tuple[GenerateRequest, int, int]]:
    """Requests, each with the steps to wait before it and those to its abort (0: none).

    Their prompts share prefixes with one another: pieces of a few texts, put together anew.
    """
    texts = [[draw.randrange(vocab) for _ in range(60)] for _ in range(2)]
    found = []
    for number in range(count):
        text = draw.choice(texts)
        ids = text[: draw.randint(1, 60)] + [
            draw.randrange(vocab) for _ in range(draw.randint(0, 9))
        ]
        sampling = SamplingParams(
            max_tokens=draw.randint(1, 25), temperature=draw.choice((0.0, 0.8)), seed=number
        )
        request = GenerateRequest(f"r{number}", tuple(ids), sampling)
        found.append((request, draw.randint(0, 4), draw.choice((0, 0, 0, draw.randint(1, 9)))))
    return found


def run(
    core: EngineCore, plan: list[tuple[GenerateRequest, int, int]], turns: int
) -> tuple[dict[str, list[int]], EngineStats]:
    """Tokens of every request; each that is not aborted gets `turns` further turns."""
    tokens: dict[str, list[int]] = {}
    waiting, aborts, step = list(plan), {}, 0
    due = {request.id: (request, turns) for request, _, abort in plan if not abort}
    while waiting or core.has_work:
        if waiting and (not waiting[0][1] or step % waiting[0][1] == 0):
            request, _, abort = waiting.pop(0)
            core.submit(request)
            tokens[request.id] = []
            if abort:
                aborts[request.id] = step + abort
        for name in [name for name, at in aborts.items() if at <= step]:
            core.abort(name)
            del aborts[name]
        for delta in core.step():
            tokens[delta.request_id] += delta.token_ids
            assert delta.finish_reason is not FinishReason.ERROR, delta.error
            if delta.finish_reason is not None and delta.request_id in due:
                old, left = due.pop(delta.request_id)
                ids = [*old.prompt_ids, *tokens[old.id], 3, 4, 5]
                if left and len(ids) < CONTEXT - 10:
                    new = replace(old, id=f"{old.id}+", prompt_ids=tuple(ids))
                    due[new.id] = new, left - 1
                    waiting.insert(0, (new, 0, 0))
        core.check_integrity()
        step += 1
        assert step < 5000
    assert core.stats().free_blocks == core.stats().total_blocks
    return tokens, core.stats()


OPTIONS = EngineConfig(
    device="cpu",
    cpu_threads=1,
    block_size=16,
    num_blocks=8,
    max_num_seqs=3,
    max_batched_tokens=40,
    max_snapshots=5,
)


def compare(make: Callable[[EngineConfig], EngineCore], seed: int, vocab: int, count: int) -> tuple[bool, EngineStats]:  # fmt: skip
    """Whether all requests that ended by themselves got the same tokens, and the cache's stats."""
    plan = load(random.Random(seed), vocab, count)
    got, stats = run(make(OPTIONS), plan, turns=2)
    want, without = run(make(replace(OPTIONS, prefix_cache=False)), plan, turns=2)
    assert (without.cached_tokens, without.snapshots) == (0, 0)
    aborted = {request.id for request, _, abort in plan if abort}
    same = all(
        got[name][: len(want[name])] == want[name][: len(got[name])]
        if name in aborted
        else got[name] == want[name]
        for name in want
    )
    return same and got.keys() == want.keys(), stats


def make_hash(options: EngineConfig) -> EngineCore:
    runner = HashRunner(
        num_blocks=9, block_size=options.block_size, num_slots=options.resolve_num_slots()
    )
    return EngineCore(runner, options, max_position_embeddings=CONTEXT)


@given(st.integers(0, 2**32))
def test_hash_model(seed: int) -> None:
    """With a model whose every token depends on all of its memory, the cache changes no token."""
    same, stats = compare(make_hash, seed, vocab=40, count=8)

    assert same
    assert stats.cached_tokens <= stats.prompt_tokens


def test_the_fuzz_meets_hits_evictions_and_preemptions() -> None:
    """The load above is one that puts the cache to the test."""
    found = [compare(make_hash, seed, vocab=40, count=8)[1] for seed in range(20)]

    assert sum(stats.prefix_hits for stats in found) > 100
    assert sum(stats.evictions for stats in found) > 100
    assert sum(stats.preemptions for stats in found) > 5


@pytest.fixture(scope="module", params=["v4", "v41"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    config: dict[str, Any] = getattr(build, request.param)()
    path: Path = build.write(tmp_path_factory.mktemp(request.param) / "model", config, seed=11)
    return load_model(path)


def maker(model: Model, copy: Callable[..., None] = KVPool.copy) -> Callable[[EngineConfig], EngineCore]:  # fmt: skip
    """Engines whose free memory is NaN in every step."""

    def make(options: EngineConfig) -> EngineCore:
        pool = KVPool(
            model.config, num_blocks=9, block_size=16, num_slots=options.resolve_num_slots()
        )
        core = EngineCore(
            ModelRunner(model, pool, torch.device("cpu")), options, max_position_embeddings=CONTEXT
        )
        blocks, slots = core._scheduler.blocks, core._scheduler.slots

        def poisoning(*pairs: Any) -> None:
            copy(pool, *pairs)
            pool.poison(slots=slots._free, blocks=blocks._free)
            pool.history[slots._free] = 7

        pool.copy = poisoning  # type: ignore[method-assign]
        return core

    return make


@pytest.mark.parametrize("seed", range(4))
def test_random_checkpoints(model: Model, seed: int) -> None:
    """With V4 and V4.1 the cache changes no token, and nobody reads memory that is not theirs."""
    same, stats = compare(maker(model), seed, vocab=288, count=8)

    assert same
    assert stats.cached_tokens > 0


@pytest.mark.parametrize("group", ["window", "state", "history", "entries"])
def test_the_fuzz_sees_a_planted_fault(model: Model, group: str) -> None:
    """Memory that a hit does not restore shows in some request's tokens, or as an error."""
    if group == "history" and not model.config.is_v41:
        group = "index_state"
    faulty = maker(model, leave_out(group))

    def fails(seed: int) -> bool:
        try:
            return not compare(faulty, seed, vocab=288, count=8)[0]
        except AssertionError:  # NaN ends a request with an error
            return True

    assert any(fails(seed) for seed in range(4))
