"""Where a layer's routed experts lie: all on the GPU, or some in slots and the rest on the host.

An expert is one run of bytes (engine.model.expert_layout), which moves as a whole. Passes of a few rows
are one wave, decided on the device; larger ones are cut into waves on the host; those of long prompts
need nearly all experts, and the others pass through buffers (engine.model.expert_stream). Where the host
has no room for all experts of a layer either, it keeps those used last and the checkpoint's files have
the rest (engine.model.disktier). Issue 7, engine.md A4.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace

import torch
from torch import Tensor

from engine.kernels.formats import Matrix
from engine.kernels.ops import Ops
from engine.kernels.paging import (
    HITS,
    MISSES,
    STEP,
    SlotState,
    bring_ahead_torch,
    bring_ahead_triton,
    bring_in_torch,
    bring_in_triton,
    decide_torch,
    decide_triton,
    slots_of_torch,
    slots_of_triton,
)
from engine.kernels.router import Routing
from engine.kernels.row import FEW_ROWS, Missing, experts_row, experts_rows, takes_row
from engine.model.disktier import HostCache
from engine.model.expert_layout import ExpertLayout, unfold
from engine.model.expert_stream import DENSE_PAIRS, ExpertStream
from engine.model.hostmem import HostBuffer
from engine.model.slot_check import byte_sum, check_slots
from engine.plan.residency import ABSENT, Residency, residents_at_start

#: Called between the bringing in of a layer's experts and their products.
Meanwhile = Callable[[], None]


def _is_row(
    ops: Ops, x: Tensor, w13: Matrix, w2: Matrix, shared: object, group: object, most: int = 1
) -> bool:
    """Whether a pass is a single row, or up to `most`, that kernels of their own take."""
    if ops.name != "triton" or shared is not None or group is not None:
        return False
    return takes_row(x, w13, w2, most=most)


def _at_once(
    ops: Ops,
    x: Tensor,
    routing: Routing,
    w13: Matrix,
    w2: Matrix,
    shared: tuple[Matrix | None, Matrix | None],
    *,
    limit: float,
    act_group: int | None,
) -> Tensor:
    """Compute a pass that is one wave.

    A single row's parts come added up; those of few rows without one for the shared expert.
    """
    if _is_row(ops, x, w13, w2, shared[0], act_group):
        return experts_row(x, routing, w13, w2, limit=limit)
    if _is_row(ops, x, w13, w2, shared[0], act_group, FEW_ROWS):
        return experts_rows(x, routing, w13, w2, limit=limit)
    return ops.moe(x, routing, w13, w2, *shared, limit=limit, act_group=act_group)


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
        meanwhile: Meanwhile | None = None,
    ) -> Tensor:
        """Compute a layer's experts; see engine.kernels.moe.moe_torch.

        `meanwhile` is called before.
        """
        if meanwhile is not None:
            meanwhile()
        w13, w2, routing = unfold(self.w13, self.w2, routing, x.dtype)
        shared = shared13, shared2
        return _at_once(ops, x, routing, w13, w2, shared, limit=limit, act_group=act_group)


class PagedExperts:
    """K slots on the device, every expert on the host, or on the host and in files.

    A pass whose (row, choice) pairs are no more than K is one wave: what to bring in is decided and
    copied on the device, without a sync, so that it can be captured. A larger pass is cut into
    waves on the host, and so is any pass where files are needed. Both read and write the same
    tables. Pinned experts lie in the first slots for ever, and nowhere else: the others share the
    slots that are left.

    Attributes:
        layout: of an expert's bytes.
        state: residency, on the device.
        store: uint8 [E, bytes] on the host, without memory where pinned experts would be; with a
            cache its rows.
        cache: what the host keeps where it has no room for all; None where it has.
        slots: uint8 [K, bytes] on the device.

    Args:
        layout: of an expert's bytes.
        store: pinned where the device is a GPU; holds every expert that is not pinned to the device,
            or the first of them, as many as they have slots at least.
        num_slots: K.
        device: of the slots.
        count: E.
        pinned: expert -> its bytes, of those that stay on the device; fewer than K.
    """

    def __init__(
        self,
        layout: ExpertLayout,
        store: HostBuffer | HostCache,
        num_slots: int,
        device: torch.device,
        count: int,
        pinned: Mapping[int, Tensor] | None = None,
    ) -> None:
        pinned = pinned or {}
        self.layout = layout
        self.num_experts = count
        self._buffer = store
        self.cache = store if isinstance(store, HostCache) else None
        table = store.table if isinstance(store, HostCache) else store.tensor
        self.store = table.view(-1, layout.nbytes)
        self.state = SlotState.make(count, num_slots, device, tuple(pinned))
        self.room = num_slots - len(pinned)
        self.slots = torch.empty((num_slots, layout.nbytes), dtype=torch.uint8, device=device)
        # The host has nothing to compare them with later.
        self._sums = {expert: byte_sum(row) for expert, row in pinned.items()}
        others = residents_at_start(count, self.room, (), pinned)
        rows = range(self.room) if self.cache is not None else others
        first = [*pinned.values(), *(self.store[row] for row in rows)]
        for slot, row in zip(self.slots, first, strict=True):
            slot.copy_(row)
        self.w13, self.w2 = layout.stacks(self.slots)
        self._stored = layout.stacks(self.store)
        self._stream: ExpertStream | None = None
        self._number = 0
        self._next: PagedExperts | None = None
        self._ahead: tuple[torch.cuda.Event, tuple[Tensor, ...]] | None = None
        self._copies: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def join(self, stream: ExpertStream, before: PagedExperts | None) -> None:
        """Take the buffers that large passes use.

        Args:
            stream: theirs.
            before: the paged layer before, which is to have this one's experts come.
        """
        self._stream, self._number = stream, stream.add(self.store)
        if before is not None:
            before._next = self

    def with_slots(self, num_slots: int) -> PagedExperts:
        """Give the same experts another number of slots, over the same store; not in buffers."""
        pinned = dict(zip(self._sums, self.slots, strict=False))
        return PagedExperts(
            self.layout, self._buffer, num_slots, self.slots.device, self.num_experts, pinned
        )

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self.slots.nbytes

    @property
    def num_slots(self) -> int:
        """K."""
        return len(self.slots)

    @property
    def host_nbytes(self) -> int:
        """Bytes on the host."""
        return self._buffer.nbytes

    @property
    def num_pins(self) -> int:
        """Experts that stay on the device."""
        return len(self._sums)

    @property
    def pin_seconds(self) -> float:
        """Time that pinning the store took."""
        return self._buffer.pin_seconds

    def most_captured_rows(self, per_row: int) -> int:
        """Rows of the largest decode step that is one wave; 0 where the host decides."""
        return 0 if self.cache is not None else self.room // per_row

    def is_one_wave(self, routing: Routing) -> bool:
        """Whether a pass fits the slots whatever its rows are routed to; shapes decide (J7).

        It may be routed past all pinned experts, so their slots do not count.
        """
        return self.cache is None and routing.experts.numel() <= self.room

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
        meanwhile: Meanwhile | None = None,
    ) -> Tensor:
        """Compute a layer's experts; see engine.kernels.moe.moe_torch.

        `meanwhile` is called when what a single wave misses is on its way.
        """
        how = {"limit": limit, "act_group": act_group}
        if self.is_one_wave(routing):
            tiles, origins = self._decide(ops, routing)
            named = replace(routing, tiles=tiles)
            # A row's products read what is missing from the host and leave it in the slots.
            through = _is_row(ops, x, self.w13, self.w2, shared13, act_group)
            if not through:
                self._bring_in(ops)
            try:
                if meanwhile is not None:
                    meanwhile()
                if through:
                    first, second = self._stored
                    missing = Missing(first, second, origins)
                    return experts_row(x, named, self.w13, self.w2, limit=limit, missing=missing)
            except BaseException:
                # Whatever ends the pass, the tables say what the slots hold.
                if through:
                    self._bring_in(ops)
                raise
            w13, w2, named = unfold(self.w13, self.w2, named, x.dtype)
            shared = shared13, shared2
            return _at_once(ops, x, named, w13, w2, shared, limit=limit, act_group=act_group)
        self._await_ahead()
        total: Tensor | None = None
        pieces = self._streamed if self.is_dense(routing) else self._waves
        with closing(pieces(ops, routing)) as waves:
            for wave, first, second in waves:
                shared = (shared13, shared2) if total is None else (None, None)
                w13, w2, named = unfold(first, second, wave, x.dtype)
                parts = ops.moe(x, named, w13, w2, *shared, **how)
                # Every pair is in one wave and 0 in the others: no bit depends on the waves.
                total = parts if total is None else total.add_(parts)
        assert total is not None
        return total

    def _decide(self, ops: Ops, routing: Routing) -> tuple[Tensor, Tensor]:
        """Decide on the device, behind what comes ahead; gives tiles that name slots, and origins."""
        joins = self._await_ahead()
        if ops.name == "triton":
            return decide_triton(routing.experts, routing.tiles, self.state, joins=joins)
        return decide_torch(routing.experts, routing.tiles, self.state)

    def _bring_in(self, ops: Ops) -> None:
        """Copy what was decided."""
        copy = bring_in_triton if ops.name == "triton" else bring_in_torch
        copy(self.store, self.slots, self.state)

    def takes_ahead(self, pairs: int) -> bool:
        """Whether experts are brought in ahead of a pass of so many pairs; shapes decide."""
        return self.cache is None and pairs <= self.room

    def bring_ahead(self, ops: Ops, experts: Tensor) -> None:
        """Bring in what the next pass may ask for, int32 [T, k]; it decides as ever."""
        if ops.name == "triton":
            bring_ahead_triton(experts, self.state)
            bring_in_triton(self.store, self.slots, self.state, alone=True)
        else:
            bring_ahead_torch(experts, self.state)
            bring_in_torch(self.store, self.slots, self.state)

    def hold_ahead(self, done: torch.cuda.Event, used: tuple[Tensor, ...]) -> None:
        """Have the next pass wait for what comes ahead; what that uses is kept until then."""
        self._ahead = done, used

    def _await_ahead(self) -> bool:
        """Wait for what comes ahead, if something does."""
        if self._ahead is None:
            return False
        self._await(self._ahead[0])
        self._ahead = None
        return True

    def _named(self, ops: Ops, routing: Routing) -> Routing:
        """The routing with slots instead of experts in its tiles."""
        tiles = routing.tiles.clone()
        slots_of = slots_of_triton if ops.name == "triton" else slots_of_torch
        tiles[:, 0] = slots_of(tiles[:, 0], self.state)
        return replace(routing, tiles=tiles)

    def is_dense(self, routing: Routing) -> bool:
        """Whether a pass is expected to need every expert; shapes decide."""
        pairs = routing.experts.numel()
        return self._stream is not None and pairs >= DENSE_PAIRS * self.num_experts

    def _streamed(self, ops: Ops, routing: Routing) -> Generator[tuple[Routing, Matrix, Matrix]]:
        """Compute residents where they are and all others as they pass; slots keep what they hold.

        Yields as `_waves`. A decode step may have moved experts since the others were asked for, so
        what comes is told from what is resident by the tables of now.
        """
        assert self._stream is not None
        following = self._next
        tables = [self.state.expert_slot]
        if following is not None:
            tables.append(following.state.expert_slot)
        slot_of, *later = (table.tolist() for table in tables)
        absent = [expert for expert, slot in enumerate(slot_of) if slot == ABSENT]
        coming = self._stream.begin(self._number, absent)
        if following is not None:
            ahead = [expert for expert, slot in enumerate(later[0]) if slot == ABSENT]
            self._stream.ahead(following._number, ahead)
        self._count(routing, coming)
        places = [ABSENT if expert in coming else slot for expert, slot in enumerate(slot_of)]
        yield self._placed(ops, routing, places), self.w13, self.w2
        for filled in self._stream.take(self._number):
            places = [ABSENT] * self.num_experts
            for row, expert in enumerate(filled.experts):
                places[expert] = row
            w13, w2 = self.layout.stacks(filled.table)
            yield self._placed(ops, routing, places), w13, w2

    def _count(self, routing: Routing, coming: frozenset[int]) -> None:
        """Count a pass: a wave, what it found resident, and what came for it."""
        wanted = torch.zeros(self.num_experts + 1, dtype=torch.int32, device=self.slots.device)
        wanted[routing.experts.flatten().long()] = 1  # padding in the last place
        found = torch.ones_like(wanted)
        found[list(coming)] = 0
        found[-1] = 0
        self.state.counters[STEP] += 1
        self.state.counters[HITS] += (wanted * found).sum()
        self.state.counters[MISSES] += len(coming)

    def _placed(self, ops: Ops, routing: Routing, places: list[int]) -> Routing:
        """The part of a routing that goes to experts with a place, by places."""
        place = torch.tensor(places, dtype=torch.int32).to(self.slots.device, non_blocking=True)
        kept = (place[routing.experts.clamp(min=0).long()] >= 0) & (routing.experts >= 0)
        experts = torch.where(kept, routing.experts, -1)
        order, tiles, used = ops.group(experts, self.num_experts)
        named = tiles.clone()
        named[:, 0] = torch.where(tiles[:, 0] < 0, -1, place[tiles[:, 0].clamp(min=0).long()])
        return Routing(experts, routing.weights * kept, order, named, used)

    def _waves(self, ops: Ops, routing: Routing) -> Generator[tuple[Routing, Matrix, Matrix]]:
        """Bring a pass's experts in, wave after wave; yields what each computes, with what weights.

        With two slots or more beside pinned experts a wave takes half of them, so that the next one's experts are copied
        while it is computed: least recently used slots are never those of the wave before. Whatever
        ends the pass, the tables say what the slots hold.
        """
        residency = self.read_residency()
        wanted = [e for e in set(routing.experts.flatten().tolist()) if e >= 0]
        overlap = self.room > 1
        size = self.room // 2 if overlap else 1
        if self.cache is not None:
            size = min(size, self.cache.most)
        waves = residency.waves(wanted, size) or [[]]
        self._read_ahead(residency, waves[0])
        ready: torch.cuda.Event | None = None
        try:
            ready = self._copy(residency, waves[0])
            for index, wave in enumerate(waves):
                following = waves[index + 1] if index + 1 < len(waves) else None
                if following:
                    self._read_ahead(residency, following)
                self._await(ready)
                self.write_residency(residency)
                masked = self._masked(ops, routing, wave)
                if following and overlap:
                    ready = self._copy(residency, following)
                yield masked, self.w13, self.w2
                if following and not overlap:
                    ready = self._copy(residency, following)
        finally:
            self._await(ready)
            self.write_residency(residency)

    def _await(self, ready: torch.cuda.Event | None) -> None:
        if ready is not None:
            torch.cuda.current_stream(self.slots.device).wait_event(ready)

    def _read_ahead(self, residency: Residency, wave: Sequence[int]) -> None:
        """Have the host read what a wave misses in the slots, where it keeps a part only."""
        if self.cache is not None:
            self.cache.want([e for e in wave if residency.expert_slot[e] == ABSENT])

    def _masked(self, ops: Ops, routing: Routing, wave: list[int]) -> Routing:
        """The part of a routing that goes to a wave's experts, by slots."""
        inside = torch.zeros(self.num_experts, dtype=torch.bool, device=self.slots.device)
        inside[wave] = True
        kept = inside[routing.experts.clamp(min=0).long()] & (routing.experts >= 0)
        experts = torch.where(kept, routing.experts, -1)
        part = Routing(experts, routing.weights * kept, *ops.group(experts, self.num_experts))
        return self._named(ops, part)

    def _copy(self, residency: Residency, wave: list[int]) -> torch.cuda.Event | None:
        """Start copying what a wave misses; gives what to wait for, None on a CPU."""
        missing = [e for e in wave if residency.expert_slot[e] == ABSENT]
        # Before the tables change, since a file may be gone.
        rows = [self.store[e] for e in missing] if self.cache is None else self.cache.rows(missing)
        source = dict(zip(missing, rows, strict=True))
        moves = residency.bring_in(wave)
        if self._copies is None:
            for move in moves:
                self.slots[move.slot].copy_(source[move.expert])
            return None
        # Slots given up were last read by work that is queued by now.
        self._copies.wait_stream(torch.cuda.current_stream(self.slots.device))
        with torch.cuda.stream(self._copies):
            for move in moves:
                self.slots[move.slot].copy_(source[move.expert], non_blocking=True)
            done: torch.cuda.Event = self._copies.record_event()
        if self.cache is not None:
            self.cache.copied(missing, done)
        return done

    def counts(self) -> tuple[int, int]:
        """Hits and misses so far; waits for the device."""
        found = self.state.counters.tolist()
        return found[HITS], found[MISSES]

    def read_residency(self) -> Residency:
        """Take the device's tables over; waits for the device (J6)."""
        residency = Residency(self.num_experts, self.num_slots)
        residency.slot_expert = self.state.slot_expert.tolist()
        residency.expert_slot = self.state.expert_slot.tolist()
        residency.last_use = self.state.last_use.tolist()
        residency.early = [bool(flag) for flag in self.state.early.tolist()]
        residency.step, residency.hits, residency.misses, _, *more = self.state.counters.tolist()
        residency.ahead, residency.ahead_hits = more
        return residency

    def write_residency(self, residency: Residency) -> None:
        """Give the host's tables to the device."""
        r = residency
        # Sums wrap as the device's own do; the clock of steps, by which slots are ordered, may not.
        sums = [(n + 2**31) % 2**32 - 2**31 for n in (r.hits, r.misses, r.ahead, r.ahead_hits)]
        numbers = [r.step, *sums[:2], 0, *sums[2:]]
        for tensor, values in (
            (self.state.slot_expert, residency.slot_expert),
            (self.state.expert_slot, residency.expert_slot),
            (self.state.last_use, residency.last_use),
            (self.state.early, residency.early),
            (self.state.counters, numbers),
        ):
            tensor.copy_(torch.tensor(values, dtype=torch.int32))

    def check_integrity(self) -> None:
        """Check that each slot has its expert's bytes (J1, J4); reads everything.

        Pinned experts must be in their slots, with the bytes that they were loaded with.

        Raises:
            RuntimeError: one has not; a bug.
        """
        if self.cache is not None:
            self.cache.check_integrity()
        bytes_of = self.store.__getitem__ if self.cache is None else self.cache.bytes_of
        check_slots(self.slots, self.read_residency(), self._sums, bytes_of)


Experts = ResidentExperts | PagedExperts
