"""Drafts against the independent oracle, and passes whose rows may turn out not to count."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.device.kvpool import KVPool
from engine.device.rows import build_rows
from engine.model.flow import Held, Pass
from engine.model.loading import load_fast_model
from tests.engine.fast.drafts import feed, load, make_pool, propose
from tests.engine.model import build, drive
from tests.oracle_naive.config import Config
from tests.oracle_naive.draft import dspark as naive_dspark, mtp_logits
from tests.oracle_naive.model import Naive
from tests.oracle_naive.weights import from_tensors

SAMPLED = 50


def plain_v41() -> dict[str, Any]:
    return build.v41(engram_layer_ids=[])


@pytest.mark.parametrize("length", [5, 8, 27])
def test_dsparks_drafts_equal_the_oracles(length: int, tmp_path: Path) -> None:
    """Ids and logits are those of the independent float64 oracle."""
    config = plain_v41()
    tensors = build.random_tensors(config, 0)
    path = build.write(tmp_path, config, tensors=tensors)
    ids = drive.tokens(length, 3)
    wanted = naive_dspark(Naive(Config.read(config), from_tensors(tensors), ids), SAMPLED)
    model, drafter = load(path)
    pool = make_pool(model)
    request = drive.Request(ids)
    for size in (length - 3, 1, 2):
        feed(model, pool, request, size)
    found, logits = propose(drafter, pool, SAMPLED, length)
    assert found == wanted.token_ids
    assert (logits - torch.from_numpy(wanted.logits)).abs().max() < 1e-4


@pytest.mark.parametrize("splits", [(1,), (2, 1), (5,), (12, 1, 1, 3), (1, 1, 1, 1, 1, 20)])
def test_mtps_drafts_equal_the_oracles(splits: tuple[int, ...], tmp_path: Path) -> None:
    """Logits are those of the oracle over the same tokens at once, however the prompt was cut."""
    config = build.v4()
    tensors = build.random_tensors(config, 2)
    path = build.write(tmp_path, config, tensors=tensors)
    ids = drive.tokens(sum(splits), 3)
    run = Naive(Config.read(config), from_tensors(tensors), ids)
    wanted = mtp_logits(run, [*ids[1:], SAMPLED])
    model, drafter = load(path)
    pool = make_pool(model)
    request = drive.Request(ids)
    for size in splits:
        feed(model, pool, request, size)
        after = [*ids, SAMPLED][request.done]
        _, logits = propose(drafter, pool, after, request.done)
        assert (logits[0] - torch.from_numpy(wanted[request.done - 1])).abs().max() < 1e-4


@pytest.mark.parametrize("length", [3, 4, 21])
def test_a_second_mtp_stage_continues_the_first(length: int, tmp_path: Path) -> None:
    """Stage 1 over stage 0's streams and the drafted token is the oracle's block over the same."""
    config = build.v4(num_nextn_predict_layers=2, compress_ratios=[0, 4, 16, 4, 16, 0, 0])
    tensors = build.random_tensors(config, 4)
    path = build.write(tmp_path, config, tensors=tensors)
    ids = drive.tokens(length, 3)
    model, drafter = load(path)
    pool = make_pool(model)
    request = drive.Request(ids)
    for size in (length - 2, 1, 1):
        feed(model, pool, request, size)
    found, logits = propose(drafter, pool, SAMPLED, length)

    run = Naive(Config.read(config), from_tensors(tensors), ids)
    known = [*ids, SAMPLED, found[0]]
    streams, _ = run.backbone()
    for stage in range(2):
        streams = stage_streams(run, stage, streams, known)
    x = run.collapse("mtp.1.hc_head", streams[-1], np.empty(0))
    expected = run.w["head.weight"] @ run.norm("mtp.1.norm", x)
    assert len(found) == 2
    assert (logits[1] - torch.from_numpy(expected)).abs().max() < 1e-4


def stage_streams(run: Naive, stage: int, below: list[Any], known: list[int]) -> list[Any]:
    """Streams of an MTP stage at every position, from those of the level below."""
    name, inputs = f"mtp.{stage}", []
    for t, streams in enumerate(below):
        e = run.norm(f"{name}.enorm", run.w["embed.weight"][known[t + stage + 1]])
        told = run.linear(f"{name}.e_proj", e)
        hidden = [run.linear(f"{name}.h_proj", run.norm(f"{name}.hnorm", s)) for s in streams]
        inputs.append(np.array([h + told for h in hidden]))
    out, _ = run.block(name, inputs, [], run.c.num_hidden_layers + stage)
    return out


@pytest.mark.parametrize("version", ["v4", "v41"])
def test_rows_that_do_not_count_leave_no_trace(version: str, tmp_path: Path) -> None:
    """A pass of six rows of which n count leaves the state of a pass of those n rows."""
    config = build.v4() if version == "v4" else build.v41()
    path = build.write(tmp_path, config)
    model = load_fast_model(path, kernels="torch", device="cpu", dtype=torch.float32)
    ids = drive.tokens(60, 4)
    plain = drive.Request(ids)
    pool = KVPool(
        model.config,
        num_blocks=40,
        block_size=drive.BLOCK,
        num_slots=3,
        ring_history=True,
        forms=model.forms,
    )
    pool.reset_slot(1)
    wanted = []
    for _ in ids:
        rows, _ = build_rows([plain.chunk(1)], block_size=drive.BLOCK, device="cpu")
        wanted.append(model.decode(rows, pool))
        plain.done += 1
    other = KVPool(
        model.config,
        num_blocks=40,
        block_size=drive.BLOCK,
        num_slots=3,
        ring_history=True,
        forms=model.forms,
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


@pytest.mark.parametrize("version", ["v4", "v41"])
def test_drafters_forget_rows_that_do_not_count(version: str, tmp_path: Path) -> None:
    """After a pass of which three rows of six count, drafts are those after these three."""
    config = build.v4() if version == "v4" else build.v41()
    model, drafter = load(build.write(tmp_path, config, seed=3))
    ids = drive.tokens(40, 5)
    found = []
    for size, counted in ((3, None), (6, 3), (6, 6)):
        pool = make_pool(model)
        request = drive.Request(ids)
        feed(model, pool, request, 20)
        feed(model, pool, request, size, counted)
        found.append(propose(drafter, pool, SAMPLED, 23)[1])
    assert (found[0] - found[1]).abs().max() < 1e-4
    assert (found[0] - found[2]).abs().max() > 1e-3, "planted: all six kept"


def test_a_store_at_once_is_seen(tmp_path: Path) -> None:
    """Counting rows that should not count changes what comes after (the fault of a missing rollback)."""
    model, _ = load(build.write(tmp_path, build.v41()))
    ids = drive.tokens(30, 5)
    found = []
    for counted in (2, 6):
        pool = make_pool(model)
        request = drive.Request(ids)
        feed(model, pool, request, 20)
        feed(model, pool, request, 6, counted)
        request.done = 22
        found.append(feed(model, pool, request, 1))
    assert (found[0] - found[1]).abs().max() > 1e-3
