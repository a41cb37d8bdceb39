"""EngineCore: every request gets its own tokens, whatever happens around it."""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from engine.api import (
    EngineError,
    FinishReason,
    GenerateRequest,
    PromptTooLongError,
    SamplingParams,
    TokenDelta,
    Usage,
)
from engine.core import EngineCore
from engine.device.sampler import Draw, sample
from engine.options import EngineConfig
from engine.plan.step import StepPlan
from tests.engine.hash_model import HashRunner, next_logits

VOCAB = 40
CONTEXT = 32


def make(
    *,
    before_run: Callable[[StepPlan], None] | None = None,
    after_run: Callable[[StepPlan, Tensor], Tensor] | None = None,
    **options: int,
) -> EngineCore:
    config = EngineConfig(
        **{"block_size": 4, "num_blocks": 20, "max_num_seqs": 3, "max_batched_tokens": 8, **options}  # type: ignore[arg-type]
    )
    assert config.num_blocks is not None
    runner = HashRunner(
        vocab_size=VOCAB,
        num_blocks=config.num_blocks + 1,
        block_size=config.block_size,
        num_slots=config.resolve_num_slots(),
        before_run=before_run,
        after_run=after_run,
    )
    return EngineCore(runner, config, max_position_embeddings=CONTEXT)


def request(name: str, prompt: tuple[int, ...], **params: object) -> GenerateRequest:
    settings = {"max_tokens": 6, "temperature": 0.0, "seed": 1, **params}
    return GenerateRequest(name, prompt, SamplingParams(**settings))  # type: ignore[arg-type]


def alone(r: GenerateRequest) -> tuple[list[int], FinishReason]:
    """What a request must get, computed without an engine."""
    sequence = list(r.prompt_ids)
    while True:
        index = len(sequence) - len(r.prompt_ids)
        (drawn,) = sample(next_logits(sequence, VOCAB)[None], [Draw(r.sampling, index)])
        assert drawn is not None
        sequence.append(drawn.token_id)
        output = sequence[len(r.prompt_ids) :]
        if drawn.token_id in r.sampling.stop_token_ids:
            return output, FinishReason.STOP
        if len(output) == r.sampling.max_tokens or len(sequence) == CONTEXT:
            return output, FinishReason.LENGTH


