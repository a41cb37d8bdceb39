"""Passes both as kernels see them and as the reference model does."""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.device.batch import ForwardBatch
from engine.kernels.rows import Rows
from engine.plan.step import Chunk
from tests.engine.kernels.passes import DEVICE, Sequence, rows_of


@dataclass(frozen=True)
class Span:
    """`length` rows of a sequence from position `start` on."""

    start: int
    length: int


def make(
    spans: list[Span], block_size: int, *, blocks: int, max_end: int = 0
) -> tuple[Rows, ForwardBatch]:
    """Give span i slot i + 1 and blocks of its own.

    Args:
        spans: the sequences' parts in the pass.
        block_size: tokens per block.
        blocks: of the pool.
        max_end: host bound of the ends; the largest end by default.
    """
    sequences = [Sequence(i + 1, span.start, span.length) for i, span in enumerate(spans)]
    rows = rows_of(sequences, block_size=block_size, num_blocks=blocks)
    chunks = []
    for i, (span, first, table) in enumerate(
        zip(spans, rows.first.tolist(), rows.tables.tolist(), strict=True)
    ):
        own = table[: -(-(span.start + span.length) // block_size)]
        ids = rows.ids[first : first + span.length].tolist()
        chunks.append(Chunk(str(i), i + 1, span.start, tuple(ids), tuple(own), True))
    rows = replace(rows, max_end=max(max_end, rows.max_end))
    return rows, ForwardBatch.build(chunks, DEVICE)
