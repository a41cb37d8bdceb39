"""Microseconds of host work per decode step of the fast runner, with a model that takes no time.

    python -m bench.host_step                  batch 1, 8 and 64; greedy and sampled

Everything is there but the model: scheduler, plan, rows of the buffers, launch, results, commit,
deltas. The null model's logits are constant and its sampler takes them as they come, so what is
measured is Python, numpy and the small tensor operations of a step; on a GPU the launch of a graph
comes on top (bench.device_step has the device's part). Prompts are distinct, EOS is ignored.

Rows: bench "host_step": us_step over steps, one figure per repeat; `part` says of what: "core" is
all of EngineCore.step, "runner" the runner's share.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import orjson
import torch
from torch import Tensor

from bench.rows import make_rows, spread, write_rows
from engine import TINY_CHECKPOINT
from engine.api import GenerateRequest, SamplingParams
from engine.config import ModelConfig
from engine.core import EngineCore
from engine.device.fast_runner import FastRunner
from engine.device.kvpool import KVPool
from engine.kernels.ops import ops
from engine.options import EngineConfig

CONTEXT = 4096
STEPS = 400
WARM_UP = 50


class NullModel:
    """Gives the same logits at once, and draws the same token from them.

    Args:
        config: of the shape; only the vocabulary counts.
        rows: most rows of a step.
    """

    def __init__(self, config: ModelConfig, rows: int) -> None:
        self.config = config
        self._logits = torch.zeros(rows, config.vocab_size)
        drawn = torch.full((rows,), 7)
        usable = torch.ones(rows, dtype=torch.bool)

        def draw(logits: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
            return drawn[: len(logits)], usable[: len(logits)]

        self.ops = dataclasses.replace(ops("torch"), sample=draw)

    experts = ()

    def decode(self, rows: Any, pool: KVPool) -> Tensor:
        """Give the logits of a step."""
        return self._logits[: rows.num_rows]

    def prefill(self, rows: Any, pool: KVPool, wanted: Tensor, *_: Any) -> Iterator[Tensor]:
        """Give the logits of prompts."""
        yield self._logits[: len(wanted)]


def make(batch: int) -> EngineCore:
    """An engine over the null model."""
    config = ModelConfig.from_file(TINY_CHECKPOINT)
    options = EngineConfig(
        max_num_seqs=batch,
        max_model_len=CONTEXT,
        num_blocks=batch * CONTEXT // 128,
        max_snapshots=8,
    )
    pool = KVPool(
        config,
        num_blocks=options.resolve_num_blocks(CONTEXT) + 1,
        block_size=options.block_size,
        num_slots=options.resolve_num_slots(),
        ring_history=True,
    )
    runner = FastRunner(
        NullModel(config, 64), pool, torch.device("cpu"), max_model_len=CONTEXT, max_num_seqs=batch
    )
    return EngineCore(runner, options, max_position_embeddings=CONTEXT)


def measure(batch: int, temperature: float, repeats: int) -> list[dict[str, Any]]:
    """Microseconds of a step, in all and of the runner."""
    core = make(batch)
    runner_step = core._runner.step  # type: ignore[union-attr]
    spent = [0.0]

    def timed(*args: Any) -> Any:
        begin = time.perf_counter()
        found = runner_step(*args)
        spent[0] += time.perf_counter() - begin
        return found

    core._runner.step = timed  # type: ignore[union-attr, method-assign]
    whole, part = [], []
    for repeat in range(repeats):
        for row in range(batch):
            sampling = SamplingParams(CONTEXT - 64, temperature, seed=row, ignore_eos=True)
            ids = tuple(range(1 + row, 30 + row))
            core.submit(GenerateRequest(f"{repeat}-{row}", ids, sampling))
        for _ in range(WARM_UP):
            core.step()
        spent[0] = 0.0
        begin = time.perf_counter()
        tokens = sum(len(core.step()) for _ in range(STEPS))
        whole.append((time.perf_counter() - begin) * 1e6 / STEPS)
        part.append(spent[0] * 1e6 / STEPS)
        if tokens != batch * STEPS:
            raise RuntimeError(f"expected {batch * STEPS} tokens of {STEPS} steps, got {tokens}")
        for row in range(batch):
            core.abort(f"{repeat}-{row}")
    common = {"bench": "host_step", "batch": batch, "mode": "fast", "temperature": temperature}
    return [
        {**common, "part": "core", "us_step": spread(whole, 1)},
        {**common, "part": "runner", "us_step": spread(part, 1)},
    ]


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(1)
    figures = []
    for batch in args.batch:
        for temperature in (0.0, 1.0):
            figures += measure(batch, temperature, args.repeats)
    for row in figures:
        print(orjson.dumps(row).decode())
    print(write_rows("host-step-cpu", make_rows("bench.host_step", "cpu", figures)))


if __name__ == "__main__":
    main()
