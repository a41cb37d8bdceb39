"""What a start says of captured steps: which batch sizes run which operations as fused kernels."""

from __future__ import annotations

import logging

import pytest

from engine import TINY_CHECKPOINT
from engine.device.build import build, log_buckets
from engine.device.graphs import Captured
from engine.options import EngineConfig


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Lines on captured work."""
    return [m for m in caplog.messages if " rows: " in m]


def test_fused_operations_are_named_once_for_buckets_that_agree(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A bucket whose operations differ, or that has none, stands alone."""
    few, many = frozenset({"moe", "attend", "embed"}), frozenset({"moe"})
    captured = [
        Captured(bucket, 0.25, 3_000_000, kernels)
        for bucket, kernels in ((8, many), (4, few), (2, few), (1, frozenset[str]()))
    ]
    with caplog.at_level(logging.INFO):
        log_buckets("decode step", captured)
    assert told(caplog) == [
        "decode step of 8 rows: 0.25 s, 3.0 MB",
        "decode step of 4 rows: 0.25 s, 3.0 MB",
        "decode step of 2 rows: 0.25 s, 3.0 MB",
        "decode step of 1 rows: 0.25 s, 3.0 MB",
        "decode step of 8 rows: fused operations: moe",
        "decode step of 4, 2 rows: fused operations: attend, embed, moe",
        "decode step of 1 rows: fused operations: none",
    ]


def test_a_start_says_so_of_every_bucket(caplog: pytest.LogCaptureFixture) -> None:
    """Those in plain torch run none."""
    options = EngineConfig(device="cpu", runner="fast", max_num_seqs=4, cpu_threads=1)
    with caplog.at_level(logging.INFO):
        build(TINY_CHECKPOINT, options)
    lines = told(caplog)
    assert lines[-1] == "decode step of 4, 2, 1 rows: fused operations: none"
    assert [line.split(":")[0] for line in lines[:-1]] == [
        f"decode step of {rows} rows" for rows in (4, 2, 1)
    ]
