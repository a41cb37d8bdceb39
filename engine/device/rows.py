"""Turns the chunks of a step into `Rows`, what engine.model.fast runs on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.kernels.rows import Narrowing, Rows
from engine.plan.replay import Stage
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
    if torch.device(device).type == "cuda":  # kernels are compiled apart for strides of 16
        width = -(-width // 16) * 16
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
        max_end=int((starts + lengths).max()),
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
    found: list[Narrowing] = []
    firsts = starts  # of each chunk, as the stage before has it
    for stage in stages:
        before, base = firsts, np.cumsum(ends - firsts) - (ends - firsts)
        firsts = np.array(stage.firsts, np.int64)
        lengths = ends - firsts
        left = np.flatnonzero(lengths)
        offsets = [base[c] + np.arange(firsts[c], ends[c]) - before[c] for c in left]
        positions = [np.arange(firsts[c], ends[c]) for c in left]
        counts = lengths[left].astype(np.int32)
        at = np.cumsum(counts, dtype=np.int32) - counts
        small = {
            "positions": np.concatenate((*positions, firsts[:0])).astype(np.int32),
            "seq": np.repeat(np.arange(len(left), dtype=np.int32), counts),
            "starts": firsts[left].astype(np.int32),
            "first": at,
            "lengths": counts,
            "floors": np.array(stage.floors, np.int32)[left],
        }
        large = {"kept": np.concatenate((*offsets, firsts[:0])), "left": left.astype(np.int64)}
        placed = _put(small, device) | _put(large, device)
        kept, chosen = placed.pop("kept"), placed.pop("left")
        narrowed = Rows(
            **placed,
            ids=(found[-1].rows if found else rows).ids.index_select(0, kept),
            slots=rows.slots.index_select(0, chosen),
            tables=rows.tables.index_select(0, chosen),
            block_size=rows.block_size,
            max_length=int(counts.max(initial=0)),
            max_end=rows.max_end,
            spans=tuple(zip(at.tolist(), counts.tolist(), firsts[left].tolist(), strict=True)),
        )
        found.append(Narrowing(stage.layer, kept, narrowed))
    last = np.cumsum(ends - firsts) - 1
    wanted = [last[i] for i, c in enumerate(chunks) if c.wants_logits and ends[i] > firsts[i]]
    return tuple(found), _put({"wanted": np.array(wanted, np.int64)}, device)["wanted"]


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
