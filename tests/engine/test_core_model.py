"""EngineCore over the real model: batching, chunking, preemption and stale memory change no token."""

from __future__ import annotations

import dataclasses
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.api import EngineError, FinishReason, GenerateRequest, SamplingParams
from engine.core import EngineCore, load_engine
from engine.device import build as build_engine
from engine.device.batch import ForwardBatch
from engine.device.kvpool import KVPool
from engine.device.runner import ModelRunner
from engine.device.sampler import Draw, sample
from engine.model.checkpoint import load_model
from engine.model.v4 import Model
from engine.options import EngineConfig
from engine.plan.records import Form, Forms
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
            c._replace(
                **(changes or {"block_ids": (c.block_ids[0], *[7] * (len(c.block_ids) - 1))})
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


def test_the_salt_names_model_layout_and_form(
    checkpoint: Path, model: Model, tmp_path: Path
) -> None:
    """State of another checkpoint, block size, type or way of computing is never one's own."""
    config = build.v41() if model.config.is_v41 else build.v4()
    other = build.write(tmp_path / "model", config, seed=4)
    options = build_engine.resolve_here(checkpoint, model.config, OPTIONS).config
    wide = dataclasses.replace(options, block_size=32)
    half = dataclasses.replace(options, dtype="bfloat16")

    def salt(path: Path, options: EngineConfig, *how: object, window: Form = "none") -> bytes:
        return build_engine.salt_of(path, model.config, options, Forms(window=window), *how)

    salts = {
        salt(checkpoint, options, "reference", False),
        salt(other, options, "reference", False),
        salt(checkpoint, wide, "reference", False),
        salt(checkpoint, half, "reference", False),
        salt(checkpoint, options, "reference", True),
        salt(checkpoint, options, "fast", "torch", False, "off"),
        salt(checkpoint, options, "fast", "torch", False, "off", window="fp8_32"),
    }

    assert len(salts) == 7
    used = load_engine(checkpoint, OPTIONS)._scheduler.prefix._salt
    assert used == salt(checkpoint, options, "reference", False)
    fast = dataclasses.replace(OPTIONS, runner="fast")
    assert load_engine(checkpoint, fast)._scheduler.prefix._salt in salts - {used}


@pytest.mark.parametrize("lookahead", [True, False])
def test_the_fast_runner_gives_the_same_tokens(
    checkpoint: Path, expected: dict[str, list[int]], lookahead: bool
) -> None:
    """Chosen by its option, on the CPU, with and without lookahead, it serves as the reference."""
    options = dataclasses.replace(OPTIONS, runner="fast", lookahead=lookahead)

    assert run(load_engine(checkpoint, options), REQUESTS) == expected


@pytest.mark.parametrize("runner", ["reference", "fast"])
def test_new_weights_act(checkpoint: Path, model: Model, tmp_path: Path, runner: Any) -> None:
    """After an update the engine answers as one that was started with the new checkpoint."""
    config = build.v41() if model.config.is_v41 else build.v4()
    other = build.write(tmp_path / "model", config, seed=4)
    options = dataclasses.replace(OPTIONS, runner=runner)
    requests = [dataclasses.replace(r, prompt_ids=REQUESTS[0].prompt_ids) for r in REQUESTS[:2]]
    wanted = run(load_engine(other, options), requests)
    core = load_engine(checkpoint, options)
    before = run(core, requests)

    built = core.update_weights(other)

    assert built.load_seconds + built.ready_seconds > 0
    assert before != wanted
    assert run(core, requests) == wanted
    assert core.stats().completion_tokens == 2 * sum(map(len, wanted.values()))
    core.update_weights(checkpoint)
    assert run(core, requests) == before


@pytest.mark.parametrize("runner", ["reference", "fast"])
def test_weights_in_place_are_refused(checkpoint: Path, runner: Any) -> None:
    """Whoever would write under captured and derived state hears why, and what to do instead."""
    core = load_engine(checkpoint, dataclasses.replace(OPTIONS, runner=runner))

    with pytest.raises(EngineError) as error:
        core.update_weights(checkpoint, in_place=True)

    assert "weights cannot be written in place" in str(error.value)
    captured = "decode steps of 3 batch sizes are prepared" in str(error.value)
    assert captured == (runner == "fast")
    assert "drains, loads and rebuilds" in str(error.value)


def test_an_update_that_cannot_be_served_changes_nothing(
    checkpoint: Path, model: Model, expected: dict[str, list[int]], tmp_path: Path
) -> None:
    """Live requests, another shape and a broken folder are refused, and the engine goes on."""
    make = build.v41 if model.config.is_v41 else build.v4
    other = build.write(tmp_path / "other", make(sliding_window=16))
    broken = build.write(tmp_path / "broken", make())
    next(broken.glob("*.safetensors")).unlink()
    core = load_engine(checkpoint, OPTIONS)
    core.submit(REQUESTS[0])
    with pytest.raises(EngineError, match="expected no live request, got 1"):
        core.update_weights(checkpoint)
    core.abort(REQUESTS[0].id)

    with pytest.raises(
        EngineError, match=r"not of the shape that is served: .*sliding_window: exp"
    ):
        core.update_weights(other)
    with pytest.raises(EngineError):
        core.update_weights(broken)

    assert run(core, REQUESTS) == expected


def test_a_failed_build_brings_the_old_weights_back(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the new weights cannot be built after all, the engine serves the old ones."""
    other = tmp_path / "other"
    shutil.copytree(checkpoint, other)
    core = load_engine(checkpoint, OPTIONS)
    before = run(core, REQUESTS[:1])
    load = build_engine.load_model

    def fails(path: Path, **how: Any) -> Model:
        if path == other:
            raise MemoryError
        return load(path, **how)

    monkeypatch.setattr(build_engine, "load_model", fails)
    with pytest.raises(EngineError, match=r"could not be built; the weights of .* are back"):
        core.update_weights(other)

    assert run(core, REQUESTS[:1]) == before


def test_memory_that_runs_out_is_named(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start that does not fit says so, and where to look."""

    def full(*args: Any) -> None:
        raise torch.OutOfMemoryError("tried to allocate 2 GiB")

    monkeypatch.setattr("engine.device.build._pool", full)
    with pytest.raises(
        EngineError, match="into memory: tried to allocate 2 GiB; bathyal engine plan"
    ):
        load_engine(checkpoint, OPTIONS)


def test_a_missing_gpu_is_named(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for cuda where there is none, the engine says so."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    with pytest.raises(EngineError, match="torch finds no NVIDIA GPU"):
        load_engine(checkpoint, dataclasses.replace(OPTIONS, device="cuda"))
