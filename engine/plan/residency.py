"""Which experts of a layer lie in its GPU slots: least recently used leaves first.

A layer with E experts and K slots keeps K of them on the GPU; the host has those that may be needed
again. A *wave* is one set of at most K experts that are resident together while their rows are
computed. Some experts may be *pinned*: they lie in slots for ever, and a wave needs room for the
others alone. This is the host's side, plain integers; the device's side (engine.kernels.paging) makes
the same choices inside a CUDA graph, and state goes over from one to the other (issue 7, engine.md
A4).
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

ABSENT = -1
#: Use of a slot whose expert is pinned: later than any step, so that no search for the least finds it.
PINNED = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Move:
    """An expert to be copied into a slot, over whatever lies there."""

    expert: int
    slot: int


class Residency:
    """Slot table of one layer.

    At the start slots hold the pinned experts in their order, then the lowest of the others.

    Attributes:
        slot_expert: expert in each slot.
        expert_slot: slot of each expert, ABSENT where it has none.
        last_use: step in which each slot was last used; 0 for never, PINNED where an expert stays.
        step: waves so far.
        hits: experts a wave found resident.
        misses: experts a wave had to bring in.
        early: whether each slot was filled ahead and not asked for since.
        ahead: experts brought in ahead.
        ahead_hits: of them, those that the next wave asked for.

    Args:
        num_experts: E.
        num_slots: K, 1 .. E.
        pins: experts that stay, fewer than K.
        never: experts that no wave asks for, and that no slot begins with.

    Raises:
        ValueError: these do not fit together.
    """

    def __init__(
        self,
        num_experts: int,
        num_slots: int,
        pins: Sequence[int] = (),
        never: Collection[int] = (),
    ) -> None:
        if not 1 <= num_slots <= num_experts:
            raise ValueError(f"slots: expected 1 to {num_experts}, got {num_slots}")
        if len(pins) >= num_slots:
            raise ValueError(f"pins: expected fewer than {num_slots} slots, got {len(pins)}")
        self.slot_expert = residents_at_start(num_experts, num_slots, pins, never)
        self.expert_slot = [ABSENT] * num_experts
        for slot, expert in enumerate(self.slot_expert):
            self.expert_slot[expert] = slot
        self.last_use = [PINNED] * len(pins) + [0] * (num_slots - len(pins))
        self.step = 0
        self.hits = 0
        self.misses = 0
        self.early = [False] * num_slots
        self.ahead = 0
        self.ahead_hits = 0

    @property
    def num_slots(self) -> int:
        """K."""
        return len(self.slot_expert)

    @property
    def room(self) -> int:
        """Most experts of a wave beside pinned ones: K less their number."""
        return self.num_slots - self.last_use.count(PINNED)

    def is_pinned(self, expert: int) -> bool:
        """Whether an expert lies in a slot for ever."""
        slot = self.expert_slot[expert]
        return slot != ABSENT and self.last_use[slot] == PINNED

    def _check_room(self, what: str, distinct: Sequence[int]) -> None:
        wanted = sum(not self.is_pinned(expert) for expert in distinct)
        if wanted > self.room:
            beside = self.num_slots - self.room
            pinned = f" beside {beside} pinned" if beside else ""
            raise ValueError(f"{what.format(wanted)} for {self.room} slots{pinned}")

    def bring_in(self, experts: Sequence[int]) -> list[Move]:
        """Make the experts of one wave resident.

        Slots that this wave uses are safe; among the others the least recently used one is given
        up, of equally old ones the lowest.

        Args:
            experts: ids, repeats allowed, at most `room` distinct ones beside pinned ones; the
                order decides which absent expert gets which slot.

        Returns:
            what is to be copied before the wave is computed, in order.

        Raises:
            ValueError: they do not fit.
        """
        distinct = list(dict.fromkeys(experts))
        self._check_room("a wave of {} experts", distinct)
        self.step += 1
        for expert in distinct:
            slot = self.expert_slot[expert]
            if slot != ABSENT:
                self.last_use[slot] = max(self.last_use[slot], self.step)
                self.hits += 1
                self.ahead_hits += self.early[slot]
        self.early = [False] * self.num_slots
        missing = [e for e in distinct if self.expert_slot[e] == ABSENT]
        self.misses += len(missing)
        return self._move_in(missing, {s for s, u in enumerate(self.last_use) if u == self.step})

    def bring_ahead(self, experts: Sequence[int]) -> list[Move]:
        """Make experts resident that the next wave may ask for.

        No wave: nothing is counted as found or missed. The slots given up are those that the next
        wave would give up first, of others than these experts'.

        Args:
            experts: as in `bring_in`.

        Returns:
            what is to be copied, in order.

        Raises:
            ValueError: they do not fit.
        """
        distinct = list(dict.fromkeys(experts))
        self._check_room("{} experts ahead", distinct)
        missing = [e for e in distinct if self.expert_slot[e] == ABSENT]
        moves = self._move_in(missing, {self.expert_slot[e] for e in distinct})
        for move in moves:
            self.early[move.slot] = True
        self.ahead += len(moves)
        return moves

    def _move_in(self, missing: Sequence[int], kept: set[int]) -> list[Move]:
        """Give absent experts the slots used longest ago that are not among `kept`."""
        moves = []
        for expert in missing:
            slot = min(
                (s for s in range(self.num_slots) if s not in kept),
                key=lambda s: (self.last_use[s], s),
            )
            self.expert_slot[self.slot_expert[slot]] = ABSENT
            self.slot_expert[slot] = expert
            self.expert_slot[expert] = slot
            self.last_use[slot] = self.step
            kept.add(slot)
            moves.append(Move(expert, slot))
        return moves

    def waves(self, experts: Iterable[int], size: int | None = None) -> list[list[int]]:
        """Cut a pass's experts into waves, those that are resident now first.

        Args:
            experts: ids, repeats allowed.
            size: most experts of a wave beside pinned ones, `room` by default; half of it lets one
                wave be copied while another is computed.

        Returns:
            disjoint waves that cover them, none empty; pinned experts are all in the first.
        """
        size = self.room if size is None else size
        distinct = sorted(set(experts), key=lambda e: (self.expert_slot[e] == ABSENT, e))
        pinned = [e for e in distinct if self.is_pinned(e)]
        others = [e for e in distinct if not self.is_pinned(e)]
        waves = [others[first : first + size] for first in range(0, len(others), size)]
        if pinned:
            waves[:1] = [pinned + (waves[0] if waves else [])]
        return waves

    def check_integrity(self) -> None:
        """Check that the two tables say the same.

        Raises:
            RuntimeError: they do not; a bug.
        """
        for slot, expert in enumerate(self.slot_expert):
            if self.expert_slot[expert] != slot:
                raise RuntimeError(
                    f"slot {slot} holds expert {expert}, whose slot is {self.expert_slot[expert]}"
                )
        resident = sum(slot != ABSENT for slot in self.expert_slot)
        if resident != self.num_slots:
            raise RuntimeError(f"{resident} experts name a slot, of {self.num_slots} slots")


def residents_at_start(
    num_experts: int, num_slots: int, first: Sequence[int], never: Collection[int] = ()
) -> list[int]:
    """Experts that lie in slots at the start: some named ones, then the lowest of the others.

    Args:
        num_experts: E.
        num_slots: K.
        first: distinct ids, at most K.
        never: ids to be left out.
    """
    named = {*first, *never}
    others = (expert for expert in range(num_experts) if expert not in named)
    return [*first, *itertools.islice(others, num_slots - len(first))]
