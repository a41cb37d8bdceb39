"""DSpark's drafts against the independent oracle, and passes whose rows may turn out not to count."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.device.kvpool import KVPool
from engine.device.rows import build_rows
from engine.kernels.ops import ops
from engine.model.checkpoint import Checkpoint
from engine.model.dspark import Dspark
from engine.model.fast import FastModel, Held, Pass, load_fast_model
from engine.model.packed import CheckpointSource, pack_dspark
from engine.model.placement import Placement
from tests.engine.model import build, drive
from tests.oracle_naive.config import Config
from tests.oracle_naive.draft import dspark as naive_dspark
from tests.oracle_naive.model import Naive
from tests.oracle_naive.weights import from_tensors

CPU = torch.device("cpu")
SAMPLED = 50


def load(path: Path) -> tuple[FastModel, Dspark]:
    model = load_fast_model(path, kernels="torch", device="cpu", dtype=torch.float32)
    source = CheckpointSource(Checkpoint(path), CPU, torch.float32)
    placement = Placement(device=CPU, pin=False)
    weights = pack_dspark(model.config, source, placement, plain=torch.float32)
    return model, Dspark(model, weights)


def make_pool(model: FastModel) -> KVPool:
    stages = model.config.num_nextn_predict_layers
    pool = KVPool(
        model.config,
        num_blocks=40,
        block_size=drive.BLOCK,
        num_slots=3,
        ring_history=True,
        forms=model.forms,
        draft_stages=stages,
    )
    pool.poison(slots=(1, 2), blocks=range(1, 40))
    pool.reset_slot(1)
    return pool


def feed(
    model: FastModel,
    draft: Dspark,
    pool: KVPool,
    request: drive.Request,
    size: int,
    counted: int | None = None,
) -> torch.Tensor:
    """Run the next `size` tokens, of which `counted` (all by default) turn out to count."""
    rows, _ = build_rows([request.chunk(size)], block_size=drive.BLOCK, device="cpu")
    held = None if counted is None else Held()
    state = Pass(rows, pool, held)
    logits = model.run(state)
    draft.remember(state, pool.draft)
    if held is not None:
        held.commit(torch.tensor([counted], dtype=torch.int32))
    request.done += size if counted is None else counted
    return logits


def propose(draft: Dspark, pool: KVPool, request: drive.Request) -> tuple[torch.Tensor, ...]:
    block = drive.Request([0] * (request.done + draft.block_size), done=request.done)
    rows, _ = build_rows([block.chunk(draft.block_size)], block_size=drive.BLOCK, device="cpu")
    return draft.propose(torch.tensor([SAMPLED]), rows, pool.draft)


@pytest.mark.parametrize("length", [5, 8, 27])
def test_drafts_equal_the_oracles(length: int, tmp_path: Path) -> None:
    """Ids, logits and confidence are those of the independent float64 oracle."""
    config = build.v41(engram_layer_ids=[])
    tensors = build.random_tensors(config, 0)
    path = build.write(tmp_path, config, tensors=tensors)
    ids = drive.tokens(length, 3)
    wanted = naive_dspark(Naive(Config.read(config), from_tensors(tensors), ids), SAMPLED)
    model, draft = load(path)
    pool = make_pool(model)
    request = drive.Request(ids)
    for size in (length - 3, 1, 2):
        feed(model, draft, pool, request, size)
    found, logits, confidence = propose(draft, pool, request)
    assert found[0].tolist() == wanted.token_ids
    assert (logits[0] - torch.from_numpy(wanted.logits)).abs().max() < 1e-4
    assert (confidence[0] - torch.from_numpy(wanted.confidence)).abs().max() < 1e-4


@pytest.mark.parametrize("version", ["v4", "v41"])
def test_rows_that_do_not_count_leave_no_trace(version: str, tmp_path: Path) -> None:
    """A pass of six rows of which n count leaves the state of a pass of those n rows."""
    config = build.v4() if version == "v4" else build.v41()
    path = build.write(tmp_path, config)
    model = load_fast_model(path, kernels="torch", device="cpu", dtype=torch.float32)
    ids = drive.tokens(60, 4)
    plain = drive.Request(ids)
    pool = KVPool(
        model.config, num_blocks=40, block_size=drive.BLOCK, num_slots=3, ring_history=True
    )
    pool.reset_slot(1)
    wanted = []
    for _ in ids:
        rows, _ = build_rows([plain.chunk(1)], block_size=drive.BLOCK, device="cpu")
        wanted.append(model.decode(rows, pool))
        plain.done += 1
    other = KVPool(
        model.config, num_blocks=40, block_size=drive.BLOCK, num_slots=3, ring_history=True
    )
    other.poison(slots=(1, 2), blocks=range(1, 40))
    other.reset_slot(1)
    request, counts = drive.Request(ids), [1, 3, 6, 2, 5, 4]
    step = 0
    while request.done < len(ids):
        left = len(ids) - request.done
        size = min(6, left)
        counted = min(counts[step % len(counts)], size)
        # The rows that will not count hold other tokens, as drafts would.
        true_ids = request.ids
        wrong = [(t + 1) % 288 for t in true_ids[request.done + counted :]]
        request.ids = [*true_ids[: request.done + counted], *wrong]
        rows, _ = build_rows([request.chunk(size)], block_size=drive.BLOCK, device="cpu")
        request.ids = true_ids
        held = Held()
        logits = model.run(Pass(rows, other, held))
        held.commit(torch.tensor([counted], dtype=torch.int32))
        for row in range(counted):
            assert (logits[row] - wanted[request.done + row][0]).abs().max() < 2e-5
        request.done += counted
        step += 1


def test_a_store_at_once_is_seen(tmp_path: Path) -> None:
    """Counting rows that should not count changes what comes after (the fault of a missing rollback)."""
    path = build.write(tmp_path, build.v41())
    model, draft = load(path)
    ids = drive.tokens(30, 5)
    found = []
    for counted in (2, 6):
        pool = make_pool(model)
        request = drive.Request(ids)
        feed(model, draft, pool, request, 20)
        feed(model, draft, pool, request, 6, counted)
        request.done = 22
        found.append(feed(model, draft, pool, request, 1))
    assert (found[0] - found[1]).abs().max() > 1e-3


def test_ops_table_is_whole() -> None:
    """Each operation exists as a torch twin."""
    assert ops("torch").name == "torch"
