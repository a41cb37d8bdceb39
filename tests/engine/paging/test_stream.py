"""Passes over long prompts: experts pass through two buffers, slots keep what they hold."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings, strategies as st

from engine import expert_paging
from engine.kernels.ops import ops
from engine.kernels.paging import HITS, MISSES
from engine.model.expert_stream import ExpertStream, Filled
from engine.model.experts import PagedExperts, ResidentExperts
from engine.model.placement import Placement
from tests.engine.paging.test_experts import CPU, TOP_K, E, routing, run, weights

#: Rows from which on a pass is dense.
DENSE = 14
KINDS = ("fp4", "plain", "fp8")


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for two experts of the first layer in each buffer, so that a pass needs several."""
    monkeypatch.setattr(expert_paging, "BUFFER_BYTES", 2 * 64 * 64 * 2)


def layers(slots: list[int]) -> tuple[list[PagedExperts], list[ResidentExperts]]:
    """Paged layers with so many slots each, and the same wholly resident."""
    placement = Placement(dict(enumerate(slots)), device=CPU, pin=False)
    paged, resident = [], []
    for layer in range(len(slots)):
        read = weights(KINDS[layer % 3]).__getitem__
        one = placement.place(layer, read, E)
        whole = Placement(device=CPU, pin=False).place(0, read, E)
        assert isinstance(one, PagedExperts)
        assert isinstance(whole, ResidentExperts)
        paged.append(one)
        resident.append(whole)
    return paged, resident


@settings(deadline=None, max_examples=25)
@given(
    slots=st.lists(st.integers(TOP_K, E - 1), min_size=1, max_size=3),
    passes=st.lists(
        st.tuples(st.sampled_from([1, 5, DENSE, 20]), st.integers(0, 99), st.integers(1, 3)),
        min_size=1,
        max_size=5,
    ),
)
def test_parts_do_not_depend_on_how_experts_come(
    slots: list[int], passes: list[tuple[int, int, int]]
) -> None:
    """Passes of any size, ended after any layer, in any order: the bits of resident experts (J5)."""
    table = ops("torch")
    paged, resident = layers(slots)
    for rows, seed, depth in passes:
        for one, whole in list(zip(paged, resident, strict=True))[:depth]:
            x, how = routing(table, rows, seed)
            assert torch.equal(run(one, x, how), run(whole, x, how))
        for one in paged:
            one.check_integrity()


def test_slots_keep_what_they_hold() -> None:
    """A dense pass moves nothing into slots, and counts what was resident and what came."""
    table = ops("torch")
    (one,), _ = layers([3])
    x, how = routing(table, DENSE, 0)
    run(one, *routing(table, 1, 4))
    before = one.read_residency()
    run(one, x, how)
    after = one.read_residency()
    assert one.is_dense(how)
    assert (after.slot_expert, after.last_use) == (before.slot_expert, before.last_use)
    wanted = {e for e in how.experts.flatten().tolist() if e >= 0}
    assert after.hits - before.hits == len(wanted & set(before.slot_expert))
    assert after.misses - before.misses == E - 3
    assert after.step == before.step + 1
    assert one.state.counters[HITS] == after.hits
    assert one.state.counters[MISSES] == after.misses


def test_a_decode_step_between_two_layers_may_move_experts() -> None:
    """Experts that came while others were resident are told apart by the tables of now."""
    table = ops("torch")
    paged, resident = layers([3, 3])
    run(paged[0], *routing(table, DENSE, 0))
    for seed in range(5):  # the second layer's slots change behind the plan
        run(paged[1], *routing(table, 1, seed))
    x, how = routing(table, DENSE, 0)
    assert torch.equal(run(paged[1], x, how), run(resident[1], x, how))


def _leave_one_out(stream: ExpertStream) -> None:
    """The last expert of each buffer is not copied."""
    fill = stream._fill

    def faulty(layer, experts, buffer) -> Filled:  # type: ignore[no-untyped-def]
        filled = fill(layer, experts, buffer)
        filled.table[-1].zero_()
        return filled

    stream._fill = faulty  # type: ignore[method-assign]


def _fill_too_early(stream: ExpertStream) -> None:
    """A buffer is filled anew while it is read (c9)."""

    @contextmanager
    def faulty() -> Iterator[Filled]:
        filled = stream._filled.popleft()
        stream._release(filled.buffer)
        stream._pump()
        yield filled

    stream._taken = faulty  # type: ignore[method-assign]


def _ignore_what_moved(stream: ExpertStream) -> None:
    """Experts that become absent after they were planned do not come."""
    begin = stream.begin

    def faulty(layer: int, experts: list[int]) -> frozenset[int]:
        coming = {e for filled in stream._filled if filled.layer == layer for e in filled.experts}
        coming |= {e for number, some in stream._planned if number == layer for e in some}
        return begin(layer, sorted(coming) or experts)

    stream.begin = faulty  # type: ignore[method-assign, assignment]


@pytest.mark.parametrize("fault", [_leave_one_out, _fill_too_early, _ignore_what_moved])
def test_faults_are_seen(fault) -> None:  # type: ignore[no-untyped-def]
    """Each planted fault changes what is computed."""
    table = ops("torch")
    paged, resident = layers([2, 2])
    stream = paged[0]._stream
    assert stream is not None
    fault(stream)
    differs = False
    for seed in range(4):
        for number, (one, whole) in enumerate(zip(paged, resident, strict=True)):
            run(paged[1], *routing(table, 1, 10 * seed + number))
            x, how = routing(table, DENSE, seed)
            differs |= not torch.equal(run(one, x, how), run(whole, x, how))
    assert differs