class Collector:
    """Deltas by request, with the contract of a stream checked on the way."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = defaultdict(list)
        self.last: dict[str, TokenDelta] = {}

    def take(self, deltas: list[TokenDelta]) -> None:
        assert len({d.request_id for d in deltas}) == len(deltas)
        for delta in deltas:
            assert delta.request_id not in self.last, "nothing follows the last delta"
            first = not self.tokens[delta.request_id]
            assert (delta.usage is not None) == (first or delta.finish_reason is not None)
            assert (delta.finish_reason is FinishReason.ERROR) == (delta.error is not None)
            self.tokens[delta.request_id] += delta.token_ids
            if delta.finish_reason is not None:
                self.last[delta.request_id] = delta


def drain(core: EngineCore, into: Collector | None = None) -> Collector:
    collector = into or Collector()
    for _ in range(2000):
        if not core.has_work:
            break
        collector.take(core.step())
        core.check_integrity()
    assert not core.has_work
    assert core.stats().free_blocks == core.stats().total_blocks
    return collector


PROMPTS = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=CONTEXT - 1).map(tuple)
REQUESTS = st.tuples(
    PROMPTS,
    st.integers(1, 40),
    st.sampled_from([0.0, 0.8]),
    st.sampled_from([0.6, 1.0]),
    st.integers(0, 9),
    st.sets(st.integers(0, VOCAB - 1), max_size=3),
)


@given(
    st.lists(st.tuples(REQUESTS, st.integers(0, 6)), min_size=1, max_size=7),
    st.integers(1, 4),
    st.integers(1, 9),
    st.integers(1, 5),
    st.integers(0, 5),
)
def test_every_request_gets_what_it_would_get_alone(
    arrivals: list[tuple[tuple[tuple[int, ...], int, float, float, int, set[int]], int]],
    slots: int,
    spare_rows: int,
    block_size: int,
    spare_blocks: int,
) -> None:
    """Neighbours, chunk sizes, block sizes, arrival times and preemptions change no token."""
    core = make(
        block_size=block_size,
        num_blocks=-(-CONTEXT // block_size) + spare_blocks,
        max_num_seqs=slots,
        max_batched_tokens=slots + spare_rows,
    )
    collector = Collector()
    requests = []
    for number, ((prompt, length, temperature, top_p, seed, stop), delay) in enumerate(arrivals):
        r = request(
            f"r{number}",
            prompt,
            max_tokens=length,
            temperature=temperature,
            top_p=top_p,
            seed=seed,
            stop_token_ids=tuple(stop),
        )
        for _ in range(delay):
            collector.take(core.step())
        core.submit(r)
        requests.append(r)
    drain(core, collector)

    for r in requests:
        tokens, reason = alone(r)
        assert (tokens, reason) == (collector.tokens[r.id], collector.last[r.id].finish_reason)
        usage = collector.last[r.id].usage
        assert usage is not None
        cached = usage.cached_tokens
        rows = len(r.prompt_ids) - cached
        assert usage == Usage(len(r.prompt_ids), len(tokens), cached, tail_rows=rows)
        assert 0 <= usage.cached_tokens < len(r.prompt_ids)


def test_a_preempted_request_goes_on_as_it_began() -> None:
    """Recomputed after losing its memory, a sampled request without a seed still has one answer."""
    core = make(num_blocks=8, max_batched_tokens=64)
    core.submit(request("old", tuple(range(12)), max_tokens=20))
    core.submit(request("young", tuple(range(12)), max_tokens=20, temperature=1.0, seed=None))
    seeded = core._scheduler.get("young").request

    collector = drain(core)

    assert core.stats().preemptions > 0
    assert seeded.sampling.seed is not None
    assert collector.tokens["young"] == alone(seeded)[0]
    assert collector.tokens["old"] == alone(request("old", tuple(range(12)), max_tokens=20))[0]


def test_requests_without_a_seed_differ() -> None:
    """Nobody gets a stranger's random numbers."""
    core = make()
    for name in "abc":
        core.submit(request(name, (1, 2, 3), temperature=1.0, seed=None, max_tokens=20))

    collector = drain(core)

    assert len({tuple(collector.tokens[name]) for name in "abc"}) == 3


def test_logprobs_come_with_their_tokens() -> None:
    """Asked for, one log-probability per token, equal to the model's own."""
    core = make()
    core.submit(request("a", (1, 2, 3), top_logprobs=2))
    core.submit(request("b", (1, 2, 3)))
    sequence = [1, 2, 3]
    while core.has_work:
        for delta in core.step():
            if delta.request_id == "b":
                assert delta.logprobs is None
                continue
            want = next_logits(sequence, VOCAB).double().log_softmax(-1)
            sequence += delta.token_ids
            assert delta.logprobs is not None
            (got,) = delta.logprobs
            assert got.logprob == pytest.approx(want[sequence[-1]].item())
            assert got.top[0] == (sequence[-1], got.logprob)
            assert len(got.top) == 2


@pytest.mark.parametrize(
    ("prompt", "params", "kind", "message"),
    [
        ((), {}, EngineError, "expected at least one token id, got none"),
        ((1, 40), {}, EngineError, "expected token ids below 40, got 40 at 1"),
        ((-1,), {}, EngineError, "expected token ids below 40, got -1 at 0"),
        ((1,), {"max_tokens": 0}, EngineError, "max_tokens: expected at least 1, got 0"),
        ((1,) * 32, {}, PromptTooLongError, "32 tokens does not fit the context of 32"),
    ],
)
def test_what_cannot_be_served_is_refused_at_once(
    prompt: tuple[int, ...], params: dict[str, object], kind: type[Exception], message: str
) -> None:
    """A refusal says what was expected and what came, and leaves nothing behind."""
    core = make()

    with pytest.raises(kind, match=message):
        core.submit(request("a", prompt, **params))
    assert not core.has_work


def test_the_longest_prompt_gets_one_token() -> None:
    """A prompt one short of the context is served."""
    core = make()
    core.submit(request("a", (1,) * 31))

    collector = drain(core)

    assert len(collector.tokens["a"]) == 1
    assert collector.last["a"].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("steps", range(6))
