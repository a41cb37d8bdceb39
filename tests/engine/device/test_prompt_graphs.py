"""Short passes in buckets: static buffers and padding change nothing, on the CPU as on a GPU.

On the CPU a bucket is called, not replayed, so that faults of padding and bookkeeping show here;
test_prompt_graphs_gpu.py replays.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from engine.api import EngineError, PrefillMode
from engine.core import EngineCore
from engine.device import prompt_graphs
from engine.device.fast_runner import FastRunner
from engine.device.kvpool import KVPool
from engine.device.prompt_graphs import PromptGraphs
from engine.device.prompt_pass import PromptPass
from engine.device.row_buffers import RowBuffers
from engine.device.seals import SealError
from engine.device.tail_graphs import TailGraphs
from engine.model.fast import FastModel
from engine.model.v4 import Model
from engine.plan.replay import tail_of
from engine.plan.step import Chunk
from tests.engine.bucketed import REQUESTS, chunk, faults_of, padding, pool_of, turns
from tests.engine.device import engines
from tests.engine.device.engines import CPU, load_fast, load_reference, make_fast
from tests.engine.fast import drafts
from tests.engine.model import build

BUCKETS = (8, 32, 64)
CONTEXT = 96


@pytest.fixture(autouse=True, scope="module")
def more_prompts() -> Iterator[None]:
    """Room for several prompts in buckets as small as these."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompt_graphs, "PER_SEQUENCE", 8)
        yield


