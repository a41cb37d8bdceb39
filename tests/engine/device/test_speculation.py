"""Speculation in the served engine: whatever is drafted, tokens and what is kept stay the same."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from engine.api import GenerateRequest, SamplingParams, SpeculationStats
from engine.core import EngineCore, load_engine
from engine.device import speculation as runner_side
from engine.device.fast_runner import FastRunner
from engine.model import mtp, speculate
from engine.model.flow import Held
from engine.options import EngineConfig
from tests.engine.device import engines
from tests.engine.device.engines import OPTIONS, make_reference, requests, run, same
from tests.engine.device.speculating import (
    beyond,
    load_speculating,
    make_speculating,
    stop_inside,
    whole_texts,
)
from tests.engine.model import build

SMALL = {"hidden_size": 32, "n_routed_experts": 3, "moe_intermediate_size": 16}
CONFIGS = {
    "dspark": build.v41,
    "mtp": lambda: build.v4(
        num_hidden_layers=3, num_hash_layers=1, compress_ratios=[0, 4, 16, 0], **SMALL
    ),
    "mtp2": lambda: build.v4(
        num_hidden_layers=2,
        num_hash_layers=1,
        compress_ratios=[0, 4, 0, 0],
        num_nextn_predict_layers=2,
        **SMALL,
    ),
}


class Models:
    """A checkpoint, loaded for speculation and for the reference."""

    def __init__(self, name: str, folder: Path) -> None:
        self.path = build.write(folder / name, CONFIGS[name](), seed=11)
        self.loaded = load_speculating(self.path)
        self.reference = engines.load_reference(self.path)
        self.num_tokens = self.loaded[1].num_tokens

    def want(self, load: Any, options: EngineConfig = OPTIONS) -> Any:
        return run(make_reference(self.reference, options), load)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module", params=list(CONFIGS))
def models(request: pytest.FixtureRequest, folder: Path) -> Models:
    return Models(request.param, folder)


@pytest.fixture(scope="module")
def small(folder: Path) -> Models:
    return Models("mtp2", folder / "small")


def load_of(models: Models, seed: int, count: int = 9) -> tuple[Any, dict[str, list[int]], Any]:
    """A load with stops inside drafts, sequences that go on behind them, what each request gets."""
    draw = random.Random(seed)
    plain = requests(draw, count)
    load = stop_inside(draw, plain, models.want(plain))
    return load, whole_texts(load, models.want(beyond(load))), models.want(load)


@pytest.mark.parametrize("seed", range(2))
def test_equals_the_reference(models: Models, seed: int) -> None:
    """Random loads get the reference's tokens and log-probabilities, with most drafts taken."""
    load, truth, want = load_of(models, seed)
    core = make_speculating(models.loaded, truth)

    assert same(run(core, load), want, load)
    stats = core.stats().speculation
    assert stats.accepted > 10
    assert stats.lengths[models.num_tokens] > 0, "whole drafts"
    assert sum(stats.lengths) * models.num_tokens == stats.drafted


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**32), sliced=st.booleans(), told=st.booleans())
def test_any_load_equals_the_reference(small: Models, seed: int, sliced: bool, told: bool) -> None:
    """With drafts that are right and that are not, beside whole and sliced prompts."""
    load, truth, want = load_of(small, seed, 7)
    core = make_speculating(small.loaded, truth if told else None)
    if sliced:
        assert isinstance(core._runner, FastRunner)
        core._runner.policy.layers = lambda num_rows: 1  # type: ignore[method-assign]

    assert same(run(core, load), want, load)


def test_few_blocks_and_preemptions(small: Models) -> None:
    """With memory for little more than one request, drafts take what is free and no more."""
    options = dataclasses.replace(OPTIONS, num_blocks=7)
    draw = random.Random(5)
    load = requests(draw, 14)
    want = small.want(load, options)
    core = make_speculating(small.loaded, whole_texts(load, want), options)

    assert same(run(core, load), want, load)
    assert core.stats().preemptions > 0
    assert core.stats().speculation.plain_rows["room"] > 0


