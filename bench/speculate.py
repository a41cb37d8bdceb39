"""Speculative decoding through the engine at a stated acceptance, beside plain decoding of the same model.

    python -m bench.speculate --geometry v41-8l --acceptance 3.5 --batch 1,4
    python -m bench.speculate --geometry v4-flash-8l --acceptance 1.8

FOR SPEED ONLY. Weights are drawn from a seed, so no draft would ever be right: every step yields the
stated number of tokens on average whether or not the draft agrees (engine.model.speculate's
fixed_acceptance), and the tokens are not those of the model. All else runs as in service: scheduler,
captured steps of draft, verification, sampling, counting and the stores of what counts, one
transfer to the host, deltas. Plain decoding is the engine without a drafter, one step ahead.

V4.1 shapes get the published DSpark stages, V4 shapes an MTP stage. Rows, bench "speculate": tok_s,
ms_step and acceptance_length of the speculative engine, plain_tok_s, and how many times plain that is.
`bound_ms` and `plain_bound_ms` are the time to read what either step must read, with the experts that
its rows are routed to (`experts_touched`: of the drafts' stages, then of the layers), and
`times_plain_at_bound` is what speculation would gain if both ran at their bounds: rows of one request
that are routed apart each bring experts of their own.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import statistics
import time
from collections.abc import Iterator
from typing import Any

import orjson
import torch
from torch import Tensor

from bench.bound import READ_BANDWIDTH, bound_ms, experts_touched
from bench.driven import BLOCK, pool_of
from bench.geometries import GEOMETRIES
from bench.rows import make_rows, spread, write_rows
from engine.api import GenerateRequest, SamplingParams
from engine.config import ModelConfig
from engine.core import EngineCore
from engine.device.fast_runner import FastRunner
from engine.device.kvpool import KVPool
from engine.device.rows import build_rows
from engine.kernels.accept import NO_STOP
from engine.model.drafting import Drafter
from engine.model.dspark import Dspark
from engine.model.fast import FastModel
from engine.model.loading import random_fast_model
from engine.model.mtp import Mtp
from engine.model.packed import PackedDspark, PackedMtp
from engine.model.packing import pack_dspark, pack_mtp
from engine.model.placement import Placement
from engine.model.sources import RandomSource
from engine.model.speculate import Speculator, Wanted
from engine.options import EngineConfig
from engine.plan.step import Chunk
from engine.speculation import draft_tokens, drafter_in

PROMPT, NEW, WARM_UPS = 128, 256, 1
#: Sizes of the published draft stages: V4.1's DSpark, V4's MTP.
DSPARK = {
    "num_nextn_predict_layers": 3,
    "dspark_block_size": 5,
    "dspark_noise_token_id": 128799,
    "dspark_markov_rank": 256,
    "dspark_n_routed_experts": 128,
    "dspark_num_experts_per_tok": 3,
}
MTP = {"num_nextn_predict_layers": 1}


def with_draft(name: str) -> ModelConfig:
    """A shape with the published draft stages of its version."""
    config: dict[str, Any] = copy.deepcopy(GEOMETRIES[name])
    text = config.get("text_config", config)
    layers = text["num_hidden_layers"]
    text |= DSPARK if "text_config" in config else MTP
    backbone = text["compress_ratios"][:layers]
    text["compress_ratios"] = [*backbone, *[0] * text["num_nextn_predict_layers"]]
    if "text_config" in config:
        text["dspark_target_layer_ids"] = [layers - 3, layers - 2, layers - 1]
    return ModelConfig.from_dict(config)


Stages = PackedDspark | tuple[PackedMtp, ...]


def random_drafter(model: FastModel, device: torch.device) -> tuple[Drafter, Stages]:
    """Draft stages of the model's shape, drawn from a seed, and their weights."""
    source, placement = RandomSource(model.config, device), Placement(device=device)
    if model.config.dspark is not None:
        weights = pack_dspark(model.config, source, placement, plain=model.dtype)
        return Dspark(model, weights), weights
    stages = pack_mtp(model.config, source, placement, plain=model.dtype)
    return Mtp(model, stages), stages


