"""Paged experts through the engine: tokens do not depend on slots, whatever runs beside and before."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import pytest
import torch

from engine import TINY_CHECKPOINT
from engine.api import (
    EngineError,
    EngineStats,
    ExpertStats,
    FinishReason,
    GenerateRequest,
    SamplingParams,
)
from engine.config import ModelConfig
from engine.core import EngineCore, load_engine
from engine.device.build import Built
from engine.device.fast_runner import FastRunner
from engine.device.graphs import GraphCache
from engine.device.seals import Seals
from engine.kernels.paging import HITS, MISSES
from engine.model.experts import PagedExperts
from engine.options import EngineConfig
from engine.routing_trace import read_trace
from tests.engine.device.engines import Outcome, requests, run, same, steps as steps_of
from tests.engine.paging.checkpoints import write_qwen

OPTIONS = EngineConfig(
    device="cpu",
    runner="fast",
    cpu_threads=1,
    block_size=16,
    num_blocks=24,
    max_num_seqs=6,
    max_batched_tokens=40,
    max_snapshots=5,
    max_model_len=96,
)
PROMPTS = [[7, 300, 12, 9, 1001, 44], [5] * 30, list(range(20, 61))]


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen(tmp_path_factory.mktemp("qwen"))


def load(path: Path, **options: object) -> EngineCore:
    return load_engine(path, dataclasses.replace(OPTIONS, **options))  # type: ignore[arg-type]


def runner_of(core: EngineCore) -> FastRunner:
    assert isinstance(core._runner, FastRunner)
    return core._runner


def greedy(core: EngineCore, prompts: list[list[int]], tokens: int = 12) -> list[list[int]]:
    for number, ids in enumerate(prompts):
        core.submit(GenerateRequest(f"r{number}", tuple(ids), SamplingParams(tokens, 0.0)))
    by_id: dict[str, list[int]] = {f"r{i}": [] for i in range(len(prompts))}
    while core.has_work:
        for delta in core.step():
            assert delta.finish_reason is not FinishReason.ERROR, delta.error
            by_id[delta.request_id] += delta.token_ids
    return list(by_id.values())


@pytest.fixture(scope="module")
def tiny_tokens() -> list[list[int]]:
    return greedy(load(TINY_CHECKPOINT), PROMPTS)


@pytest.mark.parametrize(
    "options",
    [
        {"expert_slots": 8},
        {"expert_slots": 5},
        {"expert_slots": 2},
        {"expert_slots": 3, "resident_layers": 4},
    ],
    ids=str,
)
def test_greedy_tokens_of_the_shipped_model(
    tiny_tokens: list[list[int]], options: dict[str, int]
) -> None:
    """K = E, K = top_k and between: the same tokens; a layer with a slot for all has no store (J5)."""
    core = load(TINY_CHECKPOINT, **options)
    assert greedy(core, PROMPTS) == tiny_tokens
    paged = runner_of(core).paged
    assert len(paged) == (
        0 if options["expert_slots"] == 8 else 9 - options.get("resident_layers", 0)
    )
    for one in paged:
        one.check_integrity()


def test_slots_by_layer_come_from_a_file(tiny_tokens: list[list[int]], tmp_path: Path) -> None:
    """One number a layer; the tokens stay the same."""
    file = tmp_path / "slots"
    file.write_text("8\n2\n3\n8\n7\n2\n2\n4\n5\n")
    core = load(TINY_CHECKPOINT, expert_slots_file=file)
    assert [one.num_slots for one in runner_of(core).paged] == [2, 3, 7, 2, 2, 4, 5]
    assert greedy(core, PROMPTS) == tiny_tokens


@pytest.mark.parametrize("slots", [2, 5])
def test_soak(qwen: Path, slots: int) -> None:
    """Random loads with aborts: what resident experts give; slots hold the host's bytes at the end (J4, J5)."""
    resident, paged = load(qwen), load(qwen, expert_slots=slots)
    for seed in range(3):
        some = requests(random.Random(seed), 12)
        assert same(run(paged, some), run(resident, some), some)
    for one in runner_of(paged).paged:
        one.check_integrity()
        counters = one.state.counters.tolist()
        assert counters[1] > 0
        assert counters[2] > 0


