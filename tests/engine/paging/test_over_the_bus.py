"""A single row's experts that no slot holds are read from the host by the products themselves."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from engine.kernels.ops import ops
from engine.kernels.router import Routing
from engine.model import experts as module
from engine.model.experts import PagedExperts, ResidentExperts
from engine.model.placement import Placement
from tests.engine.paging.test_experts import TOP_K, E, routing, weights

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TRITON = ops("triton")


def placed(slots: int | None) -> Any:
    """A layer's experts, all in slots or some, read by kernels."""
    where = {} if slots is None else {0: slots}
    return Placement(where, device=DEVICE, pin=DEVICE.type == "cuda").place(
        0, weights("plain").__getitem__, E
    )


def drawn(rows: int, seed: int) -> tuple[Tensor, Routing]:
    x, how = routing(ops("torch"), rows, seed)
    return x.bfloat16().to(DEVICE), Routing(
        *(getattr(how, field.name).to(DEVICE) for field in fields(how))
    )


def run(experts: PagedExperts | ResidentExperts, x: Tensor, how: Routing, **more: Any) -> Tensor:
    return experts.run(TRITON, x, how, None, None, limit=10.0, act_group=None, **more)


@settings(deadline=None, max_examples=6)
@given(
    slots=st.integers(TOP_K, 4),
    passes=st.lists(
        st.tuples(st.sampled_from([1, 1, 1, 2, 4]), st.integers(0, 99)), min_size=2, max_size=5
    ),
)
def test_slots_hold_what_the_tables_say(slots: int, passes: list[tuple[int, int]]) -> None:
    """After any row, between passes of other sizes: bytes (J1, J4) and results (J3, J5)."""
    paged, resident = placed(slots), placed(None)
    for rows, seed in passes:
        x, how = drawn(rows, seed)
        got, want = run(paged, x, how), run(resident, x, how)
        # A pass in waves has a part for the shared expert, of which there is none.
        torch.testing.assert_close(got.sum(1), want.sum(1), atol=1e-2, rtol=1e-2)
        paged.check_integrity()


def fails(*args: object, **kwargs: object) -> Any:
    raise MemoryError("a planted fault")


@pytest.mark.parametrize("where", ["meanwhile", "products"])
def test_a_row_that_fails_leaves_no_slot_without_its_expert(
    monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """What was decided is brought in, whatever ends the row: the tables name it from then on (J1)."""
    paged, resident = placed(TOP_K), placed(None)
    x, how = next(
        found for found in (drawn(1, seed) for seed in range(99)) if found[1].experts.min() >= TOP_K
    )
    meanwhile = fails if where == "meanwhile" else None
    with monkeypatch.context() as patch:
        if where == "products":
            patch.setattr(module, "experts_row", fails)
        with pytest.raises(MemoryError, match="a planted fault"):
            run(paged, x, how, meanwhile=meanwhile)
    assert sorted(paged.read_residency().slot_expert) == sorted(how.experts[0].tolist())
    paged.check_integrity()
    torch.testing.assert_close(run(paged, x, how), run(resident, x, how), atol=1e-2, rtol=1e-2)
