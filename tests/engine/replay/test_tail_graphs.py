"""Tails in buckets: static buffers and padding change nothing, on the CPU as on a GPU.

On the CPU a bucket is called, not replayed, so that faults of padding and bookkeeping show here;
tests/engine/replay/test_tail_gpu.py replays.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from engine.api import EngineError, PrefillMode
from engine.device.fast_runner import FastRunner
from engine.device.kvpool import KVPool
from engine.device.prompt_pass import PromptPass
from engine.device.rows import build_narrowings, build_rows
from engine.device.seals import SealError
from engine.device.tail_graphs import TailBuffers, TailGraphs
from engine.model.fast import FastModel
from engine.model.v4 import Model
from engine.plan.replay import Tail, stages, tail_of
from engine.plan.step import Chunk
from tests.engine.bucketed import REQUESTS, chunk, faults_of, padding, pool_of, turns
from tests.engine.device.engines import CPU, OPTIONS, load_fast, load_reference
from tests.engine.fast import drafts
from tests.engine.model import build, drive
from tests.engine.replay.test_fast import difference, make

BUCKETS = (8, 16, 32, 64)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = build.v41(index_topk=512, candidate_topk_blocks=512)
    return build.write(tmp_path_factory.mktemp("v41") / "model", config, seed=5)


@pytest.fixture(scope="module")
def fast(path: Path) -> FastModel:
    return load_fast(path)


def tail_in(model: FastModel) -> Tail:
    tail = tail_of(model.config)
    assert tail is not None
    return tail


def tails_of(model: FastModel, pool: KVPool, **how: Any) -> TailGraphs:
    """Buckets that are ready."""
    tails = TailGraphs(
        model, pool, tail_in(model), max_model_len=96,
        **{"buckets": BUCKETS, "captures": False, "warm_rows": 40, **how},
    )  # fmt: skip
    run_pass(model, pool, [padding(40, "bounded")], tails)
    tails.build()
    return tails


def run_pass(
    model: FastModel, pool: KVPool, chunks: list[Chunk], tails: TailGraphs | None
) -> torch.Tensor:
    """Logits of a pass over chunks."""
    for one in chunks:
        if not one.start:
            pool.reset_slot(one.slot)
    rows, wanted = build_rows(chunks, block_size=drive.BLOCK, device="cpu")
    plan = stages(tail_in(model), chunks)
    narrowings, narrowed = build_narrowings(rows, chunks, plan)
    *_, logits = model.prefill(
        rows, pool, narrowed if plan else wanted, narrowings=narrowings,
        tail=None if tails is None else tails.run,
    )  # fmt: skip
    return logits


def faults(model: FastModel, lengths: list[int], modes: list[PrefillMode], again: list[int]) -> list[str]:  # fmt: skip
    """What a bucket changes in two passes, one after the other, slots of nobody among it."""
    found: list[str] = []
    pools = pool_of(model), pool_of(model)
    tails = tails_of(model, pools[1])
    for chunks in turns(lengths, modes, again):
        live = {one.slot for one in chunks}
        others = [slot for slot in range(1, REQUESTS + 2) if slot not in live]
        before = [ring[others].clone() for ring in pools[1].window]
        plain = partial(run_pass, model, pools[0], chunks, None)
        found += faults_of(model, pools, plain, partial(run_pass, model, pools[1], chunks, tails))
        for ring, old in zip(pools[1].window, before, strict=True):
            if not torch.equal(ring[others].nan_to_num(7), old.nan_to_num(7)):
                found.append("a slot of nobody in the pass is written")
    return found


LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=REQUESTS)


@settings(max_examples=25, deadline=None)
@given(lengths=LENGTHS, data=st.data())
def test_a_bucket_changes_nothing(fast: FastModel, lengths: list[int], data: st.DataObject) -> None:
    """I6, I7: in any company, rows that pad write no slot and reach no expert, and results stay."""
    mode = st.sampled_from(["bounded", "bounded", "off"])
    modes = data.draw(st.lists(mode, min_size=len(lengths), max_size=len(lengths)))
    again = data.draw(st.lists(st.integers(0, 20), min_size=len(lengths), max_size=len(lengths)))

    assert faults(fast, lengths, modes, again) == []  # type: ignore[arg-type]


def test_buckets_are_used(fast: FastModel) -> None:
    """The comparison above is of buckets: one pass for each, and what is too large goes without."""
    pool = pool_of(fast)
    tails = tails_of(fast, pool)
    for count, replayed in ((1, 1), (2, 2), (4, 3)):  # 8 rows each
        run_pass(fast, pool, [chunk(i, 50, "bounded") for i in range(count)], tails)
        assert tails.num_replayed == replayed
    assert [captured.bucket for captured in tails.captured] == [64, 32, 16, 8]
    eager = tails.num_eager
    run_pass(fast, pool, [chunk(0, 90, "off"), chunk(1, 50, "bounded")], tails)
    run_pass(fast, pool, [chunk(0, 90, "exact")], tails)
    assert tails.num_replayed == 3
    assert tails.num_eager == eager + 1  # exact has more than one stage and does not even ask


def test_a_pad_of_a_live_slot_is_seen(fast: FastModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """n6: rows that pad under the slot of a request are routed, and write its windows."""
    place = TailBuffers.place

    def wrong(self: TailBuffers, bucket: int, flow: Any, to: Any) -> None:
        place(self, bucket, flow, to)
        self.slots[self.most_sequences(bucket)] = 1

    monkeypatch.setattr(TailBuffers, "place", wrong)
    found = faults(fast, [50, 9, 30], ["bounded"] * 3, [0, 0, 0])

    assert "rows that pad reach experts" in found
    assert any(name.startswith("window") for name in found)


def test_a_count_that_is_not_refilled_is_seen(
    fast: FastModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """n6: sequences of an earlier, larger pass that stay in the buffers are seen."""
    place = TailBuffers.place

    def wrong(self: TailBuffers, bucket: int, flow: Any, to: Any) -> None:
        seq = self.seq.clone()
        place(self, bucket, flow, to)
        # Rows beyond those of the pass stay with the sequences they had.
        self.seq[to.rows.num_rows : bucket] = seq[to.rows.num_rows : bucket]
        self.slots[: self.most_sequences(bucket) + 1] += 1

    monkeypatch.setattr(TailBuffers, "place", wrong)

    assert faults(fast, [50, 40, 30], ["bounded"] * 3, [3, 0, 0]) != []


def test_what_pads_is_set_anew_for_every_pass(fast: FastModel) -> None:
    """A small pass after a large one leaves no table, slot or floor of the large one's requests."""
    pool = pool_of(fast)
    tails = tails_of(fast, pool)
    run_pass(fast, pool, [chunk(i, 50, "bounded") for i in range(4)], tails)
    run_pass(fast, pool, [chunk(3, 30, "bounded")], tails)
    buffers = tails._buffers
    assert buffers is not None
    rows = buffers.rows(8)

    assert rows.slots.tolist() == [4, 0, 0, 0, 0]
    assert rows.lengths.tolist() == [8, 0, 0, 0, 0]
    assert rows.tables[1:].abs().sum() == 0
    assert rows.floors is not None
    assert rows.floors[1:].abs().sum() == 0


