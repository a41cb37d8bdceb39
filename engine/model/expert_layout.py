"""How one expert lies in its run of bytes, and plain weights of kinds that no product kernel reads.

Every tensor that an expert's products need (codes, scales, zero points, padding) lies in its bytes, so
that none of them can be left behind when it moves. Stacks of matrices that kernels read are strided
views of a table of such runs (issue 7, engine.md A4).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.kernels.formats import KERNEL_KINDS, Matrix, dequantise
from engine.kernels.router import Routing

#: Tensors of an expert begin at multiples of this many bytes.
ALIGNMENT = 256


@dataclass(frozen=True, slots=True)
class _Part:
    """One tensor within an expert's bytes."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def view(self, table: Tensor) -> Tensor:
        """Give this tensor of every expert of a table [N, bytes]: [N, *shape], strided."""
        one = table[:, self.offset : self.offset + self.nbytes].view(self.dtype)
        found: Tensor = one.unflatten(1, self.shape)  # type: ignore[no-untyped-call]
        return found


class ExpertLayout:
    """How the matrices of one expert lie in its bytes.

    Attributes:
        nbytes: of one expert, a multiple of ALIGNMENT.

    Args:
        matrices: those of one expert, in the order in which they are asked for.
    """

    def __init__(self, matrices: Sequence[Matrix]) -> None:
        self._forms = tuple(
            m.of({n: t.new_empty(0) for n, t in m.tensors.items()}) for m in matrices
        )
        self._parts: list[dict[str, _Part]] = []
        self._gaps: list[slice] = []
        self.nbytes = 0
        for m in matrices:
            self._parts.append({name: self._place(t) for name, t in m.tensors.items()})

    def _place(self, tensor: Tensor) -> _Part:
        part = _Part(tensor.dtype, tuple(tensor.shape), self.nbytes)
        self.nbytes += -(-part.nbytes // ALIGNMENT) * ALIGNMENT
        self._gaps.append(slice(part.offset + part.nbytes, self.nbytes))
        return part

    def gaps_of(self, row: int) -> list[tuple[int, int]]:
        """Bytes of a row of a table that nobody needs if nobody reads the row, but for addresses.

        Kernels take the addresses of a table's tensors where row 0 has them, and those must be known
        to the driver: so row 0 keeps the first byte of each tensor.

        Returns:
            ranges (begin, end) of the table's bytes, in order.
        """
        first, end = row * self.nbytes, (row + 1) * self.nbytes
        if row > 0:
            return [(first, end)]
        kept = sorted(part.offset for parts in self._parts for part in parts.values())
        return [(at + 1, to) for at, to in itertools.pairwise([*kept, end])]

    def stacks(self, table: Tensor) -> tuple[Matrix, ...]:
        """Matrices of every row of a table uint8 [N, nbytes], stacked along N."""
        return tuple(
            form.of({name: part.view(table) for name, part in parts.items()})
            for form, parts in zip(self._forms, self._parts, strict=True)
        )

    def write(self, row: Tensor, matrices: Sequence[Matrix]) -> None:
        """Put one expert into its bytes uint8 [nbytes]; what lies between tensors becomes 0."""
        for gap in self._gaps:
            row[gap] = 0
        for stack, m in zip(self.stacks(row[None]), matrices, strict=True):
            held = m.tensors
            for name, tensor in stack.tensors.items():
                tensor[0].copy_(held[name])


def unfold(
    w13: Matrix, w2: Matrix, routing: Routing, dtype: torch.dtype
) -> tuple[Matrix, Matrix, Routing]:
    """Make plain weights of kinds that no product kernel reads, of touched experts where those are few.

    Capturable: how many are unfolded follows from shapes. Slower than kernels that read codes, by
    the writing and reading of the plain weights.

    Args:
        w13: [N, 2 * I, d].
        w2: [N, d, I].
        routing: whose tiles name experts or slots of these.
        dtype: of the plain weights.

    Returns:
        the same of plain weights; the tiles name their places.
    """
    if w13.kind in KERNEL_KINDS and w2.kind in KERNEL_KINDS:
        return w13, w2, routing
    slots = routing.tiles[:, 0]
    if len(slots) < w13.shape[0]:
        touched = slots.clamp(min=0).long()
        w13, w2 = w13.take(touched), w2.take(touched)
        tiles = routing.tiles.clone()
        places = torch.arange(len(slots), dtype=tiles.dtype, device=tiles.device)
        tiles[:, 0] = torch.where(slots < 0, slots, places)
        routing = replace(routing, tiles=tiles)
    return Matrix("plain", dequantise(w13, dtype)), Matrix("plain", dequantise(w2, dtype)), routing
