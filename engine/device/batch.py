"""Turns the chunks of a step into the index tensors the model needs.

Everything that follows from positions, slots and blocks alone is worked out here, on the host,
once per step, and shared by all layers. Rows of a step are the tokens of its chunks, one chunk
after the other. Chunks of one token take the batched *decode* path, longer ones the *prefill* path.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.plan.step import Chunk

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Span:
    """One chunk's rows in the step.

    Args:
        row: its first row.
        length: rows.
        start: position of the first row.
        slot: of its request.
        blocks: its request's block ids [number of blocks].
    """

    row: int
    length: int
    start: int
    slot: int
    blocks: Ints

    @property
    def end(self) -> int:
        """Position after the last row."""
        return self.start + self.length

    def places(self, entries: Ints, per_block: int) -> Ints:
        """Flat indices of entries in a pool seen as [num_blocks * per_block, ...]."""
        return self.blocks[entries // per_block] * per_block + entries % per_block


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """The single-token chunks of a step, B of them.

    Args:
        rows: int64 [B], their rows.
        slots: int64 [B].
        positions: int64 [B].
        spans: the chunks.
        is_whole: whether the step has no other rows, so that row b is b.
    """

    rows: Tensor
    slots: Tensor
    positions: Tensor
    spans: tuple[Span, ...]
    is_whole: bool


@dataclass(frozen=True, slots=True)
class VisibleEntries:
    """Where the decode rows find their compressed entries, padded to the longest.

    Args:
        places: int64 [B, E], flat indices into the pool; padding points into dummy block 0.
        visible: bool [B, E].
        counts: int64 [B], visible entries per row.
        most: the largest count.
    """

    places: Tensor
    visible: Tensor
    counts: Tensor
    most: int


@dataclass(frozen=True, slots=True)
class PoolingPlan:
    """How the rows of a step become compressed entries, for one (ratio, overlap).

    `members` index the concatenation of carried state rows and the step's own rows.

    Args:
        carried: int64 [C], flat state rows (slot * ring + row) that unfinished groups left behind.
        members: int64 [N, ratio or 2 * ratio], the rows that each of N new entries pools.
        places: int64 [N], flat pool index of each new entry.
        positions: int64 [N], the RoPE position of each: its group's first token.
        phases: int64 [T], position modulo ratio of every row (which position bias it takes).
        saved: int64 [K], rows of the step to keep as state.
        saved_at: int64 [K], flat state rows to keep them in.
    """

    carried: Tensor
    members: Tensor
    places: Tensor
    positions: Tensor
    phases: Tensor
    saved: Tensor
    saved_at: Tensor


class ForwardBatch:
    """The inputs of one forward pass.

    Attributes:
        spans: every chunk's rows, in chunk order.
        token_ids: int64 [T].
        positions: int64 [T].
        logit_rows: int64 [L], last rows of the chunks that want logits, in chunk order.
        decode: the single-token chunks, None without any.
        prefill: the longer chunks.
    """

    def __init__(
        self, spans: tuple[Span, ...], host_ids: Ints, logit_rows: list[int], device: torch.device
    ) -> None:
        self.device = device
        self.spans = spans
        self.host_ids = host_ids  # int64 [T], for what is looked up on the host
        self.host_positions = np.concatenate([np.arange(s.start, s.end) for s in spans])
        self.token_ids = self._tensor(host_ids)
        self.positions = self._tensor(self.host_positions)
        self.logit_rows = self._tensor(np.array(logit_rows, dtype=np.int64))
        self.prefill = tuple(span for span in spans if span.length > 1)
        singles = tuple(span for span in spans if span.length == 1)
        self.decode: DecodeRows | None = None
        if singles:
            self.decode = DecodeRows(
                rows=self._tensor(np.array([s.row for s in singles])),
                slots=self._tensor(np.array([s.slot for s in singles])),
                positions=self._tensor(np.array([s.start for s in singles])),
                spans=singles,
                is_whole=not self.prefill,
            )

    @classmethod
    def build(cls, chunks: Sequence[Chunk], device: torch.device | str = "cpu") -> ForwardBatch:
        """Lay out chunks of distinct requests in batch order.

        Raises:
            ValueError: there is no chunk, or one has no tokens.
        """
        if not chunks or not all(chunk.token_ids for chunk in chunks):
            raise ValueError("expected at least one chunk and one token in each")
        spans: list[Span] = []
        logit_rows: list[int] = []
        row = 0
        for chunk in chunks:
            blocks = np.array(chunk.block_ids, dtype=np.int64)
            spans.append(Span(row, len(chunk.token_ids), chunk.start, chunk.slot, blocks))
            row += len(chunk.token_ids)
            if chunk.wants_logits:
                logit_rows.append(row - 1)
        ids = [token for chunk in chunks for token in chunk.token_ids]
        host_ids = np.array(ids, dtype=np.int64)
        return cls(tuple(spans), host_ids, logit_rows, torch.device(device))

    @property
    def num_rows(self) -> int:
        """T, rows of the step."""
        return len(self.host_ids)

    def ring_writes(self, window: int) -> tuple[Tensor, Tensor]:
        """Which rows the window rings keep, and where: rows int64 [K], flat slot * W + p mod W."""
        return self._kept(window)

    def pooling(self, ratio: int, overlap: bool, block_size: int) -> PoolingPlan:
        """Plan the compression of this step's rows (model.md 2.5, 3.3)."""
        ring = ratio * (2 if overlap else 1)
        back = ratio if overlap else 0  # rows of the group before, pooled too
        carried: list[Ints] = [np.empty(0, np.int64)]
        members: list[Ints] = [np.empty((0, ring), np.int64)]
        places: list[Ints] = [np.empty(0, np.int64)]
        positions: list[Ints] = [np.empty(0, np.int64)]
        num_carried = 0
        for span in self.spans:
            groups = np.arange(span.start // ratio, span.end // ratio)
            if not len(groups):
                continue
            first = int(groups[0]) * ratio - back  # below 0: rows that reset_slot left
            carry = np.arange(first, span.start)
            wanted = groups[:, None] * ratio - back + np.arange(ring)
            own = wanted - span.start + span.row  # counted from the end of all carried rows
            members.append(np.where(wanted < span.start, wanted - first + num_carried, ~own))
            carried.append(span.slot * ring + carry % ring)
            num_carried += len(carry)
            places.append(span.places(groups, block_size // ratio))
            positions.append(groups * ratio)
        joined = np.concatenate(members)
        joined = np.where(joined < 0, ~joined + num_carried, joined)
        saved, saved_at = self._kept(ring)
        return PoolingPlan(
            carried=self._tensor(np.concatenate(carried)),
            members=self._tensor(joined),
            places=self._tensor(np.concatenate(places)),
            positions=self._tensor(np.concatenate(positions)),
            phases=self._tensor(self.host_positions % ratio),
            saved=saved,
            saved_at=saved_at,
        )

    def row_places(self, block_size: int) -> Tensor:
        """Flat pool index of the entry of every row, for ratio 1: int64 [T]."""
        parts = [s.places(np.arange(s.start, s.end), block_size) for s in self.spans]
        return self._tensor(np.concatenate(parts))

    def decode_entries(self, ratio: int, block_size: int) -> VisibleEntries:
        """Entries the decode rows may attend: j with (j + 1) * ratio <= position + 1."""
        assert self.decode is not None
        counts = np.array([span.end // ratio for span in self.decode.spans])
        most = int(counts.max())
        entries = np.arange(most)
        places = np.zeros((len(counts), most), np.int64)
        for row, span in enumerate(self.decode.spans):
            count = counts[row]
            places[row, :count] = span.places(entries[:count], block_size // ratio)
        visible = entries < counts[:, None]
        tensors = (self._tensor(places), self._tensor(visible), self._tensor(counts))
        return VisibleEntries(*tensors, most=most)

    def span_places(self, span: Span, ratio: int, block_size: int) -> Tensor:
        """Flat pool indices of all entries a prefill chunk's last row may attend: int64 [E]."""
        return self._tensor(span.places(np.arange(span.end // ratio), block_size // ratio))

    def _kept(self, ring: int) -> tuple[Tensor, Tensor]:
        """Last rows of every chunk, at most `ring` each, and their flat ring places."""
        rows: list[Ints] = []
        at: list[Ints] = []
        for span in self.spans:
            positions = np.arange(max(span.start, span.end - ring), span.end)
            rows.append(positions - span.start + span.row)
            at.append(span.slot * ring + positions % ring)
        return self._tensor(np.concatenate(rows)), self._tensor(np.concatenate(at))

    def _tensor(self, array: NDArray[np.generic]) -> Tensor:
        tensor = torch.from_numpy(array)
        return tensor if self.device.type == "cpu" else tensor.to(self.device)
