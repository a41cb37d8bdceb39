"""Turns the chunks of a step into `Rows`, what engine.model.fast runs on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.kernels.rows import Narrowing, Rows
from engine.plan.replay import Stage
from engine.plan.step import Chunk

Ints = NDArray[np.int64]
#: Smallest class of ends.
LEAST_END = 256


def end_class(end: int) -> int:
    """Round the end of a pass up to one of few: what is chosen by it is compiled for each.

    Entries beyond those of a sequence cost a program that ends at once.
    """
    return max(LEAST_END, 1 << (end - 1).bit_length())


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
    max_end = int((starts + lengths).max())
    if torch.device(device).type == "cuda":  # kernels are compiled apart for strides of 16
        max_end = end_class(max_end)
        width = -(-max(width, -(-max_end // block_size)) // 16) * 16  # of all that it may name
    tables = np.zeros((len(chunks), width), np.int32)
    for row, chunk in enumerate(chunks):
        tables[row, : len(chunk.block_ids)] = chunk.block_ids
    seq = np.repeat(np.arange(len(chunks), dtype=np.int32), lengths)
    positions = np.arange(len(seq), dtype=np.int32) - first[seq] + starts[seq]
    ids = np.array([token for chunk in chunks for token in chunk.token_ids], np.int64)
    wanted = [end - 1 for end, c in zip(first + lengths, chunks, strict=True) if c.wants_logits]

    small = {
        "positions": positions,
        "seq": seq,
        "slots": np.array([chunk.slot for chunk in chunks], np.int32),
        "starts": starts,
        "first": first,
        "lengths": lengths,
        "tables": tables,
    }
    large = {"ids": ids, "wanted": np.array(wanted, np.int64)}
    found = _put(small, torch.device(device)) | _put(large, torch.device(device))
    logit_rows = found.pop("wanted")
    rows = Rows(
        **found,
        block_size=block_size,
        max_length=int(lengths.max()),
        max_end=max_end,
        spans=tuple(zip(first.tolist(), lengths.tolist(), starts.tolist(), strict=True)),
    )
    return rows, logit_rows


def build_narrowings(
    rows: Rows, chunks: Sequence[Chunk], stages: Sequence[Stage]
) -> tuple[tuple[Narrowing, ...], Tensor]:
    """Lay out what later layers process of a pass, stage by stage.

    Args:
        rows: of the pass, from `build_rows`.
        chunks: of the pass.
        stages: from engine.plan.replay.stages.

    Returns:
        the narrowings, and int64 [L], the last rows of chunks that want logits, as the last stage
        numbers them (a chunk without a row there wants none).
    """
    device = rows.positions.device
    starts = np.array([chunk.start for chunk in chunks], np.int64)
    ends = np.array([chunk.end for chunk in chunks], np.int64)
    cuts: list[_Cut] = []
    firsts = starts  # of each chunk, as the stage before has it
    for stage in stages:
        cuts.append(_cut(stage, firsts, ends, chunks, rows.tables.shape[1]))
        firsts = np.array(stage.firsts, np.int64)
    last = np.cumsum(ends - firsts) - 1
    wanted = [last[i] for i, c in enumerate(chunks) if c.wants_logits and ends[i] > firsts[i]]
    # All stages in one transfer: late layers may have one each.
    small = {
        f"{name}.{i}": array for i, cut in enumerate(cuts) for name, array in cut.small.items()
    }
    large = {
        f"{name}.{i}": array for i, cut in enumerate(cuts) for name, array in cut.large.items()
    }
    placed = _put({"": starts[:0].astype(np.int32), **small}, device)
    placed |= _put({"wanted": np.array(wanted, np.int64), **large}, device)
    found = []
    for i, (stage, cut) in enumerate(zip(stages, cuts, strict=True)):
        own = {name: placed[f"{name}.{i}"] for name in (*cut.small, *cut.large)}
        kept = own.pop("kept")
        narrowed = Rows(
            **own,
            block_size=rows.block_size,
            max_length=int(cut.small["lengths"].max(initial=0)),
            max_end=rows.max_end,
            spans=cut.spans,
        )
        found.append(Narrowing(stage.layer, kept, narrowed, cut.run))
    return tuple(found), placed["wanted"]


@dataclass(frozen=True, slots=True)
class _Cut:
    """A stage's rows, laid out on the host: int32 arrays, int64 arrays, and two of Rows' fields."""

    small: dict[str, NDArray[Any]]
    large: dict[str, NDArray[Any]]
    spans: tuple[tuple[int, int, int], ...]
    run: tuple[int, int] | None


def _cut(stage: Stage, before: Ints, ends: Ints, chunks: Sequence[Chunk], table_width: int) -> _Cut:
    """Lay out what a stage leaves of chunks whose rows begin at positions `before`."""
    base = np.cumsum(ends - before) - (ends - before)
    firsts = np.array(stage.firsts, np.int64)
    lengths = ends - firsts
    left: list[int] = np.flatnonzero(lengths).tolist()
    counts = lengths[left].astype(np.int32)
    at = np.cumsum(counts, dtype=np.int32) - counts
    kept = np.concatenate((firsts[:0], *(base[c] + np.arange(firsts[c], ends[c]) - before[c] for c in left)))  # fmt: skip
    tables = np.zeros((len(left), table_width), np.int32)
    for row, c in enumerate(left):
        tables[row, : len(chunks[c].block_ids)] = chunks[c].block_ids
    positions = np.concatenate((firsts[:0], *(np.arange(firsts[c], ends[c]) for c in left)))
    small = {
        "positions": positions.astype(np.int32),
        "seq": np.repeat(np.arange(len(left), dtype=np.int32), counts),
        "slots": np.array([chunks[c].slot for c in left], np.int32),
        "starts": firsts[left].astype(np.int32),
        "first": at,
        "lengths": counts,
        "tables": tables,
        "floors": np.array(stage.floors, np.int32)[left],
    }
    ids = [t for c in left for t in chunks[c].token_ids[firsts[c] - chunks[c].start :]]
    together = len(kept) and kept[-1] - kept[0] + 1 == len(kept)
    return _Cut(
        small,
        {"ids": np.array(ids, np.int64), "kept": kept},
        tuple(zip(at.tolist(), counts.tolist(), firsts[left].tolist(), strict=True)),
        (int(kept[0]), int(kept[-1]) + 1) if together else None,
    )


def _put(arrays: dict[str, NDArray[Any]], device: torch.device) -> dict[str, Tensor]:
    """Copy arrays of one type to a device, in one transfer that nothing waits for.

    A copy from ordinary memory would wait for all work the device has been given. Each array begins
    at a multiple of 16 bytes, since kernels are compiled for aligned and other pointers apart.
    """
    (dtype,) = {array.dtype for array in arrays.values()}
    step = 16 // dtype.itemsize
    places, end = {}, 0
    for name, array in arrays.items():
        places[name] = end
        end += -(-array.size // step) * step
    joined = np.zeros(end, dtype)
    for name, array in arrays.items():
        joined[places[name] : places[name] + array.size] = array.reshape(-1)
    host = torch.from_numpy(joined)
    there = host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host
    return {
        name: there[places[name] : places[name] + array.size].view(array.shape)
        for name, array in arrays.items()
    }
