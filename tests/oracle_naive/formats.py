"""Number formats: e4m3, e2m1 and ue8m0, as tables, and what a value becomes when stored in them.

A round trip is "quantise, store, read back". Rounding is to nearest with ties to the even code,
beyond the largest value it saturates. `RoundTrips` also keeps book of how near each value came to
the other neighbour, because a second implementation in float32 may round such a value the other
way without being wrong.
"""

from __future__ import annotations

import math
from collections import defaultdict
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
    size = np.abs(x)
    above = np.clip(np.searchsorted(magnitudes, size), 1, len(magnitudes) - 1)
    below = above - 1
    middle = (magnitudes[below] + magnitudes[above]) / 2
    take_above = (size > middle) | ((size == middle) & (above % 2 == 0))
    return np.copysign(magnitudes[np.where(take_above, above, below)], x)


def power_of_two_at_least(x: float) -> float:
    mantissa, exponent = math.frexp(x)  # x = mantissa * 2^exponent, mantissa in [0.5, 1)
    return 2.0 ** (exponent - 1) if mantissa == 0.5 else 2.0**exponent


def hadamard(n: int) -> Array:
    """Orthonormal Hadamard matrix [n, n] in Sylvester's order; n is a power of two."""
    h = np.ones((1, 1))
    while len(h) < n:
        h = np.block([[h, h], [h, -h]])
    if len(h) != n:
        raise ValueError(f"a Hadamard matrix needs a power of two, got {n}")
    return h / math.sqrt(n)


class RoundTrips:
    """The round trips of one run.

    Args:
        enabled: whether storing changes anything.

    Attributes:
        closest: for each position, how near any of its roundings and choices came to going the
            other way, relative to the largest value of the group it was taken among.
    """

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self.closest: dict[int, float] = defaultdict(lambda: math.inf)

    def note(self, position: int, distance: float) -> None:
        self.closest[position] = min(self.closest[position], distance)

    def note_choice(self, position: int, scores: list[float], chosen: set[int]) -> None:
        """The gap between the worst taken and the best left; an exact tie has a rule, so no gap."""
        left = [s for i, s in enumerate(scores) if i not in chosen]
        taken = [scores[i] for i in chosen]
        if left and taken and min(taken) != max(left):
            largest = max(abs(s) for s in scores if math.isfinite(s))
            self.note(position, (min(taken) - max(left)) / (largest or 1.0))

    def fp8(self, x: Array, group: int, position: int) -> Array:
        """e4m3 with a power-of-two scale per group of the last axis; amax floored at 1e-4."""
        return self._by_group(x, group, position, E4M3_MAGNITUDES, self._pow2_scale, 1e-4)

    def fp4(self, x: Array, group: int, position: int) -> Array:
        """e2m1 with a power-of-two scale per group of the last axis."""
        return self._by_group(x, group, position, E2M1_MAGNITUDES, self._pow2_scale, 2.0**-120)

    def fp4_e4m3(self, x: Array, position: int) -> Array:
        """e2m1 with an e4m3 scale per 16 values; amax floored at 6 times the least e4m3."""
        return self._by_group(
            x, 16, position, E2M1_MAGNITUDES, self._e4m3_scale, 6 * E4M3_MAGNITUDES[1]
        )

    def _by_group(
        self,
        x: Array,
        group: int,
        position: int,
        magnitudes: Array,
        scale_of: Callable[[float, float, int], float],
        floor: float,
    ) -> Array:
        if not self.enabled:
            return x
        out = np.empty_like(x)
        for row in np.ndindex(x.shape[:-1]):
            for start in range(0, x.shape[-1], group):
                values = x[row][start : start + group]
                amax = max(float(np.abs(values).max()), floor)
                scale = scale_of(amax, magnitudes[-1], position)
                out[row][start : start + group] = to_nearest(values / scale, magnitudes) * scale
                self._note_rounding(values / scale, magnitudes, amax / scale, position)
        return out

    def _pow2_scale(self, amax: float, largest: float, position: int) -> float:
        scale = power_of_two_at_least(amax / largest)
        # one step up at amax = largest * scale, one step down at half of that
        self.note(position, min(largest * scale - amax, amax - largest * scale / 2) / amax)
        return scale

    def _e4m3_scale(self, amax: float, largest: float, position: int) -> float:
        self._note_rounding(np.array([amax / largest]), E4M3_MAGNITUDES, amax / largest, position)
        return float(to_nearest(np.array(amax / largest), E4M3_MAGNITUDES))

    def _note_rounding(self, x: Array, magnitudes: Array, amax: float, position: int) -> None:
        middles = (magnitudes[:-1] + magnitudes[1:]) / 2
        right = np.clip(np.searchsorted(middles, np.abs(x)), 0, len(middles) - 1)
        left = np.clip(right - 1, 0, None)
        distance = np.minimum(abs(np.abs(x) - middles[right]), abs(np.abs(x) - middles[left]))
        self.note(position, float(distance.min()) / amax)
