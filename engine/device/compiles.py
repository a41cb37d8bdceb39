"""Kernels are made ready at start-up: many at once, and whatever is made ready later is seen."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

from engine.kernels.triton_compat import INTERPRETED, TRITON
from engine.options import usable_cores

logger = logging.getLogger(__name__)


class CompileWatch:
    """Counts kernels that Triton compiles, or loads from its cache on disk.

    Attributes:
        late: names of those made ready after it: a request waited for each.
    """

    def __init__(self) -> None:
        self._compiled: list[str] = []  # lists, since several threads add to them
        self._loaded: list[str] = []
        self.late: list[str] = []
        self._serving = False
        if TRITON and not INTERPRETED:
            import triton

            triton.knobs.compilation.listener = self._saw

    @property
    def compiled(self) -> int:
        """Kernels compiled before `serving` was called."""
        return len(self._compiled)

    @property
    def loaded(self) -> int:
        """Kernels found in the cache before it."""
        return len(self._loaded)

    def serving(self) -> None:
        """From now on each is a gap in the warm-up."""
        self._serving = True

    def _saw(self, *, metadata: dict[str, Any], cache_hit: bool, **_: Any) -> None:
        name = str(metadata.get("name"))
        if self._serving:
            self.late.append(name)
            logger.warning("kernel %s was made ready while serving; a request waited for it", name)
        else:
            (self._loaded if cache_hit else self._compiled).append(name)


@contextmanager
def compiling() -> Iterator[None]:
    """Within, a kernel that is launched is compiled by a thread of its own, and does not run.

    A pass made so needs one compilation's time rather than all of them in a row: the compiler holds
    Python's lock for little of its work. What kernels would have written is whatever lay there, so
    the pass must not read it on the host, index by it or keep it.
    """
    from triton import AsyncCompileMode
    from triton.runtime.jit import KernelInterface

    launch = KernelInterface.__getitem__
    KernelInterface.__getitem__ = lambda kernel, grid: partial(kernel.warmup, grid=grid)
    try:
        with ThreadPoolExecutor(usable_cores()) as threads, AsyncCompileMode(threads):
            yield
    finally:
        KernelInterface.__getitem__ = launch
