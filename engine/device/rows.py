"""Turns the chunks of a step into `Rows`, what engine.model.fast runs on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.kernels.rows import Rows
from engine.plan.step import Chunk


def build_rows(
    chunks: Sequence[Chunk], *, block_size: int, device: torch.device | str
) -> tuple[Rows, Tensor]:
    """Lay out chunks of distinct requests in batch order, for an eager pass.

    Args:
        chunks: at least one.
        block_size: of the pool.
        device: where the rows go.

    Returns:
        the rows, and int64 [L], the last rows of chunks that want logits.
    """
    lengths = np.array([len(chunk.token_ids) for chunk in chunks], np.int32)
    starts = np.array([chunk.start for chunk in chunks], np.int32)
    first = np.cumsum(lengths, dtype=np.int32) - lengths
    width = max(len(chunk.block_ids) for chunk in chunks)
    tables = np.zeros((len(chunks), width), np.int32)
    for row, chunk in enumerate(chunks):
        tables[row, : len(chunk.block_ids)] = chunk.block_ids
    seq = np.repeat(np.arange(len(chunks), dtype=np.int32), lengths)
    positions = np.arange(len(seq), dtype=np.int32) - first[seq] + starts[seq]
    ids = np.array([token for chunk in chunks for token in chunk.token_ids], np.int64)
    wanted = [end - 1 for end, c in zip(first + lengths, chunks, strict=True) if c.wants_logits]

    def put(array: object) -> Tensor:
        return torch.as_tensor(array).to(device)

    rows = Rows(
        ids=put(ids),
        positions=put(positions),
        seq=put(seq),
        slots=put(np.array([chunk.slot for chunk in chunks], np.int32)),
        starts=put(starts),
        first=put(first),
        lengths=put(lengths),
        tables=put(tables),
        block_size=block_size,
        max_length=int(lengths.max()),
        max_end=int((starts + lengths).max()),
        spans=tuple(zip(first.tolist(), lengths.tolist(), starts.tolist(), strict=True)),
    )
    return rows, put(np.array(wanted, np.int64))
