"""EngineCore over the real model: batching, chunking, preemption and stale memory change no token."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.api import EngineError, FinishReason, GenerateRequest, SamplingParams
from engine.core import EngineCore, _salt, load_engine
from engine.device.batch import ForwardBatch
from engine.device.kvpool import KVPool
from engine.device.runner import ModelRunner
from engine.device.sampler import Draw, sample
from engine.model.checkpoint import load_model
from engine.model.v4 import Model
from engine.options import EngineConfig
from engine.plan.step import Chunk
from tests.engine.model import build

OPTIONS = EngineConfig(
    device="cpu",
    cpu_threads=1,
    block_size=16,
    max_num_seqs=4,
    max_batched_tokens=11,
    max_model_len=96,
    num_blocks=8,
)


@pytest.fixture(scope="module", params=["v4", "v41"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config: dict[str, Any] = getattr(build, request.param)()
    return build.write(tmp_path_factory.mktemp(request.param) / "model", config, seed=3)


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> Model:
    return load_model(checkpoint, device=torch.device("cpu"), dtype=torch.float32)


def make_request(number: int, prompt_len: int, max_tokens: int) -> GenerateRequest:
    prompt = tuple(int(x) for x in torch.randint(0, 288, (prompt_len,), generator=_seeded(number)))
    sampling = SamplingParams(
        max_tokens=max_tokens,
        temperature=(0.0, 1.0)[number % 2],
        top_p=(1.0, 0.9)[number // 2 % 2],
        seed=number,
    )
    return GenerateRequest(f"r{number}", prompt, sampling)


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


REQUESTS = [make_request(i, *sizes) for i, sizes in enumerate([(3, 40), (50, 30), (1, 60), (33, 20), (64, 12), (17, 25)])]  # fmt: skip


def token_by_token(model: Model, request: GenerateRequest) -> list[int]:
    """The slow twin: one request, one token a step, a pool of its own."""
    pool = KVPool(
        model.config, num_blocks=7, block_size=16, num_slots=2, device="cpu", dtype=torch.float32
    )
    sequence = list(request.prompt_ids)
    position = 0
    with torch.inference_mode():
        while len(sequence) - len(request.prompt_ids) < request.sampling.max_tokens:
            last = position == len(sequence) - 1
            chunk = Chunk("", 1, position, (sequence[position],), (1, 2, 3, 4, 5, 6), last)
            logits = model.forward(ForwardBatch.build([chunk], torch.device("cpu")), pool)
            position += 1
            if last:
                index = len(sequence) - len(request.prompt_ids)
                (drawn,) = sample(logits, [Draw(request.sampling, index)])
                assert drawn is not None
                sequence.append(drawn.token_id)
    return sequence[len(request.prompt_ids) :]


@pytest.fixture(scope="module")
def expected(model: Model) -> dict[str, list[int]]:
    with torch.inference_mode():
        return {r.id: token_by_token(model, r) for r in REQUESTS}


def run(core: EngineCore, requests: list[GenerateRequest], gap: int = 0) -> dict[str, list[int]]:
    """Submit one request every `gap` steps and collect all tokens."""
    waiting = list(requests)
    tokens: dict[str, list[int]] = {r.id: [] for r in requests}
    for step in range(3000):
        if waiting and (not gap or step % gap == 0):
            core.submit(waiting.pop(0))
            if not gap:
                continue
        if not core.has_work and not waiting:
            break
        for delta in core.step():
            assert delta.finish_reason in (None, FinishReason.LENGTH), delta.error
            tokens[delta.request_id] += delta.token_ids
        core.check_integrity()
    assert core.stats().free_blocks == core.stats().total_blocks
    return tokens


@pytest.mark.parametrize("gap", [0, 3])
def test_batched_equals_token_by_token(
    checkpoint: Path, expected: dict[str, list[int]], gap: int
) -> None:
    """Six requests through four slots and too few blocks get what each would get alone."""
    core = load_engine(checkpoint, OPTIONS)

    tokens = run(core, REQUESTS, gap)

    assert tokens == expected
    assert core.stats().preemptions > 0


@pytest.mark.parametrize("budget", [5, 12, 200])
def test_the_chunk_size_changes_no_token(
    checkpoint: Path, expected: dict[str, list[int]], budget: int
) -> None:
    """Prompts cut small or not at all give the same answers."""
    options = dataclasses.replace(OPTIONS, max_batched_tokens=budget, num_blocks=30)

    assert run(load_engine(checkpoint, options), REQUESTS) == expected


def poison_what_is_free(core: EngineCore, pool: KVPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before each step, fill all that neither a request nor the prefix cache holds."""
    blocks, slots = core._scheduler.blocks, core._scheduler.slots
    copy = pool.copy

    def poisoning(*pairs: Any) -> None:
        copy(*pairs)
        pool.poison(slots=slots._free, blocks=blocks._free)
        pool.history[slots._free] = 7

    monkeypatch.setattr(pool, "copy", poisoning)


