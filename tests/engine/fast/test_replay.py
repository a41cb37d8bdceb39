"""The modes of the prompt's tail over packed weights against the reference model's."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from engine.api import PrefillMode
from engine.device.batch import ForwardBatch
from engine.device.kvpool import KVPool
from engine.device.rows import build_narrowings, build_rows
from engine.model.checkpoint import load_model
from engine.model.fast import FastModel
from engine.model.loading import load_fast_model
from engine.model.v4 import Model
from engine.plan.replay import Tail, stages
from engine.plan.step import Chunk
from tests.engine.model import build, drive

BLOCKS = 16


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, FastModel]:
    """The two, every visible entry attended: no choice can hang on a rounding."""
    config = build.v41(index_topk=512, candidate_topk_blocks=512)
    path = build.write(Path(tmp_path_factory.mktemp("v41")), config, seed=5)
    fast = load_fast_model(path, kernels="torch", device="cpu", dtype=torch.float32)
    return load_model(path), fast


def pool_of(config, ring: bool) -> KVPool:  # type: ignore[no-untyped-def]
    pool = KVPool(
        config, num_blocks=2 * BLOCKS, block_size=drive.BLOCK, num_slots=3, ring_history=ring
    )
    pool.poison(slots=(1, 2), blocks=range(1, 2 * BLOCKS))
    return pool


def chunks_of(
    lengths: list[int], modes: list[PrefillMode], cuts: list[list[int]]
) -> list[list[Chunk]]:
    """Steps of the chunks of several prompts, cut as said."""
    steps: list[list[Chunk]] = []
    for number, (length, mode, cut) in enumerate(zip(lengths, modes, cuts, strict=True)):
        ids, done = drive.tokens(length, number), 0
        blocks = tuple(range(1 + number * 8, 9 + number * 8))
        for step, size in enumerate([*cut, length - sum(cut)]):
            chunk = Chunk(
                request_id=str(number),
                slot=number + 1,
                start=done,
                token_ids=tuple(ids[done : done + size]),
                block_ids=blocks[: -(-(done + size) // drive.BLOCK)],
                wants_logits=done + size == length,
                prefill=mode,
                anchor=0 if mode == "off" else length - 1,
            )
            steps += [[]] * (step + 1 - len(steps))
            steps[step] = [*steps[step], chunk]
            done += size
    return steps


def run(
    models: tuple[Model, FastModel], steps: list[list[Chunk]]
) -> tuple[list[torch.Tensor], ...]:
    """Logits of every step, of the reference and of the packed form."""
    model, fast = models
    pools = pool_of(model.config, False), pool_of(fast.config, True)
    wanted, found = [], []
    for chunks in steps:
        for chunk in chunks:
            if not chunk.start:
                for pool in pools:
                    pool.reset_slot(chunk.slot)
        wanted.append(model.forward(ForwardBatch.build(chunks, tail=model.tail), pools[0]))
        rows, logit_rows = build_rows(chunks, block_size=drive.BLOCK, device="cpu")
        plan = stages(model.tail, chunks)
        narrowings, narrowed = build_narrowings(rows, chunks, plan)
        *_, logits = fast.prefill(
            rows, pools[1], narrowed if plan else logit_rows, narrowings=narrowings
        )
        found.append(logits)
    for layer in pools[0].entries:
        torch.testing.assert_close(
            pools[1].entries[layer][1:],
            pools[0].entries[layer][1:],
            atol=2e-5,
            rtol=0,
            equal_nan=True,
        )
    return wanted, found


@pytest.mark.parametrize(
    "modes", [["bounded"], ["exact"], ["off", "bounded"], ["exact", "bounded"]], ids=str
)
@pytest.mark.parametrize("length", [5, 8, 9, 43, 60, 90])
def test_modes_equal_the_reference(
    models: tuple[Model, FastModel], modes: list[PrefillMode], length: int
) -> None:
    """Whole and in chunks, alone and beside another mode: logits and entries are the reference's."""
    lengths = [length, 77][: len(modes)]
    for cuts in ([[], []], [[length // 3], [40]], [[length - 2], [1, 70]]):
        steps = chunks_of(lengths, modes, cuts[: len(modes)])
        wanted, found = run(models, steps)
        for one, other in zip(wanted, found, strict=True):
            assert one.shape == other.shape
            if len(one):
                assert (one - other).abs().max() < 5e-5


def test_a_floor_that_is_not_applied_is_seen(models: tuple[Model, FastModel]) -> None:
    """Without floors rows of bounded mode would see what earlier chunks left out (n1)."""
    model, fast = models
    steps = chunks_of([60], ["bounded"], [[]])
    wanted, _ = run(models, steps)
    pool = pool_of(fast.config, True)
    pool.reset_slot(1)
    rows, _ = build_rows(steps[0], block_size=drive.BLOCK, device="cpu")
    narrowings, narrowed = build_narrowings(rows, steps[0], stages(model.tail, steps[0]))
    open_ = [
        dataclasses.replace(n, rows=dataclasses.replace(n.rows, floors=None)) for n in narrowings
    ]
    *_, logits = fast.prefill(rows, pool, narrowed, narrowings=open_)
    assert isinstance(model.tail, Tail)
    assert not (logits - wanted[0]).abs().max() < 1e-3
