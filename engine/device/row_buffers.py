"""Static rows of a pass over prompts: what captured work reads in place of a pass's own `Rows`.

A pass is copied in and the rest of a *bucket* of rows pads: those rows are one sequence of slot 0 and
block 0 from position 0 on, so that they write where nobody reads and reach no expert. Sequences
beyond those of the pass are empty.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.rows import Rows

_OF_ROWS = ("positions", "seq")


class RowBuffers:
    """Static rows; all of the largest bucket pad until a pass is placed.

    Attributes:
        ids: int64 [N].
        positions: int32 [N].
        seq: int32 [N].
        slots: int32 [G], as starts, first and lengths (and floors).
        tables: int32 [G, NB].

    Args:
        num_rows: N, of the largest bucket.
        per_sequence: rows of a bucket for each sequence that it has room for.
        max_model_len: positions a request may have.
        block_size: of the pool.
        device: where they live.
        has_floors: whether windows of rows may be cut (engine.kernels.rows.Rows).
    """

    ids: Tensor
    positions: Tensor
    seq: Tensor
    slots: Tensor
    starts: Tensor
    first: Tensor
    lengths: Tensor
    floors: Tensor
    tables: Tensor

    def __init__(
        self,
        num_rows: int,
        *,
        per_sequence: int,
        max_model_len: int,
        block_size: int,
        device: torch.device,
        has_floors: bool = False,
    ) -> None:
        self._per_sequence = per_sequence
        self._max_model_len = max_model_len
        self._block_size = block_size
        floors = ("floors",) if has_floors else ()
        self._of_sequences = ("slots", "starts", "first", "lengths", *floors)
        most = self.most_sequences(num_rows) + 1
        self.ids = torch.zeros(num_rows, dtype=torch.int64, device=device)
        for name in (*_OF_ROWS, *self._of_sequences, "tables"):
            shape: tuple[int, ...] = (num_rows,) if name in _OF_ROWS else (most,)
            if name == "tables":
                # Kernels are compiled apart for strides of 16, which eager passes have.
                shape = (most, -(-max_model_len // block_size // 16) * 16)
            setattr(self, name, torch.zeros(shape, dtype=torch.int32, device=device))
        self._count = torch.arange(num_rows, dtype=torch.int32, device=device)
        self.pad(num_rows)

    def most_sequences(self, bucket: int) -> int:
        """Sequences that a bucket has room for, the one that pads not counted."""
        return max(1, bucket // self._per_sequence)

    @property
    def nbytes(self) -> int:
        """Bytes that are held."""
        return sum(tensor.nbytes for tensor in (*self.tensors().values(), self._count))

    def tensors(self) -> dict[str, Tensor]:
        """Everything that captured work reads or writes here, by name."""
        names = ("ids", *_OF_ROWS, *self._of_sequences, "tables")
        return {name: getattr(self, name) for name in names}

    def rows(self, bucket: int) -> Rows:
        """The first rows as a pass."""
        sequences = self.most_sequences(bucket) + 1
        return Rows(
            ids=self.ids[:bucket],
            **{name: getattr(self, name)[:bucket] for name in _OF_ROWS},
            **{name: getattr(self, name)[:sequences] for name in (*self._of_sequences, "tables")},
            block_size=self._block_size,
            max_length=bucket,
            max_end=self._max_model_len,
        )

    def pad(self, bucket: int) -> None:
        """Make all rows of a bucket pad: its sequences end where the bucket does."""
        for tensor in RowBuffers.tensors(self).values():
            tensor.zero_()
        self.positions.copy_(self._count)
        self.lengths[:1].fill_(bucket)

    def place_rows(self, bucket: int, rows: Rows) -> None:
        """Copy a pass in, and make the rest of a bucket pad.

        Args:
            bucket: rows that will run; at least those of the pass.
            rows: of the pass; no more sequences than the bucket has room for.
        """
        count, sequences = rows.num_rows, rows.num_sequences
        pads = self.most_sequences(bucket)  # the last sequence
        # Nothing of an earlier pass stays: a table or slot of another request, above all.
        for name in (*self._of_sequences, "tables"):
            getattr(self, name)[: pads + 1].zero_()
        for name in self._of_sequences:
            given: Tensor | None = getattr(rows, name)
            if given is not None:
                getattr(self, name)[:sequences].copy_(given)
        width = min(rows.tables.shape[1], self.tables.shape[1])  # theirs is padded, perhaps
        self.tables[:sequences, :width].copy_(rows.tables[:, :width])
        self.ids[:count].copy_(rows.ids)
        self.ids[count:bucket].zero_()
        self.positions[:count].copy_(rows.positions)
        self.seq[:count].copy_(rows.seq)
        self.positions[count:bucket].copy_(self._count[: bucket - count])
        self.seq[count:bucket].fill_(pads)
        self.first[pads : pads + 1].fill_(count)
        self.lengths[pads : pads + 1].fill_(bucket - count)
