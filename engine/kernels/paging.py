"""Paged experts inside a CUDA graph: decide what to bring in, copy it, name the slots.

The device's side of engine.plan.residency, with the same choices. An expert is one run of bytes, in
the host's store [E, bytes] (pinned memory that kernels read over the bus) and in the slots
[K, bytes]. No host sync: the number of moves stays on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels.overlap import await_previous, begin_next, overlaps
from engine.kernels.triton_compat import tl, triton

#: Places of `SlotState.counters`: steps; experts that a step found in a slot, and did not; moves of
#: the last step or bringing ahead; experts brought ahead, and those of them that the next step asked for.
STEP, HITS, MISSES, MOVES, AHEAD, AHEAD_HITS = range(6)
COUNTERS = 6
#: `SlotState.last_use` of a slot whose expert stays for ever (engine.plan.residency has the same).
PINNED = 2**31 - 1
#: Programs that copy. 16 saturate the bus (engine.md B0); the rest of the GPU stays free.
COPY_PROGRAMS = 32
_COPY_WORDS = 4096  # int64 a program moves at a time


@dataclass(frozen=True, slots=True)
class SlotState:
    """Residency of one layer, on the device.

    Args:
        slot_expert: int32 [K].
        expert_slot: int32 [E], -1 for an absent expert.
        last_use: int32 [K]; PINNED for a slot that is never given up.
        early: int32 [K], 1 for a slot that was filled ahead and not asked for since.
        counters: int32 [COUNTERS].
        moves: int32 [K, 2], (expert, slot) of the last moves.
    """

    slot_expert: Tensor
    expert_slot: Tensor
    last_use: Tensor
    early: Tensor
    counters: Tensor
    moves: Tensor

    @classmethod
    def make(
        cls, experts: int, slots: int, device: torch.device | str, pins: Sequence[int] = ()
    ) -> SlotState:
        """State in which slots hold the pinned experts, then the lowest of the others.

        Args:
            experts: E.
            slots: K.
            device: of the tables.
            pins: experts that stay, fewer than K.
        """

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        order = [*pins, *(expert for expert in range(experts) if expert not in pins)]
        held = torch.tensor(order[:slots], dtype=torch.int32, device=device)
        expert_slot = zeros(experts) - 1
        expert_slot[held.long()] = torch.arange(slots, dtype=torch.int32, device=device)
        last_use = zeros(slots)
        last_use[: len(pins)] = PINNED
        return cls(held, expert_slot, last_use, zeros(slots), zeros(COUNTERS), zeros(slots, 2))


# ---------------------------------------------------------------- torch


def decide_torch(experts: Tensor, tiles: Tensor, state: SlotState) -> tuple[Tensor, Tensor]:
    """Make a step's experts resident in the tables; `moves` says what is to be copied.

    Args:
        experts: int32 [T, k], routed ids, repeats allowed, -1 for padding; at most as many distinct
            ones that are not pinned as there are slots that are not.
        tiles: int32 [N, 3] of `Routing`.
        state: of the layer, written.

    Returns:
        the tiles with slots in place of experts; int32 [N], the expert of each tile whose slot is
        still to be filled, -1 for the others.
    """
    step = int(state.counters[STEP]) + 1
    found = tiles[:, 0] >= 0
    found &= state.expert_slot[tiles[:, 0].clamp(min=0).long()] >= 0
    distinct = [e for e in dict.fromkeys(experts.flatten().tolist()) if e >= 0]
    for expert in distinct:
        slot = int(state.expert_slot[expert])
        if slot >= 0:
            # A pinned slot keeps its mark, which no step reaches.
            state.last_use[slot] = max(int(state.last_use[slot]), step)
            state.counters[HITS] += 1
            state.counters[AHEAD_HITS] += state.early[slot]
    state.early.zero_()
    missing = [e for e in distinct if state.expert_slot[e] < 0]
    _move_in(missing, state, step, {s for s, u in enumerate(state.last_use.tolist()) if u == step})
    state.counters[MISSES] += len(missing)
    state.counters[STEP] = step
    named = tiles.clone()
    named[:, 0] = slots_of_torch(tiles[:, 0], state)
    return named, torch.where(found, -1, tiles[:, 0])


def bring_ahead_torch(experts: Tensor, state: SlotState) -> None:
    """Make experts resident that the next step may ask for; it decides as ever.

    Args:
        experts: as in `decide_torch`.
        state: of the layer, written.
    """
    distinct = [e for e in dict.fromkeys(experts.flatten().tolist()) if e >= 0]
    missing = [e for e in distinct if state.expert_slot[e] < 0]
    kept = {int(state.expert_slot[e]) for e in distinct} - {-1}
    for slot in _move_in(missing, state, int(state.counters[STEP]), kept):
        state.early[slot] = 1
    state.counters[AHEAD] += len(missing)


def _move_in(missing: list[int], state: SlotState, step: int, kept: set[int]) -> list[int]:
    """Give each expert the slot used longest ago that is not among `kept`; the slots, in order."""
    found = list[int]()
    for expert in missing:
        used = state.last_use.tolist()
        slot = min((s for s in range(len(used)) if s not in kept), key=lambda s: (used[s], s))
        state.expert_slot[state.slot_expert[slot].long()] = -1
        state.slot_expert[slot] = expert
        state.expert_slot[expert] = slot
        state.last_use[slot] = step
        state.moves[len(found)] = torch.tensor([expert, slot], dtype=torch.int32)
        kept.add(slot)
        found.append(slot)
    state.counters[MOVES] = len(found)
    return found


def bring_in_torch(store: Tensor, slots: Tensor, state: SlotState) -> None:
    """Copy the last step's moves.

    Args:
        store: uint8 [E, bytes] on the host (pinned for kernels); bytes divisible by 16.
        slots: uint8 [K, bytes].
        state: of the layer.
    """
    for expert, slot in state.moves[: int(state.counters[MOVES])].tolist():
        slots[slot].copy_(store[expert])


def slots_of_torch(experts: Tensor, state: SlotState) -> Tensor:
    """Slots of experts int32 [...]; -1 stays -1."""
    found = state.expert_slot[experts.clamp(min=0).long()]
    return torch.where(experts < 0, experts, found)


# ---------------------------------------------------------------- Triton


@triton.jit
def _decide_kernel(
    experts, tiles, named, origins, slot_expert, expert_slot, last_use, early, counters, moves,
    num_pairs, num_tiles, num_slots, num_experts, SLOTS: tl.constexpr, EXPERTS: tl.constexpr,
    TILES: tl.constexpr, PAIRS: tl.constexpr, AHEAD: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program; SLOTS, EXPERTS, TILES and PAIRS are powers of two. AHEAD: as bring_ahead_torch.

    PAIRS: pairs that are looked for at once; most of them are in slots.
    """
    # The tables are a layer's own: what writes them has ended when the kernel before this one has
    # waited for its predecessors, as every router has before it lets this one begin.
    slot = tl.arange(0, SLOTS)
    real = slot < num_slots
    before = tl.load(slot_expert + slot, mask=real, other=-2)
    used = tl.load(last_use + slot, mask=real, other=0)
    soon = tl.load(early + slot, mask=real, other=0)
    step = tl.load(counters) + (0 if AHEAD else 1)
    await_previous(OVERLAP)
    begin_next(OVERLAP)
    kept = tl.zeros((SLOTS,), tl.int32)
    absentees = 0
    for first in range(0, num_pairs, PAIRS):
        pair = first + tl.arange(0, PAIRS)
        asked = tl.load(experts + pair, mask=pair < num_pairs, other=-1)
        match = ((asked[:, None] == before[None, :]) & (asked >= 0)[:, None]).to(tl.int32)
        kept = tl.maximum(kept, tl.max(match, 0))
        absentees += tl.sum(((tl.max(match, 1) == 0) & (asked >= 0)).to(tl.int32), 0)
    hits, ahead_hits = tl.sum(kept, 0), tl.sum(kept * soon, 0)
    if not AHEAD:
        used = tl.where(kept != 0, tl.maximum(used, step), used)  # a pinned slot keeps its mark
        soon = tl.zeros((SLOTS,), tl.int32)
    held, count = before, 0
    for pair in range(tl.where(absentees > 0, num_pairs, 0)):
        expert = tl.load(experts + pair)
        absent = tl.sum((held == expert).to(tl.int32), 0) == 0
        if absent & (expert >= 0):
            free = (kept == 0) & real
            age = tl.where(free, used, 2147483647)
            oldest = tl.min(age, 0)
            victim = tl.min(tl.where(free & (age == oldest), slot, SLOTS), 0)
            held = tl.where(slot == victim, expert, held)
            used = tl.where(slot == victim, step, used)
            kept = tl.where(slot == victim, 1, kept)
            if AHEAD:
                soon = tl.where(slot == victim, 1, soon)
            tl.store(moves + 2 * count, expert)
            tl.store(moves + 2 * count + 1, victim)
            count += 1
    tl.store(last_use + slot, used, mask=real)
    tl.store(early + slot, soon, mask=real)
    if count > 0:
        tl.store(slot_expert + slot, held, mask=real)
        everyone = tl.arange(0, EXPERTS)
        absence = tl.full((EXPERTS,), -1, tl.int32)
        tl.store(expert_slot + everyone, absence, mask=everyone < num_experts)
        tl.debug_barrier()
        tl.store(expert_slot + held, slot, mask=real)
    tl.store(counters + 3, count)
    if AHEAD:
        tl.store(counters + 4, tl.load(counters + 4) + count)
    else:
        tl.store(counters, step)
        tl.store(counters + 1, tl.load(counters + 1) + hits)
        tl.store(counters + 2, tl.load(counters + 2) + count)
        tl.store(counters + 5, tl.load(counters + 5) + ahead_hits)
        for first in range(0, num_tiles, TILES):
            tile = first + tl.arange(0, TILES)
            inside = tile < num_tiles
            expert = tl.load(tiles + tile * 3, mask=inside, other=-1)
            match = (held[None, :] == expert[:, None]) & (expert >= 0)[:, None]
            name = tl.max(tl.where(match, slot[None, :], -1), 1)
            tl.store(named + tile * 3, name, mask=inside)
            was = tl.max((before[None, :] == expert[:, None]).to(tl.int32), 1)
            tl.store(origins + tile, tl.where(was != 0, -1, expert), mask=inside)
            for field in tl.static_range(1, 3):
                value = tl.load(tiles + tile * 3 + field, mask=inside, other=0)
                tl.store(named + tile * 3 + field, value, mask=inside)


