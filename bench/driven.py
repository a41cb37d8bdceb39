"""An engine over random weights, driven step by step: what benchmarks of the whole engine share."""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from bench.bound import bound_ms, experts_touched
from bench.geometries import QWEN, QWEN3_30B, geometry
from engine import TINY_CHECKPOINT
from engine.api import GenerateRequest, PrefillMode, SamplingParams, TokenDelta
from engine.architectures import AnyConfig
from engine.config import ModelConfig
from engine.core import EngineCore
from engine.device.build import settle
from engine.device.fast_runner import FastRunner
from engine.device.kvpool import KVPool
from engine.device.qwen_pool import QwenPool
from engine.device.rows import build_rows
from engine.kernels.moe import moe_triton
from engine.kernels.ops import Implementation
from engine.memory import plan_memory
from engine.model.fast import FastModel
from engine.model.loading import random_fast_model
from engine.model.qwen3 import Qwen3Model
from engine.model.qwen3_loading import random_qwen3
from engine.options import DECODE_BUCKETS, PROMPT_BUCKETS, EngineConfig
from engine.plan.layout import Drafting
from engine.plan.replay import Replay, tail_of
from engine.plan.step import Chunk
from engine.qwen3_config import Qwen3Config

BLOCK = 256
KERNELS: dict[str, Implementation] = {"eager": "torch", "graph": "torch", "fused": "triton"}


def config_of(name: str) -> AnyConfig:
    """Configuration of a shape, or of the checkpoint that ships.

    Raises:
        KeyError: no shape has this name.
    """
    if name == QWEN:
        return Qwen3Config.from_dict(QWEN3_30B)
    return ModelConfig.from_file(TINY_CHECKPOINT) if name == "tiny" else geometry(name)


def pool_of(
    model: FastModel | Qwen3Model,
    options: EngineConfig,
    device: torch.device,
    drafting: Drafting = "off",
) -> KVPool | QwenPool:
    """Memory of a model's requests, and of draft stages of a DeepSeek model."""
    assert options.max_model_len is not None
    blocks = options.resolve_num_blocks(options.max_model_len) + 1
    if isinstance(model, Qwen3Model):
        return QwenPool(
            model.config, num_blocks=blocks, block_size=BLOCK, device=device, dtype=model.dtype
        )
    return KVPool(
        model.config,
        num_blocks=blocks,
        block_size=BLOCK,
        num_slots=options.resolve_num_slots(),
        device=device,
        dtype=model.dtype,
        forms=model.forms,
        ring_history=True,
        drafting=drafting,
    )