def test_abort_frees_within_one_step(steps: int) -> None:
    """Waiting, in its prompt or decoding, an aborted request is gone before the next step."""
    core = make()
    core.submit(request("a", tuple(range(20))))
    core.submit(request("b", (1, 2)))
    collector = Collector()
    for _ in range(steps):
        collector.take(core.step())

    core.abort("a")
    core.abort("a")

    assert "a" not in {c.request_id for c in core._scheduler.plan().chunks}
    core.check_integrity()
    drain(core, collector)
    assert "a" not in collector.last
    assert collector.tokens["b"] == alone(request("b", (1, 2)))[0]


def fail_once(at: int) -> Callable[[StepPlan], None]:
    calls = iter(range(1000))

    def before_run(plan: StepPlan) -> None:
        if next(calls) == at:
            raise ValueError("a secret path and a shape")

    return before_run


@pytest.mark.parametrize("at", [0, 1, 2, 3])
def test_a_failing_step_ends_its_requests_and_not_the_engine(
    at: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A fault in the model ends the requests of that step; those that waited are served."""
    core = make(before_run=fail_once(at))
    for name in "abcde":
        core.submit(request(name, (3, 1, 4, 1, 5)))
    with caplog.at_level(logging.ERROR, "engine.core"):
        collector = drain(core)

    reasons = {name: delta.finish_reason for name, delta in collector.last.items()}
    failed = [name for name, reason in reasons.items() if reason is FinishReason.ERROR]
    assert 1 <= len(failed) <= 3
    assert set(reasons) == set("abcde")
    for name in set("abcde") - set(failed):
        assert collector.tokens[name] == alone(request(name, (3, 1, 4, 1, 5)))[0]
    error = collector.last[failed[0]].error
    assert error is not None
    assert "secret" not in error
    assert "a secret path" in caplog.text


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_unusable_logits_end_one_request(value: float) -> None:
    """NaN in one row ends that request with an error; its neighbour does not notice."""

    def after_run(plan: StepPlan, logits: Tensor) -> Tensor:
        wanting = [c for c in plan.chunks if c.wants_logits]
        for row, chunk in enumerate(wanting):
            if chunk.request_id == "a" and chunk.start >= 4:
                logits[row, 7] = value
        return logits

    core = make(after_run=after_run)
    core.submit(request("a", (1, 2, 3)))
    core.submit(request("b", (1, 2, 3)))

    collector = drain(core)

    assert collector.last["a"].finish_reason is FinishReason.ERROR
    assert collector.last["a"].usage == Usage(3, 2, tail_rows=3)
    assert "no usable probabilities" in str(collector.last["a"].error)
    assert collector.tokens["a"] == collector.tokens["b"][:2]
    assert collector.tokens["b"] == alone(request("b", (1, 2, 3)))[0]


def test_logits_of_a_wrong_shape_are_a_fault() -> None:
    """A model that forgets a row does not give one request another's token."""
    core = make(after_run=lambda plan, logits: logits[:1])
    core.submit(request("a", (1, 2)))
    core.submit(request("b", (1, 2)))

    collector = drain(core)

    assert {d.finish_reason for d in collector.last.values()} == {FinishReason.ERROR}


def test_stats_count() -> None:
    """The counters say what ran, what waits and what is free."""
    core = make(max_num_seqs=1)
    core.submit(request("a", tuple(range(10)), max_tokens=2))
    core.submit(request("b", (1,), max_tokens=3))
    core.step()

    stats = core.stats()
    assert (stats.running, stats.waiting, stats.steps) == (1, 1, 1)
    assert (stats.free_blocks, stats.total_blocks) == (17, 20)
    assert (stats.prompt_tokens, stats.completion_tokens) == (0, 0)
    drain(core)
    stats = core.stats()
    assert (stats.running, stats.waiting, stats.steps) == (0, 0, 6)
    assert (stats.prompt_tokens, stats.completion_tokens) == (11, 5)


def finished(core: EngineCore, r: GenerateRequest) -> tuple[list[int], list[TokenDelta]]:
    """Run a request alone; its tokens and its deltas."""
    core.submit(r)
    deltas = []
    while core.has_work:
        deltas += core.step()
    return [token for delta in deltas for token in delta.token_ids], deltas


def test_cached_tokens_are_reported_from_the_first_delta_on() -> None:
    """A second turn finds the first; the first delta says so, the last one again, stats add up."""
    core = make()
    tokens, deltas = finished(core, request("a", (1, 2, 3, 4, 5), max_tokens=4))
    assert [delta.usage for delta in deltas] == [
        Usage(5, 1, tail_rows=5),
        None,
        None,
        Usage(5, 4, tail_rows=5),
    ]
    turn = (1, 2, 3, 4, 5, *tokens, 7)

    _, deltas = finished(core, request("b", turn, max_tokens=3))

    assert [delta.usage for delta in deltas] == [
        Usage(10, 1, 8, tail_rows=2),
        None,
        Usage(10, 3, 8, tail_rows=2),
    ]
    stats = core.stats()
    assert (stats.prompt_tokens, stats.cached_tokens, stats.prefix_hits) == (15, 8, 1)
    assert stats.snapshots > 0
    assert 0 < stats.cached_blocks < stats.total_blocks == stats.free_blocks


def test_without_the_cache_nothing_is_kept() -> None:
    """Switched off, an equal prompt is processed again and no memory is held."""
    core = make(prefix_cache=False)
    for name in "ab":
        _, deltas = finished(core, request(name, (1, 2, 3, 4, 5)))
        assert deltas[0].usage == Usage(5, 1, 0, tail_rows=5)

    stats = core.stats()
    assert (stats.snapshots, stats.cached_blocks, stats.cached_tokens) == (0, 0, 0)


@pytest.mark.parametrize("kind", ["step", "logits"])
def test_after_a_fault_nothing_kept_is_trusted(kind: str) -> None:
    """What a failing model left in memory is no start for anybody."""
    armed = [False]

    def before_run(plan: StepPlan) -> None:
        if armed[0] and kind == "step":
            raise ValueError

    def after_run(plan: StepPlan, logits: Tensor) -> Tensor:
        return logits * math.nan if armed[0] and kind == "logits" else logits

    core = make(before_run=before_run, after_run=after_run)
    finished(core, request("a", (1, 2, 3, 4, 5)))
    assert core.stats().snapshots > 0
    armed[0] = True

    _, deltas = finished(core, request("b", (9, 9)))

    assert deltas[-1].finish_reason is FinishReason.ERROR
    assert (core.stats().snapshots, core.stats().cached_blocks) == (0, 0)
    core.check_integrity()


def swap_blocks(runner: HashRunner) -> None:
    """The second block of every request is one and the same."""
    write = runner._write

    def wrong(chunk: object) -> None:
        write(chunk)  # type: ignore[arg-type]
        runner.blocks[2] = [0] * runner.block_size

    runner._write = wrong  # type: ignore[method-assign, assignment]


def forget_the_reset(runner: HashRunner) -> None:
    """A slot keeps what its last owner left."""
    write = runner._write

    def wrong(chunk: object) -> None:
        before = list(runner.slots)
        write(chunk)  # type: ignore[arg-type]
        if chunk.start == 0:  # type: ignore[attr-defined]
            runner.slots[chunk.slot] ^= before[chunk.slot]  # type: ignore[attr-defined]

    runner._write = wrong  # type: ignore[method-assign, assignment]


@pytest.mark.parametrize("fault", [swap_blocks, forget_the_reset])
def test_the_hash_model_sees_wrong_memory(fault: Callable[[HashRunner], None]) -> None:
    """The comparison above can fail: a block or a slot that is not the request's own is seen."""
    core = make()
    fault(core._runner)  # type: ignore[arg-type]
    requests = [request(name, tuple(range(9))) for name in "ab"]
    for r in requests:
        core.submit(r)

    collector = drain(core)

    assert any(collector.tokens[r.id] != alone(r)[0] for r in requests)


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_the_hash_model_equals_its_twin(rows: int) -> None:
    """With and without pools the make-believe model says the same."""
    core = make(max_batched_tokens=3 + rows)
    core.submit(request("a", tuple(range(20)), max_tokens=1))
    while core.has_work:
        deltas = core.step()

    want = next_logits(range(20), VOCAB).argmax().item()
    assert deltas[0].token_ids == (want,)
    assert torch.equal(next_logits([1, 2], VOCAB), next_logits([1, 2], VOCAB))
