"""Engines over small models on a GPU, for tests of captured steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.core import EngineCore, load_engine
from engine.device.fast_runner import FastRunner
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
