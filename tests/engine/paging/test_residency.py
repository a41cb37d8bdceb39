"""Which experts lie in the slots: the host's tables, the twin of the kernels, and the kernels."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings, strategies as st

from engine.kernels import paging
from engine.kernels.paging import MOVES, SlotState
from engine.plan.residency import ABSENT, Move, Residency

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KINDS = ["torch", "triton"]


@st.composite
def histories(draw: st.DrawFn) -> tuple[int, int, list[list[int]]]:
    """(experts, slots, waves that fit)."""
    experts = draw(st.integers(2, 12))
    slots = draw(st.integers(1, experts))
    ids = st.integers(0, experts - 1)
    waves = draw(st.lists(st.lists(ids, min_size=1, max_size=8), min_size=1, max_size=8))
    return experts, slots, [[e for e in w if e in list(dict.fromkeys(w))[:slots]] for w in waves]


@given(histories())
def test_slots_hold_what_the_wave_needs(history: tuple[int, int, list[list[int]]]) -> None:
    """After each wave its experts are resident, the tables agree and hits and misses add up (J1, J2)."""
    experts, slots, waves = history
    residency = Residency(experts, slots)
    counted = 0
    for wave in waves:
        before = set(residency.slot_expert)
        moves = residency.bring_in(wave)
        residency.check_integrity()
        assert set(wave) <= set(residency.slot_expert)
        assert {m.expert for m in moves} == set(wave) - before
        counted += len(set(wave))
        assert residency.hits + residency.misses == counted
        assert len({m.slot for m in moves}) == len(moves)


def test_least_recently_used_leaves_and_ties_go_to_the_lowest_slot() -> None:
    """The victim is the slot whose last use is longest ago, of equal ones the lowest."""
    residency = Residency(6, 3)
    assert [m.slot for m in residency.bring_in([3])] == [0]
    residency.bring_in([2])
    assert [m.slot for m in residency.bring_in([5])] == [1]
    assert [m.slot for m in residency.bring_in([4])] == [0]


def test_a_wave_larger_than_the_slots_is_refused() -> None:
    """More distinct experts than slots cannot be resident together (c5)."""
    with pytest.raises(ValueError, match="4 experts for 3 slots"):
        Residency(6, 3).bring_in([0, 1, 2, 3])


@given(st.lists(st.integers(0, 11), max_size=40), st.integers(1, 12), st.integers(1, 4))
def test_waves_cover_each_expert_once(experts: list[int], slots: int, part: int) -> None:
    """Waves are disjoint, fit, cover what was asked for, and begin with what is resident (J3)."""
    residency = Residency(12, slots)
    size = min(part, slots)
    waves = residency.waves(experts, size)
    flat = [e for wave in waves for e in wave]
    assert sorted(flat) == sorted(set(experts))
    assert all(1 <= len(wave) <= size for wave in waves)
    resident = [residency.expert_slot[e] != ABSENT for e in flat]
    assert resident == sorted(resident, reverse=True)


@given(histories(), st.integers(0, 2**16))
def test_what_is_brought_ahead_is_no_wave(
    history: tuple[int, int, list[list[int]]], seed: int
) -> None:
    """Tables stay true, waves find or miss what they did not before, and ahead hits are hits (J1, J2)."""
    experts, slots, waves = history
    draw = random.Random(seed)
    residency, counted = Residency(experts, slots), 0
    for wave in waves:
        guess = draw.sample(range(experts), draw.randint(0, slots))
        before = residency.hits, residency.misses, residency.step
        residency.bring_ahead(guess)
        residency.check_integrity()
        assert before == (residency.hits, residency.misses, residency.step)
        assert set(guess) <= set(residency.slot_expert)
        found = len(set(wave) & set(residency.slot_expert))
        hits = residency.hits
        residency.bring_in(wave)
        residency.check_integrity()
        assert set(wave) <= set(residency.slot_expert)
        assert residency.hits - hits == found
        counted += len(set(wave))
    assert residency.hits + residency.misses == counted
    assert residency.ahead_hits <= min(residency.ahead, residency.hits)


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=15)
@given(history=histories(), seed=st.integers(0, 2**16))
def test_device_chooses_as_the_host(
    kind: str, history: tuple[int, int, list[list[int]]], seed: int
) -> None:
    """The tables on the device follow the host's step by step, moves included, ahead or not (J6)."""
    experts, slots, waves = history
    draw = random.Random(seed)
    residency, state = Residency(experts, slots), SlotState.make(experts, slots, DEVICE)

    def agree(moves: list[Move]) -> None:
        assert state.slot_expert.tolist() == residency.slot_expert
        assert state.expert_slot.tolist() == residency.expert_slot
        assert state.last_use.tolist() == residency.last_use
        assert [bool(flag) for flag in state.early.tolist()] == residency.early
        r = residency
        numbers = [r.step, r.hits, r.misses, len(moves), r.ahead, r.ahead_hits]
        assert state.counters.tolist() == numbers
        found = state.moves[: state.counters[MOVES]].tolist()
        assert found == [[m.expert, m.slot] for m in moves]

    for wave in waves:
        if draw.random() < 0.5:
            guess = draw.sample(range(experts), draw.randint(1, slots))
            moves = residency.bring_ahead(guess)
            given = torch.tensor([*guess, -1], dtype=torch.int32, device=DEVICE)
            getattr(paging, f"bring_ahead_{kind}")(given, state)
            agree(moves)
        padded = torch.tensor([[*wave, -1]], dtype=torch.int32, device=DEVICE)
        tiles = torch.stack([padded[0], padded[0] * 3, padded[0] * 0 + 1], 1)
        moves = residency.bring_in(wave)
        named, origins = getattr(paging, f"decide_{kind}")(padded, tiles, state)
        agree(moves)
        absent = {move.expert for move in moves}
        assert origins.tolist() == [e if e in absent else -1 for e in [*wave, -1]]
        slots_of = [residency.expert_slot[e] for e in wave]
        assert named[:, 0].tolist() == [*slots_of, -1]
        assert torch.equal(named[:, 1:], tiles[:, 1:])


