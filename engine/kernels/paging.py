"""Paged experts inside a CUDA graph: decide what to bring in, copy it, name the slots.

The device's side of engine.plan.residency, with the same choices. One layer's state is int32:
`slot_expert` [K], `expert_slot` [E] (-1: absent), `last_use` [K] and `counters` [4]: step, hits,
misses, moves of the last step. An expert is one run of bytes, in the host's store [E, bytes] (pinned
memory that kernels read over the bus) and in the slots [K, bytes]. No host sync: the number of
moves stays on the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels.triton_compat import tl, triton

STEP, HITS, MISSES, MOVES = range(4)
#: Programs that copy. 16 saturate the bus (engine.md B0); the rest of the GPU stays free.
COPY_PROGRAMS = 32
_COPY_WORDS = 4096  # int64 a program moves at a time


@dataclass(frozen=True, slots=True)
class SlotState:
    """Residency of one layer, on the device.

    Args:
        slot_expert: int32 [K].
        expert_slot: int32 [E], -1 for an absent expert.
        last_use: int32 [K].
        counters: int32 [4]: step, hits, misses, moves of the last step.
        moves: int32 [K, 2], (expert, slot) of the last step's moves.
    """

    slot_expert: Tensor
    expert_slot: Tensor
    last_use: Tensor
    counters: Tensor
    moves: Tensor

    @classmethod
    def make(cls, experts: int, slots: int, device: torch.device | str) -> SlotState:
        """State in which slot s holds expert s."""
        expert_slot = torch.full((experts,), -1, dtype=torch.int32, device=device)
        expert_slot[:slots] = torch.arange(slots, dtype=torch.int32, device=device)

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        order = torch.arange(slots, dtype=torch.int32, device=device)
        return cls(order, expert_slot, zeros(slots), zeros(4), zeros(slots, 2))


# ---------------------------------------------------------------- torch


def decide_torch(experts: Tensor, state: SlotState) -> None:
    """Make a step's experts resident in the tables; `moves` says what is to be copied.

    Args:
        experts: int32 [P], routed ids, repeats allowed, -1 for padding; at most K distinct.
        state: of the layer, written.
    """
    step = int(state.counters[STEP]) + 1
    distinct = [e for e in dict.fromkeys(experts.flatten().tolist()) if e >= 0]
    moves = 0
    for expert in distinct:
        slot = int(state.expert_slot[expert])
        if slot >= 0:
            state.last_use[slot] = step
            state.counters[HITS] += 1
    for expert in distinct:
        if state.expert_slot[expert] >= 0:
            continue
        used = state.last_use.tolist()
        slot = min((s for s in range(len(used)) if used[s] != step), key=lambda s: (used[s], s))
        state.expert_slot[state.slot_expert[slot].long()] = -1
        state.slot_expert[slot] = expert
        state.expert_slot[expert] = slot
        state.last_use[slot] = step
        state.moves[moves] = torch.tensor([expert, slot], dtype=torch.int32)
        state.counters[MISSES] += 1
        moves += 1
    state.counters[STEP] = step
    state.counters[MOVES] = moves


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
    experts,
    slot_expert,
    expert_slot,
    last_use,
    counters,
    moves,
    num_pairs,
    num_slots,
    num_experts,
    SLOTS: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """One program; SLOTS and EXPERTS are powers of two."""
    slot = tl.arange(0, SLOTS)
    held = tl.load(slot_expert + slot, mask=slot < num_slots, other=-2)
    used = tl.load(last_use + slot, mask=slot < num_slots, other=0)
    step = tl.load(counters) + 1
    hits = 0
    for pair in range(num_pairs):
        expert = tl.load(experts + pair)
        mine = (held == expert) & (expert >= 0)
        fresh = mine & (used != step)
        hits += tl.sum(fresh.to(tl.int32), 0)
        used = tl.where(mine, step, used)
    count = 0
    for pair in range(num_pairs):
        expert = tl.load(experts + pair)
        absent = tl.sum((held == expert).to(tl.int32), 0) == 0
        if absent & (expert >= 0):
            free = (used != step) & (slot < num_slots)
            age = tl.where(free, used, 2147483647)
            oldest = tl.min(age, 0)
            victim = tl.min(tl.where(free & (age == oldest), slot, SLOTS), 0)
            held = tl.where(slot == victim, expert, held)
            used = tl.where(slot == victim, step, used)
            tl.store(moves + 2 * count, expert)
            tl.store(moves + 2 * count + 1, victim)
            count += 1
    tl.store(slot_expert + slot, held, mask=slot < num_slots)
    tl.store(last_use + slot, used, mask=slot < num_slots)
    all_experts = tl.arange(0, EXPERTS)
    tl.store(
        expert_slot + all_experts,
        tl.full((EXPERTS,), -1, tl.int32),
        mask=all_experts < num_experts,
    )
    tl.debug_barrier()
    tl.store(expert_slot + held, slot, mask=slot < num_slots)
    tl.store(counters, step)
    tl.store(counters + 1, tl.load(counters + 1) + hits)
    tl.store(counters + 2, tl.load(counters + 2) + count)
    tl.store(counters + 3, count)


def decide_triton(experts: Tensor, state: SlotState) -> None:
    """Run decide_torch as one program."""
    slots, count = state.slot_expert.numel(), state.expert_slot.numel()
    _decide_kernel[(1,)](
        experts,
        state.slot_expert,
        state.expert_slot,
        state.last_use,
        state.counters,
        state.moves,
        experts.numel(),
        slots,
        count,
        SLOTS=triton.next_power_of_2(slots),
        EXPERTS=triton.next_power_of_2(count),
        num_warps=1 if slots <= 128 else 4,
    )


@triton.jit
def _bring_in_kernel(store, slots, moves, counters, words, WORDS: tl.constexpr):
    """Program p copies every P-th piece of each expert; the moves follow each other."""
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


def bring_in_triton(store: Tensor, slots: Tensor, state: SlotState) -> None:
    """Run bring_in_torch as one launch that reads the host's memory itself."""
    words = slots.shape[1] // 8
    _bring_in_kernel[(COPY_PROGRAMS,)](
        store.view(torch.int64),
        slots.view(torch.int64),
        state.moves,
        state.counters,
        words,
        WORDS=_COPY_WORDS,
        num_warps=8,
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
