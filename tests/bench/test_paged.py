"""Traces of the paged figures: their locality is what they say, their form what the kernels read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import orjson
import pytest
import torch

from bench import paged_plot
from bench.paged_model import guesses_of, packed, reuse_trace, uniform_trace, zipf_trace
from engine.kernels.router import group_torch, most_tiles
from engine.plan.residency import Residency


@pytest.mark.parametrize("hit", [0.5, 0.9, 1.0])
def test_reuse_is_about_the_hit_rate_of_the_slots(hit: float) -> None:
    """A table of as many slots, in any state, counts the stated rate."""
    table = Residency(64, 16)
    table.bring_in([40, 50, 3])
    order = sorted(range(16), key=lambda s: (table.last_use[s], s))
    held = [table.slot_expert[slot] for slot in order]
    before = table.hits, table.misses
    steps = reuse_trace(600, 64, 4, held, hit, seed=1)
    assert all(len(set(step)) == 4 for step in steps)
    for step in steps:
        table.bring_in(step)
    hits, misses = table.hits - before[0], table.misses - before[1]
    assert abs(hits / (hits + misses) - hit) < 0.03


def test_zipf_prefers_its_first_ranks() -> None:
    """Distinct within a step; the most frequent expert is far ahead of a uniform one."""
    drawn = zipf_trace(500, 32, 4, seed=2)
    assert all(len(set(step)) == 4 for step in drawn)
    most = np.bincount(np.array(drawn).ravel()).max()
    even = np.bincount(np.array(uniform_trace(500, 32, 4, seed=2)).ravel()).max()
    assert most > 3 * even


@pytest.mark.parametrize("rows", [1, 3, 16, 64])
def test_packed_routings_are_the_routers_own(rows: int) -> None:
    """Order, tiles and their number are what grouping gives, at the places they are read from."""
    rng = np.random.default_rng(rows)
    trace = np.stack([[[rng.permutation(24)[:4] for _ in range(rows)]] for _ in range(3)])
    trace = trace.astype(np.int32)
    pairs, most = rows * 4, most_tiles(rows, 4, 24)
    sizes = [-(-size // 4) * 4 for size in (pairs, pairs, 3 * most, 1)]
    for step, line in enumerate(packed(trace, 24)[:, 0]):
        experts, order, tiles, used = line.split(sizes)
        wanted = group_torch(torch.from_numpy(trace[step, 0]), 24)
        assert torch.equal(experts[:pairs], torch.from_numpy(trace[step, 0]).flatten())
        assert torch.equal(order[:pairs], wanted[0])
        assert torch.equal(tiles[: 3 * most].view(-1, 3), wanted[1])
        assert torch.equal(used[:1], wanted[2])


def test_guesses_are_as_good_as_stated() -> None:
    """About that share stays, and a few of the others by chance."""
    trace = np.random.default_rng(7).integers(0, 100, (50, 4, 1, 8), dtype=np.int32)
    assert (guesses_of(trace, 100, 1.0) == trace).all()
    assert abs((guesses_of(trace, 100, 0.8) == trace).mean() - 0.8) < 0.03


def test_the_plot_takes_rows_of_one_sequence(tmp_path: Path) -> None:
    """Rows of other batches, of prompts and of prefetch are left out."""
    row = {"bench": "paged", "mode": "paged", "batch": 1}
    others = [{**row, "batch": 4}, {**row, "bench": "paged_prompt"}, {**row, "mode": "resident"}]
    guessed = {**row, "prefetch_accuracy": 0.8}
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b"\n".join(orjson.dumps(one) for one in (row, *others, guessed)))
    assert paged_plot.read([file]) == [row]
