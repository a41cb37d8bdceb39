"""Speculative steps yield token for token what plain decoding yields."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies as st

from engine.device.rows import build_rows
from engine.kernels.rows import Rows
from engine.model.fast import Pass
from engine.model.speculate import Speculator, Wanted, verify
from engine.plan.step import Chunk
from tests.engine.fast.test_dspark import load, make_pool
from tests.engine.model import build, drive

NEW = 24
BLOCKS = tuple(range(1, 40))


def wanted(index: int, left: int, temperature: float, ends: tuple[int, ...] = ()) -> Wanted:
    return Wanted(
        temperature=torch.tensor([temperature], dtype=torch.float64),
        top_p=torch.tensor([0.9], dtype=torch.float64),
        seeds=torch.tensor([7]),
        index=torch.tensor([index], dtype=torch.int32),
        left=torch.tensor([left], dtype=torch.int32),
        ends=torch.tensor(ends, dtype=torch.int64),
        ends_count=torch.tensor([True]),
    )


def one_row(token: int, position: int) -> Rows:
    chunk = Chunk("r", 1, position, (token,), BLOCKS, True)
    rows, _ = build_rows([chunk], block_size=drive.BLOCK, device="cpu")
    return rows


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> object:
    path = build.write(Path(tmp_path_factory.mktemp("v41")), build.v41())
    return load(path)


def start(loaded, pool, ids, temperature):
    """Process a prompt; gives its first token."""
    model, draft = loaded
    rows, _ = build_rows(
        [Chunk("r", 1, 0, tuple(ids), BLOCKS, True)], block_size=drive.BLOCK, device="cpu"
    )
    state = Pass(rows, pool)
    logits = model.run(state)[-1:]
    draft.remember(state, pool.draft)
    w = wanted(0, 1, temperature)
    drawn, _ = model.ops.sample(logits, w.temperature, w.top_p, w.seeds, w.index)
    return int(drawn)


def plain(loaded, ids, temperature):
    model, _ = loaded
    pool = make_pool(model)
    found = [start(loaded, pool, ids, temperature)]
    while len(found) < NEW:
        rows = one_row(found[-1], len(ids) + len(found) - 1)
        w = wanted(len(found), 1, temperature)
        logits = model.run(Pass(rows, pool))
        drawn, _ = model.ops.sample(logits, w.temperature, w.top_p, w.seeds, w.index)
        found.append(int(drawn))
    return found


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("helped", [False, True], ids=["drafted", "told"])
def test_tokens_are_those_of_plain_decoding(
    loaded: object, temperature: float, helped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy and sampled, with drafts that mostly fail and with drafts that are right for a while."""
    model, draft = loaded  # type: ignore[misc]
    ids = drive.tokens(21, 6)
    tokens = plain(loaded, ids, temperature)
    pool = make_pool(model)
    found = [start(loaded, pool, ids, temperature)]
    propose, taken = draft.propose, []

    def told(sampled, rows, rings):
        """The true continuation, wrong from a place that moves on."""
        _, logits, confidence = propose(sampled, rows, rings)
        line = [*tokens[len(found) :], 0, 0, 0, 0, 0][: draft.block_size]
        wrong = len(taken) % (draft.block_size + 1)
        line = [t if i < wrong else (t + 1) % 288 for i, t in enumerate(line)]
        return torch.tensor([line]), logits, confidence

    if helped:
        monkeypatch.setattr(draft, "propose", told)
    speculator = Speculator(model, draft)
    while len(found) < NEW:
        rows = one_row(found[-1], len(ids) + len(found) - 1)
        w = wanted(len(found), NEW - len(found), temperature)
        step = speculator.step(rows, pool, w)
        count = int(step.counts)
        taken.append(count)
        found += step.ids[0, :count].tolist()
    assert found == tokens
    if helped:
        assert max(taken) > 3
        assert len(taken) < NEW / 2


@given(st.data())
def test_a_draft_is_taken_as_far_as_it_agrees(data: st.DataObject) -> None:
    """Counts follow from agreement, ends and what is left, one sequence at a time."""
    size = data.draw(st.integers(1, 6))
    token = st.integers(0, 3)
    drafted = data.draw(st.lists(token, min_size=size, max_size=size))
    drawn = data.draw(st.lists(token, min_size=size + 1, max_size=size + 1))
    left = data.draw(st.integers(0, size + 2))
    counts = data.draw(st.booleans())
    expected = 0
    for place, drew in enumerate(drawn):
        if expected == left:
            break
        expected += 1
        if (counts and drew == 3) or place == size or drafted[place] != drew:
            break
    w = dataclasses.replace(wanted(0, left, 0.0, (3,)), ends_count=torch.tensor([counts]))
    ok = torch.ones(1, size + 1, dtype=torch.bool)
    found = verify(torch.tensor([drafted]), torch.tensor([drawn]), ok, w)
    assert int(found.counts) == expected
    assert int(found.accepted) == max(expected - 1, 0)


def test_fixed_acceptance_yields_its_average(loaded: object) -> None:
    """3.5 tokens a step means 7 in two, whatever was drafted; out of range is refused."""
    model, draft = loaded  # type: ignore[misc]
    pool = make_pool(model)
    ids = drive.tokens(9, 8)
    token = start(loaded, pool, ids, 0.0)
    speculator = Speculator(model, draft, fixed_acceptance=3.5)
    made, taken = 0, []
    for _ in range(6):
        step = speculator.step(one_row(token, len(ids) + made), pool, wanted(made, 100, 0.0))
        taken.append(int(step.counts))
        made += taken[-1]
        token = int(step.ids[0, taken[-1] - 1])
    assert sorted(set(taken)) == [3, 4]
    assert sum(taken) == 21
    with pytest.raises(ValueError, match="expected 1 to 6, got 7"):
        Speculator(model, draft, fixed_acceptance=7)
