"""Short passes as CUDA graphs: a replay leaves the bits that the same layers leave launch by launch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.device.kvpool import KVPool
from engine.device.prompt_graphs import PromptGraphs
from engine.device.rows import build_rows
from engine.kernels.rows import Rows
from engine.model.fast import FastModel
from engine.model.flow import Pass
from engine.model.loading import load_fast_model
from engine.plan.replay import tail_of
from engine.plan.step import Chunk
from tests.engine.device.on_gpu import SIZES, write_checkpoint
from tests.engine.model import drive

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("exact_products")]
BUCKETS = (64, 128, 256)
CONTEXT = 320
BLOCKS = CONTEXT // drive.BLOCK


class Served:
    """A model on a device, its memory, and passes by bucket."""

    def __init__(self, path: Path, device: str, kernels: Any) -> None:
        self.device = device
        self.model: FastModel = load_fast_model(
            path, kernels=kernels, device=device, dtype=torch.float32, max_model_len=CONTEXT
        )
        self.pool = KVPool(
            self.model.config, num_blocks=1 + 4 * BLOCKS, block_size=drive.BLOCK, num_slots=5,
            device=device, ring_history=True,
        )  # fmt: skip
        self.graphs = PromptGraphs(
            self.model, self.pool, tail_of(self.model.config), max_model_len=CONTEXT,
            buckets=BUCKETS, captures=device == "cuda",
        )  # fmt: skip

    def rows(self, spans: list[tuple[int, int]]) -> tuple[Rows, Tensor]:
        """Rows of requests from one position to another."""
        chunks = []
        for number, (start, end) in enumerate(spans):
            blocks = tuple(range(1 + number * BLOCKS, 1 + (number + 1) * BLOCKS))
            ids = tuple(drive.tokens(end, number))[start:]
            chunks.append(Chunk(str(number), number + 1, start, ids, blocks, wants_logits=True))
            if not start:
                self.pool.reset_slot(number + 1)
        return build_rows(chunks, block_size=drive.BLOCK, device=self.device)

    def prompts(self, spans: list[tuple[int, int]], *, graphs: bool) -> Tensor:
        """Logits of a pass."""
        rows, wanted = self.rows(spans)
        front = self.graphs.run if graphs else None
        *_, logits = self.model.prefill(rows, self.pool, wanted, front=front)
        return logits

    def state(self) -> dict[str, Tensor]:
        return {**self.pool.named_tensors(), **self.graphs.buffers.tensors()}


@pytest.fixture(scope="module", params=["v4", "v41"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(request.param, tmp_path_factory)


@pytest.fixture(scope="module")
def served(path: Path) -> Served:
    """Warm, with all buckets captured."""
    with torch.inference_mode():
        found = Served(path, "cuda", "triton")
        found.prompts([(0, 256)], graphs=True)
        found.graphs.build()
    return found


@torch.inference_mode()
@pytest.mark.parametrize(
    "spans", [[(0, 50)], [(0, 64), (0, 60)], [(0, 100), (0, 80), (0, 70)]], ids=str
)
def test_replay_equals_eager_bitwise(served: Served, spans: list[tuple[int, int]]) -> None:
    """From one state, replayed layers leave the same bits as their operations one by one.

    But for the dummy slot and block, which rows that pad write in any order.
    """
    rows, _ = served.rows(spans)
    bucket = next(n for n in BUCKETS if n >= rows.num_rows)
    served.graphs.buffers.place_rows(bucket, rows)
    start = {name: tensor.clone() for name, tensor in served.state().items()}
    found = []
    for launch in (served.graphs._replay, served.graphs._call):
        for name, tensor in served.state().items():
            tensor.copy_(start[name])
        *_, end = launch(bucket)
        assert end is not None
        state = Pass(rows, served.pool)
        flow = end.leave(state)
        left = {f"choice {at}": choice for at, choice in state.choices.items()}
        left |= {"streams": flow.streams, "parts": flow.parts, "post": flow.site.post}
        left |= {name: tensor[1:] for name, tensor in served.pool.named_tensors().items()}
        found.append({name: tensor.clone() for name, tensor in left.items()})
    replayed, called = found
    assert [name for name in called if not torch.equal(called[name], replayed[name])] == []
    assert replayed["streams"].isfinite().all()


@torch.inference_mode()
@pytest.mark.parametrize(
    "passes",
    [
        [[(0, 64)]],
        [[(0, 17), (0, 120)], [(17, 60), (120, 121)]],
        [[(0, 90), (0, 5), (0, 150)], [(90, 300)]],
        [[(0, 40)], [(40, 41)], [(41, 290)]],
    ],
    ids=str,
)
def test_graphs_give_what_the_cpu_gives(
    served: Served, path: Path, passes: list[list[tuple[int, int]]]
) -> None:
    """Logits and windows in float32, of rows that are graphs' and of the twins' on the CPU."""
    cpu = Served(path, "cpu", "torch")
    before = served.graphs.num_replayed
    for spans in passes:
        want, got = cpu.prompts(spans, graphs=False), served.prompts(spans, graphs=True)
        assert (got.cpu() - want).abs().max() < 2e-3
        for ours, theirs in zip(served.pool.window, cpu.pool.window, strict=True):
            live = slice(1, 1 + len(spans))
            assert (ours[live].cpu() - theirs[live]).abs().max() < 2e-3
    assert served.graphs.num_replayed > before


def test_each_bucket_was_captured(served: Served) -> None:
    """Largest first, each with the same fused kernels."""
    captured = served.graphs.captured

    assert [one.bucket for one in captured] == sorted(BUCKETS, reverse=True)
    assert all({"attend", "route", "moe", "hc_turn"} <= one.kernels for one in captured)
    assert SIZES["sliding_window"] < BUCKETS[0]
    for one in captured:
        print(one)
