"""Decode steps as CUDA graphs: equal to the same step launched kernel by kernel, and never compiled late."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine import TINY_CHECKPOINT
from engine.api import FinishReason, GenerateRequest, SamplingParams
from engine.core import EngineCore, load_engine
from engine.device.fast_runner import FastRunner
from engine.options import EngineConfig
from tests.engine.device.engines import requests, run, same
from tests.engine.model import build

pytestmark = pytest.mark.gpu
KERNELS = ["torch", "triton"]


@pytest.fixture(autouse=True)
def exact_products() -> Iterator[None]:
    """TF32 would round the operands of every product to 10 bits."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.fixture(scope="module", params=["v4", "v41"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Heads and layers as small as the kernels' tiles allow.
    sizes: dict[str, Any] = {"head_dim": 64, "qk_rope_head_dim": 16, "index_head_dim": 32}
    config: dict[str, Any] = getattr(build, request.param)(sliding_window=16, **sizes)
    return build.write(tmp_path_factory.mktemp(request.param) / "model", config, seed=11)


def engine(path: Path, **changes: Any) -> EngineCore:
    settings: dict[str, Any] = {
        "device": "cuda",
        "dtype": "float32",
        "block_size": 16,
        "num_blocks": 60,
        "max_num_seqs": 8,
        "max_batched_tokens": 40,
        "max_snapshots": 5,
        "max_model_len": 256,
    }
    return load_engine(path, EngineConfig(**{**settings, **changes}))


def runner_of(core: EngineCore) -> FastRunner:
    assert isinstance(core._runner, FastRunner)
    return core._runner


def snapshot(runner: FastRunner) -> dict[str, Tensor]:
    both = {**runner._pool.named_tensors(), **runner._buffers.tensors()}
    return {name: tensor.clone() for name, tensor in both.items()}


def restore(runner: FastRunner, state: dict[str, Tensor]) -> None:
    for name, tensor in {**runner._pool.named_tensors(), **runner._buffers.tensors()}.items():
        tensor.copy_(state[name])


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_replay_equals_eager_bitwise(checkpoint: Path, kernels: str, dtype: str) -> None:
    """From one state, a replayed step leaves the same bits as the step run launch by launch."""
    core = engine(checkpoint, kernels=kernels, dtype=dtype, lookahead=False)
    runner = runner_of(core)
    draw = random.Random(1)
    for number in range(7):
        ids = tuple(draw.randrange(288) for _ in range(draw.randint(1, 60)))
        sampling = SamplingParams(30, temperature=number % 2, top_p=0.9, seed=number)
        core.submit(GenerateRequest(str(number), ids, sampling))
        core.step()
    for _ in range(12):
        core.step()

    with torch.inference_mode():
        start = snapshot(runner)
        for bucket in runner.graphs.buckets:
            restore(runner, start)
            replayed = runner.graphs.run(bucket).clone()
            after_replay = snapshot(runner)
            restore(runner, start)
            called = runner._decode(bucket)
            after_call = snapshot(runner)

            assert torch.equal(replayed, called), bucket
            differing = [n for n, t in after_call.items() if not torch.equal(t, after_replay[n])]
            assert not differing, (bucket, differing)
            assert not torch.equal(start["ids"], after_call["ids"])


@pytest.mark.parametrize("kernels", KERNELS)
def test_gpu_equals_the_reference_on_the_cpu(checkpoint: Path, kernels: str) -> None:
    """In float32 a random load gets the tokens and log-probabilities that the CPU gives it."""
    load = requests(random.Random(3), 24)
    cpu = engine(checkpoint, device="cpu", cpu_threads=1)

    got, want = run(engine(checkpoint, kernels=kernels), load), run(cpu, load)

    assert same(got, want, load, atol=2e-3)


@pytest.mark.parametrize("kernels", KERNELS)
def test_lookahead_changes_no_token(checkpoint: Path, kernels: str) -> None:
    """With and without steps launched ahead, a load gets bitwise the same."""
    load = requests(random.Random(4), 40)
    core = engine(checkpoint, kernels=kernels)

    got = run(core, load)

    assert runner_of(core).num_ahead > 0
    assert same(got, run(engine(checkpoint, kernels=kernels, lookahead=False), load), load, 1e-6)


def test_every_bucket_runs_fused_kernels_and_nothing_is_compiled_late(checkpoint: Path) -> None:
    """Every captured batch size runs the kernels; whatever the load, none is compiled for it."""
    core = engine(checkpoint, kernels="triton", dtype="bfloat16", max_batched_tokens=300)
    runner = runner_of(core)
    kernels = [bucket.kernels for bucket in runner.graphs.captured]
    assert len(kernels) == 4
    assert all(used == kernels[0] and {"attend", "moe", "sample"} <= used for used in kernels)
    assert all(bucket.seconds > 0 for bucket in runner.graphs.captured)

    for seed in range(3):
        run(core, requests(random.Random(seed), 40))

    assert runner.compiles.late == []


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_thousand_requests(checkpoint: Path, kernels: str) -> None:
    """Of 1,000 requests under load with random aborts none is lost and all memory comes back."""
    draw = random.Random(9)
    load = []
    for number in range(1000):
        prompt = tuple(draw.randrange(288) for _ in range(draw.randint(1, 60)))
        sampling = SamplingParams(draw.randint(1, 20), temperature=draw.choice((0.0, 1.0)), seed=number)  # fmt: skip
        abort = draw.choice((0, 0, 0, draw.randint(1, 9)))
        load.append(
            (GenerateRequest(f"r{number}", prompt, sampling), draw.choice((0, 0, 1)), abort)
        )
    core = engine(checkpoint, kernels=kernels, max_num_seqs=64, num_blocks=300, max_batched_tokens=200)  # fmt: skip
    before = torch.cuda.memory_allocated()

    got = run(core, load)

    aborted = {request.id for request, _, abort in load if abort}
    assert len(got) == 1000
    for request, _, _ in load:
        if request.id not in aborted:
            assert got[request.id].reason in (FinishReason.STOP, FinishReason.LENGTH)
            assert len(got[request.id].tokens) == request.sampling.max_tokens
    core._scheduler.prefix.clear()
    assert core._scheduler.blocks.num_free == 300
    assert torch.cuda.memory_allocated() < before + 64e6, "nothing piles up"


@pytest.mark.parametrize(
    "how",
    [{"graphs": False, "kernels": "torch"}, {"kernels": "torch"}, {"kernels": "triton"}],
    ids=["eager", "graph", "fused"],
)
def test_the_shipped_checkpoint_answers_as_on_the_cpu(how: dict[str, Any]) -> None:
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
            TINY_CHECKPOINT, EngineConfig(dtype="float32", max_model_len=512, **options)
        )
        found: dict[str, list[Any]] = {}
        for request in prompts:
            core.submit(request)
        while core.has_work:
            for delta in core.step():
                assert delta.error is None
                found.setdefault(delta.request_id, []).append(delta)
        return found

    cpu, gpu = answers(device="cpu", cpu_threads=4), answers(device="cuda", **how)
    compared = 0
    for name, deltas in cpu.items():
        for a, b in zip(deltas, gpu[name], strict=True):
            top = a.logprobs[0].top
            if a.token_ids != b.token_ids:
                assert abs(top[0][1] - top[1][1]) < 2e-3, "not a tie"
                break
            compared += 1
    assert compared > 0.6 * 24 * 24
