"""How many GPU slots each layer's experts get: the solver behind `bathyal engine plan --paged`.

A layer either has all E experts on the GPU and none on the host, or K slots on the GPU and all E on
the host. Without a trace all paged layers get the same. What K is worth in a layer follows from the routing that was recorded: one pass over it
gives the hits of a least-recently-used table of every size at once (stack distances). Pure integers
(issue 7).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from engine.api import EngineError


@dataclass(frozen=True, slots=True)
class SlotPlan:
    """Slots of every layer.

    Args:
        slots: K of each layer; E for a layer that is wholly on the GPU.
        num_experts: E.
        misses: experts that would have been brought in, over the recorded routing.
        lookups: experts that were asked for.
    """

    slots: tuple[int, ...]
    num_experts: int
    misses: int
    lookups: int

    @property
    def gpu_experts(self) -> int:
        """Experts that lie on the GPU."""
        return sum(self.slots)

    @property
    def host_experts(self) -> int:
        """Experts that lie on the host."""
        return self.num_experts * sum(k < self.num_experts for k in self.slots)

    @property
    def hit_rate(self) -> float:
        """Share of the recorded lookups that would have been hits; 1.0 for none."""
        return 1.0 - self.misses / self.lookups if self.lookups else 1.0


def lru_hits(steps: Sequence[Sequence[int]], num_experts: int) -> list[int]:
    """Hits of a least-recently-used table of every size.

    Args:
        steps: experts asked for in each step; those of one step count as asked for at once, so an
            expert's distance is the number of others since the step it was last in (a table
            breaks ties within a step by slot, so that its count may differ a little).
        num_experts: E; ids are below.

    Returns:
        E + 1 counts; entry K is that of K slots. The first time an expert is asked for is a miss
        for every size below E, and a hit for E, where it lies on the GPU from the start.
    """
    order: list[int] = []  # most recently used first
    distances = [0] * (num_experts + 1)
    total = 0
    for step in steps:
        distinct = list(dict.fromkeys(step))
        total += len(distinct)
        for expert in distinct:
            if expert in order:
                distances[order.index(expert) + 1] += 1
        order = distinct + [e for e in order if e not in set(distinct)]
    hits, seen = [], 0
    for size in range(num_experts + 1):
        seen += distances[size]
        hits.append(seen)
    hits[num_experts] = total
    return hits


def solve(
    routing: Sequence[Sequence[Sequence[int]]],
    *,
    num_experts: int,
    per_row: int,
    gpu_experts: int,
    host_experts: int,
) -> SlotPlan:
    """Give every layer its slots so that the recorded routing misses least.

    Layers that the host has no room for are wholly on the GPU; among the rest, one slot after the
    other goes where it saves most.

    Args:
        routing: per layer the experts asked for in each step.
        num_experts: E.
        per_row: k, the least K: a row's experts must be resident together.
        gpu_experts: experts that the GPU has room for.
        host_experts: experts that the host has room for.

    Raises:
        EngineError: they do not fit together; says what is missing.
    """
    curves = [lru_hits(steps, num_experts) for steps in routing]
    layers = len(curves)
    lookups = sum(curve[-1] for curve in curves)
    most_paged = _most_paged(layers, num_experts, per_row, gpu_experts, host_experts)
    best: SlotPlan | None = None
    # Layers whose misses at the same share of slots are most are kept whole first.
    share = max(per_row, gpu_experts // max(layers, 1))
    worth = sorted(range(layers), key=lambda i: curves[i][min(share, num_experts)] - curves[i][-1])
    for whole in range(layers - most_paged, layers + 1):
        left = gpu_experts - whole * num_experts - (layers - whole) * per_row
        if left < 0:
            break
        slots = [per_row] * layers
        for layer in worth[:whole]:
            slots[layer] = num_experts
        _spend(curves, slots, left, num_experts)
        hits = sum(curve[k] for curve, k in zip(curves, slots, strict=True))
        if best is None or lookups - hits < best.misses:
            best = SlotPlan(tuple(slots), num_experts, lookups - hits, lookups)
    assert best is not None
    return best


def even(
    layers: int, *, num_experts: int, per_row: int, gpu_experts: int, host_experts: int
) -> SlotPlan:
    """Give every paged layer as many slots as the next: what can be said without a trace.

    Layers that the host has no room for are whole, the first ones; where all could be, all are.

    Args:
        layers: L.
        num_experts: as in solve.
        per_row: as in solve.
        gpu_experts: as in solve.
        host_experts: as in solve.

    Returns:
        slots; misses and lookups are 0, since nothing was recorded.

    Raises:
        EngineError: as in solve.
    """
    most_paged = _most_paged(layers, num_experts, per_row, gpu_experts, host_experts)
    whole = layers - most_paged
    left = gpu_experts - whole * num_experts
    each = min(num_experts, left // most_paged) if most_paged else 0
    return SlotPlan((num_experts,) * whole + (each,) * most_paged, num_experts, 0, 0)


def _most_paged(
    layers: int, num_experts: int, per_row: int, gpu_experts: int, host_experts: int
) -> int:
    """Layers that the host has room for.

    Raises:
        EngineError: the GPU has none for the others and the least slots of these.
    """
    most_paged = min(layers, host_experts // num_experts)
    least = (layers - most_paged) * num_experts + most_paged * per_row
    if gpu_experts < least:
        raise EngineError(
            f"experts: {layers} layers of {num_experts}: expected room on the GPU for {least} "
            f"({layers - most_paged} whole layers, {per_row} slots in each of {most_paged}), got "
            f"{gpu_experts}; the host has room for {host_experts}"
        )
    return most_paged


def _spend(curves: Sequence[Sequence[int]], slots: list[int], left: int, num_experts: int) -> None:
    """Hand out slots where each saves most; a step may be several slots where one saves nothing."""
    heap = [
        step
        for layer, k in enumerate(slots)
        if (step := _step(curves[layer], k, layer, num_experts))
    ]
    heapq.heapify(heap)
    while heap:
        _, layer, size = heapq.heappop(heap)
        if size > left:
            continue
        slots[layer] += size
        left -= size
        following = _step(curves[layer], slots[layer], layer, num_experts)
        if following:
            heapq.heappush(heap, following)


def _step(
    curve: Sequence[int], k: int, layer: int, num_experts: int
) -> tuple[float, int, int] | None:
    """Best next step of a layer: (minus hits a slot, layer, slots); None at the last paged size."""
    gains = [
        ((curve[k] - curve[more]) / (more - k), layer, more - k)
        for more in range(k + 1, num_experts)
    ]
    return min(gains, default=None)
