"""PrefixCache: what it finds, what it keeps, what it gives up first."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, strategies as st

from engine.plan.blocks import BlockPool
from engine.plan.prefix import SEEN_PER_BLOCK, HashChain, PrefixCache, Snapshot

SIZE = 4


class Memory:
    """A cache with its pools, and requests that come, leave their state and go."""

    def __init__(self, max_snapshots: int = 4, num_blocks: int = 40) -> None:
        self.blocks = BlockPool(num_blocks)
        self.slots = BlockPool(max_snapshots + 1, "slot")
        self.cache = PrefixCache(
            self.blocks, self.slots, block_size=SIZE, max_snapshots=max_snapshots, salt=b"model"
        )

    def keep(self, ids: list[int], length: int | None = None) -> int:
        """Keep the state after `length` tokens of a request that is over then."""
        held = self.blocks.acquire(-(-len(ids) // SIZE))
        slot = self.cache.add(ids, self.cache.chain(), length or len(ids), held)
        self.blocks.release(held)
        self.check()
        return slot

    def find(self, ids: list[int], salt: bytes = b"model") -> int:
        """Length of the hit, 0 without one."""
        found = self.cache.find(ids, HashChain(salt, SIZE))
        return 0 if found is None else found.length

    def check(self) -> None:
        kept = self.cache.snapshots
        self.cache.check_integrity()
        self.blocks.check_integrity([], [s.block_ids for s in kept])
        self.slots.check_integrity([], [(s.slot,) for s in kept])


@given(
    st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=14), max_size=8),
    st.lists(st.integers(0, 1), min_size=1, max_size=14),
)
def test_the_longest_kept_proper_prefix_is_found(kept: list[list[int]], ids: list[int]) -> None:
    """Against the slow twin: compare the prompt with everything that was kept."""
    memory = Memory(max_snapshots=8)
    for prefix in kept:
        memory.keep(prefix)

    want = max((len(k) for k in kept if len(k) < len(ids) and ids[: len(k)] == k), default=0)

    assert memory.find(ids) == want


def test_the_last_token_is_left_to_be_processed() -> None:
    """A prompt kept whole is no hit for itself: its last logits are wanted, and are not kept."""
    memory = Memory()
    memory.keep([1, 2, 3, 4, 5])

    assert memory.find([1, 2, 3, 4, 5]) == 0
    assert memory.find([1, 2, 3, 4, 5, 6]) == 5


def test_a_prefix_is_kept_once() -> None:
    """The second request with the same tokens adds nothing and takes no slot."""
    memory = Memory()

    assert memory.keep([1, 2, 3]) > 0
    assert memory.keep([1, 2, 3]) == 0
    assert memory.keep([1, 2, 3, 4], length=3) == 0
    assert (len(memory.cache), memory.slots.num_free) == (1, 4)


def test_a_slot_can_be_taken_over() -> None:
    """The state of a request that ends is kept where it is."""
    memory = Memory()
    (slot,) = memory.slots.acquire(1)
    held = memory.blocks.acquire(1)

    assert memory.cache.add([1, 2], memory.cache.chain(), 2, held, slot) == slot

    memory.blocks.release(held)
    memory.slots.release((slot,))
    memory.check()
    assert memory.cache.snapshots[0].slot == slot


def test_the_least_recently_used_goes_first() -> None:
    """A hit makes a snapshot young again."""
    memory = Memory(max_snapshots=2)
    memory.keep([1, 1])
    memory.keep([2, 2])
    assert memory.find([1, 1, 0]) == 2

    memory.keep([3, 3])

    assert [memory.find([i, i, 0]) for i in (1, 2, 3)] == [2, 0, 2]
    assert memory.cache.num_evictions == 1


def test_eviction_gives_blocks_back_until_there_is_nothing_idle() -> None:
    """Each call drops one snapshot; what a request uses stays, and so does its snapshot."""
    memory = Memory()
    memory.keep([1, 1, 1, 1, 1])
    memory.keep([2, 2, 2])
    memory.keep([3, 3, 3])
    used = memory.cache.snapshots[1].block_ids
    memory.blocks.share(used)
    assert memory.blocks.num_idle == 3

    assert [memory.cache.evict() for _ in range(3)] == [True, True, False]

    assert memory.blocks.num_idle == 0
    assert [memory.find([i] * 6) for i in (1, 2, 3)] == [0, 3, 0]
    memory.blocks.release(used)
    memory.check()


def test_another_salt_finds_nothing() -> None:
    """Equal tokens under another model, layout or rounding are another prefix."""
    memory = Memory()
    memory.keep([1, 2, 3, 4, 5])

    assert memory.find([1, 2, 3, 4, 5, 6]) == 5
    assert memory.find([1, 2, 3, 4, 5, 6], salt=b"another model") == 0


def test_a_chain_without_salt_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check above can fail."""
    begin = HashChain.__init__
    monkeypatch.setattr(HashChain, "__init__", lambda self, salt, size: begin(self, b"", size))
    memory = Memory()
    memory.keep([1, 2, 3, 4, 5])

    assert memory.find([1, 2, 3, 4, 5, 6], salt=b"another model") == 5


