"""Where a layer's routed experts lie: all on the GPU, or some in slots and the rest on the host.

An expert is one run of bytes: every tensor that its products need (codes, scales, zero points,
padding) lies in it, so that none of them can be left behind when it moves. Stacks of matrices that
kernels read are strided views of a table of such runs (issue 7, engine.md A4).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.kernels.formats import Matrix
from engine.kernels.ops import Ops
from engine.kernels.paging import (
    SlotState,
    bring_in_torch,
    bring_in_triton,
    decide_torch,
    decide_triton,
    slots_of_torch,
    slots_of_triton,
)
from engine.kernels.router import Routing
from engine.model.hostmem import HostBuffer
from engine.plan.residency import Residency

#: Tensors of an expert begin at multiples of this many bytes.
ALIGNMENT = 256


@dataclass(frozen=True, slots=True)
class _Part:
    """One tensor within an expert's bytes."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def view(self, table: Tensor) -> Tensor:
        """Give this tensor of every expert of a table [N, bytes]: [N, *shape], strided."""
        one = table[:, self.offset : self.offset + self.nbytes].view(self.dtype)
        found: Tensor = one.unflatten(1, self.shape)  # type: ignore[no-untyped-call]
        return found


class ExpertLayout:
    """How the matrices of one expert lie in its bytes.

    Attributes:
        nbytes: of one expert, a multiple of ALIGNMENT.

    Args:
        matrices: those of one expert, in the order in which they are asked for.
    """

    def __init__(self, matrices: Sequence[Matrix]) -> None:
        self._forms = [(m.kind, m.block) for m in matrices]
        self._parts: list[tuple[_Part, _Part | None]] = []
        self.nbytes = 0
        for m in matrices:
            data = self._place(m.data)
            self._parts.append((data, None if m.scale is None else self._place(m.scale)))

    def _place(self, tensor: Tensor) -> _Part:
        part = _Part(tensor.dtype, tuple(tensor.shape), self.nbytes)
        self.nbytes += -(-part.nbytes // ALIGNMENT) * ALIGNMENT
        return part

    def stacks(self, table: Tensor) -> tuple[Matrix, ...]:
        """Matrices of every row of a table uint8 [N, nbytes], stacked along N."""
        return tuple(
            Matrix(kind, data.view(table), None if scale is None else scale.view(table), block)
            for (kind, block), (data, scale) in zip(self._forms, self._parts, strict=True)
        )

    def write(self, row: Tensor, matrices: Sequence[Matrix]) -> None:
        """Put one expert into its bytes uint8 [nbytes]; what lies between tensors becomes 0."""
        row.zero_()
        for stack, m in zip(self.stacks(row[None]), matrices, strict=True):
            stack.data[0].copy_(m.data)
            if stack.scale is not None and m.scale is not None:
                stack.scale[0].copy_(m.scale)


class ResidentExperts:
    """All experts of a layer on the device.

    Args:
        w13: [E, 2 * I, d], gate rows first.
        w2: [E, d, I].
    """

    def __init__(self, w13: Matrix, w2: Matrix) -> None:
        self.w13 = w13
        self.w2 = w2

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self.w13.nbytes + self.w2.nbytes

    def run(
        self,
        ops: Ops,
        x: Tensor,
        routing: Routing,
        shared13: Matrix | None,
        shared2: Matrix | None,
        *,
        limit: float,
        act_group: int | None,
    ) -> Tensor:
        """Compute a layer's experts; see engine.kernels.moe.moe_torch."""
        return ops.moe(
            x, routing, self.w13, self.w2, shared13, shared2, limit=limit, act_group=act_group
        )


class PagedExperts:
    """K slots on the device, every expert on the host.

    A pass whose (row, choice) pairs are no more than K is one wave: what to bring in is decided and
    copied on the device, without a sync, so that it can be captured. A larger pass is cut into
    waves on the host. Both read and write the same tables.

    Attributes:
        layout: of an expert's bytes.
        state: residency, on the device.
        store: uint8 [E, bytes] on the host.
        slots: uint8 [K, bytes] on the device.

    Args:
        layout: of an expert's bytes.
        store: pinned where the device is a GPU; holds every expert.
        num_slots: K.
        device: of the slots.
    """

    def __init__(
        self, layout: ExpertLayout, store: HostBuffer, num_slots: int, device: torch.device
    ) -> None:
        self.layout = layout
        self._buffer = store
        self.store = store.tensor.view(-1, layout.nbytes)
        self.slots = self.store[:num_slots].to(device, copy=True)
        self.state = SlotState.make(len(self.store), num_slots, device)
        self.w13, self.w2 = layout.stacks(self.slots)
        self._copies: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self.slots.nbytes

    @property
    def num_slots(self) -> int:
        """K."""
        return len(self.slots)

    @property
    def pin_seconds(self) -> float:
        """Time that pinning the store took."""
        return self._buffer.pin_seconds

    def is_one_wave(self, routing: Routing) -> bool:
        """Whether a pass fits the slots whatever its rows are routed to; shapes decide."""
        return routing.experts.numel() <= self.num_slots

    def run(
        self,
        ops: Ops,
        x: Tensor,
        routing: Routing,
        shared13: Matrix | None,
        shared2: Matrix | None,
        *,
        limit: float,
        act_group: int | None,
    ) -> Tensor:
        """Compute a layer's experts; see engine.kernels.moe.moe_torch."""
        how = {"limit": limit, "act_group": act_group}
        if self.is_one_wave(routing):
            self._bring_in(ops, routing)
            named = self._named(ops, routing)
            return ops.moe(x, named, self.w13, self.w2, shared13, shared2, **how)
        total: Tensor | None = None
        for wave in self._waves(ops, routing):
            shared = (shared13, shared2) if total is None else (None, None)
            parts = ops.moe(x, wave, self.w13, self.w2, *shared, **how)
            # Every pair is in one wave and 0 in the others, so that no bit depends on the waves.
            total = parts if total is None else total.add_(parts)
        assert total is not None
        return total

    def _bring_in(self, ops: Ops, routing: Routing) -> None:
        """Decide and copy on the device."""
        if ops.name == "triton":
            decide_triton(routing.experts, self.state)
            bring_in_triton(self.store, self.slots, self.state)
        else:
            decide_torch(routing.experts, self.state)
            bring_in_torch(self.store, self.slots, self.state)

    def _named(self, ops: Ops, routing: Routing) -> Routing:
        """The routing with slots instead of experts in its tiles."""
        tiles = routing.tiles.clone()
        slots_of = slots_of_triton if ops.name == "triton" else slots_of_torch
        tiles[:, 0] = slots_of(tiles[:, 0], self.state)
        return replace(routing, tiles=tiles)

    def _waves(self, ops: Ops, routing: Routing) -> Iterator[Routing]:
        """Bring a large pass's experts in, wave after wave; yields what each is to compute.

        With two slots or more a wave takes half of them, so that the next one's experts are copied
        while it is computed: least recently used slots are never those of the wave before.
        """
        residency = self.read_residency()
        wanted = [e for e in set(routing.experts.flatten().tolist()) if e >= 0]
        overlap = self.num_slots > 1
        waves = residency.waves(wanted, self.num_slots // 2 if overlap else 1) or [[]]
        ready = self._copy(residency, waves[0])
        for index, wave in enumerate(waves):
            if ready is not None:
                torch.cuda.current_stream(self.slots.device).wait_event(ready)
            self.write_residency(residency)
            masked = self._masked(ops, routing, wave)
            following = waves[index + 1] if index + 1 < len(waves) else None
            if following and overlap:
                ready = self._copy(residency, following)
            yield masked
            if following and not overlap:
                ready = self._copy(residency, following)

    def _masked(self, ops: Ops, routing: Routing, wave: list[int]) -> Routing:
        """The part of a routing that goes to a wave's experts, by slots."""
        inside = torch.zeros(len(self.store), dtype=torch.bool, device=self.slots.device)
        inside[wave] = True
        kept = inside[routing.experts.clamp(min=0).long()] & (routing.experts >= 0)
        experts = torch.where(kept, routing.experts, -1)
        part = Routing(experts, routing.weights * kept, *ops.group(experts, len(self.store)))
        return self._named(ops, part)

    def _copy(self, residency: Residency, wave: list[int]) -> torch.cuda.Event | None:
        """Start copying what a wave misses; gives what to wait for, None on a CPU."""
        moves = residency.bring_in(wave)
        if self._copies is None:
            for move in moves:
                self.slots[move.slot].copy_(self.store[move.expert])
            return None
        # Slots given up were last read by work that is queued by now.
        self._copies.wait_stream(torch.cuda.current_stream(self.slots.device))
        with torch.cuda.stream(self._copies):
            for move in moves:
                self.slots[move.slot].copy_(self.store[move.expert], non_blocking=True)
            done: torch.cuda.Event = self._copies.record_event()
        return done

    def read_residency(self) -> Residency:
        """Take the device's tables over; waits for the device."""
        residency = Residency(len(self.store), self.num_slots)
        residency.slot_expert = self.state.slot_expert.tolist()
        residency.expert_slot = self.state.expert_slot.tolist()
        residency.last_use = self.state.last_use.tolist()
        residency.step, residency.hits, residency.misses, _ = self.state.counters.tolist()
        return residency

    def write_residency(self, residency: Residency) -> None:
        """Give the host's tables to the device."""
        numbers = [residency.step, residency.hits, residency.misses, 0]
        for tensor, values in (
            (self.state.slot_expert, residency.slot_expert),
            (self.state.expert_slot, residency.expert_slot),
            (self.state.last_use, residency.last_use),
            (self.state.counters, numbers),
        ):
            tensor.copy_(torch.tensor(values, dtype=torch.int32))

    def check_integrity(self) -> None:
        """Check that each slot has its expert's bytes (J4); reads everything.

        Raises:
            RuntimeError: one has not; a bug.
        """
        residency = self.read_residency()
        residency.check_integrity()
        for slot, expert in enumerate(residency.slot_expert):
            if not torch.equal(self.slots[slot].cpu(), self.store[expert]):
                raise RuntimeError(f"slot {slot} does not hold the bytes of expert {expert}")


Experts = ResidentExperts | PagedExperts


class Placement:
    """Decides where the experts of each layer go, and puts them there.

    Args:
        slots: layer -> K of a paged layer; layers that are not named stay on the device.
        device: of slots and resident experts.
        pin: whether stores are pinned for the GPU.
    """

    def __init__(
        self, slots: dict[int, int] | None = None, *, device: torch.device, pin: bool
    ) -> None:
        self._slots = slots or {}
        self._device = device
        self._pin = pin

    def place(self, layer: int, experts: Iterable[tuple[Matrix, Matrix]], count: int) -> Experts:
        """Take a layer's experts, one after the other.

        Args:
            layer: its index.
            experts: (w13, w2) of each.
            count: how many come.
        """
        source = iter(experts)
        first = next(source)
        num_slots = self._slots.get(layer)
        layout = ExpertLayout(first)
        if num_slots is None:
            table = torch.empty((count, layout.nbytes), dtype=torch.uint8, device=self._device)
        else:
            buffer = HostBuffer(count * layout.nbytes, pin=self._pin)
            table = buffer.tensor.view(count, layout.nbytes)
        layout.write(table[0], first)
        for index in range(1, count):
            layout.write(table[index], next(source))
        if num_slots is None:
            return ResidentExperts(*layout.stacks(table))
        return PagedExperts(layout, buffer, num_slots, self._device)
