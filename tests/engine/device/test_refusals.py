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
from engine.device.refusals import Gpu, check_engine, check_fast
from engine.memory import plan_memory
from engine.options import DECODE_BUCKETS, EngineConfig
from engine.resolve import facts_of, resolve
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
    "all_whole", [{"expert_slots": 6}, {"expert_slots": 3, "resident_layers": 10}]
)
def test_experts_that_all_have_slots_are_not_paged(all_whole: dict[str, Any]) -> None:
    """Whoever asks: nothing is refused or planned that is not for experts that are all on the device."""
    assert (CONFIG.n_routed_experts, len(CONFIG.layers)) == (6, 10)
    options = dataclasses.replace(FUSED, tail_graphs=True, **all_whole)
    check(options=options)
    drafting = ModelConfig.from_dict(
        build.v41(num_nextn_predict_layers=2, dspark_target_layer_ids=[8, 9])
    )
    check(drafting, dataclasses.replace(options, speculation="dspark"))
    for config in (CONFIG, ModelConfig.from_dict(build.v4(n_routed_experts=6))):
        plain = dataclasses.replace(FUSED, prefill="bounded")
        plans = [
            plan_memory(config, one, itemsize=2, budget=None, packed=True)
            for one in (plain, dataclasses.replace(plain, **all_whole))
        ]
        assert plans[0] == plans[1]
    asked = EngineConfig(prefill="bounded", **all_whole)
    facts = facts_of(CONFIG, asked, gpu="GPU", gpu_nbytes=None, cores=2, weight_bytes=1)
    found = resolve(asked, facts).config
    assert found.tail_graphs is True
    check_engine(CONFIG, found, asked, H200, has_triton=True)
    on_cpu = facts_of(CONFIG, asked, gpu=None, gpu_nbytes=None, cores=2, weight_bytes=1)
    found = resolve(asked, on_cpu).config
    assert found.runner == "reference"
    check_engine(CONFIG, found, asked, None, has_triton=False)


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"expert_slots": 3, "resident_layers": 11}, "resident_layers: expected at most 10, got 11"),
        ({"expert_prefetch": True}, "expert_prefetch: expected nothing without expert_slots or expert_slots_file, got on"),
        ({"graphs": True}, "graphs on: expected an NVIDIA GPU, got the CPU"),
        ({"kernels": "triton"}, "kernels triton: expected an NVIDIA GPU, got the CPU"),
        ({"tail_graphs": True}, "tail_graphs on: expected an NVIDIA GPU, got the CPU"),
    ],
)  # fmt: skip
def test_no_second_reason_is_given_that_nobody_has(asked: dict[str, Any], reason: str) -> None:
    """On a CPU, the runner left open: it is not to blame for what another option asks for."""
    options = EngineConfig(**asked)
    facts = facts_of(CONFIG, options, gpu=None, gpu_nbytes=None, cores=2, weight_bytes=1)
    with pytest.raises(EngineError) as error:
        check_engine(CONFIG, resolve(options, facts).config, options, None, has_triton=True)
    assert str(error.value).endswith(f"cannot be built: {reason}")


def test_an_empty_file_of_slots_is_refused_for_that_alone(tmp_path: Path) -> None:
    """It pages nothing, so the reference runner is not in the way."""
    file = tmp_path / "slots"
    file.write_text("")
    options = EngineConfig(expert_slots_file=file)
    facts = facts_of(CONFIG, options, gpu=None, gpu_nbytes=None, cores=2, weight_bytes=1)
    with pytest.raises(EngineError) as error:
        check_engine(CONFIG, resolve(options, facts).config, options, None, has_triton=True)
    assert str(error.value).endswith("slots: expected one for each of 10 layers, got 0 numbers")


def test_the_reference_has_all_reasons_at_once() -> None:
    """Whoever asks it for graphs on a CPU hears of both: the runner, and that there is no GPU."""
    options = EngineConfig(
        device="cpu", runner="reference", graphs=True, kernels="triton", tail_graphs=True
    )
    with pytest.raises(EngineError) as error:
        load_engine(TINY_CHECKPOINT, options)
    for what in ("graphs on", "kernels triton", "tail_graphs on"):
        assert f"{what}: expected an NVIDIA GPU, got the CPU" in str(error.value)
    assert str(error.value).count("runner: expected fast, got reference beside") == 3


@pytest.mark.parametrize(
    ("asked", "seen"),
    [({"graphs": True}, "graphs on"), ({"kernels": "triton"}, "kernels triton")],
)
def test_the_reference_ignores_nothing_that_was_asked_for(asked: Any, seen: str) -> None:
    """Graphs or kernels that only the fast runner has are refused, not left without effect."""
    options = EngineConfig(device="cpu", cpu_threads=1, runner="reference", **asked)
    with pytest.raises(EngineError, match=f"runner: expected fast, got reference beside {seen}"):
        load_engine(TINY_CHECKPOINT, options)
