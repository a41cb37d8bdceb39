"""Qwen's decode steps as CUDA graphs, with experts resident and in slots."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.device.on_gpu import captured_buckets, check_replays, make, runner_of
from tests.engine.paging.checkpoints import write_qwen

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("exact_products")]


@pytest.mark.parametrize(("slots", "buckets"), [(None, [1, 2, 4, 8]), (6, [1, 2, 3])])
def test_replay_equals_eager_bitwise(slots: int | None, buckets: list[int], tmp_path: Path) -> None:
    """A replayed step leaves the bits of its launches, in tables and slots too (A3 t3, J4, J7)."""
    how = {"runner": "fast", "kernels": "triton", "max_num_seqs": 8, "expert_slots": slots}
    core = make(write_qwen(tmp_path / "qwen"), **how)
    assert captured_buckets(runner_of(core)) == buckets
    assert (check_replays(core) > 0) is (slots is not None)