def test_more_requests_than_verifications_have_rows(models: Models) -> None:
    """Beyond 64 rows of a verification steps are plain, and the drafter follows them."""
    options = dataclasses.replace(OPTIONS, max_num_seqs=12, max_batched_tokens=80, num_blocks=80)
    load = [
        (GenerateRequest(f"r{i}", (1, 2, i), SamplingParams(4 + 3 * i, temperature=0.0)), 0, 0)
        for i in range(12)
    ]
    want = models.want(load, options)
    truth = whole_texts(load, want)
    core = make_speculating(models.loaded, truth, options, buckets=(1, 2, 4, 8, 12))

    assert same(run(core, load), want, load)
    stats = core.stats().speculation
    assert ("batch" in stats.plain_rows) == (models.num_tokens == 5)
    assert stats.accepted > 20


class Every:
    """A guide that rules one token out, or forces it in turn."""

    def __init__(self, token: int) -> None:
        self._token = token

    def next(self, generated: Any) -> bytes | int | None:
        if len(generated) % 3 == 2:
            return self._token
        return None if len(generated) % 3 else bytes([0xFF] * 36)


def test_requests_that_must_be_seen_take_single_tokens(models: Models) -> None:
    """Penalties, biases and guides are honoured beside requests whose drafts are taken."""
    special = {
        "penalties": SamplingParams(12, temperature=0.0, frequency_penalty=1.5),
        "biased": SamplingParams(12, temperature=0.7, seed=4, logit_bias=((17, 4.0),)),
        "stops": SamplingParams(12, temperature=0.0, stop_token_ids=tuple(range(100, 109))),
        "guided": SamplingParams(12, temperature=0.0),
        "free": SamplingParams(30, temperature=0.9, seed=3, top_logprobs=1),
    }
    load = [
        (GenerateRequest(name, (4, 5, i), how, guide=Every(33) if name == "guided" else None), 0, 0)
        for i, (name, how) in enumerate(special.items())
    ]
    want = models.want(load)
    core = make_speculating(models.loaded, whole_texts(load, want))

    assert same(run(core, load), want, load)
    stats = core.stats().speculation
    assert stats.plain_rows["penalties"] == 2 * 11
    assert 0 < stats.plain_rows["stops"] <= 11
    assert 0 < stats.plain_rows["guide"] <= 11
    assert stats.accepted > 10, "of the free one"


@pytest.mark.parametrize("ends", ["length", "stop", "abort"])
def test_a_turn_begins_where_a_speculative_one_ended(models: Models, ends: str) -> None:
    """What is kept after the middle of a block is what a request goes on from, as after plain steps."""
    prompt = tuple((7 * i + 3) % engines.VOCAB for i in range(21))
    sampling = SamplingParams(17, temperature=0.0)
    first = [(GenerateRequest("first", prompt, sampling), 0, 0)]
    tokens = models.want(first)["first"].tokens
    truth = whole_texts(first, models.want(beyond(first)))
    if ends == "stop":
        sampling = dataclasses.replace(sampling, stop_token_ids=(tokens[11],))
    core = make_speculating(models.loaded, truth)
    core.submit(GenerateRequest("first", prompt, sampling))
    got: list[int] = []
    while core.has_work:
        for delta in core.step():
            got += delta.token_ids
        if ends == "abort" and len(got) > 7:
            core.abort("first")
    assert core.stats().speculation.accepted > 1
    assert got == tokens[: len(got)]
    more = (*prompt, *got, 40, 41)
    turn = [(GenerateRequest("turn", more, SamplingParams(20, temperature=0.0)), 0, 0)]
    want = models.want(turn)["turn"].tokens
    core._runner._model.drafter.truth = {"turn": [*more, *want]}  # type: ignore[union-attr]

    deltas = []
    core.submit(turn[0][0])
    while core.has_work:
        deltas += core.step()
    assert [t for delta in deltas for t in delta.token_ids] == want
    assert deltas[0].usage is not None
    # How far an aborted one had gone only the device knew.
    kept = len(prompt) if ends == "abort" else len(prompt) + len(got) - 1
    assert deltas[0].usage.cached_tokens == kept


