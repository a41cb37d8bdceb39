"""Small models with drafters, and what tests of drafts do with them by hand."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from engine.device.kvpool import KVPool
from engine.device.rows import build_rows
from engine.kernels.accept import NO_STOP
from engine.kernels.rows import Rows
from engine.model.checkpoint import Checkpoint
from engine.model.drafting import Drafter
from engine.model.dspark import Dspark
from engine.model.fast import FastModel
from engine.model.flow import Held, Pass
from engine.model.loading import load_fast_model
from engine.model.mtp import Mtp
from engine.model.packing import pack_dspark, pack_mtp
from engine.model.placement import Placement
from engine.model.sources import CheckpointSource
from engine.model.speculate import Wanted
from engine.plan.step import Chunk
from tests.engine.model import drive

CPU = torch.device("cpu")
#: All blocks of the pools, for requests that own everything.
BLOCKS = tuple(range(1, 40))


def load(
    path: Path,
    slots: Mapping[int, int] | None = None,
    draft_slots: Mapping[int, int] | None = None,
) -> tuple[FastModel, Drafter]:
    """A model in float32 with the drafter its configuration has; it takes in every pass.

    Args:
        path: of the checkpoint.
        slots: of paged experts by layer, of the backbone.
        draft_slots: of the draft stages, which count on from the backbone's layers.
    """
    model = load_fast_model(path, kernels="torch", device="cpu", dtype=torch.float32, slots=slots)
    source = CheckpointSource(Checkpoint(path), CPU, torch.float32)
    placement = Placement(draft_slots, device=CPU, pin=False)
    drafter: Drafter
    if model.config.dspark is not None:
        weights = pack_dspark(model.config, source, placement, plain=torch.float32)
        drafter = Dspark(model, weights)
    else:
        stages = pack_mtp(model.config, source, placement, plain=torch.float32)
        drafter = Mtp(model, stages)
    model.drafter = drafter
    return model, drafter


def make_pool(model: FastModel) -> KVPool:
    """Memory in which slot 1 is fresh and all else NaN."""
    pool = KVPool(
        model.config,
        num_blocks=40,
        block_size=drive.BLOCK,
        num_slots=3,
        ring_history=True,
        forms=model.forms,
        drafting="mtp" if model.config.dspark is None else "dspark",
    )
    pool.poison(slots=(1, 2), blocks=BLOCKS)
    pool.reset_slot(1)
    return pool


def feed(
    model: FastModel,
    pool: KVPool,
    request: drive.Request,
    size: int,
    counted: int | None = None,
) -> torch.Tensor:
    """Run the next `size` tokens, of which `counted` (all by default) turn out to count."""
    rows, _ = build_rows([request.chunk(size)], block_size=drive.BLOCK, device="cpu")
    held = None if counted is None else Held()
    logits = model.run(Pass(rows, pool, held))
    if held is not None:
        held.commit(torch.tensor([counted], dtype=torch.int32))
    request.done += size if counted is None else counted
    return logits


def one_row(token: int, position: int) -> Rows:
    """A decode pass of slot 1."""
    chunk = Chunk("r", 1, position, (token,), BLOCKS, True)
    rows, _ = build_rows([chunk], block_size=drive.BLOCK, device="cpu")
    return rows


def propose(
    drafter: Drafter, pool: KVPool, token: int, position: int
) -> tuple[list[int], torch.Tensor]:
    """The greedy draft after a token: its ids and logits [n, V]."""
    seen = []

    def pick(logits: torch.Tensor, place: int) -> torch.Tensor:
        assert place == len(seen)
        seen.append(logits[0].clone())
        return logits.argmax(-1)

    found = drafter.propose(one_row(token, position), pool, pick)
    return found[0].tolist(), torch.stack(seen)


def wanted(index: int, left: int, temperature: float, stops: tuple[int, ...] = ()) -> Wanted:
    """How one sequence's tokens are drawn."""
    return Wanted(
        temperature=torch.tensor([temperature], dtype=torch.float64),
        top_p=torch.tensor([0.9], dtype=torch.float64),
        seeds=torch.tensor([7]),
        index=torch.tensor([index], dtype=torch.int32),
        control=torch.tensor([[99, 999, *stops, NO_STOP]]),
        left=torch.tensor([left]),
    )
