"""BlockPool: nothing is lost, nothing is handed out twice, and its own check sees it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, strategies as st

from engine.plan.blocks import BlockPool


def test_ids_are_distinct_and_never_the_dummy() -> None:
    """All ids come out once; 0 is not among them."""
    pool = BlockPool(5)

    taken = pool.acquire(2) + pool.acquire(3)

    assert sorted(taken) == [1, 2, 3, 4, 5]
    assert pool.num_free == 0


def test_asking_for_more_than_is_free_is_an_error() -> None:
    """A pool does not hand out what it has not got, and stays as it was."""
    pool = BlockPool(2, "slot")
    pool.acquire(1)

    with pytest.raises(RuntimeError, match="2 slots asked for, 1 free"):
        pool.acquire(2)
    assert pool.num_free == 1


@pytest.mark.parametrize("block_id", [0, 2, -1])
def test_releasing_what_nobody_holds_is_an_error(block_id: int) -> None:
    """A double release is reported by name."""
    pool = BlockPool(2)
    pool.acquire(1)

    with pytest.raises(RuntimeError, match=f"block {block_id} released"):
        pool.release((block_id,))


@given(st.lists(st.one_of(st.integers(0, 4), st.none()), max_size=40))
def test_counts_equal_holders_after_any_sequence(steps: list[int | None]) -> None:
    """Any order of acquiring (a size) and releasing (None: the oldest) keeps the books right."""
    pool = BlockPool(6)
    holders: list[tuple[int, ...]] = []
    for size in steps:
        if size is None:
            if holders:
                pool.release(holders.pop(0))
        elif size <= pool.num_free:
            holders.append(pool.acquire(size))
        pool.check_integrity(holders)

    for block_ids in holders:
        pool.release(block_ids)
    assert pool.num_free == 6


def lose(pool: BlockPool) -> None:
    pool._free.remove(3)


def hand_out_twice(pool: BlockPool) -> None:
    pool._free.append(1)


def miscount(pool: BlockPool) -> None:
    pool._used[1] += 1


def take_the_dummy(pool: BlockPool) -> None:
    pool._free.append(0)


@pytest.mark.parametrize("fault", [lose, hand_out_twice, miscount, take_the_dummy])
def test_check_integrity_sees_a_planted_fault(fault: Callable[[BlockPool], None]) -> None:
    """A lost id, one in two places, a wrong count and a free dummy are each found."""
    pool = BlockPool(4)
    holders = [pool.acquire(2)]
    pool.check_integrity(holders)

    fault(pool)

    with pytest.raises(RuntimeError):
        pool.check_integrity(holders)


@pytest.mark.parametrize("holders", [[], [(1,)], [(1, 2), (2,)], [(1, 2), (0,)]])
def test_check_integrity_compares_with_the_holders(holders: list[tuple[int, ...]]) -> None:
    """Holders that forget, share or invent an id are found."""
    pool = BlockPool(4)
    assert pool.acquire(2) == (1, 2)

    with pytest.raises(RuntimeError):
        pool.check_integrity(holders)
