"""How much of a prompt's pass runs between two decode steps, so that running streams keep their pace.

A pass over a long chunk takes as long as many decode steps. It yields after every layer, and decode
steps run in between: with a slice of s seconds between steps of d, streams see d + s instead of d.
The host cannot stop a launch to look at a clock, so it works with what it has seen: times of decode
steps and of layers, measured on the device. A layer of few rows takes as long as its weights take to
read, so times are kept by size of the pass, and the first pass of a size runs in single layers. Layers
differ, the first ones are often the shortest; the longer ones count.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

#: Time of a slice, in decode steps: streams get a token every 2.5 steps at worst, in the model.
SHARE = 1.5
#: Weight of the newest measurement, and of a layer that is shorter than those before.
NEWEST, SHORTER = 0.3, 0.1


class SlicePolicy:
    """Times of decode steps and layers, and the number of layers that follow from them.

    Args:
        share: time of a slice, in decode steps.
    """

    def __init__(self, share: float = SHARE) -> None:
        self._share = share
        self._step: float | None = None  # seconds of a decode step
        self._layer: dict[int, float] = {}  # seconds of a layer, by bits of the number of rows
        self._seen: set[int] = set()  # sizes of passes of which all layers were seen

    def saw_step(self, seconds: float) -> None:
        """Learn from a decode step."""
        self._step = _smooth(self._step, seconds)

    def saw_slice(self, num_rows: int, layers: int, seconds: float) -> None:
        """Learn from some layers over a pass of so many rows."""
        size, layer = num_rows.bit_length(), seconds / layers
        before = self._layer.get(size, layer)
        self._layer[size] = max(layer, before + SHORTER * (layer - before))

    def saw_pass(self, num_rows: int) -> None:
        """Learn that all layers of a pass of so many rows have been seen."""
        self._seen.add(num_rows.bit_length())

    def layers(self, num_rows: int) -> int:
        """Layers of a pass of so many rows to run before the next decode step; at least one."""
        size = num_rows.bit_length()
        layer = self._layer.get(size)
        if self._step is None or not layer or size not in self._seen:
            return 1
        return max(1, int(self._share * self._step / layer))


@dataclass(frozen=True, slots=True)
class _Timing:
    begin: Any
    end: Any
    tell: Callable[[float], None]


class Stopwatch:
    """Times work on the device without waiting for it.

    Args:
        device: whose clock.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._running: deque[_Timing] = deque()

    def time(self, work: Callable[[], Any], tell: Callable[[float], None]) -> Any:
        """Do work that may only be launched by it.

        Args:
            work: what to time.
            tell: told the seconds by a later `collect`.

        Returns:
            what the work gave.
        """
        begin = self._mark()
        found = work()
        self._running.append(_Timing(begin, self._mark(), tell))
        return found

    def collect(self) -> None:
        """Tell what is known by now."""
        while self._running:
            timing = self._running[0]
            if self._on_gpu:
                if not timing.end.query():
                    return
                seconds = timing.begin.elapsed_time(timing.end) / 1e3
            else:
                seconds = timing.end - timing.begin
            self._running.popleft()
            timing.tell(seconds)

    def _mark(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


def _smooth(before: float | None, now: float) -> float:
    return now if before is None else before + NEWEST * (now - before)
