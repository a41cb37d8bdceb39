"""Passes for kernel tests: rows of sequences over poisoned pools."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels.rows import Rows
from engine.plan.records import Form, record_of

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclass(frozen=True)
class Sequence:
    """`length` rows from position `start` on of the sequence in `slot`; slot 0 is padding."""

    slot: int
    start: int
    length: int


def rows_of(sequences: list[Sequence], *, block_size: int, num_blocks: int, seed: int = 0) -> Rows:
    """Lay sequences out one after the other, each with blocks of its own in random order."""
    g = torch.Generator().manual_seed(seed)
    free = (1 + torch.randperm(num_blocks - 1, generator=g)).tolist()
    needed = [-(-(s.start + s.length) // block_size) if s.slot else 0 for s in sequences]
    tables = torch.zeros(len(sequences), max(1, *needed), dtype=torch.int32)
    for i, count in enumerate(needed):
        for j in range(count):
            tables[i, j] = free.pop()
    positions = [p for s in sequences for p in range(s.start, s.start + s.length)]
    seq = [i for i, s in enumerate(sequences) for _ in range(s.length)]

    def ints(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=DEVICE)

    lengths = [s.length for s in sequences]
    return Rows(
        ids=torch.randint(0, 100, (len(seq),), generator=g).to(DEVICE),
        positions=ints(positions),
        seq=ints(seq),
        slots=ints([s.slot for s in sequences]),
        starts=ints([s.start for s in sequences]),
        first=ints([sum(lengths[:i]) for i in range(len(lengths))]),
        lengths=ints(lengths),
        tables=tables.to(DEVICE),
        block_size=block_size,
        max_length=max(lengths),
        max_end=max(s.start + s.length for s in sequences),
    )


def poisoned(*shape: int, dtype: torch.dtype, form: Form = "none", tail: int = 0) -> Tensor:
    """A pool whose first slot or block is finite and everything else NaN.

    shape: with the width of a row last. form: of the rows, and the rotary dimensions it keeps.
    """
    record = record_of(form, shape[-1], tail, dtype.itemsize)
    if record is not None:
        rows = torch.full((*shape[:-1], record.nbytes), 0xFF, dtype=torch.uint8, device=DEVICE)
        rows[0] = 0
        return rows
    pool = torch.full(shape, float("nan"), dtype=dtype, device=DEVICE)
    pool[0] = 7.0
    return pool


def noise(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Normal numbers, the same on every device."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)
