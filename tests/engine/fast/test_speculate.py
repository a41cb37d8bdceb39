"""Speculative steps yield token for token what plain decoding yields."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies as st

from engine.device.rows import build_rows
from engine.kernels.accept import NO_STOP, accept_torch
from engine.kernels.feed import UNUSABLE
from engine.model.drafting import Drafter
from engine.model.fast import FastModel
from engine.model.flow import Pass
from engine.model.speculate import Speculator
from engine.plan.step import Chunk
from tests.engine.fast.drafts import BLOCKS, load, make_pool, one_row, wanted
from tests.engine.model import build, drive

NEW = 24
Loaded = tuple[FastModel, Drafter]


@pytest.fixture(scope="module", params=["v4", "v41"])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    config = getattr(build, request.param)()
    return load(build.write(Path(tmp_path_factory.mktemp(request.param)), config))


def start(loaded: Loaded, pool: object, ids: list[int], temperature: float) -> int:
    """Process a prompt; gives its first token."""
    model, _ = loaded
    chunk = Chunk("r", 1, 0, tuple(ids), BLOCKS, True)
    rows, _ = build_rows([chunk], block_size=drive.BLOCK, device="cpu")
    w = wanted(0, 1, temperature)
    drawn, _ = model.ops.sample(
        model.run(Pass(rows, pool))[-1:], w.temperature, w.top_p, w.seeds, w.index
    )
    return int(drawn)


def plain(loaded: Loaded, ids: list[int], temperature: float) -> list[int]:
    model, _ = loaded
    pool = make_pool(model)
    found = [start(loaded, pool, ids, temperature)]
    while len(found) < NEW:
        w = wanted(len(found), 1, temperature)
        logits = model.run(Pass(one_row(found[-1], len(ids) + len(found) - 1), pool))
        drawn, _ = model.ops.sample(logits, w.temperature, w.top_p, w.seeds, w.index)
        found.append(int(drawn))
    return found


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("helped", [False, True], ids=["drafted", "told"])
def test_tokens_are_those_of_plain_decoding(
    loaded: Loaded, temperature: float, helped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy and sampled, with drafts that mostly fail and with drafts that are right for a while."""
    model, drafter = loaded
    ids = drive.tokens(21, 6)
    tokens = plain(loaded, ids, temperature)
    pool = make_pool(model)
    found = [start(loaded, pool, ids, temperature)]
    size, taken = drafter.num_tokens, []

    def told(rows: object, pool: object, pick: object) -> torch.Tensor:
        """The true continuation, wrong from a place that moves on."""
        line = [*tokens[len(found) :], *[0] * size][:size]
        wrong = len(taken) % (size + 1)
        line = [t if i < wrong else (t + 1) % 288 for i, t in enumerate(line)]
        return torch.tensor([line])

    if helped:
        monkeypatch.setattr(drafter, "propose", told)
    speculator = Speculator(model, drafter)
    results = torch.zeros((1, size + 2), dtype=torch.int64)
    while len(found) < NEW:
        position = len(ids) + len(found) - 1
        rows = one_row(found[-1], position)
        w = wanted(len(found), NEW - len(found), temperature)
        speculator.step(rows, pool, w, results)
        count, *drawn = results[0].tolist()
        taken.append(count)
        found += drawn[:count]
        assert int(rows.ids) == found[-1]
        assert int(rows.positions) == position + count
        assert int(w.index) == len(found)
    assert found == tokens
    if helped:
        assert max(taken) == size + 1
        assert len(taken) < NEW / (1 + size / 4)


