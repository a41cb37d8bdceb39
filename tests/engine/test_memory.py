"""The memory plan: exact where it says so, and honest about the rest."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from engine import TINY_CHECKPOINT, memory
from engine.cli import main
from engine.config import ModelConfig
from engine.core import load_engine
from engine.device import prompt_graphs
from engine.device.fast_runner import FastRunner
from engine.device.kvpool import KVPool
from engine.kernels import select
from engine.memory import RESERVE, MemoryPlan, container_memory, plan_memory
from engine.model.checkpoint import load_model
from engine.model.engram import EngramTable
from engine.model.fast import FastModel
from engine.model.packed import _tensors
from engine.options import PROMPT_BUCKETS, TAIL_BUCKETS, EngineConfig
from tests.engine.model import build

OPTIONS = EngineConfig(
    block_size=32, num_blocks=5, max_num_seqs=2, max_snapshots=3, max_model_len=100
)
CONFIGS = {"v4": build.v4(), "v41": build.v41(), "v41-image": build.v41(image=True)}


def of(plan: MemoryPlan, *owners: str) -> int:
    return sum(item.nbytes for item in plan.items if item.owner in owners)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_pools_are_as_large_as_planned(name: str, dtype: torch.dtype, prefix_cache: bool) -> None:
    """Slots, snapshots, blocks and history agree with the pools to the byte."""
    config = ModelConfig.from_dict(CONFIGS[name])
    options = dataclasses.replace(OPTIONS, prefix_cache=prefix_cache)
    pool = KVPool(
        config,
        num_blocks=6,
        block_size=32,
        num_slots=6 if prefix_cache else 3,
        dtype=dtype,
    )

    plan = plan_memory(config, options, itemsize=dtype.itemsize, budget=None)

    history = sum(item.nbytes for item in plan.items if item.what == "n-gram history")
    assert of(plan, "slots", "blocks") == pool.nbytes
    assert history == pool.history.nbytes


def tensors(value: Any) -> Iterator[Tensor]:
    """Every tensor of a tree of dataclasses, but for the tables on disk."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from tensors(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, EngramTable):
        for field in dataclasses.fields(value):
            yield from tensors(getattr(value, field.name))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("v4", torch.float32), ("v4", torch.bfloat16), ("v41", torch.bfloat16)],
)
def test_the_fast_runner_holds_what_is_planned(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Packed weights, pools and static buffers agree with the plan to the byte."""
    packed = dtype == torch.bfloat16
    sizes = {"hidden_size": 128, "q_lora_rank": 128, "head_dim": 128, "moe_intermediate_size": 128}
    config = getattr(build, name)(quantised=packed, **sizes)
    path = build.write(tmp_path / "model", config, storage="fp4" if packed else "f32")
    options = EngineConfig(
        device="cpu",
        dtype="bfloat16" if packed else "float32",
        runner="fast",
        block_size=32,
        num_blocks=5,
        max_num_seqs=3,
        max_snapshots=3,
        max_model_len=100,
    )
    runner = load_engine(path, options)._runner
    assert isinstance(runner, FastRunner)

    plan = plan_memory(
        ModelConfig.from_file(path), options, itemsize=dtype.itemsize, budget=None, packed=True
    )

    model = runner._model
    assert isinstance(model, FastModel)
    held = {id(tensor): tensor.nbytes for tensor in _tensors(model.weights)}
    assert of(plan, "weights") == sum(held.values())
    assert of(plan, "slots", "blocks") == runner._pool.nbytes
    buffers = runner._buffers
    inputs = [*buffers.tensors().values(), buffers._rows, buffers._ones]
    steps = {item.what: item.nbytes for item in plan.items if item.owner == "steps"}
    assert steps["input and results"] == sum(tensor.nbytes for tensor in inputs)
    assert steps["rotary tables"] == model.plain_rope.nbytes + model.compressed_rope.nbytes
    logits = sum(runner.graphs.run(bucket).nbytes for bucket in runner.graphs.buckets)
    assert steps["logits"] == logits
    assert of(plan, "host") == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CONFIGS)
def test_weights_are_as_large_as_planned(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """What the model holds after loading agrees with the plan to the byte."""
    path = build.write(tmp_path / "model", CONFIGS[name])
    model = load_model(path, dtype=dtype)
    held = {id(tensor): tensor.nbytes for tensor in tensors(model._weights)}

    plan = plan_memory(model.config, OPTIONS, itemsize=dtype.itemsize, budget=None)

    assert of(plan, "weights") == sum(held.values())


def test_the_checkpoint_that_ships_takes_what_is_planned() -> None:
    """Loaded with its default options, as the server does."""
    core = load_engine(TINY_CHECKPOINT, EngineConfig(device="cpu"))
    pool, model = core._runner._pool, core._runner._model  # type: ignore[attr-defined]

    plan = plan_memory(model.config, EngineConfig(), itemsize=4, budget=None)

    assert of(plan, "slots", "blocks") == pool.nbytes
    assert of(plan, "weights") == sum({id(t): t.nbytes for t in tensors(model._weights)}.values())
    assert plan.num_blocks == core.stats().total_blocks


@given(st.integers(0, 40_000_000))
def test_the_solver_finds_the_most_blocks_that_fit(budget: int) -> None:
    """With as many blocks as it says the plan fits; with one more it does not."""
    config = ModelConfig.from_dict(CONFIGS["v41"])
    possible = plan_memory(config, OPTIONS, itemsize=4, budget=budget).blocks_possible
    assert possible is not None

    def fits(num_blocks: int) -> bool:
        options = dataclasses.replace(OPTIONS, num_blocks=num_blocks)
        return plan_memory(config, options, itemsize=4, budget=budget).fits

    assert possible < 4 or fits(possible)
    assert not fits(max(possible, 3) + 1)


@pytest.mark.parametrize(
    ("text", "want"),
    [("8589934592\n", 2**33), ("max\n", None), (str(2**63 - 4096), None), (None, None)],
)
def test_the_containers_limit_counts(text: str | None, want: int | None, tmp_path: Path) -> None:
    """Bytes of cgroup v2 or v1; "max", v1's huge number and no file at all are no limit."""
    file = tmp_path / "memory.max"
    if text is not None:
        file.write_text(text)

    assert container_memory([tmp_path / "absent", file]) == want


@pytest.mark.parametrize(
    ("flags", "code", "said"),
    [
        ("--gpu-gb 1 --host-gb 4", 0, "verdict   fits"),
        ("--gpu-gb 0.05 --host-gb 4", 1, "verdict   DOES NOT FIT, "),
        ("--gpu-gb 1 --host-gb 4 --tail-graphs", 0, "tail of 1024 rows"),
        ("--host-gb 1", 0, "CPU, 1,000,000,000 bytes, --host-gb"),
        ("--context 512 --concurrency 20 --host-gb 1", 0, "20 requests + 64 snapshots + 1 spare"),
    ],
)
def test_the_command_says_who_gets_what(
    flags: str, code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every group of memory stands in the output, with the verdict as exit code."""
    assert main(["plan", *flags.split()]) == code

    out = capsys.readouterr().out
    assert said in out
    for what in (
        "routed experts",
        "window rings",
        "compressor state",
        "compressed entries, ratio 2",
        "compressed entries, ratio 1",
        "index keys, ratio 1",
        "Engram",
        "n-gram history",
    ):
        assert what in out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--gpu-gb 0", "--gpu-gb: expected a number of gigabytes above 0, got 0.0"),
        ("--host-gb nan", "--host-gb: expected a number of gigabytes above 0, got nan"),
        ("--tail-graphs", "--tail-graphs: expected --gpu-gb beside it, got none"),
        ("--context 1", "--context: expected a whole number of at least 2, got 1"),
        ("--context 9999", "--context: the model's context is 4096 tokens, got 9999"),
        ("--concurrency 0", "--concurrency: expected a whole number of at least 1, got 0"),
        (
            "--gpu-gb 0 --context 9999",
            "--gpu-gb: expected a number of gigabytes above 0, got 0.0; --context: the model's",
        ),
        ("--paged --context 9999", "--context: the model's context is 4096 tokens, got 9999"),
        (
            "--paged --speculation mtp --tail-graphs --gpu-gb 1 --host-gb 1",
            "--speculation: expected off beside paged experts, got mtp; --tail-graphs: expected none",
        ),
        ("--model /nonexistent", "/nonexistent: there is no such folder"),
    ],
)
def test_misuse_is_named(flags: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2 and one line with what was expected and what came."""
    assert main(["plan", *flags.split()]) == 2
    assert message in capsys.readouterr().err


def test_the_reserve_is_part_of_the_verdict() -> None:
    """What allocations leave of the budget must cover activations too."""
    config = ModelConfig.from_dict(CONFIGS["v4"])
    need = plan_memory(config, OPTIONS, itemsize=4, budget=None).nbytes

    assert not plan_memory(config, OPTIONS, itemsize=4, budget=need).fits
    assert plan_memory(config, OPTIONS, itemsize=4, budget=int(need / (1 - RESERVE)) + 2).fits


def planned_steps(config: ModelConfig, options: EngineConfig, **changes: Any) -> dict[str, int]:
    """Bytes that a plan gives to what steps need, by what it is."""
    own = dataclasses.replace(options, **changes)
    plan = plan_memory(config, own, itemsize=2, budget=None, packed=True)
    return {item.what: item.nbytes for item in plan.items if item.owner == "steps"}


def test_buffers_of_tails_are_as_large_as_planned(tmp_path: Path) -> None:
    """Those of captured tails agree to the byte, and are planned where tails are captured only."""
    path = build.write(tmp_path / "model", build.v41(quantised=True, max_position_embeddings=400), storage="fp4")  # fmt: skip
    options = EngineConfig(
        device="cpu", dtype="bfloat16", runner="fast", block_size=32, num_blocks=13,
        max_num_seqs=3, max_snapshots=3, max_model_len=400, prefill="bounded",
    )  # fmt: skip
    runner = load_engine(path, options)._runner
    assert isinstance(runner, FastRunner)
    runner.prompts._tail_buckets = TAIL_BUCKETS
    runner.warm_up(100)
    tails = runner.prompts.tails
    assert tails is not None
    steps = partial(planned_steps, ModelConfig.from_file(path), options)

    assert steps()["buffers of tails"] == tails.buffer_bytes
    assert steps()["tail of 384 rows"] > 0
    for changes in (
        {"prefill": "off"},
        {"tail_graphs": False},
        {"graphs": False},
        {"expert_slots": 3},
    ):
        assert not any("tail" in what for what in steps(**changes))
    assert "tail of 384 rows" in steps(prefill="off", tail_graphs=True)


def test_buffers_of_prompts_are_as_large_as_planned(tmp_path: Path) -> None:
    """Those of captured passes agree to the byte, and are planned where they are captured only."""
    path = build.write(tmp_path / "model", build.v4(quantised=True, max_position_embeddings=400), storage="fp4")  # fmt: skip
    options = EngineConfig(
        device="cpu", dtype="bfloat16", runner="fast", block_size=128, num_blocks=4,
        max_num_seqs=3, max_snapshots=3, max_model_len=400, max_batched_tokens=300,
    )  # fmt: skip
    runner = load_engine(path, options)._runner
    assert isinstance(runner, FastRunner)
    runner.prompts._buckets = PROMPT_BUCKETS
    runner.warm_up(300)
    graphs = runner.prompts.graphs
    assert graphs is not None
    steps = partial(planned_steps, ModelConfig.from_file(path), options)

    assert graphs.buckets == (128, 256)
    planned = steps(graphs=True)
    assert planned["buffers of prompts"] == graphs.buffer_bytes
    assert planned["passes of up to 256 rows of prompts"] > 0
    for changes in ({}, {"graphs": False}, {"graphs": True, "expert_slots": 4}):
        assert not any("prompts" in what for what in steps(**changes))
    assert steps(device="cuda") == planned


def test_constants_are_those_of_the_code_that_uses_them() -> None:
    """The plan loads no torch and so has them a second time."""
    assert memory.CHUNK_SCORES == select.CHUNK_SCORES
    assert memory.PROMPT_ROWS == prompt_graphs.PER_SEQUENCE
