"""Turns the chunks of a step into the index tensors the model needs.

Everything that follows from positions, slots and blocks alone is worked out here, on the host,
once per step, and shared by all layers. Rows of a step are the tokens of its chunks, one chunk
after the other. Chunks of one token take the batched *decode* path, longer ones the *prefill* path.

Late layers may process fewer rows (engine.plan.replay): `ForwardBatch.narrow` gives what is left of
a batch from a stage on. A chunk loses rows at its front, or all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.plan.replay import Stage, Tail, stages
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
        chunk: number of the chunk in the step.
        is_single: whether the chunk had one row to begin with.
        skipped: rows the chunk has lost at its front.
        floor: lowest position that the rows' windows may reach; 0 where none reaches below it.
    """

    row: int
    length: int
    start: int
    slot: int
    blocks: Ints
    chunk: int
    is_single: bool
    skipped: int = 0
    floor: int = 0

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
        floors: int64 [B], lowest position each window may reach; None where none reaches below 0
            or its floor.
    """

    rows: Tensor
    slots: Tensor
    positions: Tensor
    spans: tuple[Span, ...]
    is_whole: bool
    floors: Tensor | None


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

    def select(self, rows: Tensor) -> VisibleEntries:
        """Give those of some decode rows int64 [B']."""
        parts = (self.places, self.visible, self.counts)
        places, visible, counts = (part.index_select(0, rows) for part in parts)
        return VisibleEntries(places, visible, counts, self.most)


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
        scored_rows: int64 [S], rows that score a prompt token, in chunk order.
        decode: the single-token chunks, None without any.
        prefill: the longer chunks.
        stages: where late layers process fewer rows.
    """

    def __init__(
        self,
        spans: tuple[Span, ...],
        host_ids: Ints,
        logit_rows: Ints,
        scored_rows: Ints,
        stages: tuple[Stage, ...],
        device: torch.device,
    ) -> None:
        self.device = device
        self.spans = spans
        self.stages = stages
        self.host_ids = host_ids  # int64 [T], for what is looked up on the host
        self.host_positions = _join([np.arange(s.start, s.end) for s in spans])
        self.token_ids = self._tensor(host_ids)
        self.positions = self._tensor(self.host_positions)
        self._host_logit_rows, self._host_scored_rows = logit_rows, scored_rows
        self.logit_rows = self._tensor(logit_rows)
        self.scored_rows = self._tensor(scored_rows)
        self.prefill = tuple(span for span in spans if not span.is_single)
        singles = tuple(span for span in spans if span.is_single)
        self.decode: DecodeRows | None = None
        if singles:
            floors = np.array([s.floor for s in singles])
            self.decode = DecodeRows(
                rows=self._tensor(np.array([s.row for s in singles])),
                slots=self._tensor(np.array([s.slot for s in singles])),
                positions=self._tensor(np.array([s.start for s in singles])),
                spans=singles,
                is_whole=not self.prefill,
                floors=self._tensor(floors) if floors.any() else None,
            )

    @classmethod
    def build(
        cls,
        chunks: Sequence[Chunk],
        device: torch.device | str = "cpu",
        tail: Tail | None = None,
    ) -> ForwardBatch:
        """Lay out chunks of distinct requests in batch order.

        Args:
            chunks: of the step.
            device: of the tensors.
            tail: of the model, None where it has none.

        Raises:
            ValueError: there is no chunk, one has no tokens, or one asks for a tail that does not
                exist or that leaves out a row whose logits are wanted.
        """
        if not chunks or not all(chunk.token_ids for chunk in chunks):
            raise ValueError("expected at least one chunk and one token in each")
        spans: list[Span] = []
        logit_rows: list[int] = []
        scored_rows: list[int] = []
        row = 0
        for number, chunk in enumerate(chunks):
            blocks, length = np.array(chunk.block_ids, dtype=np.int64), len(chunk.token_ids)
            single = length == 1
            spans.append(Span(row, length, chunk.start, chunk.slot, blocks, number, single))
            first = row + chunk.scored_from - chunk.start
            scored_rows += range(first, first + len(chunk.targets))
            row += length
            if chunk.wants_logits:
                logit_rows.append(row - 1)
        ids = [token for chunk in chunks for token in chunk.token_ids]
        return cls(
            tuple(spans),
            np.array(ids, dtype=np.int64),
            np.array(logit_rows, dtype=np.int64),
            np.array(scored_rows, dtype=np.int64),
            stages(tail, chunks),
            torch.device(device),
        )

    def narrow(self, stage: Stage) -> tuple[ForwardBatch, Tensor]:
        """Give the batch that the layers of a stage process, and its rows of this one int64 [T']."""
        spans: list[Span] = []
        kept: list[Ints] = []
        row = 0
        for span in self.spans:
            first = stage.firsts[span.chunk]
            length = span.end - first
            if not length:
                continue
            lost = first - span.start
            kept.append(np.arange(span.row + lost, span.row + span.length))
            spans.append(
                replace(
                    span,
                    row=row,
                    length=length,
                    start=first,
                    skipped=span.skipped + lost,
                    floor=stage.floors[span.chunk],
                )
            )
            row += length
        rows = _join(kept)
        batch = ForwardBatch(
            tuple(spans),
            self.host_ids[rows],
            np.searchsorted(rows, self._host_logit_rows),
            np.searchsorted(rows, self._host_scored_rows),
            self.stages,
            self.device,
        )
        return batch, self._tensor(rows)

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
        return self._tensor(_join(rows)), self._tensor(_join(at))

    def _tensor(self, array: NDArray[np.generic]) -> Tensor:
        tensor = torch.from_numpy(array)
        return tensor if self.device.type == "cpu" else tensor.to(self.device)


def _join(parts: list[Ints]) -> Ints:
    """Concatenate; nothing gives an empty array."""
    return np.concatenate([np.empty(0, np.int64), *parts])
