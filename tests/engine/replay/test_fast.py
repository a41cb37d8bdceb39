"""Prefill modes with the fast runner, its operations in plain torch, against the reference model.

Prompts' passes are cut into slices of layers, decode steps launched ahead, free memory is NaN.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.api import EngineError, GenerateRequest, PrefillMode, SamplingParams, Usage
from engine.core import EngineCore, load_engine
from engine.device.fast_runner import FastRunner
from engine.model.fast import FastModel
from engine.model.v4 import Model
from engine.options import EngineConfig
from engine.plan.replay import Replay, tail_of
from engine.plan.step import StepPlan
from tests.engine.device.engines import (
    CONTEXT,
    CPU,
    OPTIONS,
    load_fast,
    load_reference,
    make_pool,
    poison_what_is_free,
    requests,
)
from tests.engine.model import build, drive
from tests.engine.replay.test_model import cut_at

Models = tuple[FastModel, Model]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every visible entry is attended, so that no choice hangs on a rounding."""
    config = build.v41(index_topk=512, candidate_topk_blocks=512)
    return build.write(tmp_path_factory.mktemp("v41") / "model", config, seed=5)


@pytest.fixture(scope="module")
def models(path: Path) -> Models:
    return load_fast(path), load_reference(path)


def make(
    model: FastModel, default: PrefillMode, options: EngineConfig = OPTIONS, **how: Any
) -> tuple[EngineCore, list[StepPlan]]:
    tail = tail_of(model.config)
    pool = make_pool(model.config, options, ring=True)
    how = {"tail": tail, **how}
    runner = FastRunner(
        model, pool, CPU, max_model_len=CONTEXT, max_num_seqs=options.max_num_seqs, buckets=(1, 2, 4, 6), **how
    )  # fmt: skip
    core = EngineCore(
        runner, options, max_position_embeddings=CONTEXT, replay=Replay(tail, default)
    )
    poison_what_is_free(core, pool)
    plans: list[StepPlan] = []
    step = runner.step

    def noting(plan: StepPlan, draws: Any) -> Any:
        plans.append(plan)
        return step(plan, draws)

    runner.step = noting  # type: ignore[method-assign]
    return core, plans


def difference(models: Models, mode: PrefillMode, seed: int, **how: Any) -> float:
    """Largest difference in a log-probability of a greedy token; infinite for another token."""
    fast, reference = models
    core, plans = make(fast, mode, **how)
    load = [
        replace(r, sampling=SamplingParams(r.sampling.max_tokens, 0.0, top_logprobs=0))
        for r, _, _ in requests(random.Random(seed), 6)
    ]
    tokens: dict[str, list[int]] = {r.id: [] for r in load}
    logprobs: dict[str, list[float]] = {r.id: [] for r in load}
    waiting = list(load)
    while waiting or core.has_work:
        if waiting:
            core.submit(waiting.pop(0))
        for delta in core.step():
            assert delta.error is None
            tokens[delta.request_id] += delta.token_ids
            logprobs[delta.request_id] += [one.logprob for one in delta.logprobs or ()]
        core.check_integrity()
    worst = 0.0
    for request in load:
        (anchor,) = {c.anchor for p in plans for c in p.chunks if c.request_id == request.id}
        tail = reference.tail
        assert tail is not None
        cut = tail.low("bounded", anchor, tail.first) if mode == "bounded" else 0
        ids, out = list(request.prompt_ids), tokens[request.id]
        rows = drive.run(cut_at(reference, cut), [*ids, *out])[len(ids) - 1 : -1]
        if out != rows.argmax(-1).tolist():
            return float("inf")
        want = rows.double().log_softmax(-1).gather(1, torch.tensor(out)[:, None])[:, 0]
        worst = max(worst, float((want - torch.tensor(logprobs[request.id])).abs().max()))
    return worst


@pytest.mark.parametrize("mode", ["exact", "bounded"])
@pytest.mark.parametrize("seed", range(2))
def test_the_fast_runner_leaves_out_the_same_rows(
    models: Models, mode: PrefillMode, seed: int
) -> None:
    """Exact gives what off gives, bounded what the reference gives with its windows cut."""
    assert difference(models, mode, seed) < 1e-4


