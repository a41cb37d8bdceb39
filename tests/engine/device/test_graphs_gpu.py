"""Decode steps as CUDA graphs: equal to the same step launched kernel by kernel, and never compiled late."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import TINY_CHECKPOINT
from engine.api import FinishReason, GenerateRequest, SamplingParams
from engine.core import EngineCore, load_engine
from engine.options import EngineConfig
from tests.engine.device.engines import requests, run, same
from tests.engine.device.on_gpu import (
    captured_buckets,
    check_replays,
    make,
    runner_of,
    write_checkpoint,
)

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("exact_products")]


#: The twins come first: they need no compilation and show what is wrong with graphs and streams.
MODES = [("v41", "torch"), ("v4", "triton"), ("v41", "triton")]


@pytest.fixture(scope="module", params=MODES, ids="-".join)
def mode(request: pytest.FixtureRequest) -> tuple[str, str]:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def checkpoint(mode: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(mode[0], tmp_path_factory)


@pytest.fixture(scope="module")
def core(checkpoint: Path, mode: tuple[str, str]) -> EngineCore:
    """One engine for all tests of a model: kernels take their time to compile."""
    return make(checkpoint, kernels=mode[1], max_num_seqs=8)


def test_gpu_equals_the_reference_on_the_cpu(core: EngineCore, checkpoint: Path) -> None:
    """In float32 a random load gets the tokens and log-probabilities that the CPU gives it."""
    load = requests(random.Random(3), 16)
    cpu = make(checkpoint, device="cpu", cpu_threads=4, max_num_seqs=8)

    assert same(run(core, load), run(cpu, load), load, atol=2e-3)


def test_every_bucket_runs_the_same_kernels(core: EngineCore, mode: tuple[str, str]) -> None:
    """Each captured batch size runs the same fused kernels, the twins' none."""
    kernels = [captured.kernels for captured in runner_of(core).graphs.captured]

    assert len(kernels) == 4
    assert all(used == kernels[0] for used in kernels)
    assert ({"attend", "moe", "sample"} <= kernels[0]) == (mode[1] == "triton")
    for captured in runner_of(core).graphs.captured:
        print(captured)


def test_replay_equals_eager_bitwise(core: EngineCore) -> None:
    """From one state, a replayed step leaves the same bits as the step run launch by launch."""
    assert captured_buckets(runner_of(core)) == [1, 2, 4, 8]
    assert check_replays(core) == 0


def test_lookahead_changes_no_token(core: EngineCore) -> None:
    """With and without steps launched ahead, a load gets the same."""
    load = requests(random.Random(4), 24)
    runner = runner_of(core)
    core._scheduler.prefix.clear()
    before = runner.num_ahead
    got = run(core, load)
    assert runner.num_ahead > before
    core._scheduler.prefix.clear()
    runner.looks_ahead = False
    want = run(core, load)
    runner.looks_ahead = True

    assert same(got, want, load, 1e-5)


def test_many_requests(core: EngineCore, mode: tuple[str, str]) -> None:
    """Of 1,000 requests under load with random aborts none is lost and all memory comes back."""
    draw = random.Random(9)
    load = []
    count = 1000 if mode[1] == "triton" else 60  # the twins take many launches for a prompt
    for number in range(count):
        prompt = tuple(draw.randrange(288) for _ in range(draw.randint(1, 60)))
        sampling = SamplingParams(
            draw.randint(1, 20), temperature=draw.choice((0.0, 1.0)), seed=number
        )
        abort = draw.choice((0, 0, 0, draw.randint(1, 9)))
        load.append(
            (GenerateRequest(f"r{number}", prompt, sampling), draw.choice((0, 0, 1)), abort)
        )
    before = torch.cuda.memory_allocated()

    got = run(core, load)

    aborted = {request.id for request, _, abort in load if abort}
    assert len(got) == count
    for request, _, _ in load:
        if request.id not in aborted:
            assert got[request.id].reason is FinishReason.LENGTH
            assert len(got[request.id].tokens) == request.sampling.max_tokens
    core._scheduler.prefix.clear()
    assert core._scheduler.blocks.num_free == 100
    assert torch.cuda.memory_allocated() < before + 64e6, "nothing piles up"


def test_nothing_was_compiled_for_a_request(core: EngineCore) -> None:
    """All that the tests above served found its kernels ready."""
    assert runner_of(core).compiles.late == []


def test_the_shipped_checkpoint_answers_as_on_the_cpu() -> None:
    """Greedy tokens of 24 prompts are the CPU's, up to the first tie within rounding."""
    draw = random.Random(5)
    sampling = SamplingParams(24, temperature=0.0, top_logprobs=2, ignore_eos=True)
    lengths = [draw.randint(1, 200) for _ in range(24)]
    prompts = [
        GenerateRequest(str(i), tuple(draw.randrange(2048) for _ in range(length)), sampling)
        for i, length in enumerate(lengths)
    ]

    def answers(**options: Any) -> dict[str, list[Any]]:
        core = load_engine(
            TINY_CHECKPOINT,
            EngineConfig(dtype="float32", max_model_len=512, max_batched_tokens=256, **options),
        )
        found: dict[str, list[Any]] = {}
        for request in prompts:
            core.submit(request)
        while core.has_work:
            for delta in core.step():
                assert delta.error is None
                found.setdefault(delta.request_id, []).append(delta)
        return found

    cpu, gpu = answers(device="cpu", cpu_threads=4), answers(device="cuda", max_num_seqs=8)
    compared = 0
    for name, deltas in cpu.items():
        for a, b in zip(deltas, gpu[name], strict=True):
            top = a.logprobs[0].top
            if a.token_ids != b.token_ids:
                assert abs(top[0][1] - top[1][1]) < 2e-3, "not a tie"
                break
            compared += 1
    assert compared > 0.6 * 24 * 24