@pytest.mark.parametrize("kind", KINDS)
def test_slots_hold_the_stores_bytes(kind: str) -> None:
    """Every resident's bytes are the store's after each step, odd sizes included (J4)."""
    experts, slots, size = 7, 3, 16 * 5 + 32 * 1024
    store = torch.randint(0, 256, (experts, size), dtype=torch.uint8)
    store = store.pin_memory() if DEVICE == "cuda" else store
    table = store[:slots].to(DEVICE).clone()
    state = SlotState.make(experts, slots, DEVICE)
    generator = torch.Generator().manual_seed(0)
    for _ in range(6):
        wave = torch.randperm(experts, generator=generator)[:slots].int().to(DEVICE)
        tiles = torch.stack([wave, wave, wave], 1)
        named, _ = getattr(paging, f"decide_{kind}")(wave, tiles, state)
        getattr(paging, f"bring_in_{kind}")(store, table, state)
        held = state.slot_expert.long().cpu()
        assert torch.equal(table.cpu(), store[held])
        names = getattr(paging, f"slots_of_{kind}")(wave, state)
        assert torch.equal(state.slot_expert[names.long()], wave)
        assert torch.equal(named[:, 0], names)


def test_a_copy_that_is_left_out_is_seen() -> None:
    """Tables without the copy would name slots that hold another expert's bytes."""
    store = torch.arange(7, dtype=torch.uint8)[:, None].expand(7, 16).contiguous()
    table = store[:3].clone()
    state = SlotState.make(7, 3, "cpu")
    paging.decide_torch(torch.tensor([5], dtype=torch.int32), torch.zeros(1, 3).int(), state)
    assert not torch.equal(table, store[state.slot_expert.long()])
    stale = replace(state, counters=state.counters.clone())
    paging.bring_in_torch(store, table, stale)
    assert torch.equal(table, store[state.slot_expert.long()])