def test_deltas_of_a_step_hold_all_its_tokens(small: Models) -> None:
    """One delta a step and request: tokens with a log-probability each, usage and reason at the end."""
    sampling = SamplingParams(20, temperature=0.0, top_logprobs=2)
    request = GenerateRequest("a", (1, 2, 3), sampling)
    want = small.want([(request, 0, 0)])
    core = make_speculating(small.loaded, whole_texts([(request, 0, 0)], want))
    core.submit(request)
    deltas = []
    while core.has_work:
        deltas += core.step()

    assert [t for delta in deltas for t in delta.token_ids] == want["a"].tokens
    assert max(len(delta.token_ids) for delta in deltas) == 3
    for delta in deltas:
        assert delta.logprobs is not None
        assert len(delta.logprobs) == len(delta.token_ids)
    assert deltas[-1].usage is not None
    assert deltas[-1].usage.completion_tokens == 20
    assert core.stats().completion_tokens == 20


# ---------------------------------------------------------------- planted faults


def keep_rejected_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    commit = Held.commit
    monkeypatch.setattr(
        Held, "commit", lambda self, lengths: commit(self, torch.where(lengths > 0, 3, lengths))
    )


def keep_rejected_state(name: str) -> Callable[[pytest.MonkeyPatch], None]:
    """Stores of one kind ignore how many rows count."""

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        add = Held.add

        def wrong(self: Held, store: Any) -> None:
            if getattr(store, "func", store).__name__ != name:
                add(self, store)
                return
            add(self, lambda lengths: store(lengths=torch.where(lengths > 0, 3, lengths)))

        monkeypatch.setattr(Held, "add", wrong)

    plant.__name__ = f"keep_rejected_{name}"
    return plant


def accept_one_more(monkeypatch: pytest.MonkeyPatch) -> None:
    accept = speculate.accept_torch

    def wrong(drafted: torch.Tensor, drawn: torch.Tensor, *rest: Any) -> torch.Tensor:
        agrees = (drafted == drawn[:, :-1]).int().cumprod(1).sum(1, keepdim=True)
        places = torch.arange(drafted.shape[1])
        return accept(torch.where(places == agrees, drawn[:, :-1], drafted), drawn, *rest)

    monkeypatch.setattr(speculate, "accept_torch", wrong)


def look_at_no_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_side, "_stops", lambda draw: [])


def stand_a_token_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    accept = speculate.accept_torch

    def wrong(*args: Any) -> Any:
        found = accept(*args)
        args[7].sub_((found > 1).int())  # the output index
        return found

    monkeypatch.setattr(speculate, "accept_torch", wrong)


def take_more_than_blocks_cover(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_side.Speculation, "_reach", lambda self, chunk: 1 << 20)


def count_no_tokens_down(monkeypatch: pytest.MonkeyPatch) -> None:
    accept = speculate.accept_torch

    def wrong(*args: Any) -> Any:
        args = list(args)
        args[4] = args[4] + 50
        return accept(*args)

    monkeypatch.setattr(speculate, "accept_torch", wrong)


