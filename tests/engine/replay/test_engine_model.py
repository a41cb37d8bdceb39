"""Prefill modes from end to end: engine, prefix cache and the reference model, in float64.

There, rounding decides nothing, so tokens must be the same. Free memory is NaN in every step.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.api import EngineError, GenerateRequest, PrefillMode, SamplingParams
from engine.core import EngineCore, load_engine
from engine.device.kvpool import KVPool
from engine.device.runner import ModelRunner
from engine.model.checkpoint import load_model
from engine.model.v4 import Model
from engine.options import EngineConfig
from engine.plan.replay import Replay, Tail
from engine.plan.step import StepPlan
from tests.engine.model import build, drive
from tests.engine.replay.test_model import cut_at
from tests.engine.test_prefix_fuzz import CONTEXT, OPTIONS, load, run

LONG = replace(OPTIONS, num_blocks=14, max_batched_tokens=29)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    config = build.v41(num_hidden_layers=7, compress_ratios=[0, 2, 2, 2, 1, 1, 1, 0, 0], index_source_layer_ids=[1, 3, 4, 6], dspark_target_layer_ids=[4, 5, 6])  # fmt: skip
    path = build.write(tmp_path_factory.mktemp("v41") / "model", config, seed=11)
    return load_model(path, dtype=torch.float64)


def make(
    model: Model, options: EngineConfig, default: PrefillMode
) -> tuple[EngineCore, list[StepPlan]]:
    """An engine whose free memory is NaN in every step, and the plans it runs."""
    pool = KVPool(
        model.config,
        num_blocks=(options.num_blocks or 0) + 1,
        block_size=16,
        num_slots=options.resolve_num_slots(),
        dtype=model.dtype,
    )
    runner = ModelRunner(model, pool, torch.device("cpu"))
    core = EngineCore(
        runner, options, max_position_embeddings=CONTEXT, replay=Replay(model.tail, default)
    )
    plans: list[StepPlan] = []
    blocks, slots, step, copy = (
        core._scheduler.blocks,
        core._scheduler.slots,
        runner.step,
        pool.copy,
    )

    def poisoning(*pairs: object) -> None:
        copy(*pairs)  # type: ignore[arg-type]
        pool.poison(slots=slots._free, blocks=blocks._free)

    def noting(plan: StepPlan, draws: object) -> object:
        plans.append(plan)
        return step(plan, draws)  # type: ignore[arg-type]

    pool.copy = poisoning  # type: ignore[method-assign, assignment]
    runner.step = noting  # type: ignore[method-assign, assignment]
    return core, plans


def greedy(requests: list[tuple[GenerateRequest, int, int]]) -> list[tuple[GenerateRequest, int, int]]:  # fmt: skip
    return [
        (replace(r, sampling=replace(r.sampling, temperature=0.0)), wait, abort)
        for r, wait, abort in requests
    ]


@pytest.mark.parametrize("seed", range(3))
def test_exact_gives_the_tokens_of_off(model: Model, seed: int) -> None:
    """Random turns, aborts and evictions: the same tokens as without prefix cache and replay."""
    plan = load(random.Random(seed), 288, 6)
    core, plans = make(model, replace(OPTIONS, num_blocks=14, max_snapshots=12), "exact")
    got, stats = run(core, plan, turns=1)
    want, _ = run(make(model, replace(OPTIONS, prefix_cache=False), "off")[0], plan, turns=1)

    aborted = {request.id for request, _, abort in plan if abort}
    for name in want:
        length = min(len(got[name]), len(want[name])) if name in aborted else None
        assert got[name][:length] == want[name][:length]
    assert stats.prefix_hits > 0
    assert any(c.anchor > 30 for p in plans for c in p.chunks)


@pytest.mark.parametrize("seed", range(3))
def test_bounded_gives_the_tokens_of_the_cut_model(model: Model, seed: int) -> None:
    """Each request's tokens are those of a cold run of the model with its windows cut."""
    assert model.tail is not None
    plan = greedy(load(random.Random(seed), 288, 6))
    core, plans = make(model, OPTIONS, "bounded")
    prompts = {request.id: list(request.prompt_ids) for request, _, _ in plan}

    got, stats = run(core, plan, turns=0)

    for name, tokens in got.items():
        (anchor,) = {c.anchor for p in plans for c in p.chunks if c.request_id == name} or {0}
        cut = model.tail.low("bounded", anchor, model.tail.first)
        logits = drive.run(cut_at(model, cut), [*prompts[name], *tokens])
        first = len(prompts[name]) - 1
        assert tokens == logits[first : first + len(tokens)].argmax(-1).tolist(), name
    assert stats.prefix_hits > 0


