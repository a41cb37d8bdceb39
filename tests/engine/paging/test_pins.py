"""Experts that stay in slots: never given up, never on the host, and no result depends on which they are."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings, strategies as st

from engine.kernels import paging
from engine.kernels.ops import ops
from engine.kernels.paging import MOVES, SlotState
from engine.model.experts import PagedExperts
from engine.model.placement import Placement
from engine.plan.residency import ABSENT, PINNED, Move, Residency
from tests.engine.paging import test_over_the_bus as over_the_bus
from tests.engine.paging.test_experts import CPU, TOP_K, E, routing, run, weights
from tests.engine.paging.test_residency import DEVICE, KINDS


def pinned(
    kind: str, slots: int, pins: Sequence[int], rows: int | None = None, stream: bool = False
) -> PagedExperts:
    """Experts of which some stay; the host has room for `rows`, or for all others."""
    read = weights(kind).__getitem__
    placed = Placement({0: slots}, device=CPU, pin=False).place(0, read, E)
    assert isinstance(placed, PagedExperts)
    room = None if rows is None else rows * placed.layout.nbytes
    found = Placement({0: slots}, device=CPU, pin=False, host_bytes=room, pins={0: pins}).place(
        0, read, E
    )
    assert isinstance(found, PagedExperts)
    if not stream:
        found._stream = None  # every pass in waves
    return found


@st.composite
def layers(draw: st.DrawFn, least: int = 1) -> tuple[int, list[int]]:
    """(slots, pins) of a layer with E experts; `least` slots are left to others."""
    slots = draw(st.integers(least + 1, E - 1))
    pins = st.lists(st.integers(0, E - 1), unique=True, min_size=1, max_size=slots - least)
    return slots, draw(pins)


# ---------------------------------------------------------------- tables


def wave_that_fits(draw: random.Random, residency: Residency, pins: Sequence[int]) -> list[int]:
    others = [e for e in range(E) if e not in pins]
    wave = draw.sample(others, draw.randint(0, min(residency.room, len(others))))
    wave += draw.sample(list(pins), draw.randint(0, len(pins)))
    wave += wave[:1]
    draw.shuffle(wave)
    return wave


@given(layers(), st.integers(0, 2**16))
def test_pins_keep_their_slots(layer: tuple[int, list[int]], seed: int) -> None:
    """Whatever waves and guesses come: pins where they were, the others in the slots that are left (J1, J2)."""
    slots, pins = layer
    draw, residency, counted = random.Random(seed), Residency(E, slots, pins), 0
    assert residency.room == slots - len(pins)
    for _ in range(8):
        moves = residency.bring_ahead(wave_that_fits(draw, residency, pins))
        wave = wave_that_fits(draw, residency, pins)
        moves += residency.bring_in(wave)
        residency.check_integrity()
        assert residency.slot_expert[: len(pins)] == pins
        assert residency.last_use[: len(pins)] == [PINNED] * len(pins)
        assert set(wave) <= set(residency.slot_expert)
        assert all(move.slot >= len(pins) and move.expert not in pins for move in moves)
        counted += len(set(wave))
        assert residency.hits + residency.misses == counted


def test_the_last_slot_beside_pins_serves_all_others() -> None:
    """One slot is left, and every other expert takes it in turn, also after pins were used."""
    residency = Residency(6, 3, [4, 1])
    for wave in ([0, 4], [2], [1, 4, 5], [3, 1], [0]):
        residency.bring_in(wave)
    assert residency.slot_expert == [4, 1, 0]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Residency(6, 3, [0, 1, 2]), "pins: expected fewer than 3 slots, got 3"),
        (lambda: Residency(6, 3, [5]).bring_in([0, 1, 2]), "3 experts for 2 slots beside 1 pinned"),
        (lambda: Residency(6, 3, [5]).bring_ahead([0, 1, 2, 5]), "3 experts ahead for 2 slots"),
    ],
)
def test_what_does_not_fit_beside_pins_is_refused(
    build: Callable[[], object], message: str
) -> None:
    """A wave has the slots that pins leave; pins themselves need none (c5)."""
    with pytest.raises(ValueError, match=message):
        build()


@given(layers(), st.lists(st.integers(0, E - 1), max_size=20), st.integers(1, 3))
def test_waves_beside_pins_cover_each_expert_once(
    layer: tuple[int, list[int]], experts: list[int], part: int
) -> None:
    """Pins come in the first wave, beside as many others as the next waves have (J3)."""
    slots, pins = layer
    residency = Residency(E, slots, pins)
    size = min(part, residency.room)
    waves = residency.waves(experts, size)
    assert sorted(e for wave in waves for e in wave) == sorted(set(experts))
    assert all(len(wave) > 0 for wave in waves)
    assert all(len([e for e in wave if e not in pins]) <= size for wave in waves)
    assert not any(set(wave) & set(pins) for wave in waves[1:])
    for wave in waves:
        residency.bring_in(wave)


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=15)
@given(layer=layers(), seed=st.integers(0, 2**16))
def test_device_keeps_pins_as_the_host(kind: str, layer: tuple[int, list[int]], seed: int) -> None:
    """Tables, stamps, counters and moves of the device are the host's, step by step (J6)."""
    slots, pins = layer
    draw, residency = random.Random(seed), Residency(E, slots, pins)
    state = SlotState.make(E, slots, DEVICE, pins)

    def agree(moves: list[Move]) -> None:
        assert state.slot_expert.tolist() == residency.slot_expert
        assert state.expert_slot.tolist() == residency.expert_slot
        assert state.last_use.tolist() == residency.last_use
        r = residency
        numbers = [r.step, r.hits, r.misses, len(moves), r.ahead, r.ahead_hits]
        assert state.counters.tolist() == numbers
        found = state.moves[: state.counters[MOVES]].tolist()
        assert found == [[m.expert, m.slot] for m in moves]

    for _ in range(6):
        guess = wave_that_fits(draw, residency, pins)
        moves = residency.bring_ahead(guess)
        given = torch.tensor([*guess, -1], dtype=torch.int32, device=DEVICE)
        getattr(paging, f"bring_ahead_{kind}")(given, state)
        agree(moves)
        wave = wave_that_fits(draw, residency, pins)
        padded = torch.tensor([[*wave, -1]], dtype=torch.int32, device=DEVICE)
        tiles = torch.stack([padded[0], padded[0] * 3, padded[0] * 0 + 1], 1)
        moves = residency.bring_in(wave)
        named, origins = getattr(paging, f"decide_{kind}")(padded, tiles, state)
        agree(moves)
        absent = {move.expert for move in moves}
        assert not absent & set(pins)
        assert origins.tolist() == [e if e in absent else -1 for e in [*wave, -1]]
        assert named[:, 0].tolist() == [*(residency.expert_slot[e] for e in wave), -1]


