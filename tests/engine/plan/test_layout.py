"""The table of the pools' tensors: sizes by hand, and a fingerprint that sees every change."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, strategies as st

from engine.config import ModelConfig
from engine.plan.layout import ALIGNMENT, PoolTensor, arena, layout_fingerprint, pool_tensors
from engine.plan.records import Forms, forms_of
from tests.engine.model import build


@pytest.mark.parametrize(
    ("make", "slot", "block"),
    [
        # Windows of 5 layers; CSA state of layers 1 and 3 (8 rows of kv and score, two halves) and
        # of their index compressors; HCA state of layers 2 and 4 (16 rows).
        (
            build.v4,
            5 * 8 * 32 * 4 + 2 * 8 * 4 * (32 + 16) * 4 + 2 * 16 * 2 * 32 * 4,
            # Entries and index keys of CSA, entries of HCA, 16 tokens to the block.
            2 * 4 * (32 + 16) * 4 + 2 * 1 * 32 * 4,
        ),
        # Windows of 10 layers, state of the ratio-2 sources 1 and 3, three earlier ids.
        (build.v41, 10 * 8 * 32 * 4 + 2 * 2 * 2 * 32 * 4 + 3 * 8, (8 + 8 + 16) * (32 + 16) * 4),
    ],
)
def test_sizes_by_hand(make: object, slot: int, block: int) -> None:
    """Bytes of one slot and one block in float32, added up from the specification."""
    parts = list(pool_tensors(ModelConfig.from_dict(make()), 16, 4, Forms()))  # type: ignore[operator]

    assert sum(p.nbytes(4) for p in parts if not p.per_block) == slot
    assert sum(p.nbytes(4) for p in parts if p.per_block) == block


@pytest.mark.parametrize(
    ("is_v41", "window", "entry", "key"), [(False, 592, 592, 80), (True, 528, 288, 80)]
)
def test_rows_of_the_models_are_records(is_v41: bool, window: int, entry: int, key: int) -> None:
    """Bytes of a row at the models' widths: codes, rotary tail, scales, filled up to 16."""
    config = ModelConfig.from_dict(
        (build.v41 if is_v41 else build.v4)(head_dim=512, qk_rope_head_dim=64, index_head_dim=128)
    )
    forms = forms_of(is_v41=is_v41, is_quantised=True)
    rows = {(p.group, p.shape[-1], p.kind) for p in pool_tensors(config, 16, 2, forms)}
    assert {("window", window, "bytes"), ("entries", entry, "bytes")} < rows
    assert ("index_keys", key, "bytes") in rows
    assert {kind for group, _, kind in rows if "state" in group} == {"state"}


def test_pending_rows_are_float32_at_least() -> None:
    """In bfloat16 the caches shrink by half, the rolling state and the ids do not."""
    for part in pool_tensors(ModelConfig.from_dict(build.v41()), 16, 4, Forms()):
        assert part.nbytes(2) * (2 if part.kind == "cache" else 1) == part.nbytes(4)
        assert part.nbytes(8) == part.nbytes(4) * (1 if part.kind == "ids" else 2)


@given(
    st.lists(
        st.builds(
            PoolTensor,
            st.sampled_from(["window", "entries", "index_keys", "state"]),
            st.just(0),
            st.tuples(st.integers(0, 40), st.integers(1, 600)),
            st.sampled_from(["cache", "bytes", "state", "ids"]),
        ),
        max_size=9,
    ),
    st.integers(1, 300),
    st.integers(1, 70),
    st.sampled_from([2, 4, 8]),
)
def test_tensors_of_an_arena_lie_apart(
    parts: list[PoolTensor], blocks: int, slots: int, itemsize: int
) -> None:
    """Each begins where it may, ends before the next, and a block more costs what a block has."""
    starts, total = arena(parts, blocks, slots, itemsize)

    end = 0
    for part, start in zip(parts, starts, strict=True):
        assert start % ALIGNMENT == 0
        assert start >= end
        end = start + (blocks if part.per_block else slots) * part.nbytes(itemsize)
    assert end <= total
    _, more = arena(parts, blocks + 1, slots, itemsize)
    assert more - total == sum(part.nbytes(itemsize) for part in parts if part.per_block)


def test_the_fingerprint_sees_every_change_of_the_layout() -> None:
    """Block size, element type, each size of the model's caches and their forms stand in it."""
    v41, v4 = (ModelConfig.from_dict(make()) for make in (build.v41, build.v4))
    wider = ModelConfig.from_dict(build.v41(sliding_window=16))
    plain, packed = Forms(), forms_of(is_v41=True, is_quantised=True)
    other = dataclasses.replace(packed, index="hadamard_fp4_32")  # records of the same size
    seen = {
        layout_fingerprint(v41, 16, "torch.float32", plain),
        layout_fingerprint(v41, 32, "torch.float32", plain),
        layout_fingerprint(v41, 16, "torch.bfloat16", plain),
        layout_fingerprint(v4, 16, "torch.float32", plain),
        layout_fingerprint(wider, 16, "torch.float32", plain),
        layout_fingerprint(v41, 16, "torch.float32", packed),
        layout_fingerprint(v41, 16, "torch.float32", other),
    }

    assert len(seen) == 7
    assert layout_fingerprint(v41, 16, "torch.float32", Forms()) in seen
