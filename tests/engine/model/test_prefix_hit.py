"""State taken after a prefix and put under another request: the rest of it comes out as if cold."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from engine.device.kvpool import KVPool
from engine.model.checkpoint import load_model
from engine.model.v4 import Model
from tests.engine.model import build, drive
from tests.engine.model.drive import BLOCK, Request

#: Of logits in float32; a hit cuts the sequence elsewhere, so sums are rounded otherwise.
TOLERANCE = 2e-5
LENGTH = 90  # tokens; several windows, blocks and groups of every ratio
IDS = drive.tokens(LENGTH, seed=1)


@pytest.fixture(scope="module", params=["v4", "v41"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    config = getattr(build, request.param)()
    path = build.write(tmp_path_factory.mktemp(request.param) / "model", config, seed=5)
    return load_model(path)


@pytest.fixture(scope="module")
def cold(model: Model) -> Tensor:
    return drive.run(model, IDS)


def warm(
    model: Model,
    prefix: int,
    sizes: list[int],
    copy: Callable[..., None] = KVPool.copy,
) -> Tensor:
    """Logits of IDS after `prefix`, whose state comes from another request by `copy`.

    That request goes on with other tokens before the copy is used, and the slot has served a third.
    All other memory is NaN.
    """
    pool = drive.make_pool(model, num_slots=5)
    drive.step(model, pool, [(Request(drive.tokens(40, seed=3), slot=2, blocks=range(41, 45)), 40)])
    donor = Request([*IDS[:prefix], *drive.tokens(30, seed=2)], slot=1)
    for size in sizes:
        if donor.done < prefix:
            drive.step(model, pool, [(donor, min(size, prefix - donor.done))])
    if donor.done < prefix:
        drive.step(model, pool, [(donor, prefix - donor.done)])
    pool.copy(slots=[(1, 3)])
    drive.step(model, pool, [(donor, 30)])

    shared, opened = prefix // BLOCK, prefix % BLOCK
    own = range(21, 21 + -(-LENGTH // BLOCK) - shared)
    copy(pool, [(3, 2)], [(donor.blocks[shared], own[0])] if opened else [])
    kept = {*donor.blocks[:shared], *(own[:1] if opened else ())}
    pool.poison(slots=[1, 3, 4], blocks=set(range(1, pool.num_blocks)) - kept)
    taker = Request(IDS, slot=2, blocks=[*donor.blocks[:shared], *own], done=prefix)
    for size in sizes:
        if taker.done < LENGTH:
            drive.step(model, pool, [(taker, size)])
    if taker.done < LENGTH:
        drive.step(model, pool, [(taker, LENGTH)])
    return torch.cat(taker.logits)


@settings(max_examples=25)
@given(prefix=st.integers(1, LENGTH - 1), sizes=st.lists(st.integers(1, 40), max_size=6))
def test_a_hit_equals_a_cold_run(model: Model, cold: Tensor, prefix: int, sizes: list[int]) -> None:
    """At any length and any chunking, logits differ by rounding and the best token not at all."""
    got = warm(model, prefix, sizes)

    assert (got - cold[prefix:]).abs().max() <= TOLERANCE
    assert torch.equal(got.argmax(-1), cold[prefix:].argmax(-1))


def leave_out(group: str) -> Callable[..., None]:
    """A copy that forgets one kind of memory: the target keeps what it had."""

    def wrong(pool: KVPool, slots: object, blocks: object) -> None:
        found = getattr(pool, group)
        tensors = list(found.values() if isinstance(found, dict) else found)
        if group == "history":
            tensors = [pool.history]
        before = [tensor.clone() for tensor in tensors]
        KVPool.copy(pool, slots, blocks)  # type: ignore[arg-type]
        for tensor, old in zip(tensors, before, strict=True):
            tensor.copy_(old)

    return wrong


@pytest.mark.parametrize(
    "group", ["window", "state", "index_state", "history", "entries", "index_keys"]
)
def test_every_part_of_a_copy_matters(model: Model, cold: Tensor, group: str) -> None:
    """A hit without the window rows, pending rows, history or the open block is not a cold run."""
    if group == "index_state" and model.config.is_v41:
        group = "state"
    if group == "history" and not model.config.is_v41:
        group = "state"
    prefix = 2 * BLOCK + 13  # open groups of ratio 2, 4 and 16, and an open block

    got = warm(model, prefix, [], leave_out(group))

    assert not (got - cold[prefix:]).abs().max() <= 100 * TOLERANCE


def test_a_hit_one_token_too_long_is_seen(model: Model, cold: Tensor) -> None:
    """Going on behind a token that was never processed gives other logits."""
    prefix = 2 * BLOCK + 13
    pool = drive.make_pool(model)
    drive.step(model, pool, [(Request(IDS, slot=1), prefix - 1)])
    taker = Request(IDS, slot=1, done=prefix)

    drive.step(model, pool, [(taker, LENGTH)])

    assert not (taker.logits[0] - cold[prefix:]).abs().max() <= 100 * TOLERANCE
