"""What repeated runs say: the share that passed, with an interval, and pass^k."""

from __future__ import annotations

from math import comb, sqrt


def wilson(passed: int, runs: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson score interval of a share.

    Args:
        passed: Number of passes.
        runs: Number of runs, at least 1.
        z: Normal quantile; 1.96 for 95 %.

    Returns:
        (low, high), both in [0, 1].

    Raises:
        ValueError: If the counts make no share.
    """
    if runs < 1 or not 0 <= passed <= runs:
        raise ValueError(f"expected 0 <= passed <= runs and runs >= 1, got {passed} of {runs}")
    share = passed / runs
    middle = share + z * z / (2 * runs)
    spread = z * sqrt(share * (1 - share) / runs + z * z / (4 * runs * runs))
    scale = 1 + z * z / runs
    return max(0.0, (middle - spread) / scale), min(1.0, (middle + spread) / scale)


def pass_power(passed: int, runs: int, k: int) -> float:
    """pass^k: the chance that k runs drawn from these all passed (tau-bench's measure).

    Args:
        passed: Number of passes.
        runs: Number of runs.
        k: Size of the draw, 1 <= k <= runs.

    Raises:
        ValueError: If k is out of range.
    """
    if not 1 <= k <= runs:
        raise ValueError(f"expected 1 <= k <= {runs}, got {k}")
    return comb(passed, k) / comb(runs, k)
