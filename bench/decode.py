"""Time to first token, tokens per second and host overhead of the engine as it is served.

    python -m bench.decode                    the checkpoint that ships
    python -m bench.decode --model DIR        another one
    python -m bench.decode --random           the shipped shape with random weights

Everything runs through the embedded backend: event loop, engine thread, scheduler, model, sampler.
Prompts are random ids, distinct per request; greedy; EOS ignored; two warm-ups before the repeats.
Rows go to bench/results/decode-GEOMETRY-DEVICE.jsonl:

* bench "ttft": one request alone, from generate() to its first delta;
* bench "decode": `batch` requests at once. tok_s counts tokens after the last request's first one,
  tok_s_total all tokens over the whole time, prompts included;
* bench "host": the same with a model that takes no time, so what scheduler, core, sampler, thread
  and hop cost per step.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import torch
from torch import Tensor

from bench.rows import make_rows, spread, write_rows
from engine import TINY_CHECKPOINT
from engine.api import GenerateRequest, SamplingParams
from engine.config import ModelConfig
from engine.core import EngineCore
from engine.device.runner import LogitsRunner
from engine.options import EngineConfig
from engine.plan.step import StepPlan
from engine.thread import EngineThread, Sink
from gateway.backends import Backend
from gateway.backends.embedded import EmbeddedBackend
from tests.engine.model import build

WARM_UPS = 2
HOST_STEPS = 1000


@dataclass(frozen=True)
class Timing:
    """When one request's tokens came, in seconds after the start of its batch."""

    first: float
    last: float
    arrivals: tuple[float, ...]


class Requests:
    """Makes requests of random ids that share no prefix.

    Args:
        vocab_size: ids are drawn below it.
    """

    def __init__(self, vocab_size: int) -> None:
        self._draw = random.Random(0)
        self._vocab_size = vocab_size
        self._made = 0

    def make(self, prompt_tokens: int, new_tokens: int) -> GenerateRequest:
        """Make the next one."""
        self._made += 1
        ids = tuple(self._draw.randrange(self._vocab_size) for _ in range(prompt_tokens))
        sampling = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
        return GenerateRequest(f"bench-{self._made}", ids, sampling)


async def time_batch(backend: Backend, batch: list[GenerateRequest]) -> list[Timing]:
    """Submit all requests at once and note when their tokens come."""
    start = time.perf_counter()

    async def one(request: GenerateRequest) -> Timing:
        arrivals: list[float] = []
        async for delta in backend.generate(request):
            if delta.error is not None:
                raise RuntimeError(delta.error)
            arrivals += [time.perf_counter() - start] * len(delta.token_ids)
        return Timing(arrivals[0], arrivals[-1], tuple(arrivals))

    return list(await asyncio.gather(*(one(request) for request in batch)))


async def measure_ttft(
    backend: Backend, requests: Requests, prompt_tokens: int, repeats: int
) -> dict[str, Any]:
    """Time to first token of one prompt alone, in ms."""
    values = []
    for _ in range(WARM_UPS + repeats):
        (timing,) = await time_batch(backend, [requests.make(prompt_tokens, 1)])
        values.append(timing.first * 1e3)
    return {
        "bench": "ttft",
        "batch": 1,
        "prompt_tokens": prompt_tokens,
        "ttft_ms": spread(values[WARM_UPS:], 1),
    }


async def measure_decode(
    backend: Backend,
    requests: Requests,
    batch: int,
    prompt_tokens: int,
    new_tokens: int,
    repeats: int,
) -> dict[str, Any]:
    """Tokens per second of `batch` streams that start together."""
    decode, total, step = [], [], []
    for _ in range(WARM_UPS + repeats):
        before = backend.stats().steps
        timings = await time_batch(
            backend, [requests.make(prompt_tokens, new_tokens) for _ in range(batch)]
        )
        steps = backend.stats().steps - before
        begin, end = max(t.first for t in timings), max(t.last for t in timings)
        later = sum(arrival > begin for t in timings for arrival in t.arrivals)
        decode.append(later / (end - begin))
        total.append(batch * new_tokens / end)
        step.append((end - begin) * 1e3 / (later / batch))
        if steps < new_tokens:
            raise RuntimeError(f"{steps} steps cannot have made {new_tokens} tokens of a stream")
    return {
        "bench": "decode",
        "batch": batch,
        "prompt_tokens": prompt_tokens,
        "new_tokens": new_tokens,
        "ms_step": spread(step[WARM_UPS:]),
        "tok_s": spread(decode[WARM_UPS:], 1),
        "tok_s_total": spread(total[WARM_UPS:], 1),
    }