@pytest.fixture(scope="module", params=["v4", "v41"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    own = {"index_topk": 512, "candidate_topk_blocks": 512} if request.param == "v41" else {}
    config = getattr(build, request.param)(**own)
    return build.write(tmp_path_factory.mktemp(request.param) / "model", config, seed=5)


@pytest.fixture(scope="module")
def fast(path: Path) -> FastModel:
    return load_fast(path)


def graphs_of(model: FastModel, pool: KVPool, buckets: tuple[int, ...] = BUCKETS) -> PromptGraphs:
    """Buckets that are ready."""
    graphs = PromptGraphs(
        model, pool, tail_of(model.config), max_model_len=CONTEXT, buckets=buckets, captures=False
    )
    begin(model, pool, [padding(max(buckets))], graphs).advance(None)
    graphs.build()
    return graphs


def begin(
    model: FastModel,
    pool: KVPool,
    chunks: list[Chunk],
    graphs: PromptGraphs | None,
    tails: TailGraphs | None = None,
) -> PromptPass:
    for one in chunks:
        if not one.start:
            pool.reset_slot(one.slot)
    return PromptPass.begin(
        model, pool, chunks, CPU, tail_of(model.config),
        None if tails is None else tails.run, None if graphs is None else graphs.run,
    )  # fmt: skip


def run_pass(model: FastModel, pool: KVPool, chunks: list[Chunk], *how: Any) -> torch.Tensor:
    """Logits of a pass over chunks."""
    done = begin(model, pool, chunks, *how)
    done.advance(None)
    assert done.logits is not None
    return done.logits


def faults(model: FastModel, lengths: list[int], modes: list[PrefillMode], again: list[int]) -> list[str]:  # fmt: skip
    """What a bucket changes in two passes, one after the other."""
    found: list[str] = []
    pools = pool_of(model), pool_of(model)
    graphs = graphs_of(model, pools[1])
    for chunks in turns(lengths, modes, again):
        plain = partial(run_pass, model, pools[0], chunks, None)
        found += faults_of(model, pools, plain, partial(run_pass, model, pools[1], chunks, graphs))
    return found


LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=REQUESTS)


@settings(max_examples=20, deadline=None)
@given(lengths=LENGTHS, data=st.data())
def test_a_bucket_changes_nothing(fast: FastModel, lengths: list[int], data: st.DataObject) -> None:
    """In any company, from any position, in any mode: rows that pad write no slot and reach no expert."""
    known = ["off", "exact", "bounded"] if tail_of(fast.config) else ["off"]
    mode = st.sampled_from(known)
    modes = data.draw(st.lists(mode, min_size=len(lengths), max_size=len(lengths)))
    again = data.draw(st.lists(st.integers(0, 20), min_size=len(lengths), max_size=len(lengths)))

    assert faults(fast, lengths, modes, again) == []  # type: ignore[arg-type]


def test_buckets_are_used(fast: FastModel) -> None:
    """The comparison above is of buckets; what is too large, or has too many prompts, goes without."""
    pool = pool_of(fast)
    graphs = graphs_of(fast, pool)
    for chunks, replayed in (
        ([chunk(0, 8)], 1),
        ([chunk(0, 9)], 2),
        ([chunk(i, 16) for i in range(4)], 3),
        ([chunk(0, 70)], 3),
        ([chunk(i, 2) for i in range(2)], 3),  # a bucket of 8 has room for one
        ([chunk(i, 1) for i in range(3)], 3),  # beside a pass that is under way, perhaps
        ([chunk(0, 20, start=8)], 4),
    ):
        run_pass(fast, pool, chunks, graphs)
        assert graphs.num_replayed == replayed
    assert graphs.num_eager == 3
    assert [captured.bucket for captured in graphs.captured] == [64, 32, 8]


def test_layers_before_a_tail_are_a_buckets(tmp_path: Path) -> None:
    """Of a bounded prompt a bucket runs the first layers and a tail's bucket the last."""
    model = load_fast(build.write(tmp_path / "model", build.v41(), seed=5))
    tail = tail_of(model.config)
    assert tail is not None
    pool = pool_of(model)
    graphs = graphs_of(model, pool)
    tails = TailGraphs(
        model, pool, tail, max_model_len=CONTEXT, buckets=(8, 16), captures=False, warm_rows=60
    )
    run_pass(model, pool, [chunk(0, 60, "bounded")], None, tails)
    tails.build()
    want = run_pass(model, pool, [chunk(0, 50, "bounded")], None, None)
    got = run_pass(model, pool, [chunk(0, 50, "bounded")], graphs, tails)

    assert (got - want).abs().max() < 1e-4
    assert (graphs.num_replayed, tails.num_replayed) == (1, 1)


def test_a_pad_of_a_live_slot_is_seen(fast: FastModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that pad under the slot of a request are routed, and write its windows."""
    place = RowBuffers.place_rows

    def wrong(self: RowBuffers, bucket: int, rows: Any) -> None:
        place(self, bucket, rows)
        self.slots[self.most_sequences(bucket)] = 1

    monkeypatch.setattr(RowBuffers, "place_rows", wrong)
    found = faults(fast, [17, 9], ["off"] * 2, [0, 0])

    assert "rows that pad reach experts" in found
    assert any(name.startswith("window") for name in found)


@pytest.mark.parametrize("stale", ["seq", "tables", "lengths"])
def test_what_an_earlier_pass_leaves_is_seen(
    fast: FastModel, monkeypatch: pytest.MonkeyPatch, stale: str
) -> None:
    """Buffers that keep what an earlier, larger pass had in them are noticed."""
    place = RowBuffers.place_rows

    def wrong(self: RowBuffers, bucket: int, rows: Any) -> None:
        old = getattr(self, stale).clone()
        place(self, bucket, rows)
        new = getattr(self, stale)
        if old.any() and self.slots[0] > 0:
            new[rows.num_rows if stale == "seq" else 0 :] = old[rows.num_rows if stale == "seq" else 0 :]  # fmt: skip

    monkeypatch.setattr(RowBuffers, "place_rows", wrong)
    if stale == "seq":  # rows that pad belong to a request then
        monkeypatch.setattr(RowBuffers, "most_sequences", lambda self, bucket: 4)

    assert faults(fast, [20, 15, 14], ["off"] * 3, [0, 5, 6]) != []


def test_results_of_rows_that_pad_are_seen(
    fast: FastModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever goes on behind a bucket's layers gets the pass's own rows: the first ones."""

    def wrong(self: Any, count: int) -> Any:
        return self._take(lambda tensor: tensor[len(tensor) - count :])

    monkeypatch.setattr("engine.model.flow.Flow.head", wrong)

    assert "logits differ" in faults(fast, [20], ["off"], [0])


def test_a_prompt_may_be_given_up_between_layers(fast: FastModel) -> None:
    """The next pass has the buffers to itself, and the one that was given up does not go on."""
    pool = pool_of(fast)
    graphs = graphs_of(fast, pool)
    want = run_pass(fast, pool, [chunk(0, 50)], None)
    dropped = begin(fast, pool, [chunk(1, 60)], graphs)
    dropped.advance(3)
    got = run_pass(fast, pool, [chunk(0, 50)], graphs)

    assert (got - want).abs().max() < 1e-4
    with pytest.raises(EngineError, match="goes on after another one has begun"):
        dropped.advance(1)


def test_single_rows_between_layers_disturb_nothing(fast: FastModel) -> None:
    """A pass of single rows beside one that is half through runs launch by launch."""
    pools = pool_of(fast), pool_of(fast)
    graphs = graphs_of(fast, pools[1])
    found = []
    for pool, how in zip(pools, (None, graphs), strict=True):
        slow = begin(fast, pool, [chunk(0, 50)], how)
        slow.advance(3)
        single = run_pass(fast, pool, [chunk(1, 1), chunk(2, 1)], how)
        slow.advance(None)
        assert slow.logits is not None
        found.append(torch.cat((single, slow.logits)))

    assert (found[0] - found[1]).abs().max() < 1e-4
    assert graphs.num_replayed == 1


def sequences_beyond(model: FastModel) -> list[tuple[int, int]]:
    """Of buckets that are made ready: rows, and where their sequences end, if that is elsewhere."""
    seen: list[tuple[int, int]] = []
    plain = model.ops

    def spy(k_rows: Any, rows: Any, ring: Any, **how: Any) -> None:
        ends = rows.first + rows.lengths
        seen.append((rows.num_rows, int(ends.max())))
        assert int(rows.lengths.sum()) == int(ends.max())
        plain.store_window(k_rows, rows, ring, **how)

    model.ops = replace(plain, store_window=spy)
    try:
        pool = pool_of(model)
        graphs_of(model, pool)
        if (tail := tail_of(model.config)) is not None:
            tails = TailGraphs(
                model, pool, tail, max_model_len=CONTEXT, buckets=(8, 16), captures=False,
                warm_rows=60,
            )  # fmt: skip
            run_pass(model, pool, [chunk(0, 60, "bounded")], None, tails)
            tails.build()
    finally:
        model.ops = plain
    assert {rows for rows, _ in seen} >= set(BUCKETS)
    return [(rows, end) for rows, end in seen if rows != end]


def test_rows_that_pad_are_as_many_as_a_bucket_has(
    fast: FastModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a small bucket is made ready its sequences end in it: kernels go by their lengths."""
    assert sequences_beyond(fast) == []
    pad = RowBuffers.pad
    monkeypatch.setattr(RowBuffers, "pad", lambda self, bucket: pad(self, len(self.ids)))

    assert (8, 64) in sequences_beyond(fast)


# ------------------------------------------------------------ gate and seals


def test_nothing_is_captured_before_prompts_have_warmed_up(fast: FastModel) -> None:
    """The warm gate: passes run launch by launch until one of the largest bucket was processed."""
    pool = pool_of(fast)
    graphs = PromptGraphs(
        fast, pool, None, max_model_len=CONTEXT, buckets=(8, 40), captures=False
    )  # fmt: skip
    run_pass(fast, pool, [chunk(0, 30)], graphs)
    with pytest.raises(EngineError, match=r"one of 40 rows to have been processed .*, got 30"):
        graphs.build()
    run_pass(fast, pool, [chunk(0, 50)], graphs)
    assert graphs.num_replayed == 0
    graphs.build()
    run_pass(fast, pool, [chunk(0, 30)], graphs)
    assert graphs.num_replayed == 1


@pytest.mark.parametrize("grown", ["tables", "ring"])
def test_what_moves_after_a_capture_is_seen(fast: FastModel, grown: str) -> None:
    """It breaks its seal before a replay."""
    pool = pool_of(fast)
    graphs = graphs_of(fast, pool, (32,))
    if grown == "ring":
        pool.window = (*pool.window[:-1], torch.cat((pool.window[-1],) * 2))
    else:
        graphs.buffers.tables = torch.cat((graphs.buffers.tables,) * 2)

    with pytest.raises(SealError, match=r"have changed: .*: torch.* when captured, now torch"):
        run_pass(fast, pool, [chunk(0, 20)], graphs)


# ------------------------------------------------------------ in the engine


@pytest.fixture(scope="module")
def models(path: Path, fast: FastModel) -> tuple[FastModel, Model]:
    return fast, load_reference(path)


def with_buckets(model: FastModel, **how: Any) -> tuple[EngineCore, PromptGraphs]:
    """An engine whose passes of up to 40 rows run in buckets; all that nobody holds is NaN."""
    core = make_fast(model, poison=False, prompt_buckets=(8, 16, 40), **how)
    runner = core._runner
    assert isinstance(runner, FastRunner)
    runner.warm_up(40)
    assert isinstance(runner._pool, KVPool)
    engines.poison_what_is_free(core, runner._pool)
    assert runner.prompts.graphs is not None
    return core, runner.prompts.graphs


@pytest.mark.parametrize("sliced", [False, True])
def test_the_engine_gives_the_same_with_buckets(models: tuple[FastModel, Model], *, sliced: bool) -> None:  # fmt: skip
    """Random loads, slices, lookahead, aborts, poisoned memory: the reference's tokens."""
    load = engines.requests(random.Random(4), 20)
    core, graphs = with_buckets(models[0])
    if sliced:
        core._runner.policy.layers = lambda num_rows: 1  # type: ignore[union-attr, method-assign]

    assert engines.same(engines.run(core, load), engines.run(engines.make_reference(models[1]), load), load)  # fmt: skip
    assert graphs.num_replayed > 5


def test_weights_are_locked_by_prompts_too(fast: FastModel) -> None:
    """Whoever wants to write weights in place is told of all that was prepared over them."""
    core, _ = with_buckets(fast)
    assert isinstance(core._runner, FastRunner)

    assert "4 batch sizes and prompts of 3 are prepared" in core._runner.weight_locks[0]


def test_a_drafter_is_told_by_a_bucket(tmp_path: Path) -> None:
    """What DSpark keeps of a prompt is the same, of layers in a bucket and behind it."""
    model, _ = drafts.load(build.write(tmp_path / "model", build.v41(), seed=5))
    pools = pool_of(model), pool_of(model)
    graphs = graphs_of(model, pools[1])
    for mode in ("off", "bounded"):
        chunks = [chunk(0, 30, mode), chunk(1, 25, mode)]  # type: ignore[arg-type]
        for pool, how in zip(pools, (None, graphs), strict=True):
            run_pass(model, pool, chunks, how)
        for want, got in zip(*(pool.draft for pool in pools), strict=True):
            assert want[1:3].isfinite().all()
            assert torch.allclose(want[1:3], got[1:3], atol=1e-4, rtol=0)
    assert graphs.num_replayed == 2


def test_a_model_of_other_layers_is_refused() -> None:
    """Only DeepSeek's layers can be captured for prompts."""
    from engine.device.prompts import Prompts

    with pytest.raises(ValueError, match="expected none for a model of this architecture"):
        Prompts(None, None, CPU, None, max_model_len=9, captures=False, buckets=(8,))  # type: ignore[arg-type]
