"""The memory plan of Qwen's models: what is counted is what the engine holds, and a GPU is filled by it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from torch import Tensor

from engine.api import EngineError
from engine.architectures import read_config
from engine.cli import main
from engine.core import load_engine
from engine.device.fast_runner import FastRunner
from engine.device.refusals import Gpu, check_fast
from engine.expert_paging import experts_of
from engine.kernels.formats import Matrix
from engine.memory import MemoryPlan, plan_memory
from engine.memory_items import ROUTED
from engine.model.experts import ResidentExperts
from engine.model.qwen3 import Qwen3Model
from engine.options import DECODE_BUCKETS, EngineConfig
from engine.qwen3_config import Qwen3Config
from engine.resolve import facts_of, resolve
from tests.engine.paging.checkpoints import CONFIG, STORED, write_qwen

#: Of Qwen3-30B-A3B.
LARGE = {
    "vocab_size": 151_936, "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
    "moe_intermediate_size": 768, "max_position_embeddings": 40_960,
}  # fmt: skip
QWEN = Qwen3Config.from_dict(CONFIG | LARGE)
H200 = Gpu("NVIDIA H200", (9, 0), 141 * 10**9)
ON_GPU = EngineConfig(device="cuda", dtype="bfloat16", runner="fast", kernels="triton", graphs=True)


def of(plan: MemoryPlan, *owners: str) -> int:
    return sum(item.nbytes for item in plan.items if item.owner in owners)


def held(model: Qwen3Model) -> Iterator[Tensor]:
    """Every tensor of a model's weights."""
    yield from (model.embed, model.norm, model.head.data)
    for layer in model.layers:
        for field in dataclasses.fields(layer):
            value = getattr(layer, field.name)
            if isinstance(value, Tensor):
                yield value
            elif isinstance(value, Matrix):
                yield from value.tensors.values()
            else:
                assert isinstance(value, ResidentExperts)
                yield from (*value.w13.tensors.values(), *value.w2.tensors.values())


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", STORED)
def test_the_engine_holds_what_is_planned(kind: str, dtype: Any, tmp_path: Path) -> None:
    """Weights in every stored form, blocks and buffers of steps agree with the plan to the byte."""
    path = write_qwen(tmp_path, kind)
    options = EngineConfig(
        device="cpu", dtype=dtype, max_num_seqs=3, num_blocks=7, block_size=32, max_model_len=100
    )
    runner = load_engine(path, options)._runner
    assert isinstance(runner, FastRunner)
    plan = plan_memory(read_config(path), options, itemsize=options.itemsize, budget=None)

    model = runner._model
    assert isinstance(model, Qwen3Model)
    stores = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held(model)}
    assert of(plan, "weights") == sum(stores.values())
    assert of(plan, "slots", "blocks") == runner._pool.nbytes == 8 * plan.block_nbytes
    buffers = runner._buffers
    inputs = [*buffers.tensors().values(), buffers._rows, buffers._ones]
    steps = {item.what: item.nbytes for item in plan.items if item.owner == "steps"}
    assert steps == {
        "input and results": sum(tensor.nbytes for tensor in inputs),
        "logits": sum(runner.graphs.run(bucket).nbytes for bucket in runner.graphs.buckets),
        "rotary tables": model._rope.nbytes,
    }


def blocks(gpu_nbytes: int, **options: Any) -> tuple[int, str]:
    """Blocks that are made on a GPU, and why so many."""
    asked = EngineConfig(**options)
    facts = facts_of(QWEN, asked, gpu="GPU", gpu_nbytes=gpu_nbytes, cores=2, weight_bytes=1)
    (found,) = (d for d in resolve(asked, facts).decisions if d.field == "num_blocks")
    return found.value, found.source


def test_open_blocks_fill_the_gpu() -> None:
    """All requests at full context, or what there is room for; as before where experts are paged."""
    assert blocks(10**12) == (16 * 320, "655,360 positions, all requests at full context")
    count, why = blocks(100 * 10**9)
    assert "what the GPU has room for" in why
    assert 512 < count < 16 * 320
    for more, fits in ((0, True), (1, False)):
        options = dataclasses.replace(ON_GPU, num_blocks=count + more)
        assert plan_memory(QWEN, options, itemsize=2, budget=100 * 10**9).fits is fits
    assert blocks(100 * 10**9, expert_slots=40)[0] == 512


def test_a_gpu_that_is_too_small_is_named_before_weights_are_loaded() -> None:
    """To the byte; experts that the host holds are not in the way, slots of all layers are."""
    options = dataclasses.replace(ON_GPU, num_blocks=512)
    plan = plan_memory(QWEN, options, itemsize=2, budget=None)
    need = of(plan, "weights", "blocks")
    experts = experts_of(QWEN, 2)
    paged = dataclasses.replace(options, expert_slots=40)
    away = 48 * 88 * experts.nbytes
    assert need > away > 10**10
    for asked, least in ((options, need), (paged, need - away)):
        for nbytes in (least, least - 1):
            gpu = dataclasses.replace(H200, nbytes=nbytes)
            if nbytes == least:
                check_fast(QWEN, asked, gpu, has_triton=True, buckets=DECODE_BUCKETS)
                continue
            with pytest.raises(EngineError) as error:
                check_fast(QWEN, asked, gpu, has_triton=True, buckets=DECODE_BUCKETS)
            told = str(error.value)
            assert f"GPU memory: expected at most {nbytes:,} bytes" in told
            assert f"got {least:,} bytes of weights and pools (512 blocks)" in told
            assert "less num_blocks or expert_slots need less" in told


@pytest.mark.parametrize(
    ("flags", "code", "said"),
    [
        ("--gpu-gb 141 --host-gb 4", 0, "verdict   fits"),
        ("--gpu-gb 60 --host-gb 4", 1, "verdict   DOES NOT FIT, "),
        ("--gpu-gb 141 --context 4096 --concurrency 2", 0, "holds     65,536 tokens in 512 blocks"),
        ("--host-gb 200", 0, "CPU, 200,000,000,000 bytes, --host-gb"),
    ],
)
def test_the_command_says_who_gets_what(
    flags: str, code: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every part stands in the output, with the verdict as exit code; no weights are needed."""
    (tmp_path / "config.json").write_bytes(orjson.dumps(CONFIG | LARGE))
    assert main(["plan", "--model", str(tmp_path), *flags.split()]) == code
    out = capsys.readouterr().out
    assert said in out
    for what in (
        ROUTED,
        "attention",
        "embedding and head",
        "routers",
        "norms",
        "keys and values",
        "rotary tables",
        "logits",
        "pass of ",
    ):
        assert f"  {what}" in out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--gpu-gb 141 --tail-graphs", "got every layer of this model processes every row"),
        ("--gpu-gb 141 --speculation mtp", "--speculation: expected off: the checkpoint has no"),
    ],
)
def test_what_the_model_has_not_is_named(
    flags: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its prompts have no tail, and it drafts nothing."""
    (tmp_path / "config.json").write_bytes(orjson.dumps(CONFIG | LARGE))
    assert main(["plan", "--model", str(tmp_path), *flags.split()]) == 2
    assert message in capsys.readouterr().err
