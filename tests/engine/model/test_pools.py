"""Pools and the index tensors of a step, against slow twins."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st

from engine.config import ModelConfig
from engine.device.batch import ForwardBatch
from engine.device.kvpool import KVPool
from engine.model.engram import NO_TOKEN
from engine.plan.layout import ALIGNMENT
from engine.plan.step import Chunk
from tests.engine.model import build

V4, V41 = (ModelConfig.from_dict(make()) for make in (build.v4, build.v41))


def _chunk(slot, start, length, blocks):
    return Chunk(str(slot), slot, start, tuple(range(length)), tuple(blocks), True)


def test_tensors_have_the_documented_shapes():
    """Rings per layer, entries per owner, state per pooling owner, history on the host."""
    pool = KVPool(V4, num_blocks=5, block_size=32, num_slots=3)
    assert [tuple(r.shape) for r in pool.window] == [(3, 8, 32)] * 5
    assert {i: tuple(e.shape) for i, e in pool.entries.items()} == {
        1: (5, 8, 32),
        2: (5, 2, 32),
        3: (5, 8, 32),
        4: (5, 2, 32),
    }
    assert {i: tuple(k.shape) for i, k in pool.index_keys.items()} == {1: (5, 8, 16), 3: (5, 8, 16)}
    assert {i: tuple(s.shape) for i, s in pool.state.items()} == {
        1: (3, 8, 128),
        2: (3, 16, 64),
        3: (3, 8, 128),
        4: (3, 16, 64),
    }
    assert {i: tuple(s.shape) for i, s in pool.index_state.items()} == {
        1: (3, 8, 64),
        3: (3, 8, 64),
    }
    assert pool.history.shape == (3, 0)

    pool = KVPool(V41, num_blocks=5, block_size=32, num_slots=3, dtype=torch.bfloat16)
    assert {i: tuple(e.shape)[1] for i, e in pool.entries.items()} == {1: 16, 3: 16, 4: 32}
    assert {i: tuple(s.shape) for i, s in pool.state.items()} == {1: (3, 2, 64), 3: (3, 2, 64)}
    assert not pool.index_state
    assert pool.history.shape == (3, 3)
    assert pool.window[0].dtype == pool.entries[1].dtype == torch.bfloat16
    assert pool.state[1].dtype == torch.float32
    assert pool.history.device.type == "cpu"


@pytest.mark.parametrize("ring_history", [False, True])
@pytest.mark.parametrize("config", [V4, V41], ids=["v4", "v41"])
def test_all_tensors_lie_in_one_arena_and_apart(config, ring_history):
    """One allocation; what is written to one tensor is in no other; lines of memory are not shared."""
    pool = KVPool(config, num_blocks=5, block_size=32, num_slots=3, ring_history=ring_history)
    named = {name: t for name, t in pool.named_tensors().items() if t.numel()}
    if not ring_history:
        named.pop("history", None)
    bytes_of = {}
    for number, (name, tensor) in enumerate(named.items(), 1):
        assert tensor.untyped_storage().data_ptr() == pool.arena.data_ptr()
        assert tensor.is_contiguous()
        assert (tensor.data_ptr() - pool.arena.data_ptr()) % ALIGNMENT == 0
        tensor.view(torch.uint8).fill_(number)
        bytes_of[name] = tensor.nbytes
    for number, (name, tensor) in enumerate(named.items(), 1):
        assert (tensor.view(torch.uint8) == number).all(), name
    held = len(pool.named_tensors()) - (not ring_history)
    assert pool.nbytes == sum(bytes_of.values()) + held * ALIGNMENT


@pytest.mark.parametrize("config", [V4, V41], ids=["v4", "v41"])
def test_a_reset_slot_is_empty_and_others_are_untouched(config):
    """Rings zero, nothing pending (score -inf), no history; only in the slot that was reset."""
    pool = KVPool(config, num_blocks=4, block_size=16, num_slots=3)
    pool.poison(slots=[1, 2], blocks=[1, 2, 3])
    pool.history[1:] = 7
    pool.reset_slot(1)

    for ring in pool.window:
        assert not ring[1].any()
        assert ring[2].isnan().all()
    for state in (*pool.state.values(), *pool.index_state.values()):
        kv, score = state[1].chunk(2, -1)
        assert not kv.any()
        assert torch.isneginf(score).all()
        assert state[2].isnan().all()
        assert not state[0].isnan().any()
    for entries in (*pool.entries.values(), *pool.index_keys.values()):
        assert entries[1:].isnan().all()
        assert not entries[0].any()
    assert (pool.history[1] == NO_TOKEN).all()
    assert (pool.history[2] == 7).all()


def test_pools_refuse_what_cannot_work():
    """Sizes that fit no ratio, no memory at all, and poison in the dummies."""
    with pytest.raises(ValueError, match=r"block_size: expected a multiple of \[16\], got 8"):
        KVPool(V4, num_blocks=4, block_size=8, num_slots=3)
    with pytest.raises(ValueError, match="at least 1 block and slot, got 0, 3"):
        KVPool(V4, num_blocks=0, num_slots=3)
    pool = KVPool(V4, num_blocks=4, block_size=16, num_slots=3)
    with pytest.raises(ValueError, match="slot 0 and block 0"):
        pool.poison(slots=[0])
    with pytest.raises(ValueError, match="slot 0 and block 0"):
        pool.poison(blocks=[0, 1])


def test_a_batch_needs_tokens():
    """An empty step or chunk is the planner's mistake."""
    with pytest.raises(ValueError, match="at least one chunk"):
        ForwardBatch.build([])
    with pytest.raises(ValueError, match="at least one chunk"):
        ForwardBatch.build([_chunk(1, 0, 2, [1]), _chunk(2, 0, 0, [2])])