# ------------------------------------------------------------ gate and seals


def test_nothing_is_captured_before_prompts_have_warmed_up(fast: FastModel) -> None:
    """The warm gate: tails run launch by launch until a prompt of full size was processed."""
    pool = pool_of(fast)
    tails = TailGraphs(
        fast, pool, tail_in(fast), max_model_len=96, buckets=BUCKETS, captures=False, warm_rows=60
    )
    run_pass(fast, pool, [chunk(0, 50, "bounded")], tails)

    assert (tails.num_replayed, tails.num_eager) == (0, 1)
    with pytest.raises(EngineError, match=r"a prompt of 60 rows to have been processed .*, got 50"):  # fmt: skip
        tails.build()
    run_pass(fast, pool, [chunk(0, 60, "bounded")], tails)
    tails.build()
    run_pass(fast, pool, [chunk(0, 50, "bounded")], tails)
    assert (tails.num_replayed, tails.num_eager) == (1, 2)


@pytest.mark.parametrize("grown", ["streams", "tables", "ring"])
def test_a_workspace_that_grows_after_a_capture_is_seen(fast: FastModel, grown: str) -> None:
    """n7: whatever moves afterwards breaks its seal, before a replay; as if no gate had been."""
    pool = pool_of(fast)
    tails = tails_of(fast, pool)
    buffers = tails._buffers
    assert buffers is not None
    if grown == "ring":
        pool.window = (*pool.window[:-1], torch.cat((pool.window[-1],) * 2))
    else:
        old = getattr(buffers, grown)
        setattr(buffers, grown, torch.cat((old, old)))

    with pytest.raises(SealError, match=r"have changed: .*: torch.* when captured, now torch"):
        run_pass(fast, pool, [chunk(0, 50, "bounded")], tails)


