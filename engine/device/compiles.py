"""Sees kernels made ready while requests wait: all are meant to be made ready at start-up."""

from __future__ import annotations

import logging
from typing import Any

from engine.kernels.triton_compat import INTERPRETED, TRITON

logger = logging.getLogger(__name__)


class CompileWatch:
    """Counts kernels that Triton compiles, or loads from its cache on disk.

    Attributes:
        compiled: kernels compiled before `serving` was called.
        loaded: kernels found in the cache before it.
        late: names of those made ready after it: a request waited for each.
    """

    def __init__(self) -> None:
        self.compiled = self.loaded = 0
        self.late: list[str] = []
        self._serving = False
        if TRITON and not INTERPRETED:
            import triton

            triton.knobs.compilation.listener = self._saw

    def serving(self) -> None:
        """From now on each is a gap in the warm-up."""
        self._serving = True

    def _saw(self, *, metadata: dict[str, Any], cache_hit: bool, **_: Any) -> None:
        if self._serving:
            name = str(metadata.get("name"))
            self.late.append(name)
            logger.warning("kernel %s was made ready while serving; a request waited for it", name)
        elif cache_hit:
            self.loaded += 1
        else:
            self.compiled += 1
