"""Experts in files: what the host has no room for comes when it is needed, and computes the same."""

from __future__ import annotations

import gc
import random
import re
import threading
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies as st

from engine.api import EngineError, FinishReason, GenerateRequest, SamplingParams
from engine.expert_paging import experts_of, host_gb_problem, paging_of
from engine.kernels.ops import ops
from engine.model.disktier import HostCache
from engine.model.experts import PagedExperts
from engine.model.placement import Placement
from engine.options import EngineConfig
from engine.plan.residency import Residency
from engine.qwen3_config import Qwen3Config
from tests.engine.device.engines import requests, run as serve, same
from tests.engine.paging.checkpoints import CONFIG, write_qwen
from tests.engine.paging.test_experts import CPU, TOP_K, E, routing, run, weights
from tests.engine.paging.test_serving import greedy, load, runner_of


def on_disk(kind: str, slots: int, rows: int) -> PagedExperts:
    """Experts of which the host has room for `rows`."""
    read = weights(kind).__getitem__
    whole = Placement({0: slots}, device=CPU, pin=False).place(0, read, E)
    assert isinstance(whole, PagedExperts)
    room = rows * whole.layout.nbytes
    found = Placement({0: slots}, device=CPU, pin=False, host_bytes=room).place(0, read, E)
    assert isinstance(found, PagedExperts)
    assert found.cache is not None
    assert len(found.cache.table) == rows
    return found


@settings(deadline=None, max_examples=15)
@given(
    slots=st.integers(TOP_K, 4),
    more=st.integers(0, 2),
    passes=st.lists(st.tuples(st.integers(1, 6), st.integers(0, 99)), min_size=1, max_size=5),
)
def test_parts_do_not_depend_on_the_tiers(
    slots: int, more: int, passes: list[tuple[int, int]]
) -> None:
    """Any slots, any room on the host, any history: the bits of resident experts."""
    table = ops("torch")
    resident = Placement(device=CPU, pin=False).place(0, weights("fp4").__getitem__, E)
    other = on_disk("fp4", slots, slots + more)
    for rows, seed in passes:
        x, how = routing(table, rows, seed)
        assert not other.is_one_wave(how)
        assert torch.equal(run(other, x, how), run(resident, x, how))
    other.check_integrity()


def _keep_old_rows(cache: HostCache) -> None:
    """A row is given to another expert and not filled."""
    cache._fill = lambda expert, row: None  # type: ignore[method-assign]


def _wrong_row(cache: HostCache) -> None:
    """An expert is read into the row beside its own."""
    fill = cache._fill
    rows = len(cache.table)
    cache._fill = lambda expert, row: fill(expert, (row + 1) % rows)  # type: ignore[method-assign]


def _take_back_too_early(cache: HostCache) -> None:
    """What the next wave needs goes where this wave's experts lie, before they are copied."""
    want = cache.want

    def faulty(experts: list[int]) -> None:
        want(experts)
        for future in cache._coming.values():
            future.result()
        cache.table.copy_(cache.table.roll(1, 0))

    cache.want = faulty  # type: ignore[method-assign, assignment]


@pytest.mark.parametrize("fault", [_keep_old_rows, _wrong_row, _take_back_too_early])
def test_faults_are_seen(fault) -> None:  # type: ignore[no-untyped-def]
    """Each planted fault changes what is computed."""
    table = ops("torch")
    resident = Placement(device=CPU, pin=False).place(0, weights("fp4").__getitem__, E)
    other = on_disk("fp4", 2, 3)
    fault(other.cache)
    differs = []
    for seed in range(4):
        x, how = routing(table, 4, seed)
        differs.append(not torch.equal(run(other, x, how), run(resident, x, how)))
    assert any(differs)


def test_the_thread_that_reads_ends_with_the_last_layer() -> None:
    """Layers share one; a process that serves another model keeps none of it."""
    one, other = on_disk("plain", 2, 3), on_disk("plain", 2, 3)
    assert one.cache is not None
    assert other.cache is not None
    one.cache.want([5])
    one.cache.rows([5])
    other.cache.want([6])
    other.cache.rows([6])
    (thread,) = one.cache._reader._threads
    assert thread in other.cache._reader._threads
    del one
    assert thread.is_alive()
    del other
    gc.collect()
    thread.join(timeout=10)
    assert not thread.is_alive()


def test_a_read_that_fails_is_tried_again() -> None:
    """The pass fails, nothing else: tables stay true, and the next pass computes what it should."""
    table = ops("torch")
    resident = Placement(device=CPU, pin=False).place(0, weights("fp4").__getitem__, E)
    other = on_disk("fp4", 2, 3)
    cache = other.cache
    assert cache is not None
    read, failing = cache._read, [True]

    def broken(expert: int):  # type: ignore[no-untyped-def]
        if failing[0]:
            raise OSError("the disk is gone")
        return read(expert)

    cache._read = broken
    x, how = routing(table, 6, 0)
    with pytest.raises(OSError, match="the disk is gone"):
        run(other, x, how)
    failing[0] = False
    other.check_integrity()
    assert torch.equal(run(other, x, how), run(resident, x, how))


