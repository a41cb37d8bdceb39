"""The solver of expert slots: curves against the slot table itself, plans against all plans."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, strategies as st

from engine.api import EngineError
from engine.plan.paging import even, lru_hits, solve
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
        plan = solve(routing, num_experts=E, per_row=2, gpu_experts=gpu, host_experts=host)
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
    plan = solve([repeats, cycles], num_experts=8, per_row=2, gpu_experts=6, host_experts=16)
    assert plan.slots == (2, 4)
    assert plan.hit_rate > 0.9


def test_what_does_not_fit_is_refused_with_numbers() -> None:
    """The message says what room was expected, and what there is."""
    with pytest.raises(EngineError, match=r"expected room on the GPU for 12 .* got 11"):
        solve([[[0, 1]]] * 3, num_experts=8, per_row=2, gpu_experts=11, host_experts=17)


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
