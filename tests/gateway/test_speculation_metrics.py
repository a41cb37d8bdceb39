"""Drafts of the backend on /metrics."""

from __future__ import annotations

from engine.api import EngineStats, SpeculationStats
from gateway.metrics import Metrics


def test_drafts_are_exported() -> None:
    """Counters, the histogram of a verification's tokens, and rows without drafts by reason."""
    stats = SpeculationStats().plus(5, [0, 5, 2, 2], {"guide": 3}).plus(5, [], {"room": 1})
    lines = Metrics(lambda: EngineStats(speculation=stats)).text().decode().splitlines()

    for line in (
        "bathyal_backend_drafted_tokens_total 20.0",
        "bathyal_backend_accepted_tokens_total 9.0",
        'bathyal_backend_acceptance_length_bucket{le="1"} 1.0',
        'bathyal_backend_acceptance_length_bucket{le="3"} 3.0',
        'bathyal_backend_acceptance_length_bucket{le="6"} 4.0',
        'bathyal_backend_acceptance_length_bucket{le="+Inf"} 4.0',
        "bathyal_backend_acceptance_length_count 4.0",
        "bathyal_backend_acceptance_length_sum 13.0",
        'bathyal_backend_plain_rows_total{reason="guide"} 3.0',
        'bathyal_backend_plain_rows_total{reason="room"} 1.0',
    ):
        assert line in lines


def test_a_backend_without_drafts_counts_none() -> None:
    """All families are there from the start, at zero."""
    text = Metrics(lambda: EngineStats()).text().decode()

    assert "bathyal_backend_drafted_tokens_total 0.0" in text
    assert 'bathyal_backend_acceptance_length_bucket{le="+Inf"} 0.0' in text
    assert "# TYPE bathyal_backend_plain_rows_total counter" in text
