"""Host memory that a GPU reads: an anonymous mapping of our own, registered with the driver.

The framework's pinned allocator rounds sizes up to powers of two, which for a store of 80 GB may
cost another 48. A mapping costs what it holds. Pages are touched in pieces by several threads, since
the kernel's zeroing of pages is what takes the time (issue 7).
"""

from __future__ import annotations

import contextlib
import mmap
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from engine.api import EngineError

#: Bytes one thread touches at a time.
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
        threads: how many touch pieces at once.

    Raises:
        EngineError: the host cannot give or pin the memory.
    """

    def __init__(self, nbytes: int, *, pin: bool, threads: int = 16) -> None:
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
        # Threads fill it, and inference mode is a thread's own: its tensors are nobody else's to write.
        with torch.inference_mode(False):
            self.tensor = torch.frombuffer(self._map, dtype=torch.uint8)[:nbytes]
        if pin:
            begin = time.perf_counter()
            self._pin(threads)
            self.pin_seconds = time.perf_counter() - begin

    def _pin(self, threads: int) -> None:
        """Touch in pieces, then register as one: a copy must not cross two registrations."""
        total = self.tensor.numel()
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(self._touch, range(0, total, PIECE)))
        error = int(_runtime().cudaHostRegister(self.tensor.data_ptr(), total, 0))
        if error:
            raise EngineError(
                f"host memory: pinning {total:,} bytes failed with CUDA error {error}; "
                "expected a limit on locked memory (ulimit -l) and free memory that allow it"
            )
        self._registered.append(self.tensor.data_ptr())

    def _touch(self, first: int) -> None:
        """Have the kernel hand out a piece's pages, which it does when they are first written."""
        self.tensor[first : first + PIECE : _PAGE] = 0

    def close(self) -> None:
        """Take the registration back; the memory goes with the last tensor over it. Idempotent.

        Done by itself when nobody holds this any more.
        """
        _unregister(self._registered)


def _unregister(addresses: list[int]) -> None:
    while addresses:
        _runtime().cudaHostUnregister(addresses.pop())


def _runtime() -> Any:
    """CUDA's runtime as torch binds it."""
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