class Driven:
    """An engine over random weights, driven step by step.

    Args:
        config: of the model.
        mode: eager, graph or fused.
        device: "cuda", or "cpu" to try the benchmark itself.
        context: most positions of a request.
        streams: most requests at once.
        chunk: most rows of a step; `mixed` of a step that has streams.
        tokens: positions that the pool has room for.
        tail_buckets: rows of prompts' tails to capture, where the model has a tail.
        buckets: rows of decode steps to capture.
    """

    def __init__(
        self,
        config: AnyConfig,
        mode: str,
        *,
        device: str,
        context: int,
        streams: int,
        chunk: int,
        mixed: int,
        tokens: int,
        tail_buckets: Sequence[int] = (),
        buckets: Sequence[int] = DECODE_BUCKETS,
    ) -> None:
        begin = time.perf_counter()
        options = EngineConfig(
            max_model_len=context,
            max_num_seqs=streams,
            max_batched_tokens=chunk,
            max_mixed_tokens=mixed,
            block_size=BLOCK,
            num_blocks=-(-max(tokens, context) // BLOCK),
            max_snapshots=32,
        )
        is_qwen = isinstance(config, Qwen3Config)
        draw: Callable[..., FastModel | Qwen3Model] = random_qwen3 if is_qwen else random_fast_model
        model = draw(config, kernels=KERNELS[mode], device=device, max_model_len=context)
        if device == "cuda":
            model.ops = dataclasses.replace(model.ops, moe=moe_triton)
        self.sync: Callable[[], None] = torch.cuda.synchronize if device == "cuda" else lambda: None
        self.sync()
        drawn = time.perf_counter()
        self._model, self._device = model, device
        where = torch.device(device)
        self._pool = pool = pool_of(model, options, where)
        self.tail = None if isinstance(config, Qwen3Config) else tail_of(config)
        # Qwen's passes over prompts are launched kernel by kernel, as engine.device.build has them.
        captures_prompts = mode == "fused" and not is_qwen
        self.runner = FastRunner(
            model,
            pool,
            where,
            max_model_len=context,
            max_num_seqs=streams,
            captures=device == "cuda" and mode != "eager",
            buckets=buckets,
            tail=self.tail,
            tail_buckets=tail_buckets,
            prompt_buckets=PROMPT_BUCKETS if captures_prompts else (),
        )
        captured = time.perf_counter()
        if mode == "fused" or tail_buckets:
            self.runner.warm_up(chunk)
        self.start: dict[str, Any] = {
            "weights_s": round(drawn - begin, 2),
            "capture_s": round(captured - drawn, 2),
            "warm_up_s": round(time.perf_counter() - captured, 2),
            "kernels_compiled": self.runner.compiles.compiled,
            "kernels_cached": self.runner.compiles.loaded,
            "graph_mb": {
                c.bucket: round(c.pool_bytes / 1e6, 1) for c in self.runner.graphs.captured
            },
        }
        prompts = self.runner.prompts.graphs
        if prompts is not None:
            self.start["prompt_graph_mb"] = {
                c.bucket: round(c.pool_bytes / 1e6, 1) for c in prompts.captured
            }
            self.start["prompt_capture_s"] = round(sum(c.seconds for c in prompts.captured), 2)
        self._planned = plan_memory(config, options, itemsize=2, budget=None, packed=True).nbytes
        self.start |= self.memory()
        self._time_waits()
        self._options, self.context = options, context
        self.chunk = chunk
        self.begin_anew()
        settle()  # as load_engine does
        self.draw = random.Random(0)
        self._vocab = config.vocab_size
        self._made = 0

    def memory(self) -> dict[str, float]:
        """Gigabytes that are held, and were at most since this was last asked, beside the plan's."""
        found = {"planned_gb": round(self._planned / 1e9, 3)}
        if self._device == "cuda":
            held, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
            found |= {
                "held_gb": round(held / 1e9, 3),
                "peak_gb": round(peak / 1e9, 3),
                "reserved_gb": round(torch.cuda.memory_reserved() / 1e9, 3),
                "held_over_planned": round(held / self._planned, 4),
                "peak_over_planned": round(peak / self._planned, 4),
            }
            torch.cuda.reset_peak_memory_stats()
        return found

    def _time_waits(self) -> None:
        """Count the seconds that the host waits for the device's results."""
        finish = self.runner._readback.finish

        def timed(half: int, count: int) -> list[int]:
            begin = time.perf_counter()
            found = finish(half, count)
            self.waited += time.perf_counter() - begin
            return found

        self.waited = 0.0
        self.runner._readback.finish = timed  # type: ignore[method-assign]

    def kernels(self, batch: int) -> int | None:
        """Kernels that the device runs in a step of so many rows; None on a CPU."""
        if not torch.cuda.is_available():
            return None
        torch.cuda.synchronize()
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as trace, torch.inference_mode():
            self.runner.graphs.run(self.runner.graphs.bucket_for(batch))
            torch.cuda.synchronize()
        found: int = sum(e.count for e in trace.key_averages() if e.self_device_time_total > 0)
        return found

    def bound(self, batch: int, context: int) -> tuple[list[int], float]:
        """Experts that each layer reads in a step of random tokens, and the time to read all of it.

        Rows have blocks of their own, as far as there are so many, which hold what earlier requests
        left there: rows of one history would agree on their experts.
        """
        per, most = -(-(context + 1) // BLOCK), self._pool.num_blocks - 1
        blocks = [tuple(1 + (i * per + j) % most for j in range(per)) for i in range(batch)]
        chunks = [
            Chunk(str(i), i + 1, context, self.ids(1), own, True) for i, own in enumerate(blocks)
        ]
        with torch.inference_mode():
            rows, _ = build_rows(chunks, block_size=BLOCK, device=self._device)
            touched = experts_touched(self._model, lambda: self._model.decode(rows, self._pool))  # type: ignore[arg-type]
        return touched, bound_ms(self._model, self._pool, batch, context, touched)

    def begin_anew(
        self, *, prefix_cache: bool = True, mixed: int | None = None, chunk: int | None = None
    ) -> None:
        """Forget all requests; the same memory serves, perhaps under other limits."""
        options = dataclasses.replace(self._options, prefix_cache=prefix_cache)
        if mixed is not None:
            options = dataclasses.replace(options, max_mixed_tokens=mixed)
        if chunk is not None:
            options = dataclasses.replace(options, max_batched_tokens=chunk, max_mixed_tokens=chunk)
        self.core = EngineCore(
            self.runner, options, max_position_embeddings=self.context, replay=Replay(self.tail)
        )

    def ids(self, count: int) -> tuple[int, ...]:
        """Random ids."""
        return tuple(self.draw.randrange(self._vocab) for _ in range(count))

    def submit(self, ids: tuple[int, ...], new: int, prefill: PrefillMode | None = None) -> str:
        """Submit a request and give its id."""
        self._made += 1
        name = f"r{self._made}"
        sampling = SamplingParams(new, temperature=0.0, ignore_eos=True)
        self.core.submit(GenerateRequest(name, ids, sampling, prefill=prefill))
        return name

    def step(self) -> list[TokenDelta]:
        """Run one step; a request that fails ends the benchmark."""
        deltas = self.core.step()
        for delta in deltas:
            if delta.error is not None:
                raise RuntimeError(delta.error)
        return deltas

    def run(self, note: Callable[[TokenDelta, float], None]) -> None:
        """Run until nothing is left, noting each delta and when it came."""
        while self.core.has_work:
            for delta in self.step():
                note(delta, time.perf_counter())
