"""Time to first token of an agent's second turn, with the prefix cache and without.

    python -m bench.prefix                    the checkpoint that ships
    python -m bench.prefix --model DIR        another one
    python -m bench.prefix --random           the shipped shape with random weights

A conversation is a prompt of random ids, a generated answer, and a second prompt: all of that and
some new ids (a tool's result). Greedy; EOS ignored; one conversation at a time, two warm-ups. Rows
go to bench/results/prefix-GEOMETRY-DEVICE.jsonl:

* bench "first_turn": nothing is known yet, so this is what keeping state costs;
* bench "second_turn": history_tokens are known to the cache but for the last one sampled.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import orjson
import torch

from bench.decode import Requests, checkpoint
from bench.rows import make_rows, spread, write_rows
from engine import TINY_CHECKPOINT
from engine.api import GenerateRequest, Usage
from engine.config import ModelConfig
from engine.options import EngineConfig
from gateway.backends import Backend
from gateway.backends.embedded import EmbeddedBackend

WARM_UPS = 2


async def answer(backend: Backend, request: GenerateRequest) -> tuple[float, list[int], Usage]:
    """Give the time to the first token in ms, all tokens, and the usage of the first delta."""
    loop = asyncio.get_running_loop()
    start = loop.time()
    first, usage = 0.0, None
    tokens: list[int] = []
    async for delta in backend.generate(request):
        if delta.error is not None:
            raise RuntimeError(delta.error)
        if not tokens:
            first, usage = (loop.time() - start) * 1e3, delta.usage
        tokens += delta.token_ids
    if usage is None:
        raise RuntimeError("the first delta carries no usage")
    return first, tokens, usage


async def measure(
    path: Path, options: EngineConfig, args: argparse.Namespace
) -> list[dict[str, Any]]:
    """Run the conversations on one engine."""
    backend = EmbeddedBackend(path, options)
    requests = Requests(ModelConfig.from_file(path).vocab_size)
    times: dict[str, list[float]] = {"first_turn": [], "second_turn": []}
    cached = 0
    await backend.start()
    try:
        for _ in range(WARM_UPS + args.repeats):
            prompt = requests.make(args.history_tokens - args.answer_tokens, args.answer_tokens)
            ttft, tokens, _ = await answer(backend, prompt)
            times["first_turn"].append(ttft)
            new = requests.make(args.new_tokens, 1)
            ids = (*prompt.prompt_ids, *tokens, *new.prompt_ids)
            ttft, _, usage = await answer(backend, dataclasses.replace(new, prompt_ids=ids))
            times["second_turn"].append(ttft)
            cached = usage.cached_tokens
    finally:
        await backend.stop()
    lengths = {
        "first_turn": args.history_tokens - args.answer_tokens,
        "second_turn": args.history_tokens + args.new_tokens,
    }
    return [
        {
            "bench": bench,
            "batch": 1,
            "prefix_cache": options.prefix_cache,
            "prompt_tokens": lengths[bench],
            "history_tokens": args.history_tokens if bench == "second_turn" else 0,
            "cached_tokens": cached if bench == "second_turn" else 0,
            "ttft_ms": spread(values[WARM_UPS:], 1),
        }
        for bench, values in times.items()
    ]


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=TINY_CHECKPOINT)
    parser.add_argument("--random", action="store_true", help="random weights in the model's shape")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--cpu-threads", type=int)
    parser.add_argument("--history-tokens", type=int, default=600, help="first prompt and answer")
    parser.add_argument("--answer-tokens", type=int, default=40)
    parser.add_argument("--new-tokens", type=int, default=60)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    if not 0 < args.answer_tokens < args.history_tokens:
        parser.error(
            f"--answer-tokens: expected fewer than the {args.history_tokens} history tokens,"
            f" got {args.answer_tokens}"
        )
    figures = []
    with checkpoint(args) as (geometry, path):
        for prefix_cache in (False, True):
            options = EngineConfig(
                device=args.device, cpu_threads=args.cpu_threads, prefix_cache=prefix_cache
            )
            figures += asyncio.run(measure(path, options, args))
    labels = {
        "geometry": geometry,
        "mode": "eager",
        "cpu_threads": args.cpu_threads or "default",
    }
    device = "cuda" if args.device != "cpu" and torch.cuda.is_available() else "cpu"
    rows = make_rows("bench.prefix", device, [{**row, **labels} for row in figures])
    for row in rows:
        print(orjson.dumps(row).decode())
    print(write_rows(f"prefix-{geometry}-{device}", rows))


if __name__ == "__main__":
    main()
