"""How a kernel is timed: as it runs in service, from a graph and with weights that are not cached."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch

#: Read bandwidth and bfloat16 rate of one H200, measured on it (bytes/s, FLOP/s).
BANDWIDTH = 4.43e12
RATE = 790e12
#: Bytes that one round of calls must touch, so that the level-2 cache (60 MB) serves none of it.
COLD = 200e6


def copies(nbytes: int, most: int = 64) -> int:
    """How many copies of operands of `nbytes` make a round that no cache holds."""
    return max(2, min(most, -(-int(COLD) // max(nbytes, 1))))


def replayed_us(calls: Sequence[Callable[[], object]], repeats: int = 15) -> float:
    """Median microseconds per call of a CUDA graph that makes all calls in turn.

    Args:
        calls: each on operands of its own.
        repeats: replays timed.
    """
    calls[0]()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [call() for call in calls]
    times: list[float] = []
    for _ in range(repeats + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(calls))
    del kept
    return statistics.median(times[2:])