def test_stats_say_what_the_tables_counted(qwen: Path) -> None:
    """Hits, misses, bytes and waves of all layers; zero where every expert is resident."""
    core = load(qwen, expert_slots=3)
    greedy(core, PROMPTS[1:])
    found, paged = core.stats().experts, runner_of(core).paged
    assert found.hits == sum(one.counts()[0] for one in paged) > 0
    assert found.misses == sum(one.counts()[1] for one in paged) > 0
    assert found.bytes_copied == found.misses * paged[0].layout.nbytes
    assert found.waves > 0
    assert (found.prefetched, found.prefetch_hits) == (0, 0)
    resident = load(qwen)
    greedy(resident, PROMPTS[1:])
    assert resident.stats().experts == ExpertStats()


@pytest.mark.parametrize("path", [None, TINY_CHECKPOINT], ids=["qwen", "v4.1"])
def test_counts_and_recording_begin_with_the_first_request(
    qwen: Path, tmp_path: Path, path: Path | None
) -> None:
    """What a start runs for nobody is neither counted nor recorded."""
    file = tmp_path / "trace"
    core = load(path or qwen, expert_slots=3, record_routing=file)
    assert core.stats().experts == ExpertStats()

    runner_of(core).warm_up(16)

    assert runner_of(core).paged[0].counts() != (0, 0), "nothing was run"
    assert core.stats().experts == ExpertStats()
    greedy(core, PROMPTS[1:2], 3)
    found = core.stats().experts
    core.close()
    trace = read_trace(file)
    for steps in trace.layers:
        assert sum(len(step.experts) for step in steps if step.prompt) == 30
    assert found.waves >= sum(map(len, trace.layers))


def test_counters_that_wrap_go_on(qwen: Path) -> None:
    """The tables' counters have 32 bits; what is told goes on past them, by waves of both kinds."""
    core = load(qwen, expert_slots=3)
    want = greedy(core, PROMPTS[1:])
    before, served = core.stats().experts, load(qwen, expert_slots=3)
    runner = runner_of(served)
    for one in runner.paged:
        one.state.counters[HITS] = one.state.counters[MISSES] = 2**31 - 3
    runner._expert_counts.begin()

    assert greedy(served, PROMPTS[1:]) == want

    assert served.stats().experts == before
    assert all(min(one.counts()) < 0 for one in runner.paged), "nothing wrapped"


