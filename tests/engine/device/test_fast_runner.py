"""The fast runner on the CPU: whatever is launched ahead, padded or sliced, tokens stay the same."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from engine.api import EngineDeadError, FinishReason, GenerateRequest, SamplingParams
from engine.core import EngineCore
from engine.device import fast_runner, prompt_pass
from engine.device.buffers import DecodeBuffers
from engine.device.fast_runner import FastRunner
from engine.device.lanes import Lanes
from engine.device.prompt_pass import PromptPass
from engine.device.rows import build_rows
from engine.device.seals import SealError
from engine.model.fast import FastModel
from engine.model.v4 import Model
from engine.plan.step import Chunk
from tests.engine.device import engines
from tests.engine.device.engines import OPTIONS, make_fast, make_reference, requests, run, same
from tests.engine.model import build

Models = tuple[FastModel, Model]


def load_models(config: dict[str, Any], folder: Path) -> Models:
    path = build.write(folder / "model", config, seed=11)
    return engines.load_fast(path), engines.load_reference(path)


@pytest.fixture(scope="module", params=["v4", "v41"])
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Models:
    return load_models(getattr(build, request.param)(), tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """A window layer and one with compressed, chosen entries."""
    config = build.v4(
        num_hidden_layers=2,
        num_hash_layers=1,
        compress_ratios=[0, 4, 0],
        hidden_size=32,
        n_routed_experts=3,
        moe_intermediate_size=16,
    )
    return load_models(config, tmp_path_factory.mktemp("small"))


def runner_of(core: EngineCore) -> FastRunner:
    assert isinstance(core._runner, FastRunner)
    return core._runner


def slice_by_layer(core: EngineCore) -> set[str]:
    """Have prompts advance one layer a step beside streams; the ids that were ever under way."""
    runner, held = runner_of(core), set[str]()
    runner.policy.layers = lambda num_rows: 1  # type: ignore[method-assign]
    step = runner.step

    def noting(*args: Any) -> Any:
        result = step(*args)
        held.update(result.unfinished)
        return result

    runner.step = noting  # type: ignore[method-assign]
    return held


@pytest.mark.parametrize("seed", range(2))
def test_equals_the_reference(models: Models, seed: int) -> None:
    """Random loads get the reference's tokens and log-probabilities, with free memory NaN."""
    fast, reference = models
    load = requests(random.Random(seed), 10)

    got, want = run(make_fast(fast), load), run(make_reference(reference), load)

    assert same(got, want, load)


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**32), ahead=st.booleans(), sliced=st.booleans())
def test_any_load_equals_the_reference(small: Models, seed: int, ahead: bool, sliced: bool) -> None:
    """With and without lookahead and slices, any mix of requests gets the reference's results."""
    fast, reference = small
    load = requests(random.Random(seed), 8)
    core = make_fast(fast, looks_ahead=ahead)
    if sliced:
        slice_by_layer(core)

    assert same(run(core, load), run(make_reference(reference), load), load)


def test_steps_are_launched_ahead(small: Models) -> None:
    """Streams that only decode go ahead in all steps but where the set of rows or blocks changes."""
    core = make_fast(small[0])
    sampling = SamplingParams(max_tokens=30, temperature=0.0)
    for name in "abc":
        core.submit(GenerateRequest(name, (1, 2, ord(name)), sampling))
    while core.has_work:
        core.step()

    runner = runner_of(core)
    assert runner.num_launched == 29
    assert runner.num_ahead == 28
    assert runner.num_wasted == 0


def test_the_warm_up_touches_nothing_of_anybody(models: Models) -> None:
    """Prompts that belong to nobody write the dummy slot and block, which stay finite, and no more."""
    core = make_fast(models[0], poison=False)
    runner = runner_of(core)
    pool = runner._pool
    before = {name: tensor.clone() for name, tensor in pool.named_tensors().items()}

    runner.warm_up(40)

    for name, tensor in pool.named_tensors().items():
        assert torch.equal(tensor[1:], before[name][1:]), name
        if name.startswith(("window", "entries", "index_keys")):
            assert tensor[0].isfinite().all(), name
    assert any(not torch.equal(tensor[0], before[name][0]) for name, tensor in pool.named_tensors().items())  # fmt: skip
    load = requests(random.Random(8), 6)
    assert same(run(core, load), run(make_reference(models[1]), load), load)


def test_log_probabilities_keep_a_step_back(small: Models) -> None:
    """Logits that somebody is still to read are not overwritten by a step launched ahead."""
    core = make_fast(small[0])
    for name, top in (("a", None), ("b", 2)):
        sampling = SamplingParams(max_tokens=9, temperature=0.0, top_logprobs=top)
        core.submit(GenerateRequest(name, (1, 2, 3), sampling))
    while core.has_work:
        core.step()

    assert runner_of(core).num_ahead == 0


