"""Speculative steps as CUDA graphs: equal to the same step launched kernel by kernel, and to plain decoding."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.api import GenerateRequest, SamplingParams
from engine.core import EngineCore
from engine.speculation import drafter_in
from tests.engine.device.engines import requests, run, same
from tests.engine.device.on_gpu import make, runner_of, write_checkpoint
from tests.engine.device.speculating import Told, beyond, whole_texts

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("exact_products")]
MODES = [("v41", "torch"), ("v4", "torch"), ("v41", "triton"), ("v4", "triton")]


@pytest.fixture(scope="module", params=MODES, ids="-".join)
def mode(request: pytest.FixtureRequest) -> tuple[str, str]:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def checkpoint(mode: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(mode[0], tmp_path_factory)


@pytest.fixture(scope="module")
def core(checkpoint: Path, mode: tuple[str, str]) -> EngineCore:
    """One engine for all tests of a model: kernels take their time to compile."""
    return make(checkpoint, kernels=mode[1], speculation="auto", max_num_seqs=2)


def test_tokens_are_the_references(core: EngineCore, checkpoint: Path) -> None:
    """In float32 a random load gets what the CPU gives it without drafts."""
    load = requests(random.Random(3), 10)
    cpu = make(checkpoint, device="cpu", cpu_threads=4, max_num_seqs=2)

    assert same(run(core, load), run(cpu, load), load, atol=2e-3)
    assert core.stats().speculation.drafted > 30


def test_replay_equals_eager_bitwise(core: EngineCore, mode: tuple[str, str]) -> None:
    """From one state, a replayed step leaves the same bits as the step run launch by launch."""
    runner, draw = runner_of(core), random.Random(1)
    speculation = runner.speculation
    assert speculation is not None
    for number in range(2):
        ids = tuple(draw.randrange(288) for _ in range(draw.randint(1, 60)))
        sampling = SamplingParams(90, temperature=number % 2, top_p=0.9, seed=number)
        core.submit(GenerateRequest(str(number), ids, sampling))
    before = runner.num_ahead
    for _ in range(8):
        core.step()
    assert runner.num_ahead > before + 3
    torch.cuda.synchronize()

    pool = runner._pool.named_tensors()

    def tensors() -> dict[str, Tensor]:
        return {**pool, **runner._buffers.tensors(), **speculation._tensors()}

    def after(launch: Callable[[int], Tensor], bucket: int) -> dict[str, Tensor]:
        """What a step leaves. Twins put rejected rows into slot 0, several in one place, in no order."""
        for name, tensor in tensors().items():
            tensor.copy_(start[name])
        logits = launch(bucket).clone()
        left = {name: tensor.clone() for name, tensor in tensors().items()}
        return {name: t[1:] if name in pool else t for name, t in left.items()} | {"logits": logits}

    try:
        with torch.inference_mode():
            start = {name: tensor.clone() for name, tensor in tensors().items()}
            for bucket in speculation.graphs.buckets:
                replayed = after(speculation.graphs.run, bucket)
                called = after(speculation._body, bucket)
                differing = [
                    name
                    for name, tensor in called.items()
                    if not torch.equal(tensor.view(torch.uint8), replayed[name].view(torch.uint8))
                ]
                assert not differing, (bucket, differing)
                assert not torch.equal(start["results"], called["results"])
        kernels = [captured.kernels for captured in speculation.graphs.captured]
        assert all(used == kernels[0] for used in kernels)
        assert ({"attend", "moe", "sample"} <= kernels[0]) == (mode[1] == "triton")
    finally:
        runner._forget()
        for number in range(2):
            core.abort(str(number))


def test_drafts_that_are_right_change_no_token(
    core: EngineCore, checkpoint: Path, mode: tuple[str, str]
) -> None:
    """Called step by step with drafts that are right for a while, requests get the plain tokens."""
    plain = make(checkpoint, kernels=mode[1], graphs=False, max_num_seqs=2)
    load = requests(random.Random(6), 8)
    truth = whole_texts(load, run(plain, beyond(load)))
    want = run(plain, load)
    runner = runner_of(core)
    assert runner.speculation is not None
    speculator = runner.speculation._speculator
    told = Told(speculator._drafter)
    told.core, told.truth = core, truth
    graphs, before = runner.speculation.graphs, core.stats().speculation.accepted
    speculator._drafter, captures, graphs._captures = told, graphs._captures, False
    core._scheduler.prefix.clear()
    try:
        assert same(run(core, load), want, load, atol=2e-3)
    finally:
        speculator._drafter, graphs._captures = told._drafter, captures
    assert core.stats().speculation.accepted > before + 5


def test_the_checkpoint_names_its_drafter(core: EngineCore) -> None:
    """The option auto has taken the stages that are there."""
    runner = runner_of(core)
    drafter = drafter_in(runner._model.config)
    assert drafter in ("dspark", "mtp")
    assert runner.num_drafts == (5 if drafter == "dspark" else 1)
