"""Which request has which row of the decode buffers, and what must be uploaded for it.

A request keeps its row from step to step, so that a token drawn on the device is where the next step
reads it. Rows move only while no step is under way, when the host knows every token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.device.buffers import HOSTS, OWN, WIDE, DecodeBuffers
from engine.device.sampler import Draw
from engine.plan.step import Chunk

_SIGN = 1 << 63


@dataclass(slots=True)
class Lane:
    """A request's row.

    Args:
        row: its index.
        position: of the token that the next step processes.
        blocks: entries of its block table that are set.
        masked: whether a token mask is set.
        forced: whether a token is forced.
    """

    row: int
    position: int
    blocks: int
    masked: bool = False
    forced: bool = False


class Lanes:
    """Rows of decode buffers by request.

    Args:
        buffers: whose rows.
        bucket_for: smallest bucket for a number of rows.
    """

    def __init__(self, buffers: DecodeBuffers, bucket_for: Callable[[int], int]) -> None:
        self._buffers = buffers
        self._bucket_for = bucket_for
        self._lanes: dict[int, Lane] = {}  # by the request's arrival

    def holds(self, chunk: Chunk) -> bool:
        """Whether the next step launched processes this chunk's token, in a row it has already."""
        lane = self._lanes.get(chunk.arrival)
        return lane is not None and lane.position == chunk.start

    def row_of(self, chunk: Chunk) -> int:
        """Row of a chunk's request.

        Raises:
            KeyError: it has none.
        """
        return self._lanes[chunk.arrival].row

    def position_of(self, chunk: Chunk) -> int:
        """Position of the token that the next step processes of a chunk's request.

        Raises:
            KeyError: it has no row.
        """
        return self._lanes[chunk.arrival].position

    @property
    def bucket(self) -> int:
        """Smallest bucket that has all rows in use."""
        return self._bucket_for(1 + max(lane.row for lane in self._lanes.values()))

    def advance(self) -> None:
        """Note that a step over all lanes was launched."""
        for lane in self._lanes.values():
            lane.position += 1

    def move(self, chunk: Chunk, count: int) -> None:
        """Note that a step gave a chunk's request `count` tokens; it need have no row any more."""
        lane = self._lanes.get(chunk.arrival)
        if lane is not None:
            lane.position = chunk.start + count

    def place(self, chunks: Sequence[Chunk], draws: Sequence[Draw]) -> bool:
        """Give each chunk a row and upload what differs; no step is under way.

        Args:
            chunks: single tokens; no more than the largest bucket.
            draws: what is to be drawn after each.

        Returns:
            whether a row has changed hands or a table has grown.
        """
        arrivals = {chunk.arrival for chunk in chunks}
        stale = [a for a, lane in self._lanes.items() if a not in arrivals]
        new = [chunk for chunk in chunks if not self.holds(chunk)]
        masks_before = any(lane.masked for lane in self._lanes.values())
        # A constraint holds for one token: what the last one left must go even if none follows.
        constrained = (
            masks_before
            or any(lane.forced for lane in self._lanes.values())
            or any(draw.is_constrained for draw in draws)
        )
        if not stale and not new and not constrained:
            return self._extend(chunks)
        for arrival in stale:
            self._drop(arrival)
        for chunk in new:
            self._drop(chunk.arrival)
        if self._lanes and self.bucket > self._bucket_for(len(chunks)):
            for arrival in list(self._lanes):
                self._drop(arrival)
        taken = {lane.row for lane in self._lanes.values()}
        free = (row for row in range(self._buffers.num_rows) if row not in taken)
        for chunk, draw in zip(chunks, draws, strict=True):
            lane = self._lanes.get(chunk.arrival)
            if lane is None:
                lane = self._lanes[chunk.arrival] = Lane(next(free), chunk.start, 0)
            self._fill(lane, chunk, draw)
        names = [*OWN, *HOSTS, "tables"]
        if masks_before or any(lane.masked for lane in self._lanes.values()):
            names.append("mask")
        self._buffers.upload(names, self.bucket)
        return True

    def can_keep(self, chunks: Sequence[Chunk]) -> bool:
        """Whether going on with these chunks' requests alone needs no larger bucket than necessary."""
        if not chunks:
            return False
        top = max(self._lanes[chunk.arrival].row for chunk in chunks)
        return self._bucket_for(top + 1) == self._bucket_for(len(chunks))

    def keep(self, chunks: Sequence[Chunk]) -> bool:
        """Go on with these chunks' requests, each at its next token, which the host need not know.

        Rows of the others pad from the next step on.

        Returns:
            as `place`.
        """
        arrivals = {chunk.arrival for chunk in chunks}
        ended = [a for a in self._lanes if a not in arrivals]
        if not ended:
            return self._extend(chunks)
        count = self.bucket
        rows = [self._drop(arrival) for arrival in ended]
        for row in rows:
            self._buffers.stop(row)
        self._buffers.upload(HOSTS, count)
        self._buffers.upload_rows("tables", rows, count)
        self._extend(chunks)
        return True

    def clear(self) -> None:
        """Forget everything, whatever state the device is in."""
        self._lanes.clear()
        self._buffers.restart()

    def _drop(self, arrival: int) -> int:
        lane = self._lanes.pop(arrival, None)
        if lane is None:
            return -1
        self._buffers.clear(lane.row)
        return lane.row

    def _fill(self, lane: Lane, chunk: Chunk, draw: Draw) -> None:
        """Write a row of the mirrors."""
        host, row, params = self._buffers.host, lane.row, draw.params
        host["ids"][row] = chunk.token_ids[0]
        host["positions"][row] = chunk.start
        host["index"][row] = draw.index
        host["slots"][row] = chunk.slot
        host["temperature"][row] = params.temperature
        host["top_p"][row] = params.top_p
        seed = (params.seed or 0) & (2 * _SIGN - 1)
        host["seeds"][row] = seed - 2 * _SIGN if seed >= _SIGN else seed
        host["forced"][row] = -1 if draw.forced is None else draw.forced
        lane.forced = draw.forced is not None
        if lane.masked or draw.allowed is not None:
            host["mask"][row] = WIDE["mask"][1] if draw.allowed is None else draw.allowed
        lane.masked = draw.allowed is not None
        self._fill_table(lane, chunk)

    def _fill_table(self, lane: Lane, chunk: Chunk) -> None:
        blocks = chunk.block_ids
        self._buffers.host["tables"][lane.row, lane.blocks : len(blocks)] = blocks[lane.blocks :]
        lane.blocks = len(blocks)

    def _extend(self, chunks: Sequence[Chunk]) -> bool:
        """Upload the blocks that were added to requests with a row."""
        grown = []
        for chunk in chunks:
            lane = self._lanes[chunk.arrival]
            if len(chunk.block_ids) > lane.blocks:
                self._fill_table(lane, chunk)
                grown.append(lane.row)
        if grown:
            self._buffers.upload_rows("tables", grown, self.bucket)
        return bool(grown)
