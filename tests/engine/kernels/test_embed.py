"""The streams a pass begins with: kernel against twin, twin against torch's own lookup."""

from __future__ import annotations

import pytest
import torch

from engine.kernels.embed import embed_torch, embed_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "width", "count"), [(1, 64, 4), (5, 1100, 4), (3, 1024, 1)])
def test_streams_begin_as_the_embedding(rows, width, count, stored, monkeypatch):
    """A stream is not the token's row of the table, or part of it is not written."""
    table = torch.randn(50, width, device=DEVICE).to(stored)
    ids = torch.arange(rows, device=DEVICE) * 7 % 50
    for dtype in {stored, torch.float32}:
        twin = embed_torch(ids, table, count, dtype)
        assert twin.is_contiguous()
        for s in range(count):
            assert torch.equal(twin[:, s], table[ids].to(dtype))
        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty", lambda *a, **k: torch.full(*a, float("nan"), **k))
            assert torch.equal(embed_triton(ids, table, count, dtype), twin)
