"""One pass = any chunking = token by token = any company, slot and block.

Differences allowed are those of summation order: 2e-5 in float32. With rounding to FP8 and FP4 such
a difference may tip a value over to the next code, so the rounded models are compared in float64,
where that does not happen, and far more tightly.
"""

from __future__ import annotations

import dataclasses
import random
from functools import cache

import pytest
import torch
from hypothesis import given, settings, strategies as st

from engine.device.batch import ForwardBatch
from engine.device.kvpool import KVPool
from engine.model import v4
from engine.model.checkpoint import load_model
from engine.plan.step import Chunk
from tests.engine.model import build
from tests.engine.model.drive import BLOCK, Request, make_pool, run, step, tokens

LENGTH = 70  # past the window (8), four HCA groups (16), and top-k (4) by far
F32 = 2e-5
F64 = 1e-9
CONFIGS = {
    "v4": (build.v4(), "f32", torch.float32, F32),
    "v41": (build.v41(image=True), "f32", torch.float32, F32),
    # two index heads: ReLU leaves many scores at exactly 0, so ties decide what is chosen
    "v4 ties": (build.v4(index_n_heads=2), "f32", torch.float32, F32),
    "v41 ties": (build.v41(index_n_heads=2), "f32", torch.float32, F32),
    "v4 rounded": (build.v4(quantised=True), "fp4", torch.float64, F64),
    "v41 rounded": (build.v41(image=True, quantised=True), "fp4", torch.float64, F64),
}


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    """Kind -> (model, ids, logits of one pass, tolerance)."""

    @cache
    def loaded(kind):
        config, storage, dtype, tolerance = CONFIGS[kind]
        path = build.write(tmp_path_factory.mktemp("model"), config, storage=storage)
        model = load_model(path, dtype=dtype)
        ids = tokens(LENGTH, 1)
        return model, ids, run(model, ids), tolerance

    return loaded


def difference(a, b):
    """Largest absolute difference; NaN stays NaN and is above every bound by `not <=`."""
    return float((a - b).abs().max())


@pytest.mark.parametrize("kind", CONFIGS)
def test_token_by_token_equals_one_pass(load, kind):
    """Decode alone gives the logits of a whole prefill."""
    model, ids, want, tolerance = load(kind)

    assert difference(run(model, ids, [1] * LENGTH), want) <= tolerance


