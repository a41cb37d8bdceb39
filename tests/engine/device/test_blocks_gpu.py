"""Blocks that are left open, on a real GPU: as many as the plan has room for, and no byte more."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from engine import TINY_CHECKPOINT
from engine.api import GenerateRequest, SamplingParams
from engine.config import ModelConfig
from engine.core import load_engine
from engine.device.build import free_memory
from engine.device.kvpool import KVPool
from engine.memory import blocks_for_gpu, plan_memory
from engine.options import EngineConfig
from tests.engine.device.on_gpu import runner_of

pytestmark = pytest.mark.gpu


class Smaller:
    """A GPU's properties with another size of its memory."""

    def __init__(self, real: Any, nbytes: int) -> None:
        self._real, self.total_memory = real, nbytes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


@pytest.mark.parametrize(
    ("nbytes", "requests", "why"),
    [(3 * 10**8, 64, "what the GPU has room for"), (2 * 10**9, 2, "all requests at full context")],
)
def test_open_blocks_fill_the_gpu_and_no_more(
    nbytes: int, requests: int, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine makes the planned number, serves a full context, and holds what the plan says."""
    real = torch.cuda.get_device_properties(0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: Smaller(real, nbytes))
    free_memory()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    # Twins need nothing compiled; pools and weights are the same.
    options = EngineConfig(
        device="cuda", dtype="bfloat16", kernels="torch", graphs=False, max_num_seqs=requests
    )
    core = load_engine(TINY_CHECKPOINT, options)
    runner = runner_of(core)
    assert isinstance(runner._pool, KVPool)

    config = ModelConfig.from_file(TINY_CHECKPOINT)
    blocks, found = blocks_for_gpu(config, options, nbytes, itemsize=2)
    assert found == why
    assert core.stats().total_blocks == blocks
    made = dataclasses.replace(options, num_blocks=blocks)
    plan = plan_memory(config, made, itemsize=2, budget=nbytes, packed=True)
    assert plan.fits
    owned = sum(item.nbytes for item in plan.items if item.owner in ("slots", "blocks"))
    assert runner._pool.nbytes == owned
    core.submit(
        GenerateRequest(
            "r", (5,) * (config.max_position_embeddings - 8), SamplingParams(8, ignore_eos=True)
        )
    )
    tokens = 0
    while core.has_work:
        for delta in core.step():
            assert delta.error is None, delta.error
            tokens += len(delta.token_ids)
    assert tokens == 8
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - before <= plan.nbytes
    if why == "what the GPU has room for":
        one_more = dataclasses.replace(options, num_blocks=blocks + 1)
        assert not plan_memory(config, one_more, itemsize=2, budget=nbytes, packed=True).fits