def nbytes(value: object) -> int:
    """Bytes of all tensors of packed weights."""
    if isinstance(value, Tensor):
        return value.nbytes
    if isinstance(value, tuple):
        return sum(map(nbytes, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return sum(nbytes(getattr(value, field.name)) for field in dataclasses.fields(value))
    return int(getattr(value, "nbytes", 0))


def draft_ms(model: FastModel, stages: Stages, touched: list[int]) -> float:
    """Milliseconds to read what drafts must read.

    Args:
        model: the backbone, whose head they share.
        stages: weights.
        touched: experts that each call of a stage reads: one in the draft, and for MTP's stages one
            more when the verification is remembered.
    """
    if isinstance(stages, PackedDspark):
        assert model.config.dspark is not None
        layers, heads = stages.stages, 1
        again = model.config.dspark.block_size - 1  # the Markov head, token by token
        read = again * nbytes(stages.markov_head) - nbytes(stages.markov_embed)
    else:
        layers, heads, read = tuple(stage.layer for stage in stages), len(stages), 0
    fixed = nbytes(stages) - sum(nbytes(layer.moe.experts) for layer in layers)
    read += len(touched) // len(layers) * fixed + heads * nbytes(model.weights.head)
    for number, count in enumerate(touched):
        moe = layers[number % len(layers)].moe
        read += count * nbytes(moe.experts) // len(moe.gate)
    return read / READ_BANDWIDTH * 1e3


def routes(core: EngineCore, model: FastModel, batch: int, speculator: Speculator) -> list[int]:
    """Distinct experts of each call of a router in a speculative step of requests of random tokens."""
    runner = core._runner
    assert isinstance(runner, FastRunner)
    pool = runner._pool
    assert isinstance(pool, KVPool)
    device = model.weights.embed.device
    per_request = -(-(PROMPT + NEW) // BLOCK)
    chunks = [
        Chunk(str(i), i + 1, PROMPT, (31 * i + 7,), (0,) * per_request, True) for i in range(batch)
    ]
    rows, _ = build_rows(chunks, block_size=BLOCK, device=device)

    def full(value: float, dtype: torch.dtype) -> Tensor:
        return torch.full((batch,), value, dtype=dtype, device=device)

    control = torch.full((batch, 3), NO_STOP, dtype=torch.int64, device=device)
    wanted = Wanted(
        temperature=full(0.0, torch.float64),
        top_p=full(1.0, torch.float64),
        seeds=full(0, torch.int64),
        index=full(0, torch.int32),
        control=control,
        left=full(0, torch.int64),
    )
    results = torch.zeros((batch, speculator.num_tokens + 2), dtype=torch.int64, device=device)
    return experts_touched(model, lambda: speculator.step(rows, pool, wanted, results))


def make_engine(
    model: FastModel, device: torch.device, streams: int, speculator: Speculator | None
) -> EngineCore:
    """An engine whose streams have room for a prompt and its reply."""
    options = EngineConfig(
        max_model_len=PROMPT + NEW,
        max_num_seqs=streams,
        max_batched_tokens=max(1024, streams + 1),
        block_size=BLOCK,
        num_blocks=2 * streams * -(-(PROMPT + NEW) // BLOCK),
        prefix_cache=False,
    )
    drafting = "off" if speculator is None else drafter_in(model.config)
    pool = pool_of(model, options, device, drafting)
    runner = FastRunner(
        model,
        pool,
        device,
        max_model_len=PROMPT + NEW,
        max_num_seqs=streams,
        captures=device.type == "cuda",
        speculator=speculator,
    )
    return EngineCore(runner, options, max_position_embeddings=PROMPT + NEW)


def pace(core: EngineCore, batch: int, repeats: int, vocab: int) -> tuple[list[float], list[float]]:
    """Tokens per second of streams that start together, and milliseconds of their steps."""
    rates, steps = [], []
    for repeat in range(WARM_UPS + repeats):
        for number in range(batch):
            ids = tuple((7919 * (i + 1) * (number + 1) + repeat) % vocab for i in range(PROMPT))
            sampling = SamplingParams(NEW, temperature=0.0, ignore_eos=True)
            core.submit(GenerateRequest(f"{repeat}-{number}", ids, sampling))
        begun, since, count, calls = set[str](), 0.0, 0, 0
        while core.has_work:
            deltas = core.step()
            now = time.perf_counter()
            if len(begun) == batch:
                count, calls = count + sum(len(delta.token_ids) for delta in deltas), calls + 1
            begun.update(delta.request_id for delta in deltas)
            if len(begun) == batch and not since:
                since = now
            if any(delta.finish_reason is not None for delta in deltas):
                break
        while core.has_work:
            core.step()
        if repeat >= WARM_UPS:
            rates.append(count / (now - since))
            steps.append((now - since) * 1e3 / calls)
    return rates, steps


def measure(args: argparse.Namespace, device: torch.device) -> Iterator[dict[str, Any]]:
    """Yield a row of each batch size, each as soon as it is there."""
    config = with_draft(args.geometry)
    drafts, vocab = draft_tokens(config, drafter_in(config)), config.vocab_size
    model = random_fast_model(
        config,
        kernels="triton" if device.type == "cuda" else "torch",
        device=device,
        max_model_len=PROMPT + NEW + drafts,
    )
    most = max(args.batch)
    core = make_engine(model, device, most, None)
    plain = {batch: pace(core, batch, args.repeats, vocab) for batch in args.batch}
    del core
    model.drafter, stages = random_drafter(model, device)
    speculator = Speculator(model, model.drafter, fixed_acceptance=args.acceptance)
    core = make_engine(model, device, most, speculator)
    depth, layers = config.num_nextn_predict_layers, config.num_hidden_layers
    pool = core._runner._pool  # type: ignore[union-attr]
    for batch in args.batch:
        before = core.stats().speculation
        rates, steps = pace(core, batch, args.repeats, vocab)
        after, (plain_rates, plain_steps) = core.stats().speculation, plain[batch]
        taken = sum(after.lengths) - sum(before.lengths)
        touched = routes(core, model, batch, speculator)
        of_layers = touched[depth : depth + layers]
        of_drafts = touched[:depth] + touched[depth + layers :]
        one = [min(batch * config.num_experts_per_tok, count) for count in of_layers]
        alone = bound_ms(model, pool, batch, PROMPT + NEW // 2, one)
        both = bound_ms(model, pool, batch, PROMPT + NEW // 2, of_layers)
        both += draft_ms(model, stages, of_drafts)
        length = 1 + (after.accepted - before.accepted) / max(1, taken)
        yield {
            "bench": "speculate",
            "geometry": args.geometry,
            "mode": f"fixed acceptance {args.acceptance}",
            "drafter": drafter_in(config),
            "batch": batch,
            "prompt_tokens": PROMPT,
            "new_tokens": NEW,
            "block": drafts,
            "acceptance_length": round(length, 3),
            "ms_step": spread(steps, 4),
            "tok_s": spread(rates, 1),
            "plain_ms_step": spread(plain_steps, 4),
            "plain_tok_s": spread(plain_rates, 1),
            "times_plain": round(statistics.median(rates) / statistics.median(plain_rates), 3),
            "experts_touched": touched,
            "experts_over_plain": round(sum(of_layers) / sum(one), 2),
            "bound_ms": round(both, 3),
            "bound_share": round(both / statistics.median(steps), 3),
            "plain_bound_ms": round(alone, 3),
            "times_plain_at_bound": round(length * alone / both, 3),
        }


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--geometry", default="v41-8l", choices=sorted(GEOMETRIES))
    parser.add_argument("--acceptance", type=float, default=3.5, help="tokens a step, on average")
    parser.add_argument("--batch", default=(1,), type=lambda text: tuple(map(int, text.split(","))))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--out", default="", help="file of rows under bench/results, none by default"
    )
    args = parser.parse_args()
    rows = []
    for row in measure(args, torch.device(args.device)):
        print(orjson.dumps(row).decode(), flush=True)
        rows.append(row)
        if args.out:  # as it stands: what was measured is kept if the run is cut
            write_rows(args.out, make_rows("bench.speculate", args.device, rows))


if __name__ == "__main__":
    torch.inference_mode()(main)()
