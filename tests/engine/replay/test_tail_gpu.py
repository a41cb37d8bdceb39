"""Tails as CUDA graphs: a replay leaves the bits that the same operations leave launch by launch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.device.kvpool import KVPool
from engine.device.rows import build_narrowings, build_rows
from engine.device.tail_graphs import TailGraphs
from engine.model.fast import FastModel
from engine.model.loading import load_fast_model
from engine.plan.replay import stages, tail_of
from engine.plan.step import Chunk
from tests.engine.model import build, drive

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("exact_products")]
#: Heads and windows as small as the kernels' tiles allow.
SIZES = {"head_dim": 64, "qk_rope_head_dim": 16, "index_head_dim": 32, "sliding_window": 16}
BUCKETS = (16, 32, 64, 128)
CONTEXT = 160
BLOCKS = 10


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build.write(tmp_path_factory.mktemp("v41") / "model", build.v41(**SIZES), seed=5)


class Served:
    """A model on a device, its memory, and tails by bucket."""

    def __init__(self, path: Path, device: str, kernels: Any) -> None:
        self.device = device
        self.model: FastModel = load_fast_model(
            path, kernels=kernels, device=device, dtype=torch.float32, max_model_len=CONTEXT
        )
        tail = tail_of(self.model.config)
        assert tail is not None
        self.tail = tail
        self.pool = KVPool(
            self.model.config, num_blocks=1 + 4 * BLOCKS, block_size=drive.BLOCK, num_slots=5,
            device=device, ring_history=True,
        )  # fmt: skip
        self.tails = TailGraphs(
            self.model, self.pool, tail, max_model_len=CONTEXT, buckets=BUCKETS,
            captures=device == "cuda", warm_rows=100,
        )  # fmt: skip

    def chunk(self, number: int, length: int) -> Chunk:
        blocks = tuple(range(1 + number * BLOCKS, 1 + (number + 1) * BLOCKS))
        ids = tuple(drive.tokens(length, number))
        return Chunk(
            str(number), number + 1, 0, ids, blocks, wants_logits=True, prefill="bounded",
            anchor=length - 1,
        )  # fmt: skip

    def prompts(self, lengths: list[int], *, graphs: bool) -> Tensor:
        """Logits of a pass over prompts."""
        chunks = [self.chunk(i, length) for i, length in enumerate(lengths)]
        for one in chunks:
            self.pool.reset_slot(one.slot)
        rows, _ = build_rows(chunks, block_size=drive.BLOCK, device=self.device)
        plan = stages(self.tail, chunks)
        narrowings, wanted = build_narrowings(rows, chunks, plan)
        run = self.tails.run if graphs else None
        *_, logits = self.model.prefill(rows, self.pool, wanted, narrowings=narrowings, tail=run)
        return logits

    def state(self) -> dict[str, Tensor]:
        assert self.tails._buffers is not None
        return {**self.pool.named_tensors(), **self.tails._buffers.tensors()}


@pytest.fixture(scope="module", params=["torch", "triton"])
def served(request: pytest.FixtureRequest, path: Path) -> Served:
    """Warm, with all buckets captured."""
    with torch.inference_mode():
        found = Served(path, "cuda", request.param)
        found.prompts([120, 40], graphs=True)
        found.tails.build()
    return found


@torch.inference_mode()
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_replay_equals_eager_bitwise(served: Served, count: int) -> None:
    """I7: from one state, a replayed tail leaves the same bits as its operations one by one."""
    before = served.tails.num_replayed
    served.prompts([100 + i for i in range(count)], graphs=True)
    assert served.tails.num_replayed == before + 1
    # In the buffers lies what flowed out; it may as well flow in.
    start = {name: tensor.clone() for name, tensor in served.state().items()}
    graphs = served.tails._graphs
    assert graphs is not None
    bucket = graphs.bucket_for(16 * count)
    found = []
    for launch in (graphs.run, served.tails._body):
        for name, tensor in served.state().items():
            tensor.copy_(start[name])
        launch(bucket)
        found.append({name: tensor.clone() for name, tensor in served.state().items()})
    replayed, called = found
    assert [name for name in called if not torch.equal(called[name], replayed[name])] == []
    assert not torch.equal(start["streams"], called["streams"])


@torch.inference_mode()
@pytest.mark.parametrize("lengths", [[100], [17, 120], [90, 5, 150], [33, 44, 55, 66]], ids=str)
def test_graphs_give_what_the_cpu_gives(served: Served, path: Path, lengths: list[int]) -> None:
    """Logits and windows in float32, of rows that are graphs' and of the twins' on the CPU."""
    cpu = Served(path, "cpu", "torch")
    want, got = cpu.prompts(lengths, graphs=False), served.prompts(lengths, graphs=True)

    assert (got.cpu() - want).abs().max() < 2e-3
    for ours, theirs in zip(served.pool.window, cpu.pool.window, strict=True):
        assert (ours[1 : 1 + len(lengths)].cpu() - theirs[1 : 1 + len(lengths)]).abs().max() < 2e-3


def test_each_bucket_was_captured(served: Served) -> None:
    """Largest first, each with the same fused kernels, the twins' with none."""
    captured = served.tails.captured

    assert [one.bucket for one in captured] == sorted(BUCKETS, reverse=True)
    kernels = {one.kernels for one in captured}
    if served.model.ops.name == "torch":
        assert kernels == {frozenset()}
    else:
        assert all({"attend", "route", "moe", "hc_turn"} <= one for one in kernels)
    for one in captured:
        print(one)
