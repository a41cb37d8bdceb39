"""Disk as the third tier: the host keeps the experts of a layer used last, files have them all.

For stores that exceed the host too. The checkpoint's own safetensors are the store: mapped, and read
expert by expert into pinned rows by one thread, ahead of the wave that needs them where waves
follow each other. Which expert has which row is `Residency` again, with rows in place of slots: what
a wave needs and what the wave before needs is never given up (issue 7).

What it costs: a layer whose host has no room for all of its experts decides on the host what to
bring in, so its steps are not captured; and a miss of both tables waits for the disk.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from torch import Tensor

from engine.kernels.formats import Matrix
from engine.model.hostmem import HostBuffer
from engine.plan.residency import Residency

if TYPE_CHECKING:
    from engine.model.expert_layout import ExpertLayout

#: One expert's matrices, on the host.
Read = Callable[[int], tuple[Matrix, ...]]

#: What reads for all layers, while one of them is there.
_shared: WeakValueDictionary[str, ThreadPoolExecutor] = WeakValueDictionary()


def _reader() -> ThreadPoolExecutor:
    """Give one thread for all layers, which ends with the last of them.

    A disk gains little from more, and reads stay in the order of need.
    """
    found = _shared.get("reader")
    if found is None:
        found = ThreadPoolExecutor(1, thread_name_prefix="bathyal-experts")
        _shared["reader"] = found
    return found


@dataclass(slots=True)
class DiskFigures:
    """What a layer's disk tier has done.

    Args:
        hits: experts that were found on the host.
        reads: experts read from files.
        read_seconds: time that reading took, in the thread.
        wait_seconds: time a step waited for it.
    """

    hits: int = 0
    reads: int = 0
    read_seconds: float = 0.0
    wait_seconds: float = 0.0

    @property
    def told(self) -> str:
        """The same in words, for a log."""
        return (
            f"{self.hits} found on the host, {self.reads} read from files in {self.read_seconds:.2f} s,"
            f" for which steps waited {self.wait_seconds:.2f} s"
        )


class HostCache:
    """Some of a layer's experts on the host, in rows of one pinned buffer.

    Attributes:
        table: uint8 [rows, bytes of an expert].
        figures: what it has done.

    Args:
        layout: of an expert's bytes.
        read: gives one expert from the files.
        count: experts of the layer.
        rows: experts the host keeps, 2 at least.
        pin: whether a GPU copies from the rows.
        without: experts that are pinned to the device: nobody asks for them, no row has them.
    """

    def __init__(
        self,
        layout: ExpertLayout,
        read: Read,
        count: int,
        rows: int,
        *,
        pin: bool,
        without: Collection[int] = (),
    ) -> None:
        self._layout = layout
        self._read = read
        self._buffer = HostBuffer(rows * layout.nbytes, pin=pin)
        self.table = self._buffer.tensor.view(rows, layout.nbytes)
        self._residency = Residency(count, rows, never=without)
        self._reader = _reader()
        self._coming: dict[int, Future[None]] = {}
        self._busy: dict[int, Any] = {}  # row -> event after which nobody copies from it
        self.figures = DiskFigures()
        for row, expert in enumerate(self._residency.slot_expert):
            layout.write(self.table[row], read(expert))

    @property
    def most(self) -> int:
        """Most experts of a wave: those of the next one come while it is copied."""
        return len(self.table) // 2

    @property
    def nbytes(self) -> int:
        """Bytes on the host."""
        return self._buffer.nbytes

    @property
    def pin_seconds(self) -> float:
        """Time that pinning the rows took."""
        return self._buffer.pin_seconds

    def want(self, experts: Sequence[int]) -> None:
        """Have experts come, at most `most`; what the last call asked for stays as well."""
        held = self._residency
        for move in held.bring_in(experts):
            self._start(move.expert, move.slot)
        for expert in experts:  # a read that failed is tried again
            before = self._coming.get(expert)
            if before is not None and before.done() and before.exception() is not None:
                self._start(expert, held.expert_slot[expert])
        self.figures.hits = held.hits

    def rows(self, experts: Sequence[int]) -> list[Tensor]:
        """Give the bytes of experts that were asked for, when they have come.

        Raises:
            OSError: a file could not be read.
        """
        begin = time.perf_counter()
        for expert in experts:
            coming = self._coming.get(expert)
            if coming is not None:
                coming.result()
                del self._coming[expert]
        self.figures.wait_seconds += time.perf_counter() - begin
        return [self.table[self._residency.expert_slot[expert]] for expert in experts]

    def copied(self, experts: Sequence[int], event: Any) -> None:
        """Note that copies from experts' rows end with an event of the device."""
        for expert in experts:
            self._busy[self._residency.expert_slot[expert]] = event

    def bytes_of(self, expert: int) -> Tensor:
        """Bytes of one expert as the files have them, for checks."""
        row = self.table.new_empty(self._layout.nbytes)
        self._layout.write(row, self._read(expert))
        return row

    def check_integrity(self) -> None:
        """Check that every row that has come holds its expert's bytes; reads everything.

        Raises:
            RuntimeError: one does not; a bug.
        """
        self._residency.check_integrity()
        for row, expert in enumerate(self._residency.slot_expert):
            coming = self._coming.get(expert)
            if coming is not None and (not coming.done() or coming.exception() is not None):
                continue
            if not self.table[row].equal(self.bytes_of(expert)):
                raise RuntimeError(f"host row {row} does not hold the bytes of expert {expert}")

    def _start(self, expert: int, row: int) -> None:
        self._coming[expert] = self._reader.submit(self._fill, expert, row)

    def _fill(self, expert: int, row: int) -> None:
        """Read one expert; in the reading thread, which does one after the other."""
        begin = time.perf_counter()
        busy = self._busy.pop(row, None)
        if busy is not None:
            busy.synchronize()
        self._layout.write(self.table[row], self._read(expert))
        self.figures.reads += 1
        self.figures.read_seconds += time.perf_counter() - begin