@pytest.mark.parametrize("kind", KINDS)
def test_a_mark_that_a_hit_takes_away_is_seen(kind: str) -> None:
    """With a pin's mark replaced by the step that used it, the pin is given up a few steps later."""
    state = SlotState.make(E, 3, DEVICE, [6])
    for expert in (6, 2, 3, 4):
        given = torch.tensor([expert], dtype=torch.int32, device=DEVICE)
        getattr(paging, f"decide_{kind}")(given, torch.stack([given] * 3, 1), state)
        if expert == 6:
            state.last_use[0] = 1  # as if it were any expert
    assert int(state.expert_slot[6]) == ABSENT


# ---------------------------------------------------------------- a layer


@pytest.mark.parametrize("kind", ["plain", "fp8", "fp4"])
@pytest.mark.parametrize("stream", [False, True], ids=["waves", "buffers"])
@settings(deadline=None, max_examples=10)
@given(
    layer=layers(TOP_K),
    passes=st.lists(
        st.tuples(st.sampled_from([1, 2, 3, 6, 15]), st.integers(0, 99)), min_size=1, max_size=4
    ),
)
def test_parts_do_not_depend_on_pins(
    kind: str, stream: bool, layer: tuple[int, list[int]], passes: list[tuple[int, int]]
) -> None:
    """Any pins, K and history: the bits of resident experts, true slots, and no byte of a pin on the host."""
    slots, pins = layer
    table = ops("torch")
    resident = Placement(device=CPU, pin=False).place(0, weights(kind).__getitem__, E)
    other = pinned(kind, slots, pins, stream=stream)
    for rows, seed in passes:
        x, how = routing(table, rows, seed)
        assert torch.equal(run(other, x, how), run(resident, x, how))
        other.check_integrity()
    assert other.state.slot_expert[: len(pins)].tolist() == pins
    assert other.read_residency().room == other.room == slots - len(pins)
    assert not other.store[sorted(pins)].any()