def test_rows_positions_and_wanted_logits():
    """Rows are the chunks' tokens in order; single tokens and longer chunks are told apart."""
    chunks = [_chunk(3, 0, 2, [1]), _chunk(1, 9, 1, [2]), Chunk("x", 2, 4, (7, 8, 9), (3,), False)]
    batch = ForwardBatch.build(chunks)

    assert batch.num_rows == 6
    assert batch.token_ids.tolist() == [0, 1, 0, 7, 8, 9]
    assert batch.positions.tolist() == [0, 1, 9, 4, 5, 6]
    assert batch.logit_rows.tolist() == [1, 2]
    assert batch.decode is not None
    assert (batch.decode.rows.tolist(), batch.decode.slots.tolist()) == ([2], [1])
    assert not batch.decode.is_whole
    assert [(s.row, s.length, s.start, s.end) for s in batch.prefill] == [
        (0, 2, 0, 2),
        (3, 3, 4, 7),
    ]


@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(1, 40)), min_size=1, max_size=4),
    st.sampled_from([(2, False), (4, True), (16, False)]),
    st.integers(0, 2**31),
)
def test_pooling_plan_equals_the_slow_twin(spans, kind, seed):
    """Every group that ends in the step pools the rows of its positions, wherever they are."""
    ratio, overlap = kind
    block, per_block = 32, 32 // ratio
    order = torch.randperm(64, generator=torch.Generator().manual_seed(seed)).tolist()
    chunks, row, rows = [], 0, {}
    for slot, (start, length) in enumerate(spans, 1):
        blocks = [order.pop() for _ in range(-(-(start + length) // block))]
        chunks.append(_chunk(slot, start, length, blocks))
        for i in range(length):
            rows[slot, start + i] = row
            row += 1
    plan = ForwardBatch.build(chunks).pooling(ratio, overlap, block)
    ring = ratio * (2 if overlap else 1)
    places, positions, members = [], [], []
    for chunk in chunks:
        end = chunk.start + len(chunk.token_ids)
        for j in range(end):
            last = (j + 1) * ratio - 1
            if not chunk.start <= last < end:
                continue
            places.append(chunk.block_ids[j // per_block] * per_block + j % per_block)
            positions.append(j * ratio)
            group = range((j - 1 if overlap else j) * ratio, last + 1)
            members.append(
                [
                    ("row", rows[chunk.slot, p])
                    if p >= chunk.start
                    else ("state", chunk.slot * ring + p % ring)
                    for p in group
                ]
            )
    carried = [("state", c) for c in plan.carried.tolist()]
    known = carried + [("row", r) for r in range(row)]

    assert places == plan.places.tolist()
    assert positions == plan.positions.tolist()
    assert members == [[known[m] for m in group] for group in plan.members.tolist()]
    assert [p % ratio for _, p in rows] == plan.phases.tolist()
    kept = dict(zip(plan.saved_at.tolist(), plan.saved.tolist(), strict=True))
    want = {slot * ring + p % ring: r for (slot, p), r in rows.items()}  # later ones win
    assert kept == want


@given(st.lists(st.tuples(st.integers(0, 90), st.integers(1, 5)), min_size=1, max_size=5))
def test_ring_writes_keep_the_last_window_of_each_chunk(spans):
    """Position p of a slot goes to row p mod W, the latest position winning."""
    chunks = [_chunk(slot, start, n * 4 - 3, [1]) for slot, (start, n) in enumerate(spans, 1)]
    rows, places = ForwardBatch.build(chunks).ring_writes(8)
    want, row = {}, 0
    for chunk in chunks:
        for i in range(len(chunk.token_ids)):
            want[chunk.slot * 8 + (chunk.start + i) % 8] = row
            row += 1

    assert dict(zip(places.tolist(), rows.tolist(), strict=True)) == want
    assert len(set(places.tolist())) == len(places)
