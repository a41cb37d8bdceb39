"""Decides which blocks and slots are free.

Knows ids and reference counts. Knows nothing of tensors, models or devices: device/kvpool.py gives
the ids a place in memory. Id 0 is the dummy that padding may write, so it is never handed out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class BlockPool:
    """Ids 1..num_blocks, each free or held; a holder counts as one reference.

    One pool serves one group of layers with a common block layout.

    Args:
        num_blocks: ids that can be held at once, the dummy not counted.
        what: the noun for error messages.
    """

    def __init__(self, num_blocks: int, what: str = "block") -> None:
        self.num_blocks = num_blocks
        self._what = what
        # A stack: the ids released last are still warm in the caches.
        self._free = list(range(num_blocks, 0, -1))
        self._refcounts = [0] * (num_blocks + 1)

    @property
    def num_free(self) -> int:
        """Ids that can be acquired now."""
        return len(self._free)

    def acquire(self, count: int) -> tuple[int, ...]:
        """Take ids out of the pool, each with one reference.

        Raises:
            RuntimeError: there are fewer free ones; the caller asks `num_free` first.
        """
        if count > len(self._free):
            raise RuntimeError(f"{count} {self._what}s asked for, {len(self._free)} free")
        taken = tuple(self._free.pop() for _ in range(count))
        for block_id in taken:
            self._refcounts[block_id] = 1
        return taken

    def release(self, block_ids: Iterable[int]) -> None:
        """Give up one reference to each id; an id without references is free.

        Raises:
            RuntimeError: an id has no references, so somebody released it twice.
        """
        for block_id in block_ids:
            if block_id < 1 or self._refcounts[block_id] == 0:
                raise RuntimeError(f"{self._what} {block_id} released, but nobody holds it")
            self._refcounts[block_id] -= 1
            if self._refcounts[block_id] == 0:
                self._free.append(block_id)

    def check_integrity(self, holders: Iterable[Sequence[int]]) -> None:
        """Compare the counts with the ids that the holders say they have.

        Args:
            holders: the ids of each holder.

        Raises:
            RuntimeError: an id is lost, free while held, or its count differs from its holders.
        """
        held = [0] * (self.num_blocks + 1)
        for block_ids in holders:
            for block_id in block_ids:
                held[block_id] += 1
        if held[0]:
            raise RuntimeError(f"the dummy {self._what} 0 is held")
        if held != self._refcounts:
            wrong = [i for i in range(1, self.num_blocks + 1) if held[i] != self._refcounts[i]]
            raise RuntimeError(f"{self._what}s {wrong[:8]}: references differ from their holders")
        if sorted(self._free) != [i for i in range(1, self.num_blocks + 1) if not held[i]]:
            raise RuntimeError(f"the free list of {self._what}s differs from the unheld ids")