@given(st.data())
def test_a_draft_is_taken_as_far_as_it_agrees(data: st.DataObject) -> None:
    """Counts follow from agreement, ends, limits and what can be drawn, one token at a time."""
    size = data.draw(st.integers(1, 6))
    token = st.integers(0, 3)
    drafted = data.draw(st.lists(token, min_size=size, max_size=size))
    drawn = data.draw(st.lists(token, min_size=size + 1, max_size=size + 1))
    usable = data.draw(st.lists(st.booleans(), min_size=size + 1, max_size=size + 1))
    cap, more, room = (data.draw(st.integers(0, size + 2)) for _ in range(3))
    limit = min(cap, more, room)
    stops = data.draw(st.booleans())
    expected: list[int] = []
    for place, drew in enumerate(drawn):
        if len(expected) == limit or (not usable[place] and place):
            break
        expected.append(drew if usable[place] else UNUSABLE)
        ends = stops and drew == 3
        if not usable[place] or ends or place == size or drafted[place] != drew:
            break
    ids, positions = torch.tensor([9]), torch.tensor([40], dtype=torch.int32)
    left = torch.tensor([more])
    index, results = torch.tensor([5], dtype=torch.int32), torch.full((2, size + 2), 7)
    counts = accept_torch(
        torch.tensor([drafted]),
        torch.tensor([drawn]),
        torch.tensor([usable]),
        torch.tensor([[cap, 40 + room, 3 if stops else NO_STOP, NO_STOP]]),
        left,
        ids,
        positions,
        index,
        results,
    )
    count = len(expected)
    assert counts.tolist() == [count]
    assert results[0, : count + 1].tolist() == [count, *expected]
    assert results[1].eq(7).all()
    ended = stops and count > 0 and expected[-1] == 3
    assert left.tolist() == [0 if ended else more - count]
    assert ids.tolist() == ([max(expected[-1], 0)] if expected else [9])
    assert (positions.tolist(), index.tolist()) == ([40 + count], [5 + count])


def test_fixed_acceptance_yields_its_average(loaded: Loaded) -> None:
    """1.5 tokens a step means 3 in two, whatever was drafted; out of range is refused."""
    model, drafter = loaded
    pool = make_pool(model)
    ids = drive.tokens(9, 8)
    rows = one_row(start(loaded, pool, ids, 0.0), len(ids))
    speculator = Speculator(model, drafter, fixed_acceptance=1.5)
    results = torch.zeros((1, drafter.num_tokens + 2), dtype=torch.int64)
    w, taken = wanted(0, 100, 0.0), []
    for _ in range(6):
        speculator.step(rows, pool, w, results)
        taken.append(int(results[0, 0]))
    assert sorted(set(taken)) == [1, 2]
    assert sum(taken) == 9
    most = drafter.num_tokens + 1
    with pytest.raises(ValueError, match=f"expected 1 to {most}, got {most + 1}"):
        Speculator(model, drafter, fixed_acceptance=most + 1)


def test_a_close_draft_is_taken_as_often_when_sampled(loaded: Loaded) -> None:
    """Drafts are drawn with the numbers of the rows that judge them: equal logits always agree."""
    model, drafter = loaded
    w = dataclasses.replace(wanted(4, 9, 1.0))
    logits = torch.randn(3, 288)
    pick = Speculator(model, drafter)._pick(w)
    one = torch.ones(3, dtype=torch.float64)
    own, _ = model.ops.sample(
        logits, one, 0.9 * one, torch.full((3,), 7), torch.arange(4, 7, dtype=torch.int32)
    )
    assert [int(pick(logits[i : i + 1], i)) for i in range(3)] == own.tolist()


def test_a_rehearsal_calls_what_a_step_calls(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every operation of a step is called, with the same shapes, so that its kernels are compiled."""
    model, drafter = loaded
    called: list[tuple[str, tuple[object, ...]]] = []

    def spy(name: str, run: object) -> object:
        def noted(*args: object, **kwargs: object) -> object:
            tensors = [a for a in args if isinstance(a, torch.Tensor)]
            called.append((name, tuple(tuple(t.shape) for t in tensors)))
            return run(*args, **kwargs)  # type: ignore[operator]

        return noted

    names = [field.name for field in dataclasses.fields(model.ops) if field.name != "name"]
    spies = {name: spy(name, getattr(model.ops, name)) for name in names}
    monkeypatch.setattr(model, "ops", dataclasses.replace(model.ops, **spies))
    speculator = Speculator(model, drafter)
    monkeypatch.setattr(speculator, "_accept", spy("accept", speculator._accept))
    found = []
    for run in (speculator.step, speculator.rehearse):
        pool = make_pool(model)
        results = torch.zeros((1, drafter.num_tokens + 2), dtype=torch.int64)
        run(one_row(5, 0), pool, wanted(0, 9, 0.0), results)
        found.append(list(called))
        called.clear()
    assert found[0] == found[1]
    assert {"accept", "sample", "attend", "store_window"} <= {name for name, _ in found[0]}
    assert len(found[0]) > 50
