"""Remembers which prefixes are in memory, so that no prompt is processed twice.

A *snapshot* is all that a request knows after its first `length` tokens: its blocks of compressed
entries, shared by reference, and a copy of its slot (window rings of every layer, pending rows of
the compressors, n-gram history). A hit is possible only where a snapshot was taken: elsewhere the
entries may be there, but not the rolling state beside them (model.md 3.4).

Full blocks are never written again, so they are shared as they are. A snapshot that ends inside a
block names that block too, though whoever it was taken from may still write behind its end: entries
before it stay as they are, and a hit gets a copy of the block for itself.

Prefixes are named by a chained hash over whole blocks and compared token by token in the last,
open block. The first link is a salt, so that caches of different models never meet.

Knows ids and tokens. Knows nothing of tensors; device/kvpool.py copies what `Scheduler` asks for.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.plan.blocks import BlockPool

#: Block hashes remembered per block of the pool; see `PrefixCache.branch`.
SEEN_PER_BLOCK = 4


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """State after a prefix.

    Args:
        length: tokens of the prefix.
        slot: where the copy of the rolling state is.
        block_ids: blocks that cover positions [0, length).
        key: hash of the full blocks, and the ids in the open block.
        anchor: of the request that left it; says which rows late layers have (engine.plan.replay).
    """

    length: int
    slot: int
    block_ids: tuple[int, ...]
    key: tuple[bytes, tuple[int, ...]]
    anchor: int = 0


class HashChain:
    """Hashes of the block boundaries of one sequence that only grows; link i covers i blocks.

    Args:
        salt: what a common prefix must have in common beside its tokens.
        block_size: tokens per block.
    """

    __slots__ = ("_block_size", "_links")

    def __init__(self, salt: bytes, block_size: int) -> None:
        self._block_size = block_size
        self._links = [hashlib.blake2b(salt, digest_size=32).digest()]

    def links(self, token_ids: Sequence[int]) -> list[bytes]:
        """Give the links of all full blocks of the sequence, hashing those that are new."""
        size = self._block_size
        for block in range(len(self._links) - 1, len(token_ids) // size):
            ids = array("q", token_ids[block * size : (block + 1) * size]).tobytes()
            self._links.append(hashlib.blake2b(self._links[-1] + ids, digest_size=32).digest())
        return self._links

    def key(self, token_ids: Sequence[int], length: int) -> tuple[bytes, tuple[int, ...]]:
        """Name the prefix of `length` tokens."""
        full = length // self._block_size
        return self.links(token_ids)[full], tuple(token_ids[full * self._block_size : length])


class PrefixCache:
    """Snapshots by prefix, the least recently used first to go.

    Holds references to blocks in the blocks' pool and one slot for each snapshot.

    Args:
        blocks: pool of the blocks.
        slots: pool of the slots.
        block_size: tokens per block.
        max_snapshots: most snapshots kept; 0 keeps none.
        salt: of all hashes.
    """

    def __init__(
        self,
        blocks: BlockPool,
        slots: BlockPool,
        *,
        block_size: int,
        max_snapshots: int,
        salt: bytes,
    ) -> None:
        self.num_evictions = 0
        self._blocks = blocks
        self._slots = slots
        self._block_size = block_size
        self._max_snapshots = max_snapshots
        self._salt = salt
        self._snapshots: dict[tuple[bytes, tuple[int, ...]], Snapshot] = {}  # oldest use first
        self._tails: dict[bytes, list[tuple[int, ...]]] = {}
        self._seen: dict[bytes, None] = {}  # oldest use first

    def __len__(self) -> int:
        """Snapshots kept."""
        return len(self._snapshots)

    @property
    def enabled(self) -> bool:
        """Whether anything is kept at all."""
        return self._max_snapshots > 0

    @property
    def snapshots(self) -> tuple[Snapshot, ...]:
        """All snapshots, the least recently used first."""
        return tuple(self._snapshots.values())

    def chain(self, salt: bytes = b"") -> HashChain:
        """Begin the hashes of a sequence; only those with the same salt meet."""
        return HashChain(self._salt + salt, self._block_size)

    def find(
        self,
        token_ids: Sequence[int],
        chain: HashChain,
        fits: Callable[[Snapshot], bool] = lambda _: True,
    ) -> Snapshot | None:
        """Give the longest snapshot that fits and leaves at least the last token to be processed.

        That token's logits are what a request is there for, and a snapshot holds none.
        """
        limit, size = len(token_ids) - 1, self._block_size
        links = chain.links(token_ids)
        for full in range(limit // size, -1, -1):
            best: tuple[int, ...] | None = None
            for tail in self._tails.get(links[full], ()):
                begin, end = full * size, full * size + len(tail)
                longer = best is None or len(tail) > len(best)
                if end > limit or not longer or tuple(token_ids[begin:end]) != tail:
                    continue
                if fits(self._snapshots[links[full], tail]):
                    best = tail
            if best is not None:
                return self._touch((links[full], best))
        return None

    def branch(self, token_ids: Sequence[int], chain: HashChain) -> int:
        """Note a prompt; give the length of its longest run of blocks that a prompt had before.

        What two prompts have in common, say a system prompt, the next one will have too: worth a
        snapshot although neither ended there.
        """
        links = chain.links(token_ids)
        known = next((i for i in range(len(links) - 1, 0, -1) if links[i] in self._seen), 0)
        for link in links[1:]:
            self._seen.pop(link, None)
            self._seen[link] = None
        while len(self._seen) > SEEN_PER_BLOCK * self._blocks.num_blocks:
            del self._seen[next(iter(self._seen))]
        return known * self._block_size

    def add(
        self,
        token_ids: Sequence[int],
        chain: HashChain,
        length: int,
        block_ids: Sequence[int],
        slot: int = 0,
        anchor: int = 0,
    ) -> int:
        """Keep the state after a prefix. Of two, that with the earlier anchor is worth more.

        Args:
            token_ids: the sequence.
            chain: its hashes.
            length: tokens of the prefix, at least 1.
            block_ids: the sequence's blocks.
            slot: where the rolling state is, to be taken over; 0 if a copy is to be made.
            anchor: of the request.

        Returns:
            the slot of the new snapshot; 0 if the prefix is known already.
        """
        key = chain.key(token_ids, length)
        known = self._snapshots.get(key)
        if known is not None and known.anchor <= anchor:
            self._touch(key)
            return 0
        if known is not None:
            self._drop(known)
        if len(self._snapshots) >= self._max_snapshots:
            self._drop(next(iter(self._snapshots.values())))
        if slot:
            self._slots.share((slot,), cache=True)
        else:
            (slot,) = self._slots.acquire(1)
            self._slots.share((slot,), cache=True)
            self._slots.release((slot,))
        kept = tuple(block_ids[: -(-length // self._block_size)])
        self._blocks.share(kept, cache=True)
        self._snapshots[key] = Snapshot(length, slot, kept, key, anchor)
        self._tails.setdefault(key[0], []).append(key[1])
        return slot

    def evict(self) -> bool:
        """Drop the least recently used snapshot that holds a block nobody uses.

        Returns:
            False if there is none: no eviction would free a block.
        """
        for snapshot in self._snapshots.values():
            if any(map(self._blocks.is_idle, snapshot.block_ids)):
                self._drop(snapshot)
                return True
        return False

    def clear(self) -> None:
        """Drop everything."""
        for snapshot in self.snapshots:
            self._drop(snapshot)

    def check_integrity(self) -> None:
        """Check that every snapshot can be found, once, and covers its prefix.

        Raises:
            RuntimeError: it cannot; a bug of this module.
        """
        tails = [(parent, tail) for parent, found in self._tails.items() for tail in found]
        if len(tails) != len(self._snapshots) or set(tails) != set(self._snapshots):
            raise RuntimeError("the index differs from the snapshots")
        if len(self._snapshots) > self._max_snapshots:
            raise RuntimeError(
                f"{len(self._snapshots)} snapshots kept, {self._max_snapshots} allowed"
            )
        for snapshot in self._snapshots.values():
            if len(snapshot.block_ids) != -(-snapshot.length // self._block_size):
                raise RuntimeError(f"a snapshot of {snapshot.length} tokens lacks blocks")

    def _touch(self, key: tuple[bytes, tuple[int, ...]]) -> Snapshot:
        snapshot = self._snapshots.pop(key)
        self._snapshots[key] = snapshot
        return snapshot

    def _drop(self, snapshot: Snapshot) -> None:
        del self._snapshots[snapshot.key]
        parent, tail = snapshot.key
        self._tails[parent].remove(tail)
        if not self._tails[parent]:
            del self._tails[parent]
        self._blocks.release(snapshot.block_ids, cache=True)
        self._slots.release((snapshot.slot,), cache=True)
        self.num_evictions += 1
