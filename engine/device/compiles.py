"""Sees kernels that are compiled while requests wait: all are meant to be compiled at start-up."""

from __future__ import annotations

import logging
from typing import Any

from engine.kernels.triton_compat import INTERPRETED, TRITON

logger = logging.getLogger(__name__)


class CompileWatch:
    """Counts kernels that Triton makes ready, and says so once start-up is over.

    Attributes:
        at_start: names of those made ready before `serving`.
        late: names of those after it: somebody waited for each.
    """

    def __init__(self) -> None:
        self.at_start: list[str] = []
        self.late: list[str] = []
        self._serving = False
        if TRITON and not INTERPRETED:
            import triton

            triton.knobs.runtime.jit_post_compile_hook = self._saw

    def serving(self) -> None:
        """From now on a compile is a fault of the warm-up."""
        self._serving = True

    def _saw(self, **about: Any) -> None:
        name = str(about["fn"].name)
        if not self._serving:
            self.at_start.append(name)
            return
        self.late.append(name)
        logger.warning("kernel %s was compiled while serving; a request waited for it", name)
