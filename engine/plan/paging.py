"""How many GPU slots each layer's experts get: the solver behind `bathyal engine plan --paged`.

A layer either has all E experts on the GPU and none on the host, or K slots on the GPU and the others
on the host: all E, or all but P that are pinned to slots. Without a trace all paged layers get the same
and nothing is pinned. What K is worth in a layer follows from the routing that was recorded: one pass
over it gives the hits of a least-recently-used table of every size at once (stack distances), and one
more for each P those of a table beside the P experts asked for most often. Pure integers (issue 7).
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from engine.api import EngineError

#: Numbers of pins that are tried in a layer.
PIN_SIZES = 16


@dataclass(frozen=True, slots=True)
class SlotPlan:
    """Slots of every layer.

    Args:
        slots: K of each layer; E for a layer that is wholly on the GPU.
        num_experts: E.
        misses: experts that would have been brought in, over the recorded routing.
        lookups: experts that were asked for.
        pins: experts of each layer that lie in slots for ever, ascending; none without a trace.
    """

    slots: tuple[int, ...]
    num_experts: int
    misses: int
    lookups: int
    pins: tuple[tuple[int, ...], ...] = ()

    @property
    def gpu_experts(self) -> int:
        """Experts that lie on the GPU."""
        return sum(self.slots)

    @property
    def host_experts(self) -> int:
        """Experts that lie on the host."""
        stored = self.num_experts * sum(k < self.num_experts for k in self.slots)
        return stored - self.num_pins

    @property
    def num_pins(self) -> int:
        """Experts that lie in slots for ever."""
        return sum(map(len, self.pins))

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
        now = set(distinct)
        order = distinct + [e for e in order if e not in now]
    hits, seen = [], 0
    for size in range(num_experts + 1):
        seen += distances[size]
        hits.append(seen)
    hits[num_experts] = total
    return hits


def often(steps: Sequence[Sequence[int]], num_experts: int) -> list[int]:
    """All experts, those first that most steps ask for; of equals the lowest."""
    counts = Counter(expert for step in steps for expert in set(step))
    return sorted(range(num_experts), key=lambda e: (-counts[e], e))


def hits_beside_pins(
    steps: Sequence[Sequence[int]], num_experts: int, pins: Sequence[int]
) -> list[int]:
    """Hits of a layer in which some experts are pinned, by K.

    Args:
        steps: as in lru_hits.
        num_experts: E.
        pins: the experts, P of them.

    Returns:
        E counts; entry K is that of K slots, from P on. As in lru_hits the first time that an expert
        is asked for is a miss, of a pinned one, too: what is gained once says nothing of what follows.
    """
    pinned = set(pins)
    counts = Counter(expert for step in steps for expert in set(step))
    found = sum(max(0, counts[expert] - 1) for expert in pins)
    others = lru_hits([[e for e in step if e not in pinned] for step in steps], num_experts)
    return [found + others[k - len(pins)] if k >= len(pins) else 0 for k in range(num_experts)]


class LayerHits:
    """What slots and pinned experts are worth in a layer, by the routing that was recorded.

    Attributes:
        order: experts, those first that would be pinned first.
        sizes: numbers of pins that are tried, ascending.

    Args:
        steps: as in lru_hits.
        num_experts: E.
    """

    def __init__(self, steps: Sequence[Sequence[int]], num_experts: int) -> None:
        self.order = often(steps, num_experts)
        self.sizes = range(0, num_experts, max(1, num_experts // PIN_SIZES))
        self._steps = steps
        self._curves = {0: lru_hits(steps, num_experts)}

    def hits(self, slots: int, pins: int = 0) -> int:
        """Hits with K slots, of which `pins` hold the experts asked for most often."""
        if pins not in self._curves:
            curve = hits_beside_pins(self._steps, len(self.order), self.order[:pins])
            self._curves[pins] = curve
        return self._curves[pins][slots]

    @property
    def curve(self) -> list[int]:
        """Hits by K without pins, E + 1 counts; the last is the number of lookups."""
        return self._curves[0]


def learn(routing: Sequence[Sequence[Sequence[int]]], num_experts: int) -> list[LayerHits]:
    """Give what `solve` goes by: per layer the experts asked for in each step, of E experts."""
    return [LayerHits(steps, num_experts) for steps in routing]


def solve(
    learnt: Sequence[LayerHits],
    *,
    num_experts: int,
    per_row: int,
    gpu_experts: int,
    host_experts: int,
    most_slots: int | None = None,
    beside_pins: int | None = None,
) -> SlotPlan:
    """Give every layer its slots so that the recorded routing misses least.

    Layers that the host has no room for are wholly on the GPU; among the rest, one slot after the
    other goes where it saves most. Then experts asked for most often are pinned: as many as cost no
    hit, and more where the host has no room otherwise, where they cost the fewest.

    Args:
        learnt: of each layer.
        num_experts: E.
        per_row: k, the least K: a row's experts must be resident together.
        gpu_experts: experts that the GPU has room for.
        host_experts: experts that the host has room for.
        most_slots: of a layer that is not whole, k at least; None for no limit.
        beside_pins: slots that pinned experts leave to the others of a layer, k at least; None for
            no pins.

    Raises:
        EngineError: they do not fit together; says what is missing.
    """
    curves = [layer.curve for layer in learnt]
    layers = len(curves)
    lookups = sum(curve[-1] for curve in curves)
    best: SlotPlan | None = None
    # Layers whose misses at the same share of slots are most are kept whole first.
    share = max(per_row, gpu_experts // max(layers, 1))
    worth = sorted(range(layers), key=lambda i: curves[i][min(share, num_experts)] - curves[i][-1])
    for whole in range(layers + 1):
        left = gpu_experts - whole * num_experts - (layers - whole) * per_row
        if left < 0:
            break
        if (layers - whole) * num_experts - (0 if beside_pins is None else left) > host_experts:
            continue
        slots = [per_row] * layers
        for layer in worth[:whole]:
            slots[layer] = num_experts
        _spend(curves, slots, left, min(num_experts - 1, most_slots or num_experts))
        beside = num_experts if beside_pins is None else beside_pins
        over = (layers - whole) * num_experts - host_experts
        counts = _pin(learnt, slots, beside, over, num_experts)
        if counts is None:
            continue
        chosen = list(zip(learnt, slots, counts, strict=True))
        hits = sum(layer.hits(k, count) for layer, k, count in chosen)
        if best is None or lookups - hits < best.misses:
            pins = tuple(tuple(sorted(layer.order[:count])) for layer, _, count in chosen)
            best = SlotPlan(tuple(slots), num_experts, lookups - hits, lookups, pins)
    if best is None:  # says why
        _most_paged(layers, num_experts, per_row, gpu_experts, host_experts)
    assert best is not None
    return best


def _pin(
    layers: Sequence[LayerHits], slots: Sequence[int], beside: int, over: int, num_experts: int
) -> list[int] | None:
    """Say how many experts of each layer are pinned.

    Args:
        layers: what that is worth.
        slots: K of each.
        beside: slots that are left to others at least.
        over: experts more than the host has room for without pins; below 0 where there is room.
        num_experts: E.

    Returns:
        numbers; None if they cannot make up for what the host lacks.
    """
    counts, steps = [], []
    for index, (layer, k) in enumerate(zip(layers, slots, strict=True)):
        sizes = [n for n in layer.sizes if n <= k - beside or n == 0] if k < num_experts else [0]
        count = max(sizes, key=lambda n: (layer.hits(k, n), n))
        counts.append(count)
        for less, more in itertools.pairwise(n for n in sizes if n >= count):
            lost = layer.hits(k, less) - layer.hits(k, more)
            steps.append((lost / (more - less), index, more))
    over -= sum(counts)
    # A layer's numbers rise in order, so that a cheap rise behind a dear one waits for it.
    waiting = {(index, more) for _, index, more in steps}
    while over > 0 and waiting:
        least = {index: min(more for i, more in waiting if i == index) for index, _ in waiting}
        _, index, more = min(step for step in steps if least.get(step[1]) == step[2])
        waiting.remove((index, more))
        over -= more - counts[index]
        counts[index] = more
    return counts if over <= 0 else None


def even(
    layers: int,
    *,
    num_experts: int,
    per_row: int,
    gpu_experts: int,
    host_experts: int,
    most_slots: int | None = None,
) -> SlotPlan:
    """Give every paged layer as many slots as the next: what can be said without a trace.

    Layers that the host has no room for are whole, the first ones; where all could be, all are.

    Args:
        layers: L.
        num_experts: as in solve.
        per_row: as in solve.
        gpu_experts: as in solve.
        host_experts: as in solve.
        most_slots: as in solve.

    Returns:
        slots; misses and lookups are 0, since nothing was recorded.

    Raises:
        EngineError: as in solve.
    """
    most_paged = _most_paged(layers, num_experts, per_row, gpu_experts, host_experts)
    whole = layers - most_paged
    left = gpu_experts - whole * num_experts
    each = min(num_experts, left // most_paged) if most_paged else 0
    if each < num_experts and most_slots is not None:
        each = min(each, most_slots)
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


def _spend(curves: Sequence[Sequence[int]], slots: list[int], left: int, limit: int) -> None:
    """Hand out slots where each saves most, up to `limit` in a layer that has fewer.

    A step may be several where one saves nothing.
    """

    def step(layer: int) -> tuple[float, int, int, int] | None:
        most = min(limit, slots[layer] + left)
        return _step(curves[layer], slots[layer], layer, most)

    heap = [found for layer in range(len(slots)) if (found := step(layer))]
    heapq.heapify(heap)
    while heap:
        _, _, layer, size = heapq.heappop(heap)
        if size <= left:
            slots[layer] += size
            left -= size
        following = step(layer)
        if following:
            heapq.heappush(heap, following)


def _step(
    curve: Sequence[int], k: int, layer: int, most: int
) -> tuple[float, int, int, int] | None:
    """Best next step of a layer: (minus hits a slot, K, layer, slots); None at K = `most`."""
    gains = [
        ((curve[k] - curve[more]) / (more - k), k, layer, more - k)
        for more in range(k + 1, most + 1)
    ]
    return min(gains, default=None)
