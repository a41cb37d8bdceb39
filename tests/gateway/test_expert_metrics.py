"""Counters of paged experts at /metrics."""

from __future__ import annotations

from dataclasses import fields

from engine.api import EngineStats, ExpertStats
from gateway.metrics import Metrics


def lines(stats: EngineStats) -> dict[str, float]:
    """Name of each sample -> its value."""
    text = Metrics(lambda: stats).text().decode()
    pairs = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in pairs}


def test_every_counter_of_paged_experts_is_there() -> None:
    """One counter a field, with the value of the snapshot."""
    stats = ExpertStats(*(float(n) for n in range(3, 3 + len(fields(ExpertStats)))))  # type: ignore[arg-type]
    found = lines(EngineStats(experts=stats))
    for field in fields(ExpertStats):
        assert found[f"bathyal_backend_expert_{field.name}_total"] == getattr(stats, field.name)


def test_they_are_zero_where_nothing_is_paged() -> None:
    """A backend without paged experts says so by zeros."""
    found = lines(EngineStats())
    assert found["bathyal_backend_expert_hits_total"] == 0
    assert found["bathyal_backend_expert_misses_total"] == 0