def test_stale_memory_is_never_read(
    model: Model, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a freed slot or block still holds (here: NaN) reaches nobody."""
    pool = KVPool(
        model.config,
        num_blocks=9,
        block_size=16,
        num_slots=OPTIONS.resolve_num_slots(),
        device="cpu",
        dtype=torch.float32,
    )
    core = EngineCore(
        ModelRunner(model, pool, torch.device("cpu")), OPTIONS, max_position_embeddings=1024
    )
    poison_what_is_free(core, pool, monkeypatch)

    assert run(core, REQUESTS) == expected
    assert any(bool(t.isnan().any()) for t in pool.window)


@pytest.mark.parametrize("fault", ["slot", "block"])
def test_the_comparison_sees_shared_memory(
    model: Model, expected: dict[str, list[int]], fault: str
) -> None:
    """The tests above can fail: two requests in one slot, or in one block, get other tokens."""
    pool = KVPool(
        model.config,
        num_blocks=31,
        block_size=16,
        num_slots=OPTIONS.resolve_num_slots(),
        device="cpu",
        dtype=torch.float32,
    )
    options = dataclasses.replace(OPTIONS, num_blocks=30)
    runner = ModelRunner(model, pool, torch.device("cpu"))
    core = EngineCore(runner, options, max_position_embeddings=1024)
    step = runner.step

    def wrong(plan: Any, draws: Any) -> Any:
        changes: dict[str, Any] = {"slot": 1} if fault == "slot" else {}
        chunks = [
            dataclasses.replace(
                c, **(changes or {"block_ids": (c.block_ids[0], *[7] * (len(c.block_ids) - 1))})
            )
            for c in plan.chunks
        ]
        return step(dataclasses.replace(plan, chunks=tuple(chunks)), draws)

    runner.step = wrong  # type: ignore[method-assign]

    assert run(core, REQUESTS) != expected


def test_nan_weights_are_an_error_of_the_request(checkpoint: Path) -> None:
    """A model that computes NaN ends its requests with an error; the engine goes on."""
    core = load_engine(checkpoint, OPTIONS)
    pool = core._runner._pool  # type: ignore[attr-defined]
    core.submit(REQUESTS[0])
    core.step()
    for ring in pool.window:
        ring[1:] = math.nan

    (delta,) = core.step()

    assert delta.finish_reason is FinishReason.ERROR
    core.submit(REQUESTS[1])
    core.check_integrity()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_model_len": 2048}, "max_model_len: the model's context is 1024 tokens, got 2048"),
        ({"block_size": 3}, "block_size: expected a multiple of"),
        ({"num_blocks": 5}, "num_blocks: one request of max_model_len 96 needs 6 blocks of 16"),
    ],
)
def test_options_that_do_not_fit_the_model_are_refused(
    checkpoint: Path, changes: dict[str, int], message: str
) -> None:
    """What the user asked for and what the model has stand in the message."""
    options = dataclasses.replace(OPTIONS, **{"num_blocks": 96, **changes})  # type: ignore[arg-type]

    with pytest.raises(EngineError, match=message):
        load_engine(checkpoint, options)


def test_the_salt_names_model_layout_and_rounding(
    checkpoint: Path, model: Model, tmp_path: Path
) -> None:
    """State of another checkpoint, block size, type or rounding mode is never taken for one's own."""
    config = build.v41() if model.config.is_v41 else build.v4()
    other = build.write(tmp_path / "model", config, seed=4)
    rounding = load_model(checkpoint, round_trips="on")
    salts = {
        _salt(checkpoint, model, 16, torch.float32),
        _salt(other, model, 16, torch.float32),
        _salt(checkpoint, model, 32, torch.float32),
        _salt(checkpoint, model, 16, torch.bfloat16),
        _salt(checkpoint, rounding, 16, torch.float32),
    }

    assert len(salts) == 5
    salt = load_engine(checkpoint, OPTIONS)._scheduler.prefix._salt
    assert salt == _salt(checkpoint, model, 16, torch.float32)


def test_a_missing_gpu_is_named(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for cuda where there is none, the engine says so."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    with pytest.raises(EngineError, match="torch finds no NVIDIA GPU"):
        load_engine(checkpoint, dataclasses.replace(OPTIONS, device="cuda"))
