"""What paged experts have counted, for /metrics: read at any time, from any thread, without a wait.

The counters lie on the device, where captured steps write them. Every few steps a copy of them is
queued into pinned memory; who asks gets the last one that has arrived. They have 32 bits and wrap, after
days of hits: here their differences are summed up.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from engine.api import ExpertStats
from engine.kernels.paging import AHEAD, AHEAD_HITS, COUNTERS, HITS, MISSES, STEP
from engine.model.experts import PagedExperts

#: Steps from one copy of the counters to the next.
EVERY = 16
#: Copies after which one is taken over, whoever reads: far fewer than a counter needs to come round.
_TAKEN = 4096
_WRAP = 2**32
_SUMS = (STEP, HITS, MISSES, AHEAD, AHEAD_HITS)


class ExpertCounts:
    """Counters of all paged layers.

    Args:
        paged: experts of these layers.
        device: where they count.
    """

    def __init__(self, paged: Sequence[PagedExperts], device: torch.device) -> None:
        self._paged = paged
        self._on_gpu = device.type == "cuda"
        self._steps = 0
        shape = len(paged), COUNTERS
        self._seen = torch.zeros(shape, dtype=torch.int32, pin_memory=self._on_gpu)
        self._lock = threading.Lock()  # of both below
        self._last = self._seen.tolist()
        self._totals = self._seen.tolist()

    def begin(self) -> None:
        """Count from now on: what was done so far was for nobody. Waits for the device."""
        self.settle()
        with self._lock:
            self._last = self._seen.tolist()
            self._totals = [[0] * COUNTERS for _ in self._paged]

    def step(self) -> None:
        """Note that a step was queued."""
        self._steps += 1
        if not self._paged or self._steps % EVERY:
            return
        if self._steps % (EVERY * _TAKEN) == 0:
            self._read()
        self._seen.copy_(self._now(), non_blocking=True)

    def settle(self) -> None:
        """Wait for the device, so that all it has done is counted."""
        if self._paged:
            self._seen.copy_(self._now())

    def read(self) -> ExpertStats:
        """Add the layers up, as of at most EVERY steps ago on a GPU."""
        rows = self._read()
        moved = sum(
            one.layout.nbytes * (row[MISSES] + row[AHEAD])
            for one, row in zip(self._paged, rows, strict=True)
        )
        return ExpertStats(
            hits=sum(row[HITS] for row in rows),
            misses=sum(row[MISSES] for row in rows),
            bytes_copied=moved,
            waves=sum(row[STEP] for row in rows),
            prefetched=sum(row[AHEAD] for row in rows),
            prefetch_hits=sum(row[AHEAD_HITS] for row in rows),
        )

    def by_layer(self) -> list[tuple[int, int]]:
        """Hits and misses of each layer, as of when `read` is."""
        return [(row[HITS], row[MISSES]) for row in self._read()]

    def _now(self) -> Tensor:
        return torch.stack([one.state.counters for one in self._paged])

    def _read(self) -> list[list[int]]:
        """Take over what was counted since the last reading; gives all of it, [layers][COUNTERS]."""
        if not self._paged:
            return []
        with self._lock:
            now = (self._seen if self._on_gpu else self._now()).tolist()
            for total, last, counts in zip(self._totals, self._last, now, strict=True):
                for place in _SUMS:
                    total[place] += (counts[place] - last[place]) % _WRAP
            self._last = now
            return [list(total) for total in self._totals]