def test_a_prompt_is_sliced_beside_streams_only(small: Models) -> None:
    """Alone a prompt runs through; beside a stream the stream has a token between its layers."""
    core = make_fast(small[0])
    held = slice_by_layer(core)
    core.submit(GenerateRequest("stream", (1, 2, 3), SamplingParams(max_tokens=30)))
    core.step()
    core.submit(GenerateRequest("late", tuple(range(10)), SamplingParams(max_tokens=3)))
    names = []
    while core.has_work:
        names.append([delta.request_id for delta in core.step()])

    assert held == {"late"}
    assert names.index(["stream", "late"]) == 3, "two layers, the logits, and the draw a step later"
    assert names[:3] == [["stream"]] * 3


def test_streams_do_not_wait_for_a_prompts_last_slice(
    small: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step that launches a prompt's last slice gives the streams' tokens and draws nothing of it."""
    core = make_fast(small[0])
    slice_by_layer(core)
    order: list[str] = []
    for owner, name in ((PromptPass, "advance"), (PromptPass, "draw"), (FastRunner, "_results")):
        plain = getattr(owner, name)

        def noting(*args: Any, plain: Any = plain, name: str = name) -> Any:
            order.append(name)
            return plain(*args)

        monkeypatch.setattr(owner, name, noting)
    core.submit(GenerateRequest("stream", (1, 2, 3), SamplingParams(max_tokens=30)))
    core.step()
    core.submit(GenerateRequest("late", tuple(range(10)), SamplingParams(max_tokens=3)))
    order.clear()
    for _ in range(4):
        core.step()

    assert order == ["advance", "_results"] * 3 + ["_results", "draw"]


@pytest.mark.parametrize("at", range(4))
def test_abort_of_a_prompt_under_way(small: Models, at: int) -> None:
    """One of two prompts half through is given up; the other and what comes next do not notice."""
    fast, reference = small
    load = [
        (GenerateRequest(name, ids, SamplingParams(max_tokens=12, temperature=0.0)), 0, 0)
        for name, ids in (
            ("stream", (1, 2, 3)),
            ("a", tuple(range(9))),
            ("b", tuple(range(50, 63))),
            ("next", tuple(range(20))),
        )
    ]
    want = run(make_reference(reference), load)
    core = make_fast(fast, dataclasses.replace(OPTIONS, max_batched_tokens=29))
    held = slice_by_layer(core)
    tokens: dict[str, list[int]] = {request.id: [] for request, _, _ in load}

    def advance() -> None:
        for delta in core.step():
            assert delta.error is None
            tokens[delta.request_id] += delta.token_ids
        core.check_integrity()

    core.submit(load[0][0])
    advance()
    for request, _, _ in load[1:3]:
        core.submit(request)
    for _ in range(at):
        advance()
    core.abort("a")
    core.submit(load[3][0])
    while core.has_work:
        advance()

    assert ("a" in held) == (at > 0)
    assert tokens["a"] == []
    assert core.stats().free_blocks == core.stats().total_blocks
    for name in ("stream", "b", "next"):
        assert tokens[name] == want[name].tokens


@pytest.mark.parametrize("sliced", [True, False])
def test_scores_of_prompts_equal_the_reference(
    models: Models, sliced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Log-probabilities of prompt tokens are the reference's, in parts, chunks and slices."""
    monkeypatch.setattr(prompt_pass, "SCORED_ROWS", 5)
    fast, reference = models
    found = []
    for core in (make_fast(fast), make_reference(reference)):
        if sliced and isinstance(core._runner, FastRunner):
            slice_by_layer(core)
        core.submit(GenerateRequest("stream", (5, 6), SamplingParams(max_tokens=60)))
        core.step()
        for name, count, start, rivals in (("a", 45, 0, 2), ("b", 30, 17, 0), ("c", 1, 0, 1)):
            ids = tuple((7 * i + count) % engines.VOCAB for i in range(count))
            sampling = SamplingParams(max_tokens=2, temperature=0.0)
            core.submit(
                GenerateRequest(
                    name, ids, sampling, prompt_logprobs=rivals, prompt_logprobs_start=start
                )
            )
        scores: dict[str, Any] = {}
        while core.has_work:
            for delta in core.step():
                assert delta.error is None
                if delta.prompt_logprobs is not None:
                    scores[delta.request_id] = delta.prompt_logprobs
        found.append(scores)
    got, want = found

    assert got.keys() == want.keys() == set("abc")
    assert [len(want[name]) for name in "abc"] == [45, 13, 1]
    for name in "abc":
        for a, b in zip(got[name], want[name], strict=True):
            if b is None:
                assert a is None
                continue
            assert abs(a.logprob - b.logprob) < 1e-4
            assert [token for token, _ in a.top] == [token for token, _ in b.top]


def test_more_streams_than_the_largest_bucket(small: Models) -> None:
    """A step of more rows than a bucket has is launched in parts, to the same result."""
    fast, reference = small
    load = requests(random.Random(5), 9)

    got = run(make_fast(fast, buckets=(1, 2)), load)

    assert same(got, run(make_reference(reference), load), load)


def test_a_thousand_requests(small: Models) -> None:
    """Of 1,000 requests with random aborts none is lost, none crossed, and all memory comes back."""
    fast, reference = small
    draw = random.Random(9)
    load = []
    for number in range(1000):
        prompt = tuple(draw.randrange(engines.VOCAB) for _ in range(draw.randint(1, 24)))
        sampling = SamplingParams(
            max_tokens=draw.randint(1, 8), temperature=draw.choice((0.0, 1.0)), seed=number
        )
        abort = draw.choice((0, 0, 0, draw.randint(1, 5)))
        load.append(
            (GenerateRequest(f"r{number}", prompt, sampling), draw.choice((0, 0, 1)), abort)
        )
    options = dataclasses.replace(
        OPTIONS, max_num_seqs=24, max_batched_tokens=128, num_blocks=40, max_snapshots=20
    )
    core = make_fast(fast, options, poison=False, buckets=(1, 8, 24))
    slice_by_layer(core)

    got = run(core, load)

    assert len(got) == 1000
    assert same(got, run(make_reference(reference, options), load), load)
    core._scheduler.prefix.clear()
    assert core._scheduler.blocks.num_free == 40
    assert core._scheduler.slots.num_free == 44
    assert runner_of(core).num_ahead > 50


# ---------------------------------------------------------------- planted faults


def leave_ended_rows_running(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DecodeBuffers, "stop", lambda self, row: None)
    monkeypatch.setattr(DecodeBuffers, "clear", lambda self, row: None)


def take_up_by_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    results = FastRunner._results

    def wrong(self: FastRunner, flight: Any, chunks: Any, draw_of: Any) -> Any:
        flight.rows = {(c.arrival, c.start): i for i, c in enumerate(chunks)}
        return results(self, flight, chunks, draw_of)

    monkeypatch.setattr(FastRunner, "_results", wrong)


def forget_new_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Lanes, "_extend", lambda self, chunks: False)


