"""Number formats: e4m3, e2m1 and ue8m0, as tables, and what a value becomes when stored in them.

A round trip is "quantise, store, read back". Rounding is to nearest with ties to the even code,
beyond the largest value it saturates.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def _e4m3(code: int) -> float:
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = (code >> 3) & 0xF, code & 0x7
    if exponent == 0xF and mantissa == 0x7:
        return math.nan
    if exponent == 0:
        return sign * (mantissa / 8) * 2.0**-6
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


E4M3 = np.array([_e4m3(code) for code in range(256)])
E4M3_MAGNITUDES = E4M3[:127]  # 0 ... 448, ascending; code 127 is NaN
E2M1_MAGNITUDES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
E2M1 = np.concatenate([E2M1_MAGNITUDES, -E2M1_MAGNITUDES])  # bit 3 is the sign


def ue8m0(code: NDArray[np.uint8]) -> Array:
    """Scale bytes to scales: e means 2^(e - 127)."""
    return 2.0 ** (code.astype(np.float64) - 127)


def unpack_e2m1(packed: NDArray[np.uint8]) -> Array:
    """Bytes [..., K/2] to values [..., K]; the low nibble is the even input index."""
    out = np.empty((*packed.shape[:-1], packed.shape[-1] * 2))
    out[..., 0::2] = E2M1[packed & 0xF]
    out[..., 1::2] = E2M1[packed >> 4]
    return out


def to_nearest(x: Array, magnitudes: Array) -> Array:
    """The nearest of ±magnitudes; halfway goes to the even code, too large to the largest."""
    size, halfway = np.abs(x), (magnitudes[:-1] + magnitudes[1:]) / 2
    lower = halfway.searchsorted(size, side="left")
    upper = halfway.searchsorted(size, side="right")  # one more at a tie, else the same
    return np.copysign(magnitudes[np.where(lower % 2 == 0, lower, upper)], x)


def to_e4m3(x: Array) -> Array:
    """By way of float32: no value is wider when it is quantised, and torch's cast from float64
    goes the same way, which decides what lies within float32's rounding of a halfway point."""
    return to_nearest(x.astype(np.float32).astype(np.float64), E4M3_MAGNITUDES)


def to_e2m1(x: Array) -> Array:
    return to_nearest(x, E2M1_MAGNITUDES)


def power_of_two_at_least(x: Array) -> Array:
    mantissa, exponent = np.frexp(x)  # x = mantissa * 2^exponent, mantissa in [0.5, 1)
    return np.ldexp(1.0, np.where(mantissa == 0.5, exponent - 1, exponent))


def hadamard(n: int) -> Array:
    """Orthonormal Hadamard matrix [n, n] in Sylvester's order; n is a power of two."""
    h = np.ones((1, 1))
    while len(h) < n:
        h = np.block([[h, h], [h, -h]])
    if len(h) != n:
        raise ValueError(f"a Hadamard matrix needs a power of two, got {n}")
    return h / math.sqrt(n)


class RoundTrips:
    """What storing a vector does to it; groups are of the last axis, the last one may be short.

    Args:
        enabled: whether storing changes anything.
    """

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled

    def fp8(self, x: Array, group: int) -> Array:
        """e4m3 with a power-of-two scale per group; amax floored at 1e-4."""
        return self._by_group(
            x, group, to_e4m3, lambda amax: power_of_two_at_least(np.maximum(amax, 1e-4) / 448)
        )

    def fp4(self, x: Array, group: int) -> Array:
        """e2m1 with a power-of-two scale per group; the floor only keeps zeros from dividing."""
        return self._by_group(
            x, group, to_e2m1, lambda amax: power_of_two_at_least(np.maximum(amax, 1e-30) / 6)
        )

    def fp4_e4m3(self, x: Array) -> Array:
        """e2m1 with an e4m3 scale per 16 values; amax floored at 6 times the least e4m3, 2^-9."""
        return self._by_group(
            x, 16, to_e2m1, lambda amax: to_e4m3(np.maximum(amax, 6 * 2.0**-9) / 6)
        )

    def _by_group(
        self,
        x: Array,
        group: int,
        rounded: Callable[[Array], Array],
        scale_of: Callable[[Array], Array],
    ) -> Array:
        if not self.enabled:
            return x
        out = np.empty_like(x)
        for start in range(0, x.shape[-1], group):
            part = x[..., start : start + group]
            scale = scale_of(np.abs(part).max(axis=-1, keepdims=True))
            out[..., start : start + group] = rounded(part / scale) * scale
        return out
