"""Copies and products on two streams of a GPU: without the event between them the results are others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.kernels.formats import Matrix
from engine.kernels.ops import ops
from engine.kernels.router import Routing
from engine.model.expert_stream import Filled
from engine.model.experts import PagedExperts, ResidentExperts
from engine.model.placement import Placement
from tests.engine.paging.test_experts import E, routing, weights

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("exact_products")]
DEVICE = torch.device("cuda")
#: Of the GPU's clock: about a quarter of a second, against milliseconds until products are launched.
LATE = 500_000_000
SLOTS = 4
#: Rows of a pass that is cut into waves, and of one whose experts pass through buffers.
WAVES, STREAMED = 6, 14


def read(expert: int) -> tuple[Matrix, Matrix]:
    first, second = weights("plain")[expert]
    return Matrix("plain", first.data.float()), Matrix("plain", second.data.float())


def drawn(rows: int) -> tuple[Tensor, Routing]:
    """Rows that are routed to every expert."""
    for seed in range(99):
        x, how = routing(ops("torch"), rows, seed)
        if set(range(E)) <= set(how.experts.flatten().tolist()):
            break
    moved = (getattr(how, field.name).to(DEVICE) for field in fields(how))
    return x.to(DEVICE), Routing(*moved)


def run(experts: PagedExperts | ResidentExperts, x: Tensor, how: Routing) -> Tensor:
    return experts.run(ops("triton"), x, how, None, None, limit=10.0, act_group=None)


def late(stream: Any, copy: Callable[..., Any]) -> Callable[..., Any]:
    """Have copies begin late on their stream."""

    def copying(*args: Any) -> Any:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(LATE)
        return copy(*args)

    return copying


@pytest.mark.parametrize("waits", [True, False], ids=["waits", "fault"])
@pytest.mark.parametrize("rows", [WAVES, STREAMED], ids=["waves", "streamed"])
def test_products_wait_for_copies(rows: int, waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies that come late change nothing; with the wait left out they change what is computed (c9)."""
    paged = Placement({0: SLOTS}, device=DEVICE, pin=True).place(0, read, E)
    resident = Placement(device=DEVICE, pin=False).place(0, read, E)
    assert isinstance(paged, PagedExperts)
    stream = paged._stream
    assert stream is not None
    x, how = drawn(rows)
    assert paged.is_dense(how) is (rows == STREAMED)
    want = run(resident, x, how)
    # Kernels are compiled by then.
    torch.testing.assert_close(run(paged, x, how), want, atol=1e-4, rtol=1e-4)
    for buffer in stream._idle:
        buffer.data.zero_()  # else it may have the right experts already
    torch.cuda.synchronize()
    misses = paged.counts()[1]

    monkeypatch.setattr(paged, "_copy", late(paged._copies, paged._copy))
    monkeypatch.setattr(stream, "_copy", late(stream._copies, stream._copy))
    if not waits:
        fill = stream._fill

        def ready_at_once(*args: Any) -> Filled:
            return replace(fill(*args), ready=None)

        monkeypatch.setattr(paged, "_await", lambda ready: None)
        monkeypatch.setattr(stream, "_fill", ready_at_once)
    got = run(paged, x, how)
    torch.cuda.synchronize()

    assert paged.counts()[1] > misses, "nothing was copied"
    assert torch.allclose(got, want, atol=1e-2) is waits
    paged.check_integrity()
