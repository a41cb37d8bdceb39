"""What paged experts have counted, for /metrics: read at any time, from any thread, without a wait.

The counters lie on the device, where captured steps write them. Every few steps a copy of them is
queued into pinned memory; who asks gets the last one that has arrived.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.api import ExpertStats
from engine.kernels.paging import AHEAD, AHEAD_HITS, COUNTERS, HITS, MISSES, STEP
from engine.model.experts import PagedExperts

#: Steps from one copy of the counters to the next.
EVERY = 16


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

    def step(self) -> None:
        """Note that a step was queued."""
        self._steps += 1
        if self._paged and self._steps % EVERY == 0:
            self._seen.copy_(self._now(), non_blocking=True)

    def _now(self) -> Tensor:
        return torch.stack([one.state.counters for one in self._paged])

    def read(self) -> ExpertStats:
        """Add the layers up, as of at most EVERY steps ago on a GPU."""
        if not self._paged:
            return ExpertStats()
        rows = (self._seen if self._on_gpu else self._now()).tolist()
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
