"""A model larger than the GPU behind the gateway: a completion over HTTP, timed by its client.

    python -m bench.beyond --geometry v4-flash-43l --slots 128 --resident-layers 30 --hit 0.9

The whole way: HTTP, codec, engine thread, scheduler, captured decode steps over paged experts. Weights
are drawn from a seed; the tokenizer is that of the checkpoint that ships, so ids that the model draws
are taken modulo its size. Decode steps are routed by a trace (bench.paged_model) whose choices lie in
the K experts used last with probability h; prompts by the routers themselves.

Row, bench "beyond": tok_s between the first and the last piece of the reply, ms_step between one piece
and the next, ttft_ms, hit_rate of the reply's steps as the slots counted it, offloaded_gb, load_s,
pin_gb_s, peaks of both sides' memory.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import signal
import threading
import time
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import numpy as np
import orjson
import torch

from bench.driven import config_of
from bench.geometries import QWEN
from bench.paged_model import Injected, peaks, reuse_trace
from bench.rows import make_rows, spread, write_rows
from engine import TINY_CHECKPOINT
from engine.api import GenerateRequest, TokenDelta
from engine.config import ModelConfig
from engine.core import EngineCore
from engine.device.fast_runner import FastRunner
from engine.device.kvpool import KVPool
from engine.model.experts import PagedExperts
from engine.model.fast import FastModel
from engine.model.loading import random_fast_model
from engine.options import EngineConfig
from engine.thread import EngineThread
from gateway.backends.embedded import EmbeddedBackend
from gateway.launch import serve
from gateway.settings import Settings

CONTEXT, BLOCK = 2048, 256
#: Short, so that it is one wave and leaves the slots to the trace.
PROMPT = "Once upon"


class Beyond(EmbeddedBackend):
    """The shipped checkpoint's tokenizer in front of a drawn model.

    Args:
        args: of the command.
        options: of the engine.
    """

    def __init__(self, args: argparse.Namespace, options: EngineConfig) -> None:
        super().__init__(TINY_CHECKPOINT, options, name=args.geometry)
        self._args = args
        tokenizer = orjson.loads((TINY_CHECKPOINT / "tokenizer.json").read_bytes())
        self._vocab = len(tokenizer["model"]["vocab"])
        self.ready: dict[str, Any] = {}
        self.model: FastModel | None = None

    async def start(self) -> None:
        """Draw the model and capture its steps."""
        self._thread = EngineThread(self._load)
        await asyncio.to_thread(self._thread.start)

    def _load(self) -> EngineCore:
        a, begin = self._args, time.perf_counter()
        device = torch.device(a.device)
        on_gpu = device.type == "cuda"
        config = config_of(a.geometry)
        assert isinstance(config, ModelConfig)
        layers = range(a.resident_layers, config.num_hidden_layers)
        model = random_fast_model(
            config, kernels="triton" if on_gpu else "torch", device=device, max_model_len=CONTEXT,
            slots=dict.fromkeys(layers, a.slots),
        )  # fmt: skip
        self.model = model
        k, experts = config.num_experts_per_tok, config.n_routed_experts
        lines = [
            reuse_trace(a.tokens, experts, k, range(a.slots), a.hit, layer)
            for layer in range(config.num_hidden_layers)
        ]
        trace = np.array(lines, np.int32).transpose(1, 0, 2)[:, :, None]
        Injected(model, np.ascontiguousarray(trace), experts)
        options = self._options
        pool = KVPool(
            config, num_blocks=options.resolve_num_blocks(CONTEXT) + 1, block_size=BLOCK,
            num_slots=options.resolve_num_slots(), device=device, dtype=model.dtype,
            ring_history=True, forms=model.forms,
        )  # fmt: skip
        if on_gpu:
            torch.cuda.synchronize()
        paged = [e for e in model.experts if isinstance(e, PagedExperts)]
        store, pin = sum(p.store.nbytes for p in paged), sum(p.pin_seconds for p in paged)
        self.ready = {
            "load_s": round(time.perf_counter() - begin, 1),
            "host_gb": round(store / 1e9, 2),
            "offloaded_gb": round((store - sum(p.nbytes for p in paged)) / 1e9, 2),
            "pin_gb_s": round(store / 1e9 / pin, 2) if pin else None,
        }
        held = sum(e.nbytes for e in model.experts)
        print(f"# drawn: {self.ready}, experts on the GPU {held / 1e9:.1f} GB", flush=True)
        runner = FastRunner(
            model, pool, device, max_model_len=CONTEXT, max_num_seqs=1, captures=on_gpu,
            captured_rows=a.slots // k,
        )  # fmt: skip
        self.ready["ready_s"] = round(time.perf_counter() - begin, 1)
        print(f"# ready after {self.ready['ready_s']} s", flush=True)
        return EngineCore(runner, options, max_position_embeddings=CONTEXT)

    def counts(self) -> tuple[int, int]:
        """Hits and misses so far."""
        assert self.model is not None
        found = [e.counts() for e in self.model.experts if isinstance(e, PagedExperts)]
        return sum(h for h, _ in found), sum(m for _, m in found)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
        """Generate; ids are those of the tokenizer."""
        async for delta in super().generate(request):
            yield delta._replace(token_ids=tuple(i % self._vocab for i in delta.token_ids))


def ask(url: str, model: str, tokens: int) -> dict[str, Any]:
    """Stream one completion; when its pieces came, and the usage it ends with."""
    body = {
        "model": model, "prompt": PROMPT, "max_tokens": tokens, "stream": True,
        "temperature": 0.0, "stream_options": {"include_usage": True},
    }  # fmt: skip
    begin, came, usage = time.perf_counter(), list[float](), dict[str, Any]()
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=300) as reply:
        if reply.status_code != 200:
            raise RuntimeError(f"{reply.status_code}: {reply.read().decode()}")
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                piece = orjson.loads(line[6:])
                usage = piece.get("usage") or usage
                if any(choice.get("text") for choice in piece["choices"]):
                    came.append(time.perf_counter())
    return {"begin": begin, "came": came, "usage": usage}


def measure(args: argparse.Namespace, backend: Beyond, url: str) -> dict[str, Any]:
    """One completion to make the kernels of its prompt ready, one that counts."""
    ask(url, backend.info.name, 8)
    print("# first completion done", flush=True)
    before = backend.counts()
    found = ask(url, backend.info.name, args.tokens)
    hits, misses = (b - a for a, b in zip(before, backend.counts(), strict=True))
    count, came = found["usage"]["completion_tokens"], found["came"]
    return {
        "bench": "beyond",
        "geometry": args.geometry,
        "mode": "paged",
        "batch": 1,
        "prompt_tokens": found["usage"]["prompt_tokens"],
        "new_tokens": count,
        "slots": args.slots,
        "resident_layers": args.resident_layers,
        "tok_s": round((count - 1) / (came[-1] - came[0]), 1),
        "ms_step": spread([(b - a) * 1e3 for a, b in itertools.pairwise(came)]),
        "ttft_ms": round((came[0] - found["begin"]) * 1e3, 1),
        "hit_rate": round(hits / (hits + misses), 4),
        **backend.ready,
        **peaks(),
    }


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--geometry", default="v4-flash-43l")
    parser.add_argument("--slots", type=int, default=128)
    parser.add_argument("--resident-layers", type=int, default=30)
    parser.add_argument("--hit", type=float, default=0.9)
    parser.add_argument("--device", default="cuda", help="cpu to try the benchmark itself")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument(
        "--out", default="", help="file of rows under bench/results, none by default"
    )
    args = parser.parse_args()
    if args.geometry == QWEN:  # bench.paged has it, behind no gateway
        parser.error(f"--geometry: expected one of DeepSeek's shapes, got {QWEN}")
    options = EngineConfig(
        max_model_len=CONTEXT, max_num_seqs=1, max_batched_tokens=512, block_size=BLOCK,
        num_blocks=CONTEXT // BLOCK, prefix_cache=False,
    )  # fmt: skip
    backend = Beyond(args, options)

    def client(url: str) -> None:
        try:
            row = measure(args, backend, url)
            print(row, flush=True)
            if args.out:
                write_rows(args.out, make_rows("bench.beyond", args.device, [row]))
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    def announce(text: str) -> None:
        print(f"# {text.splitlines()[0]}", flush=True)
        if " at http://" in text:
            url = "http://" + text.split(" at http://")[1].split("/v1")[0]
            threading.Thread(target=client, args=(url,)).start()

    raise SystemExit(serve(Settings(port=0), backend, announce))


if __name__ == "__main__":
    main()