def keep_the_output_index(monkeypatch: pytest.MonkeyPatch) -> None:
    feed = fast_runner.feed_torch

    def wrong(*args: Tensor) -> None:
        before = args[5].clone()
        feed(*args)
        args[5].copy_(before)

    monkeypatch.setattr(fast_runner, "feed_torch", wrong)


def reset_prompts_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    run_prompts = FastRunner._run_prompts

    def wrong(self: FastRunner, prompts: Any, *, beside: bool) -> Any:
        if self._pass is not None:
            self._pool.reset_slot(self._pass.chunks[0].slot)
        return run_prompts(self, prompts, beside=beside)

    monkeypatch.setattr(FastRunner, "_run_prompts", wrong)


@pytest.mark.parametrize(
    "fault",
    [
        leave_ended_rows_running,
        take_up_by_request_alone,
        forget_new_blocks,
        keep_the_output_index,
        reset_prompts_under_way,
    ],
)
def test_the_comparison_sees_a_planted_fault(
    small: Models, fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each way of breaking the runner shows in some request's tokens, or as an error."""
    fast, reference = small
    fault(monkeypatch)

    def fails(seed: int) -> bool:
        load = requests(random.Random(seed), 10)
        core = make_fast(fast)
        slice_by_layer(core)
        try:
            return not same(run(core, load), run(make_reference(reference), load), load)
        except (AssertionError, KeyError, IndexError):
            return True

    assert any(fails(seed) for seed in range(9))


# ---------------------------------------------------------------- faults of the model


class Faulty:
    """A model that does something else to the logits of chosen calls.

    Args:
        model: the model.
        change: gives the logits to be returned; may raise.
    """

    def __init__(self, model: FastModel, change: Callable[[Tensor], Tensor]) -> None:
        self.config, self.ops = model.config, model.ops
        self.experts = model.experts
        self._model, self._change = model, change

    def decode(self, rows: Any, pool: Any) -> Tensor:
        return self._change(self._model.decode(rows, pool))

    def prefill(self, *args: Any) -> Iterator[Tensor | None]:
        return self._model.prefill(*args)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_unusable_logits_end_one_request(small: Models, value: float) -> None:
    """A row that nothing can be drawn from ends its request; its neighbour does not notice."""
    armed = [0]

    def change(logits: Tensor) -> Tensor:
        armed[0] += 1
        if armed[0] == 8:  # of the five buckets' builds four, then the fourth step
            logits[0, 7] = value
        return logits

    core = make_fast(Faulty(small[0], change), poison=False)
    clean = make_fast(small[0])
    found = []
    for engine in (core, clean):
        deltas = []
        for name in "ab":
            sampling = SamplingParams(max_tokens=12, temperature=0.0)
            engine.submit(GenerateRequest(name, (1, 2, 3, ord(name)), sampling))
        while engine.has_work:
            deltas += engine.step()
            engine.check_integrity()
        found.append({n: [d for d in deltas if d.request_id == n] for n in "ab"})
    broken, whole = found

    assert broken["a"][-1].finish_reason is FinishReason.ERROR
    assert "no usable probabilities" in str(broken["a"][-1].error)
    assert len(broken["a"]) == 5
    assert [d.token_ids for d in broken["b"]] == [d.token_ids for d in whole["b"]]


def test_a_failing_step_ends_its_requests_and_not_the_engine(small: Models) -> None:
    """After a fault nothing that was under way counts, and the next request is served in full."""
    calls = [0]

    def change(logits: Tensor) -> Tensor:
        calls[0] += 1
        if calls[0] == 9:
            raise ValueError
        return logits

    core = make_fast(Faulty(small[0], change), poison=False)
    core.submit(GenerateRequest("a", (1, 2, 3), SamplingParams(max_tokens=20, temperature=0.0)))
    deltas = []
    while core.has_work:
        deltas += core.step()
    assert deltas[-1].finish_reason is FinishReason.ERROR
    load = requests(random.Random(3), 5)

    assert same(run(core, load), run(make_reference(small[1]), load), load)


def test_a_lost_device_is_the_end(small: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where not even the buffers can be written after a fault, whoever runs the engine hears so."""
    core = make_fast(small[0], poison=False)
    core.submit(GenerateRequest("a", (1, 2, 3), SamplingParams(max_tokens=20)))
    core.step()

    def lost(*_: Any) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(runner_of(core).graphs, "run", lost)
    monkeypatch.setattr(DecodeBuffers, "restart", lost)
    with pytest.raises(EngineDeadError, match="does not answer"):
        core.step()


def test_a_buffer_that_moves_is_an_error_that_names_it(small: Models) -> None:
    """A pool made anew under captured steps is noticed before they run on it."""
    core = make_fast(small[0], poison=False)
    runner = runner_of(core)
    runner.seals.check()
    runner._pool.entries[1] = runner._pool.entries[1].clone()

    with pytest.raises(
        SealError, match=r"kv pool.entries\[1\]: torch.float32 .* when captured, now"
    ):
        runner.seals.check()
    core.submit(GenerateRequest("a", (1, 2, 3), SamplingParams(max_tokens=20)))
    deltas = [delta for _ in range(2) for delta in core.step()]
    assert deltas[-1].finish_reason is FinishReason.ERROR


def test_a_resized_buffer_is_an_error_too(small: Models) -> None:
    """Neither shape nor type of a sealed buffer may change."""
    runner = runner_of(make_fast(small[0], poison=False))
    runner._buffers.tables = runner._buffers.tables[:, :3]

    with pytest.raises(SealError, match=r"decode buffers.tables: .* \[6, 6\] .* now .* \[6, 3\]"):
        runner.seals.check()


# ---------------------------------------------------------------- rows for requests that ended


@pytest.mark.parametrize("known", [1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 31, 32])
def test_a_row_for_a_request_that_ended_is_harmless(models: Models, known: int) -> None:
    """Whoever goes on from a kept state gets bitwise what it gets without the row launched ahead."""
    fast, _ = models
    ids = [(37 * i + 11) % engines.VOCAB for i in range(known + 24)]
    found = []
    for bogus in (None, 5, 250):
        pool = engines.make_pool(fast.config, OPTIONS, ring=True)
        pool.reset_slot(1)

        def chunk(start: int, tokens: list[int], slot: int, blocks: tuple[int, ...]) -> Any:
            piece = Chunk("x", slot, start, tuple(tokens), blocks, wants_logits=True)
            return build_rows([piece], block_size=OPTIONS.block_size, device="cpu")

        with torch.inference_mode():
            rows, wanted = chunk(0, ids[:known], 1, (1, 2, 3, 4))
            *_, _ = fast.prefill(rows, pool, wanted)
            if bogus is not None:
                fast.decode(chunk(known, [bogus], 1, (1, 2, 3, 4))[0], pool)
            # A hit: the rolling state and the open block are copied, full blocks are shared.
            full = known // OPTIONS.block_size
            blocks = (*range(1, 1 + full), *range(8, 12))
            pool.copy([(1, 2)], [(1 + full, 8)] if known % OPTIONS.block_size else [])
            logits = [
                fast.decode(chunk(at, [ids[at]], 2, blocks)[0], pool)
                for at in range(known, known + 6)
            ]
        found.append(torch.cat(logits))

    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
