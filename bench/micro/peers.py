"""FlashInfer's sampling and top-k beside ours, on one GPU.

    python -m bench.micro.peers

FlashInfer compiles its kernels when they are first called, with nvcc; that time is given and not
counted. Ours draws exactly (float64, a pure function of seed and position), FlashInfer's by
rejection, float32. Top-k: 512 of the index scores of a context; ours gives places in the pool in
ascending order, ties to the lowest entry, FlashInfer's unsorted entries.

Rows, bench "peer": us of each over operands that no cache holds, replayed from a CUDA graph.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from typing import Any

import flashinfer
import torch
from flashinfer import sampling
from torch import Tensor

from bench.micro.timing import copies, replayed_us
from bench.rows import make_rows, write_rows
from engine.device.rows import build_rows
from engine.kernels.sampler import sample_triton
from engine.kernels.select import _choose
from engine.plan.step import Chunk

VOCAB = 129280
TOP_K, RATIO, BLOCK = 512, 4, 256


def first_call(call: Callable[[], object]) -> float:
    """Seconds of a first call, which compiles."""
    begin = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return round(time.perf_counter() - begin, 1)


def sampling_rows(batch: int, top_p: float) -> Iterator[dict[str, Any]]:
    """Time one draw for each of some rows of logits."""
    number = copies(batch * VOCAB * 4)
    logits = [torch.randn(batch, VOCAB, device="cuda") * 3 for _ in range(number)]
    temperature = torch.full((batch,), 0.8, dtype=torch.float64, device="cuda")
    nucleus = torch.full((batch,), top_p, dtype=torch.float64, device="cuda")
    seeds = torch.arange(batch, device="cuda")
    index = torch.zeros(batch, dtype=torch.int32, device="cuda")
    narrow = temperature.float()

    def ours(x: Tensor) -> object:
        return sample_triton(x, temperature, nucleus, seeds, index)

    def theirs(x: Tensor) -> object:
        if top_p == 1:
            return sampling.sampling_from_logits(x / narrow[:, None], seed=1, offset=0)
        probs = sampling.softmax(x, narrow)
        return sampling.top_p_sampling_from_probs(probs, top_p, seed=1, offset=0)

    for name, draw in (("ours", ours), ("flashinfer", theirs)):
        seconds = first_call(lambda draw=draw: draw(logits[0]))  # type: ignore[misc]
        us = replayed_us([lambda x=x, draw=draw: draw(x) for x in logits])  # type: ignore[misc]
        yield {
            "bench": "peer", "what": "sample", "mode": name, "batch": batch, "top_p": top_p,
            "us": round(us, 1), "first_call_s": seconds,
        }  # fmt: skip


def top_k_rows(batch: int, context: int) -> Iterator[dict[str, Any]]:
    """Time the choice of the best entries of each of some rows."""
    width = context // RATIO
    scores = [torch.randn(batch, width, device="cuda") for _ in range(copies(batch * width * 4))]
    blocks = tuple(range(1, context // BLOCK + 1))
    chunks = [Chunk(str(i), i + 1, context - 1, (1,), blocks, True) for i in range(batch)]
    rows, _ = build_rows(chunks, block_size=BLOCK, device="cuda")
    places = torch.empty((batch, TOP_K), dtype=torch.int32, device="cuda")

    def ours(x: Tensor) -> object:
        return _choose(x, places, rows, slice(0, batch), RATIO, 0)

    def theirs(x: Tensor) -> object:
        return flashinfer.top_k(x, TOP_K)

    for name, choose in (("ours", ours), ("flashinfer", theirs)):
        seconds = first_call(lambda choose=choose: choose(scores[0]))  # type: ignore[misc]
        us = replayed_us([lambda x=x, choose=choose: choose(x) for x in scores])  # type: ignore[misc]
        if name == "ours":
            entries = {place - BLOCK // RATIO for place in places[0].tolist()}  # blocks from 1 on
            best = set(scores[-1][0].topk(TOP_K).indices.tolist())
            assert entries == best, "ours must be the best entries before it is timed"
        yield {
            "bench": "peer", "what": "top_k", "mode": name, "batch": batch,
            "prompt_tokens": context, "us": round(us, 1), "first_call_s": seconds,
        }  # fmt: skip


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", default="", help="file of rows under bench/results")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    cases = [
        *(sampling_rows(batch, top_p) for top_p in (0.95, 1.0) for batch in (1, 16, 64)),
        *(top_k_rows(batch, context) for batch, context in ((1, 65536), (16, 32768), (64, 8192))),
    ]
    for case in cases:
        for row in case:
            print(row, flush=True)
            rows.append(row)
            if args.out:
                write_rows(args.out, make_rows("bench.micro.peers", "cuda", rows))


if __name__ == "__main__":
    torch.inference_mode()(main)()