def test_a_row_is_not_filled_while_it_is_copied_from() -> None:
    """The reader waits for the device to be done with a row (c9)."""
    read = weights("plain").__getitem__
    cache = HostCache(on_disk("plain", 2, 3).layout, read, E, 2, pin=False)
    done = threading.Event()

    class Event:
        def synchronize(self) -> None:
            done.wait(10)

    cache.copied([0, 1], Event())
    before = cache.table.clone()
    cache.want([5])
    (coming,) = cache._coming.values()
    assert isinstance(coming, Future)
    with pytest.raises(TimeoutError):
        coming.result(timeout=0.05)
    assert torch.equal(cache.table, before)
    done.set()
    (row,) = cache.rows([5])
    assert torch.equal(row, cache.bytes_of(5))


def test_two_waves_stay_on_the_host_at_once() -> None:
    """What the next wave brings in is never put over what this wave is copied from."""
    rows = Residency(12, 6)
    draw = random.Random(0)
    for _ in range(200):
        one, two = draw.sample(range(12), 3), draw.sample(range(12), 3)
        rows.bring_in(one)
        rows.bring_in(two)
        assert {*one, *two} <= set(rows.slot_expert)


def test_serving_from_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Random loads with aborts give what resident experts give; figures count reads and waits.

    The log has them in words.
    """
    path = write_qwen(tmp_path, num_experts=16)
    config = Qwen3Config.from_file(path)
    nbytes = experts_of(config, 4).nbytes
    # room for 5 of 16 experts of each of 3 layers, in a unit that small models can be given
    monkeypatch.setattr("engine.expert_paging.GB", 5 * 3 * nbytes)
    resident, paged = load(path), load(path, expert_slots=4, expert_host_gb=1)
    some = requests(random.Random(1), 10)
    assert same(serve(paged, some), serve(resident, some), some)
    for one in runner_of(paged).paged:
        one.check_integrity()
        assert one.cache is not None
        assert one.most_captured_rows(2) == 0
        assert len(one.cache.table) == 5
        assert one.cache.figures.reads > 10
        assert one.cache.figures.read_seconds > 0
    with caplog.at_level("INFO"):
        paged.close()
    (line,) = (m for m in caplog.messages if m.startswith("paged layer 0: "))
    figures = runner_of(paged).paged[0].cache.figures  # type: ignore[union-attr]
    words = rf"; {figures.hits} found on the host, {figures.reads} read from files in \d+\.\d\d s,"
    assert re.search(words + r" for which steps waited \d+\.\d\d s$", line)


def test_a_disk_that_fails_ends_requests_and_not_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests of the step end with an error; the next ones are served."""
    path = write_qwen(tmp_path, num_experts=16)
    nbytes = experts_of(Qwen3Config.from_file(path), 4).nbytes
    monkeypatch.setattr("engine.expert_paging.GB", 5 * 3 * nbytes)
    core = load(path, expert_slots=4, expert_host_gb=1)
    cache = runner_of(core).paged[1].cache
    assert cache is not None
    read = cache._read

    def broken(expert: int):  # type: ignore[no-untyped-def]
        raise OSError("the disk is gone")

    cache._read = broken
    core.submit(GenerateRequest("bad", tuple(range(40)), SamplingParams(4, 0.0)))
    (delta,) = core.step()
    assert delta.finish_reason is FinishReason.ERROR
    cache._read = read
    assert greedy(core, [[4, 5, 6]]) == greedy(load(path), [[4, 5, 6]])


def test_room_that_is_too_small_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At start, with the room that the slots need; graphs beside files too."""
    path = write_qwen(tmp_path, num_experts=16)
    config = Qwen3Config.from_file(path)
    nbytes = experts_of(config, 4).nbytes
    monkeypatch.setattr("engine.expert_paging.GB", 5 * 3 * nbytes)
    with pytest.raises(
        EngineError, match="expert_host_gb: expected 2 or above, room for 6 experts"
    ):
        load(path, expert_slots=6, expert_host_gb=1)
    with pytest.raises(EngineError, match="to 16, got 99") as refused:
        load(path, expert_slots=99)
    assert "expert_host_gb" not in str(refused.value)  # more slots than experts ask for no host
    with pytest.raises(EngineError, match="graphs: expected off: which experts"):
        load(path, expert_slots=4, expert_host_gb=1, graphs=True)
    with pytest.raises(EngineError, match="expert_prefetch: expected off: what a step reads"):
        load(path, expert_slots=4, expert_host_gb=1, expert_prefetch=True)
    options = EngineConfig(expert_slots=4, expert_host_gb=1)
    assert paging_of(config, options, 4).uses_disk
    assert host_gb_problem(paging_of(config, options, 4), 1, 10 * nbytes) is not None


def test_sizes_of_experts_are_those_of_their_bytes(tmp_path: Path) -> None:
    """What the plan counts is what the layout takes."""
    config = Qwen3Config.from_dict(CONFIG)
    core = load(write_qwen(tmp_path), expert_slots=3)
    assert runner_of(core).paged[0].layout.nbytes == experts_of(config, 4).nbytes