def test_the_comparison_sees_a_missing_tail(models: Models) -> None:
    """A runner that processes every row is not the cut model."""
    right = FastRunner._begin

    def wrong(self: FastRunner, chunks: Any) -> Any:
        return right(self, [c._replace(prefill="off") for c in chunks])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FastRunner, "_begin", wrong)
        assert difference(models, "bounded", 0) > 1e-4


@pytest.mark.parametrize("mode", ["off", "exact", "bounded"])
def test_scores_are_those_of_off(models: Models, mode: PrefillMode) -> None:
    """Prompt log-probabilities, with rows left out before the first and around the last."""
    fast, reference = models
    ids = tuple(drive.tokens(80, 4))
    core, _ = make(fast, mode)
    core.submit(GenerateRequest("x", ids[:30], SamplingParams(9, 0.0)))
    core.submit(
        GenerateRequest(
            "r", ids, SamplingParams(2, 0.0), prompt_logprobs=0, prompt_logprobs_start=70
        )
    )
    first = None
    while core.has_work:
        for delta in core.step():
            if delta.request_id == "r" and first is None:
                first = delta

    assert first is not None
    assert first.prompt_logprobs is not None
    assert first.usage is not None
    assert first.usage.tail_rows == (80 if mode == "off" else 80 - reference.tail.low("exact", 69, 4))  # type: ignore[union-attr]  # fmt: skip
    want = drive.run(reference, ids).double().log_softmax(-1)
    for position, score in enumerate(first.prompt_logprobs, 70):
        assert score is not None
        assert score.logprob == pytest.approx(float(want[position - 1, ids[position]]), abs=1e-4)


def test_an_engine_with_the_fast_runner_takes_the_option(path: Path) -> None:
    """load_engine passes it on; usage says what was done."""
    options = EngineConfig(
        device="cpu", cpu_threads=1, runner="fast", block_size=16, max_model_len=96, num_blocks=14,
        prefill="bounded",
    )  # fmt: skip
    core = load_engine(path, options)
    core.submit(GenerateRequest("r", tuple(drive.tokens(40, 0)), SamplingParams(1)))
    deltas = []
    while core.has_work:
        deltas += core.step()

    assert [d.usage for d in deltas] == [Usage(40, 1, prefill="bounded", tail_rows=8)]


@pytest.mark.parametrize(
    ("runner", "message"),
    [
        ("reference", "runner: expected fast, got reference beside tail_graphs"),
        ("fast", "tail_graphs on: expected an NVIDIA GPU, got the CPU"),
    ],
)
def test_captured_tails_are_refused_where_nothing_is_captured(
    path: Path, runner: Any, message: str
) -> None:
    """Asked for on the CPU they are an error with its reason, before anything is loaded."""
    options = EngineConfig(device="cpu", runner=runner, block_size=16, tail_graphs=True)
    with pytest.raises(EngineError, match=message):
        load_engine(path, options)


def test_rows_of_prompts_are_counted_by_mode(models: Models) -> None:
    """What the last layers processed and what they left out are those that usage says; no decodes."""
    core, _ = make(models[0], "off")
    used: dict[str, Usage] = {}
    for number, mode in enumerate(("off", "exact", "bounded", "bounded")):
        ids = tuple(drive.tokens(50 + number, number))
        core.submit(GenerateRequest(f"{number} {mode}", ids, SamplingParams(4), prefill=mode))  # type: ignore[arg-type]
        while core.has_work:
            used |= {d.request_id: d.usage for d in core.step() if d.usage is not None}

    counted = {mode: (ran, left) for mode, ran, left in core.stats().tail_rows}
    want: dict[str, tuple[int, int]] = {}
    for name, usage in used.items():
        ran, left = want.get(name.split()[1], (0, 0))
        whole = usage.prompt_tokens - usage.cached_tokens
        want[name.split()[1]] = ran + usage.tail_rows, left + whole - usage.tail_rows
    assert counted == want
    assert counted["bounded"] == (16, 52 + 53 - 16)
    assert counted["off"] == (50, 0)
