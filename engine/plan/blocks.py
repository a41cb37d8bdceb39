"""Decides which blocks and slots are free.

Knows ids and reference counts. Knows nothing of tensors, models or devices: device/kvpool.py gives
the ids a place in memory. Id 0 is the dummy that padding may write, so it is never handed out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class BlockPool:
    """Ids 1..num_blocks, each free or held; a holder counts as one reference.

    One pool serves one group of layers with a common block layout. Holders are requests or the
    prefix cache: what only the cache holds is *idle* and can be had by evicting.

    Args:
        num_blocks: ids that can be held at once, the dummy not counted.
        what: the noun for error messages.
    """

    def __init__(self, num_blocks: int, what: str = "block") -> None:
        self.num_blocks = num_blocks
        self._what = what
        # A stack: the ids released last are still warm in the caches.
        self._free = list(range(num_blocks, 0, -1))
        self._used = [0] * (num_blocks + 1)  # references of requests
        self._cached = [0] * (num_blocks + 1)  # references of the prefix cache
        self._num_idle = 0

    @property
    def num_free(self) -> int:
        """Ids that can be acquired now."""
        return len(self._free)

    @property
    def num_idle(self) -> int:
        """Ids that only the prefix cache holds."""
        return self._num_idle

    def is_idle(self, block_id: int) -> bool:
        """Whether only the prefix cache holds the id."""
        return bool(self._cached[block_id]) and not self._used[block_id]

    def acquire(self, count: int) -> tuple[int, ...]:
        """Take ids out of the pool, each with one reference of a request.

        Raises:
            RuntimeError: there are fewer free ones; the caller asks `num_free` first.
        """
        if count > len(self._free):
            raise RuntimeError(f"{count} {self._what}s asked for, {len(self._free)} free")
        taken = tuple(self._free.pop() for _ in range(count))
        for block_id in taken:
            self._used[block_id] = 1
        return taken

    def share(self, block_ids: Iterable[int], *, cache: bool = False) -> None:
        """Add a reference to each id.

        Args:
            block_ids: of held blocks.
            cache: whether the prefix cache holds them from now on, instead of a request.

        Raises:
            RuntimeError: nobody holds one of them, so what it contains is anybody's.
        """
        for block_id in block_ids:
            self._check_held(block_id, "shared")
            if cache:
                self._cached[block_id] += 1
            else:
                self._num_idle -= not self._used[block_id]
                self._used[block_id] += 1

    def release(self, block_ids: Iterable[int], *, cache: bool = False) -> None:
        """Give up one reference to each id; an id without references is free.

        Args:
            block_ids: what to release.
            cache: whether the prefix cache held them, instead of a request.

        Raises:
            RuntimeError: an id has no such reference, so somebody released it twice.
        """
        counts = self._cached if cache else self._used
        for block_id in block_ids:
            self._check_held(block_id, "released")
            if not counts[block_id]:
                holder = "the prefix cache" if cache else "a request"
                raise RuntimeError(f"{self._what} {block_id} released, but not held by {holder}")
            counts[block_id] -= 1
            if counts[block_id]:
                continue
            if not self._used[block_id] and not self._cached[block_id]:
                self._free.append(block_id)
                self._num_idle -= cache
            elif not cache:
                self._num_idle += 1

    def check_integrity(
        self, holders: Iterable[Sequence[int]], cached: Iterable[Sequence[int]] = ()
    ) -> None:
        """Compare the counts with the ids that the holders say they have.

        Args:
            holders: the ids of each request.
            cached: the ids of each object of the prefix cache.

        Raises:
            RuntimeError: an id is lost, free while held, or its count differs from its holders.
        """
        used, kept = self._count(holders), self._count(cached)
        if used[0] or kept[0]:
            raise RuntimeError(f"the dummy {self._what} 0 is held")
        ids = range(1, self.num_blocks + 1)
        wrong = [i for i in ids if (used[i], kept[i]) != (self._used[i], self._cached[i])]
        if wrong:
            raise RuntimeError(f"{self._what}s {wrong[:8]}: references differ from their holders")
        if sorted(self._free) != [i for i in ids if not used[i] and not kept[i]]:
            raise RuntimeError(f"the free list of {self._what}s differs from the unheld ids")
        idle = sum(kept[i] > 0 and not used[i] for i in ids)
        if idle != self._num_idle:
            raise RuntimeError(f"{idle} {self._what}s are idle, {self._num_idle} counted")

    def _check_held(self, block_id: int, verb: str) -> None:
        if block_id < 1 or not (self._used[block_id] or self._cached[block_id]):
            raise RuntimeError(f"{self._what} {block_id} {verb}, but nobody holds it")

    def _count(self, holders: Iterable[Sequence[int]]) -> list[int]:
        counts = [0] * (self.num_blocks + 1)
        for block_ids in holders:
            for block_id in block_ids:
                counts[block_id] += 1
        return counts
