"""Refusals come all at once, before anything is loaded, each with what was seen and accepted."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from engine import TINY_CHECKPOINT
from engine.api import EngineError
from engine.config import ModelConfig
from engine.core import load_engine
from engine.device.refusals import Gpu, check_fast
from engine.memory import plan_memory
from engine.options import DECODE_BUCKETS, EngineConfig
from tests.engine.model import build

CONFIG = ModelConfig.from_dict(build.v41())
H200 = Gpu("NVIDIA H200", (9, 0), 141 * 10**9)
FUSED = EngineConfig(
    device="cuda", dtype="bfloat16", runner="fast", kernels="triton", graphs=True, block_size=128
)


def check(
    config: ModelConfig = CONFIG,
    options: EngineConfig = FUSED,
    gpu: Gpu | None = H200,
    *,
    has_triton: bool = True,
    buckets: Sequence[int] = DECODE_BUCKETS,
) -> None:
    check_fast(config, options, gpu, has_triton=has_triton, buckets=buckets)


def test_what_can_be_served_is_not_refused() -> None:
    """On a recent GPU, and on the CPU with the twins, nothing is in the way."""
    check()
    check(options=dataclasses.replace(FUSED, tail_graphs=True))
    plain = dataclasses.replace(FUSED, device="cpu", kernels="torch", graphs=False)
    check(options=plain, gpu=None, has_triton=False)


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ({"has_triton": False}, "kernels triton: expected Triton installed, got none"),
        ({"gpu": None}, "kernels triton: expected an NVIDIA GPU, got the CPU"),
        ({"gpu": None}, "graphs on: expected an NVIDIA GPU, got the CPU"),
        (
            {"gpu": Gpu("Old", (8, 0), H200.nbytes)},
            "compute capability: expected 8.9 or above for FP8 kernels, got Old with 8.0",
        ),
        (
            {"options": dataclasses.replace(FUSED, block_size=3)},
            "block_size: expected a multiple of [1, 2], got 3",
        ),
        ({"buckets": ()}, "decode buckets: expected at least one batch size, got none"),
        (
            {"config": ModelConfig.from_dict(build.v41(head_dim=48))},
            "config.json: head_dim: expected a power of two, got 48",
        ),
        (
            {"options": dataclasses.replace(FUSED, tail_graphs=True), "gpu": None},
            "tail_graphs on: expected an NVIDIA GPU, got the CPU",
        ),
        (
            {
                "options": dataclasses.replace(FUSED, tail_graphs=True),
                "config": ModelConfig.from_dict(build.v4()),
            },
            "tail_graphs on: expected a model whose late layers can leave rows out, got P1: no layer",
        ),
        (
            {"options": dataclasses.replace(FUSED, tail_graphs=True, expert_slots=3)},
            "tail_graphs on: expected all experts resident, got paged experts",
        ),
        (
            {
                "options": dataclasses.replace(FUSED, tail_graphs=True, speculation="dspark"),
                "config": ModelConfig.from_dict(
                    build.v41(num_nextn_predict_layers=2, dspark_target_layer_ids=[3, 8, 9])
                ),
            },
            "tail_graphs on: expected drafters that read the tail only, got speculation from layers (3,)",
        ),
        (
            {
                "options": dataclasses.replace(
                    FUSED, tail_graphs=True, graphs=False, record_routing=Path("trace")
                )
            },
            "tail_graphs: expected off, got on beside record_routing",
        ),
    ],
)
def test_each_reason_says_what_was_seen_and_accepted(how: dict[str, Any], reason: str) -> None:
    """Whoever reads the message knows what to change."""
    with pytest.raises(EngineError) as error:
        check(**how)

    assert reason in str(error.value)
    assert str(error.value).startswith("the fast runner cannot be built: ")


def test_a_gpu_that_is_too_small_is_named_before_weights_are_loaded() -> None:
    """Weights and pools are what the plan says they are; to the byte that much is enough."""
    plan = plan_memory(CONFIG, FUSED, itemsize=2, budget=None, packed=True)
    held = sum(item.nbytes for item in plan.items if item.owner in ("weights", "slots", "blocks"))
    check(gpu=dataclasses.replace(H200, nbytes=held))
    small = dataclasses.replace(H200, nbytes=held - 1)

    with pytest.raises(
        EngineError, match=f"GPU memory: expected at most {held - 1:,} .* got {held:,}"
    ):
        check(gpu=small)
    check(gpu=small, options=dataclasses.replace(FUSED, max_snapshots=1))
    # Experts that the host holds are not in the way.
    check(gpu=small, options=dataclasses.replace(FUSED, expert_slots=3))


def test_all_reasons_come_at_once() -> None:
    """Nobody mends one thing only to hear of the next."""
    options = dataclasses.replace(FUSED, block_size=3)

    with pytest.raises(EngineError) as error:
        check(options=options, gpu=Gpu("Old", (7, 5), H200.nbytes), has_triton=False, buckets=())

    assert str(error.value).count("expected") == 4


@pytest.mark.parametrize(
    ("asked", "seen"),
    [({"graphs": True}, "graphs on"), ({"kernels": "triton"}, "kernels triton")],
)
def test_the_reference_ignores_nothing_that_was_asked_for(asked: Any, seen: str) -> None:
    """Graphs or kernels that only the fast runner has are refused, not left without effect."""
    options = EngineConfig(device="cpu", cpu_threads=1, runner="reference", **asked)
    with pytest.raises(EngineError, match=f"runner: expected fast, got reference beside {seen}"):
        load_engine(TINY_CHECKPOINT, options)
