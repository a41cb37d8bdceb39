"""Whether tokens are drafted: by whom, why not, and what it takes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from engine.api import EngineError
from engine.config import ModelConfig
from engine.core import load_engine
from engine.device.refusals import Gpu, check_fast
from engine.memory import plan_memory
from engine.model.names import CONFIDENCE_UNUSED, tensor_specs
from engine.options import DECODE_BUCKETS, EngineConfig
from engine.plan.layout import pool_tensors
from engine.plan.records import Forms
from engine.resolve import facts_of, resolve
from engine.speculation import draft_tokens, drafter_in, drafting_of, speculative_buckets
from tests.engine.model import build

V4, V41 = ModelConfig.from_dict(build.v4()), ModelConfig.from_dict(build.v41())
NONE = ModelConfig.from_dict(
    build.v4(num_nextn_predict_layers=0, compress_ratios=[0, 4, 16, 4, 16])
)
FAST = EngineConfig(
    device="cuda", dtype="bfloat16", runner="fast", kernels="triton", graphs=True, block_size=128
)


def found(config: ModelConfig, gpu: str | None = "GPU", **options: Any) -> tuple[str, str]:
    """What speculation is resolved to, and why."""
    asked = EngineConfig(**options)
    facts = facts_of(config, asked, gpu=gpu, gpu_nbytes=None, cores=2, weight_bytes=1)
    (decision,) = (d for d in resolve(asked, facts).decisions if d.field == "speculation")
    return decision.value, decision.source


def test_stages_are_told_apart() -> None:
    """A block size means DSpark; other stages are MTP's, which V4.1 does not have."""
    without = ModelConfig.from_dict(build.v41(dspark_block_size=None))

    assert [drafter_in(c) for c in (V4, V41, NONE, without)] == ["mtp", "dspark", "off", "off"]
    assert [draft_tokens(c, drafter_in(c)) for c in (V4, V41, NONE)] == [1, 5, 0]
    assert draft_tokens(V41, "off") == 0
    assert speculative_buckets(DECODE_BUCKETS, 5) == [1, 2, 4, 8]
    assert speculative_buckets(DECODE_BUCKETS, 1)[-1] == 32


def test_auto_takes_what_is_there_or_says_why_not() -> None:
    """Each way out of speculation has its reason; it is off unless asked for."""
    assert found(V41) == ("off", "default")
    assert found(V41, speculation="dspark") == ("dspark", "user")
    assert found(V41, speculation="auto") == ("dspark", "the checkpoint has dspark stages")
    assert found(V4, speculation="auto") == ("mtp", "the checkpoint has mtp stages")
    assert found(NONE, speculation="auto") == ("off", "the checkpoint has no draft stages")
    assert found(V4, gpu=None, speculation="auto") == ("off", "runner is reference")
    assert found(V4, speculation="auto", expert_slots=2) == ("off", "experts are paged")
    record = found(V4, speculation="auto", record_routing=Path("x"))
    assert record == ("off", "routing is recorded")


def test_asked_for_drafts_bring_the_fast_runner() -> None:
    """On a CPU too, since the reference drafts nothing."""
    asked = EngineConfig(speculation="mtp")
    facts = facts_of(V4, asked, gpu=None, gpu_nbytes=None, cores=2, weight_bytes=1)

    assert "runner = fast (tokens are drafted)" in resolve(asked, facts).lines()


@pytest.mark.parametrize(
    ("config", "options", "reason"),
    [
        (V4, {"speculation": "dspark"}, "speculation: expected mtp or off: the checkpoint has stages of mtp, got dspark"),
        (NONE, {"speculation": "mtp"}, "speculation: expected off: the checkpoint has no draft stages, got mtp"),
        (V41, {"speculation": "dspark", "expert_slots": 3}, "expert_slots: expected all experts on the device: rows that are rejected would fetch experts, too, got 3 beside speculation"),
        (V4, {"speculation": "mtp", "record_routing": Path("x"), "graphs": False}, "record_routing: expected no file: rows that are rejected would be noted, too, got x beside speculation"),
        (
            ModelConfig.from_dict(build.v41(dspark_block_size=64)),
            {"speculation": "dspark"},
            "speculation: expected drafts of less than 64, got dspark with drafts of 64 tokens",
        ),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused(
    config: ModelConfig, options: dict[str, Any], reason: str
) -> None:
    """Before weights are loaded, with what was seen and what is accepted."""
    gpu = Gpu("NVIDIA H200", (9, 0), 141 * 10**9)
    asked = dataclasses.replace(FAST, **options)
    with pytest.raises(EngineError) as raised:
        check_fast(config, asked, gpu, has_triton=True, buckets=DECODE_BUCKETS)
    assert reason in str(raised.value)


def test_the_reference_drafts_nothing(tmp_path: Path) -> None:
    """A reference runner beside speculation is refused by name."""
    path = build.write(tmp_path / "m", build.v4())
    options = EngineConfig(
        device="cpu", cpu_threads=1, runner="reference", speculation="mtp", max_model_len=64
    )
    with pytest.raises(
        EngineError, match="runner: expected fast, got reference beside speculation"
    ):
        load_engine(path, options)


@pytest.mark.parametrize(("config", "drafting"), [(V4, "mtp"), (V41, "dspark")])
def test_the_memory_plan_counts_drafts(config: ModelConfig, drafting: Any) -> None:
    """Weights of the stages, their rings, and logits of drafts and verifications."""
    fast = dataclasses.replace(FAST, max_model_len=256, speculation=drafting)
    with_drafts, without = (
        plan_memory(config, options, itemsize=2, budget=None, packed=True)
        for options in (fast, dataclasses.replace(fast, speculation="off"))
    )
    more = {item.what: item for item in with_drafts.items}
    less = {item.what for item in without.items}

    stages = config.num_nextn_predict_layers
    specs = tensor_specs(config)
    count = sum(
        name.startswith("mtp.") and bool(s.unused) and s.unused != CONFIDENCE_UNUSED
        and not name.endswith(("_scale", "bias_vl"))
        for name, s in specs.items()
    )  # fmt: skip
    assert more["draft stages"].why.startswith(f"{count:,} tensors")
    rings = more["window rings of draft stages"].nbytes
    assert rings == stages * 2 * 8 * 32 * fast.resolve_num_slots()
    assert ("streams between draft stages" in more) == (drafting == "mtp")
    assert "logits of drafts and verifications" in more
    assert not {"draft stages", "window rings of draft stages"} & less
    groups = {p.group for p in pool_tensors(config, 16, 4, Forms(), drafting)}
    assert ("carry" in groups) == (drafting == "mtp")
    assert "draft" in groups
    assert "draft" not in {p.group for p in pool_tensors(config, 16, 4, Forms())}


def test_who_drafts_is_read_off_the_options() -> None:
    """What is still open drafts nothing yet."""
    answers = [drafting_of(EngineConfig(speculation=s)) for s in ("off", "auto", "dspark", "mtp")]
    assert answers == ["off", "off", "dspark", "mtp"]
