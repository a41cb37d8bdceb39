"""The solver of expert slots: curves against the slot table itself, plans against all plans."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, strategies as st

from engine.api import EngineError
from engine.plan.paging import LayerHits, even, hits_beside_pins, learn, lru_hits, solve
from engine.plan.residency import Residency

E = 5
STEPS = st.lists(
    st.lists(st.integers(0, E - 1), min_size=1, max_size=2, unique=True), min_size=1, max_size=20
)


@given(st.lists(st.integers(0, E - 1), max_size=30), st.integers(1, E - 1))
def test_curve_says_what_a_table_of_that_size_would_hit(experts: list[int], slots: int) -> None:
    """Every size at once agrees with playing the routing through one table of that size.

    One expert a step: within a step nobody is older, and a table's ties go by slot.
    """
    steps = [[expert] for expert in experts]
    table = Residency(E, slots)
    # The table begins with experts in its slots, the curve with none: put strangers there.
    table.slot_expert = list(range(E, E + slots))
    table.expert_slot = [-1] * E + list(range(slots))
    for step in steps:
        table.bring_in(step)
    assert lru_hits(steps, E)[slots] == table.hits


@given(st.lists(STEPS, min_size=1, max_size=3), st.integers(0, 15), st.integers(0, 15))
def test_plan_fits_and_is_the_best_or_close(
    routing: list[list[list[int]]], gpu: int, host: int
) -> None:
    """Room is never exceeded, and misses stay near the least that any plan has."""
    curves = [lru_hits(steps, E) for steps in routing]
    possible = [
        sum(c[-1] - c[k] for c, k in zip(curves, slots, strict=True))
        for slots in itertools.product(range(2, E + 1), repeat=len(routing))
        if sum(slots) <= gpu and E * sum(k < E for k in slots) <= host
    ]
    try:
        plan = solve(
            learn(routing, E), num_experts=E, per_row=2, gpu_experts=gpu, host_experts=host
        )
    except EngineError:
        assert not possible
        return
    assert plan.gpu_experts <= gpu
    assert plan.host_experts <= host
    assert all(2 <= k <= E for k in plan.slots)
    assert plan.misses == sum(c[-1] - c[k] for c, k in zip(curves, plan.slots, strict=True))
    assert min(possible) <= plan.misses <= min(possible) + 0.35 * plan.lookups + 2


def test_slots_go_to_the_layer_that_needs_them() -> None:
    """A layer that cycles through four experts gets four slots, one that repeats two keeps two."""
    cycles = [[s % 4, (s + 1) % 4] for s in range(40)]
    repeats = [[0, 1]] * 40
    learnt = learn([repeats, cycles], 8)
    plan = solve(learnt, num_experts=8, per_row=2, gpu_experts=6, host_experts=16)
    assert plan.slots == (2, 4)
    assert plan.hit_rate > 0.9


def test_what_does_not_fit_is_refused_with_numbers() -> None:
    """The message says what room was expected, and what there is."""
    with pytest.raises(EngineError, match=r"expected room on the GPU for 12 .* got 11"):
        solve(learn([[[0, 1]]] * 3, 8), num_experts=8, per_row=2, gpu_experts=11, host_experts=17)


@given(st.integers(1, 4), st.integers(1, E), st.integers(0, 4 * E), st.integers(0, 4 * E))
def test_even_slots_use_the_room_there_is(layers: int, k: int, gpu: int, host: int) -> None:
    """Neither side is exceeded, paged layers are alike and no slot more for each would fit."""
    try:
        plan = even(layers, num_experts=E, per_row=k, gpu_experts=gpu, host_experts=host)
    except EngineError:
        paged = min(layers, host // E)
        assert gpu < (layers - paged) * E + paged * k
        return
    paged = [slots for slots in plan.slots if slots < E]
    assert len(plan.slots) == layers
    assert plan.gpu_experts <= gpu
    assert plan.host_experts <= host
    assert len(set(paged)) <= 1
    assert all(slots >= k for slots in plan.slots)
    assert not paged or plan.gpu_experts + len(paged) > gpu


@given(STEPS, st.integers(1, E - 1), st.data())
def test_curve_beside_pins_says_what_a_table_with_them_would_hit(
    pairs: list[list[int]], slots: int, data: st.DataObject
) -> None:
    """Playing the routing through a table with pinned experts gives the curve's hits and first times."""
    pins = data.draw(st.lists(st.integers(0, E - 1), unique=True, max_size=slots - 1))
    steps = [[expert] for pair in pairs for expert in pair]
    table = Residency(E, slots, pins)
    # Strangers in the other slots, as above.
    for slot in range(len(pins), slots):
        table.expert_slot[table.slot_expert[slot]] = -1
        table.slot_expert[slot] = E + slot
    table.expert_slot += list(range(slots))
    for step in steps:
        table.bring_in(step)
    first = len({step[0] for step in steps} & set(pins))
    assert hits_beside_pins(steps, E, pins)[slots] == table.hits - first
    assert set(pins) <= set(table.slot_expert)


