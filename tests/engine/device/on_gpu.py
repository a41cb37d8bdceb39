"""Engines over small models on a GPU, for tests of captured steps."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.api import GenerateRequest, SamplingParams
from engine.core import EngineCore, load_engine
from engine.device.fast_runner import FastRunner
from engine.device.paged_state import slot_tensors
from engine.kernels.paging import MISSES
from engine.options import EngineConfig
from tests.engine.model import build

#: Heads and windows as small as the kernels' tiles allow.
SIZES = {"head_dim": 64, "qk_rope_head_dim": 16, "index_head_dim": 32, "sliding_window": 16}


def write_checkpoint(version: str, factory: pytest.TempPathFactory, seed: int = 11) -> Path:
    """A checkpoint of "v4" or "v41"."""
    config: dict[str, Any] = getattr(build, version)(**SIZES)
    return build.write(factory.mktemp("gpu") / "model", config, seed=seed)


def make(path: Path, **changes: Any) -> EngineCore:
    """An engine over it; of few batch sizes, since kernels are compiled for every one."""
    settings: dict[str, Any] = {
        "device": "cuda",
        "dtype": "float32",
        "block_size": 16,
        "num_blocks": 100,
        "max_batched_tokens": 40,
        "max_snapshots": 20,
        "max_model_len": 256,
    }
    return load_engine(path, EngineConfig(**{**settings, **changes}))


def runner_of(core: EngineCore) -> FastRunner:
    """The runner of such an engine."""
    assert isinstance(core._runner, FastRunner)
    return core._runner


def tensors(runner: FastRunner) -> dict[str, Tensor]:
    """All that a step writes: pools, buffers, tables and slots of paged experts."""
    paged = slot_tensors(runner.paged)
    written = {name: tensor for name, tensor in paged.items() if not name.startswith("store")}
    return {**runner._pool.named_tensors(), **runner._buffers.tensors(), **written}


def captured_buckets(runner: FastRunner) -> list[int]:
    return [bucket for bucket in runner.graphs.buckets if runner.graphs._is_captured(bucket)]


def bits(tensor: Tensor) -> Tensor:
    """The same memory as integers, so that a NaN equals itself."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(integers[tensor.itemsize])


def differences(a: dict[str, Tensor], b: dict[str, Tensor]) -> dict[str, Any]:
    """By name, in how many numbers two sets of tensors differ, the first places, and values there."""
    found: dict[str, Any] = {}
    for name in a:
        differing = bits(a[name]) != bits(b[name])
        if differing.any():
            places = differing.nonzero()[:3].tolist()
            pairs = [(float(a[name][tuple(p)]), float(b[name][tuple(p)])) for p in places]
            found[name] = (int(differing.sum()), places, pairs)
    return found


def check_replays(core: EngineCore) -> int:
    """From one state, compare each captured step with the same step run launch by launch, twice.

    Returns:
        experts that the steps brought into slots.
    """
    runner, draw = runner_of(core), random.Random(1)
    for number in range(8):
        ids = tuple(draw.randrange(288) for _ in range(draw.randint(1, 60)))
        sampling = SamplingParams(90, temperature=number % 2, top_p=0.9, seed=number)
        core.submit(GenerateRequest(str(number), ids, sampling))
    for _ in range(20):
        assert not [delta.error for delta in core.step() if delta.error]
    torch.cuda.synchronize()

    misses = 0
    with torch.inference_mode():
        start = {name: tensor.clone() for name, tensor in tensors(runner).items()}
        for bucket in captured_buckets(runner):
            found = []
            for launch in (runner.graphs.run, runner._decode, runner._decode):
                for name, tensor in tensors(runner).items():
                    tensor.copy_(start[name])
                logits = launch(bucket).clone()
                after = {name: tensor.clone() for name, tensor in tensors(runner).items()}
                found.append({**after, "logits": logits})
            replayed, called, again = found
            assert not (differing := differences(called, again)), (
                bucket,
                differing,
                "called twice",
            )
            assert not (differing := differences(replayed, called)), (bucket, differing)
            assert called["logits"].isfinite().all(), bucket
            assert not torch.equal(start["ids"], called["ids"])
            for number, paged in enumerate(runner.paged):
                paged.check_integrity()
                counted = f"counters[{number}]"
                misses += int(called[counted][MISSES] - start[counted][MISSES])
    runner._forget()
    for number in range(8):
        core.abort(str(number))
    return misses
