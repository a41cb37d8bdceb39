"""Traces of the paged figures: their locality is what they say, their form what the kernels read."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import orjson
import pytest
import torch

from bench import bound, paged, paged_model, paged_plot, rows
from bench.geometries import QWEN
from bench.paged_model import (
    Choices,
    Injected,
    PagedBench,
    Timed,
    guesses_of,
    packed,
    reuse_trace,
    uniform_trace,
    zipf_trace,
)
from engine.kernels.grouping import group_torch, most_tiles
from engine.plan.residency import Residency
from tests.bench.test_engine import SMALL


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


def step_by_step(
    self: PagedBench,
    batch: int,
    trace: Choices | None,
    warm: int,
    steps: int,
    accuracy: None = None,
) -> Timed:
    """In place of captured steps: 3 ms each where experts are paged and 2 ms where they are not."""
    rows = self.rows(batch)
    injected = None if trace is None else Injected(self.model, trace, self.experts)
    before = (0, 0)
    for step in range(warm + steps):
        if step == warm:
            before = self.counts()
        self.model.decode(rows, self.pool)
    if injected is not None:
        injected.close()
    hits, misses = (b - a for a, b in zip(before, self.counts(), strict=True))
    return Timed([3.0 if self.paged else 2.0] * steps, hits, misses, [0] * steps)


@pytest.mark.filterwarnings("ignore:Mismatch dtype")  # twins norm float32 by bfloat16 weights
def test_rows_name_the_resident_models_step_and_the_paged_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The formula stands on the step of a model that is wholly resident, of the same run."""
    for module in (paged, paged_model):
        monkeypatch.setattr(module, "QWEN3_30B", SMALL)
    monkeypatch.setattr(paged_model, "DEVICE", "cpu")
    monkeypatch.setattr(paged_model, "CONTEXT", 512)
    monkeypatch.setattr(paged, "AWAKING", 2)
    monkeypatch.setattr(paged, "BUS", 1e7)
    monkeypatch.setattr(paged, "make_rows", lambda module, device, found: found)
    monkeypatch.setattr(paged, "_copy_ms", lambda bench: 1.0)
    monkeypatch.setattr(PagedBench, "time_steps", step_by_step)
    monkeypatch.setattr(bound, "READ_BANDWIDTH", 1e9)  # slow, so that nothing is rounded away
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(rows, "RESULTS", tmp_path)
    command = (
        "bench.paged --slots 4 --batch 1,2 --hit 0.5 --warm 2 --steps 20 --prompt 40 --repeats 1"
        " --out found"
    )
    monkeypatch.setattr(sys, "argv", command.split())
    with torch.inference_mode():
        paged.main()
        monkeypatch.setattr(sys, "argv", "bench.paged --batch 2 --steps 4 --out whole".split())
        paged.main()

    found = [orjson.loads(line) for line in (tmp_path / "found.jsonl").read_bytes().splitlines()]
    *steps, prompt = found
    assert [(row["batch"], row["trace"]) for row in steps] == [
        (batch, f"reuse {hit}") for batch in (1, 2) for hit in (1.0, 0.5)
    ]
    nbytes = 2 * 3 * SMALL["hidden_size"] * SMALL["moe_intermediate_size"]
    for row in steps:
        assert (row["resident_ms"], row["full_hit_ms"]) == (2.0, 3.0)
        misses = (1 - row["hit_rate"]) * 2 * row["batch"] * SMALL["num_hidden_layers"]
        formula = 2 + misses * nbytes / paged.BUS * 1e3
        assert row["formula_ms"] == pytest.approx(formula, rel=1e-3)
        assert row["experts_touched"] == [2 * row["batch"]] * SMALL["num_hidden_layers"]
        assert row["bound_share"] == pytest.approx(row["bound_ms"] / 3, abs=1e-3)
        assert row["bound_ms"] >= max(0.01, round(row["formula_ms"] - 2, 4))
        assert row["awaking_ms"] == {"first": 3.0, "last": 3.0}
    assert [row["hit_rate"] for row in steps] == pytest.approx([1, 0.5, 1, 0.5], abs=0.1)
    assert (prompt["bench"], prompt["geometry"]) == ("paged_prompt", QWEN)
    assert prompt["ms_step"] == prompt["ttft_ms"]
    assert 0 < prompt["hit_rate"] < 1
    (whole,) = [orjson.loads(line) for line in (tmp_path / "whole.jsonl").read_bytes().splitlines()]
    assert whole["mode"] == "resident"
    assert all(2 <= count <= 4 for count in whole["experts_touched"])
    assert whole["bound_share"] == pytest.approx(whole["bound_ms"] / 2, abs=1e-3)


def test_a_model_beyond_the_gpu_is_drawn(tmp_path: Path) -> None:
    """Its formula stands on its own step with every choice in a slot, since it has no other."""
    row = {
        "bench": "paged", "mode": "paged", "batch": 1, "geometry": "v4-flash-43l", "experts": "as published",
        "paged_layers": 13, "slots": 128, "trace": "reuse 0.9", "resident_ms": None, "full_hit_ms": 6.0,
        "formula_ms": 8.0, "hit_rate": 0.9, "tok_s": 120.0,
    }  # fmt: skip
    most = {**row, "trace": "reuse 1.0", "hit_rate": 1.0, "formula_ms": 6.0, "tok_s": 165.0}
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b"\n".join(orjson.dumps(one) for one in (row, most)))

    paged_plot.draw([file], tmp_path / "curve.png")

    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