@given(
    st.lists(STEPS, min_size=1, max_size=3),
    st.integers(0, 15),
    st.integers(0, 15),
    st.integers(2, 4),
)
def test_pins_fit_and_never_cost_a_hit_that_the_host_does_not_ask_for(
    routing: list[list[list[int]]], gpu: int, host: int, beside: int
) -> None:
    """Both sides' room is kept with pins counted once, and where all fits without, they only save."""
    learnt = learn(routing, E)
    sizes = {"num_experts": E, "per_row": 2, "gpu_experts": gpu, "host_experts": host}
    try:
        plan = solve(learnt, **sizes, beside_pins=beside)
    except EngineError:
        with pytest.raises(EngineError):  # pins make room, they take none
            solve(learnt, **sizes)
        return
    assert plan.gpu_experts <= gpu
    assert plan.host_experts <= host
    assert plan.host_experts == sum(
        E - len(pins) for k, pins in zip(plan.slots, plan.pins, strict=True) if k < E
    )
    for layer, k, pins in zip(learnt, plan.slots, plan.pins, strict=True):
        assert not pins or (k < E and k - len(pins) >= beside)
        assert sorted(layer.order[: len(pins)]) == list(pins)
    assert plan.misses == sum(
        layer.curve[-1] - layer.hits(k, len(pins))
        for layer, k, pins in zip(learnt, plan.slots, plan.pins, strict=True)
    )
    try:
        without = solve(learnt, **sizes)
    except EngineError:
        assert plan.num_pins > 0
        return
    assert plan.misses <= without.misses


def test_what_is_asked_for_most_is_pinned() -> None:
    """Two experts of every step stay, and with them the host needs two less of the layer."""
    steps = [[6, 2, s % 5 if s % 5 != 2 else 7] for s in range(60)]
    sizes = {"num_experts": 8, "per_row": 3, "gpu_experts": 5, "host_experts": 8}
    plan = solve([LayerHits(steps, 8)], **sizes, beside_pins=3)
    assert plan.pins == ((2, 6),)
    assert plan.slots == (5,)
    assert plan.host_experts == 6
    assert solve([LayerHits(steps, 8)], **sizes).pins == ((),)


def test_a_host_that_is_too_small_by_a_few_is_helped_by_pins() -> None:
    """Two layers whose stores exceed the host by two experts, and a GPU without room for a whole layer."""
    steps = [[s % 7, (s + 1) % 7] for s in range(60)]
    sizes = {"num_experts": 8, "per_row": 2, "gpu_experts": 8, "host_experts": 14}
    with pytest.raises(EngineError, match="expected room on the GPU for 10"):
        solve(learn([steps, steps], 8), **sizes)
    plan = solve(learn([steps, steps], 8), **sizes, beside_pins=2)
    assert plan.num_pins >= 2
    assert plan.host_experts <= 14