@settings(deadline=None, max_examples=15)
@given(
    layer=layers(TOP_K),
    fewer=st.integers(1, 3),
    passes=st.lists(st.tuples(st.integers(1, 6), st.integers(0, 99)), min_size=1, max_size=4),
)
def test_pins_and_files(
    layer: tuple[int, list[int]], fewer: int, passes: list[tuple[int, int]]
) -> None:
    """Where the host keeps a part of the others: resident bits, and no row of the host is a pin's."""
    slots, pins = layer
    rows = max(slots - len(pins), 2, E - len(pins) - fewer)
    table = ops("torch")
    resident = Placement(device=CPU, pin=False).place(0, weights("fp4").__getitem__, E)
    other = pinned("fp4", slots, pins, rows=rows)
    assert (other.cache is None) == (rows == E - len(pins))
    for seed_rows, seed in passes:
        x, how = routing(table, seed_rows, seed)
        assert torch.equal(run(other, x, how), run(resident, x, how))
        other.check_integrity()
        if other.cache is not None:
            assert not set(other.cache._residency.slot_expert) & set(pins)
            assert len(other.cache.table) == rows


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_one_wave_has_the_slots_that_pins_leave(rows: int) -> None:
    """A pass may be routed past every pin, so shapes are judged by K less the pins (J7)."""
    table, other = ops("torch"), pinned("plain", 6, [0, 3])
    _, how = routing(table, rows, 0)
    assert other.is_one_wave(how) is (rows * TOP_K <= 4)
    assert other.takes_ahead(rows * TOP_K) is (rows * TOP_K <= 4)
    assert other.most_captured_rows(TOP_K) == 2


def _count_all_slots(experts: PagedExperts) -> None:
    """Pinned slots are counted among those that a pass may use (c5)."""
    experts.room = experts.num_slots


def _evict(experts: PagedExperts) -> None:
    """Pins have no mark, and leave as others do (c3)."""
    experts.state.last_use.zero_()


def _read_the_hole(experts: PagedExperts) -> None:
    """The tables call a pin absent, so that it is brought in from where the host has nothing (c1)."""
    state = experts.state
    pin, other = int(state.slot_expert[0]), E - 1
    assert int(state.expert_slot[other]) == ABSENT
    state.slot_expert[0], state.expert_slot[other], state.expert_slot[pin] = other, 0, ABSENT
    experts.slots[0].copy_(experts.store[other])
    state.last_use.zero_()


def _flip_a_bit(experts: PagedExperts) -> None:
    """A pinned slot holds other bytes than it was loaded with (c2)."""
    experts.slots[1, 7] ^= 1


@pytest.mark.parametrize("fault", [_count_all_slots, _evict, _read_the_hole, _flip_a_bit])
def test_faults_are_seen(fault: Callable[[PagedExperts], None]) -> None:
    """Each planted fault ends the soak: bits differ, or the check of slots says so."""
    table = ops("torch")
    resident = Placement(device=CPU, pin=False).place(0, weights("fp8").__getitem__, E)
    other = pinned("fp8", 5, [2, 0, 4])
    fault(other)
    seen = False
    for seed in range(24):
        x, how = routing(table, 1 + seed % 2, seed)
        try:
            seen |= not torch.equal(run(other, x, how), run(resident, x, how))
            other.check_integrity()
        except (ValueError, RuntimeError):
            seen = True
    assert seen


def test_pins_move_to_another_number_of_slots() -> None:
    """The same store with other slots: pins come from the slots, since nothing else has them."""
    table, other = ops("torch"), pinned("fp4", 5, [6, 0])
    x, how = routing(table, 6, 1)
    more = other.with_slots(6)
    more.check_integrity()
    assert more.state.slot_expert.tolist()[:2] == [6, 0]
    assert torch.equal(run(more, x, how), run(other, x, how))


@settings(deadline=None, max_examples=6)
@given(
    layer=layers(TOP_K),
    passes=st.lists(
        st.tuples(st.sampled_from([1, 1, 1, 2, 4]), st.integers(0, 99)), min_size=2, max_size=5
    ),
)
def test_kernels_never_read_a_pin_from_the_host(
    layer: tuple[int, list[int]], passes: list[tuple[int, int]]
) -> None:
    """Single rows that read over the bus, and larger passes: resident results, pins where they were.

    The host has zeros where pins would be (on a GPU, addresses that kernels may not read).
    """
    slots, pins = layer
    on_gpu = over_the_bus.DEVICE.type == "cuda"
    found = Placement({0: slots}, device=over_the_bus.DEVICE, pin=on_gpu, pins={0: pins})
    other = found.place(0, weights("plain").__getitem__, E)
    assert isinstance(other, PagedExperts)
    resident = over_the_bus.placed(None)
    for rows, seed in passes:
        x, how = over_the_bus.drawn(rows, seed)
        got, want = over_the_bus.run(other, x, how), over_the_bus.run(resident, x, how)
        torch.testing.assert_close(got.sum(1), want.sum(1), atol=1e-2, rtol=1e-2)
        other.check_integrity()
    assert other.state.slot_expert[: len(pins)].tolist() == pins
