"""EngineConfig: ranges and what follows from them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine.api import EngineError
from engine.options import EngineConfig, usable_cores


def test_all_problems_are_named_at_once() -> None:
    """Each value out of range stands in the one message, with what is accepted and what came."""
    with pytest.raises(EngineError) as error:
        EngineConfig(
            max_num_seqs=0,
            block_size=-1,
            max_snapshots=0,
            cpu_threads=0,
            device="tpu",  # type: ignore[arg-type]
        )

    assert str(error.value) == (
        "engine options: device: expected one of auto, cpu, cuda, got 'tpu';"
        " max_num_seqs: expected at least 1, got 0;"
        " block_size: expected at least 1, got -1;"
        " max_snapshots: expected at least 1, got 0;"
        " cpu_threads: expected at least 1, got 0"
    )


def test_a_step_has_a_row_for_every_stream_and_one_more() -> None:
    """A budget that running streams alone fill would starve prompts."""
    EngineConfig(max_num_seqs=8, max_batched_tokens=9)

    with pytest.raises(EngineError, match="max_batched_tokens: expected at least 9, got 8"):
        EngineConfig(max_num_seqs=8, max_batched_tokens=8)


@pytest.mark.parametrize(
    ("asked", "context", "served"), [(None, 4096, 4096), (100, 4096, 100), (4096, 4096, 4096)]
)
def test_the_context_is_the_models_or_less(asked: int | None, context: int, served: int) -> None:
    """Unset, the model's context is served; set, at most that."""
    assert EngineConfig(max_model_len=asked).resolve_max_model_len(context) == served


@pytest.mark.parametrize(
    ("block_size", "num_blocks", "context", "want"),
    [(128, None, 4096, 512), (128, None, 1_048_576, 8192), (100, None, 70_001, 701), (4, 9, 33, 9)],
)
def test_the_pool_holds_at_least_one_full_context(
    block_size: int, num_blocks: int | None, context: int, want: int
) -> None:
    """By default 65,536 positions or one context, whichever is more, in whole blocks."""
    options = EngineConfig(block_size=block_size, num_blocks=num_blocks)

    assert options.resolve_num_blocks(context) == want


def test_a_pool_too_small_for_one_request_is_refused() -> None:
    """A request that could never end is not accepted by way of a small pool."""
    with pytest.raises(EngineError, match="33 needs 9 blocks of 4 positions, got 8; raise num_bl"):
        EngineConfig(block_size=4, num_blocks=8).resolve_num_blocks(33)


def test_snapshots_have_slots_beside_those_of_requests() -> None:
    """One slot for each request that runs and each snapshot, and the dummy."""
    assert EngineConfig(max_num_seqs=8, max_snapshots=20).resolve_num_slots() == 29
    options = EngineConfig(max_num_seqs=8, max_snapshots=20, prefix_cache=False)
    assert options.resolve_num_slots() == 9


@pytest.mark.parametrize(
    ("asked", "cores", "megabytes", "want"),
    [(None, 2, 17, 1), (None, 16, 17, 1), (None, 16, 640, 10), (None, 8, 9999, 7), (3, 2, 17, 3)],
)
def test_threads_follow_weights_and_leave_a_core(
    asked: int | None, cores: int, megabytes: int, want: int
) -> None:
    """A small model gets one thread, a large one all cores but the event loop's; or what was set."""
    options = EngineConfig(cpu_threads=asked)

    assert options.resolve_cpu_threads(cores, megabytes * 1_000_000) == want


@pytest.mark.parametrize(
    ("text", "want"),
    [("max 100000", 6), ("400000 100000", 4), ("50000 100000", 1), ("9900000 100000", 6), ("?", 6)],
)
def test_a_containers_share_limits_the_cores(
    text: str, want: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container with four cores' time on a large host has four cores."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)), raising=False)
    (tmp_path / "cpu.max").write_text(text)

    assert usable_cores(tmp_path / "cpu.max") == want
    assert usable_cores(tmp_path / "absent") == 6
