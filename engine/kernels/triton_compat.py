"""The one place that imports Triton; a machine without it runs the torch twins.

`TRITON` says whether kernels can be defined at all, `INTERPRETED` whether they run on the CPU, in
Triton's interpreter (slow; for tests), which knows no inline assembly.
"""

from __future__ import annotations

import importlib.util
import os

TRITON = importlib.util.find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

if TRITON:
    import triton
    import triton.language as tl
else:  # pragma: no cover

    class _Absent:
        """Lets kernel modules be imported: decorators give the function back unchanged."""

        def __getattr__(self, name: str) -> _Absent:
            return self

        def __call__(self, *args: object, **kwargs: object) -> object:
            return args[0] if args and callable(args[0]) else self

    triton = tl = _Absent()

__all__ = ["INTERPRETED", "TRITON", "tl", "triton"]