@pytest.mark.parametrize("kind", CONFIGS)
@settings(max_examples=8)
@given(data=st.data())
def test_any_chunking_equals_one_pass(load, kind, data):
    """How a sequence is cut into chunks does not change its logits."""
    model, ids, want, tolerance = load(kind)
    splits, left = [], LENGTH
    while left:
        longest = data.draw(st.sampled_from([1, 7, left]))
        splits.append(data.draw(st.integers(1, min(longest, left))))
        left -= splits[-1]

    assert difference(run(model, ids, splits), want) <= tolerance


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("seed", range(4))
def test_company_slots_and_blocks_do_not_matter(load, kind, seed):
    """Requests of any length, mixed in any order, on scattered blocks, equal themselves alone."""
    model, _, _, tolerance = load(kind)
    rng = random.Random(seed)
    lengths = [rng.randint(1, LENGTH) for _ in range(6)]
    alone = [run(model, tokens(n, 10 + i)) for i, n in enumerate(lengths)]
    pool = make_pool(model, num_slots=4, num_blocks=40)
    free_blocks, free_slots = list(range(1, 40)), [1, 2, 3]
    rng.shuffle(free_blocks)
    rng.shuffle(free_slots)
    waiting = list(range(len(lengths)))
    requests, live = {}, []
    while waiting or live:
        while waiting and free_slots:
            i = waiting.pop(0)
            blocks = [free_blocks.pop() for _ in range(-(-lengths[i] // BLOCK))]
            requests[i] = Request(tokens(lengths[i], 10 + i), free_slots.pop(), blocks)
            live.append(i)
        rng.shuffle(live)
        chosen = live[: rng.randint(1, len(live))]
        plan = [(requests[i], rng.choice([1, 1, 2, 7, LENGTH])) for i in chosen]
        step(model, pool, plan)
        for i in [i for i in live if requests[i].done == lengths[i]]:
            live.remove(i)
            free_slots.append(requests[i].slot)
            free_blocks.extend(requests[i].blocks)
            pool.poison(slots=[requests[i].slot], blocks=requests[i].blocks)

    for i, want in enumerate(alone):
        assert difference(torch.cat(requests[i].logits), want) <= tolerance


@pytest.mark.parametrize("kind", CONFIGS)
def test_logits_come_for_the_chunks_that_want_them(load, kind):
    """One row per wanting chunk, in chunk order, whatever its length."""
    model, ids, want, tolerance = load(kind)
    pool = make_pool(model, num_blocks=20)
    chunks = [
        Chunk("a", 3, 0, tuple(ids[:5]), (1,), True),
        Chunk("b", 1, 0, tuple(ids[:20]), (2, 3), False),
        Chunk("c", 2, 0, tuple(ids[:1]), (4,), True),
    ]
    for chunk in chunks:
        pool.reset_slot(chunk.slot)
    got = model.forward(ForwardBatch.build(chunks), pool)

    assert got.shape == (2, 288)
    assert difference(got, want[[4, 0]]) <= tolerance
    silent = [chunk._replace(wants_logits=False) for chunk in chunks[:1]]
    pool.reset_slot(3)
    assert model.forward(ForwardBatch.build(silent), pool).shape == (0, 288)


@pytest.mark.parametrize("kind", CONFIGS)
def test_fast_paths_equal_their_slow_twins(load, kind, monkeypatch):
    """Visiting experts in turn, smaller query blocks and choosing needlessly change nothing."""
    model, ids, want, tolerance = load(kind)
    monkeypatch.setattr(v4.Model, "_one_row", v4.Model._chosen_experts)
    monkeypatch.setattr(v4, "DENSE_PAIRS", 0)
    assert difference(run(model, ids, [3] * 10 + [1] * 40), want) <= tolerance
    monkeypatch.setattr(v4, "DENSE_PAIRS", 10**9)
    assert difference(run(model, ids), want) <= tolerance
    monkeypatch.setattr(v4, "QUERY_BLOCK", 5)
    assert difference(run(model, ids, [33, 37]), want) <= tolerance
    monkeypatch.setattr(v4.Model, "_choice_matters", lambda *_: True)
    assert difference(run(model, ids, [9] + [1] * 61), want) <= tolerance
    monkeypatch.setattr(v4.Model, "_candidates_matter", lambda *_: True)
    assert difference(run(model, ids, [41] + [1] * 29), want) <= tolerance


def test_bfloat16_linears_stay_close(tmp_path):
    """With linears and pools in bfloat16 logits move by rounding, not by structure."""
    config = build.v41(index_topk=64, candidate_source_layer_id=None)  # a choice is a cliff
    path = build.write(tmp_path, config, storage="bf16")
    ids = tokens(40, 2)
    want = run(load_model(path), ids)
    model = load_model(path, dtype=torch.bfloat16)

    def pool():
        return KVPool(
            model.config, num_blocks=9, block_size=BLOCK, num_slots=2, dtype=torch.bfloat16
        )

    got = run(model, ids, pool=pool())
    assert got.dtype == torch.float32
    assert 1e-4 < float((got - want).abs().mean()) < 0.03 * float(want.std())
    chunked = run(model, ids, [7] * 5 + [1] * 5, pool=pool())
    assert float((chunked - got).abs().mean()) < 0.03 * float(want.std())


# ---------------------------------------------------------------- planted faults


def _forget_reset(monkeypatch):
    monkeypatch.setattr(KVPool, "reset_slot", lambda *_: None)


def _forget_state(monkeypatch):
    original = ForwardBatch.pooling

    def pooling(self, *args):
        plan = original(self, *args)
        return dataclasses.replace(plan, saved=plan.saved[:0], saved_at=plan.saved_at[:0])

    monkeypatch.setattr(ForwardBatch, "pooling", pooling)


def _count_phases_from_the_chunk(monkeypatch):
    original = ForwardBatch.pooling

    def pooling(self, ratio, *args):
        plan = original(self, ratio, *args)
        local = torch.cat([torch.arange(span.length) for span in self.spans])
        return dataclasses.replace(plan, phases=local % ratio)

    monkeypatch.setattr(ForwardBatch, "pooling", pooling)


def _shift_the_ring(monkeypatch):
    original = ForwardBatch.ring_writes

    def ring_writes(self, window):
        rows, places = original(self, window)
        return rows, (places // window) * window + (places + 1) % window

    monkeypatch.setattr(ForwardBatch, "ring_writes", ring_writes)


def _pad_with_foreign_blocks(monkeypatch):
    original = ForwardBatch.decode_entries

    def decode_entries(self, ratio, block_size):
        found = original(self, ratio, block_size)
        places = found.places.masked_fill(~found.visible, 20 * (block_size // ratio))
        return dataclasses.replace(found, places=places)

    monkeypatch.setattr(ForwardBatch, "decode_entries", decode_entries)


def _ignore_earlier_chunks(monkeypatch):
    original = v4.Model._attend_block

    def attend_block(self, layer, sink, q, window, block, step):
        before = len(window) - block.span.length
        return original(
            self, layer, sink, q, window.index_fill(0, torch.arange(before), 0.0), block, step
        )

    monkeypatch.setattr(v4.Model, "_attend_block", attend_block)


def _forget_history(monkeypatch):
    original = v4.ngrams
    monkeypatch.setattr(v4, "ngrams", lambda history, *rest: original(history * 0 - 1, *rest))


FAULTS = [
    ("v4", _forget_reset),
    ("v41", _forget_reset),
    ("v4", _forget_state),
    ("v41", _forget_state),
    ("v4", _count_phases_from_the_chunk),
    ("v4", _shift_the_ring),
    ("v41", _shift_the_ring),
    ("v4", _pad_with_foreign_blocks),
    ("v4", _ignore_earlier_chunks),
    ("v41", _forget_history),
]


@pytest.mark.parametrize(("kind", "plant"), FAULTS, ids=[f"{k} {p.__name__}" for k, p in FAULTS])
def test_planted_faults_are_seen(load, kind, plant, monkeypatch):
    """Each of these mistakes of bookkeeping breaks the equality the tests above hold."""
    model, ids, want, tolerance = load(kind)
    other = tokens(LENGTH, 3)
    pool = make_pool(model, num_slots=4, num_blocks=40)
    for slot in (1, 2):  # a slot that was used and not cleared, but is finite
        pool.reset_slot(slot)
        run(model, other, pool=pool, slot=slot)
    plant(monkeypatch)
    long, short = Request(ids, 1, range(1, 6)), Request(ids[:30], 2, range(6, 11))
    while long.done < LENGTH:
        plan = [(long, 5 if long.done < 15 else 1)]
        if short.done < 30:
            plan.append((short, 1))
        step(model, pool, plan)
    worst = [difference(torch.cat(r.logits), want[: r.done]) for r in (long, short)]

    assert not all(w <= 50 * tolerance for w in worst), worst
