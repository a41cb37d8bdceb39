"""Work that is captured once and replayed with one launch: decode steps, by batch size.

A step of n rows runs in the smallest *bucket* that holds them; the rest pads. On a GPU each bucket
is a CUDA graph, captured largest first into one memory pool, so that smaller ones reuse what larger
ones needed. On a CPU a bucket is an eager call over the same buffers with the same padding, so that
faults of padding and bookkeeping show there too.
"""

from __future__ import annotations

import dataclasses
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from engine.api import EngineError
from engine.device.seals import Seals
from engine.kernels.ops import Ops

#: Runs before a capture: kernels are compiled and libraries make their workspaces.
WARM_UPS = 2
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Captured:
    """How one bucket came to be.

    Args:
        bucket: rows.
        seconds: of warm-up and capture.
        pool_bytes: what it added to the graphs' memory pool.
        kernels: operations that ran as fused kernels.
    """

    bucket: int
    seconds: float
    pool_bytes: int
    kernels: frozenset[str]


@contextmanager
def watch(model: Any) -> Iterator[set[str]]:
    """Note which operations of a model run as fused kernels.

    Args:
        model: has `ops`, an engine.kernels.ops.Ops.
    """
    plain: Ops = model.ops
    seen: set[str] = set()

    def spy(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            if run.__name__.endswith("_triton"):
                seen.add(name)
            return run(*args, **kwargs)

        return noted

    names = [field.name for field in dataclasses.fields(plain) if field.name != "name"]
    spies: dict[str, Any] = {name: spy(name, getattr(plain, name)) for name in names}
    model.ops = dataclasses.replace(plain, **spies)
    try:
        yield seen
    finally:
        model.ops = plain


def check_coverage(captured: Sequence[Captured]) -> None:
    """Refuse to start with fused kernels that no bucket uses: switched on, but never run.

    Raises:
        EngineError: no bucket runs one; says what was captured.
    """
    if not any(bucket.kernels for bucket in captured):
        sizes = ", ".join(str(bucket.bucket) for bucket in captured) or "none"
        raise EngineError(
            "fused kernels are switched on, but no captured batch size runs one of them"
            f" (captured: {sizes}); serve with kernels = torch, or report this"
        )


class Capturer:
    """Captures work, one piece after the other, into one memory pool.

    What a piece has freed the next ones use again, so they must run in turn. All on one stream:
    libraries make a workspace for each that they see.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def warm_up(self, work: Callable[[], object]) -> None:
        """Run what is to be captured, so that kernels and libraries are ready."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(WARM_UPS):
                work()
        torch.cuda.current_stream().wait_stream(self._stream)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # else what the warm-up leaves free would be taken for the pool's

    def capture(self, work: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        """Capture work; give the graph, and what the work gave, which lies in the pool."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            found = work()
        return graph, found


def capture_all(
    model: Any,
    buckets: Sequence[int],
    prepare: Callable[[int, Capturer | None], int],
    *,
    captures: bool,
) -> tuple[Captured, ...]:
    """Make buckets ready, largest first, since smaller ones fit into the memory of larger ones.

    Args:
        model: whose operations are watched meanwhile.
        buckets: row counts, ascending.
        prepare: warms up and captures a bucket, or calls it without a capturer; gives the bytes by
            which the pool has grown.
        captures: whether there is a capturer.

    Returns:
        how each came to be, largest first.

    Raises:
        EngineError: fused kernels are switched on and no bucket runs one.
    """
    capturer = Capturer() if captures else None
    found = []
    for bucket in reversed(buckets):
        begin = time.perf_counter()
        with watch(model) as kernels:
            pool_bytes = prepare(bucket, capturer)
        seconds = time.perf_counter() - begin
        found.append(Captured(bucket, seconds, pool_bytes, frozenset(kernels)))
    if model.ops.name == "triton":
        check_coverage(found)
    return tuple(found)


class GraphCache:
    """Runs decode steps by bucket.

    Attributes:
        captured: one for each bucket after `build`, largest first.

    Args:
        body: runs the step over the first n rows of the buffers and gives its logits; no host sync.
        model: whose operations are watched while buckets are captured.
        buckets: row counts.
        seals: of the buffers that the body uses.
        captures: whether to capture CUDA graphs; the body is called otherwise.
        captured_rows: most rows of a bucket that is captured; None for no limit. Larger ones have
            work that the host decides.
        pad: makes all rows of a bucket pad, before it is warmed up; None where they do anyway.
    """

    def __init__(
        self,
        body: Callable[[int], Tensor],
        model: Any,
        buckets: Sequence[int],
        seals: Seals,
        *,
        captures: bool,
        captured_rows: int | None = None,
        pad: Callable[[int], None] | None = None,
    ) -> None:
        self.buckets = tuple(sorted(buckets))
        self.captured: tuple[Captured, ...] = ()
        self._body = body
        self._model = model
        self._captures = captures
        self._most = max(buckets) if captured_rows is None else captured_rows
        self._seals = seals
        self._pad = pad
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}

    def bucket_for(self, count: int) -> int:
        """The smallest bucket of at least `count` rows.

        Raises:
            ValueError: there is none.
        """
        place = bisect_left(self.buckets, count)
        if place == len(self.buckets):
            raise ValueError(f"{count} rows; the largest bucket has {self.buckets[-1]}")
        return self.buckets[place]

    def build(self) -> None:
        """Warm up and capture all buckets; every row pads meanwhile.

        Raises:
            EngineError: fused kernels are switched on and no bucket runs one.
        """
        self.captured = capture_all(
            self._model, self.buckets, self._prepare, captures=self._captures
        )
        self._seals.seal()

    def run(self, bucket: int) -> Tensor:
        """Launch the step over a bucket's rows.

        Returns:
            float32 [bucket, V], its logits; the next run of any bucket overwrites them.
        """
        if not self._is_captured(bucket):
            return self._body(bucket)
        graph, logits = self._graphs[bucket]
        graph.replay()
        return logits

    def _is_captured(self, bucket: int) -> bool:
        return self._captures and bucket <= self._most

    def _prepare(self, bucket: int, capturer: Capturer | None) -> int:
        """Warm up and capture a bucket; give the bytes by which the pool has grown."""
        if self._pad is not None:
            self._pad(bucket)
        if capturer is None or not self._is_captured(bucket):
            self._body(bucket)
            return 0
        capturer.warm_up(lambda: self._body(bucket))
        before: int = torch.cuda.memory_reserved()
        self._graphs[bucket] = capturer.capture(lambda: self._body(bucket))
        return torch.cuda.memory_reserved() - before
