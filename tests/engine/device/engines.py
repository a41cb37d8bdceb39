"""Engines over small models, with the fast runner or the reference's, for tests of the runtime."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from engine.api import FinishReason, GenerateRequest, SamplingParams
from engine.core import EngineCore
from engine.device.fast_runner import FastRunner
from engine.device.kvpool import KVPool
from engine.device.runner import ModelRunner
from engine.model.checkpoint import load_model
from engine.model.fast import FastModel
from engine.model.loading import load_fast_model
from engine.model.v4 import Model
from engine.options import EngineConfig

CONTEXT = 96
VOCAB = 288
CPU = torch.device("cpu")
OPTIONS = EngineConfig(
    device="cpu",
    cpu_threads=1,
    block_size=16,
    num_blocks=14,
    max_num_seqs=6,
    max_batched_tokens=40,
    max_snapshots=5,
    max_model_len=CONTEXT,
)


def load_fast(path: Path) -> FastModel:
    """The model over packed weights, in float32 and without rounding."""
    return load_fast_model(
        path,
        kernels="torch",
        device="cpu",
        dtype=torch.float32,
        round_trips="off",
        max_model_len=CONTEXT,
    )


def load_reference(path: Path) -> Model:
    return load_model(path, round_trips="off")


def make_pool(config: Any, options: EngineConfig, *, ring: bool) -> KVPool:
    return KVPool(
        config,
        num_blocks=options.resolve_num_blocks(CONTEXT) + 1,
        block_size=options.block_size,
        num_slots=options.resolve_num_slots(),
        ring_history=ring,
    )


def make_fast(
    model: Any, options: EngineConfig = OPTIONS, *, poison: bool = True, **how: Any
) -> EngineCore:
    """An engine with the fast runner; all that nobody holds is NaN in every step."""
    pool = make_pool(model.config, options, ring=True)
    runner = FastRunner(
        model,
        pool,
        CPU,
        max_model_len=CONTEXT,
        max_num_seqs=options.max_num_seqs,
        **{"buckets": (1, 2, 4, 6), **how},
    )
    core = EngineCore(runner, options, max_position_embeddings=CONTEXT)
    if poison:
        poison_what_is_free(core, pool)
    return core


def make_reference(model: Model, options: EngineConfig = OPTIONS) -> EngineCore:
    pool = make_pool(model.config, options, ring=False)
    return EngineCore(ModelRunner(model, pool, CPU), options, max_position_embeddings=CONTEXT)


def poison_what_is_free(core: EngineCore, pool: KVPool) -> None:
    """Before each step, fill all that neither a request nor the prefix cache holds."""
    blocks, slots = core._scheduler.blocks, core._scheduler.slots
    copy = pool.copy

    def poisoning(*pairs: Any) -> None:
        # What was launched ahead for a request that ended has written by now.
        copy(*pairs)
        pool.poison(slots=slots._free, blocks=blocks._free)
        pool.history[slots._free] = 7

    pool.copy = poisoning  # type: ignore[method-assign]


def requests(draw: random.Random, count: int) -> list[tuple[GenerateRequest, int, int]]:
    """Requests, each with the steps to wait before it and those to its abort (0: none).

    Prompts share prefixes; some requests sample, some ask for log-probabilities, some stop early.
    """
    texts = [[draw.randrange(VOCAB) for _ in range(60)] for _ in range(2)]
    found = []
    for number in range(count):
        text = draw.choice(texts)
        ids = text[: draw.randint(1, 60)] + [draw.randrange(VOCAB) for _ in range(draw.randint(0, 9))]  # fmt: skip
        sampling = SamplingParams(
            max_tokens=draw.randint(1, 25),
            temperature=draw.choice((0.0, 0.8)),
            top_p=draw.choice((1.0, 0.9)),
            seed=number,
            top_logprobs=draw.choice((None, None, None, None, 0, 2)),
            stop_token_ids=tuple(draw.sample(range(VOCAB), draw.choice((0, 0, 40)))),
        )
        request = GenerateRequest(f"r{number}", tuple(ids), sampling)
        found.append((request, draw.randint(0, 4), draw.choice((0, 0, 0, draw.randint(1, 9)))))
    return found


@dataclasses.dataclass
class Outcome:
    """What became of a request."""

    tokens: list[int]
    logprobs: list[float]
    reason: FinishReason | None = None


def run(core: EngineCore, load: Sequence[tuple[GenerateRequest, int, int]]) -> dict[str, Outcome]:
    """Serve a load to its end, checking the books after every step."""
    found: dict[str, Outcome] = {}
    for deltas in steps(core, load, found):
        for delta in deltas:
            outcome = found[delta.request_id]
            assert outcome.reason is None, "nothing follows the last delta"
            assert delta.finish_reason is not FinishReason.ERROR, delta.error
            outcome.tokens += delta.token_ids
            outcome.logprobs += [entry.logprob for entry in delta.logprobs or ()]
            outcome.reason = delta.finish_reason
    assert core.stats().free_blocks == core.stats().total_blocks
    return found


def steps(
    core: EngineCore,
    load: Sequence[tuple[GenerateRequest, int, int]],
    found: dict[str, Outcome],
) -> Iterator[Any]:
    waiting, aborts, step = list(load), dict[str, int](), 0
    while waiting or core.has_work:
        while waiting and (not waiting[0][1] or step % waiting[0][1] == 0):
            request, _, abort = waiting.pop(0)
            core.submit(request)
            found[request.id] = Outcome([], [])
            if abort:
                aborts[request.id] = step + abort
        for name in [name for name, at in aborts.items() if at <= step]:
            core.abort(name)
            del aborts[name]
        yield core.step()
        core.check_integrity()
        step += 1
        assert step < 20_000


def same(
    got: dict[str, Outcome],
    want: dict[str, Outcome],
    load: Sequence[tuple[GenerateRequest, int, int]],
    atol: float = 1e-4,
) -> bool:
    """Whether all requests got the same; aborted ones as far as both went."""
    aborted = {request.id for request, _, abort in load if abort}
    if got.keys() != want.keys():
        return False
    for name, a in got.items():
        b = want[name]
        least = min(len(a.tokens), len(b.tokens))
        if a.tokens[:least] != b.tokens[:least]:
            return False
        if name not in aborted and (a.reason is not b.reason or len(a.tokens) != len(b.tokens)):
            return False
        if any(abs(x - y) > atol for x, y in zip(a.logprobs, b.logprobs, strict=False)):
            return False
    return True
