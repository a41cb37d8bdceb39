"""Host memory that a GPU reads: an anonymous mapping of our own, registered with the driver.

The framework's pinned allocator rounds sizes up to powers of two, which for a store of 80 GB may
cost another 48. A mapping costs what it holds, and ranges that nobody needs, *holes*, cost nothing: their
addresses are there, their pages are not. Pages are touched in pieces by several threads, since
the kernel's zeroing of pages is what takes the time (issue 7).
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from engine.api import EngineError

#: Bytes one thread touches at a time.
PIECE = 1 << 27
_PAGE = 4096
_HUGE = 1 << 21


class HostBuffer:
    """Bytes on the host, pinned if a GPU is to read them.

    Attributes:
        tensor: uint8 [nbytes]; neither to be read nor written within holes.
        held: ranges (begin, end) that have memory, in order; multiples of a page, but for the end.
        pin_seconds: time that touching and registering took; 0.0 if not pinned.

    Args:
        nbytes: size.
        pin: whether to register it with the CUDA driver.
        threads: how many touch pieces at once.
        holes: ranges (begin, end) of bytes that are not needed, in order and apart; whole pages
            within them have no memory and are not registered.

    Raises:
        EngineError: the host cannot give or pin the memory.
    """

    def __init__(
        self,
        nbytes: int,
        *,
        pin: bool,
        threads: int = 16,
        holes: Sequence[tuple[int, int]] = (),
    ) -> None:
        self.held = _between(nbytes, holes)
        self.pin_seconds = 0.0
        self._registered: list[int] = []
        # Memory that is unmapped while the driver still knows it cannot be registered again.
        self._end = weakref.finalize(self, _unregister, self._registered)
        self._end.atexit = False
        try:
            self._map = mmap.mmap(-1, max(nbytes, 1))
        except OSError as error:
            raise EngineError(f"host memory: {nbytes:,} bytes asked for: {error}") from None
        with contextlib.suppress(AttributeError, OSError):  # far fewer pages to hand out
            self._map.madvise(mmap.MADV_HUGEPAGE)
            for (_, hole), (end, _) in itertools.pairwise([(0, 0), *self.held, (nbytes, nbytes)]):
                self._keep_small(hole, end)
        # Threads fill it, and inference mode is a thread's own: its tensors are nobody else's to write.
        with torch.inference_mode(False):
            self.tensor = torch.frombuffer(self._map, dtype=torch.uint8)[:nbytes]
        if pin:
            begin = time.perf_counter()
            self._pin(threads)
            self.pin_seconds = time.perf_counter() - begin

    @property
    def nbytes(self) -> int:
        """Bytes that have memory."""
        return sum(end - begin for begin, end in self.held)

    def _keep_small(self, begin: int, end: int) -> None:
        """Ask for small pages around a hole: a huge one that is touched beside it would fill it."""
        if begin < end:
            first = begin // _HUGE * _HUGE
            last = min(-(-end // _HUGE) * _HUGE, len(self._map))
            self._map.madvise(mmap.MADV_NOHUGEPAGE, first, last - first)

    def _pin(self, threads: int) -> None:
        """Touch in pieces, then register each range as one: a copy must not cross two of them."""
        pieces = [
            (first, min(first + PIECE, end))
            for begin, end in self.held
            for first in range(begin, end, PIECE)
        ]
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(lambda piece: self._touch(*piece), pieces))
        for begin, end in self.held:
            address = self.tensor.data_ptr() + begin
            error = int(_runtime().cudaHostRegister(address, end - begin, 0))
            if error:
                raise EngineError(
                    f"host memory: pinning {end - begin:,} bytes failed with CUDA error {error}; "
                    "expected a limit on locked memory (ulimit -l) and free memory that allow it"
                )
            self._registered.append(address)

    def _touch(self, begin: int, end: int) -> None:
        """Have the kernel hand out a piece's pages, which it does when they are first written."""
        self.tensor[begin:end:_PAGE] = 0

    def close(self) -> None:
        """Take the registration back; the memory goes with the last tensor over it. Idempotent.

        Done by itself when nobody holds this any more.
        """
        _unregister(self._registered)


def _between(nbytes: int, holes: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ranges between the whole pages of holes; holes that touch are one."""
    joined: list[tuple[int, int]] = []
    for begin, end in holes:
        if joined and joined[-1][1] == begin:
            begin = joined.pop()[0]
        joined.append((begin, end))
    held, first = [], 0
    for begin, end in joined:
        begin = -(-begin // _PAGE) * _PAGE
        end = end // _PAGE * _PAGE if end < nbytes else nbytes
        if begin < end:
            held.append((first, begin))
            first = end
    held.append((first, nbytes))
    return [(begin, end) for begin, end in held if begin < end]


def _unregister(addresses: list[int]) -> None:
    while addresses:
        _runtime().cudaHostUnregister(addresses.pop())


def _runtime() -> Any:
    """CUDA's runtime as torch binds it."""
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