def test_what_flows_out_must_be_as_what_flows_in(
    fast: FastModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tail whose parts come in another type than the buffers have is refused, not rounded."""
    run_tail = FastModel.run_tail

    def wrong(self: FastModel, *args: Any) -> Any:
        flow = run_tail(self, *args)
        return replace(flow, parts=flow.parts.double())

    monkeypatch.setattr(FastModel, "run_tail", wrong)
    with pytest.raises(EngineError, match="differs in type or width"):
        tails_of(fast, pool_of(fast))


@pytest.mark.parametrize(("context", "chunk"), [(8, 60), (96, 8)])
def test_a_context_or_chunk_of_one_window_has_nothing_to_capture(
    fast: FastModel, context: int, chunk: int
) -> None:
    """Then no pass leaves rows out, and none can warm up."""
    tails = TailGraphs(
        fast, pool_of(fast), tail_in(fast), max_model_len=context, buckets=BUCKETS, captures=False, warm_rows=chunk
    )  # fmt: skip
    tails.build()

    assert tails.captured == ()


# ------------------------------------------------------------ in the engine


@pytest.fixture(scope="module")
def models(path: Path, fast: FastModel) -> tuple[FastModel, Model]:
    return fast, load_reference(path)


@pytest.mark.parametrize("mode", ["exact", "bounded"])
def test_the_engine_gives_the_same_with_buckets(
    models: tuple[FastModel, Model], mode: PrefillMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random loads, slices, lookahead, poisoned memory: the tokens of the cut reference."""
    used = []
    warm = FastRunner.__init__

    def warmed(self: FastRunner, *args: Any, **how: Any) -> None:
        warm(self, *args, **how)
        self.warm_up(40)
        assert self.prompts.tails is not None
        used.append(self.prompts.tails)

    monkeypatch.setattr(FastRunner, "__init__", warmed)
    assert difference(models, mode, 1, tail_buckets=BUCKETS) < 1e-4
    (tails,) = used
    assert (tails.num_replayed > 0) == (mode == "bounded")


def test_a_model_without_a_tail_is_refused(tmp_path: Path) -> None:
    """V4 has none."""
    model = load_fast(build.write(tmp_path / "v4", build.v4(), seed=5))
    with pytest.raises(ValueError, match="the model has no tail"):
        make(model, "off", tail_buckets=BUCKETS)


def test_a_drafter_is_told_by_a_bucket(tmp_path: Path) -> None:
    """What DSpark keeps of a prompt's end is the same; one that reads lower layers is refused."""
    config = build.v41(index_topk=512, candidate_topk_blocks=512)
    model, drafter = drafts.load(build.write(tmp_path / "model", config, seed=5))
    pools = pool_of(model), pool_of(model)
    tails = tails_of(model, pools[1])
    chunks = [chunk(0, 50, "bounded"), chunk(1, 60, "bounded")]
    for pool, run in zip(pools, (None, tails), strict=True):
        run_pass(model, pool, chunks, run)

    assert tails.num_replayed == 1
    assert pools[0].draft
    for want, got in zip(*(pool.draft for pool in pools), strict=True):
        assert want[1:3].isfinite().all()
        assert torch.allclose(want[1:3], got[1:3], atol=1e-4, rtol=0)
    drafter.taps = (3, 8, 9)  # type: ignore[misc]
    with pytest.raises(ValueError, match="reads layers below the tail"):
        tails_of(model, pools[1])


def test_a_pass_that_ends_early_leaves_the_buffers_in_order(fast: FastModel) -> None:
    """A prompt dropped between its layers does not disturb the next one's tail."""
    pool = pool_of(fast)
    tails = tails_of(fast, pool)
    want = run_pass(fast, pool, [chunk(0, 50, "bounded")], None)
    dropped = PromptPass.begin(fast, pool, [chunk(1, 60, "bounded")], CPU, tail_in(fast), tails.run)
    dropped.advance(5)
    got = run_pass(fast, pool, [chunk(0, 50, "bounded")], tails)

    assert (got - want).abs().max() < 1e-4
    assert OPTIONS.block_size == drive.BLOCK
