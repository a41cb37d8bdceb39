"""The table of the pools' tensors: sizes by hand, and a fingerprint that sees every change."""

from __future__ import annotations

import pytest

from engine.config import ModelConfig
from engine.plan.layout import layout_fingerprint, pool_tensors
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
    parts = list(pool_tensors(ModelConfig.from_dict(make()), 16))  # type: ignore[operator]

    assert sum(p.nbytes(4) for p in parts if not p.per_block) == slot
    assert sum(p.nbytes(4) for p in parts if p.per_block) == block


def test_pending_rows_are_float32_at_least() -> None:
    """In bfloat16 the caches shrink by half, the rolling state and the ids do not."""
    for part in pool_tensors(ModelConfig.from_dict(build.v41()), 16):
        assert part.nbytes(2) * (2 if part.kind == "cache" else 1) == part.nbytes(4)
        assert part.nbytes(8) == part.nbytes(4) * (1 if part.kind == "ids" else 2)


def test_the_fingerprint_sees_every_change_of_the_layout() -> None:
    """Block size, element type and each size of the model's caches stand in it."""
    v41 = ModelConfig.from_dict(build.v41())
    seen = {
        layout_fingerprint(v41, 16, "torch.float32"),
        layout_fingerprint(v41, 32, "torch.float32"),
        layout_fingerprint(v41, 16, "torch.bfloat16"),
        layout_fingerprint(ModelConfig.from_dict(build.v4()), 16, "torch.float32"),
        layout_fingerprint(
            ModelConfig.from_dict(build.v41(sliding_window=16)), 16, "torch.float32"
        ),
    }

    assert len(seen) == 5
    assert layout_fingerprint(v41, 16, "torch.float32") in seen
