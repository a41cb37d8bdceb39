"""Host memory that a GPU reads: an anonymous mapping of our own, registered with the driver.

The framework's pinned allocator rounds sizes up to powers of two, which for a store of 80 GB may
cost another 48. A mapping costs what it holds. Pages are touched and registered in pieces by several
threads, since the kernel's zeroing of pages is what takes the time (issue 7).
"""

from __future__ import annotations

import mmap
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from engine.api import EngineError

#: Bytes one thread touches and registers at a time.
PIECE = 1 << 27
_PAGE = 4096


class HostBuffer:
    """Bytes on the host, pinned if a GPU is to read them.

    Attributes:
        tensor: uint8 [nbytes].
        pin_seconds: time that touching and registering took; 0.0 if not pinned.

    Args:
        nbytes: size.
        pin: whether to register it with the CUDA driver.
        threads: how many touch and register pieces at once.

    Raises:
        EngineError: the host cannot give or pin the memory.
    """

    def __init__(self, nbytes: int, *, pin: bool, threads: int = 16) -> None:
        self.pin_seconds = 0.0
        self._registered: list[int] = []
        try:
            self._map = mmap.mmap(-1, max(nbytes, 1))
        except OSError as error:
            raise EngineError(f"host memory: {nbytes:,} bytes asked for: {error}") from None
        if hasattr(mmap, "MADV_HUGEPAGE"):  # far fewer pages to hand out and to register
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self.tensor = torch.frombuffer(self._map, dtype=torch.uint8)[:nbytes]
        if pin:
            begin = time.perf_counter()
            self._pin(threads)
            self.pin_seconds = time.perf_counter() - begin

    def _pin(self, threads: int) -> None:
        total = self.tensor.numel()
        with ThreadPoolExecutor(threads) as pool:
            failed = [e for e in pool.map(self._pin_piece, range(0, total, PIECE)) if e]
        if failed:
            self.close()
            raise EngineError(
                f"host memory: pinning {total:,} bytes failed with CUDA error {failed[0]}; "
                "expected a limit on locked memory (ulimit -l) and free memory that allow it"
            )

    def _pin_piece(self, first: int) -> int:
        piece = self.tensor[first : first + PIECE]
        piece[::_PAGE] = 0  # the kernel hands out a page when it is first written
        error = int(_runtime().cudaHostRegister(piece.data_ptr(), piece.numel(), 0))
        if not error:
            self._registered.append(piece.data_ptr())
        return error

    def close(self) -> None:
        """Take the registration back; the memory goes with the last tensor over it. Idempotent."""
        while self._registered:
            _runtime().cudaHostUnregister(self._registered.pop())


def _runtime() -> Any:
    """CUDA's runtime as torch binds it."""
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