def _decide(
    experts: Tensor, tiles: Tensor, state: SlotState, *, ahead: bool, overlap: bool
) -> tuple[Tensor, Tensor]:
    slots, count = state.slot_expert.numel(), state.expert_slot.numel()
    named = torch.empty_like(tiles)
    origins = torch.empty(len(tiles), dtype=torch.int32, device=tiles.device)
    _decide_kernel[(1,)](
        experts, tiles, named, origins, state.slot_expert, state.expert_slot, state.last_use,
        state.early, state.counters, state.moves, experts.numel(), len(tiles), slots, count,
        SLOTS=triton.next_power_of_2(slots), EXPERTS=triton.next_power_of_2(count),
        TILES=min(16, triton.next_power_of_2(len(tiles))),
        PAIRS=min(8, triton.next_power_of_2(experts.numel())), AHEAD=ahead, OVERLAP=overlap,
        num_warps=1 if slots <= 128 else 4, launch_pdl=overlap,
    )  # fmt: skip
    return named, origins


def decide_triton(
    experts: Tensor, tiles: Tensor, state: SlotState, *, joins: bool = False
) -> tuple[Tensor, Tensor]:
    """Run decide_torch as one program; `joins`: the stream has waited for another just now."""
    # A kernel of two predecessors begins when both have ended.
    overlap = overlaps(experts.device) and not joins
    return _decide(experts, tiles, state, ahead=False, overlap=overlap)