def draw_at_one_index(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = speculate.Speculator._draw

    def wrong(self: Any, logits: Any, wanted: Any, seq: Any, size: int) -> Any:
        model = self.model
        ops = model.ops
        same_index = lambda lg, t, p, s, index, **k: ops.sample(lg, t, p, s, wanted.index[seq], **k)  # noqa: E731
        model.ops = dataclasses.replace(ops, sample=same_index)
        try:
            return draw(self, logits, wanted, seq, size)
        finally:
            model.ops = ops

    monkeypatch.setattr(speculate.Speculator, "_draw", wrong)


FAULTS = [
    keep_rejected_rows,
    keep_rejected_state("store_window_torch"),
    keep_rejected_state("store_state_torch"),
    accept_one_more,
    look_at_no_stops,
    stand_a_token_behind,
    take_more_than_blocks_cover,
    count_no_tokens_down,
    draw_at_one_index,
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_the_comparison_sees_a_planted_fault(
    small: Models, fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each way of breaking speculation shows in some request's tokens, or as an error."""
    loads = [load_of(small, seed, 8) for seed in range(4)]
    options = dataclasses.replace(OPTIONS, num_blocks=8)
    fault(monkeypatch)

    def fails(load: Any, truth: Any, want: Any) -> bool:
        try:
            core = make_speculating(small.loaded, truth, options)
            return not same(run(core, load), want, load)
        except (AssertionError, KeyError, IndexError, RuntimeError):
            return True

    assert any(fails(*one) for one in loads)


def test_history_of_rejected_tokens_is_seen(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: the n-gram history keeps tokens that were drafted and rejected."""
    models = Models("dspark", folder / "history")
    loads = [load_of(models, seed, 6) for seed in range(2)]
    keep_rejected_state("store_history_torch")(monkeypatch)

    assert not all(
        same(run(make_speculating(models.loaded, truth), load), want, load)
        for load, truth, want in loads
    )


def test_drafts_suffer_from_what_a_drafter_does_not_forget(
    small: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: streams carried from rejected rows change drafts, and never tokens."""
    load, _, want = load_of(small, 1)
    clean = make_speculating(small.loaded)
    assert same(run(clean, load), want, load)
    store = mtp._store_carry

    def wrong(below: Any, rows: Any, carry: Any, lengths: Any = None) -> None:
        store(below, rows, carry, None if lengths is None else torch.where(lengths > 0, 3, lengths))

    monkeypatch.setattr(mtp, "_store_carry", wrong)
    core = make_speculating(small.loaded)
    assert same(run(core, load), want, load)


# ---------------------------------------------------------------- the whole engine


def settings_of(**changes: Any) -> EngineConfig:
    return EngineConfig(
        **{"device": "cpu", "cpu_threads": 1, "block_size": 16, "max_model_len": 96, **changes}
    )


@pytest.mark.parametrize("asked", ["auto", "named"])
def test_a_checkpoint_is_served_with_its_own_drafts(models: Models, asked: str) -> None:
    """The option builds the drafter that the checkpoint has; tokens are those without it."""
    name = models.loaded[2]
    options = settings_of(runner="fast", speculation="auto" if asked == "auto" else name)
    core, plain = (
        load_engine(models.path, options),
        load_engine(models.path, settings_of(runner="fast")),
    )
    load = requests(random.Random(8), 6)

    assert same(run(core, load), run(plain, load), load)
    assert core.stats().speculation.drafted > 0
    assert plain.stats().speculation == SpeculationStats()
    assert isinstance(core._runner, FastRunner)
    assert core._runner.num_drafts == models.num_tokens
    sizes = [captured.bucket for captured in core._runner.speculation.graphs.captured]  # type: ignore[union-attr]
    assert max(sizes) * (models.num_tokens + 1) <= 64


def test_other_weights_bring_their_drafts(small: Models, folder: Path) -> None:
    """After update_weights drafts are those of the new checkpoint's stages."""
    other = build.write(folder / "other", CONFIGS["mtp2"](), seed=12)
    core = load_engine(small.path, settings_of(runner="fast", speculation="mtp"))
    load = requests(random.Random(2), 4)
    run(core, load)
    before = core._runner._model.drafter  # type: ignore[union-attr]
    core.update_weights(other)

    fresh = load_engine(other, settings_of(runner="fast"))
    assert same(run(core, load), run(fresh, load), load)
    assert core._runner._model.drafter is not before  # type: ignore[union-attr]


def stats_of(core: EngineCore) -> SpeculationStats:
    return core.stats().speculation


def test_counts_add_up() -> None:
    """Drafts, accepted ones, lengths and reasons of steps, and their mean."""
    stats = SpeculationStats()
    assert stats.acceptance_length == 0
    assert stats.plus(3, [], {}) is stats
    stats = stats.plus(3, [0, 3], {"room": 1}).plus(3, [1], {"room": 2, "guide": 1})

    assert stats.drafted == 9
    assert stats.accepted == 4
    assert stats.lengths == (1, 1, 0, 1)
    assert stats.plain_rows == {"room": 3, "guide": 1}
    assert stats.acceptance_length == pytest.approx(1 + 4 / 3)