class InstantModel(LogitsRunner):
    """A runner that takes no time: the same logits for every row."""

    def __init__(self, vocab_size: int, most: int) -> None:
        self._vocab_size = vocab_size
        row = torch.randn(vocab_size, generator=torch.Generator().manual_seed(0))
        self._logits = [row.repeat(n, 1) for n in range(most + 1)]

    @property
    def vocab_size(self) -> int:
        """Token ids the model knows."""
        return self._vocab_size

    def run(self, plan: StepPlan) -> Tensor:
        """Give logits for the chunks that want them."""
        return self._logits[sum(chunk.wants_logits for chunk in plan.chunks)]


async def measure_host(
    config: ModelConfig, batch: int, temperature: float, repeats: int
) -> dict[str, Any]:
    """Microseconds per step of all that is not the model."""
    options = EngineConfig(max_num_seqs=batch)

    def load() -> EngineCore:
        torch.set_num_threads(1)
        runner = InstantModel(config.vocab_size, batch)
        return EngineCore(runner, options, max_position_embeddings=config.max_position_embeddings)

    thread = EngineThread(load)
    await asyncio.to_thread(thread.start)
    loop = asyncio.get_running_loop()
    values = []
    try:
        for repeat in range(WARM_UPS + repeats):
            queues = []
            start = time.perf_counter()
            for row in range(batch):
                queue: asyncio.Queue[Any] = asyncio.Queue()
                sampling = SamplingParams(HOST_STEPS, temperature, seed=row, ignore_eos=True)
                request = GenerateRequest(f"{repeat}-{row}", (1, 2, 3), sampling)
                thread.submit(request, Sink(loop, queue.put_nowait))
                queues.append(queue)
            for queue in queues:
                while (await queue.get()).finish_reason is None:
                    pass
            values.append((time.perf_counter() - start) * 1e6 / HOST_STEPS)
    finally:
        await asyncio.to_thread(thread.stop)
    return {
        "bench": "host",
        "batch": batch,
        "temperature": temperature,
        "us_step": spread(values[WARM_UPS:], 1),
    }


@contextmanager
def checkpoint(args: argparse.Namespace) -> Iterator[tuple[str, Path]]:
    """Give the geometry's name and the folder to load."""
    if not args.random:
        yield ("bathyal-tiny" if args.model == TINY_CHECKPOINT else args.model.name), args.model
        return
    config = orjson.loads((args.model / "config.json").read_bytes())
    with tempfile.TemporaryDirectory() as folder:
        path = build.write(Path(folder) / "random", config, seed=1)
        name = "bathyal-tiny" if args.model == TINY_CHECKPOINT else args.model.name
        yield f"{name}-random", path


async def measure(geometry: str, path: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Run all measurements on one checkpoint."""
    options = EngineConfig(
        device=args.device, cpu_threads=args.cpu_threads, max_num_seqs=max(args.streams)
    )
    backend = EmbeddedBackend(path, options)
    config = ModelConfig.from_file(path)
    requests = Requests(config.vocab_size)
    await backend.start()
    try:
        figures = [await measure_ttft(backend, requests, args.prompt_tokens, args.repeats)]
        for batch in args.streams:
            figures.append(  # noqa: PERF401 (one after the other)
                await measure_decode(backend, requests, batch, 128, args.new_tokens, args.repeats)
            )
    finally:
        await backend.stop()
    for batch in args.streams:
        for temperature in (0.0, 1.0):
            figures.append(  # noqa: PERF401 (one after the other)
                await measure_host(config, batch, temperature, args.repeats)
            )
    threads = {"cpu_threads": args.cpu_threads or "default"}
    return [{**row, "geometry": geometry, "mode": "eager", **threads} for row in figures]


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=TINY_CHECKPOINT)
    parser.add_argument("--random", action="store_true", help="random weights in the model's shape")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--cpu-threads", type=int)
    parser.add_argument("--prompt-tokens", type=int, default=600, help="of the TTFT measurement")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    if args.new_tokens < 2:
        parser.error(f"--new-tokens: expected at least 2 to time the second, got {args.new_tokens}")
    with checkpoint(args) as (geometry, path):
        figures = asyncio.run(measure(geometry, path, args))
    device = "cuda" if args.device != "cpu" and torch.cuda.is_available() else "cpu"
    rows = make_rows("bench.decode", device, figures)
    for row in figures:
        print(orjson.dumps(row).decode())
    print(write_rows(f"decode-{geometry}-{device}", rows))


if __name__ == "__main__":
    main()
