"""What kernels know of a pass: its rows and the sequences they belong to, all on the device.

A pass has T rows (tokens) of G sequences; the rows of a sequence are consecutive positions and lie
together. Numbers that decide shapes or launches are host numbers, so that the choice made when a
graph is captured is the choice made when it is replayed.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of one pass.

    Padding rows are sequences of slot 0, start 0, length 1 and a table of zeros: they may read and
    write the dummy slot and block, which stay finite, and reach no expert.

    Args:
        ids: int64 [T], token ids.
        positions: int32 [T].
        seq: int32 [T], sequence of each row.
        slots: int32 [G], pool slot of each sequence.
        starts: int32 [G], position of its first row in this pass.
        first: int32 [G], index of its first row.
        lengths: int32 [G], rows it has in this pass.
        tables: int32 [G, NB], block table.
        block_size: tokens a block covers.
        max_length: most rows of a sequence in this pass; 1 for pure decode.
        max_end: no sequence ends this pass beyond this position (an upper bound).
        spans: (first, length, start) of each sequence as host numbers; empty in a pass that is
            captured, where the device alone knows them.
        floors: int32 [G], lowest position that windows of a sequence's rows may reach; None for 0.
            What lies below in a ring is nobody's (engine.plan.replay).
    """

    ids: Tensor
    positions: Tensor
    seq: Tensor
    slots: Tensor
    starts: Tensor
    first: Tensor
    lengths: Tensor
    tables: Tensor
    block_size: int
    max_length: int
    max_end: int
    spans: tuple[tuple[int, int, int], ...] = ()
    floors: Tensor | None = None

    @property
    def num_rows(self) -> int:
        """T."""
        return self.ids.shape[0]

    @property
    def num_sequences(self) -> int:
        """G."""
        return self.slots.shape[0]

    @property
    def is_decode(self) -> bool:
        """Whether every sequence has one row, so that row g is sequence g."""
        return self.max_length == 1


@dataclass(frozen=True, slots=True)
class Narrowing:
    """From one layer on, a pass has fewer rows (engine.plan.replay).

    Args:
        layer: the first layer with these rows.
        kept: int64 [T'], which rows of the pass before are left.
        rows: they; T' may be 0, then the pass ends there.
        run: the first of them and the one after the last, where they lie together.
    """

    layer: int
    kept: Tensor
    rows: Rows
    run: tuple[int, int] | None = None

    def take(self, of_rows: Tensor) -> Tensor:
        """Give what is left of a tensor by row; a view where the rows lie together."""
        if self.run is not None:
            return of_rows[self.run[0] : self.run[1]]
        return of_rows.index_select(0, self.kept)