def bring_ahead_triton(experts: Tensor, state: SlotState) -> None:
    """Run bring_ahead_torch as one program."""
    _decide(experts, experts.view(-1, 1), state, ahead=True, overlap=False)


@triton.jit
def _bring_in_kernel(
    store, slots, moves, counters, words, WORDS: tl.constexpr, OVERLAP: tl.constexpr
):
    """Program p copies every P-th piece of each expert; the moves follow each other."""
    await_previous(OVERLAP)
    begin_next(OVERLAP)
    count = tl.load(counters + 3)
    pieces = tl.cdiv(words, WORDS)
    at = tl.arange(0, WORDS)
    for piece in range(tl.program_id(0), count * pieces, tl.num_programs(0)):
        move = piece // pieces
        offset = (piece % pieces).to(tl.int64) * WORDS + at
        expert = tl.load(moves + 2 * move).to(tl.int64)
        slot = tl.load(moves + 2 * move + 1).to(tl.int64)
        value = tl.load(store + expert * words + offset, mask=offset < words)
        tl.store(slots + slot * words + offset, value, mask=offset < words)


def bring_in_triton(store: Tensor, slots: Tensor, state: SlotState, *, alone: bool = False) -> None:
    """Run bring_in_torch as one launch that reads the host's memory itself.

    `alone`: on a stream that others wait for, where nothing begins before its predecessor has ended.
    """
    overlap = overlaps(slots.device) and not alone
    words = slots.shape[1] // 8
    _bring_in_kernel[(COPY_PROGRAMS,)](
        store.view(torch.int64),
        slots.view(torch.int64),
        state.moves,
        state.counters,
        words,
        WORDS=_COPY_WORDS,
        OVERLAP=overlap,
        num_warps=8,
        launch_pdl=overlap,
    )


@triton.jit
def _slots_of_kernel(experts, expert_slot, out, count, stride_in, stride_out, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(experts + at * stride_in, mask=at < count, other=-1)
    slot = tl.load(expert_slot + expert, mask=expert >= 0, other=-1)
    tl.store(out + at * stride_out, slot, mask=at < count)


def slots_of_triton(experts: Tensor, state: SlotState) -> Tensor:
    """Run slots_of_torch as one launch; `experts` is one-dimensional."""
    out = torch.empty(experts.shape, dtype=torch.int32, device=experts.device)
    count = experts.numel()
    _slots_of_kernel[(triton.cdiv(count, 256),)](
        experts, state.expert_slot, out, count, experts.stride(0), out.stride(0), BLOCK=256
    )
    return out
