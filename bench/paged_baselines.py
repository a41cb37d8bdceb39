"""Other ways to serve experts that do not fit the GPU, measured on the same machine in the same run.

* "cpu": misses are computed on the CPU by torch, where their weights are: the row goes over, the two
  products run in bfloat16, the result comes back. The step is the resident step plus a miss's time for
  each miss; what leaving the captured step costs is not counted, in its favour, and of several numbers
  of threads the best is taken. Nothing else may run on the host meanwhile.
* "stream": layers that do not fit are copied whole each step, behind the computing of the one
  before: the longer of the resident step and the copies.

llama.cpp is not among them: nothing can be fetched on the machines that were measured.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.nn import functional

from bench.paged_model import PagedBench
from engine.kernels.formats import dequantise


def baselines(
    bench: PagedBench, resident_ms: float, hits: Sequence[float]
) -> Iterator[dict[str, Any]]:
    """Yield a row for each way.

    Args:
        bench: a model with paged layers, at batch 1.
        resident_ms: its step wholly on the GPU, or when nothing misses.
        hits: hit rates to give the first way's figure for.
    """
    asked = bench.per_row * len(bench.paged)
    before = torch.get_num_threads()
    cores = len(os.sched_getaffinity(0))
    counts = sorted({n for n in (4, 8, 16, 32) if n < cores} | {cores})
    found = [(_cpu_miss_ms(bench, count), count) for count in counts]
    torch.set_num_threads(before)
    miss_ms, threads = min(found)
    tried = {str(count): round(ms, 3) for ms, count in found}
    for hit in hits:
        ms = resident_ms + (1 - hit) * asked * miss_ms
        yield _row("cpu", ms, hit_rate=hit, threads=threads, miss_ms_by_threads=tried)
    moved, copy_ms = _stream_ms(bench)
    yield _row("stream", max(resident_ms, copy_ms), copied_gb=round(moved / 1e9, 2))


def _row(way: str, ms: float, **more: Any) -> dict[str, Any]:
    return {
        "bench": "paged_baseline",
        "way": way,
        "ms_step_mean": round(ms, 3),
        "tok_s": round(1e3 / ms, 2),
        **more,
    }


def _cpu_miss_ms(bench: PagedBench, threads: int) -> float:
    """Milliseconds of one missed expert computed on the CPU, transfers of the row included."""
    torch.set_num_threads(threads)
    paged = bench.paged[len(bench.paged) // 2]
    w13, w2 = paged.layout.stacks(paged.store)
    x = torch.randn(1, w13.shape[-1], device="cuda", dtype=torch.bfloat16)
    weights = [tuple(dequantise(w[e], x.dtype) for w in (w13, w2)) for e in range(32)]
    times = []
    for repeat in range(3):  # other experts each time, so that no cache holds them
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for first, second in weights:
            gate, up = functional.linear(x.cpu(), first).chunk(2, -1)
            functional.linear(functional.silu(gate) * up, second).cuda()
        torch.cuda.synchronize()
        if repeat:
            times.append((time.perf_counter() - begin) * 1e3 / len(weights))
    return min(times)


def _stream_ms(bench: PagedBench) -> tuple[int, float]:
    """Bytes of the layers that do not fit beside the slots' memory, and the time to copy them."""
    room = sum(p.slots.nbytes for p in bench.paged)
    whole = bench.paged[0].store.nbytes
    left = bench.paged[int(room // whole) :]
    scratch = torch.empty(whole, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for paged in left:
        scratch.copy_(paged.store.view(-1), non_blocking=True)
    torch.cuda.synchronize()
    return len(left) * whole, (time.perf_counter() - begin) * 1e3
