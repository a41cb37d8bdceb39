"""Speculative decoding on the GPU at a stated acceptance, beside plain decoding of the same model.

    python -m bench.speculate --geometry v41-8l --acceptance 3.5

FOR SPEED ONLY. Weights are drawn from a seed, so no draft would ever be right: every step yields the
stated number of tokens on average whether or not the draft agrees
(engine.model.speculate.Speculator's fixed_acceptance). Draft (three DSpark stages, block of five),
verification, sampling, counting and the stores of what counts run as they would in service, captured in one CUDA graph.

Rows, bench "speculate": ms_step, tokens a step, tok_s, and plain_tok_s of the same run.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from bench.device_step import BLOCK
from bench.geometries import GEOMETRIES
from bench.rows import fill_finite, make_rows, spread, write_rows
from engine.config import ModelConfig
from engine.device.kvpool import KVPool
from engine.device.rows import build_rows
from engine.kernels.ops import ops
from engine.kernels.rows import Rows
from engine.model.dspark import Dspark
from engine.model.fast import FastModel
from engine.model.packed import RandomSource, pack, pack_dspark
from engine.model.placement import Placement
from engine.model.speculate import Speculator, Wanted
from engine.plan.step import Chunk

STAGES, BLOCK_SIZE, CONTEXT = 3, 5, 4096


def with_draft(name: str) -> ModelConfig:
    """A V4.1 shape with the published draft stages."""
    config: dict[str, Any] = copy.deepcopy(GEOMETRIES[name])
    text = config["text_config"]
    layers = text["num_hidden_layers"]
    text |= {
        "num_nextn_predict_layers": STAGES,
        "compress_ratios": [*text["compress_ratios"], *[0] * STAGES],
        "dspark_block_size": BLOCK_SIZE,
        "dspark_noise_token_id": 128799,
        "dspark_target_layer_ids": [layers - 3, layers - 2, layers - 1],
        "dspark_markov_rank": 256,
        "dspark_n_routed_experts": 128,
        "dspark_num_experts_per_tok": 3,
    }
    return ModelConfig.from_dict(config)


def time_graph(step: Callable[[], None], rows: Rows, steps: int, repeats: int) -> list[float]:
    """Milliseconds of a captured step, one figure a repeat."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    start, found = rows.starts.clone(), []
    for repeat in range(repeats + 1):
        rows.positions.copy_(start)
        rows.starts.copy_(start)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(steps):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        if repeat:
            found.append(begin.elapsed_time(end) / steps)
    return found


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--geometry", default="v41-8l")
    parser.add_argument("--acceptance", type=float, default=3.5, help="tokens a step, on average")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument(
        "--out", default="", help="file of rows under bench/results, none by default"
    )
    args = parser.parse_args()
    config, device = with_draft(args.geometry), torch.device("cuda")
    source, placement = RandomSource(config, device), Placement(device=device, pin=False)
    assert config.engram is not None
    fold = np.arange(config.vocab_size) % config.engram.compressed_vocab_size
    model = FastModel(
        config,
        pack(config, source, placement),
        ops("triton"),
        fold=fold,
        round_trips=True,
        max_model_len=CONTEXT + 64,
    )
    draft = Dspark(model, pack_dspark(config, source, placement))
    blocks = CONTEXT // BLOCK + 2
    pool = KVPool(
        config, num_blocks=blocks + 1, block_size=BLOCK, num_slots=2, device=device,
        dtype=torch.bfloat16, forms=model.forms, ring_history=True, draft_stages=STAGES,
    )  # fmt: skip
    for tensor in (*pool.window, *pool.draft, *pool.entries.values(), *pool.index_keys.values()):
        fill_finite(tensor)
    chunk = Chunk("s", 1, 256, (11,), tuple(range(1, blocks + 1)), True)
    rows, _ = build_rows([chunk], block_size=BLOCK, device=device)
    rows = dataclasses.replace(rows, max_end=CONTEXT, spans=())
    model.tapped = ()

    def plain() -> None:
        rows.ids.copy_(model.decode(rows, pool).argmax(-1))
        rows.positions.add_(1)
        rows.starts.add_(1)

    alone = spread(time_graph(plain, rows, args.steps, args.repeats), 4)
    assert config.dspark is not None
    model.tapped = config.dspark.target_layer_ids
    speculator = Speculator(model, draft, fixed_acceptance=args.acceptance)

    def one(value: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([value], dtype=dtype, device=device)

    wanted = Wanted(
        temperature=one(0.0, torch.float64),
        top_p=one(1.0, torch.float64),
        seeds=one(0, torch.int64),
        index=one(0, torch.int32),
        left=one(1 << 30, torch.int32),
        ends=one(1, torch.int64),
        ends_count=torch.zeros(1, dtype=torch.bool, device=device),
    )

    def speculative() -> None:
        step = speculator.step(rows, pool, wanted)
        last = (step.counts - 1).clamp(min=0).long()
        rows.ids.copy_(step.ids.gather(1, last[:, None])[:, 0])
        rows.positions.add_(step.counts)
        rows.starts.add_(step.counts)
        wanted.index.add_(step.counts)

    found = spread(time_graph(speculative, rows, args.steps, args.repeats), 4)
    tok_s = args.acceptance * 1e3 / found["median"]
    row = {
        "bench": "speculate", "geometry": args.geometry, "mode": f"fixed acceptance {args.acceptance}",
        "batch": 1, "prompt_tokens": 256, "block": BLOCK_SIZE, "ms_step": found,
        "plain_ms_step": alone, "tok_s": round(tok_s, 1),
        "plain_tok_s": round(1e3 / alone["median"], 1),
        "times_plain": round(tok_s * alone["median"] / 1e3, 2),
    }  # fmt: skip
    print(row, flush=True)
    if args.out:
        write_rows(args.out, make_rows("bench.speculate", "cuda", [row]))


if __name__ == "__main__":
    torch.inference_mode()(main)()