def test_counters_go_on_over_an_update(qwen: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing that counts goes back, at no moment; the runner that goes says how it fared."""
    core = load(qwen, expert_slots=3, num_blocks=6)
    run(core, requests(random.Random(0), 24))
    before, source = core.stats(), core._source
    assert before.evictions * before.preemptions * before.experts.hits > 0
    assert before.tail_rows != ()
    assert source is not None
    seen: list[EngineStats] = []
    rebuild = source.rebuild

    def watched(path: Path) -> Built:
        seen.append(core.stats())
        return rebuild(path)

    source.rebuild = watched  # type: ignore[method-assign]
    with caplog.at_level("INFO"):
        core.update_weights(qwen)
    seen.append(core.stats())

    kept = before.snapshots
    for stats in seen:
        gone = dataclasses.replace(
            before, evictions=before.evictions + kept, snapshots=0, cached_blocks=0
        )
        assert stats == gone
    assert len([line for line in caplog.messages if "hit rate" in line]) == 3
    run(core, requests(random.Random(0), 24))
    after = core.stats()
    assert after.preemptions > before.preemptions
    assert after.experts.waves > before.experts.waves
    assert after.tail_rows > before.tail_rows


@pytest.mark.parametrize("slots", [2, 5])
def test_prefetch_changes_no_token(qwen: Path, slots: int) -> None:
    """Experts that come ahead by a guess: tokens of resident experts, true slots, some asked for."""
    resident, paged = load(qwen), load(qwen, expert_slots=slots, expert_prefetch=True)
    for seed in range(3):
        some = requests(random.Random(seed), 12)
        assert same(run(paged, some), run(resident, some), some)
        for one in runner_of(paged).paged:
            one.check_integrity()
    found = paged.stats().experts
    assert 0 < found.prefetch_hits <= found.prefetched
    first, *others = runner_of(paged).paged
    assert first.read_residency().ahead == 0  # nothing is before it
    assert all(one.read_residency().ahead for one in others)


def test_prefetch_of_hash_layers_is_no_guess() -> None:
    """What a table of token ids says comes ahead is what is asked for."""
    core = load(TINY_CHECKPOINT, expert_slots=4, expert_prefetch=True, max_num_seqs=1)
    tokens = greedy(core, PROMPTS)
    assert tokens == greedy(load(TINY_CHECKPOINT, max_num_seqs=1), PROMPTS)
    config = ModelConfig.from_file(TINY_CHECKPOINT)
    for layer, one in zip(config.layers, runner_of(core).paged, strict=True):
        table = one.read_residency()
        if layer.hash_routed and layer.index:
            assert table.ahead == table.ahead_hits > 0
    assert core.stats().experts.prefetch_hits > 0


@pytest.mark.parametrize("call", range(1, 6))
def test_a_fault_in_a_pass_leaves_the_tables_true(qwen: Path, call: int) -> None:
    """A model that fails between waves harms its requests alone (c4)."""
    resident, core = load(qwen), load(qwen, expert_slots=2)
    runner = runner_of(core)
    plain, calls = runner._model.ops, []

    def failing(*args: object, **how: object) -> object:
        calls.append(1)
        if len(calls) == call:
            raise RuntimeError("planted: the next wave's experts are in their slots by now")
        return plain.moe(*args, **how)

    runner._model.ops = dataclasses.replace(plain, moe=failing)  # type: ignore[arg-type]
    core.submit(GenerateRequest("bad", tuple(range(30)), SamplingParams(4, 0.0)))
    (delta,) = core.step()
    assert delta.finish_reason is FinishReason.ERROR
    runner._model.ops = plain
    for one in runner.paged:
        one.check_integrity()
    prompts = [[9, 8, 7], list(range(40))]
    assert greedy(core, prompts) == greedy(resident, prompts)


def test_steps_beyond_the_slots_are_not_captured(qwen: Path) -> None:
    """The largest captured step is K // top_k, a bucket of its own (J7)."""
    runner = runner_of(load(qwen, expert_slots=6))
    assert runner.graphs.buckets == (1, 2, 3, 4, 8)
    asked: list[int] = []
    cache = GraphCache(
        lambda rows: torch.zeros(asked.append(rows) or rows, 1),  # type: ignore[func-returns-value]
        runner._model,
        (1, 2, 3, 4),
        Seals(),
        captures=True,
        captured_rows=3,
    )
    assert [cache._is_captured(rows) for rows in (1, 3, 4)] == [True, True, False]
    cache.run(4)
    assert asked == [4]


def test_weights_are_not_written_under_resident_experts(qwen: Path) -> None:
    """In place is refused, with the reason; a rebuild gives the same tokens again."""
    core = load(qwen, expert_slots=3)
    before = greedy(core, PROMPTS[1:])
    with pytest.raises(
        EngineError, match=r"paged: 9 of them lie in slots.*without in_place drains"
    ):
        core.update_weights(qwen, in_place=True)
    core.update_weights(qwen)
    assert greedy(core, PROMPTS[1:]) == before
    assert all(isinstance(one, PagedExperts) for one in runner_of(core).paged)


def test_every_reason_is_named_at_once(qwen: Path, tmp_path: Path) -> None:
    """Slots, layers, runner and graphs in one message, each with what was seen and is accepted."""
    with pytest.raises(EngineError) as caught:
        load(TINY_CHECKPOINT, expert_slots=1, resident_layers=10)
    message = str(caught.value)
    assert "expert_slots: expected 2 (experts a token is routed to) to 8, got 1" in message
    assert "resident_layers: expected at most 9, got 10" in message
    assert "runner:" not in message  # with so many layers resident, none is paged
    with pytest.raises(EngineError) as caught:
        load(TINY_CHECKPOINT, expert_slots=1, runner="reference", speculation="mtp")
    message = str(caught.value)
    assert "expert_slots: expected 2 (experts a token is routed to) to 8, got 1" in message
    assert "speculation: expected" in message
    assert "runner: expected fast, got reference beside paged experts" in message
    file = tmp_path / "slots"
    file.write_text("3\n1\n")
    with pytest.raises(EngineError) as caught:
        load(qwen, expert_slots_file=file, expert_slots=3, graphs=True)
    message = str(caught.value)
    assert "expert_slots: expected one of both, got 3 beside" in message
    assert "expected one for each of 3 layers, got 2 numbers" in message
    assert "layer 1: expected 2 (experts a token is routed to) to 8, got 1" in message
    assert "graphs on: expected an NVIDIA GPU, got the CPU" in message
    file.write_text("3 x 4")
    with pytest.raises(EngineError, match="expected a whole number a line, got 'x' as number 2"):
        load(qwen, expert_slots_file=file)
    with pytest.raises(EngineError, match="resident_layers: expected nothing without expert_slots"):
        load(qwen, resident_layers=1)
    with pytest.raises(EngineError, match="expert_prefetch: expected nothing without expert_slots"):
        load(qwen, expert_prefetch=True)


def test_hit_rates_are_logged_at_the_end(qwen: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One line a paged layer, with the counts that the tables have."""
    core = load(qwen, expert_slots=3)
    greedy(core, PROMPTS[1:])
    first, *_ = runner_of(core).paged
    hits, misses = first.counts()
    assert min(hits, misses) > 0
    with caplog.at_level("INFO"):
        core.close()
    rate = hits / (hits + misses)
    said = f"paged layer 0: 3 slots, {hits} hits, {misses} misses, hit rate {rate:.4f}"
    assert said in caplog.messages
    assert len([line for line in caplog.messages if "paged layer" in line]) == 3


def soak(core: EngineCore, seeds: range, *, every: int) -> list[dict[str, Outcome]]:
    """Loads of changing size with aborts; every few steps each slot has its expert's bytes (J1, J4)."""
    found, paged, count = [], runner_of(core).paged, 0
    for seed in seeds:
        draw = random.Random(seed)
        outcomes: dict[str, Outcome] = {}
        for deltas in steps_of(core, requests(draw, draw.randint(2, 14)), outcomes):
            for delta in deltas:
                assert delta.finish_reason is not FinishReason.ERROR, delta.error
                outcomes[delta.request_id].tokens += delta.token_ids
            count += 1
            if count % every == 0:
                for one in paged:
                    one.check_integrity()
        found.append(outcomes)
    assert count > 20 * len(seeds)
    return found


def check_agree(mine: list[dict[str, Outcome]], theirs: list[dict[str, Outcome]]) -> None:
    """The same tokens in both soaks; of a request that was aborted as far as both went."""
    for one, other in zip(mine, theirs, strict=True):
        for name, outcome in one.items():
            pairs = zip(outcome.tokens, other[name].tokens, strict=False)
            assert all(a == b for a, b in pairs)


@pytest.mark.parametrize("options", [{}, {"expert_prefetch": True}], ids=["", "prefetch"])
def test_slots_hold_the_hosts_bytes_after_every_step(qwen: Path, options: dict[str, bool]) -> None:
    """Changing batch sizes, chunks and aborts: no step leaves a slot with other bytes than its expert's."""
    soak(load(qwen, expert_slots=5, **options), range(20, 23), every=1)


def test_a_slot_with_other_bytes_is_seen(qwen: Path) -> None:
    """One flipped byte in one slot of one layer ends the soak."""
    core = load(qwen, expert_slots=5)
    greedy(core, PROMPTS[1:])
    runner_of(core).paged[1].slots[3, 100] ^= 1
    with pytest.raises(RuntimeError, match="slot 3 does not hold the bytes of expert"):
        runner_of(core).paged[1].check_integrity()


@pytest.mark.gpu
@pytest.mark.parametrize("slots", [2, 5, 7])
@pytest.mark.parametrize("prefetch", [False, True], ids=["", "prefetch"])
def test_long_soak_on_a_gpu(qwen: Path, slots: int, prefetch: bool) -> None:
    """Captured steps, waves and streamed prompts in turn: resident tokens, true slots throughout."""
    on = {"device": "cuda", "dtype": "float32"}
    paged = load(qwen, **on, expert_slots=slots, expert_prefetch=prefetch)
    check_agree(soak(paged, range(12), every=7), soak(load(qwen, **on), range(12), every=99))
    stats = paged.stats().experts
    assert min(stats.hits, stats.misses, stats.waves) > 0
    assert (stats.prefetch_hits > 0) is prefetch


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_greedy_tokens_of_the_shipped_model_on_a_gpu(dtype: str) -> None:
    """K = E, K = top_k and between, captured and eager: the same tokens (J5)."""
    on = {"device": "cuda", "dtype": dtype}
    wanted = greedy(load(TINY_CHECKPOINT, **on), PROMPTS, 24)
    for slots in (8, 2, 3, 5, 7):
        core = load(TINY_CHECKPOINT, **on, expert_slots=slots)
        assert greedy(core, PROMPTS, 24) == wanted, slots
        assert greedy(core, PROMPTS, 24) == wanted, (slots, "again, from the prefix cache")
        for one in runner_of(core).paged:
            one.check_integrity()


@pytest.mark.gpu
@pytest.mark.parametrize("slots", [2, 5])
def test_captured_and_eager_steps_share_their_tables(qwen: Path, slots: int) -> None:
    """On a GPU: loads that go in and out of captured steps give resident tokens; slots stay true (J6)."""
    on = {"device": "cuda", "dtype": "float32"}
    resident, paged = load(qwen, **on), load(qwen, **on, expert_slots=slots)
    runner = runner_of(paged)
    captured = [bucket for bucket in runner.graphs.buckets if runner.graphs._is_captured(bucket)]
    assert captured[-1] == slots // 2
    some = requests(random.Random(0), 12)
    assert same(run(paged, some), run(resident, some), some)
    for one in runner.paged:
        one.check_integrity()
        assert all(one.counts())


def test_qwen_has_no_reference_runner(qwen: Path) -> None:
    """Asked for, it is refused; left open, the fast one is taken."""
    with pytest.raises(EngineError, match="runner: expected fast for this architecture"):
        load(qwen, runner="reference")
    runner_of(load(qwen, runner="auto"))


def test_prefix_cache_of_a_model_without_slots(qwen: Path) -> None:
    """A second prompt with a common beginning is a hit, with the tokens of a cold run."""
    core = load(qwen)
    text = list(range(2, 60))
    (first,) = greedy(core, [text], 6)
    again = [[*text, *first, 9, 9]]
    warm = greedy(core, again, 6)
    assert core.stats().prefix_hits == 1
    assert core.stats().cached_tokens >= 48
    assert warm == greedy(load(qwen, prefix_cache=False), again, 6)


def test_prompt_logprobs_of_qwen(qwen: Path) -> None:
    """Scores of prompt tokens are the logits' own, in parts as whole."""
    core = load(qwen)
    ids = tuple(range(3, 60))
    core.submit(GenerateRequest("r", ids, SamplingParams(1, 0.0), prompt_logprobs=0))
    found = None
    while core.has_work:
        for delta in core.step():
            found = found or delta.prompt_logprobs
    assert found is not None
    assert found[0] is None
    assert all(one is not None and one.logprob < 0 for one in found[1:])


def test_recorded_routing_is_what_steps_were_routed_to(qwen: Path, tmp_path: Path) -> None:
    """One row for each token a layer processed, in the file's form; tokens stay the same."""
    file = tmp_path / "trace.safetensors"
    core = load(qwen, record_routing=file)
    tokens = greedy(core, [PROMPTS[1]], 5)
    assert tokens == greedy(load(qwen), [PROMPTS[1]], 5)
    core.close()
    trace = read_trace(file)
    assert (trace.num_experts, trace.per_row, len(trace.layers)) == (8, 2, 3)
    for steps in trace.layers:
        assert sum(len(step.experts) for step in steps if step.prompt) == 30
        assert 4 <= len([step for step in steps if not step.prompt]) <= 6
    with pytest.raises(EngineError, match="runner: expected fast, got reference beside record_"):
        load(TINY_CHECKPOINT, record_routing=file, runner="reference")


def test_a_trace_is_of_one_set_of_weights(qwen: Path, tmp_path: Path) -> None:
    """While routing is recorded an update is refused, and what was recorded stays."""
    file = tmp_path / "trace.safetensors"
    core = load(qwen, record_routing=file)
    tokens = greedy(core, [PROMPTS[1]], 5)
    with pytest.raises(EngineError, match=r"routing is recorded to .*trace\.safetensors, and a"):
        core.update_weights(qwen)
    assert greedy(core, [PROMPTS[1]], 5) == tokens
    core.close()
    for steps in read_trace(file).layers:
        assert sum(len(step.experts) for step in steps if step.prompt) > 30
        assert len([step for step in steps if not step.prompt]) >= 8


def test_what_was_recorded_is_written_although_the_device_is_lost(
    qwen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The figures of paged experts cannot be read then; the trace is on the host."""
    file = tmp_path / "trace.safetensors"
    core = load(qwen, record_routing=file, expert_slots=3)
    greedy(core, [PROMPTS[1]], 5)

    def lost() -> None:
        raise RuntimeError("the device does not answer")

    monkeypatch.setattr(runner_of(core)._expert_counts, "settle", lost)
    with pytest.raises(RuntimeError, match="does not answer"):
        core.close()
    assert len(read_trace(file).layers) == 3
