"""What an audit compares: every switch is turned over alone, or the report says why it is not."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest

from engine.architectures import AnyConfig
from engine.audit_variants import Comparison, compare
from engine.config import ModelConfig
from engine.options import EngineConfig
from engine.qwen3_config import Qwen3Config
from engine.resolve import facts_of, resolve
from tests.engine.model import build
from tests.engine.paging.checkpoints import CONFIG

MODELS: dict[str, AnyConfig] = {
    "v4": ModelConfig.from_dict(build.v4()),
    "v4.1": ModelConfig.from_dict(build.v41()),
    "plain": ModelConfig.from_dict(build.v41(dspark_block_size=None)),
    "qwen": Qwen3Config.from_dict(CONFIG),
}
PAGED: dict[str, Any] = {"expert_slots": 3}
FILES: dict[str, Any] = {**PAGED, "expert_host_gb": 1}


def settle_on(gpu: str | None, config: AnyConfig, options: EngineConfig) -> EngineConfig:
    """What counts on a machine with this GPU."""
    facts = facts_of(config, options, gpu=gpu, gpu_nbytes=None, cores=2, weight_bytes=1)
    return resolve(options, facts).config


def on(gpu: str | None, model: str, **options: Any) -> Comparison:
    """What is compared for a configuration."""
    config = MODELS[model]
    return compare(EngineConfig(**options), config, lambda o: settle_on(gpu, config, o))


CASES = [
    (gpu, model, options)
    for gpu, model, options in itertools.product(
        (None, "GPU"),
        MODELS,
        (
            {},
            PAGED,
            FILES,
            {"runner": "fast"},
            {"speculation": "auto"},
            {"speculation": "dspark"},
            {"expert_slots": 8},
            {"prefill": "bounded", "lookahead": False, "prefix_cache": False},
            {"graphs": False, "runner": "fast"},
        ),
    )
    if options.get("speculation") != "dspark" or model == "v4.1"
]


@pytest.mark.parametrize(("gpu", "model", "options"), CASES)
def test_no_variant_is_the_configured_engine_again(
    gpu: str | None, model: str, options: dict[str, Any]
) -> None:
    """Each differs in what counts, once nothing is left open, and no two are the same."""
    found = on(gpu, model, **options)
    settled = [settle_on(gpu, MODELS[model], one) for one in found.variants.values()]
    assert settled[0] == settle_on(gpu, MODELS[model], EngineConfig(**options))
    assert len(set(settled)) == len(settled)
    assert {one.runner for one in settled[1:]} <= {settled[0].runner, "fast"}
    together = {"graphs", "tail_graphs", "kernels", "expert_prefetch", "expert_host_gb"}
    for name, one in zip(found.variants, settled, strict=True):
        changed = {f.name for f in dataclasses.fields(one) if getattr(one, f.name) != getattr(settled[0], f.name)}  # fmt: skip
        assert len(changed - together) <= 1, name


@pytest.mark.parametrize(("gpu", "model", "options"), CASES)
def test_every_switch_is_compared_or_left_out_with_a_reason(
    gpu: str | None, model: str, options: dict[str, Any]
) -> None:
    """Both never; a reader of the report misses nothing."""
    found = on(gpu, model, **options)
    for begins in (
        ("graphs",),
        ("fused kernels",),
        ("lookahead",),
        ("prefix cache",),
        ("prefill",),
        ("tail graphs", "prefill bounded, tail graphs"),
        ("speculation",),
        ("experts paged", "all experts resident", "paged experts"),
    ):
        compared = [name for name in found.variants if name.startswith(begins)]
        left = [name for name in found.left_out if name.startswith(begins)]
        assert bool(compared) != bool(left), begins
    assert all(len(why) > 10 for why in found.left_out.values())


def test_a_runner_that_options_choose_is_the_one_that_is_compared() -> None:
    """Paged experts, drafts and Qwen run on the fast runner on a CPU, too: it is no variant there."""
    for model, options in (("v4.1", PAGED), ("v4.1", {"speculation": "dspark"}), ("qwen", {})):
        found = on(None, model, **options)
        assert "fast runner" not in found.variants
        assert "lookahead off" in found.variants
        assert {one.runner for one in found.variants.values()} == {"fast"}
    assert "experts paged, 4 slots" in on(None, "qwen").variants
    resident = on(None, "v4.1", **PAGED).variants["all experts resident"]
    assert resident == EngineConfig(runner="fast")
    assert on(None, "v4.1").variants["fast runner"] == EngineConfig(runner="fast")


@pytest.mark.parametrize("switched", [None, True, False])
def test_graphs_of_tails_are_a_switch(switched: bool | None) -> None:
    """On a GPU bounded is measured with and without them, where the model has a tail."""
    found = on("GPU", "plain", tail_graphs=switched)
    name = f"prefill bounded, tail graphs {'on' if switched is False else 'off'}"
    assert found.variants[name] == dataclasses.replace(
        found.variants["prefill bounded"], tail_graphs=switched is False
    )
    for other, why in (
        (on("GPU", "v4"), "no layers of this model"),
        (on("GPU", "plain", graphs=False), "decode steps are not captured"),
        (on("GPU", "plain", **PAGED), "experts are paged"),
        (on(None, "plain", runner="fast"), "a CPU has none"),
    ):
        assert why in other.left_out["tail graphs"]
        assert not any("tail graphs" in name for name in other.variants)


@pytest.mark.parametrize("other", ["off", "on"])
def test_what_a_gpu_alone_has_is_a_switch_there(other: str) -> None:
    """Graphs, fused kernels and lookahead are turned over whichever way they are; a CPU has but the last."""
    is_on = other == "off"
    options: dict[str, Any] = {
        "runner": "fast",
        "graphs": None if is_on else False,
        "kernels": "auto" if is_on else "torch",
        "lookahead": is_on,
    }
    base, found = EngineConfig(**options), on("GPU", "v4", **options).variants
    assert found[f"graphs {other}"] == dataclasses.replace(base, graphs=not is_on)
    kernels: Any = "torch" if is_on else "triton"
    assert found[f"fused kernels {other}"] == dataclasses.replace(base, kernels=kernels)
    assert found[f"lookahead {other}"] == dataclasses.replace(base, lookahead=not is_on)
    cpu = on(None, "v4", **options)
    assert not any("graphs" in name or "kernels" in name for name in cpu.variants)
    assert cpu.left_out["graphs"] == cpu.left_out["fused kernels"] == "a CPU has none"
    assert f"lookahead {other}" in cpu.variants


def test_paging_is_a_switch(tmp_path: Path) -> None:
    """Paged experts are compared with resident ones, whichever is configured; the reference has none."""
    fast = EngineConfig(runner="fast")
    found = on(None, "qwen").variants
    paged = found["experts paged, 4 slots"]
    assert paged == dataclasses.replace(fast, expert_slots=4)
    ahead = found["experts paged, 4 slots, prefetch"]
    assert ahead == dataclasses.replace(paged, expert_prefetch=True)
    some = on(None, "qwen", expert_slots=4, resident_layers=1).variants
    assert some["all experts resident"] == fast
    assert some["prefetch of experts on"].expert_prefetch is True
    found = on(None, "qwen", expert_slots=4, expert_prefetch=True).variants
    assert found["all experts resident"] == fast
    assert found["prefetch of experts off"] == paged
    files = on(None, "qwen", **FILES)
    assert files.left_out["prefetch of experts"] == "experts in files cannot be brought in ahead"
    reference = on(None, "v4.1")
    assert "--runner is fast" in reference.left_out["paged experts and their prefetch"]
    slots = tmp_path / "slots"
    slots.write_text("8 3 3")
    assert "all experts resident" in on(None, "qwen", expert_slots_file=slots).variants


def test_speculation_is_a_switch() -> None:
    """Drafts are compared with none where the model has draft stages, and the other way round."""
    fast = EngineConfig(runner="fast")
    found = on(None, "v4", runner="fast").variants
    assert found["speculation mtp"] == dataclasses.replace(fast, speculation="mtp")
    for auto in ("auto", "mtp"):
        found = on(None, "v4", runner="fast", speculation=auto).variants
        assert found["speculation off"] == fast
    for model, options, why in (
        ("plain", {"runner": "fast"}, "the model has no draft stages"),
        ("qwen", {}, "the model has no draft stages"),
        ("v4", {}, "--runner is fast"),
        ("v4", PAGED, "it does not go with paged experts"),
    ):
        assert why in on(None, model, **options).left_out["speculation"]