@given(st.lists(st.integers(0, 2**40), max_size=20), st.integers(0, 20))
def test_hashes_do_not_depend_on_how_a_sequence_grew(ids: list[int], cut: int) -> None:
    """Hashed in two steps or at once, the links are the same, one for each full block and one."""
    grown = HashChain(b"", SIZE)
    grown.links(ids[:cut])

    assert grown.links(ids) == HashChain(b"", SIZE).links(ids)
    assert len(set(grown.links(ids))) == len(ids) // SIZE + 1


def test_a_branch_is_where_a_prompt_leaves_a_known_one() -> None:
    """In whole blocks; the first prompt has none."""
    cache = Memory().cache

    assert cache.branch([1] * 10, cache.chain()) == 0
    assert cache.branch([1] * 9 + [2] * 5, cache.chain()) == 8
    assert cache.branch([1] * 9 + [2] * 9, cache.chain()) == 12
    assert cache.branch([3] * 9, cache.chain()) == 0


def test_known_prompts_are_forgotten_in_time() -> None:
    """What is remembered of prompts is bounded by the pool; the oldest goes."""
    memory = Memory(num_blocks=2)
    for first in range(10):
        memory.cache.branch([first] * SIZE, memory.cache.chain())

    assert len(memory.cache._seen) == 2 * SEEN_PER_BLOCK
    assert memory.cache.branch([0] * SIZE, memory.cache.chain()) == 0
    assert memory.cache.branch([9] * SIZE, memory.cache.chain()) == SIZE


def forget_a_tail(cache: PrefixCache) -> None:
    next(iter(cache._tails.values())).pop()


def index_twice(cache: PrefixCache) -> None:
    tails = next(iter(cache._tails.values()))
    tails.append(tails[0])


def keep_too_many(cache: PrefixCache) -> None:
    cache._max_snapshots = 1


def claim_more_than_the_blocks_hold(cache: PrefixCache) -> None:
    key, old = next(iter(cache._snapshots.items()))
    cache._snapshots[key] = Snapshot(old.length + SIZE, old.slot, old.block_ids, key)


@pytest.mark.parametrize(
    "fault", [forget_a_tail, index_twice, keep_too_many, claim_more_than_the_blocks_hold]
)
def test_check_integrity_sees_a_planted_fault(fault: Callable[[PrefixCache], None]) -> None:
    """A snapshot that cannot be found, is found twice, is one too many or lacks blocks."""
    memory = Memory()
    memory.keep([1, 2, 3])
    memory.keep([1, 2, 3, 4, 5])

    fault(memory.cache)

    with pytest.raises(RuntimeError):
        memory.cache.check_integrity()