def test_the_comparison_sees_an_unfit_state(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """n5: with a match that is not shortened, the tail reads rows that nobody computed."""
    monkeypatch.setattr(Tail, "fits", lambda self, *args, **how: True)

    def seen(seed: int) -> bool:
        ids = drive.tokens(70, seed)
        results = []
        for prefix_cache in (True, False):
            options = replace(LONG, prefix_cache=prefix_cache)
            core, _ = make(model, options, "bounded")
            core.submit(GenerateRequest("a", tuple(ids), SamplingParams(1, 0.0)))
            while core.has_work:
                core.step()
            core.submit(
                GenerateRequest("b", tuple(ids[:53]), SamplingParams(4, 0.0, top_logprobs=0))
            )
            found = []
            while core.has_work:
                found += [d.logprobs[0].logprob for d in core.step() if d.logprobs]
            results.append(found)
        return results[0] != pytest.approx(results[1], abs=1e-9)

    assert any(seen(seed) for seed in range(3))


@pytest.mark.parametrize("start", [0, 1, 25, 40, 69])
def test_scores_are_those_of_off(model: Model, start: int) -> None:
    """Prompt log-probabilities in every mode, whatever the chunks, next to other requests."""
    ids = tuple(drive.tokens(70, 4))
    found = {}
    for mode, budget in (("off", 90), ("off", 29), ("exact", 29), ("bounded", 17)):
        core, _ = make(model, replace(LONG, max_batched_tokens=budget), mode)  # type: ignore[arg-type]
        core.submit(GenerateRequest("x", ids, SamplingParams(3, 0.0)))
        core.submit(
            GenerateRequest(
                "r",
                ids,
                SamplingParams(3, 0.0),
                prompt_logprobs=2,
                prompt_logprobs_start=start,
            )
        )
        deltas = []
        while core.has_work:
            deltas += [d for d in core.step() if d.request_id == "r"]
        assert [d.prompt_logprobs is None for d in deltas] == [False, True, True]
        found[mode, budget] = deltas[0].prompt_logprobs

    want = found["off", 90]
    assert want is not None
    assert len(want) == 70 - start
    assert (want[0] is None) == (start == 0)
    logprobs = drive.run(model, ids).log_softmax(-1)
    for at, score in enumerate(want, start):
        if score is not None:
            assert score.logprob == pytest.approx(float(logprobs[at - 1, ids[at]]), abs=1e-9)
            assert [i for i, _ in score.top] == logprobs[at - 1].topk(2).indices.tolist()
    for got in found.values():
        assert got is not None
        for mine, theirs in zip(got, want, strict=True):
            assert (mine is None) == (theirs is None)
            if mine is not None and theirs is not None:
                assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-9)
                assert [i for i, _ in mine.top] == [i for i, _ in theirs.top]


def test_a_model_without_a_tail_is_refused_at_start(tmp_path: Path) -> None:
    """V4: the option is refused with the reason, and so is a request that asks for it."""
    path = build.write(tmp_path / "model", build.v4())
    options = EngineConfig(device="cpu", cpu_threads=1, block_size=16, prefill="bounded")

    with pytest.raises(EngineError, match="engine options: prefill: bounded does not apply to this model: P1: no layer is named as a KV source"):  # fmt: skip
        load_engine(path, options)
    core = load_engine(path, replace(options, prefill="off"))
    with pytest.raises(EngineError, match="prefill: exact does not apply to this model: P1"):
        core.submit(GenerateRequest("r", (1, 2), SamplingParams(1), prefill="exact"))


def test_the_servers_setting_is_used(tmp_path: Path) -> None:
    """load_engine passes the option on, and usage tells what a request got."""
    path = build.write(tmp_path / "model", build.v41())
    options = EngineConfig(device="cpu", cpu_threads=1, block_size=16, prefill="bounded")
    core = load_engine(path, options)
    core.submit(GenerateRequest("r", tuple(drive.tokens(40, 0)), SamplingParams(1)))
    deltas = []
    while core.has_work:
        deltas += core.step()

    (usage,) = [delta.usage for delta in deltas]
    assert usage is not None
    assert (usage.prefill, usage.prefill_reason, usage.tail_rows) == ("bounded", None, 8)
