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

_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def dot(a, b, acc):
    """Add a @ b to acc [M, N] float32; a, b: tiles of bfloat16, or float32 (no TF32).

    The interpreter keeps bfloat16 as bit patterns and would multiply those.
    """
    if _INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def cast(x, dtype: tl.constexpr):
    """Give a float32 tile in float32 or bfloat16, rounded to nearest even.

    The interpreter cuts the bits off, and so it does when a store converts.
    """
    if _INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        bits = bits + 0x7FFF + ((bits >> 16) & 1)
        x = (bits & -65536).to(tl.float32, bitcast=True)
    return x.to(dtype)


__all__ = ["INTERPRETED", "TRITON", "cast", "dot", "tl", "triton"]
