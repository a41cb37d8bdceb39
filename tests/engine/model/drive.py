"""Runs requests through a model by hand: any chunking, slots, blocks and company."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.device.batch import ForwardBatch
from engine.device.kvpool import KVPool
from engine.model.v4 import Model
from engine.plan.step import Chunk

BLOCK = 16  # small, so that sequences span many blocks; a multiple of every ratio of build.py


def make_pool(model: Model, *, num_slots: int = 4, num_blocks: int = 64) -> KVPool:
    """A pool whose free memory is NaN, in the model's own precision."""
    pool = KVPool(
        model.config,
        num_blocks=num_blocks,
        block_size=BLOCK,
        num_slots=num_slots,
        dtype=model.dtype,
    )
    pool.poison(slots=range(1, num_slots), blocks=range(1, num_blocks))
    return pool


@dataclass
class Request:
    """One sequence being processed; `logits` collects a row per token."""

    ids: Sequence[int]
    slot: int = 1
    blocks: Sequence[int] = ()
    done: int = 0
    logits: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.blocks = self.blocks or range(1, 1 + -(-len(self.ids) // BLOCK))

    def chunk(self, size: int) -> Chunk:
        """The next `size` tokens, with the blocks they need and no more."""
        end = min(self.done + size, len(self.ids))
        return Chunk(
            request_id=str(id(self)),
            slot=self.slot,
            start=self.done,
            token_ids=tuple(self.ids[self.done : end]),
            block_ids=tuple(self.blocks[: -(-end // BLOCK)]),
            wants_logits=True,
        )


def step(model: Model, pool: KVPool, plan: Sequence[tuple[Request, int]], **how: object) -> Tensor:
    """Run one step of (request, number of tokens) pairs; a request that starts gets a fresh slot."""
    chunks = []
    for request, size in plan:
        if request.done == 0:
            pool.reset_slot(request.slot)
        chunks.append(request.chunk(size))
    logits = model.forward(ForwardBatch.build(chunks), pool, all_rows=True, **how)
    rows = logits.split([len(chunk.token_ids) for chunk in chunks])
    for (request, _), chunk, own in zip(plan, chunks, rows, strict=True):
        request.logits.append(own)
        request.done += len(chunk.token_ids)
    return logits


def run(
    model: Model,
    ids: Sequence[int],
    splits: Sequence[int] = (),
    *,
    pool: KVPool | None = None,
    slot: int = 1,
    **how: object,
) -> Tensor:
    """Logits [T, vocab] of one sequence processed in the given pieces (whole by default)."""
    pool = make_pool(model) if pool is None else pool
    request = Request(ids, slot)
    for size in splits or [len(ids)]:
        step(model, pool, [(request, size)], **how)
    assert request.done == len(ids)
    return torch.cat(request.logits)


def tokens(count: int, seed: int, vocab: int = 288) -> list[int]:
    """Random ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab, (count,), generator=generator).tolist()
